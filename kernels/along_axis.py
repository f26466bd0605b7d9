"""Running sums and the order of elements along one axis. Arrays are seen as (outer, n, inner)."""

from __future__ import annotations

import math
from typing import Any

from .cuda import c_type, each
from .registry import flat, inlined, kernel, loop


def _reads(reads: Any, writes: Any) -> float:
    return float(reads[0].size)


@kernel("cumsum", axes=lambda reads, *, axis, **_: "n*->n*" if axis else "", flops=_reads)
def cumsum(xp: Any, x: Any, *, axis: int, reverse: bool) -> Any:
    """The sums of the elements up to each place along an axis, or with `reverse` of those from it on."""
    return xp.flip(xp.cumsum(xp.flip(x, axis), axis, dtype=x.dtype), axis) if reverse else xp.cumsum(
        x, axis, dtype=x.dtype)


@cumsum.cpu
def _(x: Any, y: Any, *, axis: int, reverse: bool) -> Any:
    return [loop(_cumsum, flat(x), flat(y), x.shape[axis], math.prod(x.shape[axis + 1 :]), reverse)]


@cumsum.cuda()
def _(x: Any, y: Any, *, axis: int, reverse: bool) -> Any:
    n = x.shape[axis]
    rows = x.size // n if n else 0
    return each("along_axis.cu", f"cumsum<{c_type(x)}>", rows, flat(x), flat(y), n, math.prod(x.shape[axis + 1 :]),
                int(reverse), rows)


def _cumsum(x, y, n, inner, reverse):  # type: ignore[no-untyped-def]
    if n > 0:
        for i in range(x.size // n):
            place = i // inner * n * inner + i % inner + (inner * (n - 1) if reverse else 0)
            total = x[place]
            y[place] = total
            for _ in range(1, n):
                place += -inner if reverse else inner
                total += x[place]
                y[place] = total


@kernel("argsort", axes=lambda reads, *, axis, **_: "n*->n*" if axis else "", flops=_reads)
def argsort(xp: Any, x: Any, *, axis: int, descending: bool = False) -> Any:
    """The places of the elements along an axis in rising or falling order; equal ones keep their order, NaN is the
    largest."""
    if not descending:
        return xp.argsort(x, axis=axis, kind="stable")
    return x.shape[axis] - 1 - xp.flip(xp.argsort(xp.flip(x, axis), axis=axis, kind="stable"), axis)


@argsort.cpu
def _(x: Any, y: Any, *, axis: int, descending: bool = False) -> Any:
    return [loop(_argsort, flat(x), flat(y), x.shape[axis], math.prod(x.shape[axis + 1 :]), descending)]


@argsort.cuda()
def _(x: Any, y: Any, *, axis: int, descending: bool = False) -> Any:
    return each("along_axis.cu", f"argsort<{c_type(x)}>", x.size, flat(x), flat(y), x.shape[axis],
                math.prod(x.shape[axis + 1 :]), int(descending), x.size)


@inlined
def _before(x, start, inner, p, q, descending):  # type: ignore[no-untyped-def]
    """Whether place p of a row comes before place q."""
    a, b = x[start + p * inner], x[start + q * inner]
    if descending:
        a, b = b, a
    return (a < b) | ((b != b) & (a == a)) | (((a == b) | ((a != a) & (b != b))) & (p < q))


def _argsort(x, y, n, inner, descending):  # type: ignore[no-untyped-def]
    """A heap sort of each row by (value, place), in place: stable, and without a workspace."""
    rows = x.size // n if n > 0 else 0
    for i in range(rows):
        start = i // inner * n * inner + i % inner
        for k in range(n):
            y[start + k * inner] = k
        for step in range(n // 2 + n - 1):
            if step < n // 2:  # make a heap, then move its largest element behind it
                root, end = n // 2 - 1 - step, n
            else:
                root, end = 0, n - 1 - (step - n // 2)
                y[start], y[start + end * inner] = y[start + end * inner], y[start]
            while 2 * root + 1 < end:
                child = 2 * root + 1
                p = y[start + child * inner]
                if child + 1 < end:
                    q = y[start + (child + 1) * inner]
                    if _before(x, start, inner, p, q, descending):
                        child, p = child + 1, q
                r = y[start + root * inner]
                if not _before(x, start, inner, r, p, descending):
                    break
                y[start + root * inner], y[start + child * inner] = p, r
                root = child
