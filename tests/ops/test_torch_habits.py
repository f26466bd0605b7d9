"""What a torch user writes by habit works as in torch, or says in one line what to write."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from any_order import trained
from helpers import random_array, refuses, torch_or_skip

import minidl as ml
from minidl import nn, optim
from minidl.runtime.executors import SequentialExecutor


def test_methods_are_functions_too():
    for name in ml._METHODS:
        assert getattr(ml, name).__name__ == name
    assert ml.exp(np.zeros(2)).tolist() == [1, 1]


def test_variances_say_what_they_divide_by():
    values = random_array((3, 4), 1)
    for name in ("var", "std"):
        for dim in (None, 0, -1, (0, 1)):
            found = getattr(ml.array(values), name)(dim, correction=0).numpy()
            np.testing.assert_allclose(found, getattr(values, name)(dim), rtol=1e-12)
        with pytest.raises(TypeError, match="give correction=0 .* as in NumPy, correction=1 .* as in torch"):
            getattr(ml.array(values), name)(0)
    with pytest.raises(ValueError, match="1 elements are too few"):
        ml.ones(1).var(correction=1)


def test_a_parameter_is_not_replaced_by_an_assignment_in_place():
    """`p -= lr * p.grad` in a loop would change nothing."""
    w = ml.Parameter(np.ones(3))
    (w * w).sum().backward()
    with ml.no_grad(), pytest.raises(TypeError, match="an optimizer updates parameters, parameter.assign"):
        w -= 0.1 * w.grad
    with pytest.raises(TypeError):
        w *= 2
    x = w * 1.0
    x += 1  # other tensors may get a new value under their name
    assert x.tolist() == [2, 2, 2]


def test_a_tensor_is_no_exponent():
    """Its gradient would be missing."""
    x = ml.Parameter(np.array(2.0))
    with pytest.raises(TypeError, match="power: the exponent is a tensor; it must be a number"):
        x**x


def test_gradients_toward_an_input_add_up():
    x = ml.array(np.ones(2)).requires_grad_()
    for _ in range(2):
        (x * 3.0).sum().backward()
    assert x.grad.tolist() == [6, 6]
    with pytest.raises(RuntimeError, match="that no op has made"):
        (x * 2.0).requires_grad_()
    with pytest.raises(RuntimeError, match="only a float32 or float64 tensor"):
        ml.arange(3).requires_grad_()


@pytest.mark.parametrize("of", ["optimizer", "model"])
@pytest.mark.parametrize("recorded", [False, True])
def test_zero_grad_where_torch_has_it(of, recorded):
    def make(zero):
        ml.seed(0)
        model = nn.Linear(3, 2)
        opt = optim.SGD(model.parameters(), 0.1, 0.9)

        def step(x):
            if zero:
                (opt if of == "optimizer" else model).zero_grad()
            loss = (model(x) ** 2).sum()
            loss.backward()
            opt.step()
            return loss

        return step, model.parameters()

    batches, run = [[random_array((4, 3), 1, "float32")]] * 3, SequentialExecutor if recorded else None
    assert trained(partial(make, True), batches, run) == trained(partial(make, False), batches, run)


def test_zero_grad_drops_what_was_added_up():
    w = ml.Parameter(np.ones(2))
    opt = optim.SGD([w], 1.0)
    (w * 3.0).sum().backward()
    opt.zero_grad()
    assert w.grad is None
    w.sum().backward()
    opt.step()
    assert w.tolist() == [0, 0]


def test_recording_a_step_that_drops_gradients_drops_none():
    w = ml.Parameter(np.ones(2))
    opt = optim.SGD([w], 1.0)
    (w * 3.0).sum().backward()

    def step(x):
        opt.zero_grad()
        (w * x).sum().backward()
        opt.step()

    ml.record(step, np.ones(2))
    assert w.grad.tolist() == [3, 3]


def test_the_fourth_argument_of_sgd_is_not_torchs_dampening():
    with pytest.raises(TypeError, match="positional"):
        optim.SGD([ml.Parameter(np.ones(2))], 0.1, 0.9, 0.0, 1e-4)


def test_an_activation_that_a_module_remembers_is_no_state():
    class Net(nn.Module):
        def __init__(self):
            self.layer = nn.Linear(3, 2)
            self.scale = ml.array(np.full(2, 2.0, np.float32))

        def forward(self, x):
            self.hidden = self.layer(x)
            return self.hidden * self.scale

    model = Net()
    model(ml.array(np.ones((1, 3), np.float32)))
    assert list(model.state_dict()) == ["layer.weight", "layer.bias", "scale"]
    model.load_state_dict(model.state_dict())


def test_frozen_parameters_get_no_gradient():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for p in list(model)[0].parameters():
        p.requires_grad = False
    before = [p.numpy().copy() for p in model.parameters()]
    opt = optim.SGD(model.parameters(), 0.1)
    (model(ml.array(np.ones((2, 3), np.float32))) ** 2).sum().backward()
    opt.step()
    changed = [not np.array_equal(p.numpy(), b) for p, b in zip(model.parameters(), before, strict=True)]
    assert changed == [False, False, True, True]


def test_masks_count_as_numbers_beside_floats():
    torch = torch_or_skip()
    values = random_array((3, 4), 1)
    x, t = ml.Parameter(values), torch.tensor(values, requires_grad=True)
    for v in (x, t):
        ((v > 0) * v + v * (v < 1) + (v > 0.5) + v / (v != 0)).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), t.grad.numpy(), rtol=1e-12)


def test_operators_with_numpy_on_the_left_and_formats():
    x = ml.array(np.arange(4.0).reshape(2, 2))
    np.testing.assert_allclose((np.eye(2) @ x).numpy(), x.numpy())
    np.testing.assert_allclose((2**x).numpy(), 2 ** x.numpy())
    assert f"{x.sum():.2f}" == "6.00"
    assert f"{x}".startswith("Tensor(")


def test_a_function_of_numpy_does_not_end_a_gradient_without_a_word():
    weight, x = nn.Parameter(np.ones(3)), np.ones(3)
    hidden = weight * x
    for call in (lambda: np.exp(hidden), lambda: np.tanh(weight), lambda: np.maximum(ml.array(x), hidden),
                 lambda: np.add(x, hidden), lambda: np.exp(hidden.sum()), lambda: x * np.sqrt(hidden)):
        with pytest.raises(RuntimeError, match=r"^numpy\.\w+ of \w+ \(.*would end a gradient: use .*x.numpy\(\) for"):
            call()
    for call in (lambda: x * hidden, lambda: np.float64(2) * hidden, lambda: np.float32(2) - ml.array(x, "float32")):
        assert isinstance(call(), ml.Tensor)
    assert np.isfinite(hidden).all()
    assert np.exp(hidden.numpy()).shape == np.exp(hidden.detach()).shape == (3,)
    assert isinstance(np.exp(ml.array(1.0)), np.floating)
    assert np.mean([hidden.sum(), hidden.sum()]) == 3
    with ml.no_grad():
        assert np.abs(weight).max() == 1


def test_a_whole_number_in_a_tensor_bounds_slices_and_ranges():
    rows, lengths = ml.array(np.arange(6.0).reshape(2, 3)), ml.array([2, 1])
    assert [row[:n].tolist() for row, n in zip(rows, lengths, strict=True)] == [[0, 1], [3]]
    assert (list(range(lengths[0])), "abc"[lengths[1]]) == ([0, 1], "b")
    for wrong in (ml.array(2.0), lengths, ml.array(True)):
        with pytest.raises(TypeError, match="only integer scalar arrays can be converted to a scalar index"):
            rows[:wrong]
    with pytest.raises(RuntimeError, match="has no value while a step is recorded"):
        ml.record(lambda n: rows[: n[0]], np.array([1]))


def test_other_habits_say_what_to_write():
    x, whole = ml.ones(2, 3), ml.array([1, 2])
    refuses((lambda: ml.max(x, x), r"x.max\(y\) is minidl.maximum"),
                         (lambda: whole + 1.5, "not int64; whole numbers and masks have no arithmetic: x.float"),
                         (lambda: ml.Tensor([1.0]), r"minidl.array\(values\) makes a tensor"))


def test_modules_take_arguments_by_name():
    attention, x = nn.MultiheadAttention(4, 2), random_array((1, 3, 4), 1, "float32")
    mask = np.array([[1, 1, 0]])
    assert attention(x, mask=mask).tolist() == attention(x, None, mask).tolist()
    assert attention(x=x).tolist() != attention(x, mask=mask).tolist()


def test_losses_tell_what_their_labels_must_be():
    x = ml.array(random_array((4, 3)))
    for target in (x, ml.array(np.zeros((4, 1), int)), ml.array(np.zeros(4, np.int32))):
        with pytest.raises(ml.ShapeError, match=r"expected int64 \(4,\), the labels of logits \(4, 3\), whose classes"):
            nn.functional.cross_entropy(x, target)
    with pytest.raises(TypeError, match="is the label smoothing, .*; class weights are an argument of nn.fu"):
        nn.cross_entropy(x, ml.array(np.zeros(4, int)), ml.ones(3))
