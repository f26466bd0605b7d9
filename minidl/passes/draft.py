"""A draft: the part of a plan that exists so far for a recorded step, on one device or on ranks; and its editor.

A pass is a function `(draft, **options) -> draft`. It raises Refused if it cannot do its work, and GraphError if merged
tasks would wait for each other in a circle. It may ask the draft for facts, never which policy or which other pass
there is. `minidl.passes.every` has all passes in their order, and says when each has something to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from ..core.columns import Content, Floats, Ints, Rows, grouped, spread
from ..core.graph import Launch, Role, StorageSpec, TaskGraph, View
from ..core.machine import Machine
from ..core.placement import Placement, Versions, contiguous
from ..core.schedule import Lane, Schedule
from ..core.tasks import Kind, as_recorded, pack, task_name, unpack
from ..pricing.cost import CostModel

ALONE = contiguous(1)  #: the placement of a step that is not cut: ranks, if there are several, are all alike


@dataclass(frozen=True)
class Sums:
    """The sums of gradients over ranks that are all alike. `groups`: updates whose gradients travel together (None:
    each alone); `part_bytes`: the most bytes of a part; `scatter`: AS and AG in place of A."""

    groups: Sequence[Sequence[int]] | None = None
    part_bytes: int | None = None
    scatter: bool = False


@dataclass(frozen=True)
class Draft(Content):
    """A step, whole or in stages. Columns of the graph's length: `time` in the unit of `cost`, NaN if only the link
    gives it, and the `stage` of each task; a stage of the second direction has its number in the first one plus
    `placement.stages`.

    `cost` gives links. `schedule`: None until a policy has ordered the step. `stale`: the pipeline never drains;
    `versions` are those that the entries of its schedule read. `reverses`: the backward pass computes inputs of
    reversible blocks from their outputs. `sums`: how ranks that are all alike sum gradients, None if they do not.
    `settled`: no pass has anything to do, as on given times. `read`: its order is somebody's, who may leave
    nothing out. `name`: of the plan, for messages. `remarks`: of passes, for people. `planned`: makes a plan of name,
    graph, schedule, cost and number of ranks, so that a pass can ask for its time and its bytes.
    """

    name: str
    graph: TaskGraph
    machine: Machine
    cost: CostModel
    placement: Placement
    time: Floats
    stage: Ints
    stale: bool = False
    reverses: bool = False
    settled: bool = False
    read: bool = False
    schedule: Schedule | None = None
    versions: Versions | None = None
    sums: Sums | None = None
    planned: Callable[..., Any] | None = None
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(cls, graph: TaskGraph, cost: CostModel | None = None, machine: Machine | None = None,
           sums: Sums | None = None, name: str = "plan") -> Draft:
        """A step that is not cut; `cost`: by default from flops and bytes."""
        cost = CostModel.analytic() if cost is None else cost
        return cls(name, graph, machine or Machine(), cost, ALONE, cost.durations(graph) + cost.launch,
                   np.zeros(len(graph), np.int64), sums=sums)

    @property
    def staged(self) -> bool:
        """Whether the step is cut into stages."""
        return self.placement is not ALONE

    @property
    def order(self) -> Schedule:
        """The schedule, which a policy has made."""
        assert self.schedule is not None
        return self.schedule

    @property
    def rank(self) -> Ints:
        """The rank of each task."""
        return (self.placement.table.ravel()[self.stage] if self.placement.parts is None
                else self.placement.home(self.graph.keys, 1))

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches with forwards."""
        return int(self.graph.micro_batch[self.graph.kind == Kind.F].max(initial=-1)) + 1

    @property
    def priced(self) -> CostModel:
        """The costs of the draft's tasks."""
        tasks = {task_name(key): time for key, time in zip(as_recorded(self.graph.keys).tolist(), self.time.tolist(),
                                                           strict=True) if time == time}
        return replace(self.cost, tasks=tasks, kinds={}, launch=0.0, source="given")

    def price(self, graph: TaskGraph) -> CostModel:
        """The costs of a graph of these tasks, with some O and W as one B."""
        own = self.priced
        both = {f"{unit}B{i}": own.tasks.get(f"{unit}O{i}", 0.0) + own.tasks.get(f"{unit}W{i}", 0.0)
                for unit, i in {(t.unit, t.micro_batch) for t in graph if t.kind == Kind.B}}
        new = {t.name: 0.0 for t in graph if t.kind == Kind.U and t.name not in own.tasks}  # norms that are apart
        return replace(own, tasks={**own.tasks, **both, **new})

    def take(self, tasks: Ints, keys: Ints | None = None) -> Draft:
        """The draft with its tasks in another order, or under other keys."""
        return replace(self, graph=self.graph.take(tasks, keys), time=self.time[tasks], stage=self.stage[tasks])

    def merged(self, graph: TaskGraph, group: Ints) -> Draft:
        """The draft with another graph, whose task `group[t]` has taken up task t."""
        first = spread(group[::-1], np.arange(len(group))[::-1], len(graph))
        time = np.bincount(group, self.time, len(graph)).astype(np.float64)
        return replace(self, graph=graph, time=time, stage=self.stage[first])

    def edit(self) -> Edit:
        """An editor of this draft."""
        return Edit(self)


@dataclass(frozen=True)
class Copies:
    """Copies of buffers: original -> copied buffer, original -> copied storage."""

    buffers: Mapping[int, int]
    storages: Mapping[int, int]

    def __or__(self, other: Copies) -> Copies:
        """These copies and the other's."""
        return Copies({**self.buffers, **other.buffers}, {**self.storages, **other.storages})

    def of(self, buffers: Iterable[int]) -> set[int]:
        """These buffers, with the copies in place of the originals."""
        return {self.buffers.get(b, b) for b in buffers}

    @property
    def inverse(self) -> Copies:
        """From the copies to the originals."""
        return Copies({to: b for b, to in self.buffers.items()}, {to: s for s, to in self.storages.items()})


NONE = Copies({}, {})


def fill(view: View, value: float, **more: Any) -> Launch:
    """A launch that sets all elements."""
    return Launch("fill", (view,), (view,), constants=(("value", value),), **more)


class Edit:
    """A draft that is changed: lists inside, columns outside. The tables are built once, by `draft`."""

    def __init__(self, draft: Draft) -> None:
        graph = draft.graph
        self.old = draft
        units = max(len(graph.unit_names), int(graph.unit.max(initial=-1)) + 1)
        self.unit_names = [*graph.unit_names, *[""] * (units - len(graph.unit_names))]
        self.keys, self.time, self.stage = graph.keys.tolist(), draft.time.tolist(), draft.stage.tolist()
        self.flops, self.bytes = graph.flops.tolist(), graph.bytes.tolist()
        self.reads, self.writes = _Sets(graph.reads), _Sets(graph.writes)
        self.launches = list(graph.launches or ((),) * len(graph))
        self.specs, self.role = list(graph.storages), graph.buffer_role.tolist()
        self.storage_of, self.buffer_bytes = graph.buffer_storage.tolist(), graph.buffer_bytes.tolist()
        self.names = list(graph.buffer_names)
        self.follows: dict[int, list[int]] = {}  # task, or -1 for the begin -> new tasks right after it
        self.entries: dict[int, list[int]] = {}  # task -> new tasks right after it in its lane
        self.lanes: dict[Lane, list[int]] = {}  # new lanes
        self.beside: dict[tuple[int, str], int] = {}  # (unit, whose) -> the unit of such tasks that run again

    # ---------------------------------------------------------------------------------------------------------- memory
    def storage(self, spec: StorageSpec) -> int:
        """The number of a new storage."""
        self.specs.append(spec)
        return len(self.specs) - 1

    def buffer(self, like: int, storage: int, name: str, role: Role | None = None) -> int:
        """The number of a new buffer: as another one, on this storage."""
        return self._buffer(storage, self.buffer_bytes[like], self.role[like] if role is None else role.number, name)

    def _buffer(self, storage: int, nbytes: int, role: int, name: str) -> int:
        self.storage_of.append(storage)
        self.buffer_bytes.append(nbytes)
        self.role.append(role)
        if self.names:
            self.names.append(name)
        return len(self.storage_of) - 1

    def place(self, spec: StorageSpec) -> tuple[int, int]:
        """A new storage, and a buffer on it."""
        at = self.storage(spec)
        return at, self._buffer(at, spec.bytes, spec.role.number, spec.name)

    def array(self, name: str, shape: tuple[int, ...], dtype: str, role: Role, **spec: Any) -> tuple[View, int]:
        """All elements of a new storage, and a buffer on it. `spec`: its other fields."""
        at, buffer = self.place(StorageSpec(name, shape, dtype, prod(shape) * np.dtype(dtype).itemsize, role, **spec))
        return View.of(self.specs[at], at), buffer

    def copies(self, buffers: Iterable[int], whose: str, filled: bool = False, **spec: Any) -> Copies:
        """Copies of buffers and of their storages. `filled`: with the originals' data, when a loop begins; `spec`:
        fields that differ from the storages' own, such as `role`."""
        mine, places = sorted(buffers), dict[int, int]()
        for s in sorted(self.places(mine)):
            own = self.specs[s]
            places[s] = self.storage(replace(own, name=f"{own.name}, {whose}", **spec,
                                             **({"filled": own.live} if filled else {})))
        return Copies({b: self.buffer(b, places[self.storage_of[b]], f"{self.names[b]}, {whose}" if self.names else "",
                                      spec.get("role")) for b in mine}, places)

    def whole(self, storage: int) -> View:
        """All elements of a storage."""
        spec = self.specs[storage]
        return View(storage, (spec.bytes // np.dtype(spec.dtype).itemsize,), (1,), 0, spec.dtype)

    def copy(self, storages: Mapping[int, int]) -> tuple[Launch, ...]:
        """Launches that copy each storage (key) as a whole to its target (value)."""
        return tuple(Launch("copy", (self.whole(s),), (self.whole(to),)) for s, to in storages.items())

    def buffers_of(self, task: int) -> dict[int, list[int]]:
        """Storage -> its buffers that the task accesses."""
        return grouped((self.storage_of[b], b) for b in sorted(self.reads[task] | self.writes[task]))

    # ----------------------------------------------------------------------------------------------------------- tasks
    def unit(self, name: str = "") -> int:
        """The number of a new unit."""
        self.unit_names.append(name)
        return len(self.unit_names) - 1

    def task(self, after: int, unit: int, kind: Kind, micro_batch: int = 0, *, stage: int, reads: Iterable[int],
             writes: Iterable[int], launches: Sequence[Launch] = (), part: int = 0, late: int = 0, time: float = 0.0,
             flops: float = 0.0, nbytes: int = 0) -> int:
        """The number of a new task, which comes right after another one (-1: before all) in the graph."""
        self.keys.append(int(pack(unit, kind, micro_batch, part=part, late=late)))
        self.time.append(time)
        self.stage.append(stage)
        self.flops.append(flops)
        self.bytes.append(nbytes)
        self.reads.append(set(reads))
        self.writes.append(set(writes))
        self.launches.append(tuple(launches))
        self.follows.setdefault(after, []).append(len(self.keys) - 1)
        return len(self.keys) - 1

    def again(self, after: int, task: int, copies: Copies, whose: str = "", **given: Any) -> int:
        """The number of a new task that does what another one does, on these copies; `given`: what differs. With
        `whose` it is of another unit, as `layers.2, sweep 1` beside `layers.2`."""
        own = unpack(self.keys[task])
        place = own.unit, whose
        if whose and place not in self.beside:
            name = self.unit_names[own.unit]
            self.beside[place] = self.unit(name and f"{name}, {whose}")
        return self.task(after, **{
            "unit": self.beside.get(place, own.unit), "kind": Kind(own.kind), "micro_batch": own.micro_batch,
            "part": own.part, "stage": self.stage[task], "reads": copies.of(self.reads[task]),
            "writes": copies.of(self.writes[task]), "time": self.time[task],
            "launches": [launch.moved(copies.storages) for launch in self.launches[task]],
            "flops": self.flops[task], "nbytes": self.bytes[task], **given})

    def use(self, copies: Copies, *tasks: int) -> None:
        """The tasks read these copies in place of the originals, and their launches use them."""
        for task in tasks:
            self.reads[task] = copies.of(self.reads[task])
            self.launches[task] = tuple(launch.moved(copies.storages) for launch in self.launches[task])

    def move(self, copies: Copies, *tasks: int) -> None:
        """The tasks read and write these copies in place of the originals."""
        self.use(copies, *tasks)
        for task in tasks:
            self.writes[task] = copies.of(self.writes[task])

    def places(self, buffers: Iterable[int]) -> set[int]:
        """The storages of buffers."""
        return {self.storage_of[b] for b in buffers}

    # ------------------------------------------------------------------------------------------------------ the order
    def then(self, task: int, new: int) -> None:
        """The new task runs right after another one in the lane of this."""
        self.entries.setdefault(task, []).append(new)

    def own_lane(self, lane: Lane, new: int) -> None:
        """The new task runs last in a lane of its own kind."""
        self.lanes.setdefault(lane, []).append(new)

    # ------------------------------------------------------------------------------------------------------ the result
    @property
    def draft(self) -> Draft:
        """The changed draft."""
        graph, count = self.old.graph, len(self.old.graph)
        order = np.array(_flat([*self.follows.get(-1, ()), *range(count)], self.follows), np.int64)
        own = [self.launches[t] for t in order.tolist()]
        grown = replace(
            graph, keys=np.array(self.keys, np.int64)[order], flops=np.array(self.flops, np.float64)[order],
            bytes=np.array(self.bytes, graph.bytes.dtype)[order],
            reads=self.reads.take(order), writes=self.writes.take(order),
            buffer_bytes=np.array(self.buffer_bytes, graph.buffer_bytes.dtype),
            buffer_role=np.array(self.role, graph.buffer_role.dtype),
            buffer_storage=np.array(self.storage_of, graph.buffer_storage.dtype), buffer_names=tuple(self.names),
            unit_names=tuple(self.unit_names) if any(self.unit_names) else (), storages=tuple(self.specs),
            launches=tuple(own) if any(own) else ())
        changed = replace(self.old, graph=grown, time=np.array(self.time, np.float64)[order],
                          stage=np.array(self.stage, np.int64)[order])
        before = self.old.schedule
        if before is None or not (self.entries or self.lanes):
            return changed
        schedule = self._ordered(before)
        versions = self.old.versions and self.old.versions.moved(before, schedule)
        return replace(changed, schedule=schedule, versions=versions)

    def _ordered(self, schedule: Schedule) -> Schedule:
        """The schedule with the new tasks."""
        ids, keys = schedule.ids(self.old.graph), np.array(self.keys, np.int64)
        lanes = [_flat(ids[a:b].tolist(), self.entries) for a, b in pairwise(schedule.ptr.tolist())]
        second = spread(ids, schedule.second, len(keys))
        found = Schedule.of_keys(schedule.lanes, [keys[lane] for lane in lanes], None if schedule.joined is None
                                 else np.concatenate([second[lane] for lane in lanes]))
        found = found.with_lanes({lane: keys[own] for lane, own in self.lanes.items()}) if self.lanes else found
        return replace(found, notes=schedule.notes)


class _Sets:
    """Rows as sets, made where they are looked up."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.count, self.found = rows, len(rows), dict[int, set[int]]()

    def __getitem__(self, i: int) -> set[int]:
        if i not in self.found:
            self.found[i] = set(self.rows[i].tolist())
        return self.found[i]

    def __setitem__(self, i: int, row: set[int]) -> None:
        self.found[i] = row

    def append(self, row: set[int]) -> None:
        self.found[self.count] = row
        self.count += 1

    def take(self, order: Ints) -> Rows:
        """These rows in this order, ids ascending in each."""
        at = np.arange(self.count)
        at[[*self.found]] = len(self.rows) + np.arange(len(self.found))
        return self.rows.followed_by(Rows.of([sorted(row) for row in self.found.values()])).take(at[order])


def _flat(tasks: Sequence[int], follows: Mapping[int, Sequence[int]]) -> list[int]:
    """The tasks, and after each one those that follow it."""
    found: list[int] = []
    todo = list(reversed(tasks))
    while todo:
        found.append(todo.pop())
        todo += reversed(follows.get(found[-1], ()))
    return found


def touched(launches: Iterable[Launch], access: Mapping[int, Sequence[int]]) -> tuple[set[int], set[int]]:
    """The buffers that launches read before they make them, and those that they write. `access`: of each storage."""
    reads, writes = set[int](), set[int]()
    for launch in launches:
        reads |= {b for v in launch.reads for b in access[v.storage]} - writes
        writes |= {b for v in (*launch.writes, *launch.work) for b in access[v.storage]}
    return reads, writes
