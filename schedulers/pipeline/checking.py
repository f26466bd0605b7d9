"""Proves a plan, ours or a user's: everything once, everything where it belongs, no deadlock, caps and versions kept.

`read_plan` makes a plan of a schedule that someone wrote, finding out where its stages live; `validate` proves a plan.
Both raise ScheduleError with the grid and the culprit marked.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...graph import COMMUNICATION, Ints, Kind, pack, task_name, unpack
from ...schedule import Schedule
from .communication import add_communication, check_rendezvous
from .placement import PipelineError, Placement, bidirectional
from .plan import Plan, fused_in
from .pricing import activations
from .stages import stage_graph

COMPUTE = (Kind.F, Kind.O, Kind.W, Kind.B)


def read_plan(schedule: Schedule, ranks: int, micro_batches: int, chunks: int = 1, cap: float | None = None,
              name: str = "plan") -> Plan:
    """The plan that a schedule of unknown origin means, for `ranks * chunks` stages (or bidirectional: `ranks`).

    Where it has tasks of communication, they are checked against those that the compute order needs. Raises
    PipelineError for numbers that make no sense, ScheduleError for a task out of range, twice, missing or homeless.
    """
    for what, value in (("ranks", ranks), ("micro-batches", micro_batches), ("chunks", chunks)):
        if value < 1:
            raise PipelineError(f"{value} {what}; at least 1 is needed")
    compute, talk = split(schedule)
    _once(compute, ranks, ranks * chunks, micro_batches)
    placement = _placement(compute, ranks, micro_batches, chunks)
    _complete(compute, placement.stages, micro_batches)
    graph = stage_graph(placement.stages, micro_batches, fused_in(compute, placement.stages, micro_batches),
                        placement.directions)
    if talk:
        compute.validate(graph)
        graph, _ = add_communication(graph, compute)
    return Plan(name, placement, micro_batches, graph, schedule, cap=cap)


def validate(plan: Plan) -> Plan:
    """Proves the plan and returns it with its slots. The proof of deadlock freedom holds for both kinds of sends."""
    schedule = plan.schedule
    if plan.peaks is not None:  # no whole stages: the graph says all, weight versions and their places included
        return replace(plan, schedule=schedule.validate(plan.graph))
    compute, talk = split(schedule)
    _once(compute, plan.placement.ranks, plan.placement.stages, plan.micro_batches)
    _complete(compute, plan.placement.stages, plan.micro_batches)
    _at_home(compute, plan)
    proved = schedule.validate(plan.graph)
    if talk:
        check_rendezvous(plan.graph, schedule)
    if plan.cap is not None:
        _capped(plan)
    if plan.versions is not None:
        _versions(plan)
    return replace(plan, schedule=proved)


def split(schedule: Schedule) -> tuple[Schedule, bool]:
    """The schedule without its communication, and whether it had any."""
    talks = np.isin(unpack(schedule.keys)[1], [int(k) for k in COMMUNICATION])
    if not talks.any():
        return schedule, False
    count = np.bincount(schedule.lane_of_each()[~talks], minlength=len(schedule.lanes))
    kept = np.flatnonzero(count)
    return Schedule(tuple(schedule.lanes[i] for i in kept), np.concatenate([[0], np.cumsum(count[kept])]),
                    schedule.keys[~talks], None if schedule.joined is None else schedule.joined[~talks]), True


def _once(schedule: Schedule, ranks: int, stages: int, micro_batches: int) -> None:
    """Kinds, ranks and ids in range, and no task twice."""
    unit, kind, micro_batch, iteration = unpack(schedule.keys)
    rank = np.array([lane.rank for lane in schedule.lanes], np.int64)[schedule.lane_of_each()]
    for bad, what in (
            (~np.isin(kind, [int(k) for k in COMPUTE]) | (iteration > 0), "is no F, O, W or B of one iteration"),
            (rank >= ranks, f"stands on a rank that does not exist: ranks are 0..{ranks - 1}"),
            (unit >= stages, f"is out of range: stages are 0..{stages - 1}"),
            (micro_batch >= micro_batches, f"is out of range: micro-batches are 0..{micro_batches - 1}")):
        if bad.any():
            key = int(schedule.keys[np.argmax(bad)])
            raise schedule.error(f"task {task_name(key)} {what}", [key])
    order = np.sort(schedule.keys)
    twice = np.flatnonzero(order[1:] == order[:-1])
    if twice.size:
        key = int(order[twice[0]])
        where = ", ".join(str(schedule.lanes[i]) for i in schedule.lane_of_each()[schedule.keys == key])
        counted = "; its weight gradient would count twice" if unpack(key)[1] in (Kind.W, Kind.B) else ""
        raise schedule.error(f"task {task_name(key)} stands twice, on {where}{counted}", [key])


def _complete(schedule: Schedule, stages: int, micro_batches: int) -> None:
    """Each (stage, micro-batch) has one F, and one B or one O and one W."""
    unit, kind, micro_batch, _ = unpack(schedule.keys)
    has = np.zeros((max(COMPUTE) + 1, micro_batches, stages), bool)
    has[kind, micro_batch, unit] = True
    both = has[Kind.B] & (has[Kind.O] | has[Kind.W])
    if both.any():
        i, s = (int(x) for x in np.argwhere(both)[0])
        keys = [int(pack(s, k, i)) for k in (Kind.O, Kind.W) if has[k, i, s]]
        raise schedule.error(f"stage {s} has both {s}B{i} and {' and '.join(map(task_name, keys))} for micro-batch {i}; "
                             f"the weight gradient would count twice", [int(pack(s, Kind.B, i)), *keys])
    for needed, name in ((has[Kind.F], "F"), (has[Kind.B] | has[Kind.O], "O"), (has[Kind.B] | has[Kind.W], "W")):
        if not needed.all():
            i, s = (int(x) for x in np.argwhere(~needed)[0])
            near = [int(pack(s, k, i)) for k in COMPUTE if has[k, i, s]]
            either = "" if name == "F" else f" (or {s}B{i})"
            raise schedule.error(f"task {s}{name}{i}{either} is missing; each stage and micro-batch needs one F, and one "
                                 f"B or one O and one W", near)


def _placement(schedule: Schedule, ranks: int, micro_batches: int, chunks: int) -> Placement:
    """Where the stages live, read off the forwards. Raises ScheduleError where a stage lives on two ranks."""
    unit, kind, micro_batch, _ = unpack(schedule.keys)
    rank = np.array([lane.rank for lane in schedule.lanes], np.int64)[schedule.lane_of_each()]
    if chunks == 2 and unit.max(initial=0) < ranks:
        both = bidirectional(ranks)
        if (both.rank(unit, micro_batch, micro_batches) == rank).all():
            return both
    table = np.full(ranks * chunks, -1, np.int64)
    forward = kind == Kind.F
    table[unit[forward][::-1]] = rank[forward][::-1]
    missing = np.flatnonzero(table < 0)
    if missing.size:
        raise schedule.error(f"stage {missing[0]} has no forward at all; {ranks} ranks with {chunks} "
                             f"chunk{'s' * (chunks > 1)} each hold stages 0..{ranks * chunks - 1}")
    _same_rank(schedule, rank, table[unit])
    return Placement("given", ranks, table[None])


def _at_home(schedule: Schedule, plan: Plan) -> None:
    unit, _, micro_batch, _ = unpack(schedule.keys)
    rank = np.array([lane.rank for lane in schedule.lanes], np.int64)[schedule.lane_of_each()]
    _same_rank(schedule, rank, plan.placement.rank(unit, micro_batch, plan.micro_batches))


def _same_rank(schedule: Schedule, rank: Ints, home: Ints) -> None:
    stray = np.flatnonzero(rank != home)
    if stray.size:
        key = int(schedule.keys[stray[0]])
        raise schedule.error(f"task {task_name(key)} stands on rank {rank[stray[0]]}, but stage {unpack(key)[0]} lives on "
                             f"rank {home[stray[0]]}; its weights are there", [key])


def _capped(plan: Plan) -> None:
    live = activations(plan)
    over = np.flatnonzero(live > plan.cap + 1e-9)  # type: ignore[operator]
    if over.size:
        key = int(plan.schedule.keys[over[0]])
        lane = plan.schedule.lanes[int(plan.schedule.lane_of_each()[over[0]])]
        raise plan.schedule.error(f"with {task_name(key)} rank {lane.rank} holds {live[over[0]]:g} activations; the cap is "
                                  f"{plan.cap:g} (this plan needs {live.max():g})", [key])


def _versions(plan: Plan) -> None:
    """A version must exist when it is read, and a backward must read what its forward read."""
    versions, schedule = plan.versions, plan.schedule
    assert versions is not None
    unit, kind, micro_batch, _ = unpack(schedule.keys)
    if len(versions.of) != len(schedule):
        raise schedule.error(f"{len(versions.of)} weight versions are given for {len(schedule)} tasks")
    ends = (kind == Kind.W) | (kind == Kind.B)
    order = np.lexsort((np.arange(len(schedule)), unit))  # stage by stage, in lane order: a stage has one lane
    done = np.cumsum(ends[order])
    first = np.searchsorted(unit[order], np.arange(plan.placement.stages))
    before = np.concatenate([[0], done])[first][unit[order]]
    newest = np.empty(len(schedule), np.int64)
    newest[order] = (done - ends[order] - before) // versions.every
    early = np.flatnonzero((versions.of > newest) | (versions.of < 0))
    if early.size:
        e = int(early[0])
        key = int(schedule.keys[e])
        raise schedule.error(f"task {task_name(key)} reads weight version {versions.of[e]}, but then the newest one of "
                             f"stage {unit[e]} is {newest[e]}", [key])
    read = np.full((plan.micro_batches, plan.placement.stages), -1, np.int64)
    forward = kind == Kind.F
    read[micro_batch[forward], unit[forward]] = versions.of[forward]
    other = np.flatnonzero(versions.of != read[micro_batch, unit])
    if other.size:
        e = int(other[0])
        key, before_it = int(schedule.keys[e]), int(pack(unit[e], Kind.F, micro_batch[e]))
        raise schedule.error(f"task {task_name(key)} reads weight version {versions.of[e]}, but {task_name(before_it)} read "
                             f"version {read[micro_batch[e], unit[e]]}", [key, before_it])
