"""One rank of a data-parallel run: a compute lane, issued by the caller's thread, and a communication lane beside it.

The schedule is one iteration as it repeats (`minidl.synchronise`): its updates spend the gradients of the step before.
So a call returns when its backward pass is done, while its gradients still travel; the next call's updates wait for
them, each just before the forward that needs it. Whoever reads a parameter in between (`Tensor.numpy`, an eager op, a
checkpoint) makes the executor settle: it waits for the communication and updates, so that what is read is what
synchronous training leaves. Loop-back ranks share a process, where nobody knows whose parameters are read: they are
settled by hand. A scalar that the host sets (a learning rate) may change before late updates are made: they read a copy
of it that is taken at the end of their step's call.

On CUDA the compute lane is the device's main stream, and gradients are handed over by events (`minidl.comm.handover`).
When every task has run once, what the compute lane does between two hand-overs is captured, and replayed by one launch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from .. import device as devices
from .. import tape as tapes
from ..comm import SLOTS, Communicator, RankError
from ..comm.handover import handover
from ..comm.lane import CREDIT, Abandoned, Lane
from ..comm.places import Host
from ..graph import Ints, Kind, Role, StorageSpec, TaskGraph, View
from ..memory import plan_memory
from ..passes import unroll
from ..schedule import Schedule, ScheduleError
from ..streams import Event, Program, Stop, Stream, run_program
from ..synchronise import COLLECTIVE
from ..tape import Storage
from ..timeline import Timeline
from .bound import Bound
from .guard import Guard
from .stream import TaskError, calls_of, debug_level

Calls = list[Callable[[], Any]]


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
        self.graph, self._snapshots = _with_memory(graph, self.device)
        self.communicator, self.trace = communicator, trace
        self.plan = plan_memory(self.graph, schedule, memory_limit)
        self._bound = Bound(self.graph, self.plan, self.device)
        self._lane = Lane(communicator, credit)
        self._hand = handover(self.device, communicator)
        self._hand.use()
        self._debug = debug_level()
        self._captured = not self._hand.captures or self._debug > 0  # nothing is left to capture, or is to be
        self._times = np.zeros((len(graph), 3))
        self._build()
        self._stream = Stream("comm") if len(names) > 1 else None
        self._running = self._owed = False  # communication is under way; updates are due
        self._guard = Guard(forks=False)
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
        graph, schedule, hand = self.graph, self.schedule, self._hand
        ids = schedule.ids(graph)
        main = ids[schedule.ptr[0] : schedule.ptr[1]].tolist()
        comm = ids[schedule.ptr[1] : schedule.ptr[2]].tolist() if len(schedule.lanes) > 1 else []
        self._waits = [*map(tuple, schedule.waits(graph).tolist())]
        self._border = _border_waits(graph, main, comm)
        awaited: dict[int, list[tuple[int, _Signal]]] = {}  # task -> (source, its signal)
        records: dict[int, Calls] = {}
        self._events: list[_Signal] = []
        for waiter, source in (*self._waits, *self._border):
            event = _Signal()
            self._events.append(event)
            awaited.setdefault(waiter, []).append((source, event))
            records.setdefault(source, []).append(event.record)

        talks = [t for t in (*main, *comm) if Kind(graph.kind[t]) in COLLECTIVE]
        self._places = self._make_places(talks, {t: [s for s, _ in awaited.get(t, [])] if t in comm else [t] for t in talks})
        transfers = self._transfers(talks, records)
        calls = calls_of(self._bound, self._debug)
        self._bodies: dict[int, Calls] = {}  # of a task of the compute lane: its launches, and what comes before and after
        self._before: dict[int, Calls] = {-1: [self._start] if comm else []}
        self._after: dict[int, Calls] = {}
        for task in main:
            if task in transfers:
                self._before[task] = [*hand.ready(task), *transfers[task]]
                continue
            self._bodies[task] = calls(task)
            self._before[task] = [call for source, event in awaited.get(task, []) for call in (event.wait, *self._places[source].arrived)]
            self._after[task] = [*hand.ready(task), *records[task]] if task in records else []
        if not comm:
            for place in {id(p): p for p in self._places.values()}.values():
                self._before[talks[-1]] += place.arrived
        updates = [t for t in main if graph.kind[t] == Kind.U]
        rest = [t for t in main if graph.kind[t] != Kind.U]
        last = main.index(updates[-1])
        self._order = [*main[: last + 1], -1, *main[last + 1 :]]
        self._first, self._steady, self._settle = map(self._program, ([-1, *rest], self._order, updates))
        for task in comm:
            transfers[task][:0] = [partial(self._lane.until, event.arrived) for _, event in awaited.get(task, [])]
        self._comm = [call for t in comm for call in transfers[t]], [t for t in comm for _ in transfers[t]]
        self._programs = [self._first, self._steady, self._settle, self._comm]

    def _make_places(self, talks: list[int], after: dict[int, list[int]]) -> dict[int, Host]:
        """Where each communication task sums; a reduce-scatter and its all-gather share one place."""
        found: dict[Any, Host] = {}
        views = {task: self.graph.launches[task][0].reads for task in talks}
        for task in talks:
            if views[task] not in found:
                found[views[task]] = self._hand.place([self._bound.array(v) for v in views[task]], after[task])
        return {task: found[views[task]] for task in talks}

    def _transfers(self, talks: list[int], records: dict[int, Calls]) -> dict[int, Calls]:
        """The calls of each communication task. Those that need another's result wait for all before them, once."""
        calls: dict[int, Calls] = {}
        flying: set[int] = set()
        for i, task in enumerate(talks):
            calls[task] = [self._transfer(task, i % SLOTS, records.get(task, []))]
            if flying & set(self.graph.preds[task].tolist()):
                calls[task].insert(0, self._lane.drain)
                flying.clear()
            flying.add(task)
        calls[talks[0]].insert(0, self._hand.use)
        calls[talks[-1]].append(self._lane.drain)
        return calls

    def _transfer(self, task: int, slot: int, records: Calls) -> Callable[[], Any]:
        """Submits one communication task; its end is recorded when it has ended."""
        transfer = self.communicator.prepare(Kind(self.graph.kind[task]), self._places[task], slot)
        begin, end = (*self._mark(task, 0), *self._mark(task, 1)), (*self._mark(task, 2), *records)

        def done() -> None:
            for call in end:
                call()

        def submit() -> None:
            for call in begin:
                call()
            self._lane.submit(transfer, slot, int(self.graph.bytes[task]), done)

        return submit

    def _program(self, order: list[int]) -> tuple[Program, list[int]]:
        """The calls of these tasks of the compute lane, and the task of each call (-1: none)."""
        program: Program = []
        owners: list[int] = []
        for t in order:
            calls = [*self._issued(t), *self._before[t], *self._body(t), *self._after.get(t, [])]
            program += calls
            owners += [t] * len(calls)
        return program, owners

    def _capture(self) -> None:
        """Makes one launch of whatever the compute lane does in a row, from one hand-over to the next. Communication has ended
        before: what libraries call on another thread meanwhile is not what a capture is for."""
        self._finish()
        program: Program = []
        owners: list[int] = []
        run: list[int] = []

        def add(calls: Calls, task: int) -> None:
            program.extend(calls)
            owners.extend([task] * len(calls))

        def end_run() -> None:
            calls = [call for t in run for call in self._body(t, captured=True)]
            if calls:
                add(calls if len(calls) == 1 else [self.device.replayed(calls)], run[0])
            run.clear()

        for t in self._order:
            if self._before[t]:
                end_run()
            add([*self._issued(t), *self._before[t]], t)
            run.append(t)
            if self._after.get(t):
                end_run()
                add(self._after[t], t)
        end_run()
        self._steady = self._programs[1] = program, owners

    def _body(self, task: int, captured: bool = False) -> Calls:
        """A task's launches; with a trace, between what tells when it starts and ends."""
        calls = self._bodies.get(task, [])
        if not self.trace or task not in self._bodies:
            return calls
        begin, end = self._hand.stamps(task, captured) or (self._mark(task, 1), self._mark(task, 2))
        return [*begin, *calls, *end]

    def _issued(self, task: int) -> Calls:
        return self._mark(task, 0) if task in self._bodies else []

    def _mark(self, task: int, which: int) -> Calls:
        if not self.trace:
            return []
        times = self._times

        def mark() -> None:
            times[task, which] = perf_counter()

        return [mark]

    # ----------------------------------------------------------------------------------------------------------- runs
    def __call__(self, *inputs: Any) -> Any:
        if self._error is not None:
            raise self._error
        with self._guard:
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
            for copy in self._snapshots:
                copy()
            self._owed = True
            self._remember()
            if owed and not self._captured:
                self._capture()
                self._captured = True
            return self._bound.results()

    def _remember(self) -> None:
        """Whoever reads parameters from now on settles first, if updates are due."""
        if self._owed and self.communicator.own_process:
            tapes.unsettled.add(self)

    def settle(self) -> None:
        """Waits for the communication of the last step and makes its updates."""
        tapes.unsettled.discard(self)
        if self._owed:
            with self._guard:
                self._owed = False
                self._run(self._settle)
                self._finish()
                if self.trace:
                    self.timeline = self._read_times()

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
        times = self._times.copy()
        for task, stamps in self._hand.read_stamps().items():
            times[task] = min(times[task, 0], stamps[0]), *stamps  # two clocks, compared by some microseconds
        times = (times[ids] - times[ids, 0].min()) * 1e6
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
            self.device.synchronize()  # before memory is given back that copies still use
        self._closer()


def _with_memory(graph: TaskGraph, device: Any) -> tuple[TaskGraph, Calls]:
    """Gradients that outlive a step get memory of their own, and so does what updates read of the host's scalars: the
    calls copy these."""

    def own(spec: StorageSpec) -> StorageSpec:
        return replace(spec, role=Role.STATE, live=Storage(spec.name, spec.shape, spec.dtype, Role.STATE, device.allocate(max(spec.bytes, 1))))

    def array(spec: StorageSpec) -> Any:
        assert spec.live is not None
        return device.array(spec.live.data, View(0, spec.shape, devices.strides_of(spec.shape), 0, spec.dtype))

    storages = [own(s) if s.role == Role.STATE and s.live is None else s for s in graph.storages]
    written = {view.storage for task in graph.launches for launch in task for view in launch.writes}
    late = [task if kind == Kind.U else () for kind, task in zip(graph.kind, graph.launches, strict=True)]
    read = {view.storage for task in late for launch in task for view in launch.reads}
    scalars = sorted(s for s in read - written if storages[s].role == Role.SCALAR and storages[s].live is not None)
    moved = {s: len(storages) + i for i, s in enumerate(scalars)}
    storages += [own(storages[s]) for s in scalars]
    launches = tuple(tuple(launch.moved(moved) for launch in task) if kind == Kind.U else task
                     for kind, task in zip(graph.kind, graph.launches, strict=True))
    return (replace(graph, storages=tuple(storages), launches=launches),
            [device.copier(array(storages[s]), array(storages[copy])) for s, copy in moved.items()])


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
