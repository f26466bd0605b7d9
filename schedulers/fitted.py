"""The fastest plan within a memory limit, over kept activations, offloaded memory and, on data-parallel ranks and
replicas, shards.

Plans without copies come in the order of their steps. One that is above the limit offloads as much as it must. The
search ends at a plan whose step even without copies is not shorter than the best one that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

from ..core.graph import TaskGraph
from ..core.machine import PlanError
from ..core.placement import Refused
from ..passes.shard import Shards
from ..plans.memory import MemoryLimitError
from ..plans.plan import Plan
from . import away, kept
from .curve import kept_sets


def fastest(graph: Any, cost: Any, limit: int | None, shards: Sequence[Shards | int | str],
            make: Callable[[Collection[int], int | None, Shards | int | str], Plan]) -> Plan:
    """The plan. `make`: from the units that are computed again, a limit and shards to a plan. `shards`: those that the
    user wants, or all to try, 0 first. Raises MemoryLimitError with the least that can be had if nothing fits."""
    if limit is None or not isinstance(graph, TaskGraph):
        raise PlanError("offload auto finds the fastest plan of a recorded step within a memory limit; give both")
    whole = make((), None, shards[0])
    if (peak := max(whole.peak_bytes)) <= limit:
        return whole.with_known(limit=limit)
    found, least = list[tuple[str, Plan]](), [peak]

    def tried(words: str, call: Callable[[], Plan]) -> None:
        try:
            found.append((words, call()))
        except MemoryLimitError as error:
            least.append(error.least or peak)
        except Refused:
            pass

    def offloaded(plan: Plan) -> Plan:
        return away.planned("all", cost, limit, lambda _: plan)

    tried("recompute", lambda: kept.planned(graph, cost, limit, "auto", lambda units, cap: make(units, cap, shards[0])))
    bare = list[tuple[list[str], Plan]]()
    for level in shards:
        for how in kept_sets(graph, cost) if level == shards[0] else ("none", "sqrt"):
            words = [f"shard {level}"] * (level != shards[0]) + ["recompute"] * (how != "none")
            with suppress(Refused):
                bare.append((words, make(() if how == "none" else kept.dropped(graph, cost, how), None, level)))
    for words, plan in sorted(bare, key=lambda one: one[1].step):
        if plan.step >= min((other.step for _, other in found), default=inf):
            break
        if max(plan.peak_bytes) <= limit:
            tried(" and ".join(words), partial(plan.with_known, limit=limit))
        else:
            tried(" and ".join([*words, "offload"]), partial(offloaded, plan))
    if not found:
        raise MemoryLimitError(f"no plan fits the limit of {limit:,} bytes: with all activations kept it needs "
                               f"{peak:,}, and the least that can be had is {min(least):,}", min(least))
    shortest = dict[str, Plan]()
    for name, plan in sorted(found, key=lambda one: one[1].step):
        shortest.setdefault(name, plan)
    best, chosen = next(iter(shortest.items()))
    each = ", ".join(f"{name} {plan.step / whole.step - 1:+.1%}" for name, plan in shortest.items())
    return chosen.with_known(remarks=(*chosen.remarks, f"of what fits {limit:,} bytes in place of {peak:,}, {best} is "
                                      f"the fastest predicted: {each} time a step"))
