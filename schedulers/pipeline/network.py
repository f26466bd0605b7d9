"""Plans of recorded networks: by a policy, or for an order that somebody wrote.

The network is cut in stages, a policy orders these, and what the network has beside (updates, sums over replicas, the
weights that stale stages keep) joins the order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import Signature, getdoc, signature
from typing import Any

import numpy as np

from ...graph import Floats, Ints, TaskGraph
from ...passes.rewrite import fuse, sums
from ...plans import Machine, Plan, Versions
from ...pricing.cost import CostModel
from ...schedule import Schedule
from ...tasks import Kind
from .follow import with_followers
from .joint import Arrangement
from .joint import notes as notes_on_arrangements
from .models import Stages, balanced, cut
from .placement import PipelineError, Placement
from .planner import placed, with_notes
from .policies import Policy, place, policy, title
from .post_validation import post_validated, waits_for_all
from .pricing import chained
from .problem import Problem, check_numbers
from .proof import chunks_in, prove, read_plan
from .replicas import add_all_reduces, add_sums_between_updates
from .slices import slices_in
from .stages import fused_in
from .steady_state import steady_order, with_updates
from .versions import updates, versions_of


def plan_network(graph: TaskGraph, policy_or_name: str | Policy, cost: CostModel, machine: Machine, *,
                 chunks: int | None = None, stage_of_unit: Ints | None = None, all_reduces: str | None = None,
                 part_bytes: int | None = None, barrier: bool | None = None, **options: Any) -> Plan:
    """A policy's plan for a recorded step, not proved yet. The plan's `cost` has the times of its tasks.

    The step's micro-batches are those it was recorded with. Stages are balanced by `cost`, or given. Updates and the
    graph's other tasks come last on the rank of their stage. With replicas, each stage's gradients are summed over them
    before its update: `all_reduces` (the order) and `part_bytes` as for `add_all_reduces`. `barrier`: True if updates
    that need values of all stages, to clip or to scale the loss, wait for these values; False if they are validated in
    the next step. By default they wait, unless the policy's source has no barrier and the step is shorter without it.
    Raises PipelineError if the network cannot be cut into these stages.
    """
    chosen, name = policy(policy_or_name), title(policy_or_name)
    placement, cap = place(chosen, machine.ranks, chunks), machine.activation_cap
    summing = {"all_reduces": all_reduces, "part_bytes": part_bytes}
    told = {option: value for option, value in summing.items() if value is not None}
    if told and machine.replicas == 1:
        raise PipelineError(f"{name}: {min(told)} is for several replicas of a pipeline; there is one")
    if told and chosen.stale:
        raise PipelineError(f"{name} sums gradients before each of its updates, so {min(told)} has no effect")
    slices = slices_in(graph)
    _check_slices(name, chosen, slices, options)
    if chosen.arranges is not None:
        return _arranged(graph, name, chosen.arranges, cost, machine, placement, stage_of_unit,
                         {"all_reduces": all_reduces, "part_bytes": part_bytes, "barrier": barrier})
    if chosen.stale and sums(graph).any():
        raise PipelineError(f"{name} updates several times in a step, before all stages have their gradients; it "
                            f"cannot clip by the global norm")
    micro_batches = int(graph.micro_batch.max(initial=0)) + 1
    check_numbers(placement.stages, micro_batches, cap)
    stages = cut(graph, cost, placement.stages, stage_of_unit, placement.table, chosen.stale)
    each = int(options.get("mini_batches", 1))  # policies with mini-batches order several of them
    problem = _problem(stages.graph, stages.time, placement, micro_batches // (each * slices), cost, cap)
    best, tried = placed(name, chosen, problem, options)
    if best is not placement:
        placement, problem = best, replace(problem, placement=best)
        stages = cut(graph, cost, placement.stages, stage_of_unit, placement.table)
    notes: dict[str, Any] = {}
    versions: Versions | None = None
    if chosen.stale:
        schedule, placement, versions = steady_order(name, chosen, problem, options)
        if placement.parts is not None:
            stages = cut(graph, cost, placement.stages, stage_of_unit, placement.parts[Kind.U, 0], stale=True)
        stages, placement = with_followers(stages, placement)
    else:
        made = chosen.ordered(problem, options | ({"slices": slices} if chosen.sliced else {}))
        if isinstance(made, Plan):
            if not chosen.sliced:
                raise PipelineError(f"{name} makes its own graph and cannot order a recorded graph")
            made = made.schedule, dict(made.notes)
        schedule, notes = with_notes(made, tried)
    joint = fused_in(schedule, placement.stages, micro_batches)
    merged = fuse(stages.graph, np.broadcast_to(joint, (placement.stages, micro_batches)))
    cost = stages.cost(merged, cost)
    if versions is None:
        ordered = _completed(merged, schedule, placement)
    else:
        _check_updates(name, merged, versions)
        merged, ordered, versions = with_updates(name, merged, schedule, placement, versions)
    if machine.replicas > 1 and versions is not None:
        merged, together, cost = add_sums_between_updates(merged, ordered, cost, machine)
        ordered, versions = together, versions_of(ordered, versions, together)
    elif machine.replicas > 1:
        merged, ordered, cost = add_all_reduces(merged, ordered, cost, machine, all_reduces or "fifo", part_bytes)
    if _may_validate(chosen, merged, barrier):
        merged, ordered, cost = _validated(merged, ordered, cost, must=barrier is not None)
    return Plan(name, merged, ordered, cost, machine.size, machine.memory_limit,
                options | told | notes, placement=placement, micro_batches=micro_batches, cap=cap,
                kept=options.get("kept", 1.0), slices=slices, versions=versions)


def _check_slices(name: str, chosen: Policy, slices: int, options: Mapping[str, Any]) -> None:
    """Raises PipelineError where the policy orders another number of slices than those of the step."""
    asked = options.get("slices", slices)
    if chosen.sliced and asked != slices:
        raise PipelineError(f"{name}: {asked} slices are asked for, but this step was recorded with {slices} of each "
                            f"micro-batch")
    if slices > 1 and not chosen.sliced:
        raise PipelineError(f"{name} orders whole micro-batches, but this step was recorded with {slices} slices of "
                            f"each; use seq1f1b")


def _arranged(graph: TaskGraph, name: str, arranges: Callable[[Problem], list[Arrangement]], cost: CostModel,
              machine: Machine, layers: Placement, layer_of_unit: Ints | None, told: dict[str, Any]) -> Plan:
    """The plan of the fastest arrangement within the machine's limits. A layer is a stage of `layers`: balanced by
    `cost`, or given. Raises PipelineError if no arrangement is within the limits."""
    layer = balanced(graph, cost, layers.stages) if layer_of_unit is None else np.asarray(layer_of_unit)
    micro_batches = int(graph.micro_batch.max(initial=0)) + 1
    check_numbers(layers.stages, micro_batches, machine.activation_cap)
    cut_up = cut(graph, cost, layers.stages, layer)
    found = arranges(_problem(cut_up.graph, cut_up.time, layers, micro_batches, cost, machine.activation_cap))
    refused: dict[tuple[str, int], str] = {}  # a cut that differs by one layer would be refused too
    for best in found:
        kind = best.policy, best.problem.stages
        if kind in refused:
            continue
        chosen = policy(best.policy)
        fixed: dict[str, Any] = {"group": 1} if "group" in chosen.options else {}
        try:
            made = prove(plan_network(graph, chosen, cost, machine, chunks=best.problem.chunks,
                                      stage_of_unit=best.stage_of_layer[layer], **told, **fixed))
            return replace(made, scheduler=name, notes=notes_on_arrangements(found, best))
        except ValueError as error:  # above a limit, or an impossible cut
            refused[kind] = getattr(error, "message", None) or str(error)
    raise PipelineError(f"{name}: no arrangement is possible; the fastest: {next(iter(refused.values()))}")


def plan_schedule(graph: TaskGraph, schedule: Schedule, cost: CostModel, machine: Machine, *,
                  chunks: int | None = None) -> Plan:
    """The proved plan of a recorded step for an order of unknown origin. Stages are balanced by `cost`; their placement
    follows from the order. Raises ScheduleError, PipelineError or MemoryLimitError."""
    count = machine.ranks * (chunks or chunks_in(schedule, machine.ranks))
    micro_batches = int(graph.micro_batch.max(initial=0)) + 1

    def read(stages: Stages) -> Plan:
        return read_plan(schedule, machine.ranks, micro_batches, chunks, machine.activation_cap, graph=stages.graph,
                         limit=machine.memory_limit, replicas=machine.replicas)

    found = read(cut(graph, cost, count))  # its placement says which stages share a rank's scalars
    stages = cut(graph, cost, count, rank_of_stage=found.placement.table)
    made = read(stages)
    return replace(made, cost=stages.cost(made.graph, cost))


def _may_validate(chosen: Policy, graph: TaskGraph, barrier: bool | None) -> bool:
    """Whether updates may be validated in the next step. Raises PipelineError for a choice that has no effect."""
    if barrier is None:
        return chosen.validates and waits_for_all(graph)
    if not waits_for_all(graph):
        raise PipelineError("barrier has no effect: the step neither clips nor scales its loss, so no update waits for "
                            "other stages")
    return not barrier


def _validated(graph: TaskGraph, schedule: Schedule, cost: CostModel,
               must: bool) -> tuple[TaskGraph, Schedule, CostModel]:
    """The step without a barrier at the optimizer, if that is possible, and shorter or required (`must`)."""
    try:
        without = post_validated(graph, schedule, cost)
    except PipelineError:
        if must:
            raise
        return graph, schedule, cost
    return without if must or chained(*without) < chained(graph, schedule, cost) else (graph, schedule, cost)


def _check_updates(name: str, graph: TaskGraph, versions: Versions) -> None:
    """Raises PipelineError for a step whose updates come at other times than the policy's."""
    after = {int(i) for i in graph.micro_batch[updates(graph)]}
    count = int(graph.micro_batch[graph.kind == Kind.F].max()) + 1
    if after != (set(range(versions.every - 1, count, versions.every)) if versions.every < count else {0}):
        raise PipelineError(f"{name} updates after every {versions.every} of {count} micro-batches; this step was "
                            f"recorded with other updates (a scheduler of your own needs --update-every "
                            f"{versions.every})")


def _problem(coarse: TaskGraph, time: Floats, placement: Placement, micro_batches: int, cost: CostModel,
             cap: float | None) -> Problem:
    """The problem with the mean times per stage, and the mean time of a message as latency. A stage without O or W gets
    a tiny time for it, so that policies can plan."""
    count = int(coarse.micro_batch[coarse.kind == Kind.F].max(initial=0)) + 1  # in all mini-batches of the step

    def mean(kind: Kind) -> Floats:
        mine = coarse.kind == kind
        return np.maximum(np.bincount(coarse.unit[mine], time[mine], placement.stages) / count, 1e-9)

    latency = float(cost.link.time(_message_bytes(coarse)))
    return Problem(placement, micro_batches, mean(Kind.F), mean(Kind.O), mean(Kind.W), latency, cap)


def _message_bytes(coarse: TaskGraph) -> float:
    """The mean bytes that a stage's forward or output gradient sends to another stage."""
    reader, buffer = coarse.reads.row_of_each(), coarse.reads.ids
    maker = np.full(len(coarse.buffer_bytes), -1, np.int64)
    maker[coarse.writes.ids] = coarse.writes.row_of_each()
    made = maker[buffer]
    crosses = (made >= 0) & np.isin(coarse.kind[made], (Kind.F, Kind.O)) & (coarse.unit[made] != coarse.unit[reader])
    sizes = coarse.buffer_bytes[np.unique(buffer[crosses])]
    return float(sizes.mean()) if len(sizes) else 0.0


def _completed(graph: TaskGraph, schedule: Schedule, placement: Placement) -> Schedule:
    """The policy's order without tasks that the graph lacks, and with the graph's other tasks last on the rank of their
    stage."""
    known = graph.find(schedule.keys) >= 0
    joined = None if schedule.joined is None else np.asarray(schedule.joined, bool) & np.append(False, known[:-1])
    lane = schedule.lane_of_each()
    rest = np.setdiff1d(np.arange(len(graph)), graph.find(schedule.keys[known]))
    home = placement.home(graph.keys[rest], int(graph.micro_batch.max(initial=0)) + 1)
    mine = [known & (lane == r) for r in range(placement.ranks)]
    keys = [np.concatenate([schedule.keys[m], graph.keys[rest[home == r]]]) for r, m in enumerate(mine)]
    pairs = None if joined is None else np.concatenate(
        [np.concatenate([joined[m], np.zeros(int((home == r).sum()), bool)]) for r, m in enumerate(mine)])
    return Schedule(schedule.lanes, np.concatenate([[0], np.cumsum([len(k) for k in keys])]),
                    np.concatenate(keys), pairs)


def of_network(name: str) -> Callable[..., Plan]:
    """The named policy as a function `(graph, cost, machine, **options)`, for recorded steps."""
    def function(graph: TaskGraph, cost: CostModel, machine: Machine, **options: Any) -> Plan:
        return plan_network(graph, name, cost, machine, **options)

    mine = [p for p in signature(plan_network, eval_str=True).parameters.values()
            if p.kind != p.VAR_KEYWORD and p.name != "policy_or_name"]
    chosen = policy(name)
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in chosen.options.values()]
    function.__doc__ = "\n\n".join(getdoc(f) or "" for f in (chosen.versions, chosen.order) if f is not None)
    function.__signature__ = Signature([*mine, *own])  # type: ignore[attr-defined]
    return function
