"""The one way to a plan: a scheduler orders tasks, and `plan` makes the plan and proves it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.graph import TaskGraph
from ..core.machine import Machine, PlanError, shorten
from ..core.placement import PipelineError, Refused
from ..core.schedule import Schedule, ScheduleError
from ..core.tasks import widths
from ..passes.draft import Draft
from ..passes.every import AFTER_THE_ORDER, BEFORE_THE_ORDER, through
from ..passes.shard import Shards, costs, searched
from ..passes.shares import WHAT
from ..plans.plan import PipelinePlan, Plan
from ..pricing.cost import CostModel, most_streams
from ..system.loading import foreseen, line_of, text_of
from . import away
from .curve import Level, fastest
from .data_parallel import Policy as OnAllRanks
from .kept import dropped_by, planned
from .layer_times import with_communication
from .ordered import Ordered, as_ordered, taken
from .pipeline.network import arranged, plan_network, read_network
from .pipeline.policy import Policy
from .pipeline.proof import CapError, as_torch_does, prove
from .pipeline.synthetic import Pipeline, plan_times, read_times
from .registry import KINDS, Function, Scheduler, find, made_by, of_function
from .saved import PAIRS, cut_in, kind_of, policy_notes, sums_in, sums_notes
from .wide import Parts, in_parts


def plan(graph: TaskGraph | Pipeline, policy: str | Function | Policy | Schedule | Scheduler,
         cost: CostModel | None = None, machine: Machine | None = None, *,
         recompute: str | Collection[int] = "none", split: int | str | Mapping[str, int] = 1,
         shard: Shards | int | str = 0, offload: str = "none", **options: Any) -> Plan:
    """The plan that a policy makes of a recorded graph, or of a pipeline on given times, proved: it is valid on every
    rank and within the machine's limits.

    `policy`: a name, a function, or a schedule. `cost`: by default from flops and bytes; of a pipeline on given times,
    those. `recompute`: none, all, sqrt, auto, or the layers that keep their activations (`minidl.schedulers.kept`).
    `split`: the number of parts of each task that can be cut, or of some by name, or auto (`minidl.schedulers.wide`).
    `shard`: what data-parallel ranks, or the replicas of a pipeline, share out: 1 the optimizer's states, 2 gradients
    as well, 3 parameters as well, as in `3,prefetch=1,keep=0+4` (`minidl.passes.shard`). `offload`: none, activations,
    states or all, the memory that leaves (`minidl.schedulers.away`); auto, with `recompute="auto"`: the fastest of all
    these, and of shards if `shard` is 0, within the machine's limit (`minidl.schedulers.curve`).
    `options`: the policy's. For a schedule of stages: `chunks`, and `like`, a plan by the policy that made it, if that
    says more than an order (which weights a task reads, where slices begin).

    Raises ValueError if the policy cannot plan this, PlanError for arguments that make no sense, PipelineError where
    the graph cannot be a pipeline, ScheduleError for a schedule that is not valid, and MemoryLimitError for a plan
    above the limit.
    """
    given = isinstance(graph, Pipeline)  # times
    cost = CostModel.analytic() if cost is None and not given else cost
    machine = Machine() if machine is None else machine
    for name, value, kinds in (("graph", graph, (TaskGraph, Pipeline)), ("cost", cost, (CostModel,)),
                               ("machine", machine, (Machine,))):
        if not isinstance(value, kinds) and not (name == "cost" and given and value is None):
            raise PlanError(f"{name} is {shorten(value)}; it must be a "
                            f"{' or a '.join(kind.__name__ for kind in kinds)}")
    if not isinstance(policy, str | Schedule | Scheduler) and not callable(policy):
        raise PlanError(f"policy is {shorten(policy)}; it must be a scheduler's name, a function or a Schedule")

    def made(dropped: Collection[int], limit: int | None, level: Level = shard) -> Plan:
        def whole(parts: Parts, limit: int | None) -> Plan:
            chosen = find(policy, "pipeline" if given else None) if isinstance(policy, str) else policy
            order, plain = away.apart(chosen)
            free = replace(machine, memory_limit=limit if order is None else None)
            made = _plan(graph, plain, cost, free, options, {"dropped": dropped, "parts": parts}, Shards.of(level))
            return made if order is None else away.moved(made, cost, limit, away.moves_in(order), order)

        def cut(parts: Parts) -> Plan:
            what = "none" if offload == "auto" else offload
            return away.planned(what, cost, limit, lambda limit: whole(parts, limit))

        return cut(1) if split == 1 else in_parts(
            graph, split, cost, options.get("streams") or (2 if cost is None else most_streams(cost)), cut)

    try:
        if offload == "auto":
            if recompute != "auto":
                raise PlanError("offload auto goes with recompute auto")
            chosen = find(policy, "pipeline" if given else None) if isinstance(policy, str) else policy
            if not isinstance(getattr(chosen, "function", chosen), Schedule):
                return fastest(graph, cost, machine.memory_limit, levels(chosen, machine, shard),
                               lambda how, cap, level: planned(graph, cost, cap, how, lambda units, limit: made(
                                   units, limit, level)))
        return planned(graph, cost, machine.memory_limit, recompute, made)
    except MemoryError as error:
        told = "".join(f", {option}={shorten(value)}" for option, value in options.items())
        raise (PipelineError if given else PlanError)(
            f"scheduler {_name(policy)} cannot plan this {'pipeline' if given else 'graph'} on {machine.size} ranks"
            f"{told}: there is not enough memory for this: {error}") from error


def levels(policy: Any, machine: Machine, shard: Level) -> Sequence[Level]:
    """The shards to try: those that the user wants, else all if there are ranks that could share out, 0 first."""
    alike = {"data": machine.ranks, "pipeline": machine.replicas}
    return range(4) if not shard and alike.get(getattr(policy, "parallel", ""), 1) > 1 else (shard,)


def _plan(graph: Any, policy: Any, cost: Any, machine: Machine, options: Mapping[str, Any],
          passes: Mapping[str, Any], shard: Shards) -> Plan:
    kind = "pipeline" if isinstance(graph, Pipeline) else None
    if isinstance(policy, Schedule):
        known = kind_of(policy)
        if not kind and known != "pipeline" and made_by(policy)[0] is None:  # of this graph's tasks, sums included
            draft = through(BEFORE_THE_ORDER, Draft.of(graph, cost, machine, name="given"), _asked_by(policy))
            return Plan("given", draft.graph, policy, cost, machine.size, machine.memory_limit,
                        remarks=policy.slips).divided()
        chosen = Scheduler("given", kind or known, policy)
    elif isinstance(policy, str):
        chosen = find(policy, kind)
    else:
        chosen = policy if isinstance(policy, Scheduler) else of_function(_name(policy), policy, kind)
    own = options if kind is None else getattr(chosen.function, "options", ())
    chosen.check({option: value for option, value in options.items() if option in own})
    if kind is None:
        how = chosen.function
        options = {**options, **(_asked_by(how) if isinstance(how, Schedule) else passes)}
        if isinstance(how, Schedule):  # whose notes say what is shared out
            noted = Shards.of(how.notes.get(WHAT, "0"))
            shard = noted if shard.level in (0, noted.level) else shard
    if shard.level and (kind or chosen.parallel not in ("data", "pipeline")):
        raise Refused(WHAT, f"{chosen.name} is no policy for a network on ranks",
                      "give --parallel data with --scheduler barrier, buckets or no_overlap, or a pipeline --replicas, "
                      "or leave --shard out")
    if shard.level:
        options = {**options, "shard": shard}
    made = replace(_called(chosen, graph, cost, machine, options), limit=machine.memory_limit)
    made = replace(made, remarks=(*made.remarks, *(chosen.function.slips if isinstance(chosen.function, Schedule) else
                                                   ())))
    if not isinstance(made, PipelinePlan):
        return made.divided()
    try:
        return prove(replace(made, scheduler=chosen.name, cap=machine.activation_cap))
    except ScheduleError as error:
        if isinstance(chosen.function, Schedule) or (kind and not isinstance(error, CapError)):
            raise  # with the grid in which the task is marked
        raise PipelineError(f"{chosen.name}: {error.message}") from None


def _staged(graph: Any, chosen: Scheduler, cost: Any, machine: Machine, options: Mapping[str, Any]) -> PipelinePlan:
    """The plan of a pipeline."""
    how, said = chosen.function, tuple[str, ...]()
    if isinstance(how, Schedule):
        runs = not isinstance(graph, Pipeline)
        micro_batches = int(graph.micro_batch.max(initial=0)) + 1 if runs else graph.micro_batches
        how, said = as_torch_does(how, machine.ranks, micro_batches, options.get("chunks"), runs)
    if isinstance(graph, Pipeline):
        if isinstance(how, Schedule):
            return read_times(graph, how, cost, machine, **options).with_known(remarks=said)
        if isinstance(how, Policy):
            return plan_times(graph, how, cost, machine, **options)
        raise PlanError(f"scheduler {chosen.name} is {KINDS[chosen.parallel]}, not {KINDS['pipeline']}")
    if isinstance(how, Policy):
        if how.arranges is None:
            return plan_network(graph, how, cost, machine, **options)
        return arranged(graph, how, cost, machine, lambda name: find(name, "pipeline").staged, **options)
    assert isinstance(how, Schedule)
    under, known = made_by(how)
    if under is not None and under.parallel == "pipeline" and options.get("like") is None:
        known |= {"stage_of_unit": cut_in(how, graph), "dropped": options["dropped"]}
        options = {**options, "like": plan_network(graph, under.staged, cost, machine, **known)}
    return read_network(graph, how, cost, machine, **options).with_known(remarks=said)


def _uncut(chosen: Scheduler, policy: Function | OnAllRanks | Schedule, graph: TaskGraph, cost: CostModel,
           machine: Machine, dropped: Collection[int], parts: int | Mapping[int, int], shard: Shards | None = None,
           **options: Any) -> Plan:
    """The plan of a step that is not cut into stages. If an order leaves something open, its policy says it."""
    name, order = chosen.name, policy if isinstance(policy, Schedule) else None
    if order is not None:
        under, known = made_by(order)
        if under is not None:
            chosen, policy, options = under, under.function, known
            assert not isinstance(policy, Policy)
    sums = (policy.sums and policy.sums(graph, **taken(policy.sums, options)) if isinstance(policy, OnAllRanks)
            else sums_in(policy) if isinstance(policy, Schedule) and chosen.parallel == "data" else None)
    draft = Draft.of(graph, cost, machine, sums, name)
    if chosen.rewrite is not None:
        draft = chosen.rewrite(draft, **taken(chosen.rewrite, options))
    draft = through(BEFORE_THE_ORDER, draft, {"dropped": dropped, "parts": parts})
    if chosen.rewrite is not None:
        cost = draft.priced
    if sums is not None and machine.collective is not None:
        cost = with_communication(draft.graph, cost, machine.collective)
    if isinstance(policy, Schedule):
        found = Ordered(policy)
    else:
        try:
            inspect.signature(policy).bind(graph, cost, machine, **options)
        except TypeError as error:
            raise PlanError(f"scheduler {chosen.name}: {error}; a scheduler is a function of (graph, cost, machine)"
                            ) from None
        given = replace(cost, tasks=dict(cost.tasks), kinds=dict(cost.kinds)) if chosen.own else cost  # it may change
        found = as_ordered(policy(draft.graph, given, machine, **options), chosen.name, policy)
    notes = {} if sums is None else sums_notes(sums)
    if not chosen.own and not chosen.exact:
        notes |= policy_notes(chosen.name, options)
    if cost.corun is not None and not isinstance(policy, Schedule):
        notes |= {**found.schedule.notes, PAIRS: "priced"}

    def whole(found: Ordered, limit: int | None) -> Plan:
        schedule = found.schedule if order is None else order
        schedule = replace(schedule, notes=notes) if notes else schedule
        made, price, remarks = replace(draft, schedule=schedule, planned=Plan), cost, found.remarks
        made = through(AFTER_THE_ORDER, made, {"shard": shard or 0})
        if shard:
            price = costs(made, cost)
            remarks += searched(made, shard)
        less = found.within
        return Plan(name, made.graph, made.order, price, machine.size, limit, {**options, **found.notes}, remarks,
                    less and (lambda limit: whole(less(limit), limit).divided()))

    return whole(found, machine.memory_limit)


def _asked_by(schedule: Schedule) -> dict[str, Any]:
    """The options of passes that an order shows: what is computed again, and which tasks are in parts."""
    return {"dropped": dropped_by(schedule), "parts": widths(schedule.keys)}


def _name(policy: str | Function | Policy | Schedule | Scheduler) -> str:
    if isinstance(policy, str):
        return policy
    return str(getattr(policy, "name", None) or getattr(policy, "__name__", type(policy).__name__))


def _called(chosen: Scheduler, graph: Any, cost: Any, machine: Machine, options: Mapping[str, Any]) -> Plan:
    """The policy's plan, not proved yet. An error in a user's policy becomes a PlanError that names it and the line."""
    here = os.getcwd() if chosen.own else None
    try:
        if isinstance(graph, Pipeline) or chosen.parallel == "pipeline":
            return _staged(graph, chosen, cost, machine, options)
        assert not isinstance(chosen.function, Policy)
        return _uncut(chosen, chosen.function, graph, cost, machine, **options)
    except Exception as error:
        where = line_of(error)
        clear = isinstance(error, PipelineError) or (isinstance(error, PlanError) and not where)
        if clear or not chosen.own or isinstance(chosen.function, Schedule) or not foreseen(error):
            raise
        what = error.message if isinstance(error, ScheduleError) else f"{type(error).__name__}: {text_of(error)}"
        raise PlanError(f"scheduler {chosen.name} failed: {what}{f' ({where})' if where else ''}") from error
    finally:
        if here is not None:
            os.chdir(here)  # names of files stay what they are, even if a user's policy has gone to another folder
