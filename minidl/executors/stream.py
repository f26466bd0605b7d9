"""Runs a schedule for real: one stream a lane, events where the schedule's waits are, everything bound beforehand.

The first lane runs in the caller's thread, so a schedule of one lane needs no hand-over at all.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from ..graph import Ints, TaskGraph
from ..memory import MemoryPlan, plan_memory
from ..schedule import Schedule, ScheduleError
from ..streams import Event, Program, Stop, Stream, run_program
from ..timeline import Timeline, What
from .bound import Bound


class TaskError(RuntimeError):
    """A task failed; `task` is its name. The task's own error, with its traceback, is the cause."""

    def __init__(self, message: str, task: str) -> None:
        super().__init__(message)
        self.task = task


class StreamExecutor:
    """Call it with a step's inputs; it returns the step's outputs.

    The schedule is validated and the memory planned here, before anything runs. `trace` fills `timeline` at each
    step. `memory_limit` in bytes bounds the plan. `settles`: see `Bound.load`; `plan` and `arena`: where given, of that memory. After a TaskError the executor can run again, but parameters may
    be those of an unfinished step.
    """

    def __init__(self, graph: TaskGraph, schedule: Schedule, *, device: Any = None, trace: bool = False,
                 memory_limit: int | None = None, settles: bool = True,
                 plan: MemoryPlan | None = None, arena: Any = None) -> None:
        self._settles = settles
        self.schedule = schedule.validate(graph)
        if schedule.ranks > 1:
            raise ScheduleError(f"the schedule has {schedule.ranks} ranks; this executor runs one")
        self.graph, self.trace = graph, trace
        self.waits = schedule.waits(graph)
        self.plan = plan or plan_memory(graph, schedule, memory_limit)
        self._bound = Bound(graph, self.plan, device, arena=arena)
        self._debug = int(os.environ.get("MINIDL_DEBUG") or 0)
        self._stamps: list[list[float]] = [[] for _ in schedule.lanes]
        self._failures: list[Stop] = []
        self._build()
        self._streams = [Stream(str(lane), lane.priority) for lane in schedule.lanes[1:]]
        self._closer = weakref.finalize(self, _close, self._streams)
        self.timeline: Timeline | None = None
        if self._debug:
            print(self.schedule.grid(), file=sys.stderr)

    @property
    def peak_bytes(self) -> int:
        """Arena, parameters and states, in bytes."""
        return self.plan.peak_bytes

    def _build(self) -> None:
        """One program a lane: for each task its waits, its kernel calls, its records."""
        ids = self.schedule.ids(self.graph)
        self._events: list[Event] = []
        awaited: dict[int, list[Callable[[], Any]]] = {}
        records: dict[int, list[Callable[[], Any]]] = {}
        for waiter, source in self.waits.tolist():
            event = Event()
            self._events.append(event)
            awaited.setdefault(waiter, []).append(event.wait)
            records.setdefault(source, []).append(event.record)
        self._programs: list[Program] = []
        self._tasks: list[list[int]] = []  # for every call of a program the task that it belongs to
        for lane in range(len(self.schedule.lanes)):
            program: Program = []
            tasks: list[int] = []
            stamp = self._stamp(lane)
            for task in ids[self.schedule.ptr[lane] : self.schedule.ptr[lane + 1]].tolist():
                calls = [*stamp, *awaited.get(task, []), *stamp, *self._bound.thunks(task)]
                if self._debug:
                    calls.append(self._inspector(task))
                calls += [*stamp, *records.get(task, [])]
                program += calls
                tasks += [task] * len(calls)
            self._programs.append(program)
            self._tasks.append(tasks)

    def _stamp(self, lane: int) -> list[Callable[[], Any]]:
        if not self.trace:
            return []
        append = self._stamps[lane].append
        return [lambda: append(perf_counter())]

    def _inspector(self, task: int) -> Callable[[], None]:
        def inspect() -> None:
            if self._debug >= 2:
                print(f"{self.graph[task].label}", file=sys.stderr)
            if self._debug >= 3:
                for buffer in (*self.graph[task].reads, *self.graph[task].writes):
                    print(f"    {buffer.name}: {buffer.bytes} bytes at {self._bound.place(buffer.storage)[1]}", file=sys.stderr)
            self._bound.check_finite(task)

        return inspect

    def __call__(self, *inputs: Any) -> Any:
        self._bound.load(inputs, self._settles)
        self._run()
        return self._bound.results()

    def _run(self) -> None:
        """One step on the inputs that were just loaded."""
        for stamps in self._stamps:
            stamps.clear()
        stops: list[Stop] = []
        try:
            for stream, program in zip(self._streams, self._programs[1:], strict=True):
                stream.start(program, self._give_up)
            stops += [run_program(program) for program in self._programs[:1]]
            if stops and stops[0].error is not None:
                self._give_up(stops[0])
        except BaseException as error:  # an interrupt between two calls
            self._give_up(Stop(error))
        stops += self._join()
        if self._failures:
            self._fail(stops)
        if self.trace:
            self.timeline = self._read_stamps()

    def _join(self) -> list[Stop]:
        """Waits for the other lanes. An interrupt meanwhile ends the step as one within a task does."""
        stops: list[Stop] = []
        while len(stops) < len(self._streams):
            try:
                stops.append(self._streams[len(stops)].join())
            except BaseException as error:
                self._give_up(Stop(error))
        return stops

    def _give_up(self, stop: Stop) -> None:
        """Ends all lanes: programs are emptied, and whoever waits is let through to see it."""
        self._failures.append(stop)  # first: only the first knows its place, since the rest are emptied under way
        for program in self._programs:
            program.clear()
        for event in self._events:
            event.open()

    def _fail(self, stops: list[Stop]) -> None:
        failures, self._failures = self._failures, []
        self._build()
        for stop in failures:
            if stop.error is not None and (stop.index < 0 or not isinstance(stop.error, Exception)):
                raise stop.error  # KeyboardInterrupt, or a signal handler's own error: no task's fault
        lane = stops.index(failures[0])
        error, task = failures[0].error, self._tasks[lane][failures[0].index]
        where = f"task {self.graph[task].label} on lane {self.schedule.lanes[lane]}"
        raise TaskError(f"{where} failed: {type(error).__name__}: {error}", self.graph.name(task)) from error

    def _read_stamps(self) -> Timeline:
        """Three stamps a task: issued, started, ended; seconds to microseconds from the first of all."""
        lanes = len(self.schedule.lanes)
        stamps = [np.array(s).reshape(-1, 3) * 1e6 for s in self._stamps]
        zero = min((s[0, 0] for s in stamps if len(s)), default=0.0)
        times = np.concatenate([s - zero for s in stamps]) if lanes else np.empty((0, 3))
        keys, lane = self.schedule.keys, self.schedule.lane_of_each()
        ids = self.schedule.ids(self.graph)
        waiting = np.zeros(len(self.graph), bool)
        if len(self.waits):
            waiting[self.waits[:, 0]] = True
        waited = waiting[ids]

        def both(of_tasks: Any, of_waits: Any) -> Any:
            return np.concatenate([of_tasks, of_waits])

        place = np.empty(len(self.graph), np.int64)
        place[ids] = np.arange(len(ids))
        edges: Ints = place[self.waits[:, ::-1]] if len(self.waits) else np.empty((0, 2), np.int64)
        return Timeline(
            lanes=self.schedule.lanes, what=both(np.full(len(keys), What.TASK), np.full(int(waited.sum()), What.WAIT)),
            key=both(keys, keys[waited]), lane=both(lane, lane[waited]), issued=both(times[:, 0], times[waited, 0]),
            start=both(times[:, 1], times[waited, 0]), end=both(times[:, 2], times[waited, 1]),
            bytes=both(self.graph.bytes[ids], np.zeros(int(waited.sum()), np.int64)), edges=edges,
            labels=self.graph.unit_names, peak_bytes=self.plan.peak_bytes)

    def close(self) -> None:
        """Ends the worker threads."""
        self._closer()


def _close(streams: list[Stream]) -> None:
    for stream in streams:
        stream.close()
