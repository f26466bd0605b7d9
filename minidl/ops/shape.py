"""Other views of the same memory. They emit no task unless data must be copied."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..autograd.op import Op
from ..autograd.tensor import Tensor


class Reshape(Op):
    """A view where the memory is contiguous, a copy elsewhere. One length may be -1."""

    name = "reshape"

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    def forward(self, x: Tensor) -> Tensor:
        shape = list(self.shape)
        if shape.count(-1) == 1:
            rest = -math.prod(shape)
            shape[shape.index(-1)] = x.size // rest if rest else 0
        if math.prod(shape) != x.size or any(n < 0 for n in shape):
            raise self.error(f"shape {x.shape} ({x.size} elements) does not fit {self.shape}")
        self.x = x
        dense = self.dense(x)
        return Tensor(dense.storage, shape, offset=dense.offset, parts=dense.parts)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        dense = self.dense(dy)
        return Tensor(dense.storage, self.x.shape, offset=dense.offset, parts=dense.parts)


class Transpose(Op):
    """Axes in another order, a view."""

    name = "transpose"

    def __init__(self, axes: Sequence[int] | None) -> None:
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        axes = tuple(range(x.ndim))[::-1] if not self.axes else tuple(a + x.ndim if a < 0 else a for a in self.axes)
        if sorted(axes) != list(range(x.ndim)):
            raise self.error(f"axes {self.axes} do not fit shape {x.shape}")
        self.order = axes
        return Tensor(x.storage, [x.shape[a] for a in axes], [x.strides[a] for a in axes], x.offset, parts=x.parts)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        back = [self.order.index(a) for a in range(dy.ndim)]
        return Tensor(dy.storage, [dy.shape[a] for a in back], [dy.strides[a] for a in back], dy.offset, parts=dy.parts)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The same elements in row-major order under another shape."""
    return Reshape(shape)(x)


def flatten(x: Tensor, start: int = 1) -> Tensor:
    """x with all axes from `start` on merged into one."""
    return x if x.ndim == start + 1 else Reshape([*x.shape[:start], -1])(x)


def transpose(x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    """x with its axes in another order, by default reversed; a view."""
    return Transpose(axes)(x)
