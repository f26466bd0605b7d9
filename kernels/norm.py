"""Batch normalisation over all axes but the last; statistics by channel. Its gradients are in norm_grad.py.

In training, forward computes the batch's mean and 1 / standard deviation and updates the running statistics.

On CUDA x and y may have 16 bits. Everything per channel is float32 then. The CUDA forms also do what `norm_act` fuses
with them: z and the activation are their arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .channels import (
    ACTIVATIONS,
    matrix_of,
    norm_grid,
    parts_of,
    per_element,
    repeat,
    scratch_of,
    statistics_work,
    widened,
)
from .columns import MULTIPROCESSORS, spread, sums
from .cuda import Call
from .registry import Thunk, kernel, loop
from .sums import BLOCK


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
def _(*arrays: Any, eps: float, momentum: float) -> Any:
    calls, reads, (y,) = statistics_calls(*arrays, eps=eps, momentum=momentum)
    return [*calls, loop(normalise, *reads, y)]


def statistics_calls(x: Any, w: Any, b: Any, running_mean: Any, running_var: Any, tracked: Any, y: Any, mean: Any,
                     rstd: Any, mean_after: Any, var_after: Any, tracked_after: Any, work: Any, *dense: Any, eps: float,
                     momentum: float) -> tuple[list[Thunk], tuple[Any, ...], list[Any]]:
    """All that comes before `normalise` on the CPU; what that reads; y and the dense arrays as it sees them."""
    lines, step, columns, seen = widened(x, y, *dense)
    (total, var), wide = parts_of(work, columns, x.dtype)
    rows, own = x.size // x.shape[-1], (mean, rstd, w, b)
    calls = [loop(_statistics, lines, step, rows, mean, rstd, total, var, wide[0], wide[1], eps),
             loop(_move, rows, mean, var, running_mean, running_var, tracked, mean_after, var_after,
                  tracked_after, x.dtype.type(momentum))]
    if columns == x.shape[-1]:
        return calls, (lines, step, *own), seen
    return [*calls, *(loop(repeat, a, r) for a, r in zip(own, wide, strict=True))], (lines, step, *wide), seen


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


def _statistics(x, step, rows, mean, rstd, total, var, part, middle, eps):  # type: ignore[no-untyped-def]
    """Reads each block of rows twice while it is in the cache, and joins the blocks' squares about their own means
    (Chan, Golub and LeVeque 1979)."""
    channels, columns = len(mean), len(part)
    lines = rows * channels // columns
    total[:] = 0
    var[:] = 0
    for first in range(0, lines, BLOCK):
        after = min(first + BLOCK, lines)
        each, sofar, weight = 1.0 / (after - first), 1.0 / max(first, 1), first * (after - first) / after
        part[:] = 0
        for i in range(first, after):
            for j in range(columns):
                part[j] += x[np.uintp(i * step + j)]
        for j in range(columns):
            own = part[j] * each
            apart = own - total[j] * sofar
            var[j] += apart * apart * weight
            total[j] += part[j]
            middle[j] = own
            part[j] = 0
        for i in range(first, after):
            for j in range(columns):
                d = x[np.uintp(i * step + j)] - middle[j]
                part[j] += d * d
        for j in range(columns):
            var[j] += part[j]
    for j in range(channels):
        seen = lines
        for k in range(j + channels, columns, channels):
            apart = total[k] / lines - total[j] / seen
            var[j] += var[k] + apart * apart * (seen * lines / (seen + lines))
            total[j] += total[k]
            seen += lines
        mean[j] = total[j] / rows
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
