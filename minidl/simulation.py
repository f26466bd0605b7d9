"""Prices a schedule: when would each task start and end? Runs nothing and needs no device.

The model: a lane runs its tasks in order, each as early as its lane and its dependencies allow. An edge between
ranks takes the link's time on top; from a send to its receive only the latency, for a send takes the time of its bytes
itself, so that transfers on one lane queue. A pair that runs as one action shows its results at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cost import CostModel
from .graph import COMMUNICATION, Floats, Ints, TaskGraph
from .loops import run_loop
from .schedule import Schedule
from .timeline import Timeline


def simulate(graph: TaskGraph, schedule: Schedule, cost: CostModel) -> Timeline:
    """The predicted timeline of a valid schedule. Raises ScheduleError where it would deadlock."""
    start, end, _ = times(graph, schedule, cost)
    ids = schedule.ids(graph)
    lane = np.empty(len(graph), np.int32)
    lane[ids] = schedule.lane_of_each()
    source, target = graph.preds.ids, graph.preds.row_of_each()
    across = lane[source] != lane[target]
    source, target = source[across], target[across]
    place = np.empty(len(graph), np.int64)
    place[ids] = np.arange(len(ids))
    return Timeline.of_tasks(
        schedule.lanes, schedule.keys, lane[ids], start[ids], end[ids], bytes=graph.bytes[ids],
        edges=np.stack([place[source], place[target]], axis=1),
        arrived=end[source] + _delays(graph, schedule, lane, cost, source, target), labels=graph.unit_names,
        predicted=True, unit=cost.unit)


def times(graph: TaskGraph, schedule: Schedule, cost: CostModel) -> tuple[Floats, Floats, Floats]:
    """Start and end of each task, and when its last dependency was there: float64, by task id."""
    prepared = _Prepared.of(graph, schedule, cost)
    begin, finish, ready = prepared.run(np.zeros(len(schedule.lanes)))
    return begin[prepared.action], finish[prepared.action], ready[prepared.action]


def chained(graph: TaskGraph, schedule: Schedule, cost: CostModel, iterations: int) -> Floats:
    """The end of each of `iterations` iterations in a row without a barrier: a lane goes on when it is done.

    For schedules whose iterations depend on each other only within lanes, as pipelines do: then it is what `times` says
    of the unrolled graph, without unrolling it.
    """
    prepared = _Prepared.of(graph, schedule, cost)
    busy = np.diff(schedule.ptr) > 0
    last = prepared.action[prepared.ids[schedule.ptr[1:][busy] - 1]]
    free, ends = np.zeros(len(schedule.lanes)), np.zeros(iterations)
    for t in range(iterations):
        _, finish, _ = prepared.run(free)
        step = finish[last] - free[busy]
        free[busy], ends[t] = finish[last], finish.max()
        if t and np.ptp(step) <= 1e-12 * ends[t]:  # all lanes moved on alike: so they will for ever
            ends[t:] = ends[t] + np.arange(iterations - t) * step[0]
            break
    return ends


@dataclass(frozen=True)
class _Prepared:
    """What does not change from one run of the clock to the next. An action is an entry, or a pair that runs as one."""

    schedule: Schedule
    graph: TaskGraph
    ids: Ints
    action: Ints  # of each task
    action_ptr: Ints  # where each action's entries begin
    action_next: Ints  # the next on its lane, or -1
    first: Ints  # of each lane that has any
    duration: Floats
    delay: Floats  # of each edge to a successor
    missing: Ints

    @classmethod
    def of(cls, graph: TaskGraph, schedule: Schedule, cost: CostModel) -> _Prepared:
        ids = schedule.ids(graph)
        lane = np.empty(len(graph), np.int32)
        lane[ids] = schedule.lane_of_each()
        joined = np.zeros(len(ids), bool) if schedule.joined is None else np.asarray(schedule.joined, bool)
        action_ptr = np.append(np.flatnonzero(~joined), len(ids))
        action = np.empty(len(graph), np.int64)
        action[ids] = np.cumsum(~joined) - 1
        action_next = np.arange(1, len(action_ptr))
        busy = np.diff(schedule.ptr) > 0
        action_next[action[ids[schedule.ptr[1:][busy] - 1]]] = -1
        target = action[graph.preds.row_of_each()]
        missing = np.bincount(target[action[graph.preds.ids] != target], minlength=len(action_next))
        missing[action_next[action_next >= 0]] += 1
        delay = _delays(graph, schedule, lane, cost, graph.succs.row_of_each(), graph.succs.ids)
        return cls(schedule, graph, ids, action, action_ptr, action_next, action[ids[schedule.ptr[:-1][busy]]],
                   cost.durations(graph) + cost.launch, delay, missing)

    def run(self, free: Floats) -> tuple[Floats, Floats, Floats]:
        """Begin and end of each action and when its dependencies were there; lane i starts at `free[i]`."""
        actions = len(self.action_next)
        begin, finish, ready, floor = np.zeros(actions), np.zeros(actions), np.zeros(actions), np.zeros(actions)
        floor[self.first] = free[np.diff(self.schedule.ptr) > 0]
        done, *rest = run_loop(
            _earliest, len(self.graph), self.graph.succs.ptr, self.graph.succs.ids, self.delay, self.duration, self.ids,
            self.action_ptr, self.action, self.action_next, self.missing.copy(), begin, finish, ready, floor,
            np.zeros(actions, np.int64))
        if done < actions:
            self.schedule.validate(self.graph)
            raise self.schedule.error("deadlock: a pair waits for itself")
        return rest[9], rest[10], rest[11]


def _delays(graph: TaskGraph, schedule: Schedule, lane: Ints, cost: CostModel, source: Ints, target: Ints) -> Floats:
    """For each edge the time from the producer's end until the consumer may start. `lane`: of each task."""
    rank = np.array([x.rank for x in schedule.lanes], np.int32)[lane]
    between = rank[source] != rank[target]
    delay = np.where(between, cost.link.latency, 0.0)
    if cost.link.bandwidth:
        moves = between & ~np.isin(graph.kind, [int(k) for k in COMMUNICATION])[source]
        delay[moves] = cost.link.time(_message_bytes(graph, source[moves], target[moves]))
    delay[~between & (lane[source] != lane[target])] = cost.sync
    return delay


def _message_bytes(graph: TaskGraph, source: Ints, target: Ints) -> Ints:
    """What goes over the link for each edge: the bytes that both tasks share."""
    reads, writes = graph.reads, graph.writes
    result = run_loop(_shared_bytes, len(source), source, target, writes.ptr, writes.ids, reads.ptr, reads.ids,
                      graph.buffer_bytes, np.zeros(len(source), np.int64))
    shared: Ints = result[-1]
    return shared


def _shared_bytes(source, target, write_ptr, write_ids, read_ptr, read_ids, size, shared):  # type: ignore[no-untyped-def]
    for e in range(len(source)):
        for i in range(write_ptr[source[e]], write_ptr[source[e] + 1]):
            for j in range(read_ptr[target[e]], read_ptr[target[e] + 1]):
                if write_ids[i] == read_ids[j]:
                    shared[e] += size[write_ids[i]]


def _earliest(succ_ptr, succ_ids, delay, duration, ids, action_ptr, action, action_next, missing,  # type: ignore[no-untyped-def]
              begin, finish, ready, floor, queue):
    """Earliest start in lane order; returns how many actions ran. `ready`: dependencies; `floor`: the lane."""
    tail = 0
    for a in range(len(missing)):
        if missing[a] == 0:
            queue[tail] = a
            tail += 1
    head = 0
    while head < tail:
        a = queue[head]
        head += 1
        begin[a] = max(ready[a], floor[a])
        end = begin[a]
        for e in range(action_ptr[a], action_ptr[a + 1]):
            end += duration[ids[e]]
        finish[a] = end
        for e in range(action_ptr[a], action_ptr[a + 1]):
            t = ids[e]
            for i in range(succ_ptr[t], succ_ptr[t + 1]):
                b = action[succ_ids[i]]
                if b != a:
                    ready[b] = max(ready[b], end + delay[i])
                    missing[b] -= 1
                    if missing[b] == 0:
                        queue[tail] = b
                        tail += 1
        b = action_next[a]
        if b >= 0:
            floor[b] = end
            missing[b] -= 1
            if missing[b] == 0:
                queue[tail] = b
                tail += 1
    return tail
