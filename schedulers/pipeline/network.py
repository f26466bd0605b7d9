"""Plans of recorded networks: by a policy, or for an order that somebody wrote.

The network is cut in stages, a policy orders these, and what the network has beside (updates, sums over replicas, the
weights that stale stages keep) joins the order: `minidl.passes.every` has the list.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any

import numpy as np

from ...core.columns import Floats, Ints
from ...core.graph import TaskGraph
from ...core.machine import Machine, shorten
from ...core.placement import PipelineError, Placement, Refused
from ...core.schedule import Lane, Schedule
from ...core.tasks import COLLECTIVE, COMMUNICATION, Kind, pack, repack, unpack
from ...passes.draft import Draft
from ...passes.every import AFTER_THE_ORDER, OPTIONS, WIDE, Pass, through
from ...passes.placed import moved
from ...passes.replicas import replicas
from ...passes.shard import Shards, searched, with_sums
from ...passes.shard import shard as shared_out
from ...passes.synchronise import norms_apart
from ...plans.plan import PipelinePlan
from ...pricing.cost import CostModel
from ...system.loading import foreseen
from ..layer_times import with_communication
from ..saved import DROPPED, cut_in, notes_of, policy_notes
from .choice import reason, with_choices
from .joint import notes as notes_on_arrangements
from .models import balanced, cut
from .policy import Policy
from .problem import Problem, check_numbers
from .proof import prove, read_plan, stages_in
from .slices import slices_in
from .steady_order import steady_order


def options_of(chosen: Policy) -> dict[str, Parameter]:
    """The options with which this policy plans a recorded step: of the cut, of the passes, and its own."""
    return OF_NETWORKS | OPTIONS | chosen.options


def plan_network(graph: TaskGraph, chosen: Policy, cost: CostModel, machine: Machine,
                 dropped: Collection[int] = (), parts: int | Mapping[int, int] = 1, shard: Shards | int = 0, *,
                 chunks: int | None = None, stage_of_unit: Ints | None = None, **options: Any) -> PipelinePlan:
    """A policy's plan for a recorded step, not proved yet. The plan's `cost` has the times of its tasks.

    The step's micro-batches are those it was recorded with. Stages are balanced by `cost`, or given. `dropped`: units
    that are computed again. `shard`: what replicas share out. `options`: of the policy and of the passes
    (`minidl.passes.every`). Raises PipelineError if the network cannot be cut into these stages, or a pass refuses it.
    """
    name = chosen.name
    placement, cap = chosen.place(machine.ranks, chunks), machine.activation_cap
    told = {option: options.pop(option) for option in sorted(OPTIONS.keys() & options.keys())}
    slices = slices_in(graph)
    _check_slices(name, chosen, slices, options)
    micro_batches = int(graph.micro_batch.max(initial=0)) + 1
    check_numbers(placement.stages, micro_batches, cap)
    stage = balanced(graph, cost, placement.stages) if stage_of_unit is None else np.asarray(stage_of_unit)

    def in_stages(placement: Placement) -> Draft:
        return cut(graph, cost, placement, stage, name=name, machine=machine, stale=chosen.stale,
                   reverses=chosen.reverses, dropped=dropped)

    draft = in_stages(placement)
    each = options.get("mini_batches", 1)  # policies with mini-batches order several of them
    if not isinstance(each, int) or not 1 <= each <= micro_batches:
        raise PipelineError(f"{name}: mini_batches={shorten(each)} must be a whole number from 1 to {micro_batches}, "
                            f"the number of micro-batches")
    problem = _problem(draft, placement, micro_batches // (each * slices), cap)
    best, tried = chosen.placed(problem, options)
    problem = replace(problem, placement=best)
    made = (steady_order(chosen, problem, options) if chosen.stale
            else chosen(problem, **options | ({"slices": slices} if chosen.sliced else {})))
    best = made.placement or best
    draft = replace(draft if best is placement else in_stages(best), schedule=made.schedule, versions=made.versions)
    apart, cut_up = WIDE
    draft = through(AFTER_THE_ORDER, through(apart, draft, {"parts": parts}),
                    told | {"shard": shard, "dropped": dropped})
    notes, remarks = {**notes_of(graph, stage, told), **draft.order.notes}, searched(draft, shard)
    draft = through(cut_up, draft, {"parts": parts})
    notes |= {DROPPED: " ".join(map(str, dropped))} if dropped else {}
    if draft.versions is not None or chosen.sliced or draft.placement.directions > 1:
        notes |= policy_notes(name, options | told | {"chunks": placement.chunks})
    schedule = replace(draft.order, notes=notes)
    return PipelinePlan(name, draft.graph, schedule, draft.priced, machine.size, machine.memory_limit,
                        options | told | with_choices(tried, made.notes), remarks, placement=draft.placement,
                        micro_batches=micro_batches, cap=cap, kept=options.get("kept", 1.0), slices=slices,
                        versions=draft.versions)


def _check_slices(name: str, chosen: Policy, slices: int, options: Mapping[str, Any]) -> None:
    """Raises PipelineError if the policy orders another number of slices than the step's."""
    asked = options.get("slices", slices)
    if chosen.sliced and asked != slices:
        raise Refused(name, f"{asked} slices are asked for, but this step was recorded with {slices} of each "
                      f"micro-batch", "ask for as many")
    if slices > 1 and not chosen.sliced:
        raise Refused(name, f"it orders whole micro-batches, but this step was recorded with {slices} slices of each",
                      "use seq1f1b")


def arranged(graph: TaskGraph, chosen: Policy, cost: CostModel, machine: Machine, named: Callable[[str], Policy], *,
             chunks: int | None = None, stage_of_unit: Ints | None = None, **told: Any) -> PipelinePlan:
    """The plan of the fastest arrangement within the machine's limits, of a policy that `arranges`.

    `named`: the policy of an arrangement. A layer is a stage of `chosen`: balanced by `cost`, or given. Raises
    PipelineError if no arrangement is within the limits.
    """
    assert chosen.arranges is not None
    layers = chosen.place(machine.ranks, chunks)
    layer = balanced(graph, cost, layers.stages) if stage_of_unit is None else np.asarray(stage_of_unit)
    micro_batches = int(graph.micro_batch.max(initial=0)) + 1
    check_numbers(layers.stages, micro_batches, machine.activation_cap)
    found = chosen.arranges(_problem(cut(graph, cost, layers.stages, layer, dropped=told["dropped"]), layers,
                                     micro_batches, machine.activation_cap))
    refused: dict[tuple[str, int], str] = {}  # a cut that differs by one layer would be refused too
    for best in found:
        kind = best.policy, best.problem.stages
        if kind in refused:
            continue
        policy = named(best.policy)
        fixed: dict[str, Any] = {"group": 1} if "group" in policy.options else {}
        try:
            made = prove(plan_network(graph, policy, cost, machine, chunks=best.problem.chunks,
                                      stage_of_unit=best.stage_of_layer[layer], **told, **fixed))
            return replace(made, scheduler=chosen.name, notes=notes_on_arrangements(found, best))
        except ValueError as error:  # above a limit, or an impossible cut
            if not foreseen(error):
                raise
            refused[kind] = reason(error)
    raise PipelineError(f"{chosen.name}: no arrangement is possible; the fastest: {next(iter(refused.values()))}")


def read_network(graph: TaskGraph, schedule: Schedule, cost: CostModel, machine: Machine,
                 dropped: Collection[int] = (), parts: int | Mapping[int, int] = 1, shard: Shards | int = 0, *,
                 chunks: int | None = None, stage_of_unit: Ints | None = None, like: PipelinePlan | None = None
                 ) -> PipelinePlan:
    """The plan of a recorded step for an order of unknown origin, not proved yet. Stages come from its notes, or are
    given, or balanced by `cost`; their placement follows from the order. Updates that it lacks come last, after sums
    over replicas. `shard`: what replicas share out. `like`: of `read_plan`. Raises ScheduleError or PipelineError."""
    micro_batches = int(graph.micro_batch.max(initial=0)) + 1
    if like is not None and like.stale:  # its graph has what the order says nothing of
        return replace(read_plan(schedule, machine, micro_batches, chunks, like.graph, like), cost=like.cost)
    told, wide = cut_in(schedule, graph), isinstance(parts, Mapping) and max(parts.values(), default=1) > 1
    stage, given = stage_of_unit if told is None else told, _whole(schedule) if wide else schedule
    sums = machine.replicas == 1 or bool(np.isin(unpack(schedule.keys).kind, (Kind.U, *COLLECTIVE)).any())
    known = machine if sums else replace(machine, replicas=1)  # of a grid of torch's
    shares = Shards.of(shard)
    level = shares.where(schedule.notes if machine.replicas > 1 else {}).level

    def read(placement: Placement | int) -> tuple[Draft, PipelinePlan]:
        draft = cut(graph, cost, placement, stage, machine=machine, dropped=dropped)
        order = given
        if not sums:
            order = order.keep(~np.isin(unpack(order.keys).kind, COMMUNICATION))  # messages follow from the rest
        elif level:
            order = with_sums(order, norms_apart(draft).graph)
        updates, bare = draft.graph.kind == Kind.U, not (unpack(order.keys).kind == Kind.U).any()
        if bare:  # such as torch's grids
            order = _of_stages_here(order, draft.graph)
        if bare and isinstance(placement, Placement):
            order = order.followed_by({lane: draft.graph.keys[updates & (draft.rank == lane.rank)]
                                       for lane in order.lanes if lane.name == "main"})
        return draft, read_plan(order, known, micro_batches, chunks, draft.graph, like)

    draft, made = read(stages_in(schedule, machine.ranks, micro_batches, chunks) if like is None else like.placement)
    if like is None:
        draft, made = read(made.placement)  # which says which stages share a rank's scalars
    if machine.replicas > 1:
        shares = shares.where(_of_stages_here(schedule, draft.graph).notes)
    times = draft.price(made.graph)
    if machine.collective is not None:
        times = with_communication(made.graph, times, machine.collective)

    def after(passes: tuple[Pass, ...], order: Schedule) -> tuple[PipelinePlan, CostModel]:
        unit, place = made.graph.unit, made.placement
        up = place.home(made.graph.keys, micro_batches) != place.table[0][unit]  # on a stage of the second direction
        found = through(passes, replace(draft, graph=made.graph, time=times.durations(made.graph), placement=place,
                                        stage=unit + place.stages * up, schedule=order),
                        {"parts": parts, "shard": shares})
        return replace(made, graph=found.graph, schedule=found.order, ranks=machine.size), found.priced

    if level or not sums:
        made, times = after((shared_out,) if sums else (replicas, shared_out), given if sums else made.schedule)
    if wide:
        made, times = after(WIDE[1], made.schedule)
        if _lanes(made.schedule) != _lanes(schedule):
            raise schedule.error("second parts of tasks must be on lanes of their own, in the order of the first parts")
    return replace(made, cost=times)


def _of_stages_here(order: Schedule, graph: TaskGraph) -> Schedule:
    """The order of all stages' tasks without the gradients that these stages do not have: of a first stage's input, of
    parameters where there are none."""
    own = unpack(order.keys)
    output, weight = (graph.find(pack(own.unit, kind, own.micro_batch)) >= 0 for kind in (Kind.O, Kind.W))
    here = np.select([own.kind == Kind.O, own.kind == Kind.W, own.kind == Kind.B], [output, weight, output | weight],
                     True)
    last = np.maximum.accumulate(np.where(here, np.arange(len(here)), -1))
    before = np.where(last >= order.ptr[order.lane_of_each()], order.keys[last], -1)[~here]
    return replace(order.keep(here), notes=moved(order.notes, dict(zip(order.keys[~here].tolist(), before.tolist(),
                                                                       strict=True))))


def _whole(schedule: Schedule) -> Schedule:
    """The schedule with whole tasks in the place of their first parts, and without other parts."""
    own = unpack(schedule.keys)
    part = np.where(np.isin(own.kind, (Kind.F, Kind.O, Kind.W, Kind.B, Kind.R)), own.part, 0)
    first = schedule.keep(part <= 1)
    return replace(first, keys=np.where(part == 1, repack(schedule.keys, part=0), schedule.keys)[part <= 1],
                   notes=schedule.notes)


def _lanes(schedule: Schedule) -> dict[Lane, list[int]]:
    return {lane: schedule.order(i).tolist() for i, lane in enumerate(schedule.lanes)}


#: the options of a network's plan by a policy, and for a given order
OF_NETWORKS, OF_ORDERS = ({p.name: p for p in signature(function, eval_str=True).parameters.values()
                           if p.kind == p.KEYWORD_ONLY} for function in (plan_network, read_network))


def _problem(draft: Draft, placement: Placement, micro_batches: int, cap: float | None) -> Problem:
    """The problem with the mean times per stage, and the mean time of a message as latency. A stage without O or W gets
    a tiny time for it, so that policies can plan."""
    coarse, count = draft.graph, draft.micro_batches  # in all mini-batches of the step

    def mean(kind: Kind) -> Floats:
        mine = coarse.kind == kind
        return np.maximum(np.bincount(coarse.unit[mine], draft.time[mine], placement.stages) / count, 1e-9)

    latency = float(draft.cost.link.time(_message_bytes(coarse)))
    return Problem(placement, micro_batches, mean(Kind.F), mean(Kind.O), mean(Kind.W), latency, cap, recorded=True)


def _message_bytes(coarse: TaskGraph) -> float:
    """The mean bytes that a stage's forward or output gradient sends to another stage."""
    reader, buffer = coarse.reads.row_of_each(), coarse.reads.ids
    maker = np.full(len(coarse.buffer_bytes), -1, np.int64)
    maker[coarse.writes.ids] = coarse.writes.row_of_each()
    made = maker[buffer]
    crosses = (made >= 0) & np.isin(coarse.kind[made], (Kind.F, Kind.O)) & (coarse.unit[made] != coarse.unit[reader])
    sizes = coarse.buffer_bytes[np.unique(buffer[crosses])]
    return float(sizes.mean()) if len(sizes) else 0.0
