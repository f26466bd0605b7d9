"""Batch normalisation with given statistics, its gradient, and the update of running statistics."""

from __future__ import annotations

from typing import Any

import numpy as np

from .channels import lines_of, matrix_of, norm_grid, per_element, rows_of
from .columns import spread
from .cuda import c_type, each
from .norm import normalise
from .registry import kernel, loop


@kernel("batch_norm_eval", axes="*c,c,c,c,c->*c,c", flops=per_element(3))
def batch_norm_eval(xp: Any, x: Any, w: Any, b: Any, mean: Any, var: Any, *, eps: float) -> Any:
    """Batch norm with given statistics -> y, 1 / std (c,)."""
    rstd = 1 / xp.sqrt(var + var.dtype.type(eps))
    return ((x - mean) * (rstd * w) + b).astype(x.dtype), rstd


@batch_norm_eval.cpu
def _(x: Any, w: Any, b: Any, mean: Any, var: Any, y: Any, rstd: Any, *, eps: float) -> Any:
    return [loop(_inverse_std, var, rstd, x.dtype.type(eps)),
            loop(normalise, *lines_of(x), mean, rstd, w, b, rows_of(y))]


@batch_norm_eval.cuda()
def _(x: Any, w: Any, b: Any, mean: Any, var: Any, y: Any, rstd: Any, *, eps: float) -> Any:
    step, rows, channels = matrix_of(x)
    if not channels:
        return []
    grid = spread(rows, channels)
    return [norm_grid("batch_norm_eval", grid, [x, y], step, x, step, rows, channels, grid.share, w, b,
                      mean, var, eps, y, rstd, source="norm_eval.cu")]


def _inverse_std(var, rstd, eps):  # type: ignore[no-untyped-def]
    for j in range(len(var)):
        rstd[j] = var.dtype.type(1) / np.sqrt(var[j] + eps)


@kernel("batch_norm_eval_input_grad", axes="*c,c,c->*c", flops=per_element(2))
def batch_norm_eval_input_grad(xp: Any, dy: Any, w: Any, rstd: Any) -> Any:
    """dx = w rstd dy."""
    return (dy * (w * rstd)).astype(dy.dtype)


@batch_norm_eval_input_grad.cpu
def _(dy: Any, w: Any, rstd: Any, dx: Any) -> Any:
    return [loop(_scaled, rows_of(dy), w, rstd, rows_of(dx))]


@batch_norm_eval_input_grad.cuda()
def _(dy: Any, w: Any, rstd: Any, dx: Any) -> Any:
    _, rows, channels = matrix_of(dy)
    if not dy.size:
        return []
    grid = spread(rows, channels)
    return [norm_grid("batch_norm_eval_input_grad", grid, [dy, dx], channels, dy, rows, channels, grid.share, w, rstd,
                      dx, source="norm_eval.cu")]


def _scaled(dy, w, rstd, dx):  # type: ignore[no-untyped-def]
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            dx[i, j] = dy[i, j] * (w[j] * rstd[j])


@kernel("batch_norm_move", axes="c,c,c,c,*->c,c,*", flops=per_element(6))
def batch_norm_move(xp: Any, mean: Any, var: Any, running_mean: Any, running_var: Any, tracked: Any, *,
                    momentum: float) -> Any:
    """Running mean, variance, count of batches after a batch with this mean and unbiased variance, as batch_norm leaves
    them."""
    t = mean.dtype.type
    return (running_mean + t(momentum) * (mean - running_mean), running_var + t(momentum) * (var - running_var),
            tracked + 1)


@batch_norm_move.cpu
def _(mean: Any, var: Any, running_mean: Any, running_var: Any, tracked: Any, *writes: Any, momentum: float) -> Any:
    return [loop(_move_by, mean, var, running_mean, running_var, tracked, *writes, mean.dtype.type(momentum))]


@batch_norm_move.cuda()
def _(mean: Any, *arrays: Any, momentum: float) -> Any:
    return each("norm_eval.cu", f"batch_norm_move<{c_type(mean)}>", max(mean.size, 1), mean, *arrays, momentum,
                mean.size)


def _move_by(mean, var, running_mean, running_var, tracked,  # type: ignore[no-untyped-def]
             mean_after, var_after, tracked_after, momentum):
    for j in range(len(mean)):
        mean_after[j] = running_mean[j] + momentum * (mean[j] - running_mean[j])
        var_after[j] = running_var[j] + momentum * (var[j] - running_var[j])
    tracked_after[()] = tracked[()] + 1
