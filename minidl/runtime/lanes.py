"""Runs the lanes of a step on the CPU: each lane has one program and one thread; waits become events.

The first lane runs in the caller's thread, so a step of one lane needs no other thread. This module knows tasks as
numbers and calls, and no graph.
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
class Ends:
    """The arrays into which a step's inputs are copied, and those that are its outputs. `limits`: (input, length, a
    value that is also allowed) of inputs that are indices below a length. `load` checks inputs of any kind and copies
    them."""

    inputs: Sequence[Any]
    limits: Sequence[tuple[int, int, int]]
    outputs: Sequence[Any]
    load: Callable[[tuple[Any, ...]], None]


@dataclass(frozen=True)
class Work:
    """The work of lanes: for each lane its name, its priority (lower first) and its tasks in order; waits, as pairs
    (waiter, source) of tasks on different lanes; for each task its name, its calls for a given stream (None on the CPU)
    and the host's calls `before` and `after` them, which synchronise with communication; the memory that outlives a
    step; and the ends of a step, for lanes that can take its inputs and give its outputs themselves."""

    names: Sequence[str]
    priorities: Sequence[int]
    tasks: Sequence[Sequence[int]]
    waits: Sequence[tuple[int, int]]
    calls: Callable[[int, Any], list[Thunk]]
    name: Callable[[int], str]
    persistent: Sequence[Any] = ()
    before: Callable[[int, Any], list[Thunk]] = _nothing
    after: Callable[[int, Any], list[Thunk]] = _nothing
    ends: Ends | None = None


class LaneError(Exception):
    """A call of `task` on `lane` failed with `error`."""

    def __init__(self, error: BaseException, task: int, lane: int) -> None:
        super().__init__(str(error))
        self.error, self.task, self.lane = error, task, lane


class Threads:
    """Lanes on threads. `run` runs all lanes once, to their end, and can run again after an error. With `trace`, lanes
    keep when each task was issued, started and ended. `give_up` ends a run from any thread."""

    def __init__(self, work: Work, trace: bool = False) -> None:
        self.work, self.trace = work, trace
        self._stamps: list[list[float]] = [[] for _ in work.tasks]
        self._failures: list[Stop] = []
        self._build()
        self._streams = [Stream(name, priority)
                         for name, priority in list(zip(work.names, work.priorities, strict=True))[1:]]
        self.close = weakref.finalize(self, _close, self._streams)

    def _build(self) -> None:
        """Makes the program of each lane: for each task its waits, its kernel calls, its records."""
        self._events: list[Event] = []
        awaited: dict[int, list[Thunk]] = {}
        records: dict[int, list[Thunk]] = {}
        for waiter, source in self.work.waits:
            event = Event()
            self._events.append(event)
            awaited.setdefault(waiter, []).append(event.wait)
            records.setdefault(source, []).append(event.record)
        self._programs: list[Program] = []
        self._tasks: list[list[int]] = []  # for every call of a program, the task to which it belongs
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
        """Runs all lanes once. Raises LaneError for a task that failed; any other error does not come from a task."""
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
        """Waits for the other lanes. An interrupt during the wait ends the step, as one within a task does."""
        stops: list[Stop] = []
        while len(stops) < len(self._streams):
            try:
                stops.append(self._streams[len(stops)].join())
            except BaseException as error:
                self.give_up(Stop(error))
        return stops

    def give_up(self, stop: Stop) -> None:
        """Ends all lanes: empties their programs, and opens all events so that no lane keeps waiting."""
        self._failures.append(stop)  # before the programs are emptied: only the first failure knows its place
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
                raise stop.error  # KeyboardInterrupt, or the error of a signal handler: not from a task
        lane, error = stops.index(first), first.error
        assert error is not None
        raise LaneError(error, tasks[lane][first.index], lane) from error

    def stamps(self) -> list[Any]:
        """For each lane an array (tasks, 3): when each task of the last run was issued, started and ended, in seconds
        of the host's clock."""
        return [np.array(s).reshape(-1, 3) for s in self._stamps]


def _close(streams: list[Stream]) -> None:
    for stream in streams:
        stream.close()
