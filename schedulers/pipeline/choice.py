"""The best of several orders or placements, by simulation, for policies with a choice that the user does not make.

Candidates are timed with the problem's times and latency, like every plan, and proved. Bandwidth and the time of
updates are not counted. Deterministic: among equally fast candidates the first is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...core.placement import PipelineError, Placement
from ...core.schedule import Schedule
from ...passes.backward import fused_in
from ...plans.plan import PipelinePlan
from ..ordered import Ordered, as_ordered
from .peaks import CapError
from .pricing import price
from .problem import Problem, rounded
from .proof import prove
from .stages import stage_graph

Order = Callable[[Problem], Schedule | Ordered]


def best_order(problem: Problem, orders: Mapping[str, Order], what: str,
               placements: Mapping[str, Placement] | None = None) -> Ordered:
    """The order with the smallest makespan, and notes: `choices[what]` has its name and the makespans of all.
    `placements`: by the same names, by default the problem's. Raises PipelineError if no order accepts the problem and
    keeps its cap."""
    found: dict[str, tuple[float, Ordered]] = {}
    why = "there is no candidate"
    for name, order in orders.items():
        own = replace(problem, placement=placements[name]) if placements else problem
        try:
            made = as_ordered(order(own), name, order)
            found[name] = makespan(own, made.schedule), replace(made, placement=own.placement)
        except (PipelineError, CapError) as error:  # numbers that it does not accept, or more activations than the cap
            why = reason(error)
    if not found:
        raise PipelineError(why)
    name = min(found, key=lambda name: rounded(found[name][0]))
    makespans = {name: float(f"{time:.6g}") for name, (time, _) in found.items()}
    made = found[name][1]
    return replace(made, notes=with_choices(made.notes, {"choices": {what: {"picked": name, "makespans": makespans}}}))


def reason(error: Exception) -> str:
    """The message of an error, without the grid in which a task is marked."""
    return str(getattr(error, "message", None) or error)


def with_choices(notes: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The notes of both, with the choices of both."""
    choices = {**notes.get("choices", {}), **more.get("choices", {})}
    return {**notes, **more} | ({"choices": choices} if choices else {})


def makespan(problem: Problem, schedule: Schedule) -> float:
    """The simulated time of an order, barrier to barrier. Raises ScheduleError for an invalid order, CapError if it
    holds more activations than the problem's cap."""
    stages, m, placement = problem.placement.stages, problem.micro_batches, problem.placement
    graph = stage_graph(stages, m, fused_in(schedule, stages, m), placement.directions)
    plan = PipelinePlan("candidate", graph, schedule, problem.cost, placement.ranks, placement=placement,
                        micro_batches=m, cap=problem.cap)
    return price(prove(plan)).makespan
