"""Pipelines on given times, which have nothing to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core.machine import Machine, shorten
from ...core.placement import PipelineError, Placement
from ...core.schedule import Schedule
from ...core.tasks import unpack
from ...passes.backward import fused_in
from ...plans.plan import PipelinePlan
from ...pricing.cost import CostModel
from .choice import with_choices
from .models import in_stages
from .policy import Policy
from .problem import Problem, check_numbers, costs, is_whole
from .proof import read_plan
from .stages import stage_graph

Times = float | Sequence[float]


@dataclass(frozen=True)
class Pipeline:
    """A pipeline on given times: `minidl.plan` takes one in place of a recorded graph.

    A number is the time of a rank, shared by its chunks; a sequence has one time for each stage. `latency` and
    `bandwidth`: of links; `message_bytes`: of each activation or gradient on a link. Raises PipelineError for numbers
    that no pipeline has.
    """

    micro_batches: int
    forward: Times = 1.0
    output_grad: Times = 1.0
    weight_grad: Times = 1.0
    latency: float = 0.0
    bandwidth: float | None = None
    message_bytes: int = 0

    def __post_init__(self) -> None:
        check_numbers(1, self.micro_batches, None)
        if not is_whole(self.message_bytes, 0) or self.message_bytes >= 2**63:
            raise PipelineError(f"message_bytes is {shorten(self.message_bytes)}; it must be a whole number >= 0 and "
                                f"below 2^63")

    def cost(self, placement: Placement, layers: CostModel | None = None) -> CostModel:
        """The costs of these stages; `layers`: of a network's layers, which are summed. Raises PipelineError for a
        wrong number of times, CostError for bad ones."""
        if layers is not None:
            return in_stages(layers, placement)
        return costs(placement, self.forward, self.output_grad, self.weight_grad, self.latency, self.bandwidth)


def plan_times(pipeline: Pipeline, chosen: Policy, cost: CostModel | None, machine: Machine, *,
               chunks: int | None = None, placement: Placement | None = None, **options: Any) -> PipelinePlan:
    """The policy's plan, not proved yet. `cost`: per stage or layer, in place of the pipeline's times. Raises
    PipelineError for a violated precondition."""
    given, placement = placement, chosen.place(machine.ranks, chunks) if placement is None else placement
    if not isinstance(placement, Placement):
        raise PipelineError(f"placement is {shorten(placement)}; it must be a Placement")
    cost = pipeline.cost(placement, cost)
    problem = Problem.of(placement, pipeline.micro_batches, cost, machine.activation_cap)
    placement, tried = chosen.placed(problem, options, given)
    made = chosen(replace(problem, placement=placement), **options)
    schedule, placement = made.schedule, made.placement or placement
    total = int(unpack(schedule.keys).micro_batch.max(initial=-1)) + 1  # a stale plan may span several mini-batches
    if made.versions is None and total != pipeline.micro_batches * made.slices:
        raise PipelineError(f"{chosen.name} orders {total} micro-batches; there are {pipeline.micro_batches}")
    graph = made.graph or stage_graph(placement.stages, total, fused_in(schedule, placement.stages, total),
                                      placement.directions, pipeline.message_bytes
                                      or max(cost.sizes.get("message_bytes", ()), default=0))
    times = replace(made.cost, link=cost.link, step=cost.step, unit=cost.unit) if made.cost else cost
    return PipelinePlan(chosen.name, graph, schedule, times, machine.ranks,
                        notes=options | with_choices(tried, made.notes), placement=placement, micro_batches=total,
                        kept=options.get("kept", 1.0), slices=made.slices, versions=made.versions, steady=made.steady)


def read_times(pipeline: Pipeline, schedule: Schedule, cost: CostModel | None, machine: Machine, *,
               chunks: int | None = None, like: PipelinePlan | None = None) -> PipelinePlan:
    """The plan of a given order, not proved yet. Raises as `read_plan` does."""
    made = read_plan(schedule, machine, pipeline.micro_batches, chunks, like=like)
    return replace(made, cost=pipeline.cost(made.placement, cost))
