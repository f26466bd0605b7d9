"""Prices a schedule: when would each task start and end? Runs nothing and needs no device.

The model: a lane runs its tasks in order, each as early as its lane and its dependencies allow. An edge between
ranks takes the link's time on top unless its tasks are communication themselves; a pair that runs as one action
shows its results at its end.
"""

from __future__ import annotations

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
    ids = schedule.ids(graph)
    n = len(graph)
    lane = np.empty(n, np.int32)
    lane[ids] = schedule.lane_of_each()
    first = np.ones(len(ids), bool) if schedule.joined is None else ~np.asarray(schedule.joined, bool)
    action_ptr = np.append(np.flatnonzero(first), len(ids))
    action = np.empty(n, np.int64)
    action[ids] = np.cumsum(first) - 1
    actions = len(action_ptr) - 1
    action_next = np.arange(1, actions + 1)
    ends = action[ids[schedule.ptr[1:][np.diff(schedule.ptr) > 0] - 1]]
    action_next[ends] = -1
    duration = cost.durations(graph) + cost.launch
    source, target = graph.preds.ids, graph.preds.row_of_each()
    inside = action[source] == action[target]
    missing = np.bincount(action[target[~inside]], minlength=actions)
    missing[action_next[action_next >= 0]] += 1
    succs = graph.succs
    delay = _delays(graph, schedule, lane, cost, succs.row_of_each(), succs.ids)
    begin, finish, ready, queue = np.zeros(actions), np.zeros(actions), np.zeros(actions), np.zeros(actions, np.int64)
    floor = np.zeros(actions)
    done, *rest = run_loop(_earliest, n, succs.ptr, succs.ids, delay, duration, ids, action_ptr, action,
                           action_next, missing, begin, finish, ready, floor, queue)
    if done < actions:
        schedule.validate(graph)
        raise schedule.error("deadlock: a pair waits for itself")
    begin, finish, ready = rest[9], rest[10], rest[11]
    return begin[action], finish[action], ready[action]


def _delays(graph: TaskGraph, schedule: Schedule, lane: Ints, cost: CostModel, source: Ints, target: Ints) -> Floats:
    """For each edge the time from the producer's end until the consumer may start. `lane`: of each task."""
    rank = np.array([x.rank for x in schedule.lanes], np.int32)[lane]
    talks = np.isin(graph.kind, [int(k) for k in COMMUNICATION])
    between = rank[source] != rank[target]
    moves = between & ~(talks[source] & talks[target])
    delay = np.zeros(len(source))
    delay[moves] = cost.link.time(_message_bytes(graph, source[moves], target[moves]) if cost.link.bandwidth else 0)
    delay[~between & (lane[source] != lane[target])] = cost.sync
    return delay


def _message_bytes(graph: TaskGraph, source: Ints, target: Ints) -> Ints:
    """What goes over the link for each edge: the bytes that both tasks share."""
    return np.array([graph.buffer_bytes[np.intersect1d(graph.writes[p], graph.reads[c])].sum()
                     for p, c in zip(source.tolist(), target.tolist(), strict=True)], np.int64)


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
