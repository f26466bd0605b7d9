"""Prices a schedule: when would each task start and end? Runs nothing and needs no device.

The model: a lane runs its tasks in order, each as early as its lane and its dependencies allow. An edge between
ranks takes the link's time on top; from a send to its receive only the latency, for a send takes the time of its bytes
itself, so that transfers on one lane queue. A pair that runs as one action shows its results at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .corun import CoRun, play
from .cost import CostModel
from .graph import COMMUNICATION, Floats, Ints, Rows, TaskGraph
from .loops import run_loop
from .schedule import Schedule, by_entry, walk
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
    """Start and end of each task, and when its last dependency was there: float64, by task id.

    On one rank, tasks on several lanes slow each other down, and waking costs time, where the costs say so.
    """
    if (cost.corun or cost.wake) and len(schedule.lanes) > 1 and schedule.ranks == 1 and schedule.joined is None:
        return _contended(graph, schedule, cost)
    clock = Clock.of(graph, schedule, cost)
    begin, end, ready = clock.run()
    return begin[clock.action], end[clock.action], ready[clock.action]


def _contended(graph: TaskGraph, schedule: Schedule, cost: CostModel) -> tuple[Floats, Floats, Floats]:
    ids = schedule.ids(graph)
    lanes = [ids[schedule.ptr[i] : schedule.ptr[i + 1]].tolist() for i in range(len(schedule.lanes))]
    lane = np.empty(len(graph), np.int32)
    lane[ids] = schedule.lane_of_each()
    preds = [graph.preds[t].tolist() for t in range(len(graph))]
    begin, end = play(lanes, preds, (cost.durations(graph) + cost.launch).tolist(), cost.sync, cost.wake,
                      *(cost.corun or CoRun()).table(graph))
    if min(end, default=0.0) < 0:
        schedule.validate(graph)
    start, stop, ready = np.array(begin), np.array(end), np.zeros(len(graph))
    source, target = graph.preds.ids, graph.preds.row_of_each()
    np.maximum.at(ready, target, stop[source] + np.where(lane[source] != lane[target], cost.sync, 0.0))
    return start, stop, ready


@dataclass(frozen=True)
class Clock:
    """A schedule with its times, ready to run once or many times. An action is an entry, or a pair that runs as one.

    Actions are numbered lane after lane. `action`: of each task. `delay`: of each edge in `preds`.
    """

    graph: TaskGraph
    schedule: Schedule
    action: Ints
    lane_ptr: Ints
    preds: Rows
    delay: Floats
    duration: Floats

    @classmethod
    def of(cls, graph: TaskGraph, schedule: Schedule, cost: CostModel) -> Clock:
        ids = schedule.ids(graph)
        if (np.bincount(ids, minlength=len(graph)) != 1).any():
            schedule.validate(graph)
        lane = np.empty(len(graph), np.int32)
        lane[ids] = schedule.lane_of_each()
        preds = by_entry(graph.preds, ids)
        delay = _delays(graph, schedule, lane, cost, ids[preds.ids], np.repeat(ids, np.diff(preds.ptr)))
        del lane
        duration = (cost.durations(graph) + cost.launch)[ids]
        entry = np.arange(len(ids))
        lane_ptr = schedule.ptr
        if schedule.joined is not None:
            first = np.flatnonzero(~np.asarray(schedule.joined, bool))
            entry = np.cumsum(~np.asarray(schedule.joined, bool)) - 1
            lane_ptr = np.append(entry, len(first))[schedule.ptr]
            own = entry[preds.row_of_each()]
            outside = entry[preds.ids] != own
            preds = Rows.from_pairs(own[outside], entry[preds.ids[outside]], len(first))
            delay, duration = delay[outside], np.add.reduceat(duration, first)
        action = np.empty(len(ids), np.int64)
        action[ids] = entry
        return cls(graph, schedule, action, lane_ptr, preds, delay, duration)

    def run(self, free: Floats | None = None) -> tuple[Floats, Floats, Floats]:
        """Begin and end of each action and when its dependencies were there; lane i starts at `free[i]`."""
        free = np.zeros(len(self.schedule.lanes)) if free is None else free
        done, begin, end, ready = walk(self.lane_ptr, self.preds, self.delay, self.duration, free)
        if done < len(self.duration):
            self.schedule.validate(self.graph)
            raise self.schedule.error("deadlock: a pair waits for itself")
        return begin, end, ready

    def chained(self, iterations: int) -> Floats:
        """The end of each of `iterations` iterations in a row without a barrier: a lane goes on when it is done.

        For schedules whose iterations depend on each other only within lanes, as pipelines do: then it is what `times`
        says of the unrolled graph, without unrolling it.
        """
        last = self.lane_ptr[1:][np.diff(self.lane_ptr) > 0] - 1
        busy = np.flatnonzero(np.diff(self.lane_ptr) > 0)
        free, ends = np.zeros(len(self.lane_ptr) - 1), np.zeros(iterations)
        for t in range(iterations):
            end = self.run(free)[1][last]
            step = end - free[busy]
            free[busy], ends[t] = end, end.max()
            if t and np.ptp(step) <= 1e-12 * ends[t]:  # all lanes moved on alike: so they will for ever
                ends[t:] = ends[t] + np.arange(iterations - t) * step[0]
                break
        return ends


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
