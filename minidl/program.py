"""A program: what one rank does, as data. `lower` makes it of a graph and a schedule; the runtime runs it.

Three parts in time, which is how work crosses the iteration boundary: the prologue (a step that finds nothing owed), the
body (a step, beside the late tasks of the one before), and the epilogue (late tasks alone). Each part has its graph, its
lanes, the waits between them and its memory plan. A program knows no device and no transport.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .boundary import Loop, loop
from .graph import COMMUNICATION, Ints, Kind, Role, TaskGraph
from .memory import MemoryLimitError, MemoryPlan, plan_memory
from .passes import unroll
from .schedule import Schedule, ScheduleError

TALKS = [int(kind) for kind in COMMUNICATION]  #: the kinds of tasks that a transport runs


@dataclass(frozen=True)
class Part:
    """One part of a program: tasks on lanes. The schedule is proved."""

    graph: TaskGraph
    schedule: Schedule

    @cached_property
    def ids(self) -> Ints:
        """The task of each entry of the schedule."""
        return self.schedule.ids(self.graph)

    def lane_tasks(self, lane: int) -> list[int]:
        """The tasks of a lane in order."""
        tasks: list[int] = self.ids[self.schedule.ptr[lane] : self.schedule.ptr[lane + 1]].tolist()
        return tasks

    @cached_property
    def waits(self) -> Ints:
        """Pairs (waiting task, awaited task) between lanes: the fewest that keep every edge."""
        return self.schedule.waits(self.graph)

    @cached_property
    def memory(self) -> MemoryPlan:
        return plan_memory(self.graph, self.schedule)

    @cached_property
    def communicates(self) -> tuple[bool, ...]:
        """Of each lane whether all its tasks are communication."""
        talks = np.isin(self.graph.kind, TALKS)
        return tuple(bool(len(tasks) and talks[tasks].all()) for tasks in map(self.lane_tasks, range(len(self.schedule.lanes))))


@dataclass(frozen=True)
class Program:
    """One rank's part of a plan. `prologue`, `body` and `epilogue` have one part for each parity, as `loop` has.

    `runs_on`: whether communication lanes are still under way when a step's call returns: then what they touch outlives
    the step, and late tasks wait for it. `boundary_waits`: pairs (late task, communication task) of keys, the second of
    the step before.
    """

    rank: int
    ranks: int
    loop: Loop
    prologue: tuple[Part, ...]
    body: tuple[Part, ...]
    epilogue: tuple[Part, ...]
    runs_on: bool = False
    boundary_waits: tuple[tuple[int, int], ...] = ()

    @property
    def parts(self) -> Iterator[Part]:
        """Every part that differs from the others by more than the copies that it uses."""
        yield self.body[0]
        if self.epilogue:
            yield self.prologue[0]
            yield self.epilogue[0]

    @property
    def graph(self) -> TaskGraph:
        """That of the body."""
        return self.body[0].graph

    @property
    def schedule(self) -> Schedule:
        """That of the body."""
        return self.body[0].schedule

    @property
    def peak_bytes(self) -> int:
        """Arena, parameters, states and what outlives a call, in bytes, in the part that needs most; without what a
        transport has of its own."""
        return max(part.memory.peak_bytes for part in self.parts)

    def __str__(self) -> str:
        title = f"rank {self.rank} of {self.ranks}: {len(self.graph)} tasks, {len(self.body[0].waits)} waits, {self.peak_bytes:,} bytes"
        named = [("prologue", self.prologue), ("body", self.body), ("epilogue", self.epilogue)] if self.epilogue else [("body", self.body)]
        return "\n".join([title, *(f"{name}\n{parts[0].schedule.grid()}" for name, parts in named)])


def lower(graph: TaskGraph, schedule: Schedule, *, ranks: int = 1, rank: int = 0, memory_limit: int | None = None) -> Program:
    """The program of a schedule of one rank, or of one that is the same on every rank.

    Proves all parts. Raises ScheduleError where one is wrong, MemoryLimitError above the limit (bytes).
    """
    if schedule.ranks > 1:
        raise ScheduleError(f"the schedule has {schedule.ranks} ranks; one device runs one")
    steps = loop(graph, schedule)
    body = tuple(Part(g, schedule.validate(g)) for g in steps.body)
    prologue: tuple[Part, ...] = body
    epilogue: tuple[Part, ...] = ()
    if steps.epilogue:
        prologue, epilogue = (tuple(Part(g, schedule.only(g).validate(g)) for g in graphs) for graphs in (steps.prologue, steps.epilogue))
    waits = _boundary_waits(body[0], steps)
    if waits:  # a lane that is still under way meets the next step
        schedule.repeated(2).validate(_two_steps(graph, steps))
    program = Program(rank, ranks, steps, prologue, body, epilogue, waits is not None, waits or ())
    if memory_limit is not None and program.peak_bytes > memory_limit:
        arena = max(part.memory.arena_bytes for part in program.parts)
        raise MemoryLimitError(f"the plan needs {program.peak_bytes:,} bytes ({arena:,} in the arena, {program.peak_bytes - arena:,} "
                               f"for parameters, states and what outlives a step), more than the limit of {memory_limit:,}")
    return program


def _two_steps(graph: TaskGraph, steps: Loop) -> TaskGraph:
    """Two steps in a row, on the copies that a loop keeps."""
    unrolled = unroll(graph, 2)
    doubled = np.isin(unrolled.buffer_storage, steps.doubled)
    return unrolled.with_copies(np.where(doubled[:, None], np.arange(2), 0), unrolled.iteration)[0]


def _boundary_waits(part: Part, steps: Loop) -> tuple[tuple[int, int], ...] | None:
    """What each lane of a body must await of the communication of the step before, each transfer once; None where
    communication must end with its step."""
    graph = part.graph
    lasting = {*steps.lasting, *(s for s, spec in enumerate(graph.storages) if spec.role.persistent and spec.role is not Role.SCALAR)}
    talks = [t for lane, talk in enumerate(part.communicates) if talk for t in part.lane_tasks(lane)]
    touched = graph.buffer_storage[graph.writes.take(np.array(talks, np.int64)).ids]
    if not talks or not set(touched.tolist()) <= lasting:
        return None
    place = {t: i for i, t in enumerate(talks)}
    writer = {b: t for t in talks for b in graph.writes[t].tolist()}
    waits: list[tuple[int, int]] = []
    awaited: set[int] = set()
    for lane, talk in enumerate(part.communicates):
        known: set[int] = set()
        for task in [] if talk else part.lane_tasks(lane):
            if graph.iteration[task]:
                found = {writer[b] for b in graph.reads[task].tolist() if b in writer} - known
                waits += [(int(graph.keys[task]), int(graph.keys[t])) for t in sorted(found, key=place.__getitem__)]
                known |= found
        awaited |= known
    return tuple(waits) if awaited == set(talks) - _awaited_within(part, talks) else None


def _awaited_within(part: Part, talks: list[int]) -> set[int]:
    """Communication that other communication of its step waits for, so that nobody else need."""
    return {int(p) for t in talks for p in part.graph.preds[t] if part.graph.kind[p] >= Kind.A}
