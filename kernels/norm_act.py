"""Batch normalisation with the sum and the activation after it, and the gradients of all three.

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

from typing import Any

import numpy as np

from . import norm_loops
from .channels import (
    ACTIVATIONS,
    columns_of,
    grad_sums_work,
    parts_of,
    per_element,
    repeat,
    scratch_of,
    statistics_work,
    widened,
)
from .norm import batch_norm, forward_calls, normalise, statistics_calls
from .norm_grad import (
    batch_norm_input_grad,
    batch_norm_weight_grad,
    input_grad_calls,
    terms_of,
    weight_grad_calls,
)
from .registry import KERNELS, Thunk, kernel, loop, ufunc


def _activated(xp: Any, s: Any, act: str) -> Any:
    return s if act == "none" else KERNELS[act].reference(xp, s)


def before(xp: Any, x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, act: str, y: Any = None) -> Any:
    """The gradient before the activation. Its slope follows from s; for relu and relu6 also from y."""
    _check(act, y is not None)
    return KERNELS[f"{act}_grad"].reference(xp, (x - mean) * (rstd * w) + b if y is None else y, dy).astype(dy.dtype)


def _check(act: str, residual: bool) -> None:
    if act not in ACTIVATIONS[1:] or (act == "hardswish" and residual):
        raise ValueError(f"batch norm fused with {act}{' and a residual' if residual else ''} has no gradient")


@kernel("batch_norm_act", flops=per_element(9), work=scratch_of(6))
def batch_norm_act(xp: Any, x: Any, w: Any, b: Any, running_mean: Any, running_var: Any, tracked: Any, z: Any = None, *,
                   eps: float, momentum: float, act: str) -> Any:
    """y = act(batch_norm(x) + z), and the other results of batch_norm; z may be left out."""
    s, *rest = batch_norm.reference(xp, x, w, b, running_mean, running_var, tracked, eps=eps, momentum=momentum)
    return _activated(xp, s if z is None else s + z, act), *rest


@batch_norm_act.cpu
def _(*arrays: Any, eps: float, momentum: float, act: str) -> Any:
    reads, z, rest = arrays[:6], arrays[6:-7], arrays[-7:]
    if not all(one.flags.c_contiguous for one in z):
        calls, seen, (y,) = statistics_calls(*reads, *rest, eps=eps, momentum=momentum)
        return [*calls, loop(normalise, *seen, y), ufunc(np.add, rest[0], z[0], rest[0]),
                *([] if act == "none" else KERNELS[act].bind([rest[0]], [rest[0]], [], {}))]
    calls, seen, (y, *added) = statistics_calls(*reads, *rest, *z, eps=eps, momentum=momentum)
    return [*calls, loop(norm_loops.added if added else norm_loops.activated, *seen, *added, ACTIVATIONS.index(act), y)]


@batch_norm_act.cuda(statistics_work)
def _(x: Any, *arrays: Any, eps: float, momentum: float, act: str) -> Any:
    return forward_calls(x, arrays[:5], arrays[5] if len(arrays) > 12 else None, act, arrays[-7:], eps, momentum)


@kernel("batch_norm_act_weight_grad", flops=per_element(9), work=scratch_of(7))
def batch_norm_act_weight_grad(xp: Any, x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, y: Any = None,
                               *, act: str) -> Any:
    """dw and db of act(batch_norm(x)); given y = act(batch_norm(x) + z), also ds, the gradient
    before the activation."""
    ds = before(xp, x, mean, rstd, w, b, dy, act, y)
    sums = batch_norm_weight_grad.reference(xp, x, mean, rstd, ds)
    return sums if y is None else (*sums, ds)


@batch_norm_act_weight_grad.cpu
def _(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, *rest: Any, act: str) -> Any:
    y, dw, db, ds, work = rest if len(rest) == 5 else (None, *rest[:2], None, rest[2])
    return sums_calls(x, mean, rstd, w, b, dy, y, act, dw, db, ds, work)


def sums_calls(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, y: Any, act: str, dw: Any, db: Any, ds: Any,
               work: Any) -> list[Thunk]:
    """dw and db on the CPU, and with y also ds. `work`: of `scratch_of(7)`."""
    _check(act, y is not None)
    lines, step, columns, (g, *kept) = widened(x, dy, *([] if y is None else [y, ds]))
    totals, wide = parts_of(work, columns, x.dtype)
    number = ACTIVATIONS.index(act)
    fill = loop(norm_loops.affine, mean, rstd, w, b, wide[:3])
    if y is None:
        return [fill, loop(norm_loops.sums, lines, step, *wide[:3], rstd, g, number, dw, db, *totals, *wide[3:])]
    seen, to = kept
    return [fill, loop(norm_loops.kept_sums, lines, step, wide[0], rstd, seen, g, number, to, dw, db, *totals,
                       *wide[3:])]


@batch_norm_act_weight_grad.cuda(grad_sums_work)
def _(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, *rest: Any, act: str) -> Any:
    _check(act, len(rest) == 5)
    y, dw, db, ds, parts = rest if len(rest) == 5 else (None, *rest[:2], None, rest[2])
    return weight_grad_calls(x, mean, rstd, w, b, dy, y, act, dw, db, ds, parts)


@kernel("batch_norm_act_input_grad", flops=per_element(10), work=lambda reads, writes, act: [
    ((5, columns_of(reads[0])), reads[0].dtype)])
def batch_norm_act_input_grad(xp: Any, x: Any, mean: Any, rstd: Any, w: Any, b: Any, dw: Any, db: Any, dy: Any,
                              *, act: str) -> Any:
    """dx of act(batch_norm(x)); dw and db are the sums above."""
    return batch_norm_input_grad.reference(xp, x, mean, rstd, w, dw, db, before(xp, x, mean, rstd, w, b, dy, act))


@batch_norm_act_input_grad.cpu
def _(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dw: Any, db: Any, dy: Any, dx: Any, terms: Any,
      *, act: str) -> Any:
    return act_input_grad_calls(x, mean, rstd, w, b, dw, db, dy, act, dx, terms)


def act_input_grad_calls(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dw: Any, db: Any, dy: Any, act: str, dx: Any,
                         terms: Any) -> list[Thunk]:
    """dx on the CPU. `terms`: scratch for five rows."""
    _check(act, False)
    lines, step, columns, (g, to) = widened(x, dy, dx)
    rows = terms[:, :columns]
    return [loop(terms_of, mean, rstd, w, dw, db, x.size // x.shape[-1], rows[:4]), loop(repeat, b, rows[4]),
            loop(norm_loops.input_grad, lines, step, *rows, g, ACTIVATIONS.index(act), to)]


@batch_norm_act_input_grad.cuda()
def _(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dw: Any, db: Any, dy: Any, dx: Any, *, act: str) -> Any:
    _check(act, False)
    return input_grad_calls(x, mean, rstd, w, b, dw, db, dy, act, dx)
