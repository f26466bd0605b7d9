"""Element by element: arithmetic with broadcasting, activations, and their gradients; copies."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from .cuda import Call, c_type, dense, each, elements
from .registry import Kernel, Thunk, flat, inlined, kernel, like, loop, memory, one, ufunc

OUTER, ROW = 4, 8  #: axes of rows that are copied by a loop, and numbers of a row


def _one_each(reads: Any, writes: Any) -> float:
    return float(writes[0].size)


def _strided(definition: Kernel, function: str = "") -> None:
    """Adds the CUDA form for arrays of any strides: `function` of elementwise.cu (by default of the kernel's name) on
    the inputs, the output and the constants."""
    def calls(*arrays: Any, **constants: Any) -> list[Call]:
        *inputs, y = arrays
        return [*elements("elementwise.cu", f"{function or definition.name}<{c_type(y)}>", inputs, y,
                          *constants.values())]

    definition.cuda()(calls)


def _dense(definition: Kernel) -> None:
    """Adds the CUDA form of a kernel that takes contiguous arrays."""
    definition.cuda()(lambda *arrays: [*dense("elementwise.cu", f"{definition.name}<{c_type(arrays[-1])}>", *arrays)])


def _negative(x: Any, y: Any) -> Thunk:
    """y = -x. NumPy 2.4.6 reads other elements for float32 arrays whose elements are 16 bytes apart."""
    dense = x.flags.c_contiguous and y.flags.c_contiguous
    return ufunc(np.negative, x, y) if dense else ufunc(np.multiply, x, like(x, -1), y)


#: these end in an underscore in C
C_FUNCTIONS = ("abs", "ceil", "cos", "div", "exp", "floor", "log", "round", "sin", "sqrt", "tanh", "trunc")


def _ufunc_kernel(name: str, function: Any) -> None:
    """Defines a kernel from a NumPy ufunc; inputs broadcast to the output's shape."""
    definition = kernel(name, axes="...,...->...", flops=_one_each, over=((0, 0), (0, 1)))(
        lambda xp, *inputs: getattr(xp, function.__name__)(*inputs))
    definition.cpu(lambda *arrays: [ufunc(function, *arrays) if function is not np.negative else _negative(*arrays)])
    _strided(definition, f"{name}_" if name in C_FUNCTIONS else name)


for _name, _function in {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative,
                         "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "tanh": np.tanh, "abs": np.abs,
                         "sin": np.sin, "cos": np.cos, "sign": np.sign, "round": np.rint, "floor": np.floor,
                         "ceil": np.ceil, "trunc": np.trunc,
                         "maximum": np.maximum, "minimum": np.minimum}.items():
    _ufunc_kernel(_name, _function)


@kernel("copy", axes="...->...")
def copy(xp: Any, x: Any) -> Any:
    return xp.array(x)


@copy.cpu
def _(x: Any, y: Any) -> Any:
    x = np.broadcast_to(x, y.shape)
    *outer, (width, *steps) = axes = _joined(x, y) or [(1, 0, 0)]
    if not outer or len(outer) > OUTER or steps != [1, 1] or width < ROW or y.dtype.char not in "fd":
        return [partial(np.copyto, y, x) if y.dtype == bool else ufunc(np.positive, x, y)]
    counts, x_steps, y_steps = zip(*[(1, 0, 0)] * (OUTER + 1 - len(axes)), *axes, strict=True)
    return [loop(_copy_rows, memory(x), memory(y), counts, x_steps, y_steps)]


def _joined(x: Any, y: Any) -> list[tuple[int, int, int]]:
    """The length of each axis of two arrays of one shape and type, and its steps in elements; axes that follow each
    other in both are one."""
    found = list[tuple[int, int, int]]()
    for n, *steps in zip(y.shape, x.strides, y.strides, strict=True):
        own, other = (step // y.itemsize for step in steps)
        if found and found[-1][1:] == (n * own, n * other):
            n *= found.pop()[0]
        found += [(n, own, other)] * (n != 1)
    return found


def _copy_rows(x, y, counts, x_steps, y_steps):  # type: ignore[no-untyped-def]
    for i in range(counts[0]):
        for j in range(counts[1]):
            for k in range(counts[2]):
                begin = i * x_steps[0] + j * x_steps[1] + k * x_steps[2]
                to = i * y_steps[0] + j * y_steps[1] + k * y_steps[2]
                for _ in range(counts[3]):
                    for e in range(counts[4]):  # unsigned, so that the loop is vectorised
                        y[np.uintp(to + e)] = x[np.uintp(begin + e)]
                    begin += x_steps[3]
                    to += y_steps[3]


@copy.cuda()
def _(x: Any, y: Any) -> Any:
    return elements("copy.cu", f"copy<{c_type(y)}>", [x], y)


@kernel("cast", axes="...->...")
def cast(xp: Any, x: Any, *, dtype: str) -> Any:
    """x as another float type, rounded to nearest."""
    return xp.asarray(x).astype(dtype)


@cast.cpu
def _(x: Any, y: Any, *, dtype: str) -> Any:
    return [partial(np.copyto, y, x, casting="unsafe")]


@cast.cuda()
def _(x: Any, y: Any, *, dtype: str) -> Any:
    return elements("copy.cu", f"cast<{c_type(x)}, {c_type(y)}>", [x], y)


@kernel("fill", axes="...->...")
def fill(xp: Any, x: Any, *, value: float) -> Any:
    """An array like x, full of one value; the values of x are not read."""
    return xp.full_like(x, value)


@fill.cpu
def _(x: Any, y: Any, *, value: float) -> Any:
    return [partial(y.fill, value)]


@fill.cuda()
def _(x: Any, y: Any, *, value: float) -> Any:
    return each("copy.cu", f"fill<{c_type(y)}>", y.size, flat(y), float(value), y.size)


@kernel("scale", axes="...->...", flops=_one_each)
def scale(xp: Any, x: Any, *, factor: float) -> Any:
    return x * x.dtype.type(factor)


@scale.cpu
def _(x: Any, y: Any, *, factor: float) -> Any:
    return [ufunc(np.multiply, x, like(x, factor), y)]


@kernel("shift", axes="...->...", flops=_one_each)
def shift(xp: Any, x: Any, *, term: float) -> Any:
    return x + x.dtype.type(term)


@shift.cpu
def _(x: Any, y: Any, *, term: float) -> Any:
    return [ufunc(np.add, x, like(x, term), y)]


@kernel("lerp", axes="...,...->...", flops=_one_each)
def lerp(xp: Any, start: Any, end: Any, *, weight: float) -> Any:
    """From start to end by this share of the way; the result may take the place of start."""
    return (start - end) * start.dtype.type(1 - weight) + end


@lerp.cpu
def _(start: Any, end: Any, y: Any, *, weight: float) -> Any:
    return [ufunc(np.subtract, start, end, y), ufunc(np.multiply, y, like(y, 1 - weight), y), ufunc(np.add, y, end, y)]


@kernel("past", axes="=,=,C->=", flops=_one_each)
def past(xp: Any, weights: Any, average: Any, steps: Any, *, age: float, decay: float, done: bool) -> Any:
    """Weights of `age` updates ago, of a moving average of the updates, corrected by 1 - decay^t after t of them:
    w - min(t, age) m / (1 - decay^t), m = decay m + (1 - decay) (change of w). `average` (as w) is this result of the
    update before; one call before an update (`done` false), and one on the result after it. `steps` (1,) float64: t. An
    age of 1 with decay 0 is exact in bits."""
    share = _share(float(steps[0]), age, decay, done)
    if share < 0.5:
        return weights + (average - weights) * weights.dtype.type(share)
    return average - (average - weights) * weights.dtype.type(1 - share)


@inlined
def _share(t, age, decay, done):  # type: ignore[no-untyped-def]
    if t == 0.0:
        return 0.0
    whole = min(t, age) * (1.0 - decay) / (1.0 - math.pow(decay, t))
    return whole if done else decay / whole


@past.cpu
def _(weights: Any, average: Any, steps: Any, y: Any, *, age: float, decay: float, done: bool) -> Any:
    return [loop(_past, flat(weights), flat(average), steps, flat(y), float(age), float(decay), bool(done))]


def _past(weights, average, steps, y, age, decay, done):  # type: ignore[no-untyped-def]
    share = _share(steps[0], age, decay, done)
    near, rest = weights.dtype.type(share), weights.dtype.type(1.0 - share)
    for i in range(y.size):
        apart = average[i] - weights[i]
        y[i] = weights[i] + apart * near if share < 0.5 else average[i] - apart * rest


@past.cuda()
def _(weights: Any, average: Any, steps: Any, y: Any, *, age: float, decay: float, done: bool) -> Any:
    return each("elementwise.cu", f"past<{c_type(y)}>", y.size, flat(weights), flat(average), steps, flat(y), y.size,
                float(age), float(decay), bool(done))


@kernel("power", axes="...->...", flops=_one_each)
def power(xp: Any, x: Any, *, exponent: float) -> Any:
    return x ** x.dtype.type(exponent)


@power.cpu
def _(x: Any, y: Any, *, exponent: float) -> Any:
    return [ufunc(np.power, x, like(x, exponent), y)]


@kernel("power_grad", axes="...,...->...", flops=_one_each)
def power_grad(xp: Any, x: Any, dy: Any, *, exponent: float) -> Any:
    """dx = dy * e * x^(e-1)."""
    return dy * (x ** x.dtype.type(exponent - 1)) * x.dtype.type(exponent)


@power_grad.cpu
def _(x: Any, dy: Any, dx: Any, *, exponent: float) -> Any:
    return [ufunc(np.power, x, like(x, exponent - 1), dx), ufunc(np.multiply, dx, dy, dx),
            ufunc(np.multiply, dx, like(x, exponent), dx)]


@kernel("relu", axes="=->=", flops=_one_each, over=((0, 0),))
def relu(xp: Any, x: Any) -> Any:
    return xp.maximum(x, x.dtype.type(0))


@relu.cpu
def _(x: Any, y: Any) -> Any:
    if one(x, y):
        return [loop(_relu_here, flat(y))]
    return [loop(_relu, flat(x), flat(y))]


def _relu_here(y):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        y[i] = y[i] if not y[i] <= 0 else y.dtype.type(0)


def _relu(x, y):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        y[i] = x[i] if not x[i] <= 0 else x.dtype.type(0)  # NaN passes through


@kernel("relu_grad", axes="=,=->=", flops=_one_each, over=((0, 1),))
def relu_grad(xp: Any, y: Any, dy: Any) -> Any:
    """dx = dy where y > 0; y is the output."""
    return xp.where(y > 0, dy, dy.dtype.type(0))


@relu_grad.cpu
def _(y: Any, dy: Any, dx: Any) -> Any:
    if one(dy, dx):
        return [loop(_kept, flat(y), flat(dx))]
    return [loop(_relu_grad, flat(y), flat(dy), flat(dx))]


def _kept(y, dx):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        dx[i] = dx[i] if y[i] > 0 else dx.dtype.type(0)


def _relu_grad(y, dy, dx):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        dx[i] = dy[i] if y[i] > 0 else dy.dtype.type(0)


@kernel("sigmoid", axes="...->...", flops=_one_each)
def sigmoid(xp: Any, x: Any) -> Any:
    """1 / (1 + exp(-x)), computed with tanh, which never overflows."""
    half = x.dtype.type(0.5)
    return xp.tanh(x * half) * half + half


@sigmoid.cpu
def _(x: Any, y: Any) -> Any:
    half = like(x, 0.5)
    return [ufunc(np.multiply, x, half, y), ufunc(np.tanh, y, y), ufunc(np.multiply, y, half, y),
            ufunc(np.add, y, half, y)]


@kernel("sigmoid_grad", axes="=,=->=", flops=_one_each)
def sigmoid_grad(xp: Any, y: Any, dy: Any) -> Any:
    """dx = dy * y * (1 - y)."""
    return dy * (y * (1 - y))


@sigmoid_grad.cpu
def _(y: Any, dy: Any, dx: Any) -> Any:
    return [loop(_sigmoid_grad, flat(y), flat(dy), flat(dx))]


def _sigmoid_grad(y, dy, dx):  # type: ignore[no-untyped-def]
    one = y.dtype.type(1)
    for i in range(y.size):
        dx[i] = dy[i] * (y[i] * (one - y[i]))


@kernel("tanh_grad", axes="=,=->=", flops=_one_each)
def tanh_grad(xp: Any, y: Any, dy: Any) -> Any:
    """dx = dy * (1 - y^2)."""
    return dy * (1 - y * y)


@tanh_grad.cpu
def _(y: Any, dy: Any, dx: Any) -> Any:
    return [loop(_tanh_grad, flat(y), flat(dy), flat(dx))]


def _tanh_grad(y, dy, dx):  # type: ignore[no-untyped-def]
    one = y.dtype.type(1)
    for i in range(y.size):
        dx[i] = dy[i] * (one - y[i] * y[i])


@kernel("sqrt_grad", axes="...,...->...", flops=_one_each)
def sqrt_grad(xp: Any, y: Any, dy: Any) -> Any:
    """dx = dy / (2 y)."""
    return dy / (y + y)


@sqrt_grad.cpu
def _(y: Any, dy: Any, dx: Any) -> Any:
    return [ufunc(np.add, y, y, dx), ufunc(np.divide, dy, dx, dx)]


@kernel("root_grad", axes="=,=->=", flops=_one_each)
def root_grad(xp: Any, y: Any, dy: Any) -> Any:
    """dx = dy / (2 y), and 0 where y is 0."""
    return xp.where(y == 0, y, dy / (y + y))


@root_grad.cpu
def _(y: Any, dy: Any, dx: Any) -> Any:
    return [loop(_root_grad, flat(y), flat(dy), flat(dx))]


def _root_grad(y, dy, dx):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        dx[i] = dy[i] / (y[i] + y[i]) if y[i] != 0 else y[i]


@kernel("abs_grad", axes="...,...->...", flops=_one_each)
def abs_grad(xp: Any, x: Any, dy: Any) -> Any:
    return xp.sign(x) * dy


@abs_grad.cpu
def _(x: Any, dy: Any, dx: Any) -> Any:
    return [ufunc(np.sign, x, dx), ufunc(np.multiply, dx, dy, dx)]


@kernel("div_grad", axes="...,...,...->...", flops=_one_each)
def div_grad(xp: Any, y: Any, b: Any, dy: Any) -> Any:
    """db of y = a / b, before the sum over broadcast axes: -dy * y / b."""
    return -(dy * y) / b


@div_grad.cpu
def _(y: Any, b: Any, dy: Any, db: Any) -> Any:
    return [ufunc(np.multiply, dy, y, db), ufunc(np.divide, db, b, db), _negative(db, db)]


def _pick(name: str, wins: Any) -> None:
    """Gradient of maximum or minimum to one side: where x wins dy, half where the two are equal."""
    definition = kernel(name, flops=_one_each, work=lambda reads, writes: [(writes[0].shape, "bool")],
                        axes="...,...,...->...")(
        lambda xp, x, other, dy: xp.where(x == other, dy * dy.dtype.type(0.5),
                                          xp.where(wins(x, other), dy, dy.dtype.type(0))))
    compare = {"maximum_grad": np.greater, "minimum_grad": np.less}[name]
    # masked copies, not products with a mask: infinity times zero is NaN
    definition.cpu(lambda x, other, dy, dx, mask: [
        partial(dx.fill, 0), ufunc(compare, x, other, mask), partial(np.copyto, dx, dy, where=mask),
        ufunc(np.equal, x, other, mask), partial(np.multiply, dy, like(dy, 0.5), out=dx, where=mask)])
    _strided(definition)


_pick("maximum_grad", lambda x, other: x > other)
_pick("minimum_grad", lambda x, other: x < other)

for _definition in (scale, shift, lerp, power, power_grad, sqrt_grad, abs_grad, div_grad):
    _strided(_definition)
for _definition in (relu, relu_grad, root_grad, sigmoid, sigmoid_grad, tanh_grad):
    _dense(_definition)
