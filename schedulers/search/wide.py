"""The width of tasks: which run whole, and which in parts that several lanes share (`minidl.passes.split`).

`auto` prices several choices by the costs of tasks and of their parts, and takes the fastest plan: a part of half the
rows may take more than half the time, and weight gradients that run beside each other gain nothing from parts. All
tasks whole and all in parts are among the choices, and for each number of lanes the widths of `balanced`; so it is
never predicted slower than these, and, up to 16 cores, not slower than with fewer cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from ...core.columns import Floats, Ints
from ...core.graph import TaskGraph
from ...core.machine import PlanError, shorten
from ...core.placement import Refused
from ...core.tasks import GraphError, Kind, widths
from ...passes.choices import Parts
from ...passes.split import to_be_priced
from ...plans.memory import MemoryLimitError
from ...plans.plan import PipelinePlan, Plan
from ...pricing.cost import CostModel, counts_up_to
from ..shared_lanes import critical_path

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
    parts: Mapping[str, Any] = split if isinstance(split, Mapping) else {"": split}
    for name, count in parts.items():
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count < 1024:
            raise PlanError(f"split{f' of {name[:40]}' if name else ''} is {shorten(count)}; it must be a number of "
                            f"parts, from 1 to 1023")
    if parts is not split:
        return make(parts[""])
    try:
        own = {int(graph.keys[graph.index(name)]): count for name, count in parts.items()}
    except GraphError as error:
        raise PlanError(f"split: {error}") from None
    return make(own)


def _fastest(graph: TaskGraph, cost: CostModel, lanes: int, make: Callable[[Parts], Plan]) -> Plan:
    """The fastest plan of all choices."""
    whole = best = make(1)
    if isinstance(whole, PipelinePlan):
        raise Refused("split=auto", "parts of a stage have no measured costs", "give a number of parts")
    for least, choice in choices(graph, cost, lanes):
        if least < best.step:
            with suppress(MemoryLimitError, Refused):
                plan = make(choice)  # on one lane parts gain nothing but the errors of measured costs
                best = plan if plan.step < best.step and len(plan.schedule.lanes) > 1 else best
    parts = sorted(widths(best.graph.keys).values())
    return best.with_known(remarks=(*best.remarks, f"{len(parts)} of {len(graph)} tasks run in "
                                    f"{' to '.join(map(str, sorted({parts[0], parts[-1]})))} parts, by which a step is "
                                    f"predicted to take {best.step / whole.step:.2f} of the time with whole tasks"
                                    if parts else "all tasks stay whole: parts are not predicted to gain"))


# -------------------------------------------------------------------------------------------------------------- choices
def choices(graph: TaskGraph, cost: CostModel, lanes: int) -> list[tuple[float, dict[int, int]]]:
    """Widths of tasks to be tried, and the least time of a step with them, the least first. For 2, 3, 4 and so on:
    all tasks that can be cut in so many parts; all tasks, each in the most parts up to so many; and the result of
    `balanced` for so many lanes. In the fewest parts, also the chain alone, beside whole weight gradients, and of
    either those whose parts together take hardly longer. Raises CostError for costs that lack the parts."""
    times, found, widest = in_widths(graph, cost, lanes), list[Ints](), np.ones(len(graph), np.int64)
    for count, (longest, total, _) in list(times.items())[1:]:
        widest = np.where(longest < np.inf, count, widest)
        found += [np.where(longest < np.inf, count, 1), widest, balanced(graph, times, count, cost.sync)]
        if len(found) == 3:
            chain = np.isin(graph.kind, CHAIN)
            worth = (total <= MOST * times[1][1]) & (times[1][1] > count * cost.sync)
            found += [np.where(mask, widest, 1) for mask in (chain, worth, worth & chain)]
    made = list[tuple[float, dict[int, int]]]()
    for width in {width.tobytes(): width for width in found if width.max() > 1}.values():
        _, total, least = np.array([times[n][:, t] for t, n in enumerate(width.tolist())]).T
        bound = max(total.sum() / lanes, least[critical_path(graph, least)].sum())
        made.append((bound, {key: n for key, n in zip(graph.keys.tolist(), width.tolist(), strict=True) if n > 1}))
    return sorted(made, key=lambda choice: choice[0])


def in_widths(graph: TaskGraph, cost: CostModel, lanes: int) -> dict[int, Floats]:
    """By number of parts, from 1 on, (3, tasks): the time of each task's longest part, infinite if it cannot be cut in
    so many, of all its parts, and of the shortest one."""
    found = {1: np.tile(cost.durations(graph) + cost.launch, (3, 1))}
    for count in counts_up_to(lanes):
        parts, of = to_be_priced(graph, count)
        time = cost.durations(parts) + cost.launch
        longest, shortest = np.full((2, len(graph)), np.inf)
        longest[of] = 0.0
        np.maximum.at(longest, of, time)
        np.minimum.at(shortest, of, time)
        found[count] = np.stack([longest, np.bincount(of, time, len(graph)), shortest])
    return found


def balanced(graph: TaskGraph, times: Mapping[int, Floats], lanes: int, sync: float) -> Ints:
    """The width of each task, so that the critical path takes hardly longer than a lane's share of all work: as long as
    it does, its tasks get more parts, first those that shorten it most for the work that this adds (allotment as in
    CPA, by measured times: Radulescu and van Gemund, 2001). `times`: of `in_widths`."""
    width, now = np.ones(len(graph), np.int64), times[1].copy()
    while True:
        before, path, better = width.copy(), critical_path(graph, now[0]), list[tuple[float, int, int]]()
        for t in path:
            count = min((n for n in times if width[t] < n <= lanes and times[n][0, t] < np.inf), default=0)
            if count:
                less, added = now[0, t] - times[count][0, t], times[count][1, t] - now[1, t]
                better.append((less - sync - added / lanes, t, count))
        for gain, t, count in sorted(better, reverse=True):
            if gain <= 0 or now[0, path].sum() <= now[1].sum() / lanes:
                break
            width[t], now[:, t] = count, times[count][:, t]
        if (width == before).all():
            return width
