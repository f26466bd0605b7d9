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

from ..core.columns import grouped
from ..core.graph import Launch, Role, TaskGraph
from ..core.placement import Refused
from ..core.schedule import Lane, Schedule
from ..core.tasks import SUMS, Kind, unpack
from ..pricing.simulation import times
from .draft import Draft, Sums
from .rewrite import gradients
from .synchronise import norms_apart, summed_by_all, view_of
from .versions import updates

Times = dict[tuple[int, int], float]  #: (stage, number in the graph) of an all-reduce -> time


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


#: orders of a rank's all-reduces, by the name of the data-parallel policy with the same rule; fifo: as their gradients
#: are ready
ORDERS: dict[str, Callable[[Times, Times], list[tuple[int, int]]]] = {
    "fifo": lambda ready, time: sorted(ready, key=ready.__getitem__), "priority": priority, "reverse_first_k": priority}


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


def sums_asked_for(draft: Draft, all_reduces: str | None = None, part_bytes: int | None = None) -> Draft:
    """The draft as it is. Raises Refused for options of `replicas` that have no effect."""
    told = {"all_reduces": all_reduces, "part_bytes": part_bytes}
    useless = [option for option, value in told.items() if value is not None]
    if useless and draft.machine.replicas == 1:
        raise Refused(draft.name, f"{min(useless)} is for several replicas of a pipeline", "there is one; leave it out")
    if useless and draft.stale:
        raise Refused(draft.name, f"gradients are summed before each update, so {min(useless)} has no effect",
                      "leave it out")
    return draft


def replicas(draft: Draft, all_reduces: str | None = None, part_bytes: int | None = None) -> Draft:
    """An all-reduce of each stage's gradients before its update, on a lane of its own.

    `all_reduces`: the order, one of ORDERS, by default fifo; with `reverse_first_k` weight gradients wait, with the k
    of the shortest step (0 in schedules with pairs). `part_bytes`: the largest part of an all-reduce. Raises GraphError
    like `summed_by_all`, and Refused for another order.
    """
    return _between_updates(draft) if draft.stale else _beside(draft, all_reduces or "fifo", part_bytes)


def _between_updates(draft: Draft) -> Draft:
    """An all-reduce before each update of a stage, `1A0/3` before its fourth, so that all replicas make the same
    versions of their weights."""
    graph, e, rank, number = draft.graph, draft.edit(), draft.order.rank_of_tasks(draft.graph), dict[int, int]()
    for own in grouped((int(graph.unit[t]), t) for t in updates(graph).tolist()).values():
        number |= {t: n for n, t in enumerate(sorted(own, key=graph.micro_batch.__getitem__))}  # within a step
    spent, summing = gradients(graph), np.flatnonzero((graph.kind == Kind.U)
                                                      & ~graph.changed_by(graph.role_is(Role.PARAMETER)))
    first = {update: min((t for t in summing.tolist() if np.isin(buffers, graph.reads[t]).any()), default=update)
             for update, buffers in spent.items()}  # a norm is of what all have summed
    for update, before in sorted(first.items(), key=lambda pair: pair[1]):
        unit, buffers = int(graph.unit[update]), spent[update]
        size = int(graph.buffer_bytes[buffers].sum())
        views = tuple(view for b in buffers.tolist() if (view := view_of(graph, update, b)) is not None)
        time = np.nan if draft.machine.collective is None else draft.machine.collective({unit: size})
        new = e.task(before - 1, unit, Kind.A, part=number[update], late=int(graph.late[before]), stage=unit,
                     reads=buffers.tolist(), writes=buffers.tolist(), launches=[Launch("all_reduce", views, views)],
                     time=time, nbytes=size)
        e.own_lane(Lane(int(rank[update]), "comm"), new)
    return e.draft


def _beside(draft: Draft, order: str, part_bytes: int | None) -> Draft:
    """All-reduces in this order beside the rest of the step."""
    if order not in ORDERS:
        raise Refused(draft.name, f"all_reduces is {order!r}",
                      "within a pipeline it must be fifo, priority or reverse_first_k")
    apart = norms_apart(draft)
    summed = summed_by_all(replace(apart, sums=Sums(part_bytes=part_bytes)))
    schedule, largest = apart.order, 0
    if order == "reverse_first_k" and schedule.joined is None:
        largest = max(len(np.unique(unpack(schedule.order(lane)).unit)) for lane in range(len(schedule.lanes)))
    tried = [_with_sums(apart, summed, reversed_first(apart.graph, schedule, k) if k else schedule, order)
             for k in range(largest + 1)]
    cost = summed.priced  # of equal ones the first
    return replace(summed, schedule=min(tried, key=lambda each: float(
        times(summed.graph, each, cost).end.max(initial=0.0))))


def _with_sums(draft: Draft, summed: Draft, schedule: Schedule, order: str) -> Schedule:
    """The schedule with all-reduces in this order on a lane of each rank. `summed`: `draft` with all-reduces."""
    rank, end = np.zeros(len(summed.graph), np.int64), np.zeros(len(summed.graph))
    here = summed.graph.find(draft.graph.keys)
    rank[here], end[here] = schedule.rank_of_tasks(draft.graph), times(draft.graph, schedule, draft.priced).end
    time, ready = summed.priced.durations(summed.graph), dict[int, Times]()
    for t in np.flatnonzero(np.isin(summed.graph.kind, SUMS)).tolist():
        before = summed.graph.preds[t]
        ready.setdefault(int(rank[before[0]]), {})[int(summed.graph.unit[t]), t] = float(end[before].max())
    return schedule.with_lanes({Lane(r, "comm"): summed.graph.keys[[t for _, t in ORDERS[order](
        own, {(stage, t): float(time[t]) for stage, t in own})]] for r, own in ready.items()})
