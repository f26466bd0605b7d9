"""Plans of synthetic pipelines, which have times and nothing to run; and what the planning of networks shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...plans import Plan
from ...pricing.cost import CostModel
from ...schedule import Schedule
from ...tasks import unpack
from .choice import with_choices
from .placement import PipelineError, Placement
from .policies import Policy, place, policy, title
from .problem import Problem, costs
from .proof import CapError, prove
from .stages import fused_in, stage_graph


def plan(policy_or_name: str | Policy, ranks: int, micro_batches: int, cost: CostModel | None = None,
         chunks: int | None = None, activation_cap: float | None = None, placement: Placement | None = None,
         message_bytes: int = 0, **options: Any) -> Plan:
    """The named policy's plan for a synthetic pipeline; `cost` is per stage (`costs` makes it), default all times 1.

    `options` go to the policy. Raises PipelineError for an unknown name, a violated precondition, or a plan that needs
    more activations than the cap.
    """
    chosen, name = policy(policy_or_name), title(policy_or_name)
    given, placement = placement, place(chosen, ranks, chunks) if placement is None else placement
    cost = costs(placement, 1.0, 1.0, 1.0) if cost is None else cost
    problem = Problem.of(placement, micro_batches, cost, activation_cap)
    placement, tried = placed(name, chosen, problem, options, given)
    problem = replace(problem, placement=placement)
    made = chosen.ordered(problem, options)
    if isinstance(made, Plan):
        made = replace(made, cap=activation_cap, notes=options | dict(made.notes))
    else:
        schedule, notes = with_notes(made, tried)
        total = int(unpack(schedule.keys).micro_batch.max()) + 1  # a stale plan may span several mini-batches
        graph = stage_graph(placement.stages, total, fused_in(schedule, placement.stages, total),
                            placement.directions, message_bytes)
        made = Plan(name, graph, schedule, cost, ranks, notes=options | notes, placement=placement, micro_batches=total,
                    cap=activation_cap, kept=options.get("kept", 1.0),
                    versions=chosen.read(problem, schedule, options),
                    steady=chosen.steady(problem) if chosen.steady else None)
    try:
        return prove(made)
    except CapError as error:  # any other error would be a fault of the policy
        raise PipelineError(f"{name}: {error.message}") from None


def placed(name: str, chosen: Policy, problem: Problem, options: dict[str, Any],
            given: Placement | None = None) -> tuple[Placement, dict[str, Any]]:
    """The placement of the policy's stages, and the choices that were tried. Raises PipelineError for options and
    numbers that the policy does not accept."""
    wrong = chosen.needs(problem.ranks, problem.micro_batches, problem.chunks)
    if wrong:
        raise PipelineError(f"{name}: {wrong}")
    unknown = sorted(options.keys() - set(chosen.options))
    if unknown:
        raise PipelineError(f"{name} takes no argument {unknown[0]!r}; it takes {', '.join(chosen.options) or 'none'}")
    return chosen.placed(problem, options) if given is None else (given, {})


def with_notes(made: Schedule | tuple[Schedule, dict[str, Any]],
                tried: dict[str, Any]) -> tuple[Schedule, dict[str, Any]]:
    schedule, notes = (made, {}) if isinstance(made, Schedule) else made
    return schedule, with_choices(tried, notes)


