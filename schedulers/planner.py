"""The one road to a plan: a problem goes through passes, a policy orders it, and the result is proved."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from ..core.graph import TaskGraph
from ..core.machine import Machine, PlanError, shorten
from ..core.placement import PipelineError, Refused
from ..core.schedule import Schedule, ScheduleError
from ..passes.choices import NOTHING, Choices
from ..passes.every import AFTER_THE_ORDER, BEFORE_THE_ORDER, through
from ..passes.shard import Shards
from ..passes.shares import WHAT
from ..plans.plan import PipelinePlan, Plan
from ..pricing.cost import CostModel
from .ordered import Ordered
from .pipeline.as_read import AsRead
from .pipeline.hint import check_hint, with_cap, with_chosen_sums
from .pipeline.network import Network
from .pipeline.peaks import CapError
from .pipeline.policy import Policy
from .pipeline.proof import prove
from .pipeline.synthetic import GivenTimes, Pipeline
from .registry import Scheduler, blamed, name_of, scheduler_of
from .saved import choices_in, hint_in, moves_in, slips, without_copies
from .search import searched
from .search.away import moved
from .search.kept import dropped
from .whole import Whole


def plan(graph: TaskGraph | Pipeline,
         policy: str | os.PathLike[str] | Callable[..., Any] | Policy | Schedule | Scheduler,
         cost: CostModel | None = None, machine: Machine | None = None, *, recompute: str | Collection[int] = "none",
         split: int | str | Mapping[str, int] = 1, shard: Shards | int | str = 0, offload: str = "none",
         order: str = "fixed", experts_over: str = "none", **options: Any) -> Plan:
    """The plan that a policy makes of a recorded graph, or of a pipeline on given times, proved, and within all limits.

    `policy`: a name, a function, or a schedule. `cost`: by default from flops and bytes; of a pipeline on given times,
    those. `recompute`: none, all, sqrt, auto, or the layers that keep their activations (`search/kept.py`). `split`:
    the number of parts of each task that can be cut, or of some by name, or auto (`search/wide.py`). `shard`: what
    data-parallel ranks, or the replicas of a pipeline, share out: 1 the optimizer's states, 2 gradients as well, 3
    parameters as well, as in `3,prefetch=1,keep=0+4` (`minidl.passes.shard`). `offload`: none, activations, states,
    weights or all, the memory that leaves (`search/away.py`); auto, with `recompute="auto"`: the fastest of all these,
    of shards if `shard` is 0, and with `lag="auto"` of late weight gradients (`search/curve.py`). `order`: fixed, or
    hint: ranks run their first ready task (`pipeline/hint.py`). `experts_over`: none, or data: each data-parallel rank
    has a share of the experts (`minidl.passes.experts`). `options`: the policy's, and `cap` of a pipeline. For a
    schedule of stages: `chunks`, and `like`, a plan by the policy that made it, if that says more than an order.

    Raises ValueError if the policy cannot plan this, PlanError for arguments that make no sense, PipelineError if the
    graph cannot be a pipeline, ScheduleError for an order that is not valid, MemoryLimitError above the limit.
    """
    times = isinstance(graph, Pipeline)
    cost = CostModel.analytic() if cost is None and not times else cost
    machine = Machine() if machine is None else machine
    for name, value, kinds in (("graph", graph, (TaskGraph, Pipeline)), ("cost", cost, (CostModel,)),
                               ("machine", machine, (Machine,))):
        if not isinstance(value, kinds) and not (name == "cost" and times and value is None):
            raise PlanError(f"{name} is {shorten(value)}; it must be a {' or a '.join(k.__name__ for k in kinds)}")
    try:
        if options.get("group_weights") == "none":
            del options["group_weights"]
        if lags := options.get("lag") == "auto":
            del options["lag"]  # a search finds it
        chosen = scheduler_of(policy, options, times)
        if order != "fixed":
            check_hint(order, chosen)
        again = () if recompute in ("none", "auto") else dropped(graph, cost, recompute)
        if experts_over not in ("none", "data"):
            raise PlanError(f"experts_over is {shorten(experts_over)}; it must be none or data")
        cap = None if "cap" in getattr(chosen.function, "options", ()) else options.pop("cap", None)
        choices = Choices(again, 1, Shards.of(shard) if shard else NOTHING.shard, None, options.pop("chunks", None),
                          options.pop("stage_of_unit", None), options.pop("placement", None), order, cap, experts_over,
                          options)
        return searched(made, graph, chosen, cost, machine, choices, recompute == "auto", split, offload, lags)
    except MemoryError as error:
        told = "".join(f", {option}={shorten(value)}" for option, value in options.items())
        raise (PipelineError if times else PlanError)(
            f"scheduler {name_of(policy)} cannot plan this {'pipeline' if times else 'graph'} on {machine.size} ranks"
            f"{told}: there is not enough memory for this: {error}") from error


def made(problem: Any, chosen: Scheduler, cost: Any, machine: Machine, choices: Choices, limit: int | None,
         found: Ordered | None = None) -> Plan:
    """The plan with these choices, by a policy, whose order may be `found` already, or in a given order; proved."""
    times, order = isinstance(problem, Pipeline), chosen.function
    if isinstance(order, Schedule):
        choices = hint_in(order, choices) if times else choices_in(order, choices, chosen.parallel == "none")
        if (moves := moves_in(order)) is not None:  # copies come when the bytes of the plan without them are known
            plain = made(problem, replace(chosen, function=without_copies(order)), cost, machine, choices, None)
            return moved(plain, cost, limit, moves, order)
    if choices.shard.level and (times or chosen.parallel == "none"):
        raise Refused(WHAT, f"{chosen.name} is no policy for a network on ranks", "give --parallel data with "
                      "--scheduler barrier, buckets or no_overlap, or a pipeline --replicas, or leave --shard out")
    kind = (Whole if chosen.parallel != "pipeline" else AsRead if isinstance(order, Schedule)
            else GivenTimes if times else Network)
    road, here = kind(problem, chosen, cost, replace(machine, memory_limit=limit), choices), chosen.own and os.getcwd()
    try:
        draft = road.draft()
        draft = draft if draft.settled else through(BEFORE_THE_ORDER, draft, choices)
        found = road.order(draft) if found is None else found
        draft = road.ordered(draft, found)
        draft = draft if draft.settled else through(AFTER_THE_ORDER, draft, road.choices)
        plan, less = road.plan(draft, found, limit), found.within
    except (Exception, SystemExit) as error:
        if (blame := blamed(chosen, error)) is error:
            raise
        raise blame from error
    finally:
        if here:
            os.chdir(here)  # names of files stay what they are, even if a user's policy has gone to another folder
    notes = slips(order) if isinstance(order, Schedule) else ()
    if times and cost is not None and (beyond := cost.beyond(plan.graph)):
        notes = *notes, f"the costs have times of tasks that this step does not have: {', '.join(beyond[:3])}"
    plan = replace(plan, choices=choices, remarks=(*plan.remarks, *notes), within=less and (lambda limit: made(
        problem, chosen, cost, machine, choices, limit, replace(less(limit), cost=found.cost))))
    same = choices.order == "fixed" and choices.cap is None
    if not isinstance(plan, PipelinePlan):
        return (plan if same else with_chosen_sums(plan)).divided()
    try:
        plan = prove(replace(plan, scheduler=chosen.name, cap=machine.activation_cap))
        return plan if same else with_cap(plan, choices.order, choices.cap)
    except ScheduleError as error:
        if isinstance(order, Schedule) or (times and not isinstance(error, CapError)):
            raise  # with the grid in which the task is marked
        raise PipelineError(f"{chosen.name}: {error.message}") from None
