"""Sums, means and maxima over axes, and the way back."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .registry import kernel, like, ufunc


def _reads(reads: Any, writes: Any) -> float:
    return float(reads[0].size)


@kernel("sum", flops=_reads)
def sum_(xp: Any, x: Any, *, axes: tuple[int, ...], factor: float = 1.0) -> Any:
    """Over `axes`, which stay with length 1, times `factor` (1/n gives the mean)."""
    total = xp.sum(x, axis=axes, keepdims=True)
    return total if factor == 1.0 else total * x.dtype.type(factor)


@sum_.cpu
def _(x: Any, y: Any, *, axes: tuple[int, ...], factor: float = 1.0) -> Any:
    thunks = [partial(np.add.reduce, x, axis=axes, out=y, keepdims=True)]
    return thunks if factor == 1.0 else [*thunks, ufunc(np.multiply, y, like(y, factor), y)]


@kernel("spread", flops=lambda reads, writes: float(writes[0].size))
def spread(xp: Any, dy: Any, x: Any, *, factor: float = 1.0) -> Any:
    """dy broadcast to x's shape, times `factor`: the gradient of `sum`."""
    return xp.broadcast_to(dy * dy.dtype.type(factor), x.shape)


@spread.cpu
def _(dy: Any, x: Any, dx: Any, *, factor: float = 1.0) -> Any:
    return [ufunc(np.multiply, np.broadcast_to(dy, dx.shape), like(dx, factor), dx)]


@kernel("max", flops=_reads)
def max_(xp: Any, x: Any, *, axes: tuple[int, ...]) -> Any:
    """Over `axes`, which stay with length 1."""
    return xp.max(x, axis=axes, keepdims=True)


@max_.cpu
def _(x: Any, y: Any, *, axes: tuple[int, ...]) -> Any:
    return [partial(np.maximum.reduce, x, axis=axes, out=y, keepdims=True)]


@kernel("max_grad", flops=_reads, work=lambda reads, writes, axes: [(writes[0].shape, "bool"), (reads[1].shape, reads[1].dtype)])
def max_grad(xp: Any, x: Any, y: Any, dy: Any, *, axes: tuple[int, ...]) -> Any:
    """dy, shared evenly among the elements that equal the maximum."""
    mask = x == y
    return mask * (dy / mask.sum(axis=axes, keepdims=True, dtype=x.dtype))


@max_grad.cpu
def _(x: Any, y: Any, dy: Any, dx: Any, mask: Any, share: Any, *, axes: tuple[int, ...]) -> Any:
    return [ufunc(np.equal, x, y, mask), partial(np.add.reduce, mask, axis=axes, dtype=share.dtype, out=share, keepdims=True),
            ufunc(np.divide, dy, share, share), ufunc(np.multiply, mask, share, dx)]
