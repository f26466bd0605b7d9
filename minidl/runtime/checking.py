"""The executor that looks for races: it runs a random order that the waits allow, drawn from a seed, and tracks the
version of every buffer, and launch by launch who has the memory.

A task that reads another version than the graph says is an error that names both tasks; so is a launch that touches a
storage again whose memory another has taken since. The schedule is also validated before the run, so a missing wait is
found whatever the drawn order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..autograd import tape as tapes
from ..core.columns import Ints, Rows, grouped
from ..core.graph import TaskGraph, check_kinds
from ..core.schedule import Lane, Schedule
from ..kernels import Thunk
from ..plans.memory import MemoryPlan, plan_memory
from .bound import Bound, with_far
from .runtime import Guard, Stays


class VersionError(RuntimeError):
    """A task would read or overwrite the wrong version of a buffer. The message names both tasks."""


class CheckingExecutor(Stays):
    """Runs lanes in one thread: at each turn it draws a lane whose waits are over, and runs its next task.

    `waits` (pairs of task ids, default: the schedule's own) and `plan` can be given to test wrong ones. `prove=False`
    leaves out the validation, so that only versions are checked.
    """

    def __init__(self, graph: TaskGraph, schedule: Schedule, *, seed: int = 0, waits: Ints | None = None,
                 plan: MemoryPlan | None = None, prove: bool = True, device: Any = None) -> None:
        check_kinds(graph=(graph, TaskGraph), schedule=(schedule, Schedule))
        self.graph, self.schedule = graph, schedule
        self.waits = schedule.waits(graph) if waits is None else np.asarray(waits, np.int64).reshape(-1, 2)
        if prove:
            schedule.validate(graph, self.waits)
        self._random = np.random.Generator(np.random.Philox(seed))
        self.plan = plan or plan_memory(graph, schedule)
        device = tapes.device_of(device)
        self._bound = Bound(replace(graph, storages=with_far(graph.storages, device)), self.plan, device)
        self._launches = [_launches(graph, self._bound, t) for t in range(len(graph))]
        self._pieces = _pieces(graph, self.plan)
        versions = _Versions(graph)
        self._meant = [versions.run(task) for task in range(len(graph))]
        self._guard = Guard(forks=not self._bound.device.captures)

    def __call__(self, *inputs: Any) -> Any:
        with self._guard:
            return self._step(inputs)

    def _step(self, inputs: tuple[Any, ...]) -> Any:
        self._bound.load(inputs)
        self.order = order = random_order(self.graph, self.schedule, self.waits, self._random)
        graph, versions, memory = self.graph, _Versions(self.graph), _Memory(self.graph, self._pieces)
        for view in graph.inputs:
            memory.touch([view.storage], "the caller")
        for task in order:
            name, (read, overwritten) = graph.name(task), versions.run(task)
            meant_reads, meant_overwritten = self._meant[task]
            for b, have in read.items():
                if have != meant_reads[b]:
                    raise VersionError(f"task {name} reads {graph.buffer(b).name} as {self._who(have)} left it, but "
                                       f"it must read what {self._who(meant_reads[b])} writes")
            for b, readers in overwritten.items():
                if missing := meant_overwritten[b] - readers - {task}:
                    raise VersionError(f"task {name} overwrites {graph.buffer(b).name} before "
                                       f"{graph.name(min(missing))} has read it")
            for storages, calls in self._launches[task]:
                memory.touch(storages, f"task {name}")
                self._bound.device.once(calls)
        for view in graph.outputs:
            memory.touch([view.storage], "the caller")
        return self._bound.results()

    def _who(self, task: int) -> str:
        return self.graph.name(task) if task >= 0 else "the step before"


class _Versions:
    """Which version of each buffer tasks see that run in some order."""

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph
        self._writer: dict[int, int] = {}  # buffer -> the task that wrote it last; absent: from before the step
        self._readers: dict[int, set[int]] = {}  # buffer -> tasks that have read this version

    def run(self, task: int) -> tuple[dict[int, int], dict[int, set[int]]]:
        """The next task runs. Returns (buffer -> the writer of the version that it reads, -1: before the step) and
        (buffer -> the readers of the version that it overwrites)."""
        read, overwritten = dict[int, int](), dict[int, set[int]]()
        for b in self._graph.reads[task].tolist():
            read[b] = self._writer.get(b, -1)
            self._readers.setdefault(b, set()).add(task)
        for b in self._graph.writes[task].tolist():
            overwritten[b] = self._readers.pop(b, set())
            self._writer[b] = task
        return read, overwritten


class _Memory:
    """Which storages have been touched in this step, and which of them touched each piece of the arena last."""

    def __init__(self, graph: TaskGraph, pieces: Sequence[slice]) -> None:
        self._graph, self._pieces = graph, pieces
        self._begun: set[int] = set()
        self._owner = np.full(max((own.stop for own in pieces), default=0), -1)

    def touch(self, storages: Collection[int], who: str) -> None:
        """One launch reads or writes these storages. Raises VersionError if it cannot."""
        name = self._graph.storages
        pieces = {s: self._owner[self._pieces[s]] for s in storages}
        for s, own in pieces.items():
            if s in self._begun and (others := own[own != s]).size:
                raise VersionError(f"{who} needs {name[s].name}, whose memory {name[others[0]].name} has overwritten")
            own[:] = s
        for s, own in pieces.items():
            if (others := own[own != s]).size:
                raise VersionError(f"{who} needs {name[s].name} and {name[others[0]].name} at once, which share memory")
        self._begun.update(storages)


def _launches(graph: TaskGraph, bound: Bound, task: int) -> list[tuple[Collection[int], list[Thunk]]]:
    """The storages and the calls of each launch of a task; a storage that no launch names is touched by all."""
    own = {int(graph.buffer_storage[b]) for b in (*graph.reads[task].tolist(), *graph.writes[task].tolist())}
    unnamed = own.difference(view.storage for launch in graph.launches[task] for view in launch.views)
    return [({*unnamed, *(view.storage for view in launch.views)}, bound.device.bind(launch, bound.array))
            for launch in graph.launches[task]]


def in_turn(lanes: Iterable[Sequence[int]], waits: Iterable[Any], random: np.random.Generator) -> Iterator[int]:
    """The tasks of lanes, in a random order that waits (waiter, source) allow. It ends where every lane waits."""
    left, awaited, done = [[*tasks][::-1] for tasks in lanes], grouped(waits), set[int]()
    while ready := [lane for lane in left if lane and done.issuperset(awaited.get(lane[-1], ()))]:
        done.add(task := ready[int(random.integers(len(ready)))].pop())
        yield task


def random_order(graph: TaskGraph, schedule: Schedule, waits: Ints, random: np.random.Generator) -> list[int]:
    """A random order in which the lanes may run under these waits, as task ids."""
    lanes = Rows(schedule.ptr, schedule.ids(graph)).lists()
    order = [*in_turn(lanes, np.asarray(waits).reshape(-1, 2).tolist(), random)]
    if len(order) < len(schedule):
        stuck = [left[0] for lane in lanes if (left := [t for t in lane if t not in order])]
        raise schedule.error("deadlock: every lane waits", [int(graph.keys[t]) for t in stuck])
    return order


def random_schedule(graph: TaskGraph, lanes: int, random: np.random.Generator) -> Schedule:
    """A random legal schedule: a random topological order, dealt to `lanes` lanes."""
    missing = np.diff(graph.preds.ptr).tolist()
    ready = [t for t, n in enumerate(missing) if not n]
    where: dict[Lane, list[int]] = {Lane(0, "main" if i == 0 else f"sub{i}"): [] for i in range(lanes)}
    queues = list(where.values())
    while ready:
        task = ready.pop(int(random.integers(len(ready))))
        queues[int(random.integers(lanes))].append(task)
        for s in graph.succs[task].tolist():
            missing[s] -= 1
            if not missing[s]:
                ready.append(s)
    return Schedule.of(graph, where)


def _pieces(graph: TaskGraph, plan: MemoryPlan) -> list[slice]:
    """For each storage, its pieces of the arena, which is cut where a storage begins or ends."""
    size = np.array([s.bytes for s in graph.storages], np.int64)
    begin, end = np.where(plan.offset >= 0, [plan.offset, plan.offset + size], 0)
    cuts = np.unique([begin, end])
    return [slice(*own) for own in zip(*np.searchsorted(cuts, [begin, end]).tolist(), strict=True)]
