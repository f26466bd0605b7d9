"""The simulator: when would each task of a schedule start and end? Runs nothing and needs no device.

A lane runs its tasks in order, each as early as its lane and its dependencies allow. All else is data:

- an edge between two lanes of a rank adds `sync`, an edge between ranks the link's time. From a send to its receive
  that is only the latency: the time of the bytes is the send's own duration, so that transfers on one lane queue;
- the results of a pair that runs as one action are visible at its end;
- tasks on several lanes of a rank slow each other down (`corun`), share its `memory` and its `cores`, and wake lanes
  that sleep (`spin`, `doze`, `wake`);
- what another lane of the rank has touched takes longer to read and write (`cross`);
- a step that stands alone also wakes its lanes and waits for them (`around`);
- iterations follow each other without a barrier: a lane begins its next iteration when it has ended its part of this
  one, and tasks wait for the tasks of earlier iterations that `Carried` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..core.columns import Content, Floats, Ints, Rows, ends_of_actions, prepared, run_lanes, spread
from ..core.graph import TaskGraph, check_kinds, derive_edges
from ..core.schedule import Schedule, ScheduleError
from ..core.tasks import COMMUNICATION, RECEIVES, Kind
from ..core.timeline import Timeline
from .circuits import cycle_time
from .contention import contend
from .cost import CostModel
from .crossing import Crossing

SAME = 1e-10  #: times are equal if they differ by less than this share of the time that has passed
CHAINED = 6  #: how many iterations of a pipeline are chained; the period is the time of the last one
MOST = 64  #: the most iterations to play until they repeat


class Times(NamedTuple):
    """Start and end of each task, and when its last dependency was there: float64, by task id."""

    start: Floats
    end: Floats
    ready: Floats


def simulate(graph: TaskGraph, schedule: Schedule, cost: CostModel) -> Timeline:
    """The predicted timeline of a valid schedule. Raises ScheduleError if it would deadlock."""
    check_kinds(graph=(graph, TaskGraph), schedule=(schedule, Schedule), cost=(cost, CostModel))
    lanes, clock = clock_of(graph, schedule, cost)
    start, end, _ = clock.run(lanes)
    ids, lane = lanes.tasks, lanes.lane_of
    place = spread(ids, np.arange(len(ids)), len(graph))
    source, target, delay = clock.edges(lanes)
    across = lane[source] != lane[target]
    source, target, delay = source[across], target[across], delay[across]
    return Timeline.of_tasks(
        schedule.lanes, schedule.keys, lane[ids], start[ids], end[ids], bytes=graph.bytes[ids],
        edges=np.stack([place[source], place[target]], axis=1), arrived=end[source] + delay, labels=graph.unit_names,
        predicted=True, unit=cost.unit)


def times(graph: TaskGraph, schedule: Schedule, cost: CostModel) -> Times:
    """The times of each task. Raises ScheduleError for a schedule that cannot run."""
    lanes, clock = clock_of(graph, schedule, cost)
    return clock.run(lanes)


def clock_of(graph: TaskGraph, schedule: Schedule, cost: CostModel) -> tuple[Lanes, Clock]:
    """The lanes of a schedule, and their clock."""
    lanes = Lanes.of(graph, schedule)
    return lanes, Clock.of(graph, cost, lanes)


def around(lanes: Lanes, end: Floats, cost: CostModel) -> float:
    """The time that the lanes of one rank add to a step whose tasks end at `end`, among steps that follow each other:
    the first lane wakes those that sleep by then, and waits for all when it has ended its own tasks."""
    last = end[lanes.last]
    if len(last) < 2:
        return 0.0
    asleep = np.count_nonzero(last.max() - last[1:] + cost.step >= cost.spin)
    late = float(last[1:].max() - last[0])
    return asleep * cost.wake + (late > 0) * (cost.sync + (late >= cost.spin) * cost.doze)


@dataclass(frozen=True)
class Lanes(Content):
    """Lane i, of rank `rank[i]`, runs the tasks `tasks[ptr[i]:ptr[i + 1]]` (ids) in order.

    Where `joined` is true, a task runs as one action with the task before it. `stuck`: makes the error for lanes that
    wait for each other for ever.
    """

    ptr: Ints
    tasks: Ints
    rank: Ints
    joined: Any = None
    stuck: Callable[[], ScheduleError] = lambda: ScheduleError("deadlock: the lanes cannot all run")

    @classmethod
    def of(cls, graph: TaskGraph, schedule: Schedule) -> Lanes:
        """The lanes of a schedule. Raises ScheduleError unless it has every task of the graph exactly once."""
        ids = schedule.ids(graph)
        if (np.bincount(ids, minlength=len(graph)) != 1).any():
            schedule.validate(graph)

        def stuck() -> ScheduleError:
            schedule.validate(graph)
            return schedule.error("deadlock: the lanes cannot all run")

        return cls(schedule.ptr, ids, schedule.rank_of_lane,
                   None if schedule.joined is None else schedule.second, stuck)

    @classmethod
    def of_tasks(cls, lanes: Sequence[Sequence[int]], rank: Sequence[int] | None = None) -> Lanes:
        """Lanes with these tasks; by default all lanes are on one rank."""
        rows = Rows.of(lanes)
        return cls(rows.ptr, rows.ids.astype(np.int64), np.array(rank or [0] * len(lanes), np.int64))

    @cached_property
    def lane_of(self) -> Ints:
        """The lane of each task."""
        lane = np.repeat(np.arange(len(self.rank), dtype=np.int32), np.diff(self.ptr))
        return spread(self.tasks, lane, len(self.tasks))

    @cached_property
    def place_of(self) -> Ints:
        """The place of each task in its lane."""
        place = np.arange(len(self.tasks)) - np.repeat(self.ptr[:-1], np.diff(self.ptr))
        return spread(self.tasks, place, len(self.tasks))

    @property
    def rank_of(self) -> Ints:
        """The rank of each task."""
        return self.rank[self.lane_of]

    @cached_property
    def busy(self) -> Ints:
        """The lanes that have tasks."""
        return np.flatnonzero(np.diff(self.ptr))

    @cached_property
    def last(self) -> Ints:
        """The last task of each busy lane."""
        return self.tasks[self.ptr[1:][self.busy] - 1]

    @cached_property
    def actions(self) -> tuple[Ints, Ints]:
        """For each task the first and the last task of its action. Only for lanes with pairs."""
        return ends_of_actions(self.tasks, self.joined)


def _none() -> Ints:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Carried(Content):
    """`target` of iteration i waits for `source` of iteration i - `distance`, which is 1 or more."""

    source: Ints = field(default_factory=_none)
    target: Ints = field(default_factory=_none)
    distance: Ints = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.source)

    @classmethod
    def of(cls, *bodies: TaskGraph, own: Any = None) -> Carried:
        """The loop-carried edges of a loop whose iterations are these graphs in turn: the same tasks, on other copies
        of some buffers.

        `own`: a mask of the buffers of which every iteration has its own; by default those that `unroll` separates. All
        other buffers are shared by the iterations.
        """
        n, turns = len(bodies[0]), len(bodies)
        buffers = max(len(body.buffer_bytes) for body in bodies)
        own = bodies[0].own_buffers if own is None else own

        def rows(column: str) -> Rows:
            each: list[Rows] = [getattr(bodies[i % turns], column) for i in range(2 * turns)]
            ids = [np.where(own[r.ids], r.ids + buffers * (i + 1), r.ids) for i, r in enumerate(each)]
            counts = np.concatenate([np.diff(r.ptr) for r in each])
            return Rows(np.append(0, np.cumsum(counts)), np.concatenate(ids).astype(np.int32))

        edges = derive_edges(rows("reads"), rows("writes"), buffers * (2 * turns + 1))
        source, target = edges.ids.astype(np.int64), edges.row_of_each().astype(np.int64)
        distance = target // n - source // n
        last = (target >= n * (2 * turns - 1)) & (distance > 0)
        return cls(source[last] % n, target[last] % n, distance[last])


@dataclass(frozen=True)
class Clock(Content):
    """The durations and edges of tasks. It computes the times of any order of them, over one or many iterations.

    `duration`: of each task, launch included. `preds`: edges within an iteration; `carried`: edges between iterations.
    `far`, `far_carried`: the time that links add to these edges, one number per edge or one for all. `sync`, `spin`,
    `doze`, `wake`, `cores`: as in CostModel. `group`: the group of each task; `factor[a, b]`: how many times longer a
    task of group a takes beside one of group b. `crossing`: data that take longer, since another lane has touched them.
    `aside`: what tasks take on a rank's other lanes than its first, if lanes divide the SMs of a device. `moving`: how
    long the bytes of each task alone take on one lane; `serial`: as in Memory.
    """

    duration: Floats
    preds: Rows
    carried: Carried = field(default_factory=Carried)
    far: Floats = field(default_factory=lambda: np.zeros(1))
    far_carried: Floats = field(default_factory=lambda: np.zeros(1))
    sync: float = 0.0
    spin: float = 0.0
    doze: float = 0.0
    wake: float = 0.0
    cores: float = np.inf
    group: Ints | None = None
    factor: Floats = field(default_factory=lambda: np.ones((1, 1)))
    crossing: Crossing | None = None
    aside: Floats | None = None
    moving: Floats | None = None
    serial: float = 0.0

    @classmethod
    def of(cls, graph: TaskGraph, cost: CostModel, lanes: Lanes, carried: Carried | None = None) -> Clock:
        """The clock for these lanes, and all with every task on the same rank. Raises CostError for an unknown cost."""
        carried, network = carried or Carried(), _Network(graph, cost, lanes)
        far = network.far(graph.preds.ids, graph.preds.row_of_each)
        far_carried = network.far(carried.source, lambda: carried.target)
        group, factor = cost.corun.table(graph) if cost.corun else (None, np.ones((1, 1)))
        duration, aside = network.durations() + cost.launch, None
        if cost.sms is not None and cost.sms.side:
            first, others = (cost.sms.factors(graph, n) for n in (cost.sms.total - cost.sms.side, cost.sms.side))
            duration, aside = duration * first, duration * others
            if group is not None:
                weights = np.isin(graph.kind, (Kind.W, Kind.U))
                factor = cost.sms.slowdown(group, graph.bytes, np.where(weights, aside, duration), len(factor))
        return cls(duration, graph.preds, carried, far, far_carried, cost.sync, cost.spin,
                   cost.doze, cost.wake, cost.cores or np.inf, group, factor,
                   Crossing.of(graph, cost.cross) if cost.cross.read or cost.cross.write else None, aside,
                   *((cost.memory.times(graph), cost.memory.serial) if cost.memory and not cost.corun
                     and cost.memory.serial else ()))

    @classmethod
    def of_loop(cls, duration: Any, source: Any, target: Any, distance: Any, far: float = 0.0) -> Clock:
        """The clock of a loop without a graph: `target` of iteration i waits for `source` of iteration i - `distance`,
        and `far` longer if they are on different ranks. Raises ValueError for a wait for a later iteration."""
        source, target, distance = (np.asarray(x, np.int64) for x in (source, target, distance))
        wrong = np.flatnonzero(distance < 0)
        if wrong.size:
            raise ValueError(f"task {target[wrong[0]]} waits for task {source[wrong[0]]} of a later iteration")
        now, later = distance == 0, distance > 0
        return cls(np.asarray(duration, np.float64), Rows.from_pairs(target[now], source[now], len(duration)),
                   Carried(source[later], target[later], distance[later]), np.array([far]), np.array([far]))

    def without_contention(self) -> Clock:
        """The clock of the same tasks if they neither slowed nor had to wake each other."""
        return replace(self, doze=0.0, wake=0.0, cores=np.inf, group=None, factor=np.ones((1, 1)), crossing=None,
                       moving=None, serial=0.0)

    def _crossed(self, lanes: Lanes) -> Clock:
        """The clock in which tasks take as long as on these lanes."""
        duration = self.duration
        if self.aside is not None:
            first = np.unique(lanes.rank, return_index=True)[1]
            duration = np.where(np.isin(lanes.lane_of, first), duration, self.aside)
        if self.crossing is not None:
            duration = duration + self.crossing.added(lanes.lane_of, lanes.rank_of, lanes.place_of)
        return replace(self, duration=duration, crossing=None, aside=None)

    def run(self, lanes: Lanes) -> Times:
        """The times of one iteration. Raises ScheduleError for lanes that cannot run, as the methods below do."""
        return next(self.iterations(lanes, 1))

    def iterations(self, lanes: Lanes, count: int) -> Iterator[Times]:
        """The times of each of `count` iterations that follow each other without a barrier."""
        if self.crossing is not None or self.aside is not None:
            return self._crossed(lanes).iterations(lanes, count)
        if lanes.joined is not None:
            first, last = lanes.actions
            found = self._of_actions(first, last).iterations(replace(lanes, joined=None), count)
            return (Times(t.start[first], t.end[last], t.ready[first]) for t in found)
        return self._contended(lanes, count) if self._contends(lanes) else self._walked(lanes, count)

    def ends(self, lanes: Lanes, iterations: int) -> Floats:
        """The end of each of `iterations` iterations that follow each other without a barrier."""
        found, states = list[float](), list[Floats]()
        for t in self.iterations(lanes, iterations):
            found.append(float(t.end.max(initial=0.0)))
            states.append(t.end[self._watched(lanes)])
            if not self._contends(lanes) and (rhythm := self._rhythm(states)):
                time, turn = rhythm
                while len(found) < iterations:
                    found.append(found[-turn] + time)
                break
        return np.array(found)

    def periods(self, orders: Iterable[Sequence[Sequence[int]]]) -> list[float]:
        """The period of each of these orders of lanes, given by their tasks."""
        return [self.period(Lanes.of_tasks(lanes)) for lanes in orders]

    def period(self, lanes: Lanes) -> float:
        """Time per iteration where iterations follow each other for ever.

        Plays iterations until they repeat. If they do not within MOST iterations, the result is the exact period; with
        contention, the mean over the last half.
        """
        if self._contends(lanes):
            return self._contended_period(lanes)
        states = list[Floats]()
        for t in self.iterations(lanes, MOST):
            states.append(t.end[self._watched(lanes)])
            if rhythm := self._rhythm(states):
                return rhythm[0] / rhythm[1]
        return self.exact_period(lanes)

    def exact_period(self, lanes: Lanes) -> float:
        """The period without contention, computed exactly: the slowest circuit of edges and lanes; the end of a lane
        leads back to its beginning. For loops of few tasks."""
        if lanes.joined is not None:
            return self._of_actions(*lanes.actions).exact_period(replace(lanes, joined=None))
        if self.crossing is not None or self.aside is not None:
            return self._crossed(lanes).exact_period(lanes)
        carried, first = self.carried, lanes.ptr[:-1][lanes.busy]
        inner = np.delete(np.arange(len(lanes.tasks)), first)
        within, until, delay = self.edges(lanes)
        across = self._delays(lanes, carried.source, carried.target, self.far_carried)
        source = np.concatenate([within, carried.source, lanes.tasks[inner - 1], lanes.last])
        target = np.concatenate([until, carried.target, lanes.tasks[inner], lanes.tasks[first]])
        wait = np.concatenate([delay, across, np.zeros(len(lanes.tasks))])
        distance = [np.zeros(len(within)), carried.distance, np.zeros(len(inner)), np.ones(len(first))]
        return cycle_time(source, target, self.duration[source] + wait, np.concatenate(distance))

    def edges(self, lanes: Lanes) -> tuple[Ints, Ints, Floats]:
        """The edges within an iteration: source, target, and the least time from the source's end to the target."""
        source, target = self.preds.ids, self.preds.row_of_each()
        return source, target, self._delays(lanes, source, target, self.far)

    def _delays(self, lanes: Lanes, source: Ints, target: Ints, far: Floats) -> Floats:
        a, b = lanes.lane_of[source], lanes.lane_of[target]
        return np.where(lanes.rank[a] != lanes.rank[b], far, np.where(a != b, self.sync, 0.0))

    # ---------------------------------------------------------------------------------------------------------- playing
    def _walked(self, lanes: Lanes, count: int) -> Iterator[Times]:
        n, carried = len(self.duration), self.carried
        far = self.far if self.sync or self.far.any() else np.zeros(0)
        order, (held,) = self._order(lanes, len(far) > 0), prepared(n, far)
        across = self._delays(lanes, carried.source, carried.target, self.far_carried)
        free, release, reached = np.zeros(len(lanes.rank)), np.zeros(0), list[Floats]()
        for _ in range(count):
            columns = (*order, *self._columns, held, *prepared(n, release, free))
            done, start, end, ready = run_lanes(*columns, sync=self.sync)
            if done < n:
                raise lanes.stuck()
            yield Times(start, end, ready)
            free[lanes.busy] = end[lanes.last]
            if len(carried):
                reached = [end[carried.source] + across, *reached[: self._depth - 1]]
                known = np.flatnonzero(carried.distance <= len(reached))
                release = np.zeros(n)
                np.maximum.at(release, carried.target[known], np.stack(reached)[carried.distance[known] - 1, known])

    def _contended(self, lanes: Lanes, count: int) -> Iterator[Times]:
        columns = (*self._order(lanes, True), *self._crowded)
        start, end, ready = contend(*columns, sync=self.sync, spin=self.spin, doze=self.doze, wake=self.wake,
                                    cores=self.cores, serial=self.serial, iterations=count)
        if end.min(initial=0.0) < 0:
            raise lanes.stuck()
        return map(Times, start, end, ready)

    def _contends(self, lanes: Lanes) -> bool:
        """Whether a rank has several lanes that slow or wake each other."""
        most = int(np.bincount(lanes.rank[lanes.busy], minlength=1).max())
        return most > 1 and (most > self.cores or max(self.wake, self.doze, self.serial) > 0
                             or bool((self.factor != 1).any()))

    def _order(self, lanes: Lanes, where: bool) -> tuple[Any, ...]:
        """The lanes as arguments of `run_lanes` and `contend`. `where`: whether the lane of a task matters."""
        lane_of = lanes.lane_of if where else np.zeros(0, np.int32)
        return prepared(len(self.duration), lanes.ptr, lanes.tasks, lanes.rank, lane_of)

    @cached_property
    def _columns(self) -> tuple[Any, ...]:
        """The arguments of `run_lanes`."""
        return prepared(len(self.duration), self.preds.ptr, self.preds.ids, self.duration)

    @cached_property
    def _crowded(self) -> tuple[Any, ...]:
        """The arguments of `contend`: all edges by target, durations, groups, and shares of the bandwidth."""
        n, within, across = len(self.duration), len(self.preds.ids), self.carried
        target = np.concatenate([self.preds.row_of_each(), across.target])
        order = np.argsort(target, kind="stable")
        source = np.concatenate([self.preds.ids, across.source])
        far = np.concatenate([np.broadcast_to(self.far, within), np.broadcast_to(self.far_carried, len(across))])
        distance = np.concatenate([np.zeros(within, np.int64), across.distance])
        group = np.zeros(n, np.int64) if self.group is None else self.group
        share = (np.zeros(n) if self.moving is None else
                 np.minimum(self.moving, self.duration) / np.maximum(self.duration, np.finfo(np.float64).tiny))
        return prepared(n, np.searchsorted(target[order], np.arange(n + 1)), source[order], far[order], distance[order],
                        self.duration, group, self.factor, share)

    def _of_actions(self, first: Ints, last: Ints) -> Clock:
        """The clock whose edges lead from ends of actions to beginnings. `first`, `last`: `Lanes.actions`."""
        (preds, kept), carried = self.preds.between(first, last), self.carried
        return replace(self, preds=preds, far=self.far if len(self.far) == 1 else self.far[kept],
                       carried=replace(carried, source=last[carried.source], target=first[carried.target]))

    # ----------------------------------------------------------------------------------------------------------- rhythm
    @cached_property
    def _depth(self) -> int:
        """On how many earlier iterations one depends."""
        return int(self.carried.distance.max(initial=1))

    def _watched(self, lanes: Lanes) -> Ints:
        """The tasks whose ends determine all later iterations."""
        return np.concatenate([lanes.last, self.carried.source])

    def _rhythm(self, states: Sequence[Floats]) -> tuple[float, int] | None:
        """(time, iterations) of a repetition, if the last iterations equal earlier ones, all later by one time."""
        now = np.array(states[-self._depth :])
        for turn in range(1, len(states) - self._depth + 1):
            moved = now - np.array(states[-self._depth - turn : -turn])
            if not moved.size or np.ptp(moved) <= SAME * now.max():
                return float(moved.mean()) if moved.size else 0.0, turn
        return None

    def _contended_period(self, lanes: Lanes) -> float:
        ends = np.empty((0, 0))
        for count in (4, 16, MOST):
            ends = np.array([t.end for t in self.iterations(lanes, count)])
            over = ends[-1][lanes.last].min()  # from here on some lane has no more tasks
            for t in range(2, 1 + int(np.count_nonzero(ends.max(axis=1) <= over))):
                if rhythm := self._rhythm(list(ends[:t])):
                    return rhythm[0] / rhythm[1]
        last = ends.max(axis=1)
        return float(last[-1] - last[MOST // 2 - 1]) / (MOST // 2)


# ---------------------------------------------------------------------------------------------------------------- links
@dataclass(frozen=True)
class _Network:
    """The effect of links on tasks and edges, for lanes that say on which rank each task is."""

    graph: TaskGraph
    cost: CostModel
    lanes: Lanes

    def durations(self) -> Floats:
        """The duration of each task. A send whose duration only the link gives takes the time of its bytes on the link
        to its receiver; where cores move messages, the tasks at both ends take half of it each."""
        graph, time = self.graph, self.cost.durations(self.graph)
        if self.cost.links or self.cost.link.core:
            source, target = graph.preds.ids, graph.preds.row_of_each()
            met = self.cost.by_link(graph)[source] & np.isin(graph.kind[target], RECEIVES)
            source, target = source[met], target[met]
            latency, per_byte, core = self._figures(source, target)
            took = per_byte * graph.bytes[source]
            time[source] = np.where(core, 0.0, took)
            for rows, end in ((graph.preds, source), (graph.succs, target)):
                mine = core & (np.diff(rows.ptr)[end] > 0)
                # the task that makes the message, which is the last before its send; the first that reads it
                near = rows.ids[rows.ptr[end[mine] + 1] - 1 if rows is graph.preds else rows.ptr[end[mine]]]
                np.add.at(time, near, (latency + took)[mine] / 2)
        return time

    def far(self, source: Ints, target: Callable[[], Ints]) -> Floats:
        """The time from the end of each source until a target on another rank may start; or one number for all."""
        graph, cost = self.graph, self.cost
        if not cost.links and not cost.link.bandwidth and not cost.link.core:
            return np.array([cost.link.latency])
        far, until, rank = np.zeros(len(source)), target(), self.lanes.rank_of
        between = np.flatnonzero(rank[source] != rank[until])
        source, until = source[between], until[between]
        latency, per_byte, core = self._figures(source, until)
        moves = ~np.isin(graph.kind[source], COMMUNICATION)  # edges without send and receive tasks
        far[between] = (np.where(core & ~moves, 0.0, latency)
                        + per_byte * np.where(moves, _message_bytes(graph, source, until), 0))
        return far

    def _figures(self, source: Ints, target: Ints) -> tuple[Any, Any, Any]:
        """The link from each source to its target: latency, time per byte, and whether cores move its messages."""
        ranks, rank = int(self.lanes.rank.max(initial=0)) + 1, self.lanes.rank_of
        pairs, which = np.unique(rank[source] * ranks + rank[target], return_inverse=True)
        links = [self.cost.links.get(f"{pair // ranks}->{pair % ranks}", self.cost.link) for pair in pairs.tolist()]
        latency, per_byte = np.array([(link.latency, link.per_byte) for link in links]).reshape(-1, 2)[which].T
        return latency, per_byte, np.array([link.core for link in links], bool)[which]


def _message_bytes(graph: TaskGraph, source: Ints, target: Ints) -> Ints:
    """The bytes that go over the link for each edge: the buffers that its source writes and its target reads."""
    made, read = graph.writes.take(source), graph.reads.take(target)
    edge, buffers = read.row_of_each(), np.int64(len(graph.buffer_bytes))
    shared = np.isin(edge * buffers + read.ids, made.row_of_each() * buffers + made.ids)
    return np.bincount(edge[shared], graph.buffer_bytes[read.ids[shared]], len(source)).astype(np.int64)
