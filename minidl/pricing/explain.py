"""Why a task is where it is: when it may start, when it must end, which tasks it needs, and for which it waits only
because the order says so (a false edge). Runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from ..core.columns import Floats, Ints, Rows
from ..core.graph import TaskGraph
from ..core.schedule import Schedule
from ..core.tasks import Kind, parse_task, repack, unpack, widths
from .cost import CostModel
from .exposed import exposed
from .simulation import clock_of


class Places(NamedTuple):
    """When each task starts and ends, may start, and must end: float64, by task id, in the costs' unit."""

    start: Floats
    end: Floats
    may_start: Floats
    must_end: Floats


class Wait(NamedTuple):
    """A task for which another one waits, and until when. `why`: "data", which are there then, also if they come from
    another rank; or "order", if it only comes before on the lane."""

    task: str
    until: float
    why: str


class FalseWait(NamedTuple):
    """A task whose dependencies have ended at `may_start`, but which starts at `start`, because `waits_for` comes
    before it on its lane: without this edge it would start earlier by `wait`, and its lane is idle for `idle` of it."""

    task: str
    lane: str
    waits_for: str
    may_start: float
    start: float
    wait: float
    idle: float
    slack: float


class LaneTime(NamedTuple):
    """Until its last task a lane works, or stands still until its next task may start: `idle_by_order` while a later
    task of it could run, else `idle_for_data`."""

    lane: str
    work: float
    idle_for_data: float
    idle_by_order: float


@dataclass(frozen=True)
class FalseWaits:
    """The cost of an order: `lanes`, and of the `count` waits that it alone makes the largest: first those in which a
    lane stands still for the longest, then the longest. `exposed`: exchanges for which alone a lane stands still."""

    lanes: tuple[LaneTime, ...]
    count: int
    largest: tuple[FalseWait, ...]
    unit: str
    exposed: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        return {"lanes": [lane._asdict() for lane in self.lanes], "false_waits": self.count,
                "largest": [wait._asdict() for wait in self.largest], "unit": self.unit,
                "exposed_exchanges": {**self.exposed}}


@dataclass(frozen=True)
class Explanation:
    """The place of one task, with times in the costs' unit. `may_start`: when its dependencies have ended; `must_end`:
    if it ends later, the step ends later. `waits`: the tasks for which it waits, the last one first.

    `needs` and `needed_by`: the tasks at the other ends of its edges; `lane_before` and `lane_after`: its
    neighbours on the lane. `parts`: in how many parts the task runs of which this one is a part; 1 if it is whole;
    `along`: the axes along which its launches are cut, such as samples, heads or outputs. `exposed`: for how long its
    lane stands still for an exchange alone; of an exchange, how long lanes do for it.
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
    waits: tuple[Wait, ...]
    exposed: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"waits": [wait._asdict() for wait in self.waits]}

    def __str__(self) -> str:
        def at(time: float) -> str:
            return f"{time if abs(time) > 1e-9 * self.must_end else 0.0:,.7g} {self.unit}".rstrip()

        awaited, still = "nothing", list[str]()
        if self.waits:
            last = self.waits[0]
            why = ("whose results it needs" if last.why == "data" else
                   f"by the order alone: its dependencies ended {at(last.until - self.may_start)} before")
            awaited = f"{last.task} until {at(last.until)}, {why}"
        if self.exposed:
            why = ("lanes only wait for this exchange" if unpack(parse_task(self.task)).kind == Kind.X else
                   f"its lane only waits for the exchange {self.waits[0].task}")
            still = [f"  exposed     {at(self.exposed)}   ({why})"]
        late = "   (a delay would make the step longer)" if self.slack <= 1e-9 else ""
        one_of = f", one of {self.parts} parts along {' and '.join(self.along)}" if self.parts > 1 else ""
        return "\n".join([
            f"{self.label} on lane {self.lane}{one_of}",
            f"  may start   {at(self.may_start)}   (its dependencies have ended)",
            f"  runs        {at(self.start)} to {at(self.end)}",
            f"  must end    {at(self.must_end)}   (if it ends later, the step gets longer)",
            f"  slack       {at(self.slack)}{late}",
            f"  waits for   {awaited}", *still,
            f"  needs       {', '.join(self.needs) or 'no task'}",
            f"  needed by   {', '.join(self.needed_by) or 'no task'}",
            f"  on its lane after {self.lane_before or 'nothing'}, before {self.lane_after or 'nothing'}"])


def explain(graph: TaskGraph, schedule: Schedule, cost: CostModel, task: str) -> Explanation:
    """The place of one task in a valid schedule. Raises GraphError for a task that the graph does not have."""
    t = graph.index(task)
    lanes, clock = clock_of(graph, schedule, cost)
    (start, end, ready), (source, target, delay) = clock.run(lanes), clock.edges(lanes)
    must_end = latest_ends(graph, schedule, (source, target, delay), start, end)
    ids = schedule.ids(graph)
    entry = int(np.flatnonzero(ids == t)[0])
    lane = int(schedule.lane_of_each()[entry])
    first, last = entry == schedule.ptr[lane], entry + 1 == schedule.ptr[lane + 1]
    parts = widths(graph.keys).get(int(repack(graph.keys[t], part=0, late=0)), 1)
    along = dict.fromkeys(x.cuts.along for x in graph[t].launches if x.cuts and x.cuts.along)
    begin = schedule.first[entry]  # a pair waits as one
    action = ids[schedule.first == begin]
    awaited, until = np.isin(target, action) & ~np.isin(source, action), end[source] + delay
    waits = {p: Wait(graph.name(p), at, "data") for p, at in zip(source[awaited].tolist(), until[awaited].tolist(),
                                                               strict=True)}
    if begin > schedule.ptr[lane]:
        waits.setdefault(before := int(ids[begin - 1]), Wait(graph.name(before), float(end[before]), "order"))
    told = tuple(sorted(waits.values(), key=lambda wait: (-wait.until, wait.why)))
    still = 0.0
    if graph.kind[t] == Kind.X:
        still = float(exposed(graph, schedule, cost)[t])
    elif told and graph.kind[graph.index(told[0].task)] == Kind.X:
        still = told[0].until - max([0.0, *(wait.until for wait in told[1:2])])
    return Explanation(
        graph.name(t), graph[t].label, parts, tuple(along), str(schedule.lanes[lane]), float(ready[t]), float(start[t]),
        float(end[t]), float(must_end[t]), float(must_end[t] - end[t]), tuple(graph.name(p) for p in graph.preds[t]),
        tuple(graph.name(s) for s in graph.succs[t]), None if first else graph.name(ids[entry - 1]),
        None if last else graph.name(ids[entry + 1]), cost.unit, told, still)


def false_waits(graph: TaskGraph, schedule: Schedule, cost: CostModel, most: int = 20) -> FalseWaits:
    """The cost of the order of a valid schedule, with its `most` largest false waits."""
    start, end, ready, must_end = places(graph, schedule, cost)
    ids, lane_of = schedule.ids(graph), schedule.lane_of_each()
    entries = np.flatnonzero(~schedule.second)  # a pair waits as one
    lanes, rows = list[LaneTime](), list[Floats]()
    for i, lane in enumerate(schedule.lanes):
        mine = entries[lane_of[entries] == i]
        began, ended, there = (times[ids[mine]] for times in (start, end, ready))
        free = np.append(0.0, ended)[:-1]
        gap = began - free
        later = np.append(np.minimum.accumulate(there[::-1])[::-1], np.inf)[1:]  # when a task after it could run
        by_order = np.clip(began - np.maximum(free, later), 0.0, gap)
        lanes.append(LaneTime(str(lane), *(float(x.sum()) for x in (ended - began, gap - by_order, by_order))))
        stood = np.append(0.0, np.cumsum(gap))  # still, until the lane is free for each task
        at, still = np.stack([free, began], 1).ravel(), np.stack([stood[:-1], stood[1:]], 1).ravel()
        rows.append(np.stack([mine, free - there, np.interp(free, at, still) - np.interp(there, at, still)], 1)
                    if len(mine) else np.empty((0, 3)))
    entry, wait, idle = np.concatenate(rows).T
    tiny = 1e-9 * end.max(initial=0.0)
    found = np.flatnonzero(wait > tiny)
    idle[idle < tiny] = 0.0
    largest = found[np.lexsort((entry[found], -wait[found], -idle[found]))][:most]
    told = []
    for e, waited, stands in zip(entry[largest].astype(int).tolist(), wait[largest].tolist(), idle[largest].tolist(),
                                 strict=True):
        t = int(ids[e])
        told.append(FalseWait(graph.name(t), str(schedule.lanes[lane_of[e]]), graph.name(ids[e - 1]), float(ready[t]),
                              float(start[t]), waited, stands, float(must_end[t] - end[t])))
    still = exposed(graph, schedule, cost)
    return FalseWaits(tuple(lanes), len(found), tuple(told), cost.unit, {
        graph.name(t): float(still[t]) for t in np.flatnonzero(still > tiny).tolist()})


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
