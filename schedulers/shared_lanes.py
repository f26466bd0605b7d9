"""Any task on any lane: list scheduling by the longest way to the end of a step."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ..core.columns import Floats
from ..core.graph import TaskGraph
from ..core.schedule import Lane, Schedule
from ..core.tasks import unpack
from ..pricing.cost import CostModel


def shared(graph: TaskGraph, cost: CostModel, lanes: list[str]) -> Schedule:
    """Any task on any lane: a lane that is free takes the ready task with the longest way to the end of the step, if
    possible one of the part that this lane took before, whose rows are in its cache. So weight gradients fill the gaps
    of the chain (list scheduling by critical paths: Graham, 1969; Kohler, 1975)."""
    time, missing = cost.durations(graph) + cost.launch, np.diff(graph.preds.ptr).tolist()
    succs, part = graph.succs.lists(), unpack(graph.keys).part.tolist()
    way = ways(succs, time.tolist())
    free, orders = [0.0] * len(lanes), [list[int]() for _ in lanes]
    later = [(0.0, t) for t, n in enumerate(missing) if not n]  # a heap: when a task is ready
    ready: list[tuple[float, int]] = []  # a heap: the longest way first
    for _ in range(len(graph)):
        lane = min(range(len(lanes)), key=free.__getitem__)
        if not ready:
            free[lane] = max(free[lane], later[0][0])
        while later and later[0][0] <= free[lane]:
            t = heapq.heappop(later)[1]
            heapq.heappush(ready, (-way[t], t))
        first = heapq.heappop(ready)
        if ready and part[first[1]] and (part[first[1]] - 1) % len(lanes) != lane and (
                (part[ready[0][1]] - 1) % len(lanes) == lane and first[0] + time[first[1]] > ready[0][0]):
            first = heapq.heapreplace(ready, first)  # hardly shorter, and this lane's own part
        t = first[1]
        orders[lane].append(t)
        end = free[lane] = free[lane] + time[t]
        for s in succs[t]:
            missing[s] -= 1
            if not missing[s]:
                heapq.heappush(later, (end, s))
    return Schedule.of(graph, {Lane(0, name): order for name, order in zip(lanes, orders, strict=True)})


def critical_path(graph: TaskGraph, time: Floats) -> list[int]:
    """The tasks of the longest way through a step."""
    succs = graph.succs.lists()
    way = ways(succs, time.tolist())
    path = [int(np.argmax(way))]
    while after := succs[path[-1]]:
        path.append(max(after, key=way.__getitem__))
    return path


def ways(succs: Sequence[Sequence[int]], time: Sequence[float]) -> list[float]:
    """The longest way from each task to the end of a step, its own time included."""
    way = list(time)
    for t in reversed(range(len(way))):
        way[t] += max((way[s] for s in succs[t]), default=0.0)
    return way
