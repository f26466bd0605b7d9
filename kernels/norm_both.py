"""Both gradients of batch normalisation in one call: the sums that are the parameters' gradient, and the gradient
toward the input, which needs them and follows at once.

    batch_norm_act_weight_grad(x, mean, rstd, w, b, dy[, y]) -> dw, db[, ds]
    batch_norm_act_input_grad(x, mean, rstd, w, b, dw, db, dy) -> dx    (of y: batch_norm_input_grad(.., ds) -> dx)
    add(more, dx) -> dx, if there is more
    become
    batch_norm_grad(x, mean, rstd, w, b, dy[, y][, more]) -> dw, db[, ds], dx

`act="none"` stands for batch_norm_weight_grad and batch_norm_input_grad; b is not read then. On CUDA that is one launch
for few rows, whose blocks have all of them, and two for many, of which the second adds up the first one's parts in the
order of `batch_norm_sums_end`. So the bits equal separate launches', except that dx in 16 bits with `more` is
rounded once and not twice. `more` may have gaps between pixels, as x.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .channels import ACTIVATIONS, columns_of, grad_sums_work, matrix_of, norm_grid, per_element, scratch_of
from .columns import MULTIPROCESSORS, spread, sums
from .cuda import Call
from .norm_act import act_input_grad_calls, before, sums_calls
from .norm_grad import batch_norm_input_grad, batch_norm_weight_grad
from .registry import kernel, ufunc


def _work(reads: Any, writes: Any, *, act: str, kept: bool, add: bool) -> list[Any]:
    x = reads[0]
    return [*scratch_of(7)(reads, writes), ((5, columns_of(x)), x.dtype)]


@kernel("batch_norm_grad", flops=per_element(12), work=_work)
def batch_norm_grad(xp: Any, x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, *rest: Any, act: str, kept: bool,
                    add: bool) -> Any:
    """dw, db, with `kept` (y is given) ds, and dx; with `add` (more is given) dx + more."""
    ds = dy if act == "none" else before(xp, x, mean, rstd, w, b, dy, act, rest[0] if kept else None)
    dw, db = batch_norm_weight_grad.reference(xp, x, mean, rstd, ds)
    dx = batch_norm_input_grad.reference(xp, x, mean, rstd, w, dw, db, ds)
    return dw, db, *([ds] if kept else []), dx + rest[-1] if add else dx


def _named(rest: Any, kept: bool, add: bool) -> tuple[Any, ...]:
    """(y, more, dw, db, ds, dx, scratch arrays) of the arrays after dy."""
    reads, (dw, db, *after) = rest[: kept + add], rest[kept + add :]
    (dx, *work), ds = (after[1:], after[0]) if kept else (after, None)
    return reads[0] if kept else None, reads[-1] if add else None, dw, db, ds, dx, work


@batch_norm_grad.cpu
def _(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, *rest: Any, act: str, kept: bool, add: bool) -> Any:
    y, more, dw, db, ds, dx, (totals, terms) = _named(rest, kept, add)
    if act == "none":
        calls = batch_norm_weight_grad.bind([x, mean, rstd, dy], [dw, db], [totals[:5]], {})
    else:
        calls = sums_calls(x, mean, rstd, w, b, dy, y, act, dw, db, ds, totals)
    if kept or act == "none":
        calls += batch_norm_input_grad.bind([x, mean, rstd, w, dw, db, ds if kept else dy], [dx], [terms[:4]], {})
    else:
        calls += act_input_grad_calls(x, mean, rstd, w, b, dw, db, dy, act, dx, terms)
    return [*calls, *([ufunc(np.add, more, dx, dx)] if add else [])]


@batch_norm_grad.cuda(grad_sums_work)
def _(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, *rest: Any, act: str, kept: bool, add: bool) -> Any:
    y, more, dw, db, ds, dx, (parts,) = _named(rest, kept, add)
    step, rows, channels = matrix_of(x)
    if not channels:
        return []
    grid, slope, own = sums(rows, channels), ACTIVATIONS.index(act), [y, ds] if kept else [x, x]
    shares, calls, seen = grid.blocks[1], list[Call](), [dy, own[0], kept, slope]
    if shares == 1:
        shares = 0
    else:
        calls = [norm_grid("batch_norm_sums", grid, [x, dy, *own], step, x, step, rows, channels, grid.share, mean,
                           rstd, w, b, *seen, parts, dw, db, own[1])]
        grid, seen = spread(rows, channels, 2 * MULTIPROCESSORS), [ds, x, False, 0] if kept else seen
    more, apart = (more, matrix_of(more)[0]) if add else (dx, channels)
    return [*calls, norm_grid("batch_norm_grad", grid, [x, dy, dx, *own, more], math.gcd(step, apart), x, step, rows,
                              channels, grid.share, mean, rstd, w, b, *seen, parts, shares, more, apart, add, dw, db,
                              ds if kept else dx, dx)]
