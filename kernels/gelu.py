"""GELU (Hendrycks, Gimpel 2016) in its exact form, x Phi(x) by way of erf: torch's default, not the tanh approximation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .registry import flat, kernel, loop


def _erf(xp: Any, x: Any) -> Any:
    if xp is np:
        return np.vectorize(math.erf, otypes=[x.dtype])(x)
    from cupyx.scipy.special import erf

    return erf(x)


@kernel("gelu", flops=lambda reads, writes: 8.0 * writes[0].size)
def gelu(xp: Any, x: Any) -> Any:
    """y = x (1 + erf(x / sqrt(2))) / 2."""
    t = x.dtype.type
    return x * (t(0.5) + t(0.5) * _erf(xp, x * t(math.sqrt(0.5))))


@gelu.cpu
def _(x: Any, y: Any) -> Any:
    return [loop(_gelu, flat(x), flat(y))]


def _gelu(x, y):  # type: ignore[no-untyped-def]
    half, root = x.dtype.type(0.5), x.dtype.type(math.sqrt(0.5))
    for i in range(x.size):
        y[i] = x[i] * (half + half * math.erf(x[i] * root))


@kernel("gelu_grad", flops=lambda reads, writes: 16.0 * writes[0].size)
def gelu_grad(xp: Any, x: Any, dy: Any) -> Any:
    """dx = dy (Phi(x) + x phi(x)), phi the normal density."""
    t = x.dtype.type
    density = xp.exp(x * x * t(-0.5)) * t(1 / math.sqrt(2 * math.pi))
    return dy * (t(0.5) + t(0.5) * _erf(xp, x * t(math.sqrt(0.5))) + x * density)


@gelu_grad.cpu
def _(x: Any, dy: Any, dx: Any) -> Any:
    return [loop(_gelu_grad, flat(x), flat(dy), flat(dx))]


def _gelu_grad(x, dy, dx):  # type: ignore[no-untyped-def]
    t = x.dtype.type
    half, root, norm = t(0.5), t(math.sqrt(0.5)), t(1 / math.sqrt(2 * math.pi))
    for i in range(x.size):
        dx[i] = dy[i] * (half + half * math.erf(x[i] * root) + x[i] * (norm * math.exp(-half * x[i] * x[i])))
