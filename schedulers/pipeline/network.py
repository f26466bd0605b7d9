"""Recorded networks in stages: a policy orders these, and what a network has beside (updates, sums over replicas, the
weights that stale stages keep) joins the order: `minidl.passes.every` has the list.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from inspect import Parameter
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.columns import Floats, Ints, spread
from ...core.graph import TaskGraph
from ...core.machine import Machine, shorten
from ...core.placement import PipelineError, Placement, Refused, check_numbers
from ...core.tasks import Kind
from ...passes.choices import Choices
from ...passes.draft import Draft
from ...passes.every import BEFORE_THE_ORDER, options_of_passes, through
from ...passes.shard import searched
from ...plans.plan import PipelinePlan
from ...pricing.cost import CostModel
from ..ordered import Ordered
from ..saved import DROPPED, notes_of, policy_notes
from .models import balanced, begun
from .policy import Policy
from .problem import Problem
from .slices import slices_in
from .steady_order import steady_order

if TYPE_CHECKING:
    from ..registry import Scheduler

#: the options of a given order; the options of a cut, which all policies have
OF_ORDERS = {name: Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind) for name, kind in (
    ("chunks", int | None), ("stage_of_unit", Ints | None), ("cap", float | str | None), ("like", PipelinePlan | None))}
OF_CUTS = {name: OF_ORDERS[name] for name in ("chunks", "stage_of_unit", "cap")}


def options_of(chosen: Policy) -> dict[str, Parameter]:
    """The options with which this policy plans a recorded step: of the cut, of the passes, and its own."""
    return OF_CUTS | dict(options_of_passes(False)) | chosen.options


@dataclass(frozen=True)
class Network:
    """A recorded step and its policy, on the way to a plan (`minidl.schedulers.planner`). Its micro-batches are those
    that it was recorded with. Stages are balanced by `cost`, or given."""

    problem: TaskGraph
    chosen: Scheduler
    cost: CostModel
    machine: Machine
    choices: Choices

    @cached_property
    def place(self) -> Placement:
        """The placement of the stages, unless the policy chooses another one."""
        layers, own = None, self.choices.stage_of_unit
        if self.chosen.staged.layered:
            layers = 1 + int(np.max(balanced(self.problem, self.cost) if own is None else own))
        return self.chosen.staged.place(self.machine.ranks, self.choices.chunks, layers)

    @cached_property
    def told(self) -> dict[str, Any]:
        """The options of passes."""
        known = options_of_passes(False).keys()
        return {name: self.choices.options[name] for name in sorted(known & self.choices.options.keys())}

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options of the policy."""
        return {name: value for name, value in self.choices.options.items() if name not in self.told}

    @cached_property
    def micro_batches(self) -> int:
        """The number of micro-batches, or of their slices."""
        return int(self.problem.micro_batch.max(initial=0)) + 1

    @cached_property
    def slices(self) -> int:
        """The slices of each micro-batch. Raises Refused if the policy orders another number."""
        slices, policy = slices_in(self.problem), self.chosen.staged
        asked = self.options.get("slices", slices)
        if policy.sliced and asked != slices:
            raise Refused(policy.name, f"{asked} slices are asked for, but this step was recorded with {slices} of "
                          f"each micro-batch", "ask for as many")
        if slices > 1 and not policy.sliced:
            raise Refused(policy.name, f"it orders whole micro-batches, but this step was recorded with {slices} "
                          f"slices of each", "use seq1f1b")
        return slices

    @cached_property
    def stage_of_unit(self) -> Ints:
        """The stage of each unit."""
        own = self.choices.stage_of_unit
        return balanced(self.problem, self.cost, self.place.stages) if own is None else np.asarray(own)

    def draft(self, placement: Placement | None = None) -> Draft:
        """The step with the stage of each task, in these or usual places. Raises PipelineError if it cannot be cut."""
        name, place = self.chosen.staged.name, self.place
        if placement is None:
            assert self.slices
            check_numbers(place.stages, self.micro_batches, self.machine.activation_cap)
        return begun(self.problem, self.cost, placement or place, self.stage_of_unit, name=name, machine=self.machine,
                     stale=self.chosen.staged.stale, reverses=self.chosen.staged.reverses)

    def problem_of(self, draft: Draft) -> Problem:
        """The policy's problem."""
        each = self.options.get("mini_batches", 1)  # policies with mini-batches order several of them
        if not isinstance(each, int) or not 1 <= each <= self.micro_batches:
            raise PipelineError(f"{self.chosen.staged.name}: mini_batches={shorten(each)} must be a whole number from "
                                f"1 to {self.micro_batches}, the number of micro-batches")
        return problem_of(draft, self.place, self.micro_batches // (each * self.slices))

    def order(self, draft: Draft) -> Ordered:
        """The policy's order, of one step or, if it never drains, of the body that repeats."""
        options, policy = self.options, self.chosen.staged
        if policy.stale:
            return policy.best(self.problem_of(draft), options, order=lambda problem: steady_order(
                policy, problem, options))
        return policy.best(self.problem_of(draft), options | ({"slices": self.slices} if policy.sliced else {}))

    def ordered(self, draft: Draft, found: Ordered) -> Draft:
        """The draft in this order and its placement."""
        place = found.placement or self.place
        if place is not self.place:
            draft = through(BEFORE_THE_ORDER, self.draft(place), self.choices)
        return replace(draft, placement=place, schedule=found.schedule, versions=found.versions)

    def plan(self, draft: Draft, found: Ordered, limit: int | None) -> PipelinePlan:
        """The plan, not proved yet, with the notes that a file of it needs. Its `cost` has the times of its tasks."""
        schedule = draft.schedule
        assert schedule is not None
        dropped, policy, told = self.choices.dropped, self.chosen.staged, {**self.options, **self.told}
        notes = {**notes_of(self.problem, self.stage_of_unit, self.told), **schedule.notes}
        notes |= {DROPPED: " ".join(map(str, dropped))} if dropped else {}
        if draft.versions is not None or policy.sliced or draft.placement.directions > 1 or draft.placement.apart:
            chunks = self.choices.chunks if policy.layered else self.place.chunks
            notes |= policy_notes(policy.name, told | ({} if chunks is None else {"chunks": chunks}))
        return PipelinePlan(policy.name, draft.graph, replace(schedule, notes=notes), draft.priced,
                            self.machine.size, limit, {**told, **found.notes},
                            (*draft.remarks, *searched(draft, self.choices.shard)),
                            placement=draft.placement, micro_batches=self.micro_batches,
                            cap=self.machine.activation_cap, kept=self.options.get("kept", 1.0), slices=self.slices,
                            versions=draft.versions)


def problem_of(draft: Draft, placement: Placement, micro_batches: int) -> Problem:
    """The problem with the mean times per stage, and the mean time of a message as latency. A stage without O or W gets
    a tiny time for it, so that policies can plan."""
    coarse, count = draft.graph, draft.micro_batches  # in all mini-batches of the step

    def mean(*kinds: Kind) -> Floats:
        mine = np.isin(coarse.kind, kinds)
        return np.maximum(np.bincount(coarse.unit[mine], draft.time[mine], placement.stages) / count, 1e-9)

    latency, cap = float(draft.cost.link.time(_message_bytes(coarse))), draft.machine.activation_cap
    return Problem(placement, micro_batches, mean(Kind.F), mean(Kind.O, Kind.R), mean(Kind.W), latency, cap,
                   recorded=True)


def _message_bytes(coarse: TaskGraph) -> float:
    """The mean bytes that a stage's forward or output gradient sends to another stage."""
    reader, buffer = coarse.reads.row_of_each(), coarse.reads.ids
    made = spread(coarse.writes.ids, coarse.writes.row_of_each(), len(coarse.buffer_bytes), -1)[buffer]
    crosses = (made >= 0) & np.isin(coarse.kind[made], (Kind.F, Kind.O)) & (coarse.unit[made] != coarse.unit[reader])
    sizes = coarse.buffer_bytes[np.unique(buffer[crosses])]
    return float(sizes.mean()) if len(sizes) else 0.0
