"""Activations beside the usual ones: relu6, hard-sigmoid, hard-swish, SiLU, Mish, softsign, leaky ReLU, and their
gradients.

At infinity each has its limit. A factor that is x itself is bounded (FAR) once the other factor is exactly 0 or 1:
infinity times 0 is no number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .cuda import c_type, dense, elements
from .registry import flat, kernel, like, loop, ufunc

FAR = 1000.0  #: beyond it exp(-x) is 0 in every type


def _elementwise(name: str, flops: float, reference: Callable[..., Any], body: Callable[..., Any],
                 before: Callable[..., list[Any]] = lambda *arrays: []) -> None:
    """A kernel from a reference and a loop over flat arrays, and the calls before it; on CUDA of the same name."""
    definition = kernel(name, axes="=,=->=", flops=lambda reads, writes: flops * writes[0].size)(reference)
    definition.cpu(lambda *arrays: [*before(*arrays), loop(body, *map(flat, arrays))])
    definition.cuda()(lambda *arrays: [*dense("activation.cu", f"{name}<{c_type(arrays[-1])}>", *arrays)])


def _relu6(x, y):  # type: ignore[no-untyped-def]
    low, high = x.dtype.type(0), x.dtype.type(6)
    for i in range(x.size):
        v = x[i]
        v = low if v < low else v
        y[i] = high if v > high else v


def _relu6_grad(y, dy, dx):  # type: ignore[no-untyped-def]
    low, high = y.dtype.type(0), y.dtype.type(6)
    for i in range(y.size):
        dx[i] = dy[i] if (y[i] > low) & (y[i] < high) else low


_elementwise("relu6", 2, lambda xp, x: xp.minimum(xp.maximum(x, x.dtype.type(0)), x.dtype.type(6)), _relu6)
_elementwise("relu6_grad", 2, lambda xp, y, dy: xp.where((y > 0) & (y < 6), dy, dy.dtype.type(0)), _relu6_grad)


def _gate(xp: Any, x: Any) -> Any:
    """min(max(x + 3, 0), 6) / 6."""
    t = x.dtype.type
    return xp.minimum(xp.maximum(x + t(3), t(0)), t(6)) * t(1 / 6)


def _hardsigmoid(x, y):  # type: ignore[no-untyped-def]
    low, three, high, sixth = x.dtype.type(0), x.dtype.type(3), x.dtype.type(6), x.dtype.type(1 / 6)
    for i in range(x.size):
        v = x[i] + three
        v = low if v < low else v
        y[i] = (high if v > high else v) * sixth


def _hardsigmoid_grad(x, dy, dx):  # type: ignore[no-untyped-def]
    low, three, sixth = x.dtype.type(0), x.dtype.type(3), x.dtype.type(1 / 6)
    for i in range(x.size):
        dx[i] = dy[i] * sixth if (x[i] > -three) & (x[i] < three) else low


_elementwise("hardsigmoid", 4, lambda xp, x: _gate(xp, x), _hardsigmoid)
_elementwise("hardsigmoid_grad", 3, lambda xp, x, dy: xp.where(
    (x > -3) & (x < 3), dy * x.dtype.type(1 / 6), x.dtype.type(0)), _hardsigmoid_grad)


def _hardswish(x, y):  # type: ignore[no-untyped-def]
    low, three, high, sixth = x.dtype.type(0), x.dtype.type(3), x.dtype.type(6), x.dtype.type(1 / 6)
    for i in range(x.size):
        v = x[i] + three
        v = low if v < low else v
        y[i] = max(x[i], -three) * ((high if v > high else v) * sixth)


def _hardswish_grad(x, dy, dx):  # type: ignore[no-untyped-def]
    low, three, half, third = x.dtype.type(0), x.dtype.type(3), x.dtype.type(0.5), x.dtype.type(1 / 3)
    for i in range(x.size):
        inner = dy[i] * (x[i] * third + half)
        outer = low if x[i] < low else dy[i]
        dx[i] = inner if (x[i] > -three) & (x[i] < three) else outer


_elementwise("hardswish", 5, lambda xp, x: xp.maximum(x, x.dtype.type(-3)) * _gate(xp, x), _hardswish)
_elementwise("hardswish_grad", 5, lambda xp, x, dy: xp.where(
    (x > -3) & (x < 3), dy * (x * x.dtype.type(1 / 3) + x.dtype.type(0.5)),
    xp.where(x < 0, x.dtype.type(0), dy)), _hardswish_grad)


def _sigmoid(xp: Any, x: Any) -> Any:
    half = x.dtype.type(0.5)
    return xp.tanh(x * half) * half + half


def _sigmoid_calls(x: Any, *arrays: Any) -> list[Any]:
    y, half = arrays[-1], like(x, 0.5)  # NumPy's tanh is vectorised, a loop's is not
    return [ufunc(np.multiply, x, half, y), ufunc(np.tanh, y, y), ufunc(np.multiply, y, half, y),
            ufunc(np.add, y, half, y)]


def _silu(x, y):  # type: ignore[no-untyped-def]
    far = x.dtype.type(FAR)
    for i in range(x.size):
        y[i] *= max(x[i], -far)


def _silu_grad_reference(xp: Any, x: Any, dy: Any) -> Any:
    """dx = dy s (1 + x (1 - s)), with s = sigmoid(x)."""
    s = _sigmoid(xp, x)
    return dy * (s * (1 + xp.clip(x, -FAR, FAR) * (1 - s)))


def _silu_grad(x, dy, dx):  # type: ignore[no-untyped-def]
    one, far = x.dtype.type(1), x.dtype.type(FAR)
    for i in range(x.size):
        s = dx[i]
        dx[i] = dy[i] * (s * (one + min(max(x[i], -far), far) * (one - s)))


_elementwise("silu", 6, lambda xp, x: xp.maximum(x, x.dtype.type(-FAR)) * _sigmoid(xp, x), _silu, _sigmoid_calls)
_elementwise("silu_grad", 6, _silu_grad_reference, _silu_grad, _sigmoid_calls)


def _exp_calls(x: Any, *arrays: Any) -> list[Any]:
    """exp(-|x|), which never overflows; a loop's exp is not vectorised."""
    e = arrays[-1]
    return [ufunc(np.abs, x, e), ufunc(np.negative, e, e), ufunc(np.exp, e, e)]


def _mish_reference(xp: Any, x: Any) -> Any:
    """x tanh(log(1 + exp(x))), with e = exp(-|x|): the tanh is n / (n + 2) with n = e (e + 2) below 0, and
    (1 + 2 e) / (1 + 2 e + 2 e^2) above."""
    e = xp.exp(-xp.abs(x))
    below, above = e * (e + 2), 1 + 2 * e
    return xp.maximum(x, x.dtype.type(-FAR)) * xp.where(x < 0, below / (below + 2), above / (above + 2 * e * e))


def _mish_grad_reference(xp: Any, x: Any, dy: Any) -> Any:
    """dx = dy (t + x (1 - t^2) sigmoid(x)), t the tanh; the slope is a quotient of polynomials of e as well."""
    e = xp.exp(-xp.abs(x))
    below, above = e * (e + 2), 1 + 2 * e
    d = xp.where(x < 0, below + 2, above + 2 * e * e)
    t = xp.where(x < 0, below, above) / d
    return dy * (t + xp.clip(x, -FAR, FAR) * (4 * e * (1 + e) * xp.where(x < 0, x.dtype.type(1), e) / (d * d)))


def _mish(x, y):  # type: ignore[no-untyped-def]
    far, one, two = x.dtype.type(FAR), x.dtype.type(1), x.dtype.type(2)
    for i in range(x.size):
        e = y[i]
        above = one + two * e
        n = e * (e + two) if x[i] < 0 else above
        y[i] = max(x[i], -far) * (n / (n + (two if x[i] < 0 else two * e * e)))


def _mish_grad(x, dy, dx):  # type: ignore[no-untyped-def]
    far, one, two, four = x.dtype.type(FAR), x.dtype.type(1), x.dtype.type(2), x.dtype.type(4)
    for i in range(x.size):
        e = dx[i]
        above = one + two * e
        n = e * (e + two) if x[i] < 0 else above
        d = n + (two if x[i] < 0 else two * e * e)
        slope = four * e * (one + e) * (one if x[i] < 0 else e) / (d * d)
        dx[i] = dy[i] * (n / d + min(max(x[i], -far), far) * slope)


_elementwise("mish", 12, _mish_reference, _mish, _exp_calls)
_elementwise("mish_grad", 18, _mish_grad_reference, _mish_grad, _exp_calls)


def _softsign(x, y):  # type: ignore[no-untyped-def]
    one, most = x.dtype.type(1), x.dtype.type(1e30)
    for i in range(x.size):
        v = min(max(x[i], -most), most)
        y[i] = v / (one + abs(v))


def _softsign_grad(x, dy, dx):  # type: ignore[no-untyped-def]
    one = x.dtype.type(1)
    for i in range(x.size):
        d = one + abs(x[i])
        dx[i] = dy[i] / d / d


def _softsign_reference(xp: Any, x: Any) -> Any:
    """x / (1 + |x|)."""
    v = xp.clip(x, -1e30, 1e30)
    return v / (1 + xp.abs(v))


_elementwise("softsign", 3, _softsign_reference, _softsign)
_elementwise("softsign_grad", 4, lambda xp, x, dy: dy / (1 + xp.abs(x)) / (1 + xp.abs(x)), _softsign_grad)


@kernel("leaky_relu", axes="=->=", flops=lambda reads, writes: float(writes[0].size))
def leaky_relu(xp: Any, x: Any, *, slope: float) -> Any:
    """x where it is above 0, `slope` times x elsewhere."""
    return xp.where(x > 0, x, x * x.dtype.type(slope))


@leaky_relu.cpu
def _(x: Any, y: Any, *, slope: float) -> Any:
    return [loop(_leaky_relu_grad, flat(x), flat(x), flat(y), like(x, slope))]


@leaky_relu.cuda()
def _(x: Any, y: Any, *, slope: float) -> Any:
    return elements("activation.cu", f"leaky_relu<{c_type(y)}>", [x], y, slope)


@kernel("leaky_relu_grad", axes="=,=->=", flops=lambda reads, writes: float(writes[0].size))
def leaky_relu_grad(xp: Any, x: Any, dy: Any, *, slope: float) -> Any:
    """dx = dy where x > 0, `slope` times dy elsewhere."""
    return xp.where(x > 0, dy, dy * dy.dtype.type(slope))


@leaky_relu_grad.cpu
def _(x: Any, dy: Any, dx: Any, *, slope: float) -> Any:
    return [loop(_leaky_relu_grad, flat(x), flat(dy), flat(dx), like(x, slope))]


@leaky_relu_grad.cuda()
def _(x: Any, dy: Any, dx: Any, *, slope: float) -> Any:
    return elements("activation.cu", f"leaky_relu_grad<{c_type(dx)}>", [x, dy], dx, slope)


def _leaky_relu_grad(x, dy, dx, slope):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        dx[i] = dy[i] if x[i] > 0 else slope * dy[i]


@kernel("spike", axes="=->=", flops=lambda reads, writes: float(writes[0].size))
def spike(xp: Any, x: Any, *, rectangle: bool) -> Any:
    """1 where x is at least 1, else 0."""
    t = x.dtype.type
    return xp.where(x >= 1, t(1), xp.where(x < 1, t(0), x))


@spike.cpu
def _(x: Any, y: Any, *, rectangle: bool) -> Any:
    return [loop(_spike, flat(x), flat(y))]


@spike.cuda()
def _(x: Any, y: Any, *, rectangle: bool) -> Any:
    return dense("activation.cu", f"spike<{c_type(y)}>", x, y)


def _spike(x, y):  # type: ignore[no-untyped-def]
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for i in range(x.size):
        y[i] = one if x[i] >= one else zero if x[i] < one else x[i]


@kernel("spike_grad", axes="=,=->=", flops=lambda reads, writes: 3.0 * writes[0].size)
def spike_grad(xp: Any, x: Any, dy: Any, *, rectangle: bool) -> Any:
    """dx = dy max(0, 1 - abs(x - 1)), a triangle in the place of the derivative; or dy where abs(x - 1) <= 1/2."""
    t = x.dtype.type
    away = xp.abs(x - t(1))
    return dy * (away <= t(0.5)).astype(x.dtype) if rectangle else dy * xp.maximum(t(1) - away, t(0))


@spike_grad.cpu
def _(x: Any, dy: Any, dx: Any, *, rectangle: bool) -> Any:
    return [loop(_spike_rectangle if rectangle else _spike_triangle, flat(x), flat(dy), flat(dx))]


@spike_grad.cuda()
def _(x: Any, dy: Any, dx: Any, *, rectangle: bool) -> Any:
    shape = "rectangle" if rectangle else "triangle"
    return dense("activation.cu", f"spike_{shape}<{c_type(dx)}>", x, dy, dx)


def _spike_triangle(x, dy, dx):  # type: ignore[no-untyped-def]
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for i in range(x.size):
        near = one - abs(x[i] - one)
        dx[i] = dy[i] * (zero if near < zero else near)


def _spike_rectangle(x, dy, dx):  # type: ignore[no-untyped-def]
    zero, one, half = x.dtype.type(0), x.dtype.type(1), x.dtype.type(0.5)
    for i in range(x.size):
        dx[i] = dy[i] * (one if abs(x[i] - one) <= half else zero)
