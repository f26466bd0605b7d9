"""An order of one's own beside the published ones: which it equals, how it differs, how far it is from the best."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from .. import schedulers
from ..core.machine import Machine
from ..core.schedule import Schedule
from ..core.tasks import task_name
from ..plans.plan import PipelinePlan
from ..schedulers.pipeline import Pipeline, Problem, bounds
from .pipeline_plans import SHOWN, every

SEARCHED = 200  #: the most tasks of an order whose optimum is searched, and the seconds that it may take
SECONDS = 2.0


def beside(arguments: Any, plan: PipelinePlan) -> PipelinePlan:
    """The plan; of an order of one's own on given times, with a note: the policies that have the same order, or how it
    differs from the nearest one; how far it is above the lower bound of all orders of these stages on these ranks; the
    optimum, if that is soon found."""
    if arguments.model or plan.stale or plan.scheduler in schedulers.names("pipeline") or len(plan.schedule) > SHOWN:
        return plan
    told = copy(arguments)
    told.scheduler_arg, told.given = [], arguments.given - {"--scheduler"}
    others = {name: other for name, other in every(told)[0].items() if not other.stale}
    rows, took = replace(plan.schedule, notes={}).to_csv(), plan.timeline.makespan
    equals = [name for name, other in others.items() if replace(other.schedule, notes={}).to_csv() == rows]
    least, _ = bounds(Problem.of(plan.placement, plan.micro_batches, plan.cost, plan.cap))
    note: dict[str, Any] = {
        "equals": equals, "nearest": None if equals else _nearest(plan.schedule, others), "bound": least,
        "above": took / least - 1, "optimal": _optimum(arguments, plan)}
    if others:
        best = min(others, key=lambda name: others[name].timeline.makespan)
        fastest = others[best].timeline.makespan
        same = np.array_equal(others[best].placement.table, plan.placement.table)
        note |= {"fastest": best, "makespan": fastest, "slower": took / fastest - 1, "same_placement": same}
    return replace(plan, notes={**plan.notes, "beside": note | {"said": _said(note)}})


def _nearest(mine: Schedule, others: dict[str, PipelinePlan]) -> dict[str, Any] | None:
    """The policy that runs the same tasks on the same ranks with the fewest of them in other places, and the first of
    those; None if no policy has these tasks."""
    found: dict[str, Any] | None = None
    for name, plan in others.items():
        other = plan.schedule
        if mine.lanes != other.lanes or not np.array_equal(mine.ptr, other.ptr) or any(
                {*mine.order(i).tolist()} != {*other.order(i).tolist()} for i in range(len(mine.lanes))):
            continue
        moved = np.flatnonzero(mine.keys != other.keys)
        if len(moved) and (found is None or len(moved) < found["tasks"]):
            at = int(moved[0])
            found = {"scheduler": name, "tasks": len(moved), "rank": int(mine.rank_of_each[at]),
                     "here": task_name(mine.keys[at]), "there": task_name(other.keys[at])}
    return found


def _optimum(arguments: Any, plan: PipelinePlan) -> float | None:
    """The proved makespan of the best order with one stage on each rank; None if it is not found soon."""
    if plan.placement.chunks != 1 or len(plan.graph) > SEARCHED or find_spec("ortools") is None:
        return None
    machine = Machine(arguments.ranks, activation_cap=plan.cap)
    found = schedulers.plan(Pipeline(plan.micro_batches), "optimal", plan.cost, machine, time_limit=SECONDS)
    status = found.notes["status"]
    return float(status["value"]) if status["proved"] and "rounded_to" not in status else None


def _said(note: dict[str, Any]) -> str:
    near = note["nearest"]
    parts = [f"equals {' and '.join(note['equals'])}" if note["equals"] else
             f"differs from {near['scheduler']} in the places of {near['tasks']} tasks, first on rank {near['rank']}: "
             f"{near['here']} instead of {near['there']}" if near else "no published policy has these tasks",
             f"{note['above']:.0%} above the bound of this cut and placement, {note['bound']:g}"]
    parts += [f"`optimal` {note['optimal']:g}"] if note["optimal"] is not None else []
    if "fastest" in note:
        other = "" if note["same_placement"] else " with another cut or placement"
        parts.append(f"the fastest published one is {note['fastest']}{other}, {note['makespan']:g}; this takes "
                     f"{abs(note['slower']):.1%} {'less' if note['slower'] < 0 else 'more'}")
    return "; ".join(parts)
