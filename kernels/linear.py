"""Matrix products: one GEMM a launch, and the affine layer with its two gradients apart."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .registry import Thunk, kernel, loop, ufunc


def _gemm_flops(reads: Any, writes: Any) -> float:
    return float(2 * writes[0].size * reads[0].shape[-1])


def gemm(a: Any, b: Any, out: Any) -> Thunk:
    """out = a @ b. For dense matrices `np.dot`: half the call cost of `np.matmul`, but it copies strided ones."""
    if a.ndim == b.ndim == out.ndim == 2 and out.flags.c_contiguous and a.flags.forc and b.flags.forc:
        return partial(np.dot, a, b, out)
    return ufunc(np.matmul, a, b, out)


@kernel("matmul", flops=_gemm_flops)
def matmul(xp: Any, a: Any, b: Any) -> Any:
    """(..., m, k) @ (..., k, n) -> (..., m, n)."""
    return xp.matmul(a, b)


@matmul.cpu
def _(a: Any, b: Any, y: Any) -> Any:
    return [gemm(a, b, y)]


@kernel("linear", flops=_gemm_flops)
def linear(xp: Any, x: Any, w: Any, b: Any = None) -> Any:
    """x (n, i), w (o, i), b (o,) -> y (n, o) = x w^T + b."""
    y = xp.matmul(x, w.T)
    return y if b is None else y + b


@linear.cpu
def _(x: Any, w: Any, *rest: Any) -> Any:
    *bias, y = rest
    return [gemm(x, w.T, y), *(loop(_add_row, y, b) for b in bias)]


def _add_row(y, b):  # type: ignore[no-untyped-def]
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] += b[j]


@kernel("linear_weight_grad", flops=lambda reads, writes: 2.0 * writes[0].size * reads[0].shape[0])
def linear_weight_grad(xp: Any, x: Any, dy: Any, *, bias: bool) -> Any:
    """dw (o, i) = dy^T x; with `bias` also db (o,) = the sum of dy's rows."""
    dw = xp.matmul(dy.T, x)
    return (dw, dy.sum(axis=0)) if bias else dw


@linear_weight_grad.cpu
def _(x: Any, dy: Any, dw: Any, *rest: Any, bias: bool) -> Any:
    return [gemm(dy.T, x, dw), *(loop(_sum_rows, dy, db) for db in rest)]


def _sum_rows(x, total):  # type: ignore[no-untyped-def]
    for j in range(x.shape[1]):
        total[j] = 0
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            total[j] += x[i, j]

