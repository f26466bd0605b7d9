"""Schedulers for one device: all tasks in order on one stream, or weight gradients on other streams beside the output
gradients.

Multi-stream out-of-order computation: Oh, Lee, Kim, Seo, "Out-of-order backprop", EuroSys 2022, section 4: forward and
output gradients on the main stream, weight gradients and updates on sub streams, events only where they are needed
(`Schedule.waits`).
"""

from __future__ import annotations

import heapq

import numpy as np

from ..graph import Floats, Ints, TaskGraph
from ..plans import Machine, Plan
from ..pricing.cost import CostModel
from ..schedule import Lane, Schedule
from ..tasks import Kind
from .one_stream import why_one
from .published import published

CHAIN = (Kind.F, Kind.O, Kind.B)  #: the kinds of the critical chain of a step


def in_order(graph: TaskGraph, cost: CostModel | None = None, machine: Machine | None = None) -> Schedule:
    """Every task on one stream in the order in which it was recorded: the conventional order."""
    return Schedule.of(graph, {Lane(0): range(len(graph))})


def multi_stream(graph: TaskGraph, cost: CostModel | None = None, machine: Machine | None = None, *, streams: int = 2,
                 map: str | None = None) -> Schedule:
    """The schedule of `planned`; without costs, those from flops and bytes count, so that all streams are used."""
    return planned(graph, cost or CostModel.analytic(), machine or Machine(), streams=streams, map=map).schedule


def planned(graph: TaskGraph, cost: CostModel, machine: Machine, *, streams: int = 2, map: str | None = None) -> Plan:
    """F and O on `main`, W and U on `streams - 1` sub streams in the order in which they become ready, which `cost`
    says; a weight gradient that an output gradient needs (the sums of a batch norm) stays on `main` (Oh, Lee, Kim, Seo,
    EuroSys 2022, section 4). Everything on one stream where the simulator shows that this is best; costs from flops and
    bytes, which charge nothing for streams, always show them. `map`: the authors' own placement for densenet121 or
    mobilenet_v3, whatever it costs.

    Raises ValueError for fewer than 2 streams, and for a map that does not fit the graph.
    """
    if map is not None and streams != 2:
        raise ValueError(f"the map {map} is for 2 streams, not {streams}")
    schedule = published(graph, map, cost) if map is not None else beside(graph, cost, streams)
    why = why_one(graph, schedule, cost) if map is None else ""
    return Plan("multi_stream", graph, in_order(graph) if why else schedule, cost, machine.size, machine.memory_limit,
                {"streams": streams, "map": map}, (why,) if why else ())


def beside(graph: TaskGraph, cost: CostModel, streams: int = 2) -> Schedule:
    """Weight gradients and updates on sub streams, as `planned` says, whatever that costs."""
    if streams < 2:
        raise ValueError(f"multi_stream needs at least 2 streams, not {streams}; one stream is in_order")
    side = np.isin(graph.kind, [int(Kind.W), int(Kind.U)])
    feeds_chain = np.isin(graph.kind[graph.succs.ids], [int(k) for k in CHAIN])
    producer = graph.succs.row_of_each()
    feeds_chain &= graph.iteration[graph.succs.ids] == graph.iteration[producer]
    needed = np.zeros(len(graph), bool)
    needed[producer[feeds_chain]] = True
    side &= ~(needed & (graph.kind == Kind.W))
    return list_schedule(graph, cost.durations(graph), side.astype(np.int64), ["main"],
                         [f"sub{i}" if streams > 2 else "sub" for i in range(streams - 1)])


def list_schedule(graph: TaskGraph, duration: Floats, group: Ints, *lanes: list[str]) -> Schedule:
    """Each task on a lane of its group (`lanes[group[t]]`), in the order in which tasks become ready.

    The first group keeps the recorded order. Ties go to the task recorded first and the lane named first.
    """
    missing = np.diff(graph.preds.ptr).tolist()
    ready_at = [0.0] * len(graph)
    free = {name: 0.0 for names in lanes for name in names}
    orders: dict[str, list[int]] = {name: [] for names in lanes for name in names}
    waiting: list[list[tuple[float, int]]] = [[] for _ in lanes]
    groups, durations = group.tolist(), duration.tolist()

    def release(task: int) -> None:
        g = groups[task]
        heapq.heappush(waiting[g], (ready_at[task] if g else float(task), task))

    for task, n in enumerate(missing):
        if not n:
            release(task)
    recorded = [t for t in range(len(graph)) if not groups[t]]
    at = 0
    for _ in range(len(graph)):
        best: tuple[float, int, str] | None = None
        for g, names in enumerate(lanes):
            if not waiting[g] or (g == 0 and waiting[0][0][1] != recorded[at]):
                continue
            lane = min(names, key=lambda name: free[name])
            task = waiting[g][0][1]
            start = max(free[lane], ready_at[task])
            if best is None or (start, g) < (best[0], groups[best[1]]):
                best = (start, task, lane)
        assert best is not None, "the recorded order is always possible"
        start, task, lane = best
        heapq.heappop(waiting[groups[task]])
        at += groups[task] == 0
        orders[lane].append(task)
        end = free[lane] = start + durations[task]
        for s in graph.succs[task].tolist():
            ready_at[s] = max(ready_at[s], end)
            missing[s] -= 1
            if not missing[s]:
                release(s)
    return Schedule.of(graph, {Lane(0, name): order for name, order in orders.items()})
