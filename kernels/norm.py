"""Batch normalisation over all axes but the last; statistics and gradients by channel.

In training, forward computes the batch's mean and 1 / standard deviation and updates the running statistics. The sums
that are the parameters' gradient are a separate kernel, since the gradient toward the input needs them.

`batch_norm_act` and its gradients also do what often comes next, which then needs no launches or reads of its own. With
s = batch_norm(x), or s = batch_norm(x) + z, and y = relu(s), relu6(s) or hardswish(s):

    batch_norm(x, w, b, r...) -> s0, mean, rstd, r'...
    add(s0, z) or add(z, s0) -> s, if there is z
    relu(s) -> y                                            (or relu6, hardswish)
    become
    batch_norm_act(x, w, b, r...[, z]) -> y, mean, rstd, r'...

The gradients without z:

    relu_grad(y, dy) -> ds                                  (or relu6_grad(y, dy), hardswish_grad(s, dy))
    batch_norm_weight_grad(x, mean, rstd, ds) -> dw, db
    batch_norm_input_grad(x, mean, rstd, w, dw, db, ds) -> dx
    become
    batch_norm_act_weight_grad(x, mean, rstd, w, b, dy) -> dw, db
    batch_norm_act_input_grad(x, mean, rstd, w, b, dw, db, dy) -> dx

The gradients with z, whose own gradient is ds:

    relu_grad(y, dy) -> ds                                  (or relu6_grad)
    batch_norm_weight_grad(x, mean, rstd, ds) -> dw, db
    become
    batch_norm_act_weight_grad(x, mean, rstd, w, b, dy, y) -> dw, db, ds
    and batch_norm_input_grad(x, mean, rstd, w, dw, db, ds) -> dx stays

s0 and s, and without z also ds, no longer exist, so no other task may read them. Without an activation (`act="none"`,
with z) only the forward launches change. Hardswish with z has no such gradient, since its slope does not follow from y.

On CUDA x, z, y and their gradients may have 16 bits. Everything per channel is float32 then.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .columns import MULTIPROCESSORS, Columns, spread, sums, sums_work, whole
from .cuda import Call, Grid, c_type, each
from .registry import KERNELS, Thunk, kernel, loop, ufunc
from .sums import BLOCK

ACTIVATIONS = ("none", "relu", "relu6", "hardswish")  #: as norm.cu numbers them


def _rows(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])


def _lines(x: Any) -> tuple[Any, int]:
    """The memory of x from its first value to its last, flat, and the step from pixel to pixel in it."""
    rows = _rows(x)
    step = rows.strides[0] // rows.itemsize
    return np.lib.stride_tricks.as_strided(rows, ((len(rows) - 1) * step + rows.shape[1],), (rows.itemsize,)), step


WIDE = 128  #: numbers that a loop on the CPU takes together if a pixel has fewer channels


def _columns_of(x: Any) -> int:
    """How many columns the CPU's loops see: the channels of as many pixels as make up to WIDE of them."""
    channels, pixels = x.shape[-1], math.prod(x.shape[:-1])
    count = max(1, WIDE // max(channels, 1))
    return channels * math.gcd(pixels, 1 << count.bit_length() - 1)


def _wide(x: Any, *dense: Any) -> tuple[Any, int, int, list[Any]]:
    """x as `_lines`, but with the pixels of `_columns_of` as one if they follow each other; the number of columns;
    and contiguous arrays of its shape as rows of so many."""
    lines, step = _lines(x)
    columns = _columns_of(x) if step == x.shape[-1] else x.shape[-1]
    return lines, step * columns // x.shape[-1], columns, [a.reshape(-1, columns) for a in dense]


def _scratch_of(count: int) -> Any:
    """The work of a kernel of the CPU: `count` rows of columns in the type of sums, float64."""
    return lambda reads, writes, **_: [((count, _columns_of(reads[0])), "float64")]


def _parts(work: Any, columns: int, dtype: Any) -> tuple[Any, Any]:
    """The first two rows of the scratch array, and the others as rows of another type."""
    return work[:2, :columns], work[2:].view(dtype)[:, :columns]


def _matrix(x: Any) -> tuple[int, int, int]:
    """x (..., c) as a matrix: (the step from pixel to pixel in elements, the number of pixels, channels)."""
    apart = [stride // x.itemsize for n, stride in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1]
    return (apart or x.shape)[-1], math.prod(x.shape[:-1]), x.shape[-1]


def _grid(name: str, columns: Columns, rows: Any, step: int, *arguments: Any) -> Grid:
    """A launch. `rows`: its arrays with a row per pixel; the rows of the first are `step` elements apart."""
    four = "true" if whole(rows[0].shape[-1], rows, [step]) else "false"
    return Grid("norm.cu", f"{name}<{c_type(rows[0])}, {four}>", columns.blocks, columns.threads, arguments)


def _statistics_work(reads: Any, writes: Any, **_: Any) -> list[Any]:
    """Scratch of the CUDA forms that compute statistics. Every block of the second launch adds up all parts, so there
    are few."""
    return sums_work(math.prod(reads[0].shape[:-1]), reads[0].shape[-1], MULTIPROCESSORS)


def _sums_work(reads: Any, writes: Any, **_: Any) -> list[Any]:
    """Scratch of the CUDA forms of which a second launch adds up each part once."""
    return sums_work(math.prod(reads[0].shape[:-1]), reads[0].shape[-1])


def _per_element(count: float) -> Any:
    return lambda reads, writes: count * reads[0].size


@kernel("batch_norm", axes="*c,c,c,c,c,*->*c,c,c,c,c,*", flops=_per_element(7), work=_scratch_of(6))
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
            loop(_normalise, lines, step, *(wide if columns > x.shape[-1] else (mean, rstd, w, b)), to)]


@batch_norm.cuda(_statistics_work)
def _(x: Any, w: Any, b: Any, running_mean: Any, running_var: Any, tracked: Any, *writes: Any, eps: float,
      momentum: float) -> Any:
    return _forward(x, [w, b, running_mean, running_var, tracked], None, "none", writes, eps, momentum)


def _forward(x: Any, reads: Any, z: Any, act: str, writes: Any, eps: float, momentum: float) -> list[Call]:
    """Batch norm on CUDA, with what is added to it and the activation after it: one launch, or two for many rows."""
    *writes, parts = writes
    step, rows, channels = _matrix(x)
    first, second = sums(rows, channels, MULTIPROCESSORS), spread(rows, channels, 2 * MULTIPROCESSORS)
    shares = first.blocks[1]
    calls: list[Call] = []
    if shares == 1:
        second, shares = first, 0
    else:
        calls = [_grid("batch_norm_parts", first, [x], step, x, step, rows, channels, first.share, parts)]
    added = x if z is None else z
    return [*calls, _grid("batch_norm", second, [x, writes[0], *([] if z is None else [z])], step, x, step, rows,
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


@kernel("batch_norm_move", flops=_per_element(6))
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
    return each("norm.cu", f"batch_norm_move<{c_type(mean)}>", max(mean.size, 1), mean, *arrays, momentum, mean.size)


def _move_by(mean, var, running_mean, running_var, tracked,  # type: ignore[no-untyped-def]
             mean_after, var_after, tracked_after, momentum):
    for j in range(len(mean)):
        mean_after[j] = running_mean[j] + momentum * (mean[j] - running_mean[j])
        var_after[j] = running_var[j] + momentum * (var[j] - running_var[j])
    tracked_after[()] = tracked[()] + 1


def _normalise(x, step, mean, rstd, w, b, y):  # type: ignore[no-untyped-def]
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] = (x[np.uintp(i * step + j)] - mean[j]) * (rstd[j] * w[j]) + b[j]


@kernel("batch_norm_eval", flops=_per_element(3))
def batch_norm_eval(xp: Any, x: Any, w: Any, b: Any, mean: Any, var: Any, *, eps: float) -> Any:
    """Batch norm with given statistics -> y, 1 / std (c,)."""
    rstd = 1 / xp.sqrt(var + var.dtype.type(eps))
    return ((x - mean) * (rstd * w) + b).astype(x.dtype), rstd


@batch_norm_eval.cpu
def _(x: Any, w: Any, b: Any, mean: Any, var: Any, y: Any, rstd: Any, *, eps: float) -> Any:
    return [loop(_inverse_std, var, rstd, x.dtype.type(eps)), loop(_normalise, *_lines(x), mean, rstd, w, b, _rows(y))]


@batch_norm_eval.cuda()
def _(x: Any, w: Any, b: Any, mean: Any, var: Any, y: Any, rstd: Any, *, eps: float) -> Any:
    step, rows, channels = _matrix(x)
    if not channels:
        return []
    grid = spread(rows, channels)
    return [_grid("batch_norm_eval", grid, [x, y], step, x, step, rows, channels, grid.share, w, b,
                  mean, var, eps, y, rstd)]


def _inverse_std(var, rstd, eps):  # type: ignore[no-untyped-def]
    for j in range(len(var)):
        rstd[j] = var.dtype.type(1) / np.sqrt(var[j] + eps)


@kernel("batch_norm_weight_grad", axes="*c,c,c,*c->c,c", flops=_per_element(4), work=_scratch_of(5))
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


@batch_norm_weight_grad.cuda(_sums_work)
def _(x: Any, mean: Any, rstd: Any, dy: Any, dw: Any, db: Any, parts: Any) -> Any:
    return _weight_grad(x, mean, rstd, mean, mean, dy, None, "none", dw, db, None, parts)


def _weight_grad(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, y: Any, act: str, dw: Any, db: Any, dz: Any,
                 parts: Any) -> list[Call]:
    """The sums on CUDA, and with y also dz, in one launch, or two for many rows."""
    step, rows, channels = _matrix(x)
    if not channels:
        return []
    grid = sums(rows, channels)
    kept = ([x, False, ACTIVATIONS.index(act), parts, dw, db, x] if y is None
            else [y, True, ACTIVATIONS.index(act), parts, dw, db, dz])
    calls: list[Call] = [_grid("batch_norm_sums", grid, [x, dy, *([] if y is None else [y, dz])], step, x, step, rows,
                               channels, grid.share, mean, rstd, w, b, dy, *kept)]
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


@kernel("batch_norm_input_grad", axes="*c,c,c,c,c,c,*c->*c", flops=_per_element(5),
        work=lambda reads, writes: [((4, _columns_of(reads[0])), reads[0].dtype)])
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
    return _input_grad_calls(x, mean, rstd, w, w, dw, db, dy, "none", dx)


def _input_grad_calls(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dw: Any, db: Any, dy: Any, act: str,
                      dx: Any) -> list[Call]:
    step, rows, channels = _matrix(x)
    if not x.size:
        return []
    grid = spread(rows, channels)
    return [_grid("batch_norm_input_grad", grid, [x, dy, dx], step, x, step, rows, channels, grid.share, mean, rstd, w,
                  b, dw, db, dy, ACTIVATIONS.index(act), dx)]


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


@kernel("batch_norm_eval_input_grad", flops=_per_element(2))
def batch_norm_eval_input_grad(xp: Any, dy: Any, w: Any, rstd: Any) -> Any:
    """dx = w rstd dy."""
    return (dy * (w * rstd)).astype(dy.dtype)


@batch_norm_eval_input_grad.cpu
def _(dy: Any, w: Any, rstd: Any, dx: Any) -> Any:
    return [loop(_scaled, _rows(dy), w, rstd, _rows(dx))]


@batch_norm_eval_input_grad.cuda()
def _(dy: Any, w: Any, rstd: Any, dx: Any) -> Any:
    _, rows, channels = _matrix(dy)
    if not dy.size:
        return []
    grid = spread(rows, channels)
    return [_grid("batch_norm_eval_input_grad", grid, [dy, dx], channels, dy, rows, channels, grid.share, w, rstd, dx)]


def _scaled(dy, w, rstd, dx):  # type: ignore[no-untyped-def]
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            dx[i, j] = dy[i, j] * (w[j] * rstd[j])


def _activated(xp: Any, s: Any, act: str) -> Any:
    return s if act == "none" else KERNELS[act].reference(xp, s)


def _before(xp: Any, x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, act: str, y: Any = None) -> Any:
    """The gradient before the activation. Its slope follows from s; for relu and relu6 also from y."""
    _check(act, y is not None)
    return KERNELS[f"{act}_grad"].reference(xp, (x - mean) * (rstd * w) + b if y is None else y, dy).astype(dy.dtype)


def _check(act: str, residual: bool) -> None:
    if act not in ACTIVATIONS[1:] or (act == "hardswish" and residual):
        raise ValueError(f"batch norm fused with {act}{' and a residual' if residual else ''} has no gradient")


@kernel("batch_norm_act", flops=_per_element(9), work=_scratch_of(6))
def batch_norm_act(xp: Any, x: Any, w: Any, b: Any, running_mean: Any, running_var: Any, tracked: Any, z: Any = None, *,
                   eps: float, momentum: float, act: str) -> Any:
    """y = act(batch_norm(x) + z), and the other results of batch_norm; z may be left out."""
    s, *rest = batch_norm.reference(xp, x, w, b, running_mean, running_var, tracked, eps=eps, momentum=momentum)
    return _activated(xp, s if z is None else s + z, act), *rest


@batch_norm_act.cpu
def _(*arrays: Any, eps: float, momentum: float, act: str) -> Any:
    reads, z, (y, *writes, totals) = arrays[:6], arrays[6:-7], arrays[-7:]
    return [*batch_norm.bind(reads, [y, *writes], [totals], {"eps": eps, "momentum": momentum}),
            *(ufunc(np.add, y, t, y) for t in z), *([] if act == "none" else KERNELS[act].bind([y], [y], [], {}))]


@batch_norm_act.cuda(_statistics_work)
def _(x: Any, *arrays: Any, eps: float, momentum: float, act: str) -> Any:
    return _forward(x, arrays[:5], arrays[5] if len(arrays) > 12 else None, act, arrays[-7:], eps, momentum)


def _scratch(reads: Any, writes: Any, *, act: str) -> list[Any]:
    """Scratch of the sums on the CPU, and of the gradient before the activation if it is not an output."""
    work = _scratch_of(5)(reads, writes)
    return work if len(writes) == 3 else [*work, (reads[0].shape, reads[0].dtype)]


@kernel("batch_norm_act_weight_grad", flops=_per_element(9), work=_scratch)
def batch_norm_act_weight_grad(xp: Any, x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, y: Any = None,
                               *, act: str) -> Any:
    """dw and db of act(batch_norm(x)); given y = act(batch_norm(x) + z), also ds, the gradient
    before the activation."""
    ds = _before(xp, x, mean, rstd, w, b, dy, act, y)
    sums = batch_norm_weight_grad.reference(xp, x, mean, rstd, ds)
    return sums if y is None else (*sums, ds)


@batch_norm_act_weight_grad.cpu
def _(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, *rest: Any, act: str) -> Any:
    _check(act, len(rest) == 5)
    if len(rest) == 5:
        y, dw, db, ds, totals = rest
        calls = KERNELS[f"{act}_grad"].bind([y, dy], [ds], [], {})
    else:
        dw, db, totals, ds = rest
        calls = _before_calls(x, mean, rstd, w, b, dy, act, ds)
    return [*calls, *batch_norm_weight_grad.bind([x, mean, rstd, ds], [dw, db], [totals], {})]


def _before_calls(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, act: str, ds: Any) -> list[Thunk]:
    return [loop(_normalise, *_lines(x), mean, rstd, w, b, _rows(ds)),
            *KERNELS[f"{act}_grad"].bind([ds, dy], [ds], [], {})]


@batch_norm_act_weight_grad.cuda(_sums_work)
def _(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, *rest: Any, act: str) -> Any:
    _check(act, len(rest) == 5)
    y, dw, db, ds, parts = rest if len(rest) == 5 else (None, *rest[:2], None, rest[2])
    return _weight_grad(x, mean, rstd, w, b, dy, y, act, dw, db, ds, parts)


@kernel("batch_norm_act_input_grad", flops=_per_element(10), work=lambda reads, writes, act: [
    ((4, _columns_of(reads[0])), reads[0].dtype), (reads[0].shape, reads[0].dtype)])
def batch_norm_act_input_grad(xp: Any, x: Any, mean: Any, rstd: Any, w: Any, b: Any, dw: Any, db: Any, dy: Any,
                              *, act: str) -> Any:
    """dx of act(batch_norm(x)); dw and db are the sums above."""
    return batch_norm_input_grad.reference(xp, x, mean, rstd, w, dw, db, _before(xp, x, mean, rstd, w, b, dy, act))


@batch_norm_act_input_grad.cpu
def _(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dw: Any, db: Any, dy: Any, dx: Any, terms: Any, ds: Any,
      *, act: str) -> Any:
    _check(act, False)
    return [*_before_calls(x, mean, rstd, w, b, dy, act, ds),
            *batch_norm_input_grad.bind([x, mean, rstd, w, dw, db, ds], [dx], [terms], {})]


@batch_norm_act_input_grad.cuda()
def _(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dw: Any, db: Any, dy: Any, dx: Any, *, act: str) -> Any:
    _check(act, False)
    return _input_grad_calls(x, mean, rstd, w, b, dw, db, dy, act, dx)
