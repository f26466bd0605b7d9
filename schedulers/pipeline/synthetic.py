"""Pipelines on given times, which have nothing to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...core.machine import Machine, shorten
from ...core.placement import PipelineError, Placement, check_numbers, is_whole
from ...core.tasks import unpack
from ...passes.backward import fused_in
from ...passes.choices import Choices
from ...passes.draft import Draft
from ...plans.plan import PipelinePlan
from ...pricing.cost import CostModel
from ..ordered import Ordered
from .models import in_stages
from .policy import Policy
from .problem import Problem, costs
from .stages import stage_graph

if TYPE_CHECKING:
    from ..registry import Scheduler

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

    def layers(self, cost: CostModel | None = None) -> int | None:
        """How many layers have times, here or in `cost`; None if the times are of ranks."""
        times = (self.forward, self.output_grad, self.weight_grad) if cost is None else tuple(cost.kinds.values())
        return next((len(time) for time in times if isinstance(time, Sequence)), None)

    def cost(self, placement: Placement, layers: CostModel | None = None) -> CostModel:
        """The costs of these stages; `layers`: of a network's layers, which are summed. Raises PipelineError for a
        wrong number of times, CostError for bad ones."""
        if layers is not None:
            return in_stages(layers, placement)
        return costs(placement, self.forward, self.output_grad, self.weight_grad, self.latency, self.bandwidth)


@dataclass(frozen=True)
class GivenTimes:
    """A pipeline on given times: stages from the first line on, of one micro-batch until they are ordered. `cost`: per
    stage or layer, in place of the pipeline's times."""

    problem: Pipeline
    chosen: Scheduler
    cost: CostModel | None
    machine: Machine
    choices: Choices

    @cached_property
    def policy(self) -> Policy:
        policy = self.chosen.function
        assert isinstance(policy, Policy)
        return policy

    def draft(self) -> Draft:
        """One micro-batch in stages."""
        given = self.choices.placement
        place = (self.policy.place(self.machine.ranks, self.choices.chunks, self.problem.layers(self.cost))
                 if given is None else given)
        if not isinstance(place, Placement):
            raise PipelineError(f"placement is {shorten(place)}; it must be a Placement")
        cost, graph = self.problem.cost(place, self.cost), stage_graph(place.stages, 1)
        return Draft(self.policy.name, graph, self.machine, cost, place, np.zeros(len(graph)), graph.unit,
                     settled=True)  # costs give the times

    def order(self, draft: Draft) -> Ordered:
        """The policy's order of all micro-batches."""
        problem = Problem.of(draft.placement, self.problem.micro_batches, draft.cost, self.machine.activation_cap,
                             draft.graph)
        return self.policy.best(problem, self.choices.options, self.choices.placement)

    def ordered(self, draft: Draft, found: Ordered) -> Draft:
        """All micro-batches, in this order. Raises PipelineError for an order of another number."""
        schedule, place = found.schedule, found.placement or draft.placement
        total = int(unpack(schedule.keys).micro_batch.max(initial=-1)) + 1  # a stale plan may span several mini-batches
        if found.versions is None and total != self.problem.micro_batches * found.slices:
            raise PipelineError(f"{self.policy.name} orders {total} micro-batches; there are "
                                f"{self.problem.micro_batches}")
        graph = found.graph or stage_graph(
            place.stages, total, fused_in(schedule, place.stages, total), place.directions,
            self.problem.message_bytes or max(draft.cost.sizes.get("message_bytes", ()), default=0))
        return replace(draft, graph=graph, placement=place, schedule=schedule, versions=found.versions)

    def plan(self, draft: Draft, found: Ordered, limit: int | None) -> PipelinePlan:
        """The plan, not proved yet."""
        cost, own, schedule = draft.cost, found.cost, draft.schedule
        assert schedule is not None
        times = replace(own, link=cost.link, step=cost.step, unit=cost.unit) if own else cost
        return PipelinePlan(self.policy.name, draft.graph, schedule, times, self.machine.ranks, limit,
                            {**self.choices.options, **found.notes}, placement=draft.placement,
                            micro_batches=int(unpack(schedule.keys).micro_batch.max(initial=-1)) + 1,
                            kept=self.choices.options.get("kept", 1.0), slices=found.slices, versions=draft.versions,
                            steady=found.steady)
