"""The width of tasks: which run whole, and which in parts that several lanes share (`minidl.passes.split`).

`auto` prices several choices by the costs of tasks and of their parts, and takes the fastest plan: a part of half the
rows may take more than half the time, and weight gradients that run beside each other gain nothing from parts. All
tasks whole and all in parts are among the choices, so it is never predicted slower than these.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..core.graph import TaskGraph
from ..core.machine import PlanError, shorten
from ..core.placement import Refused
from ..core.schedule import Lane, Schedule
from ..core.tasks import GraphError, Kind, parse_task, repack, unpack
from ..passes.draft import Draft
from ..passes.split import split as in_pieces
from ..plans.plan import PipelinePlan, Plan
from ..pricing.cost import CostModel

Parts = int | Mapping[int, int]  #: of every task that can be cut, or of some by their keys


CHAIN = (Kind.F, Kind.O, Kind.B, Kind.R)  #: the kinds of the critical chain of a step
MOST = 1.15  #: parts that together take so many times as long as the whole task are not worth it


def in_parts(graph: Any, split: int | str | Mapping[str, int], cost: Any, lanes: int, make: Callable[[Parts], Plan]
             ) -> Plan:
    """The plan with the parts that `split` says: one number for all tasks, numbers by the tasks' names, or "auto": the
    fastest of several choices with one part for each of `lanes`. `make`: from parts to a plan. Raises PlanError for
    numbers or names that make no sense."""
    if not isinstance(graph, TaskGraph):
        raise PlanError("split needs a recorded step: tasks on given times have no rows")
    if split == "auto":
        return _fastest(graph, cost, lanes, make)
    return make(_number(split) if not isinstance(split, Mapping) else
                {_key(graph, name): _number(count, name) for name, count in split.items()})


def _number(count: Any, name: str = "") -> int:
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count < 1024:
        raise PlanError(f"split{f' of {name[:40]}' if name else ''} is {shorten(count)}; it must be a number of parts, "
                        f"from 1 to 1023")
    return count


def _key(graph: TaskGraph, name: str) -> int:
    try:
        graph.index(name)
    except GraphError as error:
        raise PlanError(f"split: {error}") from None
    return parse_task(name)


def _fastest(graph: TaskGraph, cost: CostModel, lanes: int, make: Callable[[Parts], Plan]) -> Plan:
    """The fastest plan of all choices."""
    plans = [make(1)]
    if isinstance(plans[0], PipelinePlan):
        raise Refused("split=auto", "parts of a stage have no measured costs", "give a number of parts")
    try:
        # on one lane parts gain nothing but the errors of measured costs
        plans += [plan for choice in choices(graph, cost, lanes) if len((plan := make(choice)).schedule.lanes) > 1]
    except Refused:  # nothing can be cut
        return plans[0]
    best = min(plans, key=lambda plan: plan.step)
    own = unpack(best.graph.keys)
    parted = len(np.unique(repack(best.graph.keys[own.part > 0], part=0)))
    return best.with_known(remarks=(*best.remarks, f"{parted} of {len(graph)} tasks run in {lanes} parts, by which a "
                                    f"step is predicted to take {best.step / plans[0].step:.2f} of the time with whole "
                                    f"tasks" if parted else "all tasks stay whole: parts are not predicted to gain"))


def choices(graph: TaskGraph, cost: CostModel, parts: int) -> list[dict[int, int]]:
    """Tasks in so many parts each: all that can be cut; the chain, beside whole weight gradients; and of
    either those whose parts together take hardly longer. Raises Refused if nothing can be cut, and CostError for costs
    that lack the parts."""
    draft = in_pieces(Draft.of(graph, cost), parts)
    own, time = unpack(draft.graph.keys), cost.durations(draft.graph) + cost.launch
    keys, of = np.unique(repack(draft.graph.keys, part=0), return_inverse=True)
    total = np.bincount(of, time)
    whole = (cost.durations(graph) + cost.launch)[graph.find(keys)]
    cut = np.bincount(of, own.part > 0) > 0
    chain, worth = np.isin(unpack(keys).kind, CHAIN), (total <= MOST * whole) & (whole > parts * cost.sync)
    masks = {mask.tobytes(): mask for mask in (cut, cut & chain, cut & worth, cut & worth & chain) if mask.any()}
    return [dict.fromkeys(keys[mask].tolist(), parts) for mask in masks.values()]


def shared(graph: TaskGraph, cost: CostModel, lanes: list[str]) -> Schedule:
    """Any task on any lane: a lane that is free takes the ready task with the longest way to the end of the step, if
    possible one of the part that this lane took before, whose rows are in its cache. So weight gradients fill the gaps
    of the chain (list scheduling by critical paths: Graham, 1969; Kohler, 1975)."""
    time = (cost.durations(graph) + cost.launch).tolist()
    way, missing, part = list(time), np.diff(graph.preds.ptr).tolist(), unpack(graph.keys).part.tolist()
    for t in reversed(range(len(graph))):
        way[t] += max((way[s] for s in graph.succs[t].tolist()), default=0.0)
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
        for s in graph.succs[t].tolist():
            missing[s] -= 1
            if not missing[s]:
                heapq.heappush(later, (end, s))
    return Schedule.of(graph, {Lane(0, name): order for name, order in zip(lanes, orders, strict=True)})
