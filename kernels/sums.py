"""Sums over rows, in a fixed order and close to exact: blocks in the arrays' own type, their totals in float64."""

from __future__ import annotations

from typing import Any

from .registry import Thunk, loop

BLOCK = 64


def row_sums_work(columns: int) -> list[Any]:
    """The scratch array that `row_sums` needs."""
    return [((columns,), "float64")]


def row_sums(x: Any, out: Any, total: Any) -> list[Thunk]:
    """out (c,) = the sum of x (m, c) over its rows."""
    return [loop(_row_sums, x, out, total)]


def _row_sums(x, out, total):  # type: ignore[no-untyped-def]
    total[:] = 0
    for first in range(0, x.shape[0], BLOCK):
        out[:] = 0
        for i in range(first, min(first + BLOCK, x.shape[0])):
            for j in range(x.shape[1]):
                out[j] += x[i, j]
        for j in range(x.shape[1]):
            total[j] += out[j]
    for j in range(x.shape[1]):
        out[j] = total[j]
