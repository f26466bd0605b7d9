"""Sums and copies to the places that an index names, as graph networks use them: what indexing does, backwards."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..autograd.op import same_dtype
from ..autograd.tensor import ShapeError, Tensor, array
from .cast import astype
from .elementwise import mul
from .index import Places, Take, along, gather
from .join import concat, cut
from .masks import operand
from .names import with_dim
from .reduce import broadcast_to
from .shape import axis_of, reshape, swap_axes


class IndexAdd(Places):
    """x (a, b, ..., rest), source (shape, rest), for each of x's first axes an index -> x + the sums of the source's
    rows that go to one place, added in the order of their positions. Whole numbers are counted."""

    name = "index_add"
    precision = "widest"

    def forward(self, x: Tensor, source: Tensor, *index: Tensor) -> Tensor:
        dtype = same_dtype(self, x, source, also=("int64",))
        self.places(x.shape[: len(index)], x.shape[len(index) :], index)
        self.source, y = source, self.out(x.shape, dtype)
        if not source.size:
            return self.call("copy", [x], [y])
        self.call("embedding_grad", [self.flat, self.dense(source).seen([*self.flat.shape, self.table[1]])],
                  [y.seen(self.table)], rows=self.table[0])
        return self.call("add", [x, y], [y])

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.rows(self.dense(dy), self.grad(self.source)) if i else dy


class Largest(Places):
    """source (shape, d), an index for each axis of `lengths` -> (rows, d) int64: for each place and column the number
    of rows plus the position of the largest of the source's elements that go there, the first of equal ones; the number
    of the place itself if there are none."""

    name = "largest"

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def forward(self, source: Tensor, *index: Tensor) -> Tensor:
        self.places(self.lengths, source.shape[-1:], index)
        return self.out_by("embedding_largest", [self.flat, self.dense(source)], self.table, "int64",
                           rows=self.table[0])


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else array(value)


@with_dim
def index_add(x: Tensor, axis: int, index: Tensor, source: Tensor, *, alpha: float = 1.0) -> Tensor:
    """x, to which row i of `source` is added at place `index[i]` (n,) int64 of one axis, times `alpha`. Rows of one
    place are summed in their order, then added to x. Raises ShapeError or IndexError if they do not fit."""
    axis, index, source = axis_of(x, axis, "index_add"), _tensor(index), _tensor(source)
    wanted = (*x.shape[:axis], index.size, *x.shape[axis + 1 :])
    if index.ndim != 1 or source.shape != wanted:
        raise ShapeError(f"index_add: index {index.shape} and source {source.shape} do not fit shape {x.shape} along "
                         f"axis {axis}; expected ({index.size},) and {wanted}")
    source = source if alpha == 1 else mul(source, alpha)
    if axis:
        x, source = swap_axes(x, 0, axis), swap_axes(source, 0, axis)
    y = IndexAdd()(x, source, index)
    return swap_axes(y, 0, axis) if axis else y


def _places(name: str, x: Tensor, axis: int, index: Any, src: Any) -> tuple[list[Tensor], Tensor]:
    """An index for each axis of x, and the part of `src` that they have an element for."""
    index, src = _tensor(index), operand(src, x.dtype)
    src = src if src.ndim else broadcast_to(src, index.shape)
    if index.ndim != src.ndim or any(n > m for n, m in zip(index.shape, src.shape, strict=True)):
        raise ShapeError(f"{name}: index {index.shape} does not fit src {src.shape}")
    places = along(name, x, axis_of(x, axis, name), index)
    return places, src if src.shape == index.shape else cut(src, tuple(slice(0, n) for n in index.shape))


@with_dim
def scatter_add(x: Tensor, axis: int, index: Tensor, src: Tensor) -> Tensor:
    """x with y[..., index[..., i, ...], ...] += src[..., i, ...] along one axis: the reverse of `gather`. `index`
    (int64) is at most as long as `src`, and except along the axis as x. Order of sums and errors as of `index_add`."""
    places, src = _places("scatter_add", x, axis, index, src)
    return IndexAdd()(x, src, *places)


@with_dim
def scatter(x: Tensor, axis: int, index: Tensor, src: Tensor | float | None = None, *,
            value: float | None = None) -> Tensor:
    """x with y[..., index[..., i, ...], ...] = src[..., i, ...] along one axis, as `scatter_add`; of several elements
    for one place the last one stays, and gets the gradient. `src` may be a number, also named `value`."""
    if (src is None) == (value is None):
        raise TypeError("scatter: give either src or value")
    places, src = _places("scatter", x, axis, index, value if src is None else src)
    if not src.size:
        return x
    chosen = Largest(*x.shape)(array(np.arange(src.size).reshape(*src.shape, 1)), *places)
    return reshape(Take()(concat([reshape(x, [-1]), reshape(src, [-1])]), reshape(chosen, [-1])), x.shape)


def scatter_max(base: Tensor, index: Tensor, source: Tensor) -> Tensor:
    """base (rows, d), but in each column the largest of source (n, d) whose index (n,) is the row, if there is one; the
    first of equal ones gets the gradient."""
    return gather(concat([base, source]), 0, Largest(base.shape[0])(source, index)) if source.size else base


def bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How often each whole number is in x (n,) int64, as int64; or the sums of its `weights` (n,), in the order of the
    positions, as floats. The result is as long as the largest number needs, and at least `minlength`; in a recorded
    step, which does not know the numbers, it has exactly this length, and a larger number raises an error at the run.
    Raises ShapeError if they do not fit, and ValueError for numbers below 0."""
    x = _tensor(x)
    if weights is None:
        weights = array(np.ones(x.shape, np.int64))
    elif (weights := _tensor(weights)).dtype in ("int64", "bool"):
        weights = astype(weights, "float64")
    if x.ndim != 1 or x.dtype != "int64" or weights.shape != x.shape or minlength < 0:
        raise ShapeError(f"bincount: x is {x.dtype} {x.shape}, weights {weights.shape}, minlength {minlength}; "
                         f"expected int64 (n,), weights of the same shape, a length of at least 0")
    if not x.storage.recorded:
        if (least := int(x.numpy().min(initial=0))) < 0:
            raise ValueError(f"bincount: x holds {least}; expected whole numbers of at least 0")
        minlength = max(minlength, int(x.numpy().max(initial=-1)) + 1)
    elif not minlength:
        raise ValueError("bincount: a recorded step does not know the largest number; give the length: minlength=")
    return IndexAdd()(broadcast_to(array(np.zeros((), weights.dtype)), (minlength,)), weights, x)
