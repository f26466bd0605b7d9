"""A rank's communication: what runs the lanes of transfers, a thread or the lanes that compute, and the events between
these and the other lanes.

A transfer that awaits a task starts when the task has run; a task that awaits a transfer waits before it begins. On the
CPU a call that has returned is done; on CUDA the events of `minidl.runtime.comm.handover` are needed as well.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from ..core.graph import Launch, TaskGraph, View
from ..core.tasks import COLLECTIVE, COMMUNICATION, MESSAGES, RECEIVES, SENDS, Kind, task_name
from ..devices import DeviceError
from ..devices.device import CPU
from ..devices.lanes import Event, Stop, Stream
from ..kernels import Thunk
from ..plans.program import Part, Program
from .bound import Bound
from .comm import SLOTS, Communicator, Transfer, in_turn
from .comm.flight import Abandoned, Election, Entry, Flight
from .comm.handover import handover
from .comm.places import Host

Calls = Callable[[int, Any], list[Thunk]]


class Communication:
    """The communication that all parts of a program share: the thread, the transfers in flight, their memory, and the
    events between one step and the next."""

    def __init__(self, device: Any, transport: Communicator, program: Program, *, trace: bool, credit: int) -> None:
        messages = [(part.graph, t) for part in program.parts
                    for t in np.flatnonzero(np.isin(part.graph.kind, MESSAGES)).tolist()]
        self.transport = transport.duplicate({(_peer(graph, t), graph.kind[t] in SENDS) for graph, t in messages})
        self.trace = trace
        self.group = self.transport.group(program.group) if program.collectives else self.transport  #: that sums
        self.others = tuple(r for r in program.group if r != transport.rank)
        self.messages, self._sums, self.elects = bool(messages), program.sums, program.sums is not None
        #: whether the other lanes poll the transfers between their tasks, instead of a thread
        self.polled = self.messages or program.polls
        self.flight = Flight(self.transport, credit, self.polled)
        self.hand = handover(device)
        self.hand.use()
        self.failure: BaseException | None = None
        self._events: list[Event] = []
        self.places: dict[int, Host] = {}  #: by the key of the transfer
        #: (late task, transfer of the step before)
        self.boundary = {pair: self.event() for pair in program.boundary_waits}
        self._places: dict[Any, Host] = {}  # by the memory of the arrays
        self.closing: list[Thunk] = []  #: calls at the end of a step, when all messages are issued
        self._started = self._stopped = False
        threaded = not self.polled and any(any(part.communicates) for part in program.parts)
        self._stream = Stream(f"{transport.rank}/comm") if threaded else None
        self._end = weakref.finalize(self, _close, self._stream, weakref.ref(self.flight))

    def event(self) -> Event:
        self._events.append(Event())
        return self._events[-1]

    def place(self, key: int, bound: Bound, views: tuple[View, ...], after: Sequence[int],
              link: Communicator | None) -> Host:
        """The memory that a transfer sums, or moves over a link. A reduce-scatter and its all-gather share one;
        messages do not, as they await other tasks. `after`: the keys of the tasks that it awaits."""
        if link is not None:
            self.places[key] = self.hand.place(link, [bound.array(v) for v in views], after, False)
            return self.places[key]
        where = tuple((id(memory), base, view) for view in views for memory, base in [bound.place(view.storage)])
        if where not in self._places:
            self._places[where] = self.hand.place(self.group, [bound.array(v) for v in views], after)
        self.places[key] = self._places[where]
        return self.places[key]

    def shares(self, key: int, bound: Bound, launch: Launch, after: Sequence[int], slot: int
               ) -> tuple[Transfer, list[Thunk], list[Thunk]]:
        """A transfer between whole arrays and this rank's shares of them, one array after the other, and the calls that
        come before and after it. `after`: as in `place`."""
        reads, writes, work = ([bound.array(v) for v in views] for views in (launch.reads, launch.writes, launch.work))
        sums = dict(launch.constants).get("summed", 0)  # others are copied
        whole, own, kind = (reads, writes, Kind.AS) if sums else (writes, reads, Kind.AG)
        pairs = [*zip(whole, own, strict=True)]
        places = [self.hand.share(self.group, *pair, after, *work) for pair in pairs[: sums or None]]
        copies = [call for pair in pairs[sums:] if sums for call in self.hand.copied(self.group, *pair, after)]
        self.places[key] = places[-1]
        self.closing += self.hand.ended(places[-1])  # the next step, or a caller, may be the first to read it
        moves = [self.group.bind(kind, place, slot) for place in places]
        return partial(in_turn, moves), copies, [call for place in places for call in place.landed()]

    def exchanged(self, key: int, bound: Bound, launch: Launch, after: Sequence[int], slot: int) -> Transfer:
        """A transfer of rows to the ranks that they are for. Raises DeviceError for another device than the CPU."""
        if not isinstance(bound.device, CPU):
            raise DeviceError(f"experts over ranks: {bound.device.name} does not know on the host how many rows each "
                              f"rank gets; take --device cpu, or leave --experts-over out")
        rows, *counts, into = (bound.array(v) for v in (*launch.reads, *launch.writes))
        self.places[key] = self.hand.place(self.group, [rows], after, False)
        return self.group.exchange_rows(rows, counts, into, slot, dict(launch.constants).get("rest", True))

    def election(self, task: Mapping[int, int]) -> Election | None:
        """How ranks choose the next sum of a part, whose tasks are given by key; None if a lane has their order."""
        if self._sums is None:
            return None
        place = {task[key]: i for i, key in enumerate(key for key in self._sums.tolist() if key in task)}
        return Election(place, self.group.size, lambda own, every: self.group._exchange(own, every, None, SLOTS - 1))

    # ------------------------------------------------------------------------------------------------------------ runs
    def start(self, entries: Sequence[Sequence[Entry]], lanes: Any, election: Election | None = None) -> None:
        """Starts the communication lanes of a part, beside its other lanes `lanes`. First it waits until the
        communication of the part before has ended."""
        self.flight.lanes = lanes
        if not entries:
            return
        self.join()
        self.hand.begin()
        self.flight.election = election
        self.flight.begin(entries)
        if self._stream is not None:
            self._stream.start([self.hand.use, self.flight.run], self._fail)
        self._started = True

    def _fail(self, stop: Stop) -> None:
        """Ends the other lanes."""
        if self.failure is None:
            self.failure = stop.error
        self._let_through()
        self.flight.lanes.give_up(Stop(stop.error))

    def _let_through(self) -> None:
        for event in self._events:
            event.open()

    def end_step(self) -> None:
        """Waits for the transfers in flight, but for sends that are received in the next step: their receivers may be
        in an exchange between ranks before they begin it."""
        if self._started and self.polled and not self._stopped:
            self.flight.run(step=True)
            if not self.flight.over():
                self._end_calls()
                return
        self.join()

    def join(self) -> None:
        """Waits for the transfers in flight."""
        if self._started:
            self._started = False
            if self._stream is not None:
                self._stream.join()
            elif not self._stopped:
                self.flight.run()
            if not self._stopped:
                self._end_calls()

    def _end_calls(self) -> None:
        for call in self.closing:
            call()

    def stop(self, error: BaseException) -> BaseException:
        """Ends all communication after an error on this rank; returns the error that came first."""
        self._stopped = True
        self.flight.abandon()
        self._let_through()
        self.join()
        first = self.failure
        return error if first is None or isinstance(first, Abandoned) else first

    def close(self) -> None:
        """Ends the thread. Communication has ended, or was stopped: MPI may then still hold transfers, so the
        communicator stays."""
        self._end()
        if not self._stopped:
            self.transport.free()


class Meetings:
    """The transfers of one part, and the calls around the tasks of the other lanes that synchronise with them. `picks`:
    one thread runs these lanes, and begins a task only when all that it awaits is there.

    `entries`: the lanes of communication. `times[t]`: when transfer t was issued, started and ended, in seconds; only
    with a trace.
    """

    def __init__(self, common: Communication, part: Part, bound: Bound, calls: Calls, picks: bool = False) -> None:
        self.common, self._calls, self._graph, self.picks = common, calls, part.graph, picks
        self.times: dict[int, Any] = {}
        graph, self._keys = part.graph, part.graph.keys.tolist()
        lanes = [(part.lane_tasks(i), talks) for i, talks in enumerate(part.communicates)]
        apart, computing = ([lane for lane, talks in lanes if talks is wanted] for wanted in (True, False))
        self._talks = {t for t in range(len(graph)) if graph.kind[t] in COMMUNICATION}
        self._inline = [t for lane in computing for t in lane if t in self._talks]
        self._ranges = {t: _ranges(part, t) for t in self._talks if graph.kind[t] in (Kind.AS, Kind.AG, Kind.X)}
        self._drained = self._before_which_to_drain(computing)
        # task -> (key of a transfer, its event, the ranks that it needs, its name)
        self._awaited: dict[int, list[tuple[int, Event, tuple[int, ...], str]]] = defaultdict(list)
        self._records: dict[int, list[Thunk]] = defaultdict(list)  # task -> the records of its events
        arrived: dict[int, list[Callable[[], bool]]] = defaultdict(list)
        after: dict[int, list[int]] = defaultdict(list)
        own = {t: lane for lane, tasks in enumerate(apart) for t in tasks}
        for waiter, source in self._pairs(part, apart, own):
            event = common.event()
            self._records[source].append(event.record)
            if waiter in own:
                self._records[source].append(common.flight.wake)
                arrived[waiter].append(event.arrived)
                after[waiter].append(self._keys[source])
            else:
                self._awaited[waiter].append((self._keys[source], event, self._peers(source), graph.name(source)))
        name = {key: t for t, key in enumerate(self._keys)}
        for (late, transfer), event in common.boundary.items():
            if transfer in name:
                self._records[name[transfer]].append(event.record)
            if late in name:
                self._awaited[name[late]].append((transfer, event, (), task_name(transfer)))
        # on a device that runs behind the host, the step before may still read and send where this one writes: lanes
        # that compute wait for its sends at its end, and say when they begin; what is received waits for that
        self._begins = {lane[0]: -1 - i for i, lane in enumerate(computing) if lane and common.polled}
        self._sending = [self._keys[lane[-1]] for lane in apart if graph.kind[lane[-1]] in SENDS
                         and common.transport.link(_peer(graph, lane[-1]), True).stream is not None]
        for t in own:
            if graph.kind[t] in RECEIVES:
                after[t] += self._begins.values()
        order, slots = [*self._inline, *own], SLOTS - common.elects  # one is for votes
        entries = {t: self._entry(t, i % slots, bound, after[t] or [self._keys[t]], arrived[t])
                   for i, t in enumerate(order)}
        self.entries = [[entries[t] for t in lane] for lane in apart]
        self.election = common.election(name)
        self._submitted = {t: entries[t] for t in self._inline}
        self.transfers = entries  #: of all lanes, by task

    def _pairs(self, part: Part, apart: list[list[int]], own: dict[int, int]) -> list[tuple[int, int]]:
        """(waiter, source) of tasks of which one is a transfer on a lane of its own; `own`: their lanes."""
        graph = part.graph
        pairs = [(w, s) for w, s in part.waits.tolist() if w in own or s in own]
        # lanes overlap their transfers
        pairs += [(t, int(p)) for t in own for p in graph.preds[t] if own.get(int(p)) == own[t]]
        for lane in apart:  # but the plan may put one transfer's memory where an earlier one still reads
            pairs += [(t, s) for i, t in enumerate(lane) for s in lane[max(0, i + 1 - SLOTS) : i] if self._clash(s, t)]
            sent = None
            for t in lane:
                if graph.kind[t] in RECEIVES and sent is not None:
                    pairs.append((t, sent))
                sent = t if graph.kind[t] in SENDS else sent
        return pairs

    def _entry(self, task: int, slot: int, bound: Bound, after: list[int], arrived: list[Callable[[], bool]]) -> Entry:
        common, graph, key, kind = self.common, self._graph, self._keys[task], Kind(self._graph.kind[task])
        launch = graph.launches[task][0]
        constants, sums = dict(launch.constants), kind in COLLECTIVE
        link = None if sums else common.transport.link(constants["peer"], kind in SENDS)
        copies, landed, moved = list[Thunk](), list[Thunk](), list[Thunk]()
        if kind == Kind.X:
            transfer = common.exchanged(key, bound, launch, after, slot)
        elif sums and launch.reads != launch.writes:
            transfer, copies, landed = common.shares(key, bound, launch, after, slot)
            moved = common.hand.moved(key, common.group, False)
        else:
            place = common.place(key, bound, launch.reads or launch.writes, after, link)
            transfer = (link or common.group).bind(kind, place, slot, constants.get("peer"),
                                                   constants.get("message", 0))
            if kind not in SENDS:
                landed = place.landed()
            if link is not None:
                moved = common.hand.moved(key, link, kind in SENDS)
        return Entry(task, transfer, slot if sums else None, int(graph.bytes[task]), arrived,
                     [*self._mark(task, 0, 1), *copies],
                     [*self._mark(task, 2), *landed, *moved, *self._records[task]], graph.name(task),
                     self._peers(task), "later" in constants, link is not None and isinstance(bound.device, CPU))

    def _peers(self, transfer: int) -> tuple[int, ...]:
        """The other ranks that a transfer needs."""
        return self.common.others if self._graph.kind[transfer] in COLLECTIVE else (_peer(self._graph, transfer),)

    def _mark(self, task: int, *which: int) -> list[Thunk]:
        if not self.common.trace:
            return []
        times = self.times.setdefault(task, np.zeros(3))

        def mark() -> None:
            times[list(which)] = perf_counter()

        return [mark]

    def _before_which_to_drain(self, lanes: list[list[int]]) -> set[int]:
        """The tasks of computing lanes before which the transfers submitted on the lane must have ended: the next task
        that is no transfer, and a transfer that needs the result or the memory of another."""
        found, flying = set(), set[int]()
        for lane in lanes:
            flying.clear()
            for t in lane:
                if flying and (t not in self._talks or flying & set(self._graph.preds[t].tolist())
                               or any(self._clash(s, t) for s in flying)):
                    found.add(t)
                    flying.clear()
                if t in self._talks:
                    flying.add(t)
        return found

    def _clash(self, s: int, t: int) -> bool:
        """Whether two collectives between arrays and shares use the same bytes of the arena."""
        mine, others = self._ranges.get(s, ()), self._ranges.get(t, ())
        return any(a < d and c < b for a, b in mine for c, d in others)

    def awaits(self, task: int) -> list[int]:
        """The transfers of this part that a task waits for."""
        own = {key: t for t, key in enumerate(self._keys)}
        flying = self._submitted.keys() if task in self._drained else ()
        return [*(own[key] for key, *_ in self._awaited.get(task, []) if key in own), *flying]

    # ------------------------------------------------------------------------------------------- around a task's calls
    def calls(self, task: int, stream: Any) -> list[Thunk]:
        """The calls of a task. A transfer on a computing lane has none: `before` submits it."""
        return [] if task in self._submitted else self._calls(task, stream)

    def before(self, task: int, stream: Any) -> list[Thunk]:
        common = self.common
        found: list[Thunk] = []
        if task in self._begins:
            common.closing += [call for key in self._sending for call in common.places[key].arrived(stream)]
            found += common.hand.ready(self._begins[task], stream)
        for key, event, peers, name in self._awaited.get(task, []):
            wait = partial(common.flight.until, event.arrived, peers, name) if common.polled else event.wait
            found += [*([] if self.picks else [wait]), *common.places[key].arrived(stream)]
        if task in self._drained:
            found += self._drain(stream)
        if task in self._submitted:
            found += [*common.hand.ready(self._keys[task], stream),
                      partial(common.flight.submit, self._submitted[task])]
            if task == self._inline[-1]:
                found += self._drain(stream)
        return found

    def polls(self, task: int) -> list[Callable[[], bool]]:
        """Whether each transfer that a task awaits has ended, for a thread that picks tasks."""
        return [event.arrived for _, event, *_ in self._awaited.get(task, [])]

    def idle(self, ready: Callable[[], bool], task: int) -> None:
        """Polls the transfers until a task is ready; `task` is one of those that may be next."""
        _, _, peers, name = self._awaited[task][0]
        self.common.flight.until(ready, peers, name)

    def after(self, task: int, stream: Any) -> list[Thunk]:
        records = [] if task in self._talks else self._records.get(task, [])
        found = [*self.common.hand.ready(self._keys[task], stream), *records] if records else []
        if self.entries and (self.common.messages or (self.common.polled and records)):
            found.append(self.common.flight.look)  # a sum needs few looks: only the last ones of a step are awaited
        return found

    def _drain(self, stream: Any) -> list[Thunk]:
        places = {id(p): p for p in (self.common.places[self._keys[t]] for t in self._inline)}
        return [self.common.flight.drain, *(call for place in places.values() for call in place.arrived(stream))]


def _peer(graph: TaskGraph, message: int) -> int:
    return dict(graph.launches[message][0].constants)["peer"]


def _ranges(part: Part, task: int) -> list[tuple[int, int]]:
    """The bytes of the arena that a task uses."""
    graph, offset = part.graph, part.memory.offset
    used = {view.storage for launch in graph.launches[task] for view in launch.views}
    return [(int(offset[s]), int(offset[s]) + graph.storages[s].bytes) for s in used if offset[s] >= 0]


def _close(stream: Stream | None, flight: weakref.ref[Flight]) -> None:
    if stream is not None:
        if (running := flight()) is not None:
            running.abandon()  # where the process ends while a thread steps
        stream.close()
        stream.join_thread()
