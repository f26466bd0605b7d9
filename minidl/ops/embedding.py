"""Embedding: rows of a table."""

from __future__ import annotations

from ..autograd.op import Op, same_dtype
from ..autograd.tensor import Tensor
from .loss import check_labels


class Embedding(Op):
    """table (rows, d) and index (...) int64 -> (..., d)."""

    name = "embedding"

    def forward(self, table: Tensor, index: Tensor) -> Tensor:
        dtype = same_dtype(self, table)
        if table.ndim != 2 or not table.shape[1] or index.dtype != "int64":
            raise self.error(f"needs a table (rows, d), d at least 1, and int64 indices, not "
                             f"{table.shape} and {index.dtype}")
        check_labels(index, table.shape[0])
        self.table, self.index = self.dense(table), index
        y = self.out([*index.shape, table.shape[1]], dtype)
        self.call("embedding", [self.table, index], [y])
        return y

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        grad = self.grad(self.table)
        self.call("embedding_grad", [self.index, self.dense(dy)], [grad], rows=self.table.shape[0])
        return grad


def embedding(table: Tensor, index: Tensor) -> Tensor:
    """The rows of `table` (rows, d) at `index` (...) int64 -> (..., d). Gradients of one row are added in the order of
    the positions."""
    return Embedding()(table, index)
