"""Sum and mean over axes; and repetition along axes, whose gradient is a sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..autograd import tape as tapes
from ..autograd.op import Op, same_dtype
from ..autograd.tensor import ShapeError, Tensor, new
from ..core.graph import Role
from .cast import astype
from .names import with_dim
from .shape import axis_of, reshape


def axes_of(x: Tensor, axis: int | Sequence[int] | None, name: str) -> tuple[int, ...]:
    """Axes as sorted numbers from 0. Raises ShapeError, and TypeError for no numbers."""
    given = range(x.ndim) if axis is None else axis if isinstance(axis, Sequence) else [axis]
    axes = tuple(sorted(axis_of(x, a, name) for a in given))
    if len(set(axes)) < len(axes):
        raise ShapeError(f"{name}: axis {axis} does not fit shape {x.shape}")
    return axes


class Sum(Op):
    """The sum over axes, which are kept with length 1. `average`: divides by their size."""

    name = "sum"

    def __init__(self, axes: tuple[int, ...], average: bool) -> None:
        self.axes, self.average = axes, average

    def forward(self, x: Tensor) -> Tensor:
        dtype = same_dtype(self, x, also=() if self.average else ("int64",))
        self.x = x
        count = math.prod(x.shape[a] for a in self.axes)
        if self.average and not count:
            raise self.error(f"shape {x.shape} has no elements to average")
        self.factor = 1.0 / count if self.average else 1.0
        return self.out_by("sum", [x], [1 if a in self.axes else n for a, n in enumerate(x.shape)], dtype,
                           axes=self.axes, factor=self.factor)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by("spread", [dy, self.x], self.x, factor=self.factor)


def finish(y: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    """y, which has kept the reduced axes with length 1, with or without them."""
    return y if keepdims else reshape(y, [n for a, n in enumerate(y.shape) if a not in axes])


@with_dim
def total(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """The sum over `axis` (default: all). That of a mask or of whole numbers is int64."""
    axes = axes_of(x, axis, "sum")
    if np.dtype(x.dtype).kind in "biu":
        x = astype(x, "int64")
    return finish(Sum(axes, False)(x), axes, keepdims)


@with_dim
def mean(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """The mean over `axis` (default: all)."""
    axes = axes_of(x, axis, "mean")
    return finish(Sum(axes, True)(x), axes, keepdims)


@with_dim
def variance(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False, *,
             correction: float) -> Tensor:
    """The sum of squares of what differs from the mean over `axis` (default: all), divided by the number of elements
    less `correction`: 1 is torch's default, 0 NumPy's."""
    axes = axes_of(x, axis, "var")
    d = x - mean(x, axes, True)
    count = math.prod(x.shape[a] for a in axes) - correction
    if not count > 0:
        raise ShapeError(f"var: {count + correction:g} elements are too few for a correction of {correction:g}")
    return total(d * d, axes, keepdims) / count


def sum_to(g: Tensor, t: Tensor) -> Tensor:
    """g summed over the axes that broadcasting has added to t's shape; part of the open task."""
    if g.shape == t.shape:
        return g
    extra = g.ndim - t.ndim
    axes = tuple(a for a in range(g.ndim) if a < extra or (t.shape[a - extra] == 1 and g.shape[a] != 1))
    y = new(f"grad {t.storage.name}", [1 if a in axes else n for a, n in enumerate(g.shape)], g.dtype, Role.GRADIENT)
    tapes.current().call("sum", [g], [y], axes=axes)
    return Tensor(y.storage, t.shape)


class Broadcast(Op):
    """Repeats along new axes and axes of length 1: a view with stride 0."""

    name = "broadcast_to"

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    def forward(self, x: Tensor) -> Tensor:
        extra = len(self.shape) - x.ndim
        if extra < 0 or any(n not in (1, m) for n, m in zip(x.shape, self.shape[extra:], strict=True)):
            raise self.error(f"shape {x.shape} does not broadcast to {self.shape}")
        self.x = x
        return x.seen(self.shape, [0] * extra + [0 if n == 1 else s for n, s in zip(x.shape, x.strides, strict=True)])

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return sum_to(dy, self.x)


def broadcast_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """x repeated to `shape`."""
    return Broadcast(shape)(x)
