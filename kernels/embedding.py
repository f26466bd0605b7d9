"""Rows of a table by number, and the sum of gradients back to those rows, always in the order of the positions."""

from __future__ import annotations

import math
from typing import Any

from .cuda import Call, Grid, c_type, each, each_row, steps, strides
from .registry import kernel, loop

PIECE = 2048  #: positions that a CUDA block sorts
OUTSIDE = "an index that the step has computed is out of range"  #: others are known before it runs: check_range


@kernel("embedding", axes=lambda reads: "RD,n*->n*" if reads[1].ndim else "")
def embedding(xp: Any, table: Any, index: Any) -> Any:
    """table (rows, d), index (...) int64 -> (..., d)."""
    return table[index]


@embedding.cpu
def _(table: Any, index: Any, y: Any) -> Any:
    return [loop(_embedding, table, index.reshape(-1) if index.flags.c_contiguous else index,
                 y.reshape(-1, table.shape[1]))]


@embedding.cuda()
def _(table: Any, index: Any, y: Any) -> Any:
    size = index.size, table.shape[1]
    return each_row("embedding.cu", f"embedding<{c_type(table)}>", *size, table, index,
                    strides(index.shape, steps(index, index.shape)), y, *size)


def _embedding(table, index, y):  # type: ignore[no-untyped-def]
    for n, row in enumerate(index.flat):
        if row < 0 or row >= table.shape[0]:
            raise IndexError(OUTSIDE)
        for j in range(y.shape[1]):
            y[n, j] = table[row, j]


@kernel("embedding_grad", axes="*,*c->Rc", flops=lambda reads, writes: float(reads[1].size))
def embedding_grad(xp: Any, index: Any, dy: Any, *, rows: int) -> Any:
    """d table (rows, d): row r is the sum of dy where index is r, added in the order of the positions.

    Each round adds the next gradient of every row, so no two additions of a round collide, and the order is fixed on
    any device.
    """
    index, dy = index.reshape(-1), dy.reshape(index.size, -1)
    grad = xp.zeros((rows, dy.shape[1]), dy.dtype)
    order = xp.argsort(index, kind="stable")
    place = xp.arange(index.size)
    place = place - xp.searchsorted(index[order], index[order])  # how many earlier positions have the same row
    for turn in range(int(place.max()) + 1 if index.size else 0):
        mine = order[place == turn]
        grad[index[mine]] += dy[mine]
    return grad


@embedding_grad.cpu
def _(index: Any, dy: Any, grad: Any, *, rows: int) -> Any:
    return [loop(_embedding_grad, index.reshape(-1) if index.flags.c_contiguous else index,
                 dy.reshape(-1, grad.shape[1]), grad)]


def _few(positions: int, rows: int, width: int) -> bool:
    """Whether CUDA searches all positions for each row: if there are few positions, and few per row."""
    return positions <= min(1024, 32 * rows) and positions * rows * -(-width // 128) <= 2**24


def _sorted(reads: Any, writes: Any, *, rows: int) -> list[Any]:
    """The scratch arrays: keys, positions by row, and where the positions of each row begin."""
    n = math.prod(reads[0].shape)
    return [] if _few(n, rows, writes[0].shape[1]) else _by_row(n, rows)


def _by_row(n: int, rows: int) -> list[Any]:
    return [((n,), "uint64"), ((n,), "int32"), ((rows + 1,), "int32")]


def _sort(index: Any, work: Any, rows: int) -> list[Call]:
    """Launches that sort the positions by row, and find where the positions of each row begin."""
    (keys, order, begins), n = work, index.size
    pieces = Grid("embedding.cu", "embedding_sort", (-(-n // PIECE),), (PIECE // 2,),
                  (index, strides(index.shape, steps(index, index.shape)), n, keys))
    return [*[pieces][:n], *each("embedding.cu", "embedding_order", n + rows + 1, keys, n, rows, order, begins)]


@embedding_grad.cuda(_sorted)
def _(index: Any, dy: Any, grad: Any, *work: Any, rows: int) -> Any:
    """For few positions one launch, with rows * positions / 32 steps of a warp. Else three launches: pieces of the
    positions are sorted by row, merged by rank, which takes (rows + positions) * positions / 2048 searches of 11 steps,
    and summed.

    A row's gradients are added in the order of its positions; more than 64 of them as the sums of eight equal parts.
    """
    if not grad.size:
        return []
    n, width = index.size, grad.shape[1]
    name, given = f"<{c_type(dy)}>", (index, strides(index.shape, steps(index, index.shape)))
    blocks = min(-(-rows // 8), 2112), -(-width // 128)
    if not work:
        return [Grid("embedding.cu", "embedding_grad" + name, blocks, (256,), (*given, dy, grad, n, rows, width))]
    return [*_sort(index, work, rows),
            Grid("embedding.cu", "embedding_sums" + name, blocks, (256,), (*work[1:], dy, grad, rows, width))]


@kernel("embedding_largest", axes="*,*c->Rc", flops=lambda reads, writes: float(reads[1].size))
def embedding_largest(xp: Any, index: Any, x: Any, *, rows: int) -> Any:
    """(rows, d) int64: `rows` plus the position of the largest of the elements x (..., d) whose index is r, of equal
    ones the first; r if there are none. NaN is the largest."""
    index, x = index.reshape(-1), x.reshape(index.size, -1)
    found = xp.repeat(xp.arange(rows)[:, None], x.shape[1], 1)
    for row in range(rows):
        if (mine := xp.flatnonzero(index == row)).size:
            found[row] = rows + mine[xp.argmax(x[mine], 0)]
    return found


@embedding_largest.cpu
def _(index: Any, x: Any, found: Any, *, rows: int) -> Any:
    return [loop(_embedding_largest, index.reshape(-1) if index.flags.c_contiguous else index,
                 x.reshape(-1, found.shape[1]), found)]


@embedding_largest.cuda(lambda reads, writes, *, rows: _by_row(reads[0].size, rows))
def _(index: Any, x: Any, found: Any, *work: Any, rows: int) -> Any:
    return [*_sort(index, work, rows), *each("embedding.cu", f"embedding_largest<{c_type(x)}>", found.size, *work[1:],
                                             x, found, rows, found.shape[1], found.size)]


def _embedding_largest(index, x, found):  # type: ignore[no-untyped-def]
    rows = found.shape[0]
    for i in range(rows):
        for j in range(found.shape[1]):
            found[i, j] = i
    for n, row in enumerate(index.flat):
        if row < 0 or row >= rows:
            raise IndexError(OUTSIDE)
        for j in range(found.shape[1]):
            best = found[row, j] - rows
            if best < 0 or x[n, j] > x[best, j] or (x[n, j] != x[n, j] and x[best, j] == x[best, j]):
                found[row, j] = rows + n


def _embedding_grad(index, dy, grad):  # type: ignore[no-untyped-def]
    for i in range(grad.shape[0]):
        for j in range(grad.shape[1]):
            grad[i, j] = 0
    for n, row in enumerate(index.flat):
        if row < 0 or row >= grad.shape[0]:
            raise IndexError(OUTSIDE)
        for j in range(grad.shape[1]):
            grad[row, j] += dy[n, j]
