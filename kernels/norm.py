"""Batch normalisation over all axes but the last; statistics and gradients by channel.

In training, forward computes the batch's mean and 1 / standard deviation and updates the running statistics. The sums
that are the parameters' gradient are a separate kernel, since the gradient toward the input needs them.

On CUDA x, y and their gradients may have 16 bits. Everything per channel is float32 then. The CUDA forms also do what
`norm_act` fuses with them: z and the activation are their arguments.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .columns import MULTIPROCESSORS, Columns, spread, sums, sums_work, whole
from .cuda import Call, Grid, c_type
from .registry import kernel, loop
from .sums import BLOCK

ACTIVATIONS = ("none", "relu", "relu6", "hardswish")  #: as norm.cuh numbers them


def rows_of(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])


def lines_of(x: Any) -> tuple[Any, int]:
    """The memory of x from its first value to its last, flat, and the step from pixel to pixel in it."""
    rows = rows_of(x)
    step = rows.strides[0] // rows.itemsize
    return np.lib.stride_tricks.as_strided(rows, ((len(rows) - 1) * step + rows.shape[1],), (rows.itemsize,)), step


WIDE = 128  #: numbers that a loop on the CPU takes together if a pixel has fewer channels


def columns_of(x: Any) -> int:
    """How many columns the CPU's loops see: the channels of as many pixels as make up to WIDE of them."""
    channels, pixels = x.shape[-1], math.prod(x.shape[:-1])
    count = max(1, WIDE // max(channels, 1))
    return channels * math.gcd(pixels, 1 << count.bit_length() - 1)


def _wide(x: Any, *dense: Any) -> tuple[Any, int, int, list[Any]]:
    """x as `lines_of`, but with the pixels of `columns_of` as one if they follow each other; the number of columns;
    and contiguous arrays of its shape as rows of so many."""
    lines, step = lines_of(x)
    columns = columns_of(x) if step == x.shape[-1] else x.shape[-1]
    return lines, step * columns // x.shape[-1], columns, [a.reshape(-1, columns) for a in dense]


def scratch_of(count: int) -> Any:
    """The work of a kernel of the CPU: `count` rows of columns in the type of sums, float64."""
    return lambda reads, writes, **_: [((count, columns_of(reads[0])), "float64")]


def _parts(work: Any, columns: int, dtype: Any) -> tuple[Any, Any]:
    """The first two rows of the scratch array, and the others as rows of another type."""
    return work[:2, :columns], work[2:].view(dtype)[:, :columns]


def matrix_of(x: Any) -> tuple[int, int, int]:
    """x (..., c) as a matrix: (the step from pixel to pixel in elements, the number of pixels, channels)."""
    apart = [stride // x.itemsize for n, stride in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1]
    return (apart or x.shape)[-1], math.prod(x.shape[:-1]), x.shape[-1]


def norm_grid(name: str, columns: Columns, rows: Any, step: int, *arguments: Any, source: str = "norm.cu") -> Grid:
    """A launch. `rows`: its arrays with a row per pixel; the rows of the first are `step` elements apart."""
    four = "true" if whole(rows[0].shape[-1], rows, [step]) else "false"
    return Grid(source, f"{name}<{c_type(rows[0])}, {four}>", columns.blocks, columns.threads, arguments)


def statistics_work(reads: Any, writes: Any, **_: Any) -> list[Any]:
    """Scratch of the CUDA forms that compute statistics. Every block of the second launch adds up all parts, so there
    are few."""
    return sums_work(math.prod(reads[0].shape[:-1]), reads[0].shape[-1], MULTIPROCESSORS)


def grad_sums_work(reads: Any, writes: Any, **_: Any) -> list[Any]:
    """Scratch of the CUDA forms of which a second launch adds up each part once."""
    return sums_work(math.prod(reads[0].shape[:-1]), reads[0].shape[-1])


def per_element(count: float) -> Any:
    return lambda reads, writes: count * reads[0].size


@kernel("batch_norm", axes="*c,c,c,c,c,*->*c,c,c,c,c,*", flops=per_element(7), work=scratch_of(6))
def batch_norm(xp: Any, x: Any, w: Any, b: Any, running_mean: Any, running_var: Any, tracked: Any, *, eps: float,
               momentum: float) -> Any:
    """x (..., c) -> y, mean, 1 / std (c,) of the batch; and running mean, variance (unbiased), count of batches."""
    axes, count, t = tuple(range(x.ndim - 1)), x.size // x.shape[-1], w.dtype.type
    mean = x.mean(axis=axes, dtype="float64").astype(w.dtype)
    var = ((x - mean) ** 2).mean(axis=axes, dtype="float64")
    rstd = (1 / xp.sqrt(var + eps)).astype(w.dtype)
    unbiased = (var * (count / (count - 1))).astype(w.dtype)
    return (((x - mean) * (rstd * w) + b).astype(x.dtype), mean, rstd, running_mean
            + t(momentum) * (mean - running_mean), running_var + t(momentum) * (unbiased - running_var), tracked + 1)


@batch_norm.cpu
def _(x: Any, w: Any, b: Any, running_mean: Any, running_var: Any, tracked: Any, y: Any, mean: Any, rstd: Any,
      mean_after: Any, var_after: Any, tracked_after: Any, work: Any, *, eps: float, momentum: float) -> Any:
    lines, step, columns, (to,) = _wide(x, y)
    (total, var), wide = _parts(work, columns, x.dtype)
    rows = x.size // x.shape[-1]
    return [loop(_statistics, lines, step, rows, mean, rstd, total, var, wide[0], wide[1], eps),
            loop(_move, rows, mean, var, running_mean, running_var, tracked, mean_after, var_after,
                 tracked_after, x.dtype.type(momentum)),
            *(loop(_repeat, a, r) for a, r in zip((mean, rstd, w, b), wide, strict=True) if columns > x.shape[-1]),
            loop(normalise, lines, step, *(wide if columns > x.shape[-1] else (mean, rstd, w, b)), to)]


@batch_norm.cuda(statistics_work)
def _(x: Any, w: Any, b: Any, running_mean: Any, running_var: Any, tracked: Any, *writes: Any, eps: float,
      momentum: float) -> Any:
    return forward_calls(x, [w, b, running_mean, running_var, tracked], None, "none", writes, eps, momentum)


def forward_calls(x: Any, reads: Any, z: Any, act: str, writes: Any, eps: float, momentum: float) -> list[Call]:
    """Batch norm on CUDA, with what is added to it and the activation after it: one launch, or two for many rows."""
    *writes, parts = writes
    step, rows, channels = matrix_of(x)
    first, second = sums(rows, channels, MULTIPROCESSORS), spread(rows, channels, 2 * MULTIPROCESSORS)
    shares = first.blocks[1]
    calls: list[Call] = []
    if shares == 1:
        second, shares = first, 0
    else:
        calls = [norm_grid("batch_norm_parts", first, [x], step, x, step, rows, channels, first.share, parts)]
    added = x if z is None else z
    return [*calls, norm_grid("batch_norm", second, [x, writes[0], *([] if z is None else [z])], step, x, step, rows,
                          channels, second.share, parts, shares, *reads, added, z is not None, ACTIVATIONS.index(act),
                          eps, momentum, *writes)]


def _repeat(values, to):  # type: ignore[no-untyped-def]
    for first in range(0, len(to), len(values)):
        for j in range(len(values)):
            to[np.uintp(first + j)] = values[j]


def _statistics(x, step, rows, mean, rstd, total, var, part, wide, eps):  # type: ignore[no-untyped-def]
    channels, columns = len(mean), len(part)
    lines = rows * channels // columns
    total[:] = 0
    for first in range(0, lines, BLOCK):
        part[:] = 0
        for i in range(first, min(first + BLOCK, lines)):
            for j in range(columns):
                part[j] += x[np.uintp(i * step + j)]
        for j in range(columns):
            total[j] += part[j]
    for j in range(channels):
        for k in range(j + channels, columns, channels):
            total[j] += total[k]
        mean[j] = total[j] / rows
    for first in range(0, columns, channels):
        for j in range(channels):
            wide[np.uintp(first + j)] = mean[j]
    var[:] = 0
    for first in range(0, lines, BLOCK):
        part[:] = 0
        for i in range(first, min(first + BLOCK, lines)):
            for j in range(columns):
                d = x[np.uintp(i * step + j)] - wide[j]
                part[j] += d * d
        for j in range(columns):
            var[j] += part[j]
    for j in range(channels):
        for k in range(j + channels, columns, channels):
            var[j] += var[k]
        var[j] /= rows
        rstd[j] = 1.0 / np.sqrt(var[j] + eps)


def _move(rows, mean, var, running_mean, running_var, tracked,  # type: ignore[no-untyped-def]
          mean_after, var_after, tracked_after, momentum):
    for j in range(len(mean)):
        unbiased = mean.dtype.type(var[j] * (rows / (rows - 1.0)))
        mean_after[j] = running_mean[j] + momentum * (mean[j] - running_mean[j])
        var_after[j] = running_var[j] + momentum * (unbiased - running_var[j])
    tracked_after[()] = tracked[()] + 1


def normalise(x, step, mean, rstd, w, b, y):  # type: ignore[no-untyped-def]
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] = (x[np.uintp(i * step + j)] - mean[j]) * (rstd[j] * w[j]) + b[j]


@kernel("batch_norm_weight_grad", axes="*c,c,c,*c->c,c", flops=per_element(4), work=scratch_of(5))
def batch_norm_weight_grad(xp: Any, x: Any, mean: Any, rstd: Any, dy: Any) -> Any:
    """dw = sum(dy (x - mean) rstd) and db = sum(dy), both (c,)."""
    axes = tuple(range(x.ndim - 1))
    dw = (dy * (x - mean)).sum(axis=axes, dtype="float64") * rstd
    return dw.astype(mean.dtype), dy.sum(axis=axes, dtype="float64").astype(mean.dtype)


@batch_norm_weight_grad.cpu
def _(x: Any, mean: Any, rstd: Any, dy: Any, dw: Any, db: Any, work: Any) -> Any:
    lines, step, columns, (g,) = _wide(x, dy)
    totals, wide = _parts(work, columns, x.dtype)
    return [loop(_repeat, mean, wide[0]), loop(_sums, lines, step, wide[0], rstd, g, dw, db, *totals, *wide[1:])]


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
    channels, (rows, columns) = len(dw), dy.shape
    products[:] = 0
    total[:] = 0
    for first in range(0, rows, BLOCK):
        product[:] = 0
        plain[:] = 0
        for i in range(first, min(first + BLOCK, rows)):
            for j in range(columns):
                product[j] += dy[i, j] * (x[np.uintp(i * step + j)] - mean[j])
                plain[j] += dy[i, j]
        for j in range(columns):
            products[j] += product[j]
            total[j] += plain[j]
    for j in range(channels):
        for k in range(j + channels, columns, channels):
            products[j] += products[k]
            total[j] += total[k]
        dw[j] = products[j] * rstd[j]
        db[j] = total[j]


@kernel("batch_norm_input_grad", axes="*c,c,c,c,c,c,*c->*c", flops=per_element(5),
        work=lambda reads, writes: [((4, columns_of(reads[0])), reads[0].dtype)])
def batch_norm_input_grad(xp: Any, x: Any, mean: Any, rstd: Any, w: Any, dw: Any, db: Any, dy: Any) -> Any:
    """dx = w rstd (dy - db / m - (x - mean) rstd dw / m), with m elements a channel; dw and db are the sums above."""
    m = w.dtype.type(x.size // x.shape[-1])
    return ((dy - db / m - (x - mean) * (rstd * dw / m)) * (w * rstd)).astype(x.dtype)


@batch_norm_input_grad.cpu
def _(x: Any, mean: Any, rstd: Any, w: Any, dw: Any, db: Any, dy: Any, dx: Any, terms: Any) -> Any:
    lines, step, columns, (g, to) = _wide(x, dy, dx)
    return [loop(_terms, mean, rstd, w, dw, db, x.size // x.shape[-1], terms[:, :columns]),
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


def _terms(mean, rstd, w, dw, db, rows, to):  # type: ignore[no-untyped-def]
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
