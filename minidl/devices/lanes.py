"""Runs the lanes of a step on the CPU: each lane has one program and one thread; waits become events.

A program is a flat list of calls without arguments: kernel calls, and the waits and records of events. Nothing else
happens between two kernels, so a task costs little beyond its kernels. The first lane runs in the caller's thread, so a
step of one lane needs no other thread. This module knows tasks as numbers and calls, and no graph.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ..core.columns import grouped
from ..kernels import Thunk

Program = list[Callable[[], Any]]
CLOSED = "this executor is closed; make another one"


class Event:
    """An event: recorded once and awaited once in each run, in either order; then it is reset for the next run."""

    __slots__ = ("_lock", "record", "wait")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.record: Callable[[], Any] = self._lock.release
        self.wait: Callable[..., Any] = self._lock.acquire  #: (True, seconds): at most so long

    def arrived(self) -> bool:
        """Whether it was recorded, as a poll: if so, it is reset for the next run."""
        return self._lock.acquire(False)

    def open(self) -> None:
        """Lets a waiter through although nothing was recorded, when a run is given up."""
        with contextlib.suppress(RuntimeError):
            self._lock.release()


@dataclass(eq=False, slots=True)
class Stop:
    """How a program ended: `error` and the index of the call that raised it, or neither."""

    error: BaseException | None = None
    index: int = -1


@dataclass(eq=False, slots=True)
class Place:
    """Where a program is: the iterator of its calls while it runs."""

    calls: Any = None


def run_program(program: Program, place: Place | None = None) -> Stop:
    """Makes all calls in order. An exception stops it and is returned with its place.

    Another thread that clears the list ends the run after the present call, or looks at the `place` where it is.
    """
    calls: Any = iter(program)
    total, place = len(program), place or Place()
    place.calls = calls
    try:
        with np.errstate(all="ignore"):  # results show infinities; no warnings are needed
            for call in calls:
                call()
    except BaseException as error:
        return Stop(error, total - calls.__length_hint__() - 1)
    place.calls = None
    return Stop()


def lower_priority(priority: int) -> None:
    """Gives this thread the niceness of its lane, if it is positive."""
    if priority > 0:
        with contextlib.suppress(OSError, AttributeError):  # not every system has niceness per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, priority))


class Stream:
    """A worker thread that runs programs. `priority`: the lower number goes first, as in CUDA; here the niceness."""

    def __init__(self, name: str, priority: int = 0) -> None:
        self.name, self.priority = name, priority
        self._start, self._done, self._busy, self._closed = Event(), Event(), False, False
        self._program: Program | None = None
        self._on_error: Callable[[Stop], None] | None = None
        self._stop, self.place = Stop(), Place()
        self._thread = threading.Thread(target=self._work, name=f"minidl {name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        lower_priority(self.priority)
        while True:
            self._start.wait()
            if self._closed or self._program is None:
                self._busy = False
                self._done.open()
                return
            self._stop = run_program(self._program, self.place)
            if self._stop.error is not None and self._on_error is not None:
                self._on_error(self._stop)
            self._busy = False
            self._done.open()

    def start(self, program: Program, on_error: Callable[[Stop], None] | None = None) -> None:
        """Starts a program on the worker, which calls `on_error` if it fails. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError(CLOSED)
        self._program, self._on_error, self._busy = program, on_error, True
        self._start.record()

    def join(self) -> Stop:
        """Waits for the last program. An interrupt during the wait leaves the program running: call join again."""
        while self._busy:  # the event alone proves nothing: it may be left over from an interrupted wait
            self._done.wait()
        stop = self._stop
        self._program, self._on_error, self._stop = None, None, Stop()  # so that the thread keeps no object alive
        return stop

    def close(self) -> None:
        """Ends the thread, after the present call of its program; `join_thread` waits for it."""
        self._closed = True
        if self._program is not None:
            self._program.clear()
        self._start.open()

    def join_thread(self) -> None:
        self._thread.join()


def _nothing(task: int, stream: Any) -> list[Thunk]:
    return []


@dataclass(frozen=True)
class Work:
    """The work of lanes: for each lane its name, its priority (lower first) and its tasks in order; waits, as pairs
    (waiter, source) of tasks on different lanes; for each task its name, its calls for a given stream (None on the CPU)
    and the host's calls `before` and `after` them, which synchronise with communication; the memory that outlives a
    step; the device's `feed` of its inputs, and its `ring` of several steps. For lanes that one thread runs
    (`picking.py`): `polls`, what must have returned True before a task runs, and `idle`, which waits until its argument
    does, for this task among others. `side_sms`: the SMs of a GPU that all lanes but the first share; the first has the
    others. 0: all use all."""

    names: Sequence[str]
    priorities: Sequence[int]
    tasks: Sequence[Sequence[int]]
    waits: Sequence[tuple[int, int]]
    calls: Callable[[int, Any], list[Thunk]]
    name: Callable[[int], str]
    persistent: Sequence[Any] = ()
    before: Callable[[int, Any], list[Thunk]] = _nothing
    after: Callable[[int, Any], list[Thunk]] = _nothing
    feed: Any = None
    ring: Any = None
    polls: Callable[[int], list[Callable[[], bool]]] = lambda task: []
    idle: Callable[[Callable[[], bool], int], None] | None = None
    side_sms: int = 0


class LaneError(RuntimeError):
    """A call of `task` on `lane` failed with `error`; the task is -1 if the error came between tasks."""

    def __init__(self, error: BaseException, task: int = -1, lane: int = 0) -> None:
        super().__init__(str(error))
        self.error, self.task, self.lane, self.__cause__ = error, task, lane, error


class Threads:
    """Lanes on threads. `run` runs all lanes once, to their end, and can run again after an error. With `trace`, lanes
    keep when each task was issued, started and ended. `give_up` ends a run from any thread."""

    def __init__(self, work: Work, trace: bool = False) -> None:
        self.work, self.trace = work, trace
        self._stamps: list[list[float]] = [[] for _ in work.tasks]
        self.given_up: list[Stop] = []  #: why the run must end, if it must: a call that waits returns then
        self._events: list[Event] = []
        self._build()
        self._streams = [Stream(name, priority)
                         for name, priority in list(zip(work.names, work.priorities, strict=True))[1:]]
        self._places = [Place(), *(stream.place for stream in self._streams)][: len(self._programs)]
        self.close = weakref.finalize(self, _close, self._streams, self.given_up, self._events)

    def _build(self) -> None:
        """Makes the program of each lane: for each task its waits, its kernel calls, its records."""
        work = self.work
        self._events[:] = [Event() for _ in work.waits]
        ends = [*zip(work.waits, self._events, strict=True)]
        awaited = grouped((waiter, event.wait) for (waiter, _), event in ends)
        records = grouped((source, event.record) for (_, source), event in ends)
        self._programs: list[Program] = [[] for _ in work.tasks]
        # for every call of a program, how many moments of the lane's tasks have passed when it is made: three a task
        self._phases: list[list[int]] = [[] for _ in work.tasks]
        for tasks, stamps, program, phases in zip(work.tasks, self._stamps, self._programs, self._phases, strict=True):
            stamp = [lambda append=stamps.append: append(perf_counter())] if self.trace else []
            for i, task in enumerate(tasks):
                for moment, calls in enumerate((
                        [*stamp, *awaited.get(task, []), *work.before(task, None)], [*stamp, *work.calls(task, None)],
                        [*stamp, *records.get(task, []), *work.after(task, None)]), 1):
                    program += calls
                    phases += [3 * i + moment] * len(calls)

    def several(self, steps: int) -> None:
        """Runs so many steps on the batches of the ring, as `run`."""
        for step in range(steps):
            self.work.ring.take(step)
            self.run()
            self.work.ring.give(step)

    def run(self) -> None:
        """Runs all lanes once. Raises LaneError for a task that failed; any other error does not come from a task."""
        for stamps in self._stamps:
            stamps.clear()
        stops: list[Stop] = []
        try:
            for stream, program in zip(self._streams, self._programs[1:], strict=True):
                stream.start(program, self.give_up)
            stops += [run_program(program, self._places[0]) for program in self._programs[:1]]
            if stops and stops[0].error is not None:
                self.give_up(stops[0])
        except BaseException as error:  # an interrupt between two calls
            self.give_up(Stop(error))
        stops += self._join()
        if self.given_up:
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
        self.given_up.append(stop)  # before the programs are emptied: only the first failure knows its place
        for program in self._programs:
            program.clear()
        for event in self._events:
            event.open()

    def _fail(self, stops: list[Stop]) -> None:
        failures = [*self.given_up]
        self.given_up.clear()
        phases, first = self._phases, failures[0]
        self._build()
        for stop in failures:
            if stop.error is not None and (stop.index < 0 or not isinstance(stop.error, Exception)):
                raise stop.error  # KeyboardInterrupt, or the error of a signal handler: not from a task
        lane = stops.index(first)
        assert first.error is not None
        raise LaneError(first.error, self.work.tasks[lane][(phases[lane][first.index] - 1) // 3], lane)

    def stamps(self) -> list[Any]:
        """For each lane an array (tasks, 3): when each task of the last run was issued, started and ended, in seconds
        of the host's clock."""
        return [np.array(s).reshape(-1, 3) for s in self._stamps]

    def where(self) -> list[tuple[int, Any]]:
        """For each lane how many moments of the present run have passed, three for each task in order (issued, started,
        ended), and when, as far as it is traced. Any thread may ask."""
        found = []
        for place, phases, tasks, stamps in zip(self._places, self._phases, self.work.tasks, self._stamps, strict=True):
            # (iter, (list,), index); without an index where it has ended
            calls = place.calls
            state: Any = () if calls is None else calls.__reduce__()
            passed = 3 * len(tasks) if len(state) < 3 else phases[state[2] - 1] if state[2] else 0
            found.append((passed, np.array(stamps)))
        return found


def _close(streams: list[Stream], failures: list[Stop], events: list[Event]) -> None:
    """Ends all workers, also those that run a step: it first tells every lane to stop, so that none waits for another
    one that has ended. It holds no program, which may hold the lanes."""
    failures.append(Stop(RuntimeError(CLOSED)))  # of a step that runs
    for stream in streams:
        stream.close()
    for event in events:
        event.open()
    for stream in streams:
        stream.join_thread()
