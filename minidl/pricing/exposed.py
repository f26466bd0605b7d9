"""Exposed exchanges: how long lanes stand still because rows are on their way to experts, or back."""

from __future__ import annotations

import numpy as np

from ..core.columns import Floats
from ..core.graph import TaskGraph
from ..core.schedule import Schedule
from ..core.tasks import COMMUNICATION, Kind
from .cost import CostModel
from .simulation import clock_of


def exposed(graph: TaskGraph, schedule: Schedule, cost: CostModel) -> Floats:
    """For how long each task of a valid schedule alone keeps a lane that computes waiting, in the costs' unit: 0 but
    for exchanges. On a lane that computes, an exchange is exposed as a whole. The iteration is by itself."""
    found, kind = np.zeros(len(graph)), graph.kind
    if not (kind == Kind.X).any():
        return found
    lanes, clock = clock_of(graph, schedule, cost)
    start, end, _ = clock.run(lanes)
    source, target, delay = clock.edges(lanes)
    order, there = np.argsort(target, kind="stable"), end[source] + delay
    begins = np.searchsorted(target[order], np.arange(len(graph) + 1))
    for lane in range(len(schedule.lanes)):
        tasks = lanes.tasks[lanes.ptr[lane] : lanes.ptr[lane + 1]]
        if np.isin(kind[tasks], COMMUNICATION).all():
            continue
        free = 0.0
        for t in tasks.tolist():
            edges = order[begins[t] : begins[t + 1]]
            last = edges[np.argsort(there[edges])][::-1]
            if kind[t] == Kind.X:
                found[t] += end[t] - start[t]
            elif len(last) and kind[source[last[0]]] == Kind.X:
                found[source[last[0]]] += max(0.0, start[t] - max([free, *there[last[1:2]].tolist()]))
            free = end[t]
    return found
