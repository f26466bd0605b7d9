"""Embedding: rows of a table."""

from __future__ import annotations

from ..autograd.op import Op, same_dtype
from ..autograd.tensor import Tensor
from ..kernels.registry import check_range


class Embedding(Op):
    """table (rows, d) and index (...) int64 -> (..., d)."""

    name = "embedding"

    def __init__(self, padding: int | None = None) -> None:
        self.padding = padding

    def forward(self, table: Tensor, index: Tensor) -> Tensor:
        dtype = same_dtype(self, table)
        if table.ndim != 2 or not table.shape[1] or index.dtype != "int64":
            raise self.error(f"needs a table (rows, d), d at least 1, and int64 indices, not "
                             f"{table.shape} and {index.dtype}")
        if not index.storage.recorded:  # while recording: when the step runs
            check_range("index", index.numpy(), table.shape[0])
        if self.padding is not None and not 0 <= self.padding < table.shape[0]:
            raise self.error(f"padding_idx is {self.padding}; it must be from 0 to {table.shape[0] - 1}")
        self.table, self.index = self.dense(table), index
        return self.out_by("embedding", [self.table, index], [*index.shape, table.shape[1]], dtype)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        grad = self.grad(self.table)
        self.call("embedding_grad", [self.index, self.dense(dy)], [grad], rows=self.table.shape[0])
        if self.padding is not None:
            row = grad.seen(grad.shape[1:], begin=self.padding * grad.shape[1])
            self.call("fill", [row], [row], value=0.0)
        return grad


def embedding(table: Tensor, index: Tensor, padding_idx: int | None = None) -> Tensor:
    """The rows of `table` (rows, d) at `index` (...) int64 -> (..., d). Gradients of one row are added in the order of
    the positions. `padding_idx`: a row that gets no gradient."""
    return Embedding(padding_idx)(table, index)
