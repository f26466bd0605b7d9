"""Runs the lanes of a schedule on CUDA streams, issued by one thread, or captured once and replayed by one launch.

Lane 0 is the device's main stream: it forks the others at the start of a step and joins them at its end, so whoever
uses the main stream afterwards finds the step done. Nothing here waits for the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from ..device import DeviceError
from ..kernels import Thunk
from ..lanes import LaneError, Work
from ..streams import run_program


def issue_order(work: Work) -> list[tuple[int, int]]:
    """(task, lane) in an order in which one thread may issue them: no wait before what it waits for.

    By depth (the longest chain of tasks before one), lanes in turn: so every lane gets its next task about when it can
    start, and none waits for another's queue to be issued.
    """
    before: dict[int, list[int]] = {}
    for waiter, source in work.waits:
        before.setdefault(waiter, []).append(source)
    for tasks in work.tasks:
        for one, two in pairwise(tasks):
            before.setdefault(two, []).append(one)
    depth: dict[int, int] = {}
    for tasks in work.tasks:
        for task in tasks:
            stack = [task]
            while stack:
                top = stack[-1]
                missing = [s for s in before.get(top, ()) if s not in depth]
                if missing:
                    stack += missing
                else:
                    depth[top] = 1 + max((depth[s] for s in before.get(top, ())), default=-1)
                    stack.pop()
    where = {task: (depth[task], lane, i) for lane, tasks in enumerate(work.tasks) for i, task in enumerate(tasks)}
    return [(task, where[task][1]) for task in sorted(where, key=where.__getitem__)]


@dataclass
class Segment:
    """Calls that are issued together: of one task on one lane, or (task -1) the fork and the join."""

    task: int
    lane: int
    calls: list[Thunk]


class Streams:
    """`run` issues all lanes once. With `trace` the streams keep when each task started and ended, at some cost."""

    def __init__(self, device: Any, work: Work, trace: bool = False) -> None:
        self.device, self.driver, self.work, self.trace = device, device.driver, work, trace
        self.streams = device.streams(work.priorities)
        self.order = issue_order(work)
        self._issued: list[float] = []
        if trace:
            self._origin = self.driver.event(True)
            self._times = {task: (self.driver.event(True), self.driver.event(True)) for task, _ in self.order}
        self._build()

    def _build(self) -> None:
        segments = self._segments(self.trace)
        self._program = [call for segment in segments for call in segment.calls]
        self._owner = [segment for segment in segments for _ in segment.calls]

    def _segments(self, trace: bool) -> list[Segment]:
        """The fork, every task with its waits, launches and records, the join."""
        driver, main, others = self.driver, self.streams[0], self.streams[1:]
        events = {source: driver.event() for _, source in self.work.waits}
        awaited: dict[int, list[int]] = {}
        for waiter, source in self.work.waits:
            awaited.setdefault(waiter, []).append(source)
        start = driver.event()
        fork = [self._stamp(self._origin, main)] if trace else []
        fork += [driver.record(start, main), *(driver.wait(stream, start) for stream in others)] if others else []
        segments = [Segment(-1, 0, fork)]
        for task, lane in self.order:
            stream = self.streams[lane]
            begins, ends = self._marks(task, stream) if trace else ([], [])
            segments.append(Segment(task, lane, [
                *(driver.wait(stream, events[source]) for source in awaited.get(task, [])), *begins, *self.work.calls(task, stream),
                *ends, *([driver.record(events[task], stream)] if task in events else [])]))
        for stream in others:
            end = driver.event()
            segments.append(Segment(-1, 0, [driver.record(end, stream), driver.wait(main, end)]))
        return segments

    def _stamp(self, event: Any, stream: Any) -> Thunk:
        return self.driver.record(event, stream)

    def _marks(self, task: int, stream: Any) -> tuple[list[Thunk], list[Thunk]]:
        """What a trace needs before and after a task; other tools see it as an NVTX range."""
        opened, closed = self.driver.ranges(self.work.name(task))
        begin, end = self._times[task]
        return ([lambda: self._issued.append(perf_counter()), opened, self._stamp(begin, stream)], [self._stamp(end, stream), closed])

    def run(self) -> None:
        """Raises LaneError for a task whose launch failed."""
        self._issued.clear()
        _issue(self._program, self._owner)

    def stamps(self) -> list[Any]:
        """As `Threads.stamps`; waits for the step. When a task was issued is told by the host's clock, counted from the
        first task on, the rest by the device's."""
        self.driver.synchronize(self.streams[0])
        host = dict(zip((task for task, _ in self.order), self._issued, strict=False))
        first = min(host.values(), default=0.0)
        found = []
        for tasks in self.work.tasks:
            times = [[self.driver.elapsed(self._origin, event) for event in self._times[task]] for task in tasks]
            issued = [min((host.get(task, first) - first) * 1e6, begin) for task, (begin, _) in zip(tasks, times, strict=True)]
            found.append(np.column_stack([issued, np.array(times).reshape(-1, 2)]))
        return found

    def close(self) -> None:
        """Waits for what was issued."""
        self.driver.synchronize(self.streams[0])


def _issue(program: list[Thunk], owner: list[Segment]) -> None:
    stop = run_program(program)
    if stop.error is not None:
        segment = owner[stop.index] if stop.index >= 0 else Segment(-1, 0, [])
        if segment.task < 0 or not isinstance(stop.error, Exception):
            raise stop.error
        raise LaneError(stop.error, segment.task, segment.lane) from stop.error


def capture(driver: Any, stream: Any, fill: Callable[[], None]) -> Any:
    """The graph of what `fill` issues on `stream`, or forks off and joins. What `fill` raises ends the capture."""
    collects = gc.isenabled()
    gc.disable()  # a handle that is freed while its stream is captured would end the capture
    try:
        driver.begin_capture(stream)
        try:
            fill()
        except BaseException:
            driver.abandon_capture(stream)
            raise
        return driver.end_capture(stream)
    finally:
        if collects:
            gc.enable()


class Captured(Streams):
    """The same program, captured once into a graph: `run` is one launch. Checked: every wait of the schedule, and the
    order of each lane, is a path in the graph."""

    def _build(self) -> None:
        driver, main = self.driver, self.streams[0]
        segments = self._segments(False)
        self._warm_up(segments)
        if self.trace:
            segments = self._segments(True)
        last: dict[int, list[int]] = {}

        def fill() -> None:
            for segment in segments:
                calls: list[Thunk] = [*segment.calls, *([partial(reached, segment)] if segment.task >= 0 else [])]
                _issue(calls, [segment] * len(calls))

        def reached(segment: Segment) -> None:
            last[segment.task] = driver.frontier(self.streams[segment.lane])

        self.graph = capture(driver, main, fill)
        self._check(last)
        self._kept = segments  # what the nodes point to
        self._replay = driver.replay(self.graph, main)

    def _warm_up(self, segments: list[Segment]) -> None:
        """Issues everything once, so that what libraries set up at a first call is there, and undoes what it did."""
        changed = [*self.work.persistent, self.device.flag_memory]
        before = [self.device.duplicate(memory) for memory in changed]
        for segment in segments:
            _issue(segment.calls, [segment] * len(segment.calls))
        for memory, saved in zip(changed, before, strict=True):
            self.device.copier(saved, memory)()
        self.driver.synchronize_device()

    def _stamp(self, event: Any, stream: Any) -> Thunk:
        return self.driver.record_in_graph(event, stream)

    def _marks(self, task: int, stream: Any) -> tuple[list[Thunk], list[Thunk]]:
        begin, end = self._times[task]
        return [self._stamp(begin, stream)], [self._stamp(end, stream)]

    def _check(self, last: dict[int, list[int]]) -> None:
        """Raises DeviceError where the captured graph lacks an order that the schedule has. `last`: of every task the
        nodes after which it is done."""
        nodes, edges = self.driver.dependencies(self.graph)
        place = {node: i for i, node in enumerate(nodes)}
        after: list[list[int]] = [[] for _ in place]
        missing = [0] * len(place)
        for a, b in edges:
            after[a].append(b)
            missing[b] += 1
        reached = [1 << i for i in range(len(place))]  # the nodes before each, itself included
        ready = [i for i, n in enumerate(missing) if not n]
        while ready:
            node = ready.pop()
            for n in after[node]:
                reached[n] |= reached[node]
                missing[n] -= 1
                if not missing[n]:
                    ready.append(n)
        pairs = [(source, waiter) for waiter, source in self.work.waits]
        pairs += [pair for tasks in self.work.tasks for pair in pairwise(tasks)]
        done = {task: sum(1 << place[node] for node in set(nodes)) for task, nodes in last.items()}
        for source, waiter in pairs:
            before = 0
            for node in last[waiter]:
                before |= reached[place[node]]
            if done[source] & ~before:
                raise DeviceError(f"the captured graph lets task {self.work.name(waiter)} start before {self.work.name(source)} has ended")

    def run(self) -> None:
        """One launch."""
        self._replay()

    def stamps(self) -> list[Any]:
        """As `Streams.stamps`; the tasks of a graph are all issued at its start."""
        found = super().stamps()
        for rows in found:
            rows[:, 0] = np.minimum(0.0, rows[:, 1])
        return found
