"""Runs the lanes of a schedule on CUDA streams, issued by one thread, or captured once and replayed by one launch.

Lane 0 is the device's main stream, unless lanes divide the GPU. The main stream forks the other streams at the start of
a step and joins them at its end, so work issued on it afterwards runs after the step. Nothing here waits for the
device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from graphlib import TopologicalSorter
from itertools import groupby, pairwise
from operator import or_
from time import perf_counter
from typing import Any

import numpy as np

from ...core.columns import grouped
from ...kernels import Thunk
from ...system.process import paused
from .. import DeviceError
from ..far import OnHost
from ..lanes import LaneError, Stop, Work, run_program
from .driver import on_host


def issue_order(work: Work) -> list[tuple[int, int]]:
    """(task, lane) in an order in which one thread can issue them: a wait comes after the record of its event.

    The order is by depth (the longest chain of tasks before one), lanes in turn. So every lane gets its next task about
    when it can start, and no lane has to wait until another one's queue has been issued.
    """
    awaited = grouped([*work.waits, *((two, one) for tasks in work.tasks for one, two in pairwise(tasks))])
    before = {task: awaited.get(task, []) for tasks in work.tasks for task in tasks}
    depth: dict[int, int] = {}
    for task in TopologicalSorter(before).static_order():
        depth[task] = 1 + max((depth[s] for s in before[task]), default=-1)
    where = {task: (depth[task], lane, i) for lane, tasks in enumerate(work.tasks) for i, task in enumerate(tasks)}
    return [(task, where[task][1]) for task in sorted(where, key=where.__getitem__)]


BETWEEN, INPUTS = -1, -2  #: numbers of segments that are no task: forks and joins; the upload of inputs


@dataclass
class Segment:
    """Calls that are made together, for one task on one lane, or for none (BETWEEN, INPUTS). `host`: calls of the
    host that synchronise with communication; a capture ends before them and a new one begins after them."""

    task: int
    lane: int
    calls: list[Thunk]
    host: bool = False


class Streams:
    """Lanes on CUDA streams. `run` issues all lanes once. With `trace`, events keep when each task started and ended,
    which costs some time. `give_up` ends a run from any thread; after that, it cannot run again."""

    in_graph = False  #: whether the device makes the calls of a graph: the host then synchronises between two graphs

    def __init__(self, device: Any, work: Work, trace: bool = False) -> None:
        self.device, self.driver, self.work, self.trace = device, device.driver, work, trace
        self.main, self.streams = device.main, device.streams(work.priorities, work.side_sms)
        self.order = issue_order(work)
        self._issued: dict[int, float] = {}
        self.given_up: list[Stop] = []  #: why the run must end, if it must: a call that waits returns then
        if trace:
            self._times = {task: (self.driver.event(True), self.driver.event(True)) for task, _ in self.order}
        self._build()

    def _build(self) -> None:
        segments = self._joined(self._segments(self.trace))
        self._program = [call for segment in segments for call in segment.calls]
        self._owner = [segment for segment in segments for _ in segment.calls]

    def _segments(self, trace: bool) -> list[Segment]:
        """Every task in the order of issue, with its waits, launches and records, and the host's calls before and
        after."""
        driver = self.driver
        events = {source: driver.event() for _, source in self.work.waits}
        awaited = grouped(self.work.waits)
        segments = []
        graph, graph_of = 0, dict[int, int]()  # between two graphs, all streams have joined
        for task, lane in self.order:
            stream = self.streams[lane]
            meets = self.main if self.in_graph else stream  # waits for communication
            before, after = self.work.before(task, meets), self.work.after(task, meets)
            graph += self.in_graph and bool(before)
            graph_of[task] = graph
            begins, ends = self._marks(task, stream) if trace else ([], [])
            calls = [*(driver.wait(stream, events[s]) for s in awaited.get(task, []) if graph_of[s] == graph), *begins,
                     *self.work.calls(task, stream), *ends,
                     *([driver.record(events[task], stream)] if task in events else [])]
            segments += [Segment(task, lane, *made) for made in ((before, True), (calls,), (after, True))]
            graph += self.in_graph and bool(after)
        return [segment for segment in segments if segment.calls or not segment.host]

    def _joined(self, segments: list[Segment]) -> list[Segment]:
        """The segments between a fork of the streams that they use and a join."""
        driver, main = self.driver, self.main
        others = [stream for lane in sorted({segment.lane for segment in segments})
                  if (stream := self.streams[lane]) is not main]
        if not others:
            return segments
        start = driver.event()
        fork = Segment(BETWEEN, 0, [driver.record(start, main), *(driver.wait(stream, start) for stream in others)])
        joins = [Segment(BETWEEN, 0, [driver.record(end, stream), driver.wait(main, end)])
                 for end, stream in ((driver.event(), stream) for stream in others)]
        return [fork, *segments, *joins]

    def _marks(self, task: int, stream: Any) -> tuple[list[Thunk], list[Thunk]]:
        """The calls of a trace before and after a task. They also open and close an NVTX range for other tools."""
        opened, closed = self.driver.ranges(self.work.name(task))
        begin, end = (self.driver.record(event, stream) for event in self._times[task])
        return [self._mark([task]), opened, begin], [end, closed]

    def _mark(self, tasks: list[int]) -> Thunk:
        """A call that notes the time at which these tasks are issued."""
        return lambda: self._issued.update(dict.fromkeys(tasks, perf_counter()))

    def run(self) -> None:
        """Raises LaneError for a task whose launch failed."""
        if not self.given_up:
            _issue(self._program, self._owner)
        if self.given_up:
            assert self.given_up[0].error is not None
            raise self.given_up[0].error

    def give_up(self, stop: Stop) -> None:
        """Ends the run: the rest is not issued."""
        self.given_up.append(stop)
        self._program.clear()

    def stamps(self) -> list[Any]:
        """As `Threads.stamps`; waits for the step. The device's clock is aligned with the host's, to some
        microseconds. The host runs ahead: a lane comes to a task of a captured step when the one before has ended, and
        to its first one when the step begins."""
        now = self.driver.event(True)
        self.driver.record(now, self.main)()
        self.driver.synchronize(self.main)
        host = perf_counter()
        found = []
        for tasks in self.work.tasks:
            times = np.array([[host - self.driver.elapsed(event, now) / 1e6 for event in self._times[task]]
                              for task in tasks]).reshape(-1, 2)
            issued = np.minimum([self._issued.get(task, host) for task in tasks], times[:, 0])
            found.append(np.column_stack([issued, times]))
        if self.in_graph:
            begin = min((float(times[:, 1].min()) for times in found if len(times)), default=0.0)
            for times in found:
                before = np.maximum.accumulate([begin, *times[:-1, 2]])[: len(times)]
                times[:, 0] = np.minimum(np.maximum(times[:, 0], before), times[:, 1])
        return found

    def close(self) -> None:
        """Waits for all issued work."""
        self.driver.synchronize(self.main)


def _issue(program: list[Thunk], owner: list[Segment]) -> None:
    stop = run_program(program)
    if stop.error is not None:
        segment = owner[stop.index] if stop.index >= 0 else Segment(BETWEEN, 0, [])
        if segment.task < 0 or not isinstance(stop.error, Exception):
            raise stop.error
        raise LaneError(stop.error, segment.task, segment.lane)


def capture(driver: Any, stream: Any, fill: Callable[[], None], into: Any = None) -> Any:
    """The graph of the work that `fill` issues on `stream`, or on streams that it forks and joins; or with `into`, the
    loop around it. An error of `fill` ends the capture. Threads that capture on one device take turns."""
    with driver.alone(), paused:  # freeing a handle while its stream is captured would end the capture
        driver.begin_capture(stream, into)
        try:
            fill()
        except BaseException:
            driver.abandon_capture(stream, into)
            raise
        return driver.end_capture(stream, into)


class Captured(Streams):
    """The same lanes, captured once: `run` is one launch, or one launch for each piece between two synchronisations
    with communication. Without these, small inputs and outputs are copied by the graph, of which there is one for each
    slot of the feed. It is checked that every wait of the schedule and the order of each lane is a path in the graph.

    With a `ring`, `several` is one launch for many steps: a loop on the device, whose body takes a step's inputs from
    the ring, is the step, and gives its outputs to the ring."""

    in_graph = True

    def _build(self) -> None:
        self.device.once([self._capture_all])

    def _capture_all(self) -> None:
        segments = self._segments(self.trace)
        plain = self._segments(False) if self.trace else segments
        warm = [s for piece in self._pieces(plain) for s in self._joined(piece) if not s.host]
        self._kept = segments  # the memory to which nodes point
        self.graphs: list[Any] = []
        pieces = self._pieces(segments)
        slots = self.work.feed.slots() if self.work.feed and len(pieces) == 1 and not pieces[0][0].host else []
        ring = self.work.ring
        around = [[], []] if ring is None else [[Segment(INPUTS, 0, ring.take())], [Segment(BETWEEN, 0, ring.give())]]
        leave = [Segment(BETWEEN, 0, slot.leave) for slot in slots]
        self._warm_up([*(Segment(INPUTS, 0, slot.upload) for slot in slots), *around[0], *warm, *around[1], *leave])
        self._loop = None if ring is None else self._capture([*around[0], *self._joined(segments)], ring)
        self._of_slot = [self._launches(pieces, slot) for slot in slots] or [self._launches(pieces)]
        self._program, self._owner = [], []

    def _launches(self, pieces: list[list[Segment]], slot: Any = None) -> tuple[list[Thunk], list[Segment]]:
        """The calls of a step, and the segment of each. `slot`: what its graph does first and last."""
        program, owner = list[Thunk](), list[Segment]()
        for piece in pieces:
            calls = [call for segment in piece for call in segment.calls]
            if not piece[0].host and (len(calls) > 1 or slot):
                tasks = [segment.task for segment in piece]
                first, last = (([Segment(INPUTS, 0, slot.upload)], [Segment(BETWEEN, 0, slot.leave)]) if slot
                               else ([], []))
                calls = [*([self._mark(tasks)] if self.trace else []),
                         self._capture([*first, *self._joined(piece), *last]), *([slot.done] if slot else [])]
            program += calls
            owner += [piece[0]] * len(calls)
        return program, owner

    def run(self) -> None:
        """As `Streams.run`."""
        if len(self._of_slot) == 1 or self.given_up:
            self._program, self._owner = self._of_slot[0]
            super().run()
            return
        program, owner = self._of_slot[self.work.feed.turn]
        try:
            for call in program:
                call()
        except Exception as error:
            raise LaneError(error, owner[0].task, owner[0].lane) from error
        except BaseException:  # an interrupt: the step may run, and its slot is not free before it has
            program[-1]()
            raise

    def several(self, steps: int) -> None:
        """Runs so many steps on the batches of the ring, as `run`, in one launch; fewer if one of them uses a gradient
        that is not finite."""
        assert self._loop is not None
        if not self.given_up:
            self.work.ring.send(steps)
            self._program, self._owner = [self._loop], [Segment(BETWEEN, 0, [])]
        super().run()

    def _pieces(self, segments: list[Segment]) -> list[list[Segment]]:
        """Runs of segments that are all the host's or all the device's."""
        return [list(piece) for _, piece in groupby(segments, key=lambda segment: segment.host)]

    def _capture(self, segments: list[Segment], ring: Any = None) -> Thunk:
        """A call that launches these segments at once; with a ring, again and again."""
        driver = self.driver
        loop = None if ring is None else driver.loop()
        after = [] if loop is None else [Segment(BETWEEN, 0, ring.give(loop.handle))]
        last: dict[int, list[int]] = {}

        def reached(segment: Segment) -> None:
            stream = self.main if segment.task == INPUTS else self.streams[segment.lane]
            last.setdefault(segment.task, []).extend(driver.frontier(stream))

        def fill() -> None:
            for segment in (*segments, *after):
                then: list[Thunk] = [] if segment.task == BETWEEN else [partial(reached, segment)]
                calls = ([c for call in segment.calls for c in (call, *then)] if segment.task == INPUTS
                         else [*segment.calls, *then])
                _issue(calls, [segment] * len(calls))

        graph = capture(driver, self.main, fill, loop)
        self._check(graph, last)
        self.graphs.append(graph)
        self._kept = [*self._kept, *segments, *after]
        return driver.replay(graph, self.main)

    def _warm_up(self, segments: list[Segment]) -> None:
        """Issues everything once, so that libraries do their setup of the first call, and restores the memory. Copies
        to the host need no setup: they are left out, and so no second far memory is needed."""
        changed = [m for m in (*self.work.persistent, self.device.flag_memory) if not isinstance(m, OnHost)]
        before = [self.device.duplicate(memory) for memory in changed]
        for segment in segments:
            # `Driver.copy` owns what it copies to, last
            calls = [call for call in segment.calls if not on_host((getattr(call, "owners", ()) or (None,))[-1])]
            _issue(calls, [segment] * len(calls))
        for memory, saved in zip(changed, before, strict=True):
            self.device.copier(saved, memory)()
        self.driver.synchronize_device()

    def _marks(self, task: int, stream: Any) -> tuple[list[Thunk], list[Thunk]]:
        begin, end = (self.driver.record_in_graph(event, stream) for event in self._times[task])
        return [begin], [end]

    def _check(self, graph: Any, last: dict[int, list[int]]) -> None:
        """Raises DeviceError if a captured graph lacks an order of the schedule. `last`: for every task in it the
        nodes after which it is done."""
        nodes, edges = self.driver.dependencies(graph)
        found = grouped((b, a) for a, b in edges)
        before = {node: found.get(node, []) for node in range(len(nodes))}
        reached: dict[int, int] = {}  # the nodes before each, itself included, as bits
        for node in TopologicalSorter(before).static_order():
            reached[node] = reduce(or_, (reached[other] for other in before[node]), 1 << node)
        place = {node: i for i, node in enumerate(nodes)}
        pairs = [(source, waiter) for waiter, source in self.work.waits]
        pairs += [pair for tasks in self.work.tasks for pair in pairwise([INPUTS, *tasks])]
        done = {task: sum(1 << place[node] for node in set(nodes)) for task, nodes in last.items()}
        for source, waiter in pairs:
            if source not in last or waiter not in last:
                continue  # in another piece
            if done[source] & ~reduce(or_, (reached[place[node]] for node in last[waiter]), 0):
                first = "the upload of inputs" if source == INPUTS else self.work.name(source)
                raise DeviceError(f"the captured graph lets task {self.work.name(waiter)} start before {first} has "
                                  f"ended")
