"""Runs a program: on a device, and over a transport if there are other ranks. Everything is bound beforehand.

A call is one step. If tasks cross the iteration boundary, the first call runs the prologue and the next ones the body,
and the late tasks of a step are left for the next call. Code that reads a parameter in between (`Tensor.numpy`, an
eager op, another executor, a checkpoint) settles first: it runs the epilogue, so that it reads what synchronous
training leaves. Loop-back ranks share a process and cannot tell whose parameters are read, and ranks of a pipeline that
never drains communicate when they settle: settle them yourself, all of them.

The device runs lanes (`device.lanes`, `device.captured`), the transport moves data between ranks. Transfers on lanes of
their own are moved by a thread, or by the lanes that compute (`communication.py`); some may still run when a call
returns.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from os import getpid
from threading import get_ident
from types import FrameType
from typing import Any, NoReturn

import numpy as np

from ..autograd import tape as tapes
from ..autograd.tape import Storage
from ..autograd.tensor import ShapeError, Tensor
from ..core.columns import offsets, spread
from ..core.graph import Launch, Role, StorageSpec, TaskGraph, View, check_kinds
from ..core.schedule import Lane, Schedule
from ..core.standstill import Doing
from ..core.tasks import COMMUNICATION, What
from ..core.timeline import Timeline
from ..devices import DeviceError
from ..devices.lanes import CLOSED, LaneError, Work
from ..devices.picking import Picking
from ..kernels import Thunk
from ..plans.program import Part, Program, lower
from ..system import process
from . import doing
from .bound import Bound, with_far
from .comm import Communicator, RankError
from .comm.flight import CREDIT, TransferError
from .communication import Communication, Meetings
from .version_log import VersionLog

LOOK = 1e-6  #: seconds: a core may read its counter before what it has waited for; 0.2 us were seen


class TaskError(RuntimeError):
    """A task failed. `task`: its name. The task's own error, with its traceback, is the cause of this one."""

    def __init__(self, message: str, task: str = "") -> None:
        super().__init__(message)
        self.task = task


class Stays:
    """The base of executors."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("an executor cannot be copied or sent to another process, as its threads and memory stay here; "
                        "copy or send the graph and the schedule, and make another executor from them")


class Runtime(Stays):
    """Call it with a step's inputs (with ranks: this rank's share); it returns the step's outputs.

    `captured`: each part is one launch, or one launch between two synchronisations with communication; ignored with
    MINIDL_DEBUG, which looks at values between tasks. `trace`: `timeline` describes the last call. `at_once`: how many
    steps a launch of `steps` may have. `credit`: the most bytes of communication in flight. `log`: keeps which weight
    version each task read. `watched`: `doing` knows where lanes of the CPU are, which costs some nanoseconds a task.

    Raises TaskError if a task fails, and RankError if another rank fails. Without other ranks the runtime can run
    again, but its parameters may come from an unfinished step; with other ranks it cannot run again.
    """

    def __init__(self, program: Program, *, device: Any = None, transport: Communicator | None = None,
                 trace: bool = False, captured: bool = False, credit: int = CREDIT,
                 log: VersionLog | None = None, watched: bool = False, at_once: int = 1) -> None:
        check_kinds(program=(program, Program))
        self.program, self.trace, self.transport, self.log = program, trace, transport, log
        self.graph, self.schedule, self.peak_bytes = program.graph, program.schedule, program.peak_bytes  #: of the body
        self.waits = program.body[0].waits  #: pairs (waiting task, awaited task) between the lanes of a body
        self.device = tapes.device_of(device)
        self.watched = watched and not self.device.captures  #: whether lanes know where they are
        self.debug = process.debug_level()
        self.at_once = at_once
        if at_once > 1 and (transport is not None or program.epilogue or len(program.body) > 1 or log is not None
                            or program.hint is not None):
            raise ValueError(f"{at_once} steps a launch need one device, and steps that follow each other: no late "
                             f"tasks, no log of versions, no hint; leave --steps-per-launch out")
        if at_once > 1 and trace and captured:
            raise ValueError(f"{at_once} steps a launch leave no trace of a captured step; trace single steps")
        if (program.hint is not None or program.sums is not None) and self.device.captures:
            raise DeviceError(f"order=hint: {self.device.name} issues a step ahead and cannot choose as it goes; take "
                              f"--device cpu, or leave --order out")
        if captured and not self.device.captures:
            raise DeviceError(f"{self.device.name} has no graphs to capture; use StreamExecutor")
        if self.debug:
            print(program, file=sys.stderr)
        self._storages = [self._lasting(s) for s in with_far(program.graph.storages, self.device, program.rank)]
        self._snapshots = [self.device.copier(*(self._array(self._storages[i]) for i in pair))
                           for pair in program.loop.snapshots]  # of scalars of the host, for late tasks
        self._fills = [self._fill(spec) for spec in self._storages if spec.filled is not None]
        self._communication = (Communication(self.device, transport, program, trace=trace, credit=credit)
                               if transport is not None else None)
        arena = self.device.arena(max(1, *(part.memory.arena_bytes for part in program.parts)))  # parts take turns
        every = {id(part): part for part in (*program.body, *program.prologue, *program.epilogue)}
        made = {key: _Ready(self, part, arena, captured and not self.debug) for key, part in every.items()}
        self._parts = [*made.values()]
        self._body, self._prologue, self._epilogue = ([made[id(p)] for p in parts] for parts in
                                                      (program.body, program.prologue, program.epilogue))
        self.random_inputs = self._body[0].bound.load_random  #: inputs that a step can use
        threads = transport is not None or any(len(part.schedule.lanes) > 1 for part in program.parts)
        self._guard = Guard(forks=not threads and not self.device.captures)
        self._parity, self._owed = 0, False
        self._begun = False  #: whether a step follows another one, without a settlement between them
        # a settlement in which ranks talk is one of all ranks together
        talks = any(np.isin(part.graph.kind, COMMUNICATION).any() for part in program.epilogue)
        self._settles_alone = not talks and (transport is None or transport.own_process)
        self._last: _Ready | None = None
        self._present: _Ready | None = None  #: the part that runs, or ran last
        self._timeline: Timeline | None = None
        self._error: Exception | None = None

    # ------------------------------------------------------------------------------------------------------ properties
    @property
    def timeline(self) -> Timeline | Any:  # for checkers: a call with `trace` has one
        """The timeline of the last call; None without `trace`, or if the call failed. Waits until communication has
        ended, but for sends that are received in the next step: those end with this one."""
        if self._timeline is None and self._last is not None and self.trace and self._error is None:
            if self.program.runs_on:
                self._finish()
            self._timeline = self._last.timeline()
        return self._timeline

    def timeline_of_all(self) -> Timeline | None:
        """The timeline of the last call on all ranks, on rank 0's clock. All ranks must call it together."""
        assert self.transport is not None
        graph = self.graph
        numbers = {int(graph.keys[t]): number for t, launches in enumerate(graph.launches)
                   if (number := dict(launches[0].constants if launches else ()).get("message")) is not None}
        found = self.transport.gather((self.timeline, numbers))
        ahead = self.transport.clocks_ahead()
        if any(timeline is None for timeline, _ in found):
            return None
        return Timeline.of_ranks([timeline for timeline, _ in found], ahead, [own for _, own in found])

    def _lasting(self, spec: StorageSpec) -> StorageSpec:
        """Gives memory, filled with zeros, to weights and states that belong to this run alone, and to shares, filled
        with this rank's part of the whole."""
        far = spec.role == Role.FAR and spec.share_of is not None
        if not far and (spec.role not in (Role.STATE, Role.PARAMETER) or spec.live is not None):
            return spec
        memory = spec.live.data if far else self.device.lasting(max(spec.bytes, 1))
        if spec.bytes and not far:
            self.device.write(self._array(spec, memory), 0)
        if spec.share_of is not None:
            begin = self.program.group.index(self.program.rank) * spec.shape[0]
            own = spec.share_of.values(self.device)[begin : begin + spec.shape[0]]  # the last ranks may have less
            self.device.write(self._array(spec, memory)[: own.size], self.device.read(own))
            if spec.role == Role.PARAMETER:
                spec.share_of.given_up()
        return replace(spec, live=Storage(spec.name, spec.shape, spec.dtype, spec.role, memory))

    def whole(self, everywhere: bool = False) -> None:
        """Brings the states and parameters of which each rank has a share to the first rank of its group as a whole;
        `everywhere`: the parameters to all ranks. All ranks call it together."""
        if self.transport is None:
            return
        _ = self.group
        for whole, spec in self.shared.items():
            to_all = everywhere and spec.role == Role.PARAMETER
            for found in self.together([[whole] if to_all or not r else [] for r in range(len(self.program.group))]):
                spec.share_of.overwritten()
                self.device.write(spec.share_of.values(self.device), found)

    @cached_property
    def shared(self) -> dict[int, StorageSpec]:
        """The storages of which each rank of the group has a share, by the id of the whole one."""
        return {id(spec.share_of): spec for spec in self._storages if spec.share_of is not None}

    @cached_property
    def group(self) -> Communicator:
        """The ranks that share out storages with this one. All ranks ask for it together."""
        assert self.transport is not None
        return self.transport.host.group(tuple(self.program.group))

    def together(self, wanted: Sequence[Sequence[int]]) -> list[Any]:
        """On rank r of the group the values of the storages `wanted[r]` of `shared`, each (n,) on the host. All ranks
        of the group call it together."""
        group, every = self.group, [[self.shared[whole] for whole in each] for each in wanted]
        bounds = offsets([sum(spec.bytes for spec in specs) for specs in every]).tolist()
        shares = [self.device.read(self._array(spec)).view(np.uint8) for specs in every for spec in specs]
        into = np.empty((group.size, bounds[group.rank + 1] - bounds[group.rank]), np.uint8)
        group.exchange(np.concatenate([np.empty(0, np.uint8), *shares]), into, bounds)
        own = every[group.rank]
        columns = np.split(into, np.cumsum([spec.bytes for spec in own])[:-1], axis=1) if own else []
        return [np.ascontiguousarray(column).reshape(-1).view(spec.dtype)[: math.prod(spec.share_of.shape)]
                for spec, column in zip(own, columns, strict=True)]

    def _array(self, spec: StorageSpec, memory: Any = None) -> Any:
        return self.device.array(spec.live.data if memory is None else memory, View.of(spec))

    def _fill(self, spec: StorageSpec) -> Thunk:
        """A call that fills a storage with what it holds when a loop begins."""
        if isinstance(spec.filled, float):
            return partial(self.device.write, self._array(spec), spec.filled)
        return self.device.copier(self._array(spec, spec.filled.data), self._array(spec))

    @property
    def realised(self) -> Callable[[], list[int]]:
        """Under a hint: returns the keys of the last call's tasks, or sums, in the order in which they ran on this
        rank; all of them when communication has ended, which may be in the next call."""
        assert self._last is not None
        ran, keys = self._last.hint.realised, self._last.part.graph.keys
        return lambda: keys[np.array(ran, np.int64)].tolist()

    def follow(self, order: Sequence[int] | None) -> None:
        """Under a hint: the next calls run this rank's tasks, or sums, by key in an order that the plan has `realised`,
        or by the hint again."""
        for part in (*self._body, *self._prologue):
            part.hint.order = part.part.graph.find(np.array(order or [], np.int64)).tolist()

    # ------------------------------------------------------------------------------------------------------------ runs
    def __call__(self, *inputs: Any) -> Any:
        if self._error is not None:
            raise self._error
        if self._owed:  # reading a parameter settles this executor, which must come before the step
            inputs = tuple(v.numpy() if isinstance(v, Tensor) else v for v in inputs)
        with self._guard:
            if tapes.unsettled and (self.transport is None or self.transport.own_process):
                for other in tapes.unsettled - {self}:
                    other.settle()
            part = (self._body if self._owed else self._prologue)[self._parity]
            own = inputs if self.program.takes is None else self._own(inputs)
            if self._communication is not None:
                self._await_sends()  # before anything is written where they read
            part.bound.feed(part.bound.checked(own, settles=False))
            if not self._begun:
                for fill in self._fills:
                    fill()
            if self.log is not None:
                self.log.begin(fills=not self._begun)
            self._owed, self._begun = False, True  # a step that fails cannot be settled
            tapes.unsettled.discard(self)
            self._run(part)
            for copy in self._snapshots:
                copy()
            self._last, self._timeline = part, None
            if self._epilogue:
                self._owed, self._parity = True, (self._parity + 1) % len(self._body)
                if self._settles_alone:
                    tapes.unsettled.add(self)
            return part.bound.results()

    def fetch_not_finite(self) -> Callable[[], bool | None]:
        """As the device's, after a call. If the step brings its outputs to the host, nothing is issued, since this
        comes with them."""
        part = self._last
        slot = part.bound.feed.slot if part is not None and part.ring is None and self.device.captures else None
        if slot is None or not slot.unasked:
            return self.device.fetch_not_finite()
        found = slot.ask()
        return lambda: bool(found()[0])

    def steps(self, batches: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """Runs a step on each of these batches, at most `at_once`, in one launch where lanes can: the inputs of all are
        checked and copied first, and the outputs come back once. Returns a function that waits and returns the NumPy
        arrays of each step as a tuple; on a device that checks gradients, a launch ends with the first step that used
        one that is not finite, and there are fewer then. Otherwise as a call for each batch, to the same bits."""
        part = self._parts[0]
        if not 0 < len(batches) <= self.at_once:
            raise ValueError(f"{len(batches)} steps in a launch of this executor, which has room for {self.at_once}")
        if part.ring is None:  # single steps, or none can be repeated by a launch
            found = [fetched(self(*batch)) for batch in batches]
            return lambda: [tuple(value() for value in step) for step in found]
        if self._error is not None:
            raise self._error
        with self._guard:
            for other in tapes.unsettled - {self}:
                other.settle()
            for i, batch in enumerate([part.bound.checked(self._own(batch), settles=False) for batch in batches]):
                part.ring.put(i, batch)
            if not self._begun:
                for fill in self._fills:
                    fill()
            self._begun = True
            self._run(part, len(batches))
            self._last, self._timeline = part, None
            return part.ring.results(len(batches))

    def _own(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs of a step that this rank reads."""
        takes = self.program.takes
        if takes is None:
            return inputs
        if takes and takes[-1] >= len(inputs):
            raise ShapeError(f"the step takes at least {takes[-1] + 1} inputs, not {len(inputs)}")
        return tuple(inputs[i] for i in takes)

    def settle(self) -> None:
        """Finishes the last step: waits for its communication, then runs its late tasks."""
        tapes.unsettled.discard(self)
        self._begun = False
        if not self._owed and self._error is None:
            self._await_sends()
        if self._owed:
            with self._guard:
                self._run_late()

    def _run_late(self) -> None:
        """Runs the late tasks of the last step."""
        if self.trace:
            self.timeline  # noqa: B018  (of the call; the epilogue is none)
        if self.log is not None:
            self.log.settle()
        self._owed = False
        self._run(self._epilogue[self._parity - 1])
        self._finish()

    def doing(self) -> Doing:
        """The state of this rank now; any thread may ask."""
        return doing.of(self._parts, self._present)

    def progress(self) -> tuple[Any, ...]:
        """A value that changes with any progress; any thread may ask."""
        return doing.progress(self._present)

    def _run(self, part: _Ready, several: int = 0) -> None:
        try:
            if part.meetings is not None:  # this waits for the part before, which is the present one until then
                part.meetings.common.start(part.meetings.entries, part.lanes, part.meetings.election)
            part.runs, self._present = part.runs + 1, part
            if several:
                part.lanes.several(several)
            else:
                part.lanes.run()
            if self._communication is not None and not self.program.runs_on:
                self._communication.end_step()
                self._raise_failure(self._last)
        except BaseException as error:
            self._fail(error, part)
        if self._communication is not None:
            self._raise_failure(part)

    def _await_sends(self) -> None:
        """Waits for sends that the step before has left in flight."""
        if self._communication is not None and self._last is not None and not self.program.runs_on:
            try:
                self._communication.join()
            except BaseException as error:
                self._fail(error, self._last)

    def _finish(self) -> None:
        """Waits for communication to end."""
        if self._communication is not None:
            self._communication.join()
            self._raise_failure(self._last)

    def _raise_failure(self, part: _Ready | None) -> None:
        if part is not None and self._communication is not None and self._communication.failure is not None:
            self._fail(self._communication.failure, part)

    def _fail(self, error: BaseException, part: _Ready) -> NoReturn:
        """Raises the error that the caller gets for this one. With other ranks it is final."""
        if self._communication is not None:
            error = self._communication.stop(error)
        if isinstance(error, LaneError) and isinstance(error.error, RankError | TransferError):
            error = error.error  # the error of a transfer on a computing lane
        found, where = error, "" if self.transport is None else f" on rank {self.transport.rank}"
        if isinstance(error, LaneError):
            task = part.part.graph[error.task]
            where = where or f" on lane {part.part.schedule.lanes[part.lane_of[error.task]]}"
            found = TaskError(f"task {task.label}{where} failed: {type(error.error).__name__}: {error.error}",
                              task.name)
            found.__cause__ = error.error
        if self.transport is None:
            self._last = self._timeline = None  # the stamps are of several steps
        else:
            tapes.unsettled.discard(self)
            self._owed = False
            self._error = found if isinstance(found, Exception) else RuntimeError("the step was interrupted")
        raise found

    def close(self) -> None:
        """Settles, unless it has failed, and ends the threads for good. Raises RuntimeError while it runs a step."""
        if not self._guard.close():
            return
        tapes.unsettled.discard(self)
        try:
            if self._error is None:
                if self._owed:
                    self._run_late()
                if self.trace:
                    self.timeline  # noqa: B018  (before what it is read from goes)
                self._finish()
                self.device.synchronize()  # copies may still use the memory that is freed next
        finally:
            for part in self._parts:
                part.lanes.close()
            if self._communication is not None:
                self._communication.close()


class _Ready:
    """A part bound to a device: arrays, calls, lanes."""

    def __init__(self, runtime: Runtime, part: Part, arena: Any, captured: bool) -> None:
        self.part, self.rank, self.runs, self.watched = part, runtime.program.rank, 0, runtime.watched
        hint = runtime.program.hint
        graph = replace(part.graph, storages=(*runtime._storages,))
        self.bound = Bound(graph, part.memory, runtime.device, arena=arena)
        schedule = part.schedule
        lanes = [part.lane_tasks(i) for i in range(len(schedule.lanes))]
        self.lane_of = {t: lane for lane, tasks in enumerate(lanes) for t in tasks}
        calls = _calls_of(self.bound, runtime.debug)
        if runtime.log is not None:
            calls = runtime.log.around(calls, graph)
        whole = captured or not runtime.device.captures  # else the host issues each step
        self.ring = self.bound.ring(runtime.at_once) if runtime.at_once > 1 and whole and not runtime.debug else None
        self.meetings: Meetings | None = None
        if runtime._communication is not None:
            self.meetings = Meetings(runtime._communication, part, self.bound, calls, hint is not None)
        elif np.isin(graph.kind, COMMUNICATION).any():
            raise DeviceError("the step has communication, which needs a transport; use DistributedExecutor")
        talks = part.communicates
        self.compute = [i for i, talk in enumerate(talks) if not talk]
        waits = [(w, s) for w, s in part.waits.tolist() if not talks[self.lane_of[w]] and not talks[self.lane_of[s]]]
        work = Work([str(schedule.lanes[i]) for i in self.compute],
                    [schedule.lanes[i].priority for i in self.compute], [lanes[i] for i in self.compute], waits,
                    calls, graph.name, self.bound.persistent, feed=self.bound.feed, ring=self.ring,
                    side_sms=runtime.schedule.side_sms)
        if work.side_sms and not runtime.device.captures:
            raise DeviceError(f"the plan gives its second lane {work.side_sms} SMs of a GPU; {runtime.device.name} has "
                              f"none")
        if self.meetings is not None:
            work = replace(work, calls=self.meetings.calls, before=self.meetings.before, after=self.meetings.after,
                           polls=self.meetings.polls, idle=self.meetings.idle)
        if captured:
            runtime.device.zero(arena)  # tasks run once before capture: zeros are valid labels, old bytes may not be
        if hint is not None:
            self.lanes: Any = Picking(work, {int(t): i for i, t in enumerate(graph.find(hint))}, runtime.trace)
        else:
            self.lanes = (runtime.device.captured if captured else runtime.device.lanes)(
                work, runtime.trace, **({"stamped": True} if self.watched else {}))

    @property
    def hint(self) -> Any:
        """The lanes of a hint, or the choice of sums."""
        return self.lanes if isinstance(self.lanes, Picking) or self.meetings is None else self.meetings.election

    def timeline(self) -> Timeline:
        """When each task was issued, started and ended, in microseconds from the first stamp."""
        graph, schedule, ids, lanes = self.part.graph, self.part.schedule, self.part.ids, self.part.schedule.lanes
        lane = schedule.lane_of_each()
        times = np.empty((len(graph), 3))
        for number, stamps in zip(self.compute, self.lanes.stamps(), strict=True):
            times[self.part.lane_tasks(number)] = stamps
        if self.meetings is not None:
            for task, stamps in self.meetings.times.items():
                times[task] = stamps
            flying = times[:, 2] < times[:, 1]  # these have no end yet
            times[flying, 2] = times[:, 2].max(initial=0.0)
        waits = self.part.waits
        ended = times[waits[:, 1], 2]
        near = np.abs(ended - times[waits[:, 0], 1]) < LOOK
        np.maximum.at(times[:, 1], waits[near, 0], ended[near])
        times[:, 2] = times[:, 1:].max(axis=1)
        begin = float(times.min(initial=np.inf))
        if isinstance(self.lanes, Picking):  # as in a fixed order: a task is issued when the one before has ended
            lanes = tuple(sorted(set(self.part.joined)))
            lane = np.array([lanes.index(own) for own in self.part.joined])[lane]
            by = np.lexsort((times[ids, 1], lane))
            ids, lane = ids[by], lane[by]
            main = ids[lane == lanes.index(Lane(0))]
            times[main[1:], 0] = times[main[:-1], 2]
        times = (times[ids] - begin) * 1e6
        waited = spread(waits[:, 0], True, len(graph))[ids]
        entry = spread(ids, np.arange(len(ids)), len(graph))

        keys, count = graph.keys[ids], int(waited.sum())
        edges = entry[np.stack([graph.preds.ids, graph.preds.row_of_each()], axis=1)]
        edges = edges[lane[edges[:, 0]] != lane[edges[:, 1]]]  # also those that need no event
        return Timeline(
            lanes=tuple(replace(x, rank=self.rank) for x in lanes),
            what=np.append(np.full(len(ids), What.TASK), np.full(count, What.WAIT)),
            key=np.append(keys, keys[waited]), lane=np.append(lane, lane[waited]),
            issued=np.append(times[:, 0], times[waited, 0]), start=np.append(times[:, 1], times[waited, 0]),
            end=np.append(times[:, 2], times[waited, 1]), bytes=np.append(graph.bytes[ids], np.zeros(count, np.int64)),
            edges=edges, labels=graph.unit_names, peak_bytes=self.part.memory.peak_bytes,
            meta={"begin_s": begin})


def _calls_of(bound: Bound, debug: int) -> Callable[[int, Any], list[Thunk]]:
    """A function that returns the calls of a task on a stream; with debugging, they also check what each launch wrote,
    whose memory the next one may take. It holds no reference to the executor, which would keep it alive."""
    if not debug:
        return bound.thunks

    def show(task: int) -> None:
        if debug >= 2:
            print(f"{bound.graph[task].label}", file=sys.stderr)
        if debug >= 3:
            for buffer in (*bound.graph[task].reads, *bound.graph[task].writes):
                print(f"    {buffer.name}: {buffer.bytes} bytes at {bound.place(buffer.storage)[1]}", file=sys.stderr)

    def check(task: int, launch: Launch) -> None:
        bound.device.synchronize()  # the task may have run on another stream than the one that reads
        bound.check_finite(task, launch)

    return lambda task, stream: [partial(show, task), *(
        call for launch in bound.graph.launches[task]
        for call in (*bound.device.bind(launch, bound.array, stream), partial(check, task, launch)))]


def fetched(outputs: Any) -> list[Callable[[], Any]]:
    """For each output of a step a function that waits and returns its NumPy array."""
    return [t.fetch() for t in (() if outputs is None else outputs if isinstance(outputs, tuple) else (outputs,))]


# ------------------------------------------------------------------------------------------------ one run at a time
#: who runs an executor: the number of the thread and the frame that entered the guard
Holder = tuple[int, FrameType | None]
ENDED: Holder = (-1, None)


class Guard:
    """Use `with guard:` around a run. It raises RuntimeError while the same executor runs, in another thread or further
    up in this one (a signal handler calls it), since its buffers hold one step; after `close`; and in a forked child,
    unless the executor `forks`: worker threads and devices stay with the parent."""

    def __init__(self, *, forks: bool) -> None:
        self._process = None if forks else getpid()
        self._entry: dict[str, Holder] = {}

    def __enter__(self) -> None:
        if self._process is not None and self._process != getpid():
            raise RuntimeError("this executor was made before the process was forked, and its worker threads and "
                               "device stayed with the parent; make an executor in the child")
        own = (get_ident(), sys._getframe(1))
        found = self._entry.setdefault("now", own)  # atomic
        if found is not own:
            self._take_over(found, own)

    def __exit__(self, *_: Any) -> None:
        self._entry.clear()

    def close(self) -> bool:
        """Refuses all runs from now on. Returns whether it was open; raises RuntimeError while the executor runs."""
        own = (get_ident(), sys._getframe(1))
        found = self._entry.setdefault("now", own)
        if found is ENDED:
            return False
        if found is not own:
            self._take_over(found, own)
        self._entry["now"] = ENDED
        return True

    def _take_over(self, found: Holder, own: Holder) -> None:
        """Replaces an entry that an interrupted run of this thread has left. Raises RuntimeError for any other."""
        if found is ENDED:
            raise RuntimeError(CLOSED)
        thread, entered = found
        if thread != own[0]:
            name = next((thread.name for thread in threading.enumerate() if thread.ident == found[0]), "unknown")
            raise RuntimeError(f"this executor is running a step in thread {name!r}; run one step at a time, or "
                               f"make an executor for each thread")
        frame = own[1]
        while frame is not None and frame is not entered:
            frame = frame.f_back
        if frame is not None:
            raise RuntimeError("this executor is running a step, and something within that step (a signal handler, or "
                               "an input or kernel of your own) uses it again; wait until the step has ended")
        self._entry["now"] = own


class StreamExecutor(Runtime):
    """One device: a stream for each lane. The schedule may have late tasks (`4W0@1`)."""

    captures = False

    def __init__(self, graph: TaskGraph, schedule: Schedule, *, device: Any = None, trace: bool = False,
                 at_once: int = 1) -> None:
        super().__init__(lower(graph, schedule), device=device, trace=trace, captured=self.captures, at_once=at_once)
