"""Other views of the same memory. They emit no task unless data must be copied."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..autograd.op import Op
from ..autograd.tensor import ShapeError, Tensor
from .names import with_dim


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
        return self.dense(x).seen(shape)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.dense(dy).seen(self.x.shape)


class Axes(Op):
    """Other axes, a view: see `with_axes`. Axes that are left out have the length 1."""

    def __init__(self, name: str, order: Sequence[int | None]) -> None:
        self.name, self.order = name, order

    def forward(self, x: Tensor) -> Tensor:
        self.back = [self.order.index(a) if a in self.order else None for a in range(x.ndim)]
        return with_axes(x, self.order)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return with_axes(dy, self.back)


def with_axes(t: Tensor, order: Sequence[int | None]) -> Tensor:
    """A view with these axes of t in this order; None is a new one of length 1."""
    return t.seen([1 if a is None else t.shape[a] for a in order], [0 if a is None else t.strides[a] for a in order])


def axis_of(x: Tensor, axis: int, name: str, more: int = 0) -> int:
    """The axis as a number from 0, of x with `more` further axes. Raises ShapeError, and TypeError for no number."""
    if not isinstance(axis, int | np.integer) or isinstance(axis, bool):
        raise TypeError(f"{name}: the axis is {axis!r}; it must be a whole number")
    if not -x.ndim - more <= axis < x.ndim + more:
        raise ShapeError(f"{name}: axis {axis} does not fit shape {x.shape}")
    return int(axis) + x.ndim + more if axis < 0 else int(axis)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The same elements in row-major order under another shape."""
    return Reshape(shape)(x)


def flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """x with the axes from `start_dim` up to and with `end_dim` merged into one."""
    if not x.ndim:
        return reshape(x, [1])
    start, end = axis_of(x, start_dim, "flatten"), axis_of(x, end_dim, "flatten")
    if start > end:
        raise ShapeError(f"flatten: axis {start} comes after axis {end}")
    merged = math.prod(x.shape[start : end + 1])
    return x if start == end else Reshape([*x.shape[:start], merged, *x.shape[end + 1 :]])(x)


def transpose(x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    """x with its axes in another order, by default reversed; a view."""
    order = tuple(range(x.ndim))[::-1] if not axes else tuple(a + x.ndim if a < 0 else a for a in axes)
    op = Axes("transpose", order)
    if sorted(order) != list(range(x.ndim)):
        raise op.error(f"axes {axes} do not fit shape {x.shape}")
    return op(x)


def swap_axes(x: Tensor, first: int, second: int) -> Tensor:
    """x with two axes exchanged; a view."""
    order = list(range(x.ndim))
    a, b = axis_of(x, first, "swap_axes"), axis_of(x, second, "swap_axes")
    order[a], order[b] = b, a
    return Axes("transpose", order)(x)


@with_dim
def unsqueeze(x: Tensor, axis: int) -> Tensor:
    """x with a new axis of length 1 before this one; a view."""
    order: list[int | None] = [*range(x.ndim)]
    order.insert(axis_of(x, axis, "unsqueeze", 1), None)
    return Axes("unsqueeze", order)(x)


@with_dim
def squeeze(x: Tensor, axis: int | None = None) -> Tensor:
    """x without this axis if its length is 1, or without all such axes; a view."""
    chosen = range(x.ndim) if axis is None else [axis_of(x, axis, "squeeze")]
    kept = [a for a, n in enumerate(x.shape) if n != 1 or a not in chosen]
    return Axes("squeeze", kept)(x) if len(kept) < x.ndim else x
