"""Dithered rounding of a gradient: stochastic rounding to multiples of a step that follows its spread.

Wiedemann, Mehari, Kepp, Samek, "Dithered backprop" (2004.04729): D = s std(x), q = D floor((x + v) / D + 1/2) with v
uniform in +-D/2. With u = v / D + 1/2, which is uniform in [0, 1), this is q = D floor(x / D + u).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .cuda import Grid, c_type, each
from .registry import flat, kernel, loop


@kernel("dither", flops=lambda reads, writes: 8.0 * writes[0].size)
def dither(xp: Any, x: Any, u: Any, *, s: float) -> Any:
    """x, u of one shape, u in [0, 1) -> q, whose mean over u is x. All elements have one step, s times their standard
    deviation; if this is 0, q is x."""
    wide = x.astype(xp.float64)
    step = s * wide.std() if x.size else xp.zeros((), xp.float64)
    whole = xp.floor(wide / xp.where(step == 0, 1.0, step) + u)
    return xp.where(step == 0, wide, step * whole).astype(x.dtype)


@dither.cpu
def _(x: Any, u: Any, q: Any, *, s: float) -> Any:
    return [loop(_dither, flat(x), flat(u), flat(q), float(s))]


@dither.cuda(lambda reads, writes, **_: [((1,), "float64")])
def _(x: Any, u: Any, q: Any, step: Any, *, s: float) -> Any:
    count = x.size
    return [Grid("dither.cu", f"dither_step<{c_type(x)}>", (1,), (1024,), (flat(x), step, count, float(s))),
            *each("dither.cu", f"dither<{c_type(x)}>", count, flat(x), flat(u), step, flat(q), count)]


def _dither(x, u, q, s):  # type: ignore[no-untyped-def]
    mean = 0.0
    for i in range(x.size):
        mean += np.float64(x[i])
    mean /= max(x.size, 1)
    square = 0.0
    for i in range(x.size):
        square += (np.float64(x[i]) - mean) ** 2
    step = s * np.sqrt(square / max(x.size, 1))
    for i in range(x.size):
        q[i] = x[i] if step == 0 else step * np.floor(np.float64(x[i]) / step + np.float64(u[i]))
