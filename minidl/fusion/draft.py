"""The tasks of a graph while fusion rules merge them: readers and writers, what may move, and the resulting graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ..core.columns import Rows, grouped
from ..core.graph import Launch, Role, StorageSpec, TaskGraph, View
from ..core.tasks import Kind, repack
from ..kernels import KERNELS


@dataclass
class DraftTask:
    """A task of the draft: its row in the old graph, its launches, and the buffers that it reads and writes."""

    row: int
    launches: tuple[Launch, ...]
    reads: set[int]
    writes: set[int]
    flops: float
    unit: int

    @property
    def only(self) -> Launch | None:
        """Its launch, if it has exactly one; else None."""
        return self.launches[0] if len(self.launches) == 1 else None


class Draft:
    """The tasks of a graph, to be merged."""

    def __init__(self, graph: TaskGraph, device: Any) -> None:
        self.graph, self.device = graph, device
        self.storages = list(graph.storages)  #: new ones come after the graph's
        self.entries: list[DraftTask | None] = [
            DraftTask(t, graph.launches[t], set(graph.reads[t].tolist()), set(graph.writes[t].tolist()),
                      float(graph.flops[t]), int(graph.unit[t])) for t in range(len(graph))]
        self.units = list(graph.unit_names)
        of_storage = grouped((storage, buffer) for buffer, storage in enumerate(graph.buffer_storage.tolist()))
        self._buffer = {s: buffers[0] for s, buffers in of_storage.items() if len(buffers) == 1}
        self.kept = {self._buffer[v.storage] for v in graph.outputs if v.storage in self._buffer}
        self._readers: dict[int, list[int]] = {}
        self._writers: dict[int, list[int]] = {}
        for i in range(len(graph)):
            self._found(i)

    def numbered(self) -> Iterator[tuple[int, DraftTask]]:
        return ((i, e) for i, e in enumerate(self.entries) if e is not None)

    def alone(self, *kernels: str) -> Iterator[tuple[int, Launch]]:
        """The tasks with one launch, of one of these kernels, each with it."""
        return ((i, e.only) for i, e in self.numbered() if e.only is not None and e.only.kernel in kernels)

    def __getitem__(self, task: int) -> DraftTask:
        entry = self.entries[task]
        assert entry is not None, "this task has been merged into another"
        return entry

    def kind(self, task: int) -> int:
        return int(self.graph.kind[self[task].row])

    def buffer(self, view: View) -> int | None:
        """The buffer of a whole storage; None for a region of a slab."""
        return self._buffer.get(view.storage)

    def readers(self, buffer: int) -> list[int]:
        return [i for i in self._readers.get(buffer, []) if (e := self.entries[i]) is not None and buffer in e.reads]

    def writers(self, buffer: int) -> list[int]:
        return [i for i in self._writers.get(buffer, []) if (e := self.entries[i]) is not None and buffer in e.writes]

    def passed_on(self, view: View) -> int | None:
        """The buffer of a view if one task writes it, it is no output of the graph, and it covers its storage; else
        None. It may then disappear."""
        buffer = self.buffer(view)
        return None if buffer is None or buffer in self.kept or len(self.writers(buffer)) != 1 else buffer

    def merge(self, into: int, launches: Sequence[Launch], gone: Sequence[int] = (), *, as_task: int | None = None,
              reads: Iterable[int] = ()) -> None:
        """Merges the tasks `gone` into task `into`, which gets these launches and the name of `as_task`. It reads and
        writes what the launches do; of a slab, what the merged tasks did, and `reads`."""
        target, merged = self[into], [self[i] for i in (into, *gone)]
        before = {*self.buffers(*(view for entry in merged for launch in entry.launches for view in launch.views))}
        if as_task is not None:
            target.row, target.unit = self[as_task].row, self[as_task].unit
        target.reads = {*reads}.union(*(entry.reads for entry in merged)) - before
        target.writes = set[int]().union(*(entry.writes for entry in merged)) - before
        target.flops = sum(entry.flops for entry in merged)
        target.launches, made = tuple(launches), set[int]()
        for launch in launches:
            target.reads |= {*self.buffers(*launch.reads)} - made
            made |= {*self.buffers(*launch.writes, *launch.work)}
        target.writes |= made
        for i in gone:
            self.entries[i] = None
        self._found(into)

    def _found(self, task: int) -> None:
        """Enters the task as reader and writer of its buffers."""
        for table, buffers in ((self._readers, self[task].reads), (self._writers, self[task].writes)):
            for buffer in buffers:
                if task not in table.setdefault(buffer, []):
                    table[buffer].append(task)

    def spent(self, view: View, task: int) -> bool:
        """Whether the tasks make what is there, and this one may overwrite it: all others that touch it come before,
        and none is a weight gradient, whose delay would be in the way."""
        buffer = self.buffer(view)
        if buffer is None or buffer in self.kept or self.storages[view.storage].live is not None:
            return False
        made, read = self.writers(buffer), [t for t in self.readers(buffer) if t != task]
        return bool(made) and all(t < task and self.kind(t) != Kind.W for t in (*made, *read))

    def moved(self, view: View, to: View) -> None:
        """All tasks have the storage of `to` in place of the whole one of `view`."""
        for t in {t for b in self.buffers(view) for t in (*self.readers(b), *self.writers(b))}:
            self.merge(t, [launch.moved({view.storage: to.storage}) for launch in self[t].launches])

    def read(self, tasks: Iterable[int], view: View, to: View, besides: Iterable[int] = ()) -> None:
        """These tasks read `to` in place of a view, and buffers besides."""
        for t in tasks:
            self.merge(t, [replace(launch, reads=tuple(to if v == view else v for v in launch.reads))
                           for launch in self[t].launches], reads=besides)

    def launch(self, kernel: str, reads: Sequence[View], writes: Sequence[View], **constants: Any) -> Launch:
        """A launch with the scratch memory that it needs."""
        work = self.device.work(KERNELS[kernel])
        made = [self.new(f"work {kernel}", shape, str(np.dtype(dtype)), Role.WORKSPACE)
                for shape, dtype in (work(reads, writes, **constants) if work else ())]
        return Launch(kernel, tuple(reads), tuple(writes), tuple(made), tuple(constants.items()),
                      self.device.cuts(KERNELS[kernel], reads, constants),
                      KERNELS[kernel].company(reads, writes, constants))

    def new(self, name: str, shape: Sequence[int], dtype: str, role: Role) -> View:
        """An array in a new storage, which has a buffer of its own."""
        spec = StorageSpec(name, tuple(shape), dtype, prod(shape) * np.dtype(dtype).itemsize, role)
        storage = len(self.storages)
        self._buffer[storage] = len(self.graph.buffer_bytes) + storage - len(self.graph.storages)
        self.storages.append(spec)
        return View.of(spec, storage)

    def buffers(self, *views: View) -> list[int]:
        """The buffers of the views that are whole storages."""
        return [b for b in map(self.buffer, views) if b is not None]

    def moves(self, task: int, to: int, besides: Sequence[int] = ()) -> bool:
        """Whether `task` can run at the place of `to`: no task between them depends on it or it on them. `besides`:
        tasks between them that also move."""
        low, high = sorted((task, to))
        return all(i in besides or self._apart(task, i) for i in range(low + 1, high))

    def soon(self, tasks: Iterable[int]) -> None:
        """Moves these tasks, one after another, to right after the last task that they conflict with. All tasks get
        other numbers."""
        order = list(range(len(self.entries)))
        for i in tasks:
            to = at = order.index(i)
            while to and self._apart(i, order[to - 1]):
                to -= 1
            order.insert(to, order.pop(at))
        self.entries = [self.entries[i] for i in order]
        self._readers, self._writers = {}, {}
        for i, _ in self.numbered():
            self._found(i)

    def _apart(self, one: int, other: int) -> bool:
        """Whether a task may run before or after another one, which may have been merged away."""
        a, b = self[one], self.entries[other]
        return b is None or not (a.writes & (b.reads | b.writes) or a.reads & b.writes)

    def graph_of_it(self) -> TaskGraph:
        """The graph of the remaining tasks, in their order."""
        entries = [e for _, e in self.numbered()]
        made, rows = self.storages[len(self.graph.storages) :], np.array([e.row for e in entries], np.int64)
        g = self.graph.with_storages(made)
        remaining = g.take(rows, repack(g.keys[rows], unit=[e.unit for e in entries]))
        nbytes = np.array([int(g.buffer_bytes[sorted(e.reads | e.writes)].sum()) for e in entries], g.bytes.dtype)
        return replace(
            remaining, flops=np.array([e.flops for e in entries], g.flops.dtype), bytes=nbytes,
            reads=Rows.of([sorted(e.reads) for e in entries]), writes=Rows.of([sorted(e.writes) for e in entries]),
            launches=tuple(e.launches for e in entries), unit_names=tuple(self.units))


def addend(add: Launch, dx: View) -> View | None:
    """The gradient that a launch adds to dx in place; None for any other launch."""
    if add.kernel != "add" or add.writes != (dx,) or dx not in add.reads or add.reads[0] == add.reads[1]:
        return None
    return next(v for v in add.reads if v != dx)
