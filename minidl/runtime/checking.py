"""The executor that looks for races: it runs a random order that the waits allow, drawn from a seed, and tracks the
version of every buffer.

A task that reads another version than the graph says, or memory that another buffer has overwritten, is an error that
names both tasks. The schedule is also validated before the run, so a missing wait is found whatever the drawn order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..graph import Ints, TaskGraph
from ..schedule import Lane, Schedule
from .bound import Bound
from .memory import MemoryPlan, plan_memory
from .streams import run_program


class VersionError(RuntimeError):
    """A task would read or overwrite the wrong version of a buffer. The message names both tasks."""


class CheckingExecutor:
    """Runs lanes in one thread: at each turn it draws a lane whose waits are over, and runs its next task.

    `waits` (pairs of task ids, default: the schedule's own) and `plan` can be given to test wrong ones. `prove=False`
    leaves out the validation, so that only versions are checked.
    """

    def __init__(self, graph: TaskGraph, schedule: Schedule, *, seed: int = 0, waits: Ints | None = None,
                 plan: MemoryPlan | None = None, prove: bool = True, device: Any = None) -> None:
        self.graph, self.schedule = graph, schedule
        self.waits = schedule.waits(graph) if waits is None else np.asarray(waits, np.int64).reshape(-1, 2)
        if prove:
            schedule.validate(graph, self.waits)
        self._random = np.random.Generator(np.random.Philox(seed))
        self.plan = plan or plan_memory(graph, schedule)
        self._bound = Bound(graph, self.plan, device)
        self._thunks = [self._bound.thunks(t) for t in range(len(graph))]
        self._overlaps = _overlapping(graph, self.plan)
        self._meant = _versions(graph)

    def __call__(self, *inputs: Any) -> Any:
        self._bound.load(inputs)
        self.order = order = random_order(self.graph, self.schedule, self.waits, self._random)
        graph = self.graph
        version: dict[int, int] = {}  # buffer -> task that wrote it last (absent: not yet written in this step)
        readers: dict[int, set[int]] = {}  # buffer -> tasks that have read this version
        owner: dict[int, int] = {}  # storage -> storage that has overwritten its bytes

        def take(storage: int) -> None:
            owner.pop(storage, None)
            owner.update(dict.fromkeys(self._overlaps[storage], storage))

        for view in graph.inputs:
            take(view.storage)
        for task in order:
            name = graph.name(task)
            mine = {graph.buffer(b).storage for b in (*graph.reads[task].tolist(), *graph.writes[task].tolist())}
            for storage in mine:
                for other in mine.intersection(self._overlaps[storage]):
                    raise VersionError(f"task {name} needs {graph.storages[storage].name} and "
                                       f"{graph.storages[other].name}, which share memory")
            for b in graph.reads[task].tolist():
                have, meant = version.get(b, -1), self._meant[task][b]
                if have != meant:
                    raise VersionError(f"task {name} reads {graph.buffer(b).name} as {self._who(have)} left it, but "
                                       f"it must read what {self._who(meant)} writes")
                overwriter = owner.get(graph.buffer(b).storage)
                if overwriter is not None:
                    raise VersionError(f"task {name} reads {graph.buffer(b).name}, whose memory "
                                       f"{graph.storages[overwriter].name} has overwritten")
                readers.setdefault(b, set()).add(task)
            for b in graph.writes[task].tolist():
                missing = self._readers_before(task, b) - readers.get(b, set()) - {task}
                if missing:
                    raise VersionError(f"task {name} overwrites {graph.buffer(b).name} before "
                                       f"{graph.name(min(missing))} has read it")
                version[b] = task
                readers[b] = set()
                take(graph.buffer(b).storage)
            stop = run_program(self._thunks[task])
            if stop.error is not None:
                raise stop.error
        for view in graph.outputs:
            if view.storage in owner:
                raise VersionError(f"the step returns {graph.storages[view.storage].name}, whose memory "
                                   f"{graph.storages[owner[view.storage]].name} has overwritten")
        return self._bound.results()

    def _who(self, task: int) -> str:
        return self.graph.name(task) if task >= 0 else "the step before"

    def _readers_before(self, task: int, buffer: int) -> set[int]:
        """The tasks that must read the version that this write destroys."""
        readers: set[int] = self._meant[task][~buffer]
        return readers


def random_order(graph: TaskGraph, schedule: Schedule, waits: Ints, random: np.random.Generator) -> list[int]:
    """A random order in which the lanes may run under these waits, as task ids."""
    ids = schedule.ids(graph)
    lanes = [ids[schedule.ptr[i] : schedule.ptr[i + 1]].tolist()[::-1] for i in range(len(schedule.lanes))]
    awaited: dict[int, list[int]] = {}
    for waiter, source in np.asarray(waits).reshape(-1, 2).tolist():
        awaited.setdefault(waiter, []).append(source)
    done: set[int] = set()
    order: list[int] = []
    while any(lanes):
        ready = [lane for lane in lanes if lane and all(s in done for s in awaited.get(lane[-1], []))]
        if not ready:
            raise schedule.error("deadlock: every lane waits", [int(graph.keys[lane[-1]]) for lane in lanes if lane])
        task = ready[int(random.integers(len(ready)))].pop()
        done.add(task)
        order.append(task)
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


def _versions(graph: TaskGraph) -> list[dict[int, Any]]:
    """For each task: buffer -> the task whose write it must read (-1: from before the step), and ~buffer -> the readers
    of the version that it overwrites."""
    writer: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    meant: list[dict[int, Any]] = []
    for task in range(len(graph)):
        mine: dict[int, Any] = {}
        for b in graph.reads[task].tolist():
            mine[b] = writer.get(b, -1)
            readers.setdefault(b, set()).add(task)
        for b in graph.writes[task].tolist():
            mine[~b] = readers.get(b, set())
            writer[b], readers[b] = task, set()
        meant.append(mine)
    return meant


def _overlapping(graph: TaskGraph, plan: MemoryPlan) -> list[Sequence[int]]:
    """For each storage, the other storages with which it shares bytes."""
    size = np.array([max(s.bytes, 1) for s in graph.storages], np.int64)
    begin, end = plan.offset, plan.offset + size
    placed = plan.offset >= 0
    result: list[Sequence[int]] = []
    for s in range(len(size)):
        hit = placed & placed[s] & (begin < end[s]) & (end > begin[s])
        hit[s] = False
        result.append(np.flatnonzero(hit).tolist())
    return result
