"""Rows of a table by number, and the sum of gradients back to those rows, always in the order of the positions."""

from __future__ import annotations

from typing import Any

from .registry import kernel, loop


@kernel("embedding")
def embedding(xp: Any, table: Any, index: Any) -> Any:
    """table (rows, d), index (...) int64 -> (..., d)."""
    return table[index]


@embedding.cpu
def _(table: Any, index: Any, y: Any) -> Any:
    return [loop(_embedding, table, index.reshape(-1) if index.flags.c_contiguous else index,
                 y.reshape(-1, table.shape[1]))]


def _embedding(table, index, y):  # type: ignore[no-untyped-def]
    for n, row in enumerate(index.flat):
        for j in range(y.shape[1]):
            y[n, j] = table[row, j]


@kernel("embedding_grad", flops=lambda reads, writes: float(reads[1].size))
def embedding_grad(xp: Any, index: Any, dy: Any, *, rows: int) -> Any:
    """d table (rows, d): row r is the sum of dy where index is r, added in the order of the positions.

    One round adds each row's next gradient, so no two of a round meet and the order is fixed on any device.
    """
    index, dy = index.reshape(-1), dy.reshape(index.size, -1)
    grad = xp.zeros((rows, dy.shape[1]), dy.dtype)
    order = xp.argsort(index, kind="stable")
    place = xp.arange(index.size)
    place = place - xp.searchsorted(index[order], index[order])  # how many of the same row come before
    for turn in range(int(place.max()) + 1 if index.size else 0):
        mine = order[place == turn]
        grad[index[mine]] += dy[mine]
    return grad


@embedding_grad.cpu
def _(index: Any, dy: Any, grad: Any, *, rows: int) -> Any:
    return [loop(_embedding_grad, index.reshape(-1) if index.flags.c_contiguous else index,
                 dy.reshape(-1, grad.shape[1]), grad)]


def _embedding_grad(index, dy, grad):  # type: ignore[no-untyped-def]
    for i in range(grad.shape[0]):
        for j in range(grad.shape[1]):
            grad[i, j] = 0
    for n, row in enumerate(index.flat):
        for j in range(grad.shape[1]):
            grad[row, j] += dy[n, j]
