"""The gradients of batch normalisation. The sums that are the parameters' gradient are a separate kernel, since the
gradient toward the input needs them. For CUDA see norm.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from .channels import (
    ACTIVATIONS,
    columns_of,
    grad_sums_work,
    matrix_of,
    norm_grid,
    parts_of,
    per_element,
    repeat,
    scratch_of,
    widened,
)
from .columns import spread, sums
from .cuda import Call, Grid, c_type
from .norm_loops import add_block, finish
from .registry import kernel, loop
from .sums import BLOCK


@kernel("batch_norm_weight_grad", axes="*c,c,c,*c->c,c", flops=per_element(4), work=scratch_of(5))
def batch_norm_weight_grad(xp: Any, x: Any, mean: Any, rstd: Any, dy: Any) -> Any:
    """dw = sum(dy (x - mean) rstd) and db = sum(dy), both (c,)."""
    axes = tuple(range(x.ndim - 1))
    dw = (dy * (x - mean)).sum(axis=axes, dtype="float64") * rstd
    return dw.astype(mean.dtype), dy.sum(axis=axes, dtype="float64").astype(mean.dtype)


@batch_norm_weight_grad.cpu
def _(x: Any, mean: Any, rstd: Any, dy: Any, dw: Any, db: Any, work: Any) -> Any:
    lines, step, columns, (g,) = widened(x, dy)
    totals, wide = parts_of(work, columns, x.dtype)
    return [loop(repeat, mean, wide[0]), loop(_sums, lines, step, wide[0], rstd, g, dw, db, *totals, *wide[1:])]


@batch_norm_weight_grad.cuda(grad_sums_work)
def _(x: Any, mean: Any, rstd: Any, dy: Any, dw: Any, db: Any, parts: Any) -> Any:
    return weight_grad_calls(x, mean, rstd, mean, mean, dy, None, "none", dw, db, None, parts)


def weight_grad_calls(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, y: Any, act: str, dw: Any, db: Any,
                      dz: Any, parts: Any) -> list[Call]:
    """The sums on CUDA, and with y also dz, in one launch, or two for many rows."""
    step, rows, channels = matrix_of(x)
    if not channels:
        return []
    grid = sums(rows, channels)
    kept = ([x, False, ACTIVATIONS.index(act), parts, dw, db, x] if y is None
            else [y, True, ACTIVATIONS.index(act), parts, dw, db, dz])
    calls: list[Call] = [norm_grid("batch_norm_sums", grid, [x, dy, *([] if y is None else [y, dz])], step, x, step,
                                   rows, channels, grid.share, mean, rstd, w, b, dy, *kept)]
    if grid.blocks[1] > 1:
        calls.append(Grid("norm.cu", f"batch_norm_sums_end<{c_type(x)}>", (grid.blocks[0],), grid.threads,
                          (parts, grid.blocks[1], channels, rstd, dw, db)))
    return calls


def _sums(x, step, mean, rstd, dy, dw, db, products, total, product, plain):  # type: ignore[no-untyped-def]
    rows, columns = dy.shape
    products[:] = 0
    total[:] = 0
    for first in range(0, rows, BLOCK):
        product[:] = 0
        plain[:] = 0
        for i in range(first, min(first + BLOCK, rows)):
            for j in range(columns):
                product[j] += dy[i, j] * (x[np.uintp(i * step + j)] - mean[j])
                plain[j] += dy[i, j]
        add_block(products, total, product, plain)
    finish(products, total, rstd, dw, db)


@kernel("batch_norm_input_grad", axes="*c,c,c,c,c,c,*c->*c", flops=per_element(5),
        work=lambda reads, writes: [((4, columns_of(reads[0])), reads[0].dtype)])
def batch_norm_input_grad(xp: Any, x: Any, mean: Any, rstd: Any, w: Any, dw: Any, db: Any, dy: Any) -> Any:
    """dx = w rstd (dy - db / m - (x - mean) rstd dw / m), with m elements a channel; dw and db are the sums above."""
    m = w.dtype.type(x.size // x.shape[-1])
    return ((dy - db / m - (x - mean) * (rstd * dw / m)) * (w * rstd)).astype(x.dtype)


@batch_norm_input_grad.cpu
def _(x: Any, mean: Any, rstd: Any, w: Any, dw: Any, db: Any, dy: Any, dx: Any, terms: Any) -> Any:
    lines, step, columns, (g, to) = widened(x, dy, dx)
    return [loop(terms_of, mean, rstd, w, dw, db, x.size // x.shape[-1], terms[:, :columns]),
            loop(_input_grad, lines, step, *terms[:, :columns], g, to)]


@batch_norm_input_grad.cuda()
def _(x: Any, mean: Any, rstd: Any, w: Any, dw: Any, db: Any, dy: Any, dx: Any) -> Any:
    return input_grad_calls(x, mean, rstd, w, w, dw, db, dy, "none", dx)


def input_grad_calls(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dw: Any, db: Any, dy: Any, act: str,
                      dx: Any) -> list[Call]:
    step, rows, channels = matrix_of(x)
    if not x.size:
        return []
    grid = spread(rows, channels)
    return [norm_grid("batch_norm_input_grad", grid, [x, dy, dx], step, x, step, rows, channels, grid.share, mean,
                      rstd, w, b, dw, db, dy, ACTIVATIONS.index(act), dx)]


def terms_of(mean, rstd, w, dw, db, rows, to):  # type: ignore[no-untyped-def]
    m = mean.dtype.type(rows)
    for first in range(0, to.shape[1], len(mean)):
        for j in range(len(mean)):
            to[0, first + j] = mean[j]
            to[1, first + j] = db[j] / m
            to[2, first + j] = rstd[j] * dw[j] / m
            to[3, first + j] = w[j] * rstd[j]


def _input_grad(x, step, mean, shift, slope, factor, dy, dx):  # type: ignore[no-untyped-def]
    for i in range(dx.shape[0]):
        for j in range(dx.shape[1]):
            dx[i, j] = (dy[i, j] - shift[j] - (x[np.uintp(i * step + j)] - mean[j]) * slope[j]) * factor[j]
