"""Comparisons, masks, index arrays, new tensors, and torch's names of arguments: values, finite differences, torch."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from any_order import same_in_any_order
from helpers import random_array, refuses

import minidl as ml
from minidl import ops
from minidl.nn import functional
from minidl.runtime.executors import SequentialExecutor
from minidl.testing.checks import gradcheck, gradients

COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
MASK = np.arange(12).reshape(3, 4) % 3 == 0


# ---------------------------------------------------------------------------------------------------------- comparisons
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("compare", COMPARISONS)
def test_comparisons_are_numpys(compare, dtype):
    a, b = np.array([[1, 2, 3], [3, 2, 1]], dtype), np.array([2, 2, 2], dtype)
    for left, right in ((a, b), (a, 2), (a, 2.0), (a, np.float64(2)), (a, a)):
        x = ml.array(left)
        for found in (compare(x, right), compare(x, ml.array(right) if isinstance(right, np.ndarray) else right)):
            assert (found.dtype, found.requires_grad) == ("bool", False)
            np.testing.assert_array_equal(found.numpy(), compare(left, right))
    np.testing.assert_array_equal(compare(b, ml.array(a)).numpy(), compare(b, a))
    np.testing.assert_array_equal(compare(2, ml.array(a)).numpy(), compare(2, a))


def test_whole_numbers_are_compared_with_fractions_by_nobody():
    with pytest.raises(ml.ShapeError, match="types differ: int64, float64; convert one with astype"):
        assert ml.array(np.arange(3)) > 0.5


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e30, 2**63, np.nan])
def test_numbers_beyond_a_type_are_not_compared_in_it(value):
    with pytest.raises(ml.ShapeError, match="types differ: int64"):
        operator.lt(ml.array(np.array([1, 2])), value)
    with pytest.raises(ml.ShapeError, match="types differ: bool, int64"):
        operator.eq(ml.array(MASK), 2)
    assert (ml.array(MASK) == 1).numpy().tolist() == MASK.tolist()


def test_any_and_all_of_numbers_are_those_that_are_not_zero():
    for x in (np.array([1, -1, 0]), np.array([0.5, -0.5, 0.25], "f"), np.zeros(3), np.array([np.nan, 0, 0])):
        assert bool(ml.array(x).any()) == x.any()
        assert bool(ml.array(x).all()) == x.all()


def test_tensors_are_still_keys_and_members():
    x, y = ml.array(np.ones(3)), ml.array(np.ones(3))
    assert len({x: 1, y: 2}) == 2
    assert x != None  # noqa: E711
    assert (x == "text") is False


def test_the_truth_of_many_values_is_not_one_value():
    x = ml.array(np.array([1.0, 0.0]))
    with pytest.raises(ValueError, match=r"the truth of a tensor of shape \(2,\) is not one value; use .*\.all\(\)"):
        assert x == x
    with pytest.raises(ValueError, match="the truth"):
        assert 0 < x < 1
    assert (x == x).all()
    assert not (x > 1).any()
    assert int(x[0]) == 1


def test_logic_on_masks():
    x = ml.array(np.arange(6.0))
    found = [(x > 1) & (x < 4), (x < 1) | (x > 4), (x > 1) ^ (x > 3), ~(x > 2), (x > 1) & np.array([True] * 6)]
    a = np.arange(6)
    wanted = [(a > 1) & (a < 4), (a < 1) | (a > 4), (a > 1) ^ (a > 3), ~(a > 2), a > 1]
    for f, w in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(f.numpy(), w)
    with pytest.raises(ml.ShapeError, match="needs masks .bool., not float64; x != 0 makes one"):
        assert ~x


def test_a_recorded_step_compares_at_each_run():
    w = ml.Parameter(np.ones(3))

    def step(x):
        ops.where(x > 0, w * x, 0.0).sum().backward()
        return w.grad, (x == 1).sum()

    first, second = np.array([1.0, -1.0, 2.0]), np.array([-1.0, 1.0, 1.0])
    run = SequentialExecutor(ml.record(step, first))
    for x in (first, second, first):
        grad, ones = run(x)
        np.testing.assert_array_equal(grad.numpy(), np.maximum(x, 0))
        assert ones.numpy() == (x == 1).sum()


# ---------------------------------------------------------------------------------------------------------------- where
@pytest.mark.parametrize(("a", "b"), [((3, 4), (3, 4)), ((4,), (3, 1)), ((), (3, 4)), ((2, 3, 4), (4,))])
def test_where(a, b):
    gradcheck(lambda a, b: ops.where(ml.array(MASK), a, b), random_array(a, 1), random_array(b, 2))
    gradcheck(lambda a: ops.where(MASK, a, 0.5), random_array(a, 1))
    gradcheck(lambda a: a.masked_fill(ml.array(MASK), 1), random_array((3, 4), 1))


def test_what_is_not_chosen_may_be_infinite():
    """Nothing is multiplied by a mask."""
    x = ml.Parameter(np.array([0.0, 4.0]))
    y = ops.where(x > 0, ops.log(x), 0.0)
    assert y.numpy().tolist() == [0.0, np.log(4.0)]
    filled = x.masked_fill(x == 0, -np.inf).softmax()
    assert filled.numpy().tolist() == [0, 1]
    filled.sum().backward()
    assert np.isfinite(x.grad.numpy()).all()


# ------------------------------------------------------------------------------------------------------------- indexing
TWO, ROWS = np.array([2, 0]), np.array([[0, 2, 2], [1, 0, 0]])
INDICES = {"rows": TWO, "list": [0, -1, 0], "two axes of them": ROWS, "columns": (slice(None), TWO),
           "pairs": (TWO, np.array([1, 3])), "outer": (TWO[:, None], np.array([1, 3, 3])),
           "a number and an array": (1, TWO), "an array and a number": (TWO, 1), "cut": (TWO, slice(1, 3)),
           "last": (..., np.array([1, 0, 0])), "mask": MASK, "mask of rows": np.array([True, False, True]),
           "mask of columns": (slice(None), np.array([True, False, True, True])), "new axis": (None, slice(1, 2)),
           "new axes": (slice(None), None, 1, None), "new last": (..., None)}


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 2)])
@pytest.mark.parametrize("item", INDICES.values(), ids=INDICES)
def test_indexing_is_numpys(item, shape):
    x = random_array(shape, 1)
    np.testing.assert_array_equal(ml.array(x)[item].numpy(), x[item])
    gradcheck(lambda t: t[item], x)
    tensors = tuple(ml.array(n) if isinstance(n, np.ndarray) else n
                    for n in (item if isinstance(item, tuple) else (item,)))
    np.testing.assert_array_equal(ml.array(x)[tensors].numpy(), x[item])


def test_whole_numbers_are_indexed_too():
    labels = ml.array(np.array([5, 6, 7]))
    assert labels[np.array([2, 0])].numpy().tolist() == [7, 5]
    assert labels[labels > 5].numpy().tolist() == [6, 7]


def test_indices_of_a_recorded_step_are_those_of_each_run():
    w = ml.Parameter(random_array((3, 4), 1))

    def step(rows, columns):
        picked = w[rows, columns]
        picked.sum().backward()
        return picked, w.grad

    run = SequentialExecutor(ml.record(step, TWO, TWO))
    for rows, columns in ((TWO, TWO), (np.array([1, 1]), np.array([3, 3])), (TWO, TWO)):
        picked, grad = run(rows, columns)
        np.testing.assert_array_equal(picked.numpy(), w.numpy()[rows, columns])
        wanted = np.zeros((3, 4))
        np.add.at(wanted, (rows, columns), 1.0)
        np.testing.assert_array_equal(grad.numpy(), wanted)


@pytest.mark.parametrize("pick", [
    lambda w, i: w[i], lambda w, i: w[i, i], lambda w, i: w[:, i], lambda w, i: w.gather(1, i.reshape(3, 1)),
    lambda w, i: w[i.astype("int64"), i],
    lambda w, i: functional.one_hot(i, 3).astype("float64") + w.sum(),
])
def test_indices_of_a_recorded_step_are_checked_before_it_runs(pick):
    w, fine = ml.Parameter(np.ones((3, 3))), np.array([0, 1, 2])

    def step(index):
        loss = pick(w, index).sum()
        loss.backward()
        return loss

    run = SequentialExecutor(ml.record(step, fine))
    run(fine)
    for bad in (-1, 3, 2**40):
        with pytest.raises(ValueError, match=rf"index {bad} \(element 1\) is out of range: there are rows 0 to 2"):
            run(np.array([0, bad, 2]))
        with pytest.raises(IndexError, match=f"index {bad} is out of range for an axis of length 3"):
            step(ml.array(np.array([0, bad, 2])))


def test_indexing_refuses_in_one_line():
    x = ml.array(np.ones((2, 3, 4)))
    for item, message in ((([5],), "index 5 is out of range for an axis of length 2"),
                          ((TWO.astype("f"),), "an index array has whole numbers or bools, not float32"),
                          ((0, slice(None), [1]), "must be of neighbouring axes"),
                          (([0], None), "cannot also add an axis"), (([0], 0, 0, 0), "does not fit shape"),
                          ((True,), "an index is a bool"), ((np.array(False), 0), "an index is a bool"),
                          ((np.array(0.7),), "an index array has whole numbers"), (([-3],), "index -3 is out of range"),
                          ((np.ones(1, bool),), r"mask of shape \(1,\) does not fit shape \(2, 3, 4\) from axis 0"),
                          ((..., np.ones((3, 3), bool)), r"\(3, 3\) does not fit shape \(2, 3, 4\) from axis 1 on"),
                          ((ml.array(np.array([-1])),), "an index in a tensor counts from 0")):
        with pytest.raises((ml.ShapeError, IndexError), match=message) as caught:
            x[item]
        assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="a tensor is not changed in place: x = where"):
        x[0] = 1
    with pytest.raises(RuntimeError, match="x.mask. has as many elements as the mask has true ones"):
        ml.record(lambda t: t[t > 0], np.ones(3))


# ------------------------------------------------------------------------------------------------------------- extremes
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 2), (5,), (1, 1)])
def test_argmax_and_argmin_are_numpys(shape):
    x = np.round(random_array(shape, 2))
    t = ml.array(x)
    for axis in (None, *range(-len(shape), len(shape))):
        for keep in (False, True):
            np.testing.assert_array_equal(t.argmax(axis, keep).numpy(), x.argmax(axis, keepdims=keep))
            np.testing.assert_array_equal(t.argmin(dim=axis, keepdim=keep).numpy(), x.argmin(axis, keepdims=keep))
    np.testing.assert_array_equal(ops.amin(t, 0).numpy(), x.min(0))
    assert ml.array(np.array([1.0, np.nan, 5.0])).argmax().item() == 1


def test_the_accuracy_of_a_classifier():
    logits, labels = ml.array(random_array((8, 3), 1)), ml.array(np.arange(8) % 3)
    right = (logits.argmax(dim=1) == labels)
    wanted = (logits.numpy().argmax(1) == np.arange(8) % 3)
    assert right.sum().item() == wanted.sum()
    assert right.float().mean().item() == pytest.approx(wanted.mean())
    with pytest.raises(ml.ShapeError, match="needs float32 or float64, not bool"):
        right.mean()


# ----------------------------------------------------------------------------------------------------- shapes and casts
def test_two_numbers_exchange_axes_and_a_tuple_is_an_order():
    x = ml.array(random_array((2, 3)))
    assert x.transpose(0, 1).shape == x.transpose(1, 0).shape == (3, 2)
    assert x.transpose((0, 1)).shape == (2, 3)


def test_shapes_that_do_not_fit_are_refused():
    x = ml.array(np.ones((2, 3)))
    refuses((lambda: x.expand(3), "does not expand to"), (lambda: x.expand(-1, 2, 3), "does not expand"),
                          (lambda: x.split([3, -1]), "do not add up"), (lambda: (-2) ** x, "base must be above 0"))


def test_numpys_whole_numbers_are_whole_numbers():
    x, two = ml.array(np.ones((2, 3))), np.int64(2)
    assert x.reshape(np.int64(6)).shape == (6,)
    assert x.sum(np.int64(1)).shape == (2,)
    assert len(x.split(two, dim=1)) == 2
    assert ops.arange(two).dtype == "int64"
    assert all(type(n) is int for n in x.reshape(two, -1).shape)


def test_casts():
    x = ml.array(np.array([1.5, 0.0, -2.5], "float32"))
    assert [x.long().tolist(), x.bool().tolist(), (x > 0).float().dtype] == [[1, 0, -2], [True, False, True], "float32"]
    assert x.double().dtype == x.astype(np.float64).dtype == "float64"
    assert x.float() is x
    with pytest.raises(ml.ShapeError, match="a tensor holds numbers"):
        x.astype("complex64")
    gradcheck(lambda t: t.float().double() * 0.0 + t, random_array((3,), 1))


def test_one_argument_has_one_name():
    with pytest.raises(TypeError, match="total: dim and axis are two names of one argument"):
        ml.array(np.ones(3)).sum(axis=0, dim=0)
    with pytest.raises(TypeError, match=r"x.max\(0\) means one thing in NumPy and another in torch"):
        ml.array(np.ones(3)).max(0)


# ---------------------------------------------------------------------------------------------------------- new tensors
def test_new_tensors():
    for t, a in ((ml.zeros(2, 3), np.zeros((2, 3), "f")), (ml.ones((2,), dtype="float64"), np.ones(2)),
                 (ml.full((2,), 7, "int64"), np.full(2, 7)), (ml.arange(3), np.arange(3)),
                 (ml.zeros(()), np.zeros((), "f")), (ml.full((2,), np.int64(7)), np.full(2, 7)),
                 (ml.full((1,), np.bool_(1)), np.ones(1, bool)), (ml.full((1,), np.float64(2)), np.full(1, 2, "f")),
                 (ml.full((2,), ml.array(7)), np.full(2, 7)), (ml.full((1,), True), np.ones(1, bool)),
                 (ml.arange(1, 2, 0.25), np.arange(1, 2, 0.25, "f")), (ml.ones_like(ml.arange(2)), np.ones(2, int)),
                 (ml.zeros_like(ml.arange(2), "float32"), np.zeros(2, "f"))):
        assert t.dtype == str(a.dtype)
        np.testing.assert_array_equal(t.numpy(), a)


def test_random_tensors_follow_from_the_seed():
    ml.seed(3)
    first = [ml.randn(4, 5), ml.randn(4, 5), ml.rand(1000)]
    ml.seed(3)
    weight = ml.nn.Linear(2, 2).weight.numpy().copy()
    again = [ml.randn(4, 5), ml.randn(4, 5), ml.rand(1000)]
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert (first[0] != first[1]).all()
    assert 0 <= first[2].numpy().min() < 0.1 < 0.9 < first[2].numpy().max() < 1
    ml.seed(3)
    ml.randn(2)
    np.testing.assert_array_equal(ml.nn.Linear(2, 2).weight.numpy(), weight)  # weights count on their own
    with pytest.raises(RuntimeError, match="randperm in a recorded step would give the same order each time"):
        ml.record(lambda x: x + ml.randperm(3).float(), np.zeros(3, "f"))


def test_draws_have_their_distributions():
    ml.seed(1)
    for dtype in ("float32", "float64"):
        normal, uniform = (draw(300, 301, dtype=dtype).numpy().astype("f8") for draw in (ml.randn, ml.rand))
        for k, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
            assert abs((normal**k).mean() - moment) < 0.1
            assert abs((uniform**k).mean() - 1 / (k + 1)) < 0.01
        assert abs(np.corrcoef(normal[:, :-1].ravel(), normal[:, 1:].ravel())[0, 1]) < 0.02
    assert np.bincount(ml.randint(-2, 3, (50, 1000)).numpy().ravel() + 2).min() > 9_700


def test_a_batch_draws_what_its_micro_batches_draw():
    def parts(sizes):
        ml.seed(4)
        found, first = [], 0
        for number, size in enumerate(sizes):
            with ml.micro_batch(number, first_sample=first):
                found.append([ml.randn(size, 3).numpy(), ml.rand(size).numpy(), ml.randint(9, (size, 2)).numpy()])
            first += size
        return [np.concatenate(each) for each in zip(*found, strict=True)]

    for whole, cut in zip(parts([8]), parts([4, 4]), strict=True):
        np.testing.assert_array_equal(whole, cut)


def test_a_step_that_draws_is_recorded_and_draws_anew_each_time():
    """The noise of a variational autoencoder, under every schedule."""
    def made():
        ml.seed(5)
        down, up = ml.nn.Linear(6, 4), ml.nn.Linear(2, 6)
        opt = ml.optim.SGD([*down.parameters(), *up.parameters()], lr=0.1)

        def step(x):
            both = down(x)
            mean, log = both[:, :2], both[:, 2:]
            code = mean + (log * 0.5).exp() * ml.randn_like(mean)
            loss = ((up(ml.ops.dropout(code, 0.2)) - x) ** 2).mean() + (mean**2 + log.exp() - log).mean() * 0.1
            loss.backward()
            opt.step()
            return loss

        return step, opt.parameters

    same_in_any_order(made, [[random_array((8, 6), 2).astype("f")]] * 4, [0])


def test_choices_make_output_or_weight_gradients():
    """Toward data the output gradient task, toward parameters the weight gradient task."""
    w = ml.Parameter(random_array((3, 4)))
    graph = ml.record(lambda x: ops.where(x > 0, ops.tanh(w), x).sum().backward(), random_array((3, 4), 1))
    kinds = {(t.kind.name, t.unit) for t in graph}
    assert ("W", 2) in kinds
    assert not any(k == "O" and u == 2 for k, u in kinds)
    found = [gradients(lambda t: t[TWO], [random_array((3, 4))], np.ones((2, 4)), leaf=leaf, strided=False)
             for leaf in (True, False)]
    np.testing.assert_array_equal(*[f[0] for f in found])


def test_masks_are_joined_and_turned():
    def step(x):
        m = x > 0
        return (ml.cat([m, m.T.reshape(2, 3)]), m.roll(1, 0), m.tile(2, 2),
                m.scatter(0, ml.array([[1, 0, 1]]), m[:1]), functional.pad(m, (1, 0)))

    x = np.array([[1.0, -1.0, 2.0], [-1.0, -2.0, 3.0]])
    m = x > 0
    wanted = [np.concatenate([m, m.T.reshape(2, 3)]), m[::-1], np.tile(m, (2, 2)),
              np.array([[True, False, True], [True, False, True]]), np.pad(m, ((0, 0), (1, 0)))]
    for found in (step(ml.array(x)), ml.SequentialExecutor(ml.record(step, x))(x)):
        for mine, other in zip(found, wanted, strict=True):
            assert mine.numpy().dtype == bool
            np.testing.assert_array_equal(mine.numpy(), other)
