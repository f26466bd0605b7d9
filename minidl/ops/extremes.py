"""Maxima and minima over axes, and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..autograd.op import Op, same_dtype
from ..autograd.tensor import Tensor
from .elementwise import neg
from .index import gather
from .names import with_dim
from .reduce import axes_of, finish
from .shape import axis_of, reshape, squeeze


class Max(Op):
    """The maximum over axes, which are kept with length 1. Equal maxima share the gradient evenly."""

    name = "max"

    def __init__(self, axes: tuple[int, ...]) -> None:
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        dtype = same_dtype(self, x)
        if any(x.shape[a] == 0 for a in self.axes):
            raise self.error(f"shape {x.shape} has no elements, so no maximum")
        shape = [1 if a in self.axes else n for a, n in enumerate(x.shape)]
        self.x, self.y = x, self.out_by("max", [x], shape, dtype, axes=self.axes)
        return self.y

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by("max_grad", [self.x, self.y, dy], self.x, axes=self.axes)


@with_dim
def amax(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """The maximum over `axis` (default: all)."""
    axes = axes_of(x, axis, "max")
    return finish(Max(axes)(x), axes, keepdims)


@with_dim
def amin(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """The minimum over `axis` (default: all)."""
    return neg(amax(neg(x), axis, keepdims))


class ArgMax(Op):
    """Where the maximum along one axis is."""

    name = "argmax"

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        same_dtype(self, x)
        if not x.shape[self.axis]:
            raise self.error(f"shape {x.shape} has no elements along axis {self.axis}, so no maximum")
        return self.out_by("argmax", [self.dense(x)], [1 if a == self.axis else n for a, n in enumerate(x.shape)],
                           "int64", axis=self.axis)


@with_dim
def argmax(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Where along `axis` the maximum is, int64: the first of equal ones; without an axis, of the flattened x."""
    if axis is None:
        return reshape(ArgMax(0)(reshape(x, [x.size])), [1] * x.ndim if keepdims else [])
    return finish(ArgMax(axis_of(x, axis, "argmax"))(x), (axis_of(x, axis, "argmax"),), keepdims)


@with_dim
def argmin(x: Tensor, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """The same for the minimum."""
    return argmax(neg(x), axis, keepdims)


class Extremes(NamedTuple):
    """The result of torch's `x.max(dim)`: the values, and their places along the axis."""

    values: Tensor
    indices: Tensor


def max_with_indices(x: Tensor, axis: int, keepdims: bool = False) -> Extremes:
    """The maxima along one axis and where they are; the first of equal ones gets the gradient."""
    axis = axis_of(x, axis, "max")
    places = argmax(x, axis, keepdims=True)
    values = gather(x, axis, places)
    return Extremes(values, places) if keepdims else Extremes(squeeze(values, axis), squeeze(places, axis))


def min_with_indices(x: Tensor, axis: int, keepdims: bool = False) -> Extremes:
    """The same for minima."""
    values, places = max_with_indices(neg(x), axis, keepdims)
    return Extremes(neg(values), places)
