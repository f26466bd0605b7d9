"""Schedulers for one device: all tasks in order on one stream, or weight gradients on other streams beside the output
gradients.

Multi-stream out-of-order computation: Oh, Lee, Kim, Seo, "Out-of-order backprop", EuroSys 2022, section 4: forward and
output gradients on the main stream, weight gradients and updates on sub streams, events only where they are needed
(`Schedule.waits`).

`why_one` is the rule by which multi_stream and multi_region keep all tasks on one stream, and its reason. The simulator
decides. A plan's streams are used if they make the step shorter than one stream does; by measured costs, which are not
exact, if they do so by more than MARGIN, and by more than it takes to wake a lane: one interruption after which a lane
sleeps would undo a smaller gain. Costs that charge nothing for a second stream, as those from flops and bytes, always
leave a policy its streams: at any moment one of them works, so the step cannot be longer.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np

from ..core.columns import Floats, spread
from ..core.graph import TaskGraph, check_kinds
from ..core.machine import Machine, PlanError, is_whole
from ..core.schedule import Lane, Schedule
from ..core.tasks import Kind, widths
from ..passes.boundary import Mask
from ..pricing.cost import CostModel, Cross, counts_up_to, most_streams
from ..pricing.simulation import Lanes, around, times
from .ordered import Ordered
from .published import published
from .shared_lanes import shared

CHAIN = (Kind.F, Kind.O, Kind.B)  #: the kinds of the critical chain of a step


def in_order(graph: TaskGraph, cost: CostModel | None = None, machine: Machine | None = None) -> Schedule:
    """Every task on one stream in the order in which it was recorded: the conventional order."""
    check_kinds(graph=(graph, TaskGraph))
    return Schedule.of(graph, {Lane(0): range(len(graph))})


def multi_stream(graph: TaskGraph, cost: CostModel | None = None, machine: Machine | None = None, *,
                 streams: int | None = None, map: str | None = None) -> Schedule:
    """The schedule of `planned`; without costs, those from flops and bytes count, so that all streams are used."""
    return planned(graph, cost or CostModel.analytic(), machine, streams=streams, map=map).schedule


def planned(graph: TaskGraph, cost: CostModel, machine: Machine | None = None, *, streams: int | None = None,
            map: str | None = None) -> Ordered:
    """F and O on `main`, W and U on `streams - 1` sub streams in the order in which they become ready, which `cost`
    says; a weight gradient that an output gradient needs (the sums of a batch norm) stays on `main` (Oh, Lee, Kim, Seo,
    EuroSys 2022, section 4). If tasks are in parts, or output gradients go in sweeps, any task may run on any stream,
    as long as that is faster. Everything on one stream where the simulator shows that this is best; costs from flops
    and bytes, which charge nothing for streams, always show them. `streams`: by default 2, or as many more as are
    predicted to gain, up to the cores that the costs were measured on. `map`: the authors' own placement for
    densenet121 or mobilenet_v3, whatever it costs. Raises PlanError unless 2 to 1024 streams are asked for, and for a
    map that does not fit the graph."""
    if map is not None and streams not in (None, 2):
        raise PlanError(f"the map {map} is for 2 streams, not {streams}")
    if map is not None:
        return Ordered(published(graph, map, cost), {"streams": 2, "map": map})
    counts = [streams] if streams is not None else counts_up_to(most_streams(cost))
    work, found = float((cost.durations(graph) + cost.launch).sum()), list[tuple[float, int, Schedule]]()
    for n in reversed(counts):
        if not found or work / n < min(time for time, *_ in found):  # n streams are at best n times as fast as one
            time, schedule = on_streams(graph, cost, n)
            found.append((time, n, schedule))
    time, streams, schedule = min(found, key=lambda made: made[:2])
    why = why_one(graph, schedule, cost, time)
    chosen = f"{streams} streams are used: with {cost.cores} cores, that is predicted to be fastest"
    return Ordered(in_order(graph) if why else schedule, {"streams": streams, "map": None},
                   remarks=(why,) if why else (chosen,) * (len(counts) > 1))


def on_streams(graph: TaskGraph, cost: CostModel, streams: int = 2) -> tuple[float, Schedule]:
    """The time of a step, and its schedule: by `beside`; or, if tasks are in parts or gradients go in sweeps and it is
    faster, one in which all tasks share all streams."""
    orders = [beside(graph, cost, streams)]
    again = ~np.isin(graph.unit[graph.kind == Kind.O], graph.unit[graph.kind == Kind.F])  # gradients without a forward
    if widths(graph.keys) or again.any():
        orders.append(shared(graph, cost, _names(streams)))
    return min(((_time(graph, order, cost), order) for order in orders), key=lambda made: made[0])


def beside(graph: TaskGraph, cost: CostModel, streams: int = 2) -> Schedule:
    """Weight gradients and updates on sub streams, as `planned` says, whatever that costs."""
    if not is_whole(streams, 2) or streams > 1024:
        raise PlanError(f"multi_stream needs 2 to 1024 streams, not {streams!r}; one stream is in_order")
    side, succs = np.isin(graph.kind, [int(Kind.W), int(Kind.U)]), graph.unfenced.succs
    feeds_chain = np.isin(graph.kind[succs.ids], [int(k) for k in CHAIN])
    producer = succs.row_of_each()
    feeds_chain &= graph.iteration[succs.ids] == graph.iteration[producer]
    side &= ~(spread(producer[feeds_chain], True, len(graph), False) & (graph.kind == Kind.W))
    return in_ready_order(graph, cost.durations(graph), side, _names(streams))


def _names(streams: int) -> list[str]:
    return ["main", *(f"sub{i}" if streams > 2 else "sub" for i in range(streams - 1))]


def in_ready_order(graph: TaskGraph, duration: Floats, side: Mask, names: list[str]) -> Schedule:
    """Tasks that are not on the side on the first lane in recorded order, the others on the other lanes in the order in
    which they become ready. Ties go to the first lane, to the task recorded first and to the lane named first."""
    missing, ready_at = np.diff(graph.preds.ptr).tolist(), [0.0] * len(graph)
    free = dict.fromkeys(names, 0.0)
    orders: dict[str, list[int]] = {name: [] for name in names}
    recorded = iter(np.flatnonzero(~side).tolist())
    following = next(recorded, -1)
    waiting = [(0.0, t) for t in np.flatnonzero(side).tolist() if not missing[t]]  # a heap: when a task is ready
    for _ in range(len(graph)):
        task, lane = following, names[0]
        start = max(free[lane], ready_at[task]) if task >= 0 and not missing[task] else np.inf
        other = min(names[1:], key=free.__getitem__)
        if waiting and max(free[other], waiting[0][0]) < start:
            (at, task), lane = heapq.heappop(waiting), other
            start = max(free[lane], at)
        else:
            assert start < np.inf, "the recorded order is always possible"
            following = next(recorded, -1)
        orders[lane].append(task)
        end = free[lane] = start + duration[task]
        for s in graph.succs[task].tolist():
            ready_at[s] = max(ready_at[s], end)
            missing[s] -= 1
            if side[s] and not missing[s]:
                heapq.heappush(waiting, (ready_at[s], s))
    return Schedule.of(graph, {Lane(0, name): order for name, order in orders.items()})


# ----------------------------------------------------------------------------------------------------- one stream alone
MARGIN = 0.02  #: the share of a step that streams must save by measured costs

#: a cause that makes several streams slow -> the same costs without it
_WITHOUT = (
    ("they would share {cores}", {"cores": None}),
    ("tasks side by side slow each other down", {"corun": None, "memory": None}),
    ("what one core has touched is slow to reach from another{assumed}", {"cross": Cross()}),
    ("tasks of {typical} are too short to be handed over in {hand_over}", {"sync": 0.0, "doze": 0.0, "wake": 0.0}),
)


def why_one(graph: TaskGraph, schedule: Schedule, cost: CostModel, several: float | None = None) -> str:
    """Why one stream is better than the streams of this schedule, in one line with the largest of the reasons; empty if
    they are worth it, or if only one of them has tasks. `graph` and `schedule`: the input of the simulator; `several`:
    the time that it gives, if that is known."""
    streams, one = np.count_nonzero(np.diff(schedule.ptr)), float((cost.durations(graph) + cost.launch).sum())
    several = _time(graph, schedule, cost) if several is None else several
    awakening = cost.sync + cost.doze + cost.wake
    least = max(MARGIN * one, awakening) if cost.source == "measured" else -1e-9 * one  # equal up to rounding
    if streams < 2 or several <= one - least:
        return ""
    gains = [several - _time(graph, schedule, replace(cost, **less)) for _, less in _WITHOUT]
    most = int(np.argmax(gains))
    why = _WITHOUT[most][0] if gains[most] > 0 else "hardly any task can run beside another"
    if several < one:
        why = ("to wake a lane once, in {hand_over}, costs more than that saves" if one - several < awakening
               else "costs are not exact enough for so small a gain")
    why = why.format(cores="one core" if cost.cores == 1 else f"{cost.cores} cores",
                     assumed=" (assumed, since it could not be measured)" if cost.cross.source == "assumed" else "",
                     typical=f"{one / len(graph):,.1f} {cost.unit}".rstrip(),
                     hand_over=f"{awakening:,.1f} {cost.unit}".rstrip())
    return (f"one stream is used, which takes {_said(one, cost)} a step; {streams} would take {_said(several, cost)}: "
            f"{why}")


def _time(graph: TaskGraph, schedule: Schedule, cost: CostModel) -> float:
    end = times(graph, schedule, cost).end
    return float(end.max(initial=0.0)) + around(Lanes.of(graph, schedule), end, cost)


def _said(time: float, cost: CostModel) -> str:
    """The time of a step as text, in milliseconds where the costs are in microseconds."""
    return f"{time / 1000:.3g} ms" if cost.unit == "us" else f"{time:.4g} {cost.unit}".rstrip()
