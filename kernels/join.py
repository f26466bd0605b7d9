"""The way back from a slice: a gradient put into its place among zeros."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .registry import kernel, ufunc


@kernel("unslice")
def unslice(xp: Any, dy: Any, *, shape: tuple[int, ...], region: tuple[tuple[int, int, int], ...]) -> Any:
    """Zeros of `shape`, with dy at `region`: (start, stop, step) for each axis."""
    dx = xp.zeros(shape, dy.dtype)
    dx[tuple(slice(*r) for r in region)] = dy
    return dx


@unslice.cpu
def _(dy: Any, dx: Any, *, shape: tuple[int, ...], region: tuple[tuple[int, int, int], ...]) -> Any:
    return [partial(dx.fill, 0), ufunc(np.positive, dy, dx[tuple(slice(*r) for r in region)])]
