"""A recorded model as a pipeline: where to cut it into stages, and a policy's plan for the stages.

Cuts lie between blocks, so that what crosses them is one activation; a block is what shares the first parts of its
units' names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...cost import CostModel
from ...graph import Floats, Ints, Kind, TaskGraph
from ...passes import coarsen, fuse
from ...schedule import Schedule
from .placement import PipelineError, Placement
from .plan import Plan, fused_in, place, policy
from .problem import Problem


def plan_model(graph: TaskGraph, name: str, ranks: int, cost: CostModel, chunks: int | None = None,
               stage_of_unit: Ints | None = None, activation_cap: float | None = None,
               **options: Any) -> tuple[Plan, CostModel]:
    """(the named policy's plan for a recorded step, the costs of its tasks).

    The step's micro-batches are those it was recorded with. Stages are balanced by `cost`, or given. Updates and what
    else the graph has come last on the rank of their stage. Raises PipelineError where the model cannot be cut so.
    """
    chosen = policy(name)
    placement = place(name, ranks, chunks)
    if chosen.stale:
        raise PipelineError(f"{name} reads older weights; a recorded step has one version")
    if placement.directions > 1:
        raise PipelineError(f"{name} holds every stage twice; a recorded model has each parameter once")
    cuts = balanced(graph, cost, placement.stages) if stage_of_unit is None else np.asarray(stage_of_unit)
    coarse, group = coarsen(graph, cuts.tolist())
    micro_batches = int(graph.micro_batch.max(initial=0)) + 1
    time = np.bincount(group, cost.durations(graph) + cost.launch, len(coarse)).astype(np.float64)
    wrong = chosen.needs(ranks, micro_batches, placement.chunks)
    if wrong:
        raise PipelineError(f"{name}: {wrong}")
    made = chosen.order(_problem(coarse, time, placement, micro_batches, cost, activation_cap), **options)
    if isinstance(made, Plan):
        raise PipelineError(f"{name} makes its own graph and cannot order a recorded one")
    schedule, notes = made if isinstance(made, tuple) else (made, {})
    joint = fused_in(schedule, placement.stages, micro_batches)
    merged = fuse(coarse, np.broadcast_to(joint, (placement.stages, micro_batches)))
    key_time = {coarse.name(t): float(time[t]) for t in range(len(coarse))}
    for t in merged:
        if t.kind == Kind.B:
            key_time[t.name] = sum(key_time.get(f"{t.unit}{k}{t.micro_batch}", 0.0) for k in "OW")
    own = replace(cost, tasks=key_time, kinds={}, launch=0.0, source="given")
    plan = Plan(name, placement, micro_batches, merged, _completed(merged, schedule, placement),
                None, None, activation_cap, options | notes)
    return plan, own


def balanced(graph: TaskGraph, cost: CostModel, stages: int) -> Ints:
    """The stage of each unit: consecutive blocks, the largest stage as small as can be (forward and backward time)."""
    units = int(graph.unit.max(initial=-1)) + 1
    work = np.isin(graph.kind, (Kind.F, Kind.O, Kind.W, Kind.B))
    time = np.bincount(graph.unit[work], cost.durations(graph)[work], units)
    names = [graph.unit_names[u] if u < len(graph.unit_names) else "" for u in range(units)]
    block = np.concatenate([[0], np.cumsum([_block(a) != _block(b) or not a
                                            for a, b in zip(names[:-1], names[1:], strict=True)])]).astype(np.int64)
    of_block = np.bincount(block, time).astype(np.float64)
    if len(of_block) < stages:
        raise PipelineError(f"{stages} stages are asked for, but the model has only {len(of_block)} blocks to cut between")
    return linear_partition(of_block, stages)[block]


def _block(name: str) -> str:
    """`resnet/layer1/0/conv1` belongs to the block `resnet/layer1/0`: all but the last part of the name."""
    return name.rsplit("/", 1)[0] if "/" in name else name


def linear_partition(time: Floats, parts: int) -> Ints:
    """The part of each item: consecutive, none empty, the largest sum as small as can be (dynamic programming)."""
    n = len(time)
    total = np.concatenate([[0.0], np.cumsum(time)])
    best, cut = total[1:].copy(), np.zeros((parts, n), np.int64)
    for part in range(1, parts):
        now = np.full(n, np.inf)
        for end in range(part, n):
            worst = np.maximum(best[part - 1 : end], total[end + 1] - total[part : end + 1])
            at = int(np.argmin(worst))
            now[end], cut[part, end] = worst[at], at + part
        best = now
    of = np.zeros(n, np.int64)
    end = n
    for part in range(parts - 1, 0, -1):
        begin = int(cut[part, end - 1])
        of[begin:end] = part
        end = begin
    return of


def _problem(coarse: TaskGraph, time: Floats, placement: Placement, micro_batches: int, cost: CostModel,
             cap: float | None) -> Problem:
    """Average times per stage; a stage without O or W gets next to nothing for it, so that policies can plan."""
    def of(kind: Kind) -> Floats:
        mine = coarse.kind == kind
        return np.maximum(np.bincount(coarse.unit[mine], time[mine], placement.stages) / micro_batches, 1e-9)

    return Problem(placement, micro_batches, of(Kind.F), of(Kind.O), of(Kind.W), float(cost.link.latency), cap)


def _completed(graph: TaskGraph, schedule: Schedule, placement: Placement) -> Schedule:
    """The policy's order without what the graph lacks, and with the graph's other tasks last on their stage's rank."""
    known = graph.find(schedule.keys) >= 0
    lane = schedule.lane_of_each()
    rest = np.setdiff1d(np.arange(len(graph)), graph.find(schedule.keys[known]))
    home = placement.table[0][graph.unit[rest]]
    keys = [np.concatenate([schedule.keys[known & (lane == r)], graph.keys[rest[home == r]]])
            for r in range(placement.ranks)]
    joined = None if schedule.joined is None else np.concatenate(
        [np.concatenate([schedule.joined[known & (lane == r)], np.zeros(int((home == r).sum()), bool)])
         for r in range(placement.ranks)])
    ptr = np.concatenate([[0], np.cumsum([len(k) for k in keys])])
    return Schedule(schedule.lanes, ptr, np.concatenate(keys), joined)
