"""Indexing: slices are views, index arrays and masks choose elements, None adds an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..autograd.op import Op
from ..autograd.tensor import ShapeError, Tensor, array
from .join import cut
from .names import with_dim
from .shape import axis_of, transpose, unsqueeze


class Places(Op):
    """An op with an index of whole numbers for each of the first axes of a tensor: all broadcast to one shape."""

    def places(self, lengths: Sequence[int], rest: Sequence[int], index: Sequence[Tensor]) -> tuple[int, ...]:
        """Sets `flat`, the numbers of rows (rows, width) with these axes seen as one, and returns its shape. Raises
        ShapeError or IndexError if the index does not fit."""
        shape = self.broadcast(*index)
        for t, length in zip(index, lengths, strict=True):
            if t.dtype != "int64":
                raise self.error(f"an index is int64, not {t.dtype}")
            _check_range(t, length)
        self.lengths, self.table = lengths, [math.prod(lengths), math.prod(rest)]
        if math.prod(shape) and not self.table[0]:
            raise self.error(f"shape {(*lengths, *rest)} has no elements to choose from")
        self.flat = self._joined(shape, index)
        return shape

    def rows(self, x: Tensor, y: Tensor) -> Tensor:
        """Writes the rows of x at these places to y, and returns y."""
        if not y.size:
            return self.call("fill", [y], [y], value=0.0)
        self.call("embedding", [x.seen(self.table), self.flat], [y.seen([*self.flat.shape, self.table[1]])])
        return y

    def _joined(self, shape: Sequence[int], index: Sequence[Tensor]) -> Tensor:
        """The number of the row, row-major over the indexed axes. Each index is looked up in a table of where its rows
        begin, so that executors check its range, as for every embedding."""
        if len(index) == 1:
            t = index[0]
            return t if t.contiguous else self.call("copy", [t], [self.out(shape, "int64", "index")])
        flat = None
        for a, t in enumerate(index):
            begins = array(np.arange(self.lengths[a])[:, None] * math.prod(self.lengths[a + 1 :]))
            place = self.out(t.shape, "int64", "index")
            self.call("embedding", [begins, t], [place.seen([*t.shape, 1])])
            flat = place if flat is None else self.call("add", [flat, place], [
                self.out(np.broadcast_shapes(flat.shape, t.shape), "int64", "index")])
        assert flat is not None
        return flat


class Take(Places):
    """x (a, b, ..., rest), for each of its first axes an index -> (the shape of the indices, rest). It is an embedding,
    the first axes of x seen as one."""

    name = "take"

    def forward(self, x: Tensor, *index: Tensor) -> Tensor:
        rest = x.shape[len(index) :]
        shape = self.places(x.shape[: len(index)], rest, index)
        self.x = self.dense(x)
        return self.rows(self.x, self.out([*shape, *rest], x.dtype))

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        dx, (rows, width) = self.grad(self.x), self.table
        if not dx.size:
            return self.call("fill", [dx], [dx], value=0.0)
        self.call("embedding_grad", [self.flat, self.dense(dy).seen([*self.flat.shape, width])],
                  [dx.seen(self.table)], rows=rows)
        return dx


def _check_range(index: Tensor, length: int) -> None:
    """Raises IndexError that names the first place out of range. While recording it does nothing."""
    if not index.storage.recorded:
        values = index.numpy()
        bad = (values < 0) | (values >= length)
        if bad.any():
            raise IndexError(f"index {int(values[bad][0])} is out of range for an axis of length {length}; an index in "
                             f"a tensor counts from 0")


def _whole(value: Any, length: int) -> Tensor:
    """An index array as int64; those that are given as arrays or lists may also count from the end. Raises IndexError
    if one of these is out of range."""
    if isinstance(value, Tensor):
        return value
    value = np.asarray(value)
    if value.dtype.kind not in "iu" and value.size:
        raise ShapeError(f"an index array has whole numbers or bools, not {value.dtype}")
    bad = (value < -length) | (value >= length)
    if bad.any():
        raise IndexError(f"index {int(value[bad][0])} is out of range for an axis of length {length}")
    return array(np.where(value < 0, value + length, value).astype(np.int64))


def _is_array(n: Any) -> bool:
    return isinstance(n, Tensor | np.ndarray)


def _parts(item: Any, shape: Sequence[int]) -> list[Any]:
    """An index's parts: numbers as int, lists as arrays, a mask as one array of whole numbers for each of its axes.
    Raises ShapeError for a mask of another shape than the axes that it indexes, and for a lone bool."""
    given = [np.asarray(n) if isinstance(n, list) else n for n in (item if isinstance(item, tuple) else (item,))]
    axes = [n.ndim if _is_mask(n) else int(n is not None and n is not Ellipsis) for n in given]
    found: list[Any] = []
    axis = 0
    for n, count in zip(given, axes, strict=True):
        if isinstance(n, bool | np.bool_) or (_is_mask(n) and not n.ndim):
            raise ShapeError("an index is a bool; a mask has as many axes as it indexes")
        if _is_mask(n):
            if n.shape != tuple(shape[axis : axis + n.ndim]):
                raise ShapeError(f"a mask of shape {n.shape} does not fit shape {tuple(shape)} from axis {axis} on")
            found += chosen(n)
        else:
            whole = isinstance(n, np.integer) or (isinstance(n, np.ndarray) and not n.ndim and n.dtype.kind in "iu")
            found.append(int(n) if whole else n)
        axis += len(shape) - sum(axes) if n is Ellipsis else count
    return found


def _is_mask(n: Any) -> bool:
    return _is_array(n) and n.dtype == "bool"


def chosen(mask: Any) -> list[Any]:
    """For each axis of a mask the places of its true elements."""
    if isinstance(mask, Tensor) and mask.storage.recorded:
        raise RuntimeError("x[mask] has as many elements as the mask has true ones, and a recorded step does not "
                           "know them; use where(mask, x, 0)")
    return list(np.nonzero(mask.numpy() if isinstance(mask, Tensor) else mask))


def index(x: Tensor, item: Any) -> Tensor:
    """x[item]: whole numbers, slices with positive steps, `...` and None make views. Index arrays (int64) and masks of
    neighbouring axes choose elements as in NumPy and torch. Raises ShapeError or IndexError if they do not fit, and
    RuntimeError for a mask that has no values yet."""
    items = _parts(item, x.shape)
    if not any(_is_array(n) for n in items):
        return _with_axes(x, items)
    if any(n is None for n in items):
        raise ShapeError("an index with arrays cannot also add an axis; add it with unsqueeze")
    missing = x.ndim - len(items) + sum(n is Ellipsis for n in items)
    at = next((i for i, n in enumerate(items) if n is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * missing
    if missing < 0 or len(items) != x.ndim:
        raise ShapeError(f"{item} does not fit shape {x.shape}")
    axes = [a for a, n in enumerate(items) if not isinstance(n, slice)]
    if axes != list(range(axes[0], axes[-1] + 1)):
        raise ShapeError("index arrays and numbers must be of neighbouring axes; index in two steps")
    arrays = [_whole(n, x.shape[a]) for a, n in enumerate(items) if _is_array(n)]
    first = axes[0]
    x = cut(x, tuple(slice(None) if _is_array(n) else n for n in items))
    order = [*range(first, first + len(arrays)), *range(first), *range(first + len(arrays), x.ndim)]
    y = Take()(transpose(x, order) if first else x, *arrays)
    kept = y.ndim - (x.ndim - len(arrays))  # axes that the arrays have made
    return transpose(y, [*range(kept, kept + first), *range(kept), *range(kept + first, y.ndim)]) if first else y


def _with_axes(x: Tensor, items: Sequence[Any]) -> Tensor:
    """x[items] without arrays. None adds an axis of length 1."""
    y = cut(x, tuple(n for n in items if n is not None)) if any(n is not None for n in items) else x
    if None in items:
        at = 0  # the axis of the result
        left = x.ndim - sum(n is not None and n is not Ellipsis for n in items)
        for n in items:
            if n is None:
                y = unsqueeze(y, at)
            at += left if n is Ellipsis else not isinstance(n, int)
    return y


@with_dim
def gather(x: Tensor, axis: int, index: Any) -> Tensor:
    """y[..., i, ...] = x[..., index[..., i, ...], ...] along one axis: index (int64) has as many axes as x, and is at
    most as long on all others."""
    axis = axis_of(x, axis, "gather")
    return Take()(x, *along("gather", x, axis, _whole(index, x.shape[axis])))


def along(name: str, x: Tensor, axis: int, index: Tensor) -> list[Tensor]:
    """An index for each axis of x: `index` for one, own places for all others. Raises ShapeError if it does not fit."""
    if index.ndim != x.ndim or any(a != axis and n > m for a, (n, m) in enumerate(zip(index.shape, x.shape,
                                                                                      strict=False))):
        raise ShapeError(f"{name}: index {index.shape} does not fit shape {x.shape} along axis {axis}")
    return [index if a == axis else array(np.arange(n).reshape([-1 if b == a else 1 for b in range(x.ndim)]))
            for a, n in enumerate(index.shape)]
