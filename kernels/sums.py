"""Sums over rows, in a fixed order and close to exact: blocks in the arrays' own type, their totals in float64."""

from __future__ import annotations

from typing import Any

from .cuda import Call, Grid, c_type
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


def _tile(columns: int) -> tuple[int, int]:
    """Threads of a CUDA block along columns and along rows, so that neighbours in memory are read together even with
    few columns."""
    across = 1 << min((columns - 1).bit_length(), 5)
    return across, 512 // across


def _parts(rows: int, columns: int) -> int:
    """Into how many parts CUDA cuts the rows: 16 rows per thread, until the blocks fill a device."""
    across, down = _tile(columns)
    blocks = -(-columns // across)
    return max(1, min(-(-rows // (16 * down)), 512, 1056 // blocks))


def cuda_row_sums_work(rows: int, columns: int) -> list[Any]:
    """The scratch arrays of `cuda_row_sums`: none if one launch suffices."""
    parts = _parts(rows, columns) if columns else 1
    return [((parts, columns), "float64")] if parts > 1 else []


def cuda_row_sums(x: Any, out: Any, *work: Any) -> list[Call]:
    """`row_sums` on CUDA: x (m, c) of any strides -> out (c,). One launch, or two with the parts' sums in `work`."""
    rows, columns = x.shape
    if not columns:
        return []
    steps = (x.strides[0] // x.dtype.itemsize, x.strides[1] // x.dtype.itemsize)

    def launch(kernel: str, source: Any, to: Any, rows: int, steps: tuple[int, int], parts: int) -> Call:
        threads = _tile(columns)
        return Grid("sums.cu", kernel, (-(-columns // threads[0]), parts), threads,
                    (source, to, rows, columns, *steps, max(-(-rows // parts), 1)))

    name = c_type(x), c_type(out)
    if not work:
        return [launch(f"row_sums<{name[0]}, {name[1]}>", x, out, rows, steps, 1)]
    parts = len(work[0])
    return [launch(f"row_sums<{name[0]}, double>", x, work[0], rows, steps, parts),
            launch(f"row_sums<double, {name[1]}>", work[0], out, parts, (columns, 1), 1)]
