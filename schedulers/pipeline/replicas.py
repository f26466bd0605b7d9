"""Data parallelism times a pipeline: the all-reduces between the replicas of each stage, beside the messages between
stages.

All replicas run the same schedule, each on its own share of every batch. So one replica's ranks are written down, and
rank r of them stands for the rank r of every replica; an all-reduce such as `1A0` is between those. It stands on the
lane `comm` of its stage's rank. A gradient is the sum over its replica's micro-batches in the schedule's order; the
replicas' sums are added in rank order, then divided by the number of replicas, as without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...graph import Ints, TaskGraph
from ...passes.send_receive import ranks_of
from ...passes.synchronise import synchronise
from ...plans import Machine
from ...pricing.cost import CostModel
from ...pricing.simulation import times
from ...schedule import Lane, Schedule
from ...tasks import COLLECTIVE
from ..layer_times import with_communication
from .placement import PipelineError

Times = dict[tuple[int, int], float]  #: of each all-reduce, by its stage and its number in the graph


def fifo(ready: Times, time: Times) -> list[tuple[int, int]]:
    """In the order in which gradients get ready."""
    return sorted(ready, key=lambda t: ready[t])


def priority(ready: Times, time: Times) -> list[tuple[int, int]]:
    """Of those that are ready the one that the next forward needs first: the lowest stage's."""
    order: list[tuple[int, int]] = []
    left, now = set(ready), 0.0
    while left:
        now = max(now, min(ready[t] for t in left))
        order.append(min(t for t in left if ready[t] <= now))
        left.remove(order[-1])
        now += time[order[-1]]
    return order


#: orders of the all-reduces of a rank, by the name of the data-parallel policy with the same rule
ORDERS: dict[str, Callable[[Times, Times], list[tuple[int, int]]]] = {"fifo": fifo, "priority": priority}


def add_all_reduces(graph: TaskGraph, schedule: Schedule, cost: CostModel, machine: Machine, order: str = "fifo",
                    part_bytes: int | None = None) -> tuple[TaskGraph, Schedule, CostModel]:
    """The graph, schedule and costs with the all-reduce of each stage's gradients before its update: after them
    `add_communication` adds the messages.

    `order`: one of ORDERS. `part_bytes`: the largest part of an all-reduce. Raises GraphError as `synchronise` does,
    PipelineError for another order.
    """
    if order not in ORDERS:
        raise PipelineError(f"all_reduces is {order!r}; within a pipeline they go by {' or '.join(ORDERS)}")
    summed = synchronise(graph, part_bytes=part_bytes)
    if machine.collective is not None:
        cost = with_communication(summed, cost, machine.collective)
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
    return summed, schedule.with_lanes(lanes), cost
