"""The executor that looks for races: any order that the waits allow, drawn from a seed, with every
buffer's version known.

Reading a version that the graph did not mean, or memory that another buffer has taken over, is an error that names
both tasks. The lanes are also proved ordered before the run, so a missing wait is noticed even by a lucky draw.
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
    """A task would read or destroy the wrong version of a buffer; the message names both tasks."""


class CheckingExecutor:
    """Runs lanes in one thread, at each turn the next task of a lane drawn at random among those whose waits are over.

    `waits` (pairs of task ids, default: the schedule's own) and `plan` can be given to try wrong ones; `prove=False`
    leaves out the proof, so that only versions speak.
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
        version: dict[int, int] = {}  # buffer -> task that wrote it last (absent: as before the step)
        readers: dict[int, set[int]] = {}  # buffer -> tasks that have read this version
        owner: dict[int, int] = {}  # storage -> storage that took its bytes over

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
                                       f"means what {self._who(meant)} writes")
                taken = owner.get(graph.buffer(b).storage)
                if taken is not None:
                    raise VersionError(f"task {name} reads {graph.buffer(b).name}, whose memory "
                                       f"{graph.storages[taken].name} has taken")
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
                                   f"{graph.storages[owner[view.storage]].name} has taken")
        return self._bound.results()

    def _who(self, task: int) -> str:
        return self.graph.name(task) if task >= 0 else "the step before"

    def _readers_before(self, task: int, buffer: int) -> set[int]:
        """Tasks that mean to read what this write destroys."""
        readers: set[int] = self._meant[task][~buffer]
        return readers


def random_order(graph: TaskGraph, schedule: Schedule, waits: Ints, random: np.random.Generator) -> list[int]:
    """One of the orders in which the lanes may run under these waits, as task ids."""
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
    """A legal schedule at random: a random topological order, dealt to `lanes` lanes."""
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
    """For each task: buffer -> the task whose write it means to read (-1: none in this step), and ~buffer -> the
    readers of what it overwrites."""
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
    """For each storage the others whose bytes it shares."""
    size = np.array([max(s.bytes, 1) for s in graph.storages], np.int64)
    begin, end = plan.offset, plan.offset + size
    placed = plan.offset >= 0
    result: list[Sequence[int]] = []
    for s in range(len(size)):
        hit = placed & placed[s] & (begin < end[s]) & (end > begin[s])
        hit[s] = False
        result.append(np.flatnonzero(hit).tolist())
    return result
