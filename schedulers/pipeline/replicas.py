"""Data parallelism times a pipeline: all-reduces between the replicas of each stage, beside messages between stages.

All replicas run the same schedule, each on its own share of every batch. A schedule therefore has the ranks of one
replica: its rank r represents rank r of every replica, and an all-reduce such as `1A0` is between these ranks, on the
lane `comm` of its stage's rank. A gradient is the sum over its replica's micro-batches in the schedule's order; the
replicas' sums are added in rank order, then divided by the number of replicas, as without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ...graph import Ints, Launch, Rows, TaskGraph
from ...passes.send_receive import ranks_of
from ...passes.synchronise import gradients, norms_apart, synchronise, view_of
from ...plans import Machine
from ...pricing.cost import CostModel
from ...pricing.simulation import times
from ...schedule import Lane, Schedule
from ...tasks import COLLECTIVE, Kind, as_recorded, pack, repack, task_name, unpack
from ..layer_times import with_communication
from .placement import PipelineError
from .versions import updates

Times = dict[tuple[int, int], float]  #: (stage, number in the graph) of an all-reduce -> time


def fifo(ready: Times, time: Times) -> list[tuple[int, int]]:
    """The all-reduces in the order in which their gradients are ready."""
    return sorted(ready, key=lambda t: ready[t])


def priority(ready: Times, time: Times) -> list[tuple[int, int]]:
    """The all-reduces in an order that takes, of those that are ready, the one that the next forward needs first: the
    one of the lowest stage."""
    order: list[tuple[int, int]] = []
    left, now = set(ready), 0.0
    while left:
        now = max(now, min(ready[t] for t in left))
        order.append(min(t for t in left if ready[t] <= now))
        left.remove(order[-1])
        now += time[order[-1]]
    return order


#: orders of a rank's all-reduces, by the name of the data-parallel policy with the same rule
ORDERS: dict[str, Callable[[Times, Times], list[tuple[int, int]]]] = {"fifo": fifo, "priority": priority,
                                                                      "reverse_first_k": priority}


def reversed_first(graph: TaskGraph, schedule: Schedule, k: int) -> Schedule:
    """The schedule in which the last weight gradients of each rank's first k stages run after the rest of its forward
    and backward tasks, the first stage's first, so that its all-reduce starts as early as possible. Stages whose O and
    W are one task stay as they are. No tasks run in pairs."""
    ids, keys = schedule.ids(graph), schedule.keys.copy()
    for lane in range(len(schedule.lanes)):
        own = ids[schedule.ptr[lane] : schedule.ptr[lane + 1]]
        last = {int(graph.unit[t]): t for t in own.tolist() if graph.kind[t] == Kind.W}
        waits = [last[stage] for stage in np.unique(graph.unit[own]).tolist()[:k] if stage in last]
        rest = own[~np.isin(own, waits)]
        end = 1 + int(np.flatnonzero(graph.kind[rest] != Kind.U).max(initial=-1))
        keys[schedule.ptr[lane] : schedule.ptr[lane + 1]] = graph.keys[np.insert(rest, [end] * len(waits), waits)]
    return replace(schedule, keys=keys, slots=None)


def add_sums_between_updates(graph: TaskGraph, schedule: Schedule, cost: CostModel,
                             machine: Machine) -> tuple[TaskGraph, Schedule, CostModel]:
    """The body of a stale pipeline, its schedule and costs, with an all-reduce before each update of a stage: `1A0/3`
    before its fourth, so that all replicas make the same versions of their weights."""
    after, keys, summed, launches, lanes = [], [], [], [], dict[Lane, list[int]]()
    rank, tasks = ranks_of(graph, schedule), dict(cost.tasks)
    number = _numbers(graph)
    for update, buffers in sorted(gradients(graph).items()):
        unit, late = int(graph.unit[update]), int(graph.late[update])
        views = tuple(view for b in buffers.tolist() if (view := view_of(graph, update, b)) is not None)
        keys.append(int(pack(unit, Kind.A, part=number[update], late=late)))
        after.append(update - 1)
        summed.append(sorted(buffers.tolist()))
        launches.append((Launch("all_reduce", views, views),))
        lanes.setdefault(Lane(int(rank[update]), "comm"), []).append(keys[-1])
        if machine.collective is not None:
            size = {unit: int(graph.buffer_bytes[buffers].sum())}
            tasks[task_name(int(as_recorded(keys[-1])))] = machine.collective(size)
    rows = Rows.of(summed)
    sizes = np.array([int(graph.buffer_bytes[row].sum()) for row in summed], np.int64)
    return (graph.insert(np.array(after), np.array(keys), rows, rows, sizes, launches),
            schedule.with_lanes({lane: np.array(mine) for lane, mine in lanes.items()}), replace(cost, tasks=tasks))


def _numbers(graph: TaskGraph) -> dict[int, int]:
    """For each update of a stage its number within a step."""
    found: dict[int, int] = {}
    mine = updates(graph)
    for unit in np.unique(graph.unit[mine]).tolist():
        own = mine[graph.unit[mine] == unit]
        found |= {t: n for n, t in enumerate(own[np.argsort(graph.micro_batch[own])].tolist())}
    return found


def add_all_reduces(graph: TaskGraph, schedule: Schedule, cost: CostModel, machine: Machine, order: str = "fifo",
                    part_bytes: int | None = None) -> tuple[TaskGraph, Schedule, CostModel]:
    """The graph, schedule and costs with an all-reduce of each stage's gradients before its update; then
    `add_communication` adds the messages.

    `order`: one of ORDERS; with `reverse_first_k` weight gradients wait, with the k of the shortest step (0 in
    schedules with pairs). `part_bytes`: the largest part of an all-reduce. Raises GraphError like `synchronise`, and
    PipelineError for another order.
    """
    if order not in ORDERS:
        raise PipelineError(f"all_reduces is {order!r}; within a pipeline it must be fifo, priority or "
                            f"reverse_first_k")
    graph, schedule, cost = _with_norms_apart(graph, schedule, cost)
    summed = synchronise(graph, part_bytes=part_bytes)
    if machine.collective is not None:
        cost = with_communication(summed, cost, machine.collective)
    largest = 0
    if order == "reverse_first_k" and schedule.joined is None:
        largest = max(len(np.unique(unpack(schedule.order(lane)).unit)) for lane in range(len(schedule.lanes)))
    found = [_beside(graph, summed, reversed_first(graph, schedule, k) if k else schedule, cost, order)
             for k in range(largest + 1)]
    best = min(found, key=lambda each: float(times(summed, each, cost).end.max(initial=0.0)))  # of equal ones the first
    return summed, best, cost


def _with_norms_apart(graph: TaskGraph, schedule: Schedule,
                      cost: CostModel) -> tuple[TaskGraph, Schedule, CostModel]:
    """The graph, schedule and costs in which tasks that add up gradients of several uses take no norms; these follow,
    and take no time of their own."""
    found = norms_apart(graph)
    keys = schedule.keys
    times = dict(cost.tasks)
    for key in np.setdiff1d(found.keys, graph.keys):
        before = repack(key, micro_batch=unpack(key).micro_batch - 1)
        at = int(np.flatnonzero(keys == before)[0])
        lane = int(schedule.lane_of_each()[at])
        times[task_name(int(key))] = 0.0
        keys = np.insert(keys, at + 1, key)
        schedule = replace(schedule, keys=keys, ptr=schedule.ptr + (np.arange(len(schedule.ptr)) > lane), slots=None,
                           joined=None if schedule.joined is None else np.insert(
                               np.asarray(schedule.joined, bool), at + 1, False))
    return found, schedule, replace(cost, tasks=times)


def _beside(graph: TaskGraph, summed: TaskGraph, schedule: Schedule, cost: CostModel, order: str) -> Schedule:
    """The schedule with all-reduces in this order on a lane of each rank. `summed`: `graph` with all-reduces."""
    rank = np.zeros(len(summed), np.int64)
    rank[summed.find(schedule.keys)] = ranks_of(graph, schedule)[schedule.ids(graph)]
    end, time = np.zeros(len(summed)), cost.durations(summed) + cost.launch
    end[summed.find(graph.keys)] = times(graph, schedule, cost).end
    ready: dict[int, Times] = {}
    for t in np.flatnonzero(np.isin(summed.kind, COLLECTIVE)).tolist():
        before = summed.preds[t]
        ready.setdefault(int(rank[before[0]]), {})[int(summed.unit[t]), t] = float(end[before].max())
    lanes: dict[Lane, Ints] = {}
    for r, own in ready.items():
        ordered = ORDERS[order](own, {(stage, t): float(time[t]) for stage, t in own})
        lanes[Lane(r, "comm")] = summed.keys[[t for _, t in ordered]]
    return schedule.with_lanes(lanes)
