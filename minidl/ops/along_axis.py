"""Along one axis: running sums, the order of the elements, the largest ones, the logarithm of a sum, norms."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..autograd.op import Op, same_dtype
from ..autograd.tensor import ShapeError, Tensor
from .elementwise import Alike, absolute, exp, log
from .extremes import Extremes, amax
from .index import gather
from .join import cut
from .masks import compare, where
from .names import with_dim
from .reduce import axes_of, finish, total
from .shape import axis_of


class CumSum(Op):
    """The sums of the elements up to each place. The gradient sums from the end."""

    name = "cumsum"

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        dtype = same_dtype(self, x)
        self.x = self.dense(x)
        return self.out_by("cumsum", [self.x], x.shape, dtype, axis=self.axis, reverse=False)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by("cumsum", [self.dense(dy)], self.x, axis=self.axis, reverse=True)


class ArgSort(Op):
    """The places of the elements in rising or falling order, int64."""

    name = "argsort"

    def __init__(self, axis: int, descending: bool) -> None:
        self.axis, self.descending = axis, descending

    def forward(self, x: Tensor) -> Tensor:
        same_dtype(self, x)
        return self.out_by("argsort", [self.dense(x)], x.shape, "int64", axis=self.axis, descending=self.descending)


@with_dim
def cumsum(x: Tensor, axis: int) -> Tensor:
    """The sums of the elements up to each place along one axis."""
    return CumSum(axis_of(x, axis, "cumsum"))(x)


@with_dim
def argsort(x: Tensor, axis: int = -1, descending: bool = False) -> Tensor:
    """Places (int64) of the elements along an axis, rising or falling; equal ones keep their order, NaN is largest."""
    return ArgSort(axis_of(x, axis, "argsort"), bool(descending))(x)


@with_dim
def sort(x: Tensor, axis: int = -1, descending: bool = False) -> Extremes:
    """(values, indices): the elements along one axis in order, and their places; as `argsort`."""
    places = argsort(x, axis, descending)
    return Extremes(gather(x, axis, places), places)


@with_dim
def topk(x: Tensor, k: int, axis: int = -1, largest: bool = True) -> Extremes:
    """(values, indices) of the k largest or smallest elements along one axis, the first one first; NaN is the largest.
    Raises ShapeError for another k than the axis has."""
    axis = axis_of(x, axis, "topk")
    if not 0 < k <= x.shape[axis]:
        raise ShapeError(f"topk: k is {k}; an axis of {x.shape[axis]} elements has from 1 to {x.shape[axis]}")
    places = cut(argsort(x, axis, largest), (slice(None),) * axis + (slice(0, k),))
    return Extremes(gather(x, axis, places), places)


@with_dim
def logsumexp(x: Tensor, axis: int | Sequence[int], keepdims: bool = False) -> Tensor:
    """log(sum(exp(x))), without overflow."""
    axes = axes_of(x, axis, "logsumexp")
    top = amax(x, axes, keepdims=True).detach()
    top = where(compare("less", absolute(top), math.inf), top, 0)  # where all are -inf, so is the result
    return finish(log(total(exp(x - top), axes, keepdims=True)) + top, axes, keepdims)


def root(x: Tensor) -> Tensor:
    """The square root of a sum of squares. Its gradient is 0 at 0, where each square has the slope 0."""
    return Alike("sqrt", "root_grad y dy")(x)


@with_dim
def norm(x: Tensor, p: float = 2.0, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """The norm over `axis` (default: all): of p = 1, 2 or inf, else ValueError. The gradient of a norm of 0 is 0."""
    if p == 2:
        return root(total(x * x, axis, keepdims))
    if p == 1:
        return total(absolute(x), axis, keepdims)
    if p == math.inf:
        return amax(absolute(x), axis, keepdims)
    raise ValueError(f"norm: p is {p}; it must be 1, 2 or inf")
