"""Peak activations: how many activations a plan holds at most on each rank. The count is valid for any timing.

An activation lives on its rank from the start of F to the end of the last O, W or B of its stage and micro-batch there.
On another rank that computes one of these, it lives from its earliest possible arrival. The tasks of one action start
and end together. In the body of a loop, late tasks use activations of the step before.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...core.columns import Floats, Ints, spread
from ...core.schedule import ScheduleError
from ...core.tasks import COMMUNICATION, COPIES, Kind, task_name, unpack
from ...plans.plan import PipelinePlan

COMPUTE = (Kind.F, Kind.O, Kind.W, Kind.B)


class CapError(ScheduleError):
    """A plan needs more activations than its cap."""


def counted(plan: PipelinePlan) -> PipelinePlan:
    """The plan with its peak activations. Raises CapError above the cap."""
    schedule, live = plan.schedule, activations(plan)
    rank = schedule.rank_of_each
    if plan.cap is not None and (over := np.flatnonzero(live > plan.cap + 1e-9)).size:
        key = int(schedule.keys[over[0]])
        raise CapError(f"with {task_name(key)} rank {rank[over[0]]} holds {live[over[0]]:g} activations; the cap is "
                       f"{plan.cap:.15g} (this plan needs {live.max():g})",
                       [task_name(key)], schedule.grid(mark=[key], near=True))
    return replace(plan, peaks=tuple(spread(rank, live, plan.placement.ranks, 0.0, np.maximum).tolist()))


def activations(plan: PipelinePlan) -> Floats:
    """For each entry of a valid schedule with slots, its rank's live activations while it runs, in full stages."""
    schedule, stages = plan.schedule, plan.placement.stages
    own, (action, begins), home = unpack(schedule.keys), schedule.actions(), _activation(schedule.keys, stages)
    if plan.placement.parts is not None:  # several ranks may hold the same activation
        home = home + schedule.rank_of_each * (plan.micro_batches * stages)
    size = int(home.max(initial=0)) + 1
    works, late, forward = np.isin(own.kind, COMPUTE), own.late == 1, own.kind == Kind.F
    uses = works & ~late
    end = spread(home[uses], action[uses], size, -1, np.maximum)
    first = np.flatnonzero(forward)[np.argsort(-action[forward])]  # the first of several parts is written last
    begin = spread(home[first], action[first], size, -1)
    copies = np.flatnonzero((end >= 0) & (begin < 0))
    if len(copies):
        begin[copies] = _arrivals(plan, action).ravel()[copies]
    held = end >= 0
    count = int(action.max(initial=-1)) + 2
    change: Floats = np.bincount(begin[held], minlength=count).astype(np.float64)
    change -= np.bincount(end[held] + 1, minlength=count)
    until = spread(home[works & late], action[works & late], size, -1, np.maximum)
    lane = spread(home, schedule.lane_of_each(), size)
    over = until >= 0  # it lives on in the next step, until a late task
    change += np.bincount(begins[lane[over]], minlength=count) - np.bincount(until[over] + 1, minlength=count)
    change += np.bincount(end[held & over] + 1, minlength=count) - np.bincount(begins[lane[over] + 1], minlength=count)
    if plan.kept != 1:  # a part of it is freed between O and the last use
        last = (own.kind == Kind.O) & (end[home] > action)
        change += (1 - plan.kept) * (np.bincount(end[home[last]] + 1, minlength=count)
                                     - np.bincount(action[last] + 1, minlength=count))
    return np.cumsum(change)[action] * plan.placement.share / plan.slices


def _arrivals(plan: PipelinePlan, action: Ints) -> Ints:
    """[rank, micro-batch * stages + stage] -> the rank's first action that may still run when this forward ends."""
    graph, schedule, stages = plan.graph, plan.schedule, plan.placement.stages
    ids, ranks = schedule.ids(graph), plan.placement.ranks
    rank = schedule.rank_of_tasks(graph)
    same_lane = schedule.lane_of_each()[1:] == schedule.lane_of_each()[:-1]
    place = spread(ids, action, len(graph))
    before = spread(ids[1:], np.where(same_lane, ids[:-1], -1), len(graph), -1)
    talks = np.isin(graph.kind, (*COMMUNICATION, *COPIES))  # beside the lane that computes
    first = np.zeros(ranks, np.int64)
    for i, lane in enumerate(schedule.lanes):
        if schedule.ptr[i] < schedule.ptr[i + 1] and not talks[ids[schedule.ptr[i]]]:
            first[lane.rank] = action[schedule.ptr[i]]
    # for each rank, the first action that may still run when a task starts
    next_one = np.zeros((len(graph), ranks), np.int64)
    for task in ids[np.argsort(schedule.slots, kind="stable")].tolist():
        here = next_one[task]
        here[:] = first
        for p in (*graph.preds[task].tolist(), int(before[task])):
            if p >= 0:
                np.maximum(here, next_one[p], out=here)
                here[rank[p]] = max(here[rank[p]], 0 if talks[p] else place[p] + 1)
    found = np.zeros((ranks, plan.micro_batches * stages), np.int64)
    forward = np.flatnonzero(graph.kind == Kind.F)
    found[:, _activation(graph.keys[forward], stages)] = next_one[forward].T
    return found


def _activation(keys: Ints, stages: int) -> Ints:
    """The number of the activation that each task makes or uses."""
    own = unpack(keys)
    return own.micro_batch * stages + own.unit
