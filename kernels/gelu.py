"""GELU (Hendrycks, Gimpel 2016) in its exact form x Phi(x), with erf: torch's default, not the tanh form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .cuda import c_type, dense
from .registry import Thunk, flat, kernel, like, loop, ufunc

ROOT = math.sqrt(0.5)


def _erf(xp: Any, x: Any) -> Any:
    if xp is np:
        return np.vectorize(math.erf, otypes=[x.dtype])(x)
    from cupyx.scipy.special import erf

    return erf(x)


def _phi(x: Any, y: Any) -> Thunk:
    """y = Phi(x), the normal distribution. In float32 a polynomial, which the compiler can vectorise."""
    return loop(_phi_single if x.dtype == np.float32 else _phi_double, flat(x), flat(y))


def _phi_double(x, y):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        y[i] = 0.5 * (1.0 + math.erf(x[i] * ROOT))


def _phi_single(x, y):  # type: ignore[no-untyped-def]
    # erf(u) / u by Chebyshev polynomials in t = u^2 / 8 - 1: error 5e-10 up to u = 4, beyond which 1 - erf < 1.6e-8
    for i in range(x.size):
        u = np.float64(x[i]) * ROOT
        t = min(u * u, 16.0) * 0.125 - 1.0
        t2 = t * t
        t4 = t2 * t2
        t8 = t4 * t4
        # in blocks, not one term after the other: a product need not wait for the one before it
        p0 = (0.353530995619 - 0.176576235873 * t) + (0.13167512178 - 0.10771028938 * t) * t2
        p1 = (0.090208834051 - 0.0747305360939 * t) + (0.0598889354246 - 0.0457440017636 * t) * t2
        p2 = (0.0330475859075 - 0.0225635975855 * t) + (0.0143975678534 - 0.00838207437437 * t) * t2
        p3 = (0.00474683002431 - 0.0029118387371 * t) + (0.00143801759241 - 0.000324302735391 * t) * t2
        p4 = (0.00015834142407 - 0.000246708787776 * t) + 9.73519182685e-05 * t2
        p = (p0 + p1 * t4) + ((p2 + p3 * t4) + p4 * t8) * t8
        y[i] = 0.5 + 0.5 * (1.0 if u > 4.0 else -1.0 if u < -4.0 else p * u)


@kernel("gelu", flops=lambda reads, writes: 8.0 * writes[0].size)
def gelu(xp: Any, x: Any) -> Any:
    """y = x (1 + erf(x / sqrt(2))) / 2."""
    t = x.dtype.type
    return x * (t(0.5) + t(0.5) * _erf(xp, x * t(ROOT)))


@gelu.cpu
def _(x: Any, y: Any) -> Any:
    return [_phi(x, y), ufunc(np.multiply, x, y, y)]


@gelu.cuda()
def _(x: Any, y: Any) -> Any:
    return dense("gelu.cu", f"gelu<{c_type(x)}>", x, y)


@kernel("gelu_grad", flops=lambda reads, writes: 16.0 * writes[0].size,
        work=lambda reads, writes: [(reads[0].shape, reads[0].dtype)])
def gelu_grad(xp: Any, x: Any, dy: Any) -> Any:
    """dx = dy (Phi(x) + x phi(x)), phi the normal density."""
    t = x.dtype.type
    density = xp.exp(x * x * t(-0.5)) * t(1 / math.sqrt(2 * math.pi))
    return dy * (t(0.5) + t(0.5) * _erf(xp, x * t(ROOT)) + x * density)


@gelu_grad.cpu
def _(x: Any, dy: Any, dx: Any, density: Any) -> Any:
    # NumPy's exp is vectorised, a loop's is not
    return [_phi(x, dx), ufunc(np.multiply, x, x, density), ufunc(np.multiply, density, like(x, -0.5), density),
            ufunc(np.exp, density, density),
            loop(_gelu_grad, flat(x), flat(dy), flat(density), flat(dx), like(x, 1 / math.sqrt(2 * math.pi)))]


@gelu_grad.cuda()
def _(x: Any, dy: Any, dx: Any) -> Any:
    return dense("gelu.cu", f"gelu_grad<{c_type(x)}>", x, dy, dx)


def _gelu_grad(x, dy, density, dx, norm):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        dx[i] = dy[i] * (dx[i] + x[i] * (norm * density[i]))
