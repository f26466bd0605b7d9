"""Ops of fully connected networks: each gradient against central differences in float64, and all against torch."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from helpers import random_array, refuses

import minidl as ml
from minidl import ops
from minidl.testing.checks import gradcheck, gradients

UNARY = {**dict.fromkeys(("absolute", "exp", "neg", "relu", "sigmoid", "tanh", "sin", "cos", "relu6", "hardsigmoid",
                          "hardswish", "silu", "mish", "softsign", "leaky_relu", "elu", "softplus", "logsigmoid"), ()),
         "log": "positive", "sqrt": "positive"}
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum")
SHAPES = ((), (1,), (4,), (3, 4), (1, 4), (3, 1), (2, 3, 2), (0,), (3, 0), (0, 2))
BROADCASTS = (((3, 4), (3, 4)), ((3, 4), (4,)), ((3, 4), (1, 4)), ((3, 4), (3, 1)), ((3, 1), (1, 4)), ((4,), (2, 3, 4)),
              ((), (3, 2)), ((3, 2), ()), ((), ()), ((1, 1), (1,)), ((2, 1, 3), (4, 1)), ((0, 3), (3,)),
              ((0, 3), (1, 3)), ((3, 0), (3, 1)), ((1,), (1, 1, 1)))
MATMULS = (((3, 4), (4, 2)), ((1, 1), (1, 1)), ((3, 1), (1, 2)), ((2, 3, 4), (2, 4, 2)), ((2, 3, 4), (4, 2)),
           ((3, 4), (2, 4, 2)), ((2, 1, 3, 2), (4, 2, 3)), ((1, 3, 2), (5, 2, 2)), ((0, 3), (3, 2)), ((2, 0), (0, 3)),
           ((2, 3), (3, 0)), ((0, 2, 3), (3, 2)))
def values(shape, seed=0, positive=False):
    """Away from kinks; for logs, roots and divisors also away from 0."""
    return random_array(shape, seed, low=0.5 if positive else -2.0)


# --------------------------------------------------------------------------------------------------- finite differences
VIEWS = {"transposed": ops.transpose, "broadcast": lambda x: ops.broadcast_to(ops.reshape(x, (1, 12)), (3, 12)),
         "reshaped": lambda x: ops.reshape(x, (2, 6)),
         "cut": lambda x: ops.transpose(ops.reshape(x, (2, 2, 3)), (2, 0, 1))}
STRIDED = (ops.relu, ops.sigmoid, ops.tanh, ops.exp, ops.absolute, ops.neg, ops.softmax, lambda x: x * x,
           lambda x: x - 1.5 * x, lambda x: ops.total(x, 0), lambda x: ops.mean(x, -1), lambda x: ops.amax(x, 0),
           lambda x: ops.maximum(x, -1 * x), lambda x: x**2, lambda x: ops.reshape(x, (x.size,)), lambda x: x + 1,
           lambda x: x / 3)


def toward(wanted):
    """A linear layer of three operands as a function of these."""
    operands = [values((3, 4), 1), values((2, 4), 2), values((2,), 3)]

    def f(*given):
        some = iter(given)
        return ops.linear(*(next(some) if i in wanted else ml.array(t) for i, t in enumerate(operands)))

    return f, [operands[i] for i in wanted]


def dropped(x, rate):
    ml.seed(0)  # the same draw again
    return ops.dropout(x, rate)


def cases():
    """Op, function, operands."""
    for name in UNARY:
        yield from ((name, getattr(ops, name), [values(s, 1, UNARY[name] == "positive")]) for s in SHAPES)
    for name, (a, b) in product(BINARY, BROADCASTS):
        yield name, getattr(ops, name), [values(a, 1), values(b, 2, name == "div") + 0.001]
    for e in (2, 3.0, 0.5, -1, -1.5, 1, 1.7):
        yield "power", lambda x, e=e: ops.power(x, e), [values((3, 4), 1, positive=not float(e).is_integer())]
    for name, keep, (shape, axis) in product(("total", "mean", "amax"), (False, True), (
            ((), None), ((4,), None), ((3, 4), None), ((3, 4), 0), ((3, 4), -1), ((3, 4), (0, 1)), ((2, 3, 4), (0, 2)),
            ((2, 3, 4), 1), ((1, 4), 0))):
        yield name, lambda x, name=name, a=axis, k=keep: getattr(ops, name)(x, a, k), [values(shape, 3)]
    for shape, axis in product(((0,), (3, 0), (0, 3)), (None, -1)):
        yield "total", lambda x, a=axis: ops.total(x, a), [values(shape)]
    for n, (inputs, outputs), bias in product((0, 1, 3), ((4, 2), (1, 1), (2, 0), (0, 3)), (False, True)):
        yield "linear", ops.linear, [values((n, inputs), 1), values((outputs, inputs), 2), values((outputs,), 3)][
            : 2 + bias]
    for bias in (False, True):
        yield "linear", ops.linear, [values((2, 3, 4), 1), values((5, 4), 2), values((5,), 3)][: 2 + bias]
    yield from (("linear", *toward(some)) for n in (1, 2, 3) for some in combinations(range(3), n))
    yield from (("matmul", ops.matmul, [values(a, 1), values(b, 2)]) for a, b in MATMULS)
    for shape in ((4,), (3, 4), (1, 1), (3, 1), (2, 3, 4), (0, 3)):
        yield "softmax", ops.softmax, [values(shape, 4)]
    for n, classes in ((1, 1), (1, 3), (5, 1), (4, 3)):
        labels = ml.array(np.random.default_rng(0).integers(0, classes, n))
        yield "cross_entropy", lambda x, y=labels: ops.cross_entropy(x, y), [values((n, classes), 5)]
    for shape, to in (((3, 4), (4, 3)), ((3, 4), (12,)), ((3, 4), (2, -1)), ((4,), (1, 4, 1)), ((), (1, 1)), ((1,), ()),
                      ((0, 3), (3, 0)), ((2, 3, 2), (-1, 2))):
        yield "reshape", lambda x, to=to: ops.reshape(x, to), [values(shape, 1)]
        yield "reshape", lambda x, to=to: ops.reshape(ops.transpose(x), to), [values(shape[::-1], 1)]
    for shape, axes in (((3, 4), None), ((2, 3, 4), None), ((2, 3, 4), (1, 0, 2)), ((2, 3, 4), (-1, 0, 1)),
                        ((4,), (0,)), ((1, 3), (1, 0)), ((0, 3), None)):
        yield "transpose", lambda x, axes=axes: ops.transpose(x, axes), [values(shape, 1)]
    for shape, to in (((4,), (3, 4)), ((3, 1), (3, 4)), ((), (2, 2)), ((1, 1), (2, 3, 4)), ((3,), (3,)), ((1,), (0,)),
                      ((0, 1), (0, 3))):
        yield "broadcast_to", lambda x, to=to: ops.broadcast_to(x, to), [values(shape, 1)]
        yield "broadcast_to", lambda x, to=to: ops.broadcast_to(x, to) * ops.broadcast_to(x, to), [values(shape, 1)]
    for shape in ((3, 4), (2, 3, 4), (5,), (0, 3)):
        yield "flatten", lambda x: ops.flatten(x, min(1, x.ndim - 1)), [values(shape, 1)]
        yield "flatten", ops.flatten, [values(shape, 1)]
    for shape, rate in product(((3, 4), (5,), (1, 1), (2, 3, 3), (0, 3), (3, 0)), (0.0, 0.3, 0.9)):
        yield "dropout", lambda x, rate=rate: dropped(x, rate), [values(shape, 1)]
    yield from (("of a view", lambda x, f=f, view=view: f(view(x)), [values((3, 4), 6)])
                for f, view in product(STRIDED, VIEWS.values()))


CASES = {}
for _name, _f, _arrays in cases():
    CASES.setdefault(_name, []).append((_f, _arrays))


@pytest.mark.parametrize("name", CASES)
def test_finite_differences(name):
    for f, arrays in CASES[name]:
        gradcheck(f, *arrays)


def test_every_op_of_these_families_is_checked():
    here = {"elementwise", "linear", "reduce", "shape", "loss", "dropout"}
    # with the ops for sequences, with 16 bits, with masks and indices, with the losses, by index
    elsewhere = {"gelu", "log_softmax", "mse", "label_weights", "cut", "squeeze", "unsqueeze", "swap_axes",
                 "sign", "round", "floor", "ceil", "trunc"}
    assert {n for n in ops.__all__ if getattr(ops, n).__module__.rpartition(".")[2] in here} - elsewhere <= {*CASES}


@pytest.mark.parametrize("f", [lambda x: x + 2, lambda x: 2 + x, lambda x: x - 2, lambda x: 2 - x, lambda x: x * 3,
                               lambda x: 3 * x, lambda x: x / 4, lambda x: 4 / x, lambda x: -x, lambda x: x**2,
                               lambda x: abs(x), lambda x: x + np.arange(4.0), lambda x: np.arange(4.0) - x,
                               lambda x: np.arange(4.0) * x, lambda x: np.arange(4.0) / x,
                               lambda x: x @ np.ones((4, 2)), lambda x: np.float64(2) * x, lambda x: np.float32(2) * x])
def test_operators(f):
    x = values((3, 4), 1, positive=True)
    with ml.no_grad():
        np.testing.assert_allclose(f(ml.array(x)).numpy(), f(x), rtol=1e-12)
    gradcheck(f, x)


# ------------------------------------------------------------------------------------------------------------ extremes
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [(0,), (1, 4), tuple(range(6))])
def test_ignored_labels_count_neither_in_the_mean_nor_in_the_gradient(smoothing, ignored):
    x, labels = values((6, 5), 3), np.arange(6) % 5
    labels[list(ignored)] = -100
    kept = labels != -100

    def loss(logits, y, *ignore):
        return ops.cross_entropy(logits, ml.array(y), smoothing, *ignore)

    (dx,) = gradients(lambda t: loss(t, labels, -100), [x], np.ones(()), leaf=True, strided=False)
    assert not dx[~kept].any()
    if not kept.any():
        assert np.isnan(float(loss(ml.array(x), labels, -100)))
        return
    gradcheck(lambda t: loss(t, labels, -100), x)
    assert float(loss(ml.array(x), labels, -100)) == pytest.approx(float(loss(ml.array(x[kept]), labels[kept])))
    torch = pytest.importorskip("torch")
    wanted = torch.nn.functional.cross_entropy(torch.tensor(x), torch.tensor(labels), label_smoothing=smoothing)
    assert float(loss(ml.array(x), labels, -100)) == pytest.approx(float(wanted), rel=1e-12)
    run = ml.SequentialExecutor(ml.record(lambda t, y: ops.cross_entropy(t, y, smoothing, -100), x, labels))
    assert float(run(x, labels)) == float(loss(ml.array(x), labels, -100))
    for wrong in (-1, 5):
        with pytest.raises(ValueError, match=f"label {wrong} of sample {int(kept.argmax())} is out of range"):
            run(x, np.where(kept, wrong, labels))


def test_softmax_and_cross_entropy_of_large_numbers():
    x = np.array([[1e4, -1e4, 0.0], [-1e30, 0.0, 1e30]])
    assert ops.softmax(ml.array(x)).numpy().tolist() == [[1, 0, 0], [0, 0, 1]]
    assert float(ops.cross_entropy(ml.array(x), ml.array(np.array([0, 2])))) == 0
    assert float(ops.cross_entropy(ml.array(x[:1]), ml.array(np.array([1])))) == 2e4
    (dx,) = gradients(lambda t: ops.cross_entropy(t, ml.array(np.array([1, 2]))), [x], np.ones(()),
                      leaf=True, strided=False)
    assert dx.tolist() == [[0.5, -0.5, 0], [0, 0, 0]]


def test_dropout_drops_about_its_share_and_keeps_the_mean():
    ml.seed(1)
    x = np.ones((200, 101), np.float64)
    y = ops.dropout(ml.array(x), 0.3).numpy()
    assert set(np.unique(y)) == {0.0, 1 / 0.7}
    assert abs((y == 0).mean() - 0.3) < 0.015
    assert abs(y.mean() - 1) < 0.02
    again = ops.dropout(ml.array(x), 0.3).numpy()
    assert not np.array_equal(y, again), "each draw of a step is its own"
    ml.seed(1)
    assert np.array_equal(ops.dropout(ml.array(x), 0.3).numpy(), y)
    columns, rows = (y == 0).mean(0), (y == 0).mean(1)
    assert columns.min() > 0.1
    assert columns.max() < 0.5
    assert rows.min() > 0.1
    assert rows.max() < 0.5


def test_a_recorded_dropout_keeps_its_seed_and_its_count():
    ml.seed(1)
    x = np.ones((20, 10))
    eager = [ops.dropout(ml.array(x), 0.3).numpy() for _ in range(2)]
    ml.seed(1)
    run = ml.SequentialExecutor(ml.record(lambda x: ops.dropout(x, 0.3), x))
    recorded = [run(x).numpy().copy()]
    ml.seed(2)
    other = ops.dropout(ml.array(x), 0.3).numpy()
    recorded.append(run(x).numpy())
    assert np.array_equal(recorded, eager)
    ml.seed(2)
    assert np.array_equal(ops.dropout(ml.array(x), 0.3).numpy(), other)
    assert not np.array_equal(other, eager[0])


# ------------------------------------------------------------------------------------------------------------ bad input
F3, F34, D3 = np.ones(3, np.float32), np.ones((3, 4), np.float32), np.ones(3)
L3 = np.zeros(3, np.int64)


def test_what_does_not_fit_is_told_in_one_line():
    refuses(
        (lambda: ops.add(ml.array(F3), ml.array(F34)), r"add: shapes \(3,\) and \(3, 4\) do not broadcast"),
        (lambda: ops.add(ml.array(F3), ml.array(D3)), r"add: types differ: float32, float64"),
        (lambda: ops.relu(ml.array(L3)), r"relu: needs float32 or float64, not int64"),
        (lambda: ops.linear(ml.array(F34), ml.array(F3)), r"linear: input \(3, 4\) does not fit weight \(3,\)"),
        (lambda: ops.linear(ml.array(F34), ml.array(np.ones((2, 3), np.float32))),
         r"linear: input \(3, 4\) does not fit weight \(2, 3\); expected \(n, 3\)"),
        (lambda: ops.linear(ml.array(F34), ml.array(F34), ml.array(np.ones(4, np.float32))),
         r"linear: bias \(4,\) does not fit weight \(3, 4\)"),
        (lambda: ops.linear(ml.array(F3), ml.array(F34)), r"linear: input \(1, 3\)"),
        (lambda: ops.matmul(ml.array(F34), ml.array(F34)), r"matmul: shapes \(3, 4\) and \(3, 4\) do not fit"),
        (lambda: ops.matmul(ml.array(F34), ml.array(F3)), r"matmul: shapes \(3, 4\) and \(3, 1\) do not fit"),
        (lambda: ops.matmul(ml.array(np.ones((2, 1, 1))), ml.array(np.ones((3, 1, 1)))),
         r"matmul: leading axes of .* do not broadcast"),
        (lambda: ops.softmax(ml.array(np.ones((3, 0)))), r"softmax: the last axis of shape \(3, 0\) must have"),
        (lambda: ops.softmax(ml.array(np.ones(()))), r"softmax: the last axis of shape"),
        (lambda: ops.cross_entropy(ml.array(F34), ml.array(np.zeros(4, np.int64))),
         r"cross_entropy: logits \(3, 4\) and labels \(4,\) do not fit"),
        (lambda: ops.cross_entropy(ml.array(F3), ml.array(L3)), r"cross_entropy: logits \(3,\)"),
        (lambda: ops.cross_entropy(ml.array(F34), ml.array(F3)), r"cross_entropy: labels must be int64, not float32"),
        (lambda: ops.cross_entropy(ml.array(np.ones((0, 3))), ml.array(np.zeros(0, np.int64))),
         r"cross_entropy: logits \(0, 3\)"),
        (lambda: ops.total(ml.array(F34), 2), r"sum: axis 2 does not fit shape \(3, 4\)"),
        (lambda: ops.total(ml.array(F34), (0, -2)), r"sum: axis \(0, -2\) does not fit"),
        (lambda: ops.mean(ml.array(np.ones((3, 0)))), r"shape \(3, 0\) has no elements to average"),
        (lambda: ops.amax(ml.array(np.ones((3, 0))), 1), r"max: shape \(3, 0\) has no elements"),
        (lambda: ops.reshape(ml.array(F34), (5, -1)),
         r"reshape: shape \(3, 4\) \(12 elements\) does not fit \(5, -1\)"),
        (lambda: ops.reshape(ml.array(F34), (-1, -1)), r"reshape: .* does not fit \(-1, -1\)"),
        (lambda: ops.reshape(ml.array(F34), (-3, -4)), r"reshape: .* does not fit \(-3, -4\)"),
        (lambda: ops.transpose(ml.array(F34), (0, 0)), r"transpose: axes \(0, 0\) do not fit shape \(3, 4\)"),
        (lambda: ops.broadcast_to(ml.array(F34), (4,)), r"broadcast_to: shape \(3, 4\) does not broadcast to \(4,\)"),
        (lambda: ops.broadcast_to(ml.array(F3), (3, 4)), r"broadcast_to: shape \(3,\) does not broadcast"),
        (lambda: ops.dropout(ml.array(np.ones(())), 0.5), r"dropout: the input must have a batch axis"),
        (lambda: ops.dropout(ml.array(F3), 1.0), r"the dropout rate is 1.0; it must be at least 0 and below 1"),
        (lambda: ops.dropout(ml.array(F3), -0.1), r"the dropout rate is -0.1"),
        (lambda: ops.dropout(ml.array(F3), float("nan")), r"the dropout rate is nan"))


def test_errors_name_the_layer():
    model = ml.nn.Sequential(ml.nn.Linear(4, 3), ml.nn.ReLU(), ml.nn.Linear(2, 3))
    with pytest.raises(ml.ShapeError, match=r"linear in .*/2: input \(5, 3\) does not fit weight \(3, 2\)"):
        model(np.ones((5, 4), np.float32))
