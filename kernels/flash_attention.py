"""Attention that keeps no probabilities: one number for each query, from which the gradient computes them again.

With t queries and s keys, memory grows with t + s in place of t s. Dao, Fu, Ermon, Rudra, Re, "FlashAttention", 2022:
the CPU form goes over blocks of queries, whose scores stay in a core's cache. A block takes all of its keys at once, so
it needs no running maxima; a causal block takes no keys that it cannot see, which is half of the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from .cuda import Attention, sum_type
from .dropout import dropped
from .exponential import exp
from .hints import wide
from .linear import gemm, gemm_add
from .registry import KERNELS, Thunk, kernel, like, loop, regrouped, ufunc
from .scores import SCORES, groups, hide, softmax_scores, taken

BLOCK = 64  #: queries; twice as many of long sequences, whose products are faster then


def _swap(a: Any) -> Any:
    return a.swapaxes(-1, -2)


def _wide(*arrays: Any) -> list[Any]:
    return [a.astype(sum_type(a)) for a in arrays]


def _flops(reads: Any, writes: Any) -> float:
    q, k = reads[0], reads[1]
    return 4.0 * q.size * k.shape[2]


def _queries(q: Any, k: Any) -> int:
    """The queries of a block."""
    t, s = q.shape[2], k.shape[2]
    return int(min(t, 2 * BLOCK if t >= 8 * BLOCK and 2 * BLOCK * s <= 2 * SCORES else BLOCK))


def _size(q: Any, k: Any) -> int:
    """The scores of a block of one head."""
    return int(_queries(q, k) * k.shape[2])


def _taken(q: Any, k: Any) -> int:
    """How many heads, of all samples together, a block takes."""
    samples, heads = taken(q.shape[0], q.shape[1], _size(q, k))
    return samples * heads


def _scores(reads: Any) -> Any:
    """The scratch array of a block's scores: shape and type."""
    q, k = reads[0], reads[1]
    return (_taken(q, k) * _size(q, k),), q.dtype


def _score(xp: Any, q: Any, k: Any, mask: Any, scale: float, causal: bool, offset: int) -> Any:
    """All scores, minus infinity where a query does not see a key."""
    score = xp.matmul(q * q.dtype.type(scale), _swap(k))
    seen = xp.ones(score.shape[2:], bool)
    seen = (xp.tril(seen, offset) if causal else seen)[None, None]
    seen = seen & (mask[0] != 0)[:, None, None, :] if mask else seen
    return xp.where(seen, score, -xp.inf).astype(q.dtype)


def _optional(rest: Any) -> tuple[list[Any], list[Any]]:
    """The mask (n, s) and the counter (1,), if they are given."""
    return [a for a in rest if a.ndim == 2], [a for a in rest if a.ndim == 1]


def _blocks(q: Any, k: Any, causal: bool, offset: int) -> Iterator[tuple[Any, Any, int]]:
    """For each block, from the last of some heads to their first: the index of its queries, the index of the keys that
    it sees, and the number of keys that its first query sees; each further query sees one more."""
    t, s, block = q.shape[2], k.shape[2], _queries(q, k)
    for own in groups(q.shape[0], q.shape[1], _size(q, k)):
        for low in reversed(range(0, t, max(1, block))):
            high = min(low + block, t)
            end = min(high + offset, s) if causal else s
            yield (*own, slice(low, high)), (*own, slice(0, end)), low + offset + 1 if causal else s


def _axes(reads: str, writes: str) -> Any:
    """The axes of a kernel that reads these arrays and perhaps a mask and a counter; if probabilities are dropped,
    which also counts heads, only samples may be cut."""
    def of(given: Any, **_: Any) -> str:
        more = [len(a.shape) for a in given[reads.count(",") + 1 :]]
        found = ",".join([reads, *("nS" if axes == 2 else "C" for axes in more)]) + "->" + writes
        return found.replace("n", "s").replace("h", "H") if 1 in more else found

    return of


@kernel("flash_attention", axes=_axes("nhTD,nhSD,nhSE", "nhTE,nhT"), flops=_flops,
        work=lambda reads, writes, **constants: [_scores(reads)])
def flash_attention(xp: Any, q: Any, k: Any, v: Any, *rest: Any, scale: float, causal: bool, offset: int = 0,
                    **numbers: Any) -> Any:
    """As `attention`, for a positive scale and arrays that are not empty -> (y (n, h, t, e), lse (n, h, t)). lse is the
    logarithm of the sum of exp(score) over the keys that a query sees, in the type of sums; 0 for a query that sees
    none. `rest`: the mask and the counter, each if there is one, and `numbers`: as for `attention_dropout`."""
    (mask, counter), dtype, (q, k, v) = _optional(rest), q.dtype, _wide(q, k, v)
    score = _score(xp, q, k, mask, scale, causal, offset)
    top = score.max(axis=-1, keepdims=True)
    top = xp.where(top > -xp.inf, top, 0)
    e = xp.exp(score - top)
    total = e.sum(axis=-1, keepdims=True)
    total = xp.where(total > 0, total, 1)
    return xp.matmul(_dropped(xp, e / total, counter, numbers), v).astype(dtype), (top + xp.log(total))[..., 0]


def _dropped(xp: Any, p: Any, counter: Any, numbers: Any) -> Any:
    return KERNELS["dropout"].reference(xp, p, *counter, **numbers) if counter else p


@flash_attention.cpu
def _(q: Any, k: Any, v: Any, *rest: Any, scale: float, causal: bool, offset: int = 0, **numbers: Any) -> Any:
    *given, y, lse, scores = rest
    mask, counter = _optional(given)
    calls, factor = [], q.dtype.type(scale)
    for rows, keys, first in _blocks(q, k, causal, offset):
        e = _shaped(scores, q[rows], k[keys])
        calls += [gemm(q[rows], _swap(k[keys]), e),
                  loop(softmax_scores, e, _keep(mask, keys), first, factor, lse[rows]),
                  *_drop(e, rows, q, k, counter, numbers), gemm(e, v[keys], y[rows])]
    return calls


def _keep(mask: list[Any], keys: Any) -> Any:
    """A block's part of the mask; empty without one."""
    return mask[0][keys[0], keys[2]] if mask else np.empty((0, 0), np.int64)


def _drop(e: Any, rows: Any, q: Any, k: Any, counter: Any, numbers: Any) -> list[Thunk]:
    """Drops elements of a block in place, the same ones as `dropout` of all probabilities. Four share a block of random
    numbers, so the number of keys is a multiple of 4."""
    if not counter:
        return []
    samples, heads, queries = rows
    t, apart = q.shape[2], k.shape[2] // 4
    return [dropped(own, counter[0], own, (h * t + queries.start) * apart, apart, 0,
                    **{**numbers, "sample": numbers["sample"] + n})
            for n, sample in zip(range(samples.start, samples.stop), e, strict=True)
            for h, own in zip(range(heads.start, heads.stop), sample, strict=True)]


def _shaped(scores: Any, q: Any, k: Any) -> Any:
    shape = (*q.shape[:3], k.shape[2])
    return scores[: prod(shape)].reshape(shape)


@flash_attention.cuda()
def _(q: Any, k: Any, v: Any, y: Any, lse: Any, *, scale: float, causal: bool) -> Any:
    return [Attention("forward", q, k, v, y, lse, scale, causal)]


def _grad_work(reads: Any, writes: Any, **constants: Any) -> Any:
    q, k, v = reads[:3]
    part = _taken(q, k) * k.shape[2] * max(k.shape[3], v.shape[3])
    return [_scores(reads), _scores(reads), ((part,), k.dtype)]


@kernel("flash_attention_grad", axes=_axes("nhTD,nhSD,nhSE,nhTE,nhT,nhTE", "nhTD,nhSD,nhSE"), work=_grad_work,
        flops=lambda reads, writes: 2.5 * _flops(reads, writes))
def flash_attention_grad(xp: Any, q: Any, k: Any, v: Any, y: Any, lse: Any, dy: Any, *rest: Any, scale: float,
                         causal: bool, offset: int = 0, **numbers: Any) -> Any:
    """(dq, dk, dv) from the output and lse; the same elements are dropped again. `rest`: as for `flash_attention`."""
    (mask, counter), dtype, (q, k, v, y, dy) = _optional(rest), q.dtype, _wide(q, k, v, y, dy)
    p = xp.exp(_score(xp, q, k, mask, scale, causal, offset) - lse[..., None])
    dp = _dropped(xp, xp.matmul(dy, _swap(v)), counter, numbers)
    ds = p * (dp - (y * dy).sum(axis=-1, keepdims=True)) * p.dtype.type(scale)
    return tuple(g.astype(dtype) for g in (xp.matmul(ds, k), xp.matmul(_swap(ds), q),
                                           xp.matmul(_swap(_dropped(xp, p, counter, numbers)), dy)))


@flash_attention_grad.cpu
def _(q: Any, k: Any, v: Any, y: Any, lse: Any, dy: Any, *rest: Any, scale: float, causal: bool, offset: int = 0,
      **numbers: Any) -> Any:
    *given, dq, dk, dv, scores, more, part = rest
    mask, counter = _optional(given)
    calls, factor = [], q.dtype.type(scale)
    for rows, keys, first in _blocks(q, k, causal, offset):
        p, ds = _shaped(scores, q[rows], k[keys]), _shaped(more, q[rows], k[keys])
        calls += [gemm(q[rows], _swap(k[keys]), p), gemm(dy[rows], _swap(v[keys]), ds),
                  *_drop(ds, rows, q, k, counter, numbers),
                  loop(_score_grad, p, ds, _keep(mask, keys), first, factor, lse[rows], y[rows], dy[rows]),
                  gemm(ds, k[keys], dq[rows]), *_drop(p, rows, q, k, counter, numbers)]
        for left, right, out in ((ds, q[rows], dk), (p, dy[rows], dv)):
            seen = out[keys]
            if rows[2].stop == q.shape[2]:  # the first block of these heads; no other sees more keys
                unseen = out[(*keys[:2], slice(keys[2].stop, None))]
                calls += [gemm(_swap(left), right, seen),
                          *([ufunc(np.positive, like(out, 0), unseen)] if unseen.size else [])]
            else:
                calls += gemm_add(_swap(left), right, seen, seen, part[: seen.size].reshape(seen.shape))
    return calls


@flash_attention_grad.cuda()
def _(q: Any, k: Any, v: Any, y: Any, lse: Any, dy: Any, dq: Any, dk: Any, dv: Any, *, scale: float,
      causal: bool) -> Any:
    return [Attention("grad", q, k, v, y, lse, scale, causal, dy, dq, dk, dv)]


@regrouped
def _score_grad(p, ds, keep, first, scale, lse, y, dy):  # type: ignore[no-untyped-def]
    """Scores p become probabilities, and their gradients ds the scores' gradients."""
    wide()
    for n in range(p.shape[0]):
        for h in range(p.shape[1]):
            for i in range(p.shape[2]):
                end = min(max(i + first, 0), p.shape[3])
                if keep.size:
                    hide(p[n, h, i, :end], keep[n])
                total = p.dtype.type(0)
                for j in range(y.shape[3]):
                    total += y[n, h, i, j] * dy[n, h, i, j]
                less = lse[n, h, i]
                for j in range(end):
                    e = exp(p[n, h, i, j] * scale - less)
                    p[n, h, i, j] = e
                    ds[n, h, i, j] = e * (ds[n, h, i, j] - total) * scale
                for j in range(end, p.shape[3]):
                    p[n, h, i, j] = 0
                    ds[n, h, i, j] = 0
