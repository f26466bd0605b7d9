"""Launches: kernel calls on views of storages, and how they may be cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class View:
    """A strided window on a storage: offset and strides in elements."""

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: str

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def part(self, axis: int, begin: int, end: int) -> View:
        """The elements from `begin` to `end` along an axis."""
        shape = (*self.shape[:axis], end - begin, *self.shape[axis + 1 :])
        return replace(self, shape=shape, offset=self.offset + begin * self.strides[axis])


@dataclass(frozen=True, slots=True)
class Cuts:
    """How a launch may be cut: a label for each axis of each view, see `minidl.kernels.registry.kernel`; and
    `work(reads, writes)`: the shapes and types of a part's scratch arrays."""

    axes: str
    work: Callable[[Sequence[View], Sequence[View]], Sequence[tuple[tuple[int, ...], Any]]]


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel call of a task: the kernel's name, the views that it reads, writes and uses as scratch, and its
    constants. `cuts`: None if it must stay whole."""

    kernel: str
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    work: tuple[View, ...] = ()
    constants: tuple[tuple[str, Any], ...] = ()
    cuts: Cuts | None = field(default=None, compare=False, repr=False)

    @property
    def views(self) -> tuple[View, ...]:
        return self.reads + self.writes + self.work

    def shifted(self, samples: int) -> Launch:
        """The same launch for a part of the batch that begins this many samples later."""
        return replace(self, constants=tuple((name, value + samples if name == "sample" else value)
                                             for name, value in self.constants))

    def moved(self, storage: Mapping[int, int]) -> Launch:
        """The same launch on other storages."""
        return replace(self, reads=moved_views(self.reads, storage), writes=moved_views(self.writes, storage),
                       work=moved_views(self.work, storage))


def moved_views(views: Iterable[View], storages: Mapping[int, int]) -> tuple[View, ...]:
    """The same views on the storages that replace theirs."""
    return tuple(View(storages.get(v.storage, v.storage), v.shape, v.strides, v.offset, v.dtype) for v in views)
