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


class Ones(Op):
    """New axes of length 1 at these places of the result (`unsqueeze`), or without these axes (`squeeze`); a view."""

    def __init__(self, name: str, places: Sequence[int]) -> None:
        self.name, self.places = name, places

    def forward(self, x: Tensor) -> Tensor:
        return (_with_ones if self.name == "unsqueeze" else _without)(x, self.places)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return (_without if self.name == "unsqueeze" else _with_ones)(dy, self.places)


def _with_ones(x: Tensor, places: Sequence[int]) -> Tensor:
    shape, strides = list(x.shape), list(x.strides)
    for a in sorted(places):
        shape.insert(a, 1)
        strides.insert(a, 0)
    return Tensor(x.storage, shape, strides, x.offset, parts=x.parts)


def _without(x: Tensor, places: Sequence[int]) -> Tensor:
    kept = [a for a in range(x.ndim) if a not in places]
    return Tensor(x.storage, [x.shape[a] for a in kept], [x.strides[a] for a in kept], x.offset, parts=x.parts)


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
    return Transpose(axes)(x)


def swap_axes(x: Tensor, first: int, second: int) -> Tensor:
    """x with two axes exchanged; a view."""
    order = list(range(x.ndim))
    a, b = axis_of(x, first, "swap_axes"), axis_of(x, second, "swap_axes")
    order[a], order[b] = b, a
    return Transpose(order)(x)


@with_dim
def unsqueeze(x: Tensor, axis: int) -> Tensor:
    """x with a new axis of length 1 before this one; a view."""
    return Ones("unsqueeze", [axis_of(x, axis, "unsqueeze", 1)])(x)


@with_dim
def squeeze(x: Tensor, axis: int | None = None) -> Tensor:
    """x without this axis if its length is 1, or without all such axes; a view."""
    places = ([a for a, n in enumerate(x.shape) if n == 1] if axis is None
              else [a for a in [axis_of(x, axis, "squeeze")] if x.shape[a] == 1])
    return Ones("squeeze", places)(x) if places else x
