"""Why a task is where it is: when it may start, when it must end, which tasks it needs. Runs nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from ..core.columns import Floats, Ints, Rows
from ..core.graph import TaskGraph
from ..core.schedule import Schedule
from ..core.tasks import repack, widths
from .cost import CostModel
from .simulation import clock_of


class Places(NamedTuple):
    """When each task starts and ends, may start, and must end: float64, by task id, in the costs' unit."""

    start: Floats
    end: Floats
    may_start: Floats
    must_end: Floats


@dataclass(frozen=True)
class Explanation:
    """The place of one task, with times in the costs' unit. `may_start`: when its dependencies have ended; `must_end`:
    if it ends later, the step ends later.

    `needs` and `needed_by`: the tasks at the other ends of its edges; `lane_before` and `lane_after`: its
    neighbours on the lane. `parts`: in how many parts the task runs of which this one is a part; 1 if it is whole;
    `along`: the axes along which its launches are cut, such as samples, heads or outputs.
    """

    task: str
    label: str
    parts: int
    along: tuple[str, ...]
    lane: str
    may_start: float
    start: float
    end: float
    must_end: float
    slack: float
    needs: tuple[str, ...]
    needed_by: tuple[str, ...]
    lane_before: str | None
    lane_after: str | None
    unit: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        u = f" {self.unit}" if self.unit else ""
        late = "   (a delay would make the step longer)" if self.slack <= 1e-9 else ""
        one_of = f", one of {self.parts} parts along {' and '.join(self.along)}" if self.parts > 1 else ""
        lines = [f"{self.label} on lane {self.lane}{one_of}",
                 f"  may start   {self.may_start:,.1f}{u}   (its dependencies have ended)",
                 f"  runs        {self.start:,.1f} to {self.end:,.1f}{u}",
                 f"  must end    {self.must_end:,.1f}{u}   (if it ends later, the step gets longer)",
                 f"  slack       {self.slack:,.1f}{u}{late}",
                 f"  needs       {', '.join(self.needs) or 'no task'}",
                 f"  needed by   {', '.join(self.needed_by) or 'no task'}",
                 f"  on its lane after {self.lane_before or 'nothing'}, before {self.lane_after or 'nothing'}"]
        return "\n".join(lines)


def explain(graph: TaskGraph, schedule: Schedule, cost: CostModel, task: str) -> Explanation:
    """The place of one task in a valid schedule. Raises GraphError for a task that the graph does not have."""
    t = graph.index(task)
    start, end, ready, must_end = places(graph, schedule, cost)
    ids = schedule.ids(graph)
    entry = int(np.flatnonzero(ids == t)[0])
    lane = int(schedule.lane_of_each()[entry])
    first, last = entry == schedule.ptr[lane], entry + 1 == schedule.ptr[lane + 1]
    parts = widths(graph.keys).get(int(repack(graph.keys[t], part=0, late=0)), 1)
    along = dict.fromkeys(x.cuts.along for x in graph[t].launches if x.cuts and x.cuts.along)
    return Explanation(
        graph.name(t), graph[t].label, parts, tuple(along), str(schedule.lanes[lane]), float(ready[t]), float(start[t]),
        float(end[t]), float(must_end[t]), float(must_end[t] - end[t]), tuple(graph.name(p) for p in graph.preds[t]),
        tuple(graph.name(s) for s in graph.succs[t]), None if first else graph.name(ids[entry - 1]),
        None if last else graph.name(ids[entry + 1]), cost.unit)


def places(graph: TaskGraph, schedule: Schedule, cost: CostModel) -> Places:
    """The places of all tasks in a valid schedule."""
    lanes, clock = clock_of(graph, schedule, cost)
    start, end, ready = clock.run(lanes)
    return Places(start, end, ready, latest_ends(graph, schedule, clock.edges(lanes), start, end))


def latest_ends(graph: TaskGraph, schedule: Schedule, edges: tuple[Ints, Ints, Floats], start: Floats,
                end: Floats) -> Floats:
    """When each task must end so that the step does not get longer, if the others take as long as they do here. Lanes
    keep their order. `edges`: source, target, and the time from the end of the one until the other may start."""
    ids, (action, ptr) = schedule.ids(graph), schedule.actions()
    of_task, slot = np.empty((2, len(graph)), np.int64)
    of_task[ids], slot[action] = action, schedule.validate(graph).slots
    count = int(ptr[-1])
    duration, begins = np.zeros(count), np.zeros(count, bool)
    duration[of_task], begins[ptr[:-1][np.diff(ptr) > 0]] = end - start, True
    inner = np.flatnonzero(~begins)  # after another one on its lane
    before, after = (np.append(of_task[tasks], lane) for tasks, lane in zip(edges[:2], (inner - 1, inner), strict=True))
    delay = np.append(np.broadcast_to(edges[2], len(edges[0])), np.zeros(len(inner)))
    succs = Rows.from_pairs(before, np.arange(len(before)), count)
    latest = np.full(count, end.max(initial=0.0))
    for i in np.argsort(slot[:count])[::-1].tolist():
        for e in succs[i].tolist():
            if after[e] != i:
                latest[i] = min(latest[i], latest[after[e]] - duration[after[e]] - delay[e])
    return latest[of_task]
