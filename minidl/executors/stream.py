"""Runs a schedule for real: one stream a lane, events where the schedule's waits are, everything bound beforehand.

How lanes run is the device's business: threads on the CPU (`minidl.lanes`), streams on CUDA (`minidl.cuda.lanes`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from ..device import DeviceError
from ..graph import Ints, TaskGraph
from ..kernels import Thunk
from ..lanes import LaneError, Work
from ..memory import MemoryPlan, plan_memory
from ..schedule import Schedule, ScheduleError
from ..timeline import Timeline, What
from .bound import Bound
from .guard import Guard


class TaskError(RuntimeError):
    """A task failed; `task` is its name. The task's own error, with its traceback, is the cause."""

    def __init__(self, message: str, task: str) -> None:
        super().__init__(message)
        self.task = task


def debug_level() -> int:
    """What MINIDL_DEBUG says: 0 to 3."""
    return int(os.environ.get("MINIDL_DEBUG") or 0)


def calls_of(bound: Bound, debug: int) -> Callable[..., list[Thunk]]:
    """The calls of a task on a stream, by default the main one; when debugging with a look at what it wrote. Holds no executor,
    so that nothing keeps one alive."""
    if not debug:
        return bound.thunks

    def inspect(task: int) -> None:
        if debug >= 2:
            print(f"{bound.graph[task].label}", file=sys.stderr)
        if debug >= 3:
            for buffer in (*bound.graph[task].reads, *bound.graph[task].writes):
                print(f"    {buffer.name}: {buffer.bytes} bytes at {bound.place(buffer.storage)[1]}", file=sys.stderr)
        bound.device.synchronize()  # the task may be on another stream than what is read goes through
        bound.check_finite(task)

    return lambda task, stream=None: [*bound.thunks(task, stream), partial(inspect, task)]


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
        self.debug = debug = debug_level()
        ids = schedule.ids(graph).tolist()
        self._lanes = self._make_lanes(Work(
            [str(lane) for lane in schedule.lanes], [lane.priority for lane in schedule.lanes],
            [ids[begin:end] for begin, end in pairwise(schedule.ptr.tolist())],
            [(waiter, source) for waiter, source in self.waits.tolist()], calls_of(self._bound, debug), graph.name, self._bound.persistent))
        self._guard = Guard(forks=len(schedule.lanes) < 2 and not self._bound.device.captures)
        self.timeline: Timeline | None = None
        if debug:
            print(self.schedule.grid(), file=sys.stderr)

    @property
    def peak_bytes(self) -> int:
        """Arena, parameters and states, in bytes."""
        return self.plan.peak_bytes

    def _make_lanes(self, work: Work) -> Any:
        return self._bound.device.lanes(work, self.trace)

    def __call__(self, *inputs: Any) -> Any:
        with self._guard:
            self._bound.load(inputs, self._settles)
            self._run()
            return self._bound.results()

    def _run(self) -> None:
        """One step on the inputs that were just loaded."""
        try:
            self._lanes.run()
        except LaneError as failure:
            error, task = failure.error, failure.task
            where = f"task {self.graph[task].label} on lane {self.schedule.lanes[failure.lane]}"
            raise TaskError(f"{where} failed: {type(error).__name__}: {error}", self.graph.name(task)) from error
        if self.trace:
            self.timeline = self._read_stamps()

    def _read_stamps(self) -> Timeline:
        """Three stamps a task: issued, started, ended; microseconds from the first of all."""
        lanes = len(self.schedule.lanes)
        stamps = self._lanes.stamps()
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
        self._lanes.close()


class GraphExecutor(StreamExecutor):
    """The same, but the step is captured once as a CUDA graph of forked and joined streams, and replayed by one launch; not
    with MINIDL_DEBUG, which looks at values between tasks.

    Raises DeviceError on a device that cannot capture.
    """

    def _make_lanes(self, work: Work) -> Any:
        if not self._bound.device.captures:
            raise DeviceError(f"{self._bound.device.name} has no graphs to capture; use StreamExecutor")
        if self.debug:
            return super()._make_lanes(work)
        self._bound.device.zero(self._bound.arena)  # tasks run once before they are captured: what another step left are no labels
        return self._bound.device.captured(work, self.trace)
