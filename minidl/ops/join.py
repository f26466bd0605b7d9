"""Joining tensors along an axis and cutting regions out, with as few copies as possible.

A joined tensor lies in a slab: a storage that is written region by region. Each region has its own dependencies, so a
reader of one region waits for no other. A slab may have room for tensors that are joined later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..autograd import tape as tapes
from ..autograd.op import Op, same_dtype
from ..autograd.tape import Region, Slab, StoragePart
from ..autograd.tensor import Tensor
from ..core.graph import Role
from .names import with_dim
from .shape import axis_of, unsqueeze, with_axes


def _window(t: Tensor, axis: int, begin: int, length: int, parts: tuple[StoragePart, ...]) -> Tensor:
    """A view of the elements begin .. begin + length of one axis, with these parts."""
    shape = [length if a == axis else n for a, n in enumerate(t.shape)]
    return Tensor(t.storage, shape, t.strides, t.offset + begin * t.strides[axis], parts=parts)


class Concat(Op):
    """Joins along one axis. If the first tensor is a whole slab with room for the others, only these are copied."""

    name = "concat"
    precision = "widest"

    def __init__(self, axis: int, room: int) -> None:
        self.given, self.room = axis, room

    def forward(self, *tensors: Tensor) -> Tensor:
        dtype = same_dtype(self, *tensors, also=("int64", "bool"))
        first = tensors[0]
        self.axis = axis = axis_of(first, self.given, "concat")
        rest = {(*t.shape[:axis], *t.shape[axis + 1 :]) for t in tensors}
        if any(t.ndim != first.ndim for t in tensors) or len(rest) > 1:
            raise self.error(f"shapes {', '.join(str(t.shape) for t in tensors)} do not join along axis {self.given}")
        self.lengths = [t.shape[axis] for t in tensors]
        length = sum(self.lengths)
        self.grown = self._grows(first, length)
        if self.grown:
            storage = first.storage
        else:
            shape = [max(length, self.room) if a == axis else n for a, n in enumerate(first.shape)]
            storage = tapes.current().storage(self.name, tuple(shape), dtype, Role.ACTIVATION)
            storage.slab = Slab(axis)
        slab = storage.slab
        assert slab is not None
        whole = Tensor(storage)
        for t in tensors[1:] if self.grown else tensors:
            begin, part = slab.filled, Region(storage, t.bytes,
                                              f"{storage.name}[{slab.filled}:{slab.filled + t.shape[axis]}]")
            slab.regions.append((begin, begin + t.shape[axis], part))
            self.call("copy", [t], [_window(whole, axis, begin, t.shape[axis], (part,))])
        return _window(whole, axis, 0, length, slab.parts(0, length))

    def _grows(self, first: Tensor, length: int) -> bool:
        """Whether `first` is the whole content of its slab, and the slab has room for `length` along the axis."""
        slab, shape = first.storage.slab, first.storage.shape
        return (slab is not None and slab.axis == self.axis and first.offset == 0
                and slab.filled == first.shape[self.axis]
                and length <= shape[self.axis] and first.strides == Tensor(first.storage).strides
                and all(a == self.axis or n == m for a, (n, m) in enumerate(zip(first.shape, shape, strict=True))))

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        window = _window(dy, self.axis, sum(self.lengths[:i]), self.lengths[i], dy.parts)
        # the gradient of the old content is only added up; a copied tensor's gradient goes to a layer, so make it
        # contiguous here, once, not in each of the layer's tasks
        return window if i == 0 and self.grown else self.dense(window)


class Slice(Op):
    """A region, as a view. Its gradient is the region among zeros, or is added in place to another gradient."""

    name = "slice"

    def __init__(self, index: Any) -> None:
        self.index = index if isinstance(index, tuple) else (index,)

    def forward(self, x: Tensor) -> Tensor:
        index: list[Any] = list(self.index)
        if any(not isinstance(n, int | slice) and n is not Ellipsis for n in index):
            raise self.error(f"an index must consist of whole numbers, slices and ..., not {self.index}")
        missing = x.ndim - len(index) + index.count(Ellipsis)
        if missing < 0 or index.count(Ellipsis) > 1:
            raise self.error(f"{self.index} does not fit shape {x.shape}")
        at = index.index(Ellipsis) if Ellipsis in index else len(index)
        index[at : at + 1] = [slice(None)] * missing
        self.x, self.region, self.squeezed = x, [], []
        for a, (n, length) in enumerate(zip(index, x.shape, strict=True)):
            if isinstance(n, int):
                if not -length <= n < length:
                    raise IndexError(f"index {n} is out of range on axis {a} of shape {x.shape}")
                self.squeezed.append(a)
                n = slice(n % length, n % length + 1)
            begin, end, step = n.indices(length)
            if step < 1:
                raise self.error(f"a step must be positive, not {step}")
            self.region.append((begin, max(begin, end), step))
        region = self._of(x)
        found = with_axes(region, [a for a in range(x.ndim) if a not in self.squeezed])
        found.parts = self._parts(region)
        return found

    def _of(self, t: Tensor) -> Tensor:
        """The region of a tensor t of x's shape, with all axes."""
        both = [*zip(t.strides, self.region, strict=True)]
        lengths = [len(range(*r)) for r in self.region]
        return t.seen(lengths, [s * r[2] for s, r in both], sum(s * r[0] for s, r in both))

    def _parts(self, region: Tensor) -> tuple[StoragePart, ...]:
        """The parts of x that the region touches, if x is a slab in the slab's own layout; else all parts."""
        slab = self.x.storage.slab
        whole = Tensor(self.x.storage)
        if slab is None or self.x.strides != whole.strides or not region.size:
            return self.x.parts
        step, size = whole.strides[slab.axis], whole.shape[slab.axis]
        begin = region.offset // step % size
        return slab.parts(begin, begin + self.region[slab.axis][2] * (region.shape[slab.axis] - 1) + 1)

    def _full(self, dy: Tensor) -> Tensor:
        """dy with the axes that the index has removed, as axes of length 1."""
        kept = iter(range(dy.ndim))
        return with_axes(dy, [None if a in self.squeezed else next(kept) for a in range(self.x.ndim)])

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by("unslice", [self._full(dy)], self.x, shape=self.x.shape, region=tuple(self.region))

    def add_grad(self, i: int, dy: Tensor, total: Tensor) -> bool:
        window = self._of(total)
        self.call("add", [window, self._full(dy)], [window])
        return True


@with_dim
def concat(tensors: Sequence[Tensor], axis: int = 0, room: int = 0) -> Tensor:
    """The tensors one after the other along `axis`; their other lengths are equal. `room`: the length of the memory
    along that axis, if larger; then `concat([result, more], axis)` copies only `more`, as long as there is room. Raises
    ShapeError if they do not fit, and ValueError for no tensors."""
    if not tensors:
        raise ValueError("concat: there is nothing to join")
    return Concat(axis, room)(*tensors)


def cut(x: Tensor, index: Any) -> Tensor:
    """x[index] for whole numbers, slices with positive steps and `...`: a view, no copy."""
    return Slice(index)(x)


@with_dim
def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors of one shape along a new axis. Raises as `concat` does."""
    return concat([unsqueeze(t, axis) for t in tensors], axis)


@with_dim
def split(x: Tensor, lengths: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """x cut along `axis` into pieces of these lengths, or of one length; the last may then be shorter."""
    axis = axis_of(x, axis, "split")
    if isinstance(lengths, int | np.integer):
        if lengths < 1:
            raise ValueError(f"split: the length of the pieces is {lengths}; it must be at least 1")
        lengths = [min(lengths, x.shape[axis] - begin) for begin in range(0, max(x.shape[axis], 1), lengths)]
    if sum(lengths) != x.shape[axis] or any(n < 0 for n in lengths):
        raise ValueError(f"split: lengths {list(lengths)} do not add up to axis {axis} of shape {x.shape}")
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [cut(x, (*[slice(None)] * axis, slice(e - n, e))) for n, e in zip(lengths, ends, strict=True)]


@with_dim
def chunk(x: Tensor, count: int, axis: int = 0) -> list[Tensor]:
    """x cut along `axis` into `count` pieces of equal length, of which the last may be shorter or missing."""
    if count < 1:
        raise ValueError(f"chunk: {count} pieces; it must be at least 1")
    return split(x, -(-x.shape[axis_of(x, axis, "chunk")] // count) or [0] * count, axis)
