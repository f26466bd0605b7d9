"""Scaled dot-product attention. Its probabilities are kept for the gradient; flash_attention.py keeps none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .cuda import c_type, each_row
from .dropout import dropped
from .hints import wide
from .linear import dense, dense_work, gemm, product
from .registry import KERNELS, Thunk, flat, kernel, loop, regrouped
from .scores import groups, softmax_scores, taken


def _swap(a: Any) -> Any:
    return a.swapaxes(-1, -2)


def _flops(reads: Any, writes: Any) -> float:
    q, k = reads[0], reads[1]
    return 4.0 * q.size * k.shape[2]


@kernel("attention", flops=_flops, axes="nhTD,nhSD,nhSE,nS->nhTE,nhTS")
def attention(xp: Any, q: Any, k: Any, v: Any, mask: Any = None, *, scale: float, causal: bool, offset: int = 0) -> Any:
    """q (n, h, t, d), k (n, h, s, d), v (n, h, s, e), mask (n, s), 0 where a key is padding -> (y (n, h, t, e),
    probabilities (n, h, t, s)). `causal`: query i sees keys 0..i + offset. A query that sees no key gives zeros."""
    score = xp.matmul(q * q.dtype.type(scale), _swap(k))
    seen = xp.ones((q.shape[2], k.shape[2]), bool)
    seen = (xp.tril(seen, offset) if causal else seen)[None, None]
    seen = seen if mask is None else seen & (mask != 0)[:, None, None, :]
    top = xp.where(seen, score, -xp.inf).max(axis=-1, keepdims=True)
    e = xp.where(seen, xp.exp(xp.where(seen, score - top, 0)), 0).astype(q.dtype)
    total = e.sum(axis=-1, keepdims=True)
    p = e / xp.where(total > 0, total, 1)
    return xp.matmul(p, v), p


@attention.cpu
def _(q: Any, k: Any, v: Any, *rest: Any, scale: float, causal: bool, offset: int = 0) -> Any:
    *mask, y, p = rest
    return [call for own in _groups(p)
            for call in (*_softmax(q, k, mask, p, own, scale, _of_first(k, causal, offset)),
                         gemm(p[own], v[own], y[own]))]


def _groups(p: Any, dropped: bool = False) -> Iterator[tuple[slice, slice]]:
    """The samples and heads of each block. Dropout takes all heads of a sample together if the scores of one end within
    a block of its generator."""
    n, h, t, s = p.shape
    if dropped and t * s % 4:
        return ((samples, slice(0, h)) for samples, _ in groups(n, 1, h * t * s))
    return groups(n, h, t * s)


def _softmax(q: Any, k: Any, mask: list[Any], p: Any, own: Any, scale: float, first: int) -> list[Thunk]:
    """The probabilities of some heads."""
    keep = mask[0][own[0]] if mask else np.empty((0, 0), np.int64)
    return [gemm(q[own], _swap(k[own]), p[own]),
            loop(softmax_scores, p[own], keep, first, p.dtype.type(scale), np.empty((0, 0, 0), p.dtype))]


@attention.cuda(work=lambda reads, writes, **constants: dense_work(*reads[:3]))
def _(q: Any, k: Any, v: Any, *rest: Any, scale: float, causal: bool, offset: int = 0) -> Any:
    mask, (y, p, *work) = ([rest[0]], rest[1:]) if rest[0].ndim == 2 else ([], rest)
    (q, k, v), copies = dense([q, k, v], work)
    t, width = p.shape[2:]
    rows, numbers = p.size // max(width, 1), (t, width, float(scale), _of_first(k, causal, offset))
    if mask:
        steps = (s // mask[0].dtype.itemsize for s in mask[0].strides)
        softmax = each_row("attention.cu", f"attention_softmax_masked<{c_type(p)}, {c_type(mask[0])}>", rows, width,
                           flat(p), mask[0], *steps, rows, p.shape[1] * t, *numbers)
    else:
        softmax = each_row("attention.cu", f"attention_softmax<{c_type(p)}>", rows, width, flat(p), rows, *numbers)
    return [*copies, *product(q, _swap(k), p), *softmax, *product(p, v, y)]


def _of_first(k: Any, causal: bool, offset: int) -> int:
    """How many keys the first query sees; each query sees one more than the one before, up to all."""
    return offset + 1 if causal else k.shape[2]


def _score_work(p: Any, dropped: bool = False) -> Any:
    """The scratch array of a block's scores: shape and type."""
    n, h, t, s = p.shape
    own = (taken(n, 1, h * t * s)[0], h) if dropped and t * s % 4 else taken(n, h, t * s)
    return (*own, t, s), p.dtype


def _part(scratch: Any, own: Any) -> Any:
    """The scratch array for some heads."""
    return scratch[tuple(slice(s.stop - s.start) for s in own)]


@kernel("attention_grad", axes="nhTD,nhSD,nhSE,nhTS,nhTE->nhTD,nhSD,nhSE",
        flops=lambda reads, writes: 2.0 * _flops(reads, writes),
        work=lambda reads, writes, scale: [_score_work(reads[3])])
def attention_grad(xp: Any, q: Any, k: Any, v: Any, p: Any, dy: Any, *, scale: float) -> Any:
    """(dq, dk, dv) from the kept probabilities."""
    dp = xp.matmul(dy, _swap(v))
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * p.dtype.type(scale)
    return xp.matmul(ds, k), xp.matmul(_swap(ds), q), xp.matmul(_swap(p), dy)


@attention_grad.cpu
def _(q: Any, k: Any, v: Any, p: Any, dy: Any, dq: Any, dk: Any, dv: Any, ds: Any, *, scale: float) -> Any:
    return [call for own in _groups(p)
            for call in (gemm(dy[own], _swap(v[own]), _part(ds, own)),
                         *_grads(q, k, p, p[own], dy, dq, dk, dv, _part(ds, own), own, scale))]


def _grads(q: Any, k: Any, p: Any, z: Any, dy: Any, dq: Any, dk: Any, dv: Any, ds: Any, own: Any, scale: float
           ) -> list[Thunk]:
    """The gradients of some heads, made of their probabilities' gradients `ds`; v was multiplied with z."""
    return [loop(_score_grad, p[own], ds, p.dtype.type(scale)), gemm(ds, k[own], dq[own]),
            gemm(_swap(ds), q[own], dk[own]), gemm(_swap(z), dy[own], dv[own])]


@attention_grad.cuda(work=lambda reads, writes, scale: [(reads[3].shape, reads[3].dtype),
                                                        *dense_work(*reads[:3], reads[4])])
def _(q: Any, k: Any, v: Any, p: Any, dy: Any, dq: Any, dk: Any, dv: Any, ds: Any, *work: Any, scale: float) -> Any:
    (q, k, v, dy), copies = dense([q, k, v, dy], work)
    width = p.shape[3]
    rows = p.size // max(width, 1)
    scores = each_row("attention.cu", f"attention_score_grad<{c_type(p)}>", rows, width, flat(p), flat(ds), rows,
                      width, float(scale))
    return [*copies, *product(dy, _swap(v), ds), *scores, *product(ds, k, dq), *product(_swap(ds), q, dk),
            *product(_swap(p), dy, dv)]


@regrouped
def _score_grad(p, ds, scale):  # type: ignore[no-untyped-def]
    wide()
    for n in range(p.shape[0]):
        for h in range(p.shape[1]):
            for i in range(p.shape[2]):
                total = p.dtype.type(0)
                for j in range(p.shape[3]):
                    total += p[n, h, i, j] * ds[n, h, i, j]
                for j in range(p.shape[3]):
                    ds[n, h, i, j] = p[n, h, i, j] * (ds[n, h, i, j] - total) * scale


# -------------------------------------------------------------------------------------------------------------- dropout
def _dropped(xp: Any, a: Any, counter: Any, numbers: Any) -> Any:
    return KERNELS["dropout"].reference(xp, a, counter, **numbers)


@kernel("attention_dropout", flops=_flops, work=lambda reads, writes, **constants: [_score_work(writes[1], True)],
        axes=lambda reads, **constants: f"sHTD,sHSD,sHSE,{'sS,' * (len(reads) > 4)}C->sHTE,sHTS")
def attention_dropout(xp: Any, q: Any, k: Any, v: Any, *rest: Any, scale: float, causal: bool, offset: int = 0,
                      **numbers: Any) -> Any:
    """As `attention`, but v is multiplied with the probabilities after dropout. `rest`: the mask if there is one, and
    the counter of `dropout`; `numbers`: its other arguments. The probabilities that are returned are those before."""
    *mask, counter = rest
    _, p = attention.reference(xp, q, k, v, *mask, scale=scale, causal=causal, offset=offset)
    return xp.matmul(_dropped(xp, p, counter, numbers), v), p


@attention_dropout.cpu
def _(q: Any, k: Any, v: Any, *rest: Any, scale: float, causal: bool, offset: int = 0, **numbers: Any) -> Any:
    *mask, counter, y, p, z = rest
    return [call for own in _groups(p, True)
            for call in (*_softmax(q, k, mask, p, own, scale, _of_first(k, causal, offset)),
                         _drop(p[own], counter, _part(z, own), own, numbers),
                         gemm(_part(z, own), v[own], y[own]))]


def _drop(p: Any, counter: Any, z: Any, own: Any, numbers: Any) -> Thunk:
    """z: p, the scores of some heads, after dropout. The same elements are dropped as by `dropout` of all."""
    (samples, heads), (n, _, t, s) = own, p.shape
    rows = n, p.size // max(n, 1)
    return dropped(p.reshape(rows), counter, z.reshape(rows), heads.start * t * s // 4,
                   **{**numbers, "sample": numbers["sample"] + samples.start})


@attention_dropout.cuda(work=lambda reads, writes, **constants: [(writes[1].shape, writes[1].dtype),
                                                                 *dense_work(*reads[:3])])
def _(q: Any, k: Any, v: Any, *rest: Any, scale: float, causal: bool, offset: int = 0, **numbers: Any) -> Any:
    masks = int(rest[0].ndim == 2)
    counter, y, p, z, *work = rest[masks:]
    (q, k, v), copies = dense([q, k, v], work)
    given = [q, k, v, *rest[:masks]]
    softmax = attention.cuda_calls(given, [y, p], [], {"scale": scale, "causal": causal, "offset": offset})
    return [*copies, *softmax[: len(softmax) - len(product(p, v, y))],
            *KERNELS["dropout"].cuda_calls([p, counter], [z], [], numbers), *product(z, v, y)]


@kernel("attention_dropout_grad", axes="sHTD,sHSD,sHSE,sHTS,C,sHTE->sHTD,sHSD,sHSE",
        flops=lambda reads, writes, **constants: 2.0 * _flops(reads, writes),
        work=lambda reads, writes, **constants: [_score_work(reads[3], True)] * 2)
def attention_dropout_grad(xp: Any, q: Any, k: Any, v: Any, p: Any, counter: Any, dy: Any, *, scale: float,
                           **numbers: Any) -> Any:
    """(dq, dk, dv) from the kept probabilities; the same elements are dropped again."""
    dp = _dropped(xp, xp.matmul(dy, _swap(v)), counter, numbers)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * p.dtype.type(scale)
    return xp.matmul(ds, k), xp.matmul(_swap(ds), q), xp.matmul(_swap(_dropped(xp, p, counter, numbers)), dy)


@attention_dropout_grad.cpu
def _(q: Any, k: Any, v: Any, p: Any, counter: Any, dy: Any, dq: Any, dk: Any, dv: Any, ds: Any, z: Any, *,
      scale: float, **numbers: Any) -> Any:
    calls = []
    for own in _groups(p, True):
        d, kept = _part(ds, own), _part(z, own)
        calls += [gemm(dy[own], _swap(v[own]), kept), _drop(kept, counter, d, own, numbers),
                  _drop(p[own], counter, kept, own, numbers),
                  *_grads(q, k, p, kept, dy, dq, dk, dv, d, own, scale)]
    return calls


@attention_dropout_grad.cuda(work=lambda reads, writes, **constants: [(reads[3].shape, reads[3].dtype)] * 2
                             + dense_work(*reads[:3], reads[5]))
def _(q: Any, k: Any, v: Any, p: Any, counter: Any, dy: Any, dq: Any, dk: Any, dv: Any, ds: Any, z: Any, *work: Any,
      scale: float, **numbers: Any) -> Any:
    (q, k, v, dy), copies = dense([q, k, v, dy], work)
    drop, width = KERNELS["dropout"], p.shape[3]
    rows = p.size // max(width, 1)
    scores = each_row("attention.cu", f"attention_score_grad<{c_type(p)}>", rows, width, flat(p), flat(ds), rows,
                      width, float(scale))
    return [*copies, *product(dy, _swap(v), z), *drop.cuda_calls([z, counter], [ds], [], numbers),
            *drop.cuda_calls([p, counter], [z], [], numbers), *scores, *product(ds, k, dq),
            *product(_swap(ds), q, dk), *product(_swap(z), dy, dv)]
