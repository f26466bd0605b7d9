"""One rank of a data-parallel run: a compute lane in the caller's thread, a communication lane beside it.

The schedule is one iteration as it repeats (`minidl.synchronise`): its updates spend the gradients of the step before.
So a call returns when its backward pass is done, while its gradients still travel; the next call's updates wait for
them, each just before the forward that needs it. Whoever reads a parameter in between (`Tensor.numpy`, an eager op, a
checkpoint) makes the executor settle: it waits for the communication and updates, so that what is read is what
synchronous training leaves. Loop-back ranks share a process, where nobody knows whose parameters are read: they are
settled by hand.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from .. import tape as tapes
from ..comm import SLOTS, Communicator, RankError
from ..comm.lane import CREDIT, Abandoned, Lane
from ..graph import Ints, Kind, Role, TaskGraph
from ..memory import plan_memory
from ..passes import unroll
from ..schedule import Schedule, ScheduleError
from ..streams import Event, Program, Stop, Stream, run_program
from ..synchronise import COLLECTIVE
from ..tape import Storage
from ..timeline import Timeline
from .bound import Bound
from .stream import TaskError


class _Signal(Event):
    """An event that can also be looked at."""

    __slots__ = ()

    def arrived(self) -> bool:
        """Whether it was recorded; then it is ready for the next run."""
        return self._lock.acquire(False)


class DistributedExecutor:
    """Call it with this rank's share of a batch; it returns this rank's outputs.

    `graph` is a synchronised graph, `schedule` has the lanes `main` and, unless all is on main, `comm`; every rank must
    have the same. `credit`: bytes in flight. `trace` fills `timeline` with the last step that is settled. The first
    error ends the executor: a TaskError for its own, a RankError for another rank's.
    """

    def __init__(self, graph: TaskGraph, schedule: Schedule, communicator: Communicator, *, device: Any = None, trace: bool = False,
                 memory_limit: int | None = None, credit: int = CREDIT) -> None:
        names = [lane.name for lane in schedule.lanes]
        if names not in (["main"], ["main", "comm"]):
            raise ScheduleError(f"a data-parallel schedule has the lanes main and comm, not {', '.join(map(str, schedule.lanes))}")
        self.schedule = schedule.validate(graph)
        schedule.repeated(2).validate(unroll(graph, 2))
        self.device = device or tapes.current().device
        self.graph = _with_memory(graph, self.device)
        self.communicator, self.trace = communicator, trace
        self.plan = plan_memory(self.graph, schedule, memory_limit)
        self._bound = Bound(self.graph, self.plan, self.device)
        self._lane = Lane(communicator, credit)
        self._times = np.zeros((len(graph), 3))
        self._build()
        self._stream = Stream("comm") if len(names) > 1 else None
        self._running = self._owed = False  # communication is under way; updates are due
        self._error: Exception | None = None
        self._failures: list[tuple[Stop, list[int]]] = []
        self.timeline: Timeline | None = None
        self._closer = weakref.finalize(self, _close, self._stream)

    @property
    def peak_bytes(self) -> int:
        """Arena, parameters, states and gradients, in bytes; without the transport's own."""
        return self.plan.peak_bytes

    # ------------------------------------------------------------------------------------------------------- programs
    def _build(self) -> None:
        """The communication lane's program, and three of the compute lane: a first step, which has nothing to update, a
        step in the steady state, and the updates alone."""
        graph, schedule = self.graph, self.schedule
        ids = schedule.ids(graph)
        main = ids[schedule.ptr[0] : schedule.ptr[1]].tolist()
        comm = ids[schedule.ptr[1] : schedule.ptr[2]].tolist() if len(schedule.lanes) > 1 else []
        self._waits = [*map(tuple, schedule.waits(graph).tolist())]
        self._border = _border_waits(graph, main, comm)
        awaited: dict[int, list[_Signal]] = {}
        records: dict[int, list[Callable[[], Any]]] = {}
        self._events: list[_Signal] = []
        for waiter, source in (*self._waits, *self._border):
            event = _Signal()
            self._events.append(event)
            awaited.setdefault(waiter, []).append(event)
            records.setdefault(source, []).append(event.record)

        talks = [t for t in (*main, *comm) if Kind(graph.kind[t]) in COLLECTIVE]
        transfers = self._transfers(talks, records)
        calls: dict[int, list[Callable[[], Any]]] = {-1: [self._start] if comm else []}
        for task in main:
            body = transfers.get(task) or self._bound.thunks(task)
            waits = [event.wait for event in awaited.get(task, [])]
            calls[task] = body if task in transfers else [*self._mark(task, 0), *waits, *self._mark(task, 1), *body, *self._mark(task, 2),
                                                          *records.get(task, [])]
        updates = [t for t in main if graph.kind[t] == Kind.U]
        rest = [t for t in main if graph.kind[t] != Kind.U]
        last = main.index(updates[-1])
        steady = [*main[: last + 1], -1, *main[last + 1 :]]
        self._first, self._steady, self._settle = (_program(order, calls) for order in ([-1, *rest], steady, updates))
        for task in comm:
            transfers[task][:0] = [partial(self._lane.until, event.arrived) for event in awaited.get(task, [])]
        self._comm = _program(comm, transfers)
        self._programs = [self._first, self._steady, self._settle, self._comm]

    def _transfers(self, talks: list[int], records: dict[int, list[Callable[[], Any]]]) -> dict[int, list[Callable[[], Any]]]:
        """The calls of each communication task. Those that need another's result wait for all before them, once."""
        calls: dict[int, list[Callable[[], Any]]] = {}
        flying: set[int] = set()
        for i, task in enumerate(talks):
            calls[task] = [self._transfer(task, i % SLOTS, records.get(task, []))]
            if flying & set(self.graph.preds[task].tolist()):
                calls[task].insert(0, self._lane.drain)
                flying.clear()
            flying.add(task)
        calls[talks[-1]].append(self._lane.drain)
        return calls

    def _mark(self, task: int, which: int) -> list[Callable[[], Any]]:
        if not self.trace:
            return []
        times = self._times

        def mark() -> None:
            times[task, which] = perf_counter()

        return [mark]

    def _transfer(self, task: int, slot: int, records: list[Callable[[], Any]]) -> Callable[[], Any]:
        """Submits one communication task; its end is recorded when it has ended."""
        arrays = [self._bound.array(v) for v in self.graph.launches[task][0].reads]
        transfer = self.communicator.prepare(Kind(self.graph.kind[task]), arrays, slot)
        begin, end = (*self._mark(task, 0), *self._mark(task, 1)), (*self._mark(task, 2), *records)

        def done() -> None:
            for call in end:
                call()

        def submit() -> None:
            for call in begin:
                call()
            self._lane.submit(transfer, slot, int(self.graph.bytes[task]), done)

        return submit

    # ----------------------------------------------------------------------------------------------------------- runs
    def __call__(self, *inputs: Any) -> Any:
        if self._error is not None:
            raise self._error
        tapes.unsettled.discard(self)
        try:
            if self.communicator.own_process and tapes.unsettled:
                tapes.settle()
            self._bound.load(inputs, settles=False)
        finally:
            self._remember()
        owed, self._owed = self._owed, False
        tapes.unsettled.discard(self)
        self._run(self._steady if owed else self._first)
        self._owed = True
        self._remember()
        return self._bound.results()

    def _remember(self) -> None:
        """Whoever reads parameters from now on settles first, if updates are due."""
        if self._owed and self.communicator.own_process:
            tapes.unsettled.add(self)

    def settle(self) -> None:
        """Waits for the communication of the last step and makes its updates."""
        tapes.unsettled.discard(self)
        if self._owed:
            self._owed = False
            self._run(self._settle)
            self._finish()
            self._report()

    def _start(self) -> None:
        """Hands the communication lane its program for this step; that of the step before has ended by now."""
        self._finish()
        assert self._stream is not None
        self._running = True
        self._stream.start(self._comm[0], lambda stop: self._give_up(stop, self._comm[1]))

    def _finish(self) -> None:
        if self._running and self._stream is not None:
            self._stream.join()
            self._running = False
        self._report()

    def _run(self, program: tuple[Program, list[int]]) -> None:
        stop = run_program(program[0])
        if stop.error is not None:
            self._give_up(stop, program[1])
        if self._failures:
            self._fail()

    def _give_up(self, stop: Stop, tasks: list[int]) -> None:
        """Ends both lanes: programs are emptied, and whoever waits is let through to see it."""
        self._failures.append((stop, list(tasks)))
        self._lane.abandoned = True
        for program, _ in self._programs:
            program.clear()
        for event in self._events:
            event.open()

    def _report(self) -> None:
        if self.trace and self._times[:, 2].all():
            self.timeline = self._read_times()

    def _fail(self) -> None:
        if self._running and self._stream is not None:
            self._stream.join()
            self._running = False
        stop, tasks = next(((s, t) for s, t in self._failures if not isinstance(s.error, Abandoned)), self._failures[0])
        error = stop.error
        assert error is not None
        if not isinstance(error, Exception) or isinstance(error, RankError):
            self._error = error if isinstance(error, Exception) else RuntimeError("the step was interrupted")
            raise error
        task = self.graph[tasks[stop.index]] if tasks[stop.index] >= 0 else None
        where = f"task {task.label} on rank {self.communicator.rank}" if task else f"rank {self.communicator.rank}"
        self._error = TaskError(f"{where} failed: {type(error).__name__}: {error}", task.name if task else "")
        raise self._error from error

    def _read_times(self) -> Timeline:
        """Of one step: its forward and backward pass, its communication, and the updates with its gradients."""
        ids = self.schedule.ids(self.graph)
        times = (self._times[ids] - self._times[ids, 0].min()) * 1e6
        place = np.empty(len(self.graph), np.int64)
        place[ids] = np.arange(len(ids))
        pairs: Ints = np.array([(s, w) for w, s in self._waits], np.int64).reshape(-1, 2)
        lanes = tuple(replace(lane, rank=self.communicator.rank) for lane in self.schedule.lanes)
        return Timeline.of_tasks(lanes, self.schedule.keys, self.schedule.lane_of_each(), times[:, 1], times[:, 2], issued=times[:, 0],
                                 bytes=self.graph.bytes[ids], edges=place[pairs], labels=self.graph.unit_names)

    def close(self) -> None:
        """Settles, unless it has failed, and ends the thread."""
        if self._error is None:
            self.settle()
        self._closer()


def _program(order: list[int], calls: dict[int, list[Callable[[], Any]]]) -> tuple[Program, list[int]]:
    """The calls of these tasks in order, and the task of each call (-1: none)."""
    return [call for t in order for call in calls[t]], [t for t in order for _ in calls[t]]


def _with_memory(graph: TaskGraph, device: Any) -> TaskGraph:
    """Gradients that outlive a step get memory of their own."""

    def lasting(spec: Any) -> Any:
        if spec.role != Role.STATE or spec.live is not None:
            return spec
        return replace(spec, live=Storage(spec.name, spec.shape, spec.dtype, Role.STATE, device.allocate(max(spec.bytes, 1))))

    return replace(graph, storages=tuple(lasting(s) for s in graph.storages))


def _border_waits(graph: TaskGraph, main: list[int], comm: list[int]) -> list[tuple[int, int]]:
    """(update, transfer) pairs: what the compute lane must await of the step before, each transfer at most once, none that
    an earlier wait implies."""
    place = {t: i for i, t in enumerate(comm)}
    writer = {b: t for t in comm for b in graph.writes[t].tolist()}
    waits: list[tuple[int, int]] = []
    known: set[int] = set()
    for task in main:
        if graph.kind[task] != Kind.U:
            continue
        for t in sorted({writer[b] for b in graph.reads[task].tolist() if b in writer} - known, key=place.__getitem__):
            waits.append((task, t))
            known.add(t)
    return waits


def _close(stream: Stream | None) -> None:
    if stream is not None:
        stream.close()
