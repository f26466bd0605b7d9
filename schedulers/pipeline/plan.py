"""A plan: a policy's schedule together with the graph it orders. `POLICIES` names every policy there is.

It prices nothing and proves nothing: `pricing` and `checking` do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...cost import CostModel
from ...graph import Ints, Kind, TaskGraph, unpack
from ...schedule import Schedule
from .placement import PLACEMENTS, PipelineError, Placement
from .problem import Problem
from .stages import stage_graph


@dataclass(frozen=True)
class Policy:
    """One scheduler: `order` maps a problem to a schedule, or to a schedule and notes that join the plan's options. One
    that `builds` makes the whole plan, a stale one, as its tasks are not those of whole stages.

    `splits`: whether it separates O and W ("partly": some micro-batches). `chunks`: the default number of stages per
    rank, and `chunks_fixed` whether it is the only one possible. `needs(ranks, micro_batches, chunks)` returns what is
    wrong, or None. Stale policies say with `versions(problem, schedule)` which weight version each entry reads, how
    many micro-batches make one update, and with `steady(problem)` their time per mini-batch in steady state.
    `source` is published or reconstructed.
    """

    order: Callable[..., Schedule | tuple[Schedule, dict[str, Any]] | Plan]
    placement: str
    splits: bool | str = False
    chunks: int = 1
    chunks_fixed: bool = True
    needs: Callable[[int, int, int], str | None] = lambda ranks, micro_batches, chunks: None
    versions: Callable[[Problem, Schedule], Versions] | None = None
    steady: Callable[[Problem], float] | None = None
    builds: bool = False

    @property
    def stale(self) -> bool:
        return self.versions is not None or self.builds


@dataclass(frozen=True)
class Versions:
    """Beside a stale schedule: `of[i]` is the weight version that entry i reads.

    Version 0 is what training starts from; stage s has version k + 1 as soon as its weight gradient of micro-batch
    `(k + 1) * every - 1` is done.
    """

    of: Ints
    every: int = 1


@dataclass(frozen=True)
class Plan:
    """A schedule, the graph it orders, and where the stages live. `steady`: time per mini-batch of a stale plan.

    Where a stage's tasks live on several ranks, `peaks` gives the live activations of each, and `cost` the times of
    tasks that were cut.
    """

    scheduler: str
    placement: Placement
    micro_batches: int
    graph: TaskGraph
    schedule: Schedule
    versions: Versions | None = None
    steady: float | None = None
    cap: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    cost: CostModel | None = None
    peaks: tuple[float, ...] | None = None


POLICIES: dict[str, Policy] = {}


def names() -> list[str]:
    """All policies' names, in alphabetical order."""
    from . import registry  # noqa: F401

    return sorted(POLICIES)


def policy(name: str) -> Policy:
    """The policy of that name. Raises PipelineError with the known names."""
    from . import registry  # noqa: F401  (fills POLICIES; policies import what stands above)

    if name not in POLICIES:
        raise PipelineError(f"unknown pipeline scheduler {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]


def place(name: str, ranks: int, chunks: int | None = None, **options: Any) -> Placement:
    """Where the policy's stages live. Raises PipelineError for numbers that it cannot work with."""
    chosen = policy(name)
    if ranks < 1:
        raise PipelineError(f"{ranks} ranks; at least 1 is needed")
    chunks = chosen.chunks if chunks is None else chunks
    if chunks < 1:
        raise PipelineError(f"{chunks} chunks per rank; at least 1 is needed")
    if chosen.chunks_fixed and chunks != chosen.chunks:
        raise PipelineError(f"{name} holds exactly {chosen.chunks} chunk{'s' * (chosen.chunks > 1)} per rank, "
                            f"not {chunks}")
    return PLACEMENTS[chosen.placement](ranks, chunks, **options)


def costs(placement: Placement, forward: float | Sequence[float], output_grad: float | Sequence[float],
          weight_grad: float | Sequence[float], latency: float = 0.0, bandwidth: float | None = None) -> CostModel:
    """Costs per stage. A number is a rank's time, of which each of its chunks takes its share; a sequence is per stage.

    Raises PipelineError for a sequence of another length than there are stages, CostError for bad numbers.
    """
    def per_stage(what: str, value: float | Sequence[float]) -> float | list[float]:
        if np.ndim(value) == 0:
            return float(value) * placement.share  # type: ignore[arg-type]
        if len(value) != placement.stages:  # type: ignore[arg-type]
            raise PipelineError(f"{len(value)} {what} times are given for {placement.stages} stages")  # type: ignore[arg-type]
        return [float(v) for v in value]  # type: ignore[union-attr]

    return CostModel.given(per_stage("forward", forward), per_stage("output_grad", output_grad),
                           per_stage("weight_grad", weight_grad), latency, bandwidth)


def plan(name: str, ranks: int, micro_batches: int, cost: CostModel | None = None, chunks: int | None = None,
         activation_cap: float | None = None, placement: Placement | None = None, message_bytes: int = 0,
         **options: Any) -> Plan:
    """The named policy's plan for a synthetic pipeline; `cost` is per stage (`costs` makes it), default all times 1.

    `options` go to the policy. Raises PipelineError for an unknown name or a violated precondition.
    """
    chosen = policy(name)
    placement = place(name, ranks, chunks) if placement is None else placement
    cost = costs(placement, 1.0, 1.0, 1.0) if cost is None else cost
    problem = Problem.of(placement, micro_batches, cost, activation_cap)
    wrong = chosen.needs(ranks, micro_batches, placement.chunks)
    if wrong:
        raise PipelineError(f"{name}: {wrong}")
    made = chosen.order(problem, **options)
    if isinstance(made, Plan):
        return made
    schedule, notes = made if isinstance(made, tuple) else (made, {})
    total = int(unpack(schedule.keys)[2].max()) + 1  # a stale plan may span several mini-batches
    graph = stage_graph(placement.stages, total, fused_in(schedule, placement.stages, total), placement.directions,
                        message_bytes)
    return Plan(name, placement, total, graph, schedule,
                chosen.versions(problem, schedule) if chosen.versions else None,
                chosen.steady(problem) if chosen.steady else None, activation_cap, options | notes)


def fused_in(schedule: Schedule, stages: int, micro_batches: int) -> bool | np.ndarray:
    """For `stage_graph`: where the schedule has one B in place of O and W. Tasks out of range are left to the proof."""
    unit, kind, micro_batch, _ = unpack(schedule.keys)
    joint = (kind == Kind.B) & (unit < stages) & (micro_batch < micro_batches)
    if not joint.any():
        return False
    fused = np.zeros((stages, micro_batches), bool)
    fused[unit[joint], micro_batch[joint]] = True
    return fused
