"""One HTML file for plans and runs: a timeline to zoom, predicted over measured, with every task explained.

The page needs no network, no server and no other file. All content is computed here, by the functions behind `report`
and `explain`; its script (assets/page.js) draws, searches and zooms. A hundred thousand tasks are twenty megabytes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from ..core.columns import Ints, Rows, spread
from ..core.draw import PALETTE, group_of, painted
from ..core.graph import TaskGraph
from ..core.report import UNITS, compare, critical_path, readable_unit, report, usage
from ..core.schedule import Schedule
from ..core.tasks import Kind, What, repack, task_name, unpack
from ..core.timeline import Timeline
from ..passes.rewrite import unroll
from ..plans.plan import PipelinePlan, Plan
from ..pricing.cost import CostModel
from ..pricing.explain import places
from ..pricing.simulation import simulate
from ..schedulers.pipeline.peaks import activations

ASSETS = Path(__file__).with_name("assets")
GRID = 4000  #: the most tasks of a readable grid
POINTS = 1000  #: the most points of a curve
_GROUPS = {name: i for i, name in enumerate(PALETTE)}
_GROUP_OF_KIND = np.array([_GROUPS[group_of(kind)] for kind in Kind])


@dataclass(frozen=True)
class Curve:
    """The memory of a rank over time: `live[i]` from `time[i]` on, in bytes or in activations of a full stage. `peak`:
    the most that the plan's proof counts, for any timing."""

    rank: int
    time: Any
    live: Any
    peak: float
    bytes: bool


@dataclass(frozen=True)
class Shown:
    """A plan as the page shows it: `graph` and `schedule` are what the simulator times, `timeline` is its prediction,
    and `measured` a run. `graphs`: the ranks' graphs, which have the names of buffers. `remarks`: the plan's."""

    title: str
    graph: TaskGraph
    schedule: Schedule
    cost: CostModel
    timeline: Timeline
    measured: Timeline | None
    graphs: tuple[TaskGraph, ...]
    curves: tuple[Curve, ...]
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: Plan, measured: Timeline | None = None, iterations: int = 1) -> Shown:
        """A proved plan, and a run of it if there was one. `iterations`: so many steps in a row, of a plan whose
        replicas begin the next step while they communicate."""
        if iterations > 1:
            graph, schedule = unroll(plan.graph, iterations), plan.schedule.repeated(iterations)
            return cls(plan.scheduler, graph, schedule, plan.cost, simulate(graph, schedule, plan.cost), measured,
                       (plan.graph,), (), plan.remarks)
        graph, schedule, _ = plan.priced
        graphs = (plan.graph,) if plan.synthetic else tuple(program.graph for program in plan.distinct_programs)
        return cls(plan.scheduler, graph, schedule, plan.cost, plan.timeline, measured, graphs, _curves(plan),
                   plan.remarks)


def page(title: str, figures: Mapping[str, Any], plans: Sequence[Shown], *, command: str = "", task: str = "",
         curves: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]] | None = None) -> str:
    """The page as HTML text. `figures`: the record of the command, as for --json. `task`: the task that is explained
    first. `curves`: metric -> name of a line -> (step, value) each; long lines are shown as means of steps."""
    lines = {metric: [_line(*line) for line in of.items() if line[1]] for metric, of in (curves or {}).items()}
    content = {"figures": figures, "plans": [_packed(shown) for shown in plans], "task": task, "curves": lines,
               "palette": {name: list(look) for name, look in PALETTE.items()}}
    data = json.dumps(content, allow_nan=False).replace("<", "\\u003c")
    return Template(_asset("page.html")).substitute(
        title=escape(title), command=escape(command), style=_asset("page.css"), script=_asset("page.js"), data=data)


def _line(name: str, points: Sequence[tuple[int, float]]) -> tuple[str, dict[str, str], dict[str, str]]:
    """A line of at most POINTS points."""
    steps, values = np.array(points, np.float64).T
    first = np.arange(0, len(steps), -(-len(steps) // POINTS))
    count = np.diff(first, append=len(steps))
    return name, _column(steps[first + count - 1]), _column(np.add.reduceat(values, first) / count, "f8")


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _column(values: Any, kind: str = "i4") -> dict[str, str]:
    """An array as base64 of little-endian numbers."""
    return {kind: base64.b64encode(np.ascontiguousarray(values, "<" + kind).tobytes()).decode()}


def _rows(rows: Rows) -> list[dict[str, str]]:
    return [_column(rows.ptr), _column(rows.ids)]


def _packed(shown: Shown) -> dict[str, Any]:
    t, m = shown.timeline, shown.measured
    if m is not None and (t.unit == m.unit or (t.unit in UNITS and m.unit in UNITS)):
        m = m.in_unit(t.unit)
    unit = readable_unit(m if m is not None else t)
    order = t.tasks  # lane by lane: the order of all columns of tasks
    return {
        "title": shown.title, "remarks": " ".join(f"{line}." for line in shown.remarks),
        "unit": unit, "of_times": t.unit, "scale": UNITS[t.unit] / UNITS[unit] if unit in UNITS else 1.0,
        "labels": list(t.labels), "predicted": _timeline(t), **_explained(shown, order),
        "measured": None if m is None else _timeline(m, t),
        "memory": [{"label": f"rank {c.rank}", "bytes": c.bytes, "peak": float(c.peak),
                    "what": f"predicted memory of each rank, in {'bytes' if c.bytes else 'live activations'}; the line "
                            f"is the peak that the proof counts",
                    "time": _column(np.asarray(c.time) - t.begin, "f8"), "live": _column(c.live, "f8")}
                   for c in shown.curves],
        "grid": painted(shown.schedule.grid(), lambda name, colour: f'<span style="background:{colour}">{escape(name)}'
                        f'</span>', escape) if len(shown.schedule) <= GRID else "",
        "report": report(t) + ("" if m is None else f"\n\n{report(m)}\n\n{compare(t, m)}")}


def _timeline(t: Timeline, predicted: Timeline | None = None) -> dict[str, Any]:
    """The columns of a timeline, times from its begin. `predicted`: the one with the same tasks, for their numbers."""
    order = t.tasks
    number = spread(order, np.arange(len(order)), len(t), -1)
    first, _, size = t.actions
    part = np.arange(len(order)) - np.repeat(first, size)
    path = critical_path(t)
    critical = spread(number[path.records], np.uint8(1), len(order))
    pauses = np.flatnonzero(t.what != What.TASK)
    pauses = pauses[np.lexsort((t.start[pauses], t.lane[pauses]))]
    place = {(int(t.lane[r]), int(t.key[r])): i for i, r in enumerate(order.tolist())}
    producer = t.last_arrival[0][order]
    has_time = set(t.without_free_messages().lanes)
    own = unpack(t.key[order])
    content: dict[str, Any] = {
        "title": "predicted" if t.predicted else "measured", "makespan": t.makespan,
        "lanes": [str(lane) for lane in t.lanes], "shown": [i for i, lane in enumerate(t.lanes) if lane in has_time],
        "names": [task_name(key) for key in t.key[order].tolist()], "unit": _column(own.unit),
        "group": _column(_GROUP_OF_KIND[own.kind], "u1"), "ptr": _column(_ptr(t.lane[order], len(t.lanes))),
        "start": _column(t.start[order] - t.begin, "f8"), "end": _column(t.end[order] - t.begin, "f8"),
        "part": _column(part), "of": _column(np.repeat(size, size)), "critical": _column(critical, "u1"),
        "awaited": _column(np.where(producer >= 0, number[producer], -1)),
        "pauses": {"ptr": _column(_ptr(t.lane[pauses], len(t.lanes))),
                   "task": _column([place[int(t.lane[r]), int(t.key[r])] for r in pauses.tolist()]),
                   "group": _column([_GROUPS["wait" if t.what[r] == What.WAIT else "transfer"] for r in pauses], "u1"),
                   "start": _column(t.start[pauses] - t.begin, "f8"), "end": _column(t.end[pauses] - t.begin, "f8")},
        "usage": [{**asdict(u), "lane": str(u.lane)} for u in usage(t)],
        "path": _column(number[path.records]), "path_time": path.time}
    if predicted is not None:
        ranks = max(lane.rank for lane in predicted.lanes) + 1  # of one replica
        known = {pair: i for i, pair in enumerate(_identities(predicted, ranks))}
        content["entry"] = _column([known.get(pair, -1) for pair in _identities(t, ranks)])
    return content


def _identities(t: Timeline, ranks: int) -> Iterable[tuple[int, int]]:
    """(rank, key) of each task, with ranks and the destinations of messages within their replica."""
    rank, keys = np.array([lane.rank % ranks for lane in t.lanes]), t.key[t.tasks]
    keys = repack(keys, destination=unpack(keys).destination % ranks)
    return zip(rank[t.lane[t.tasks]].tolist(), keys.tolist(), strict=True)


def _ptr(lane: Ints, lanes: int) -> Ints:
    """Where each lane begins among records that are sorted by lane."""
    return np.searchsorted(lane, np.arange(lanes + 1))


def _explained(shown: Shown, order: Ints) -> dict[str, Any]:
    """The output of `explain` for every task, and the buffers that each one reads and writes."""
    graph, t = shown.graph, shown.timeline
    place = places(graph, shown.schedule, shown.cost)
    ids = shown.schedule.ids(graph)[order]  # the first records of a predicted timeline are the schedule's entries
    number = spread(ids, np.arange(len(ids)), len(graph))
    preds = graph.preds.take(ids)
    names: dict[tuple[int, int], int] = {}
    table: list[tuple[str, int]] = []
    touched: tuple[list[list[int]], list[list[int]]] = [], []
    plain = repack(t.key[order], iteration=0) if len(shown.graphs) == 1 else t.key[order]
    ranks = t.rank_of_each[order] if len(shown.graphs) > 1 else np.zeros(len(order))
    rows = np.empty(len(order), np.int64)
    for rank, own in enumerate(shown.graphs):
        rows[ranks == rank] = own.find(plain[ranks == rank])
    for rank, row in zip(ranks.astype(int).tolist(), rows.tolist(), strict=True):
        own = shown.graphs[rank]
        for found, each in zip(touched, (own.reads, own.writes), strict=True):
            found.append([])
            for b in each[row].tolist() if row >= 0 else ():
                if (rank, b) not in names:
                    names[rank, b] = len(table)
                    table.append((own.buffer(b).name or f"buffer {b}", int(own.buffer_bytes[b])))
                found[-1].append(names[rank, b])
    return {"may_start": _column(place.may_start[ids] - t.begin, "f8"),
            "must_end": _column(place.must_end[ids] - t.begin, "f8"),
            "preds": [_column(preds.ptr), _column(number[preds.ids])],
            "reads": _rows(Rows.of(touched[0])), "writes": _rows(Rows.of(touched[1])), "buffers": table}


# -------------------------------------------------------------------------------------------------------------- memory
def _curves(plan: Plan) -> tuple[Curve, ...]:
    """The memory of each rank of a replica over time, if the plan ran as predicted."""
    if isinstance(plan, PipelinePlan) and plan.synthetic:
        return _activations(plan)
    if not plan.graph.launches:
        return ()
    return tuple(_bytes(plan.timeline, rank, program.graph, plan.peak_bytes[rank])
                 for rank, program in enumerate(plan.distinct_programs))


def _bytes(t: Timeline, rank: int, graph: TaskGraph, peak: int) -> Curve:
    """Bytes: each storage from its first task to its last, inputs from the begin, outputs to the end, and what outlives
    the step always."""
    tasks = t.tasks[t.rank_of_each[t.tasks] == rank]
    ids = graph.find(t.key[tasks])
    start, end = np.full(len(graph), t.begin), np.full(len(graph), t.begin)
    start[ids], end[ids] = t.start[tasks], t.end[tasks]
    size = np.array([storage.bytes for storage in graph.storages], np.float64)
    lasting = np.array([storage.role.persistent for storage in graph.storages], bool)
    users = graph.storage_users
    born = spread(users.row_of_each(), start[users.ids], len(size), np.inf, np.minimum)
    dead = spread(users.row_of_each(), end[users.ids], len(size), -np.inf, np.maximum)
    born[[view.storage for view in graph.inputs]] = t.begin
    dead[[view.storage for view in graph.outputs]] = t.begin + t.makespan
    mine = ~lasting & (born <= dead)
    change = np.concatenate([[size[lasting].sum()], size[mine], -size[mine]])
    times, which = np.unique(np.concatenate([[t.begin], born[mine], dead[mine]]), return_inverse=True)
    return Curve(rank, times, np.cumsum(np.bincount(which, change)), peak, True)


def _activations(plan: PipelinePlan) -> tuple[Curve, ...]:
    """Live activations, as the proof counts them: from the start of each task to the start of the rank's next one."""
    live, rank = activations(plan), plan.schedule.rank_of_each
    t = plan.timeline
    begin = dict(zip(t.key[t.tasks].tolist(), t.start[t.tasks].tolist(), strict=True))
    start = np.array([begin[key] for key in plan.schedule.keys.tolist()])
    found = []
    for r in range(plan.placement.ranks):
        mine = np.flatnonzero(rank == r)
        mine = mine[np.argsort(start[mine], kind="stable")]
        end = t.begin + t.makespan
        found.append(Curve(r, np.append(start[mine], end), np.append(live[mine], 0.0), plan.peaks[r], False))
    return tuple(found)
