"""Shared by all policies: the result of a policy that returns more than a schedule, and the options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature, unwrap
from typing import Any

from ..core.graph import TaskGraph
from ..core.machine import PlanError
from ..core.placement import Placement, Versions
from ..core.schedule import Schedule
from ..pricing.cost import CostModel
from ..system.loading import place_of


@dataclass(frozen=True)
class Ordered:
    """A schedule, and `notes` and `remarks` for the plan. `within`: the policy's result within a smaller limit, for one
    that keeps what it has found; it raises MemoryLimitError.

    For a pipeline: `placement`, if the policy chooses one. For a stale policy: `versions`, the weight version that each
    entry reads, and `steady`, its time per mini-batch in steady state. For a synthetic pipeline whose tasks are not
    whole stages: `graph`, and the number of `slices` of each micro-batch. `cost`: by which it was ordered.
    """

    schedule: Schedule
    notes: Mapping[str, Any] = field(default_factory=dict)
    placement: Placement | None = None
    versions: Versions | None = None
    steady: float | None = None
    graph: TaskGraph | None = None
    cost: CostModel | None = None
    slices: int = 1
    remarks: tuple[str, ...] = ()
    within: Callable[[int], Ordered] | None = None


def as_ordered(made: Any, scheduler: str, function: Callable[..., Any]) -> Ordered:
    """The result of a scheduler's function. Raises PlanError for anything but a Schedule or an Ordered."""
    if isinstance(made, Schedule):
        return Ordered(made)
    if not isinstance(made, Ordered):
        raise PlanError(f"scheduler {scheduler} returned a {type(made).__name__}, not a Schedule or an Ordered"
                        + (f" ({place_of(function)})" if hasattr(unwrap(function), "__code__") else ""))
    return made


def beyond(function: Callable[..., Any], count: int = 1) -> dict[str, Parameter]:
    """A function's parameters after the first ones; `*more` and `**more` take nothing."""
    try:
        found = signature(function, eval_str=True)
    except (TypeError, ValueError, NameError):  # a user's annotations may use names that are not defined
        found = signature(function)
    return {name: p for name, p in list(found.parameters.items())[count:]
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def taken(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a function accepts."""
    return {name: value for name, value in options.items() if name in signature(function).parameters}
