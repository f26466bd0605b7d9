"""Searches for what is chosen besides the order: each proposes choices, and takes the plan that the one road makes.

Nothing outside this room knows them but the door (`minidl.plan`) and the command line's curve.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ...core.machine import Machine, PlanError
from ...core.placement import PipelineError
from ...core.schedule import Schedule
from ...passes.choices import Choices, Parts
from ...passes.every import BEFORE_THE_ORDER, through
from ...passes.group import WHAT as WAITING
from ...passes.shard import Shards
from ...plans.plan import Plan
from ...pricing.cost import most_streams
from ...system.loading import foreseen
from ..pipeline.choice import reason
from ..pipeline.joint import notes
from ..pipeline.network import Network
from ..pipeline.synthetic import Pipeline
from ..registry import Scheduler, find
from . import away, company, kept
from .curve import Level, fastest
from .wide import in_parts

Make = Callable[[Choices, int | None], Plan]  #: from choices and a limit in bytes to the plan, proved


def searched(made: Callable[..., Plan], graph: Any, chosen: Scheduler, cost: Any, machine: Machine, first: Choices,
             recompute: bool, split: int | str | Mapping[str, int], offload: str, lags: bool) -> Plan:
    """The plan with what is asked for besides the `first` choices, as `minidl.plan` takes it; of "auto" the fastest
    within the limit. `made`: the road to a plan. `recompute`, `lags`: whether a search finds what is computed again, or
    how late W may run. Raises PlanError for arguments that make no sense, and MemoryLimitError with the least that can
    be had."""
    if first.options.get(WAITING) == "auto":
        return company.fastest(graph, cost, lambda size: searched(
            made, graph, chosen, cost, machine, replace(first, options={**first.options, WAITING: size}), recompute,
            split, offload, lags))
    arranges = not isinstance(graph, Pipeline) and getattr(chosen.function, "arranges", None) is not None
    make: Make = partial(partial(arranged, made) if arranges else made, graph, chosen, cost, machine)
    limit = machine.memory_limit
    if not recompute and split == 1 and offload == "none" and not lags:
        return make(first, limit)
    lanes = first.options.get("streams") or (2 if cost is None else most_streams(cost))

    def of(dropped: Collection[int], limit: int | None, level: Level = first.shard, lag: int | None = None) -> Plan:
        def whole(parts: Parts) -> Plan:
            options = first.options if lag is None else {**first.options, "lag": lag}
            chosen = replace(first, dropped=tuple(dropped), parts=parts, shard=Shards.of(level), options=options)
            return away.planned("none" if offload == "auto" else offload, cost, limit,
                                lambda limit: make(chosen, limit))

        return whole(1) if split == 1 else in_parts(graph, split, cost, lanes, whole)

    if not recompute and offload == "auto":
        raise PlanError("offload auto goes with recompute auto")
    if lags and offload != "auto":
        raise PlanError("lag auto goes with offload auto")
    if offload != "auto" or isinstance(chosen.function, Schedule):
        return kept.planned(graph, cost, limit, "auto", of) if recompute else of(first.dropped, limit)
    shards = levels(chosen.parallel, machine, first.shard)
    return fastest(graph, cost, limit, shards, lambda how, cap, level, lag: kept.planned(
        graph, cost, cap, how, lambda dropped, limit: of(dropped, limit, level, lag)), lags)


def arranged(make: Callable[..., Plan], graph: Any, chosen: Scheduler, cost: Any, machine: Machine, choices: Choices,
             limit: int | None) -> Plan:
    """The plan of the fastest arrangement within the machine's limits, of a policy that `arranges`: cut, placement and
    policy of the stages. A layer is a stage of `chosen`: balanced by `cost`, or given. Raises PipelineError if no
    arrangement is within the limits. `make`: the road to a plan."""
    road = Network(graph, chosen, cost, replace(machine, memory_limit=limit), choices)
    layer, draft = road.stage_of_unit, through(BEFORE_THE_ORDER, road.draft(), choices)
    assert road.chosen.staged.arranges is not None
    found = road.chosen.staged.arranges(road.problem_of(draft))
    refused: dict[tuple[str, int], str] = {}  # a cut that differs by one layer would be refused too
    for best in found:
        kind = best.policy, best.problem.stages
        if kind in refused:
            continue
        policy = find(best.policy, "pipeline")
        group = {"group": 1} if "group" in policy.staged.options else {}
        try:
            plan = make(graph, policy, cost, machine, replace(
                choices, chunks=best.problem.chunks, stage_of_unit=best.stage_of_layer[layer],
                options={**choices.options, **group}), limit)
            return replace(plan, scheduler=chosen.name, notes=notes(found, best))
        except ValueError as error:  # above a limit, or an impossible cut
            if not foreseen(error):
                raise
            refused[kind] = reason(error)
    raise PipelineError(f"{chosen.name}: no arrangement is possible; the fastest: {next(iter(refused.values()))}")


def levels(parallel: str, machine: Machine, shard: Level) -> Sequence[Level]:
    """The shards to try: those that the user wants, else all if there are ranks that could share out, 0 first."""
    alike = {"data": machine.ranks, "pipeline": machine.replicas}
    return range(4) if not Shards.of(shard).level and alike.get(parallel, 1) > 1 else (shard,)
