"""GELU (Hendrycks, Gimpel 2016): the exact form x Phi(x), torch's default, and the tanh form, which GPT-2 has.

The CPU's loops in float32 are written so that the compiler can vectorise them: no branch, and an exponential function
of products and sums. Beyond +-FAR Phi is exactly 0 or 1, and x is bounded there: infinity times 0 is no number.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from .cuda import c_type, dense
from .exponential import exp
from .hints import wide
from .registry import flat, inlined, kernel, loop, one

ROOT, FAR = math.sqrt(0.5), 40.0


def _erf(xp: Any, x: Any) -> Any:
    if xp is np:
        return np.vectorize(math.erf, otypes=[x.dtype])(x)
    from cupyx.scipy.special import erf

    return erf(x)


@kernel("gelu", axes="=->=", flops=lambda reads, writes: 8.0 * writes[0].size)
def gelu(xp: Any, x: Any) -> Any:
    """y = x (1 + erf(x / sqrt(2))) / 2."""
    t = x.dtype.type
    return xp.maximum(x, t(-FAR)) * (t(0.5) + t(0.5) * _erf(xp, x * t(ROOT)))


@gelu.cpu
def _(x: Any, y: Any) -> Any:
    return [loop(_gelu if x.dtype == np.float32 else _gelu_double, flat(x), flat(y))]


@gelu.cuda()
def _(x: Any, y: Any) -> Any:
    return dense("gelu.cu", f"gelu<{c_type(x)}>", x, y)


@kernel("gelu_grad", axes="=,=->=", flops=lambda reads, writes: 16.0 * writes[0].size)
def gelu_grad(xp: Any, x: Any, dy: Any) -> Any:
    """dx = dy (Phi(x) + x phi(x)), phi the normal density."""
    t = x.dtype.type
    w = xp.clip(x, t(-FAR), t(FAR))
    density = xp.exp(w * w * t(-0.5)) * t(1 / math.sqrt(2 * math.pi))
    return dy * (t(0.5) + t(0.5) * _erf(xp, x * t(ROOT)) + w * density)


@gelu_grad.cpu
def _(x: Any, dy: Any, dx: Any) -> Any:
    return [loop(_gelu_grad if x.dtype == np.float32 else _gelu_grad_double, flat(x), flat(dy), flat(dx))]


@gelu_grad.cuda()
def _(x: Any, dy: Any, dx: Any) -> Any:
    return dense("gelu.cu", f"gelu_grad<{c_type(x)}>", x, dy, dx)


def _gelu_double(x, y):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        y[i] = max(x[i], -FAR) * (0.5 + 0.5 * math.erf(x[i] * ROOT))


def _gelu_grad_double(x, dy, dx):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        w = min(max(x[i], -FAR), FAR)
        density = math.exp(-0.5 * w * w) * DENSITY
        dx[i] = dy[i] * (0.5 + 0.5 * math.erf(w * ROOT) + w * density)


ONE, HALF, MOST, SINGLE_FAR = (np.float32(v) for v in (1, 0.5, 87, FAR))
# Phi(-a) = exp(-a^2 / 2) P(t) with t = 1 / (1 + STEP a), a >= 0: relative error 2.5e-8, fitted
STEP = np.float32(0.26)
P1, P2, P3, P4, P5, P6, P7, P8, P9 = (np.float32(v) for v in (
    0.103759055016, 0.1030168281, 0.10302972987, 0.0510296174044, 0.160943570077, -0.150943132542, 0.251486522767,
    -0.152826683, 0.0305044799918))
DENSITY = 1 / math.sqrt(2 * math.pi)
SINGLE_DENSITY = np.float32(DENSITY)


contracted = partial(inlined, fastmath={"contract"})  #: products and sums are rounded once together


@contracted
def _normal(v):  # type: ignore[no-untyped-def]
    """Phi(v) and exp(-v^2 / 2)."""
    t = ONE / (ONE + STEP * abs(v))
    t2 = t * t  # in pairs, not one term after the other: a product need not wait for the one before it
    t4 = t2 * t2
    e = exp(-HALF * v * v)
    p = t * (((P1 + P2 * t) + (P3 + P4 * t) * t2) + (((P5 + P6 * t) + (P7 + P8 * t) * t2) + P9 * t4) * t4) * e
    return p if v < 0 else ONE - p, e


def _gelu(x, y):  # type: ignore[no-untyped-def]
    wide()
    for i in range(x.size):
        share, _ = _normal(x[i])
        y[i] = max(x[i], -SINGLE_FAR) * share


def _gelu_grad(x, dy, dx):  # type: ignore[no-untyped-def]
    wide()
    for i in range(x.size):
        share, e = _normal(x[i])
        dx[i] = dy[i] * (share + min(max(x[i], -SINGLE_FAR), SINGLE_FAR) * (e * SINGLE_DENSITY))


# ------------------------------------------------------------------------------------------------------------ tanh form
SLOPE, CUBE, END = 2 * math.sqrt(2 / math.pi), 0.044715, 20.0  # the gate is 0 below -END and 1 above END
SINGLE_SLOPE, SINGLE_CUBE, SINGLE_END, THREE = (np.float32(v) for v in (SLOPE, CUBE, END, 3))


def _gate(xp: Any, x: Any) -> tuple[Any, Any]:
    """(s, x ds / dx), s = (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    t = x.dtype.type
    w = xp.clip(x, t(-END), t(END))
    e = xp.exp(xp.minimum(t(-SLOPE) * (w + t(CUBE) * w * w * w), t(87 if x.dtype.itemsize < 8 else 700)))
    s = t(1) / (t(1) + e)
    return s, w * (s * (e * s) * t(SLOPE) * (t(1) + t(3 * CUBE) * w * w))


@kernel("gelu_tanh", axes="=->=", flops=lambda reads, writes: 8.0 * writes[0].size)
def gelu_tanh(xp: Any, x: Any) -> Any:
    """y = x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    return xp.where(x < -END, x.dtype.type(0), x * _gate(xp, x)[0])


@gelu_tanh.cpu
def _(x: Any, y: Any) -> Any:
    return [loop(_gelu_tanh, flat(x), flat(y))]


@gelu_tanh.cuda()
def _(x: Any, y: Any) -> Any:
    return dense("gelu.cu", f"gelu_tanh<{c_type(x)}>", x, y)


@kernel("gelu_tanh_grad", axes="=,=->=", flops=lambda reads, writes: 16.0 * writes[0].size, over=((0, 1),))
def gelu_tanh_grad(xp: Any, x: Any, dy: Any) -> Any:
    """dx = dy (s + x ds / dx), y = x s."""
    s, rise = _gate(xp, x)
    return dy * xp.where(x < -END, x.dtype.type(0), s + rise)


@gelu_tanh_grad.cpu
def _(x: Any, dy: Any, dx: Any) -> Any:
    if one(dy, dx):
        return [loop(_times_slope, flat(x), flat(dx))]
    return [loop(_gelu_tanh_grad, flat(x), flat(dy), flat(dx))]


@gelu_tanh_grad.cuda()
def _(x: Any, dy: Any, dx: Any) -> Any:
    return dense("gelu.cu", f"gelu_tanh_grad<{c_type(x)}>", x, dy, dx)


@contracted
def _less(w):  # type: ignore[no-untyped-def]
    """exp(-2 u)."""
    return exp(min(-SINGLE_SLOPE * (w + SINGLE_CUBE * w * w * w), MOST))


def _gated_double(v):  # type: ignore[no-untyped-def]
    w = min(max(v, -END), END)
    return 0.0 if v < -END else v / (1.0 + math.exp(-SLOPE * (w + CUBE * w * w * w)))


@partial(contracted, double=_gated_double)
def _gated(v):  # type: ignore[no-untyped-def]
    y = v / (ONE + _less(min(max(v, -SINGLE_END), SINGLE_END)))
    return np.float32(0) if v < -SINGLE_END else y


def _slope_double(v):  # type: ignore[no-untyped-def]
    w = min(max(v, -END), END)
    e = math.exp(-SLOPE * (w + CUBE * w * w * w))
    s = 1.0 / (1.0 + e)
    slope = s + w * (s * (e * s) * SLOPE * (1.0 + 3.0 * CUBE * w * w))
    return 0.0 if v < -END else slope


@partial(contracted, double=_slope_double)
def _slope(v):  # type: ignore[no-untyped-def]
    w = min(max(v, -SINGLE_END), SINGLE_END)
    e = _less(w)
    s = ONE / (ONE + e)
    slope = s + w * (s * (e * s) * SINGLE_SLOPE * (ONE + THREE * SINGLE_CUBE * w * w))
    return np.float32(0) if v < -SINGLE_END else slope


def _gelu_tanh(x, y):  # type: ignore[no-untyped-def]
    wide()
    for i in range(x.size):
        y[i] = _gated(x[i])


def _gelu_tanh_grad(x, dy, dx):  # type: ignore[no-untyped-def]
    wide()
    for i in range(x.size):
        dx[i] = dy[i] * _slope(x[i])


def _times_slope(x, dx):  # type: ignore[no-untyped-def]
    wide()
    for i in range(x.size):
        dx[i] *= _slope(x[i])


def gelu_tanh_rows(counts, group, x, y):  # type: ignore[no-untyped-def]
    """GELU of the rows of a group, whose numbers of rows are `counts`."""
    begin = counts[:group].sum()
    for i in range(begin, begin + counts[group]):
        for j in range(x.shape[1]):
            y[i, j] = _gated(x[i, j])


def gelu_tanh_grad_rows(counts, group, x, dx):  # type: ignore[no-untyped-def]
    """Multiplies the rows of a group by the slope at x."""
    begin = counts[:group].sum()
    for i in range(begin, begin + counts[group]):
        for j in range(x.shape[1]):
            dx[i, j] *= _slope(x[i, j])
