"""How many weight gradients wait for each other (`minidl.passes.group`), by the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...core.graph import TaskGraph
from ...core.placement import Refused
from ...passes.group import companies
from ...plans.memory import MemoryLimitError
from ...plans.plan import Plan
from ...pricing.cost import CostModel
from ..multi_region import LEAST
from ..single import MARGIN

STEP = 2  #: from one size of groups to the next


def fastest(graph: TaskGraph, cost: CostModel, plan: Callable[[int | None], Plan]) -> Plan:
    """The fastest of the plans without groups and with groups of at most 2, 4, 8, .. members; of those that are
    equally fast, the one that needs least memory. By measured costs, which are not exact, groups must save more than
    MARGIN of a step."""
    alone = plan(None)
    most = max(map(len, companies(graph, len(graph) + 1)), default=1)
    found, size = list[tuple[int, Plan]](), 1
    while size < most:
        size *= STEP
        try:
            found.append((size, plan(size)))
        except (MemoryLimitError, Refused):
            break  # larger groups hold more memory
    bar = alone.step * (1 - (MARGIN if cost.source == "measured" else 1e-9))
    better = [pair for pair in found if pair[1].step < bar]
    if not better:
        return replace(alone, remarks=(*alone.remarks, "weight gradients do not wait for company: no group is "
                                       "predicted to be faster"))
    least = min(made.step for _, made in better) * (1 + LEAST)
    size, best = min((pair for pair in better if pair[1].step <= least), key=lambda pair: max(pair[1].peak_bytes))
    return replace(best, remarks=(*best.remarks, f"groups of at most {size} weight gradients are predicted to take "
                                  f"{best.step / alone.step:.1%} of the time without groups"))
