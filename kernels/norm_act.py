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

from .channels import (
    ACTIVATIONS,
    columns_of,
    grad_sums_work,
    lines_of,
    per_element,
    rows_of,
    scratch_of,
    statistics_work,
)
from .norm import batch_norm, forward_calls, normalise
from .norm_grad import batch_norm_input_grad, batch_norm_weight_grad, input_grad_calls, weight_grad_calls
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
    reads, z, (y, *writes, totals) = arrays[:6], arrays[6:-7], arrays[-7:]
    return [*batch_norm.bind(reads, [y, *writes], [totals], {"eps": eps, "momentum": momentum}),
            *(ufunc(np.add, y, t, y) for t in z), *([] if act == "none" else KERNELS[act].bind([y], [y], [], {}))]


@batch_norm_act.cuda(statistics_work)
def _(x: Any, *arrays: Any, eps: float, momentum: float, act: str) -> Any:
    return forward_calls(x, arrays[:5], arrays[5] if len(arrays) > 12 else None, act, arrays[-7:], eps, momentum)


def _scratch(reads: Any, writes: Any, *, act: str) -> list[Any]:
    """Scratch of the sums on the CPU, and of the gradient before the activation if it is not an output."""
    work = scratch_of(5)(reads, writes)
    return work if len(writes) == 3 else [*work, (reads[0].shape, reads[0].dtype)]


@kernel("batch_norm_act_weight_grad", flops=per_element(9), work=_scratch)
def batch_norm_act_weight_grad(xp: Any, x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, y: Any = None,
                               *, act: str) -> Any:
    """dw and db of act(batch_norm(x)); given y = act(batch_norm(x) + z), also ds, the gradient
    before the activation."""
    ds = before(xp, x, mean, rstd, w, b, dy, act, y)
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
        calls = before_calls(x, mean, rstd, w, b, dy, act, ds)
    return [*calls, *batch_norm_weight_grad.bind([x, mean, rstd, ds], [dw, db], [totals], {})]


def before_calls(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, act: str, ds: Any) -> list[Thunk]:
    return [loop(normalise, *lines_of(x), mean, rstd, w, b, rows_of(ds)),
            *KERNELS[f"{act}_grad"].bind([ds, dy], [ds], [], {})]


@batch_norm_act_weight_grad.cuda(grad_sums_work)
def _(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dy: Any, *rest: Any, act: str) -> Any:
    _check(act, len(rest) == 5)
    y, dw, db, ds, parts = rest if len(rest) == 5 else (None, *rest[:2], None, rest[2])
    return weight_grad_calls(x, mean, rstd, w, b, dy, y, act, dw, db, ds, parts)


@kernel("batch_norm_act_input_grad", flops=per_element(10), work=lambda reads, writes, act: [
    ((4, columns_of(reads[0])), reads[0].dtype), (reads[0].shape, reads[0].dtype)])
def batch_norm_act_input_grad(xp: Any, x: Any, mean: Any, rstd: Any, w: Any, b: Any, dw: Any, db: Any, dy: Any,
                              *, act: str) -> Any:
    """dx of act(batch_norm(x)); dw and db are the sums above."""
    return batch_norm_input_grad.reference(xp, x, mean, rstd, w, dw, db, before(xp, x, mean, rstd, w, b, dy, act))


@batch_norm_act_input_grad.cpu
def _(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dw: Any, db: Any, dy: Any, dx: Any, terms: Any, ds: Any,
      *, act: str) -> Any:
    _check(act, False)
    return [*before_calls(x, mean, rstd, w, b, dy, act, ds),
            *batch_norm_input_grad.bind([x, mean, rstd, w, dw, db, ds], [dx], [terms], {})]


@batch_norm_act_input_grad.cuda()
def _(x: Any, mean: Any, rstd: Any, w: Any, b: Any, dw: Any, db: Any, dy: Any, dx: Any, *, act: str) -> Any:
    _check(act, False)
    return input_grad_calls(x, mean, rstd, w, b, dw, db, dy, act, dx)
