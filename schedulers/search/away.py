"""How much of a step is offloaded (`minidl.passes.offload`), and beside how many tasks copies run.

Without a memory limit everything that is asked for leaves, and copies begin as early and come back as late as the least
peak allows. Within a limit the plan with the shortest step is chosen: for each window the fewest that must leave,
those first that are away for the longest (PipeOffload: Wan, Qi, Huang, Lin, 2025).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import numpy as np

from ...core.machine import Machine, PlanError, shorten
from ...core.placement import Refused
from ...core.schedule import Schedule
from ...core.tasks import COPIES, Kind
from ...passes.choices import Choices
from ...passes.draft import ALONE, Draft
from ...passes.every import OF_A_PLAN, through
from ...passes.offload import EACH, Moves
from ...plans.memory import MemoryLimitError
from ...plans.plan import PipelinePlan, Plan
from ...pricing.cost import CostModel
from ..pipeline.hint import WORDS
from ..pipeline.proof import prove
from ..saved import AWAY

WINDOWS = (0, 1, 2, 4, 8)  #: that are tried


def planned(what: str, cost: Any, limit: int | None, make: Callable[[int | None], Plan]) -> Plan:
    """The plan that offloads `what`: none, activations, states, or all. `make`: the plan without, within a limit.
    Raises PlanError for anything else, and MemoryLimitError with the least that can be had."""
    if what not in EACH:
        raise PlanError(f"offload is {shorten(what)}; it must be one of {', '.join(EACH)}")
    if what == "none":
        return make(limit)
    whole = make(None)
    there = whole.choices.moves  # of a saved order
    if max(whole.peak_bytes, default=np.inf) <= limit if limit is not None else there and there.what == what:
        return whole.with_known(limit=limit)
    if there:
        raise PlanError(f"offload: {whole.scheduler} already offloads {there.what}; leave --offload out, or give the "
                        f"plan without it" + (f" (it needs {max(whole.peak_bytes):,} bytes)" if limit else ""))
    return offloading(whole, cost)(what, limit)


def offloading(whole: Plan, cost: CostModel) -> Callable[[str, int | None], Plan]:
    """A function of what is offloaded and a limit below the plan's peak, to the plan that offloads all with the least
    peak, or within the limit the fastest one. It raises Refused if nothing can leave, and MemoryLimitError with the
    least that can be had."""
    @cache
    def made(what: str, window: int, most: int | None = None) -> Plan:
        return moved(whole, cost, None, Moves(what, window, most))

    def best(what: str, limit: int | None) -> Plan:
        found, refused, least, peak = list[Plan](), list[Refused](), list[int](), max(whole.peak_bytes, default=0)
        most = 1  # with a wider window memory is away for less time, so that no fewer must leave
        for window in WINDOWS:
            try:
                every = made(what, window)
            except Refused as error:  # of a wide window: nothing is away for so long
                refused.append(error)
                continue
            least.append(max(every.peak_bytes))
            count = int((every.graph.kind == Kind.D).sum())
            if limit is None or least[-1] <= limit:
                found.append(every)
            if limit is not None and least[-1] <= limit:
                some = range(most, count)
                most += bisect_left(some, True, key=lambda n: max(made(what, window, n).peak_bytes) <= limit)
                found += [made(what, window, most)] * (most in some)
            elif limit is not None and window == WINDOWS[0]:  # copies need places to which they come back
                fewer = [made(what, window, 1 << i) for i in range(count.bit_length())]
                least += [max(plan.peak_bytes) for plan in fewer]
                found += [plan for plan in fewer if max(plan.peak_bytes) <= limit]
            if max(every.peak_bytes) > max(limit or 0, min(least)):
                break  # wider windows need more memory
        if len(refused) == len(WINDOWS):
            raise refused[0]
        if not found:
            raise MemoryLimitError(f"no plan fits the limit of {limit:,} bytes: without offloading it needs {peak:,}, "
                                   f"and the least that can be had is {min(peak, *least):,}", min(peak, *least))
        best = min(found, key=lambda plan: (0 if limit else max(plan.peak_bytes), plan.step))
        out, back = (int(best.graph.bytes[best.graph.kind == kind].sum()) for kind in COPIES)
        again = "and back again" if back == out else f"and {back:,} back"
        return best.with_known(limit=limit, remarks=(
            *best.remarks, f"{out:,} bytes a step are copied out, {again}: {max(best.peak_bytes):,} bytes in place of "
            f"{peak:,}, and {best.step / whole.step - 1:.1%} more time a step predicted"))

    return best


def moved(plan: Plan, cost: CostModel | None, limit: int | None, moves: Moves, order: Schedule | None = None) -> Plan:
    """The proved plan with copies out and back, within a limit. `cost`: of the copies. `order`: the plan's order with
    the copies, by default each as soon as it can."""
    if plan.synthetic:
        raise PlanError("offload needs a recorded step: tasks on given times have no memory")
    if plan.choices.order != "fixed":
        raise Refused(WORDS, "copies of memory that leaves have their place in an order", "leave --offload out")
    draft = Draft(plan.scheduler, plan.graph, Machine(), cost or plan.cost, getattr(plan, "placement", ALONE),
                  plan.cost.durations(plan.graph), plan.graph.unit, plan.stale, schedule=plan.schedule,
                  versions=getattr(plan, "versions", None))
    draft = through(OF_A_PLAN, draft, Choices(moves=moves))
    copies = np.isin(draft.graph.kind, COPIES)
    times = {draft.graph.name(t): float(draft.time[t]) - plan.cost.launch for t in np.flatnonzero(copies).tolist()}
    notes = {**plan.schedule.notes, AWAY: json.dumps(asdict(moves))}
    found = replace(plan, graph=draft.graph, schedule=replace(order or draft.order, notes=notes, slots=None),
                    within=None, cost=replace(plan.cost, tasks={**plan.cost.tasks, **times}), limit=limit,
                    choices=replace(plan.choices, moves=moves))
    return prove(replace(found, versions=draft.versions)) if isinstance(found, PipelinePlan) else found.divided()
