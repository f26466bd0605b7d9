"""Runs the lanes of a step on the CPU: one program a lane, one thread a lane, events where the waits are.

The first lane runs in the caller's thread, so a step of one lane needs no hand-over at all. Knows tasks as numbers and
calls, no graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ..kernels import Thunk
from .streams import Event, Program, Stop, Stream, run_program


def _nothing(task: int, stream: Any) -> list[Thunk]:
    return []


@dataclass(frozen=True)
class Work:
    """What lanes have to do: of each lane its name, its priority (lower first) and its tasks in order; pairs (waiter,
    source) of tasks on different lanes; the calls of a task, given the stream that they go to (None on the CPU), and
    what the host calls `before` and `after` them to meet communication; its name; and the memory that outlives a
    step."""

    names: Sequence[str]
    priorities: Sequence[int]
    tasks: Sequence[Sequence[int]]
    waits: Sequence[tuple[int, int]]
    calls: Callable[[int, Any], list[Thunk]]
    name: Callable[[int], str]
    persistent: Sequence[Any] = ()
    before: Callable[[int, Any], list[Thunk]] = _nothing
    after: Callable[[int, Any], list[Thunk]] = _nothing


class LaneError(Exception):
    """Call `error` of `task` on `lane` failed."""

    def __init__(self, error: BaseException, task: int, lane: int) -> None:
        super().__init__(str(error))
        self.error, self.task, self.lane = error, task, lane


class Threads:
    """`run` executes all lanes once, to their end. With `trace` the lanes keep when each task was issued, started and
    ended. After an error it can run again. `give_up` ends a run from any thread."""

    def __init__(self, work: Work, trace: bool = False) -> None:
        self.work, self.trace = work, trace
        self._stamps: list[list[float]] = [[] for _ in work.tasks]
        self._failures: list[Stop] = []
        self._build()
        self._streams = [Stream(name, priority)
                         for name, priority in list(zip(work.names, work.priorities, strict=True))[1:]]
        self.close = weakref.finalize(self, _close, self._streams)

    def _build(self) -> None:
        """One program a lane: for each task its waits, its kernel calls, its records."""
        self._events: list[Event] = []
        awaited: dict[int, list[Thunk]] = {}
        records: dict[int, list[Thunk]] = {}
        for waiter, source in self.work.waits:
            event = Event()
            self._events.append(event)
            awaited.setdefault(waiter, []).append(event.wait)
            records.setdefault(source, []).append(event.record)
        self._programs: list[Program] = []
        self._tasks: list[list[int]] = []  # for every call of a program the task that it belongs to
        work = self.work
        for lane, tasks in enumerate(work.tasks):
            program: Program = []
            owners: list[int] = []
            stamp = self._stamp(lane)
            for task in tasks:
                calls = [*stamp, *awaited.get(task, []), *work.before(task, None), *stamp, *work.calls(task, None),
                         *stamp, *records.get(task, []), *work.after(task, None)]
                program += calls
                owners += [task] * len(calls)
            self._programs.append(program)
            self._tasks.append(owners)

    def _stamp(self, lane: int) -> list[Thunk]:
        if not self.trace:
            return []
        append = self._stamps[lane].append
        return [lambda: append(perf_counter())]

    def run(self) -> None:
        """Raises LaneError for a task that failed; anything else that is raised is not a task's fault."""
        for stamps in self._stamps:
            stamps.clear()
        stops: list[Stop] = []
        try:
            for stream, program in zip(self._streams, self._programs[1:], strict=True):
                stream.start(program, self.give_up)
            stops += [run_program(program) for program in self._programs[:1]]
            if stops and stops[0].error is not None:
                self.give_up(stops[0])
        except BaseException as error:  # an interrupt between two calls
            self.give_up(Stop(error))
        stops += self._join()
        if self._failures:
            self._fail(stops)

    def _join(self) -> list[Stop]:
        """Waits for the other lanes. An interrupt meanwhile ends the step as one within a task does."""
        stops: list[Stop] = []
        while len(stops) < len(self._streams):
            try:
                stops.append(self._streams[len(stops)].join())
            except BaseException as error:
                self.give_up(Stop(error))
        return stops

    def give_up(self, stop: Stop) -> None:
        """Ends all lanes: programs are emptied, and whoever waits is let through to see it."""
        self._failures.append(stop)  # first: only the first knows its place, since the rest are emptied under way
        for program in self._programs:
            program.clear()
        for event in self._events:
            event.open()

    def _fail(self, stops: list[Stop]) -> None:
        failures, self._failures = self._failures, []
        tasks, first = self._tasks, failures[0]
        self._build()
        for stop in failures:
            if stop.error is not None and (stop.index < 0 or not isinstance(stop.error, Exception)):
                raise stop.error  # KeyboardInterrupt, or a signal handler's own error: no task's fault
        lane, error = stops.index(first), first.error
        assert error is not None
        raise LaneError(error, tasks[lane][first.index], lane) from error

    def stamps(self) -> list[Any]:
        """Of each lane (tasks, 3): when each task of the last run was issued, started, ended; seconds of
        the host's clock."""
        return [np.array(s).reshape(-1, 3) for s in self._stamps]


def _close(streams: list[Stream]) -> None:
    for stream in streams:
        stream.close()
