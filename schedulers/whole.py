"""A step that is not cut into stages: on one device, or on ranks that are all alike and sum gradients."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..core.graph import TaskGraph
from ..core.machine import Machine, PlanError
from ..core.schedule import Schedule
from ..passes.choices import Choices
from ..passes.draft import Draft
from ..passes.every import options_of_passes
from ..passes.experts import WHAT as EXPERTS
from ..passes.group import WHAT as WAITING
from ..passes.group import groups_in
from ..passes.shard import costs, searched
from ..plans.plan import Plan
from ..pricing.cost import CostModel
from .data_parallel import Policy as OnAllRanks
from .layer_times import with_communication
from .ordered import Ordered, as_ordered, taken
from .pipeline.policy import Policy
from .registry import Scheduler, made_by
from .saved import GROUPS, LAG, PAIRS, SUMS, policy_notes, sums_in


@dataclass(frozen=True)
class Whole:
    """A recorded step and its policy, on the way to a plan (`planner.py`). An order that leaves something open is one
    of the policy that its notes name: what this makes of the step, in the given order."""

    graph: TaskGraph
    chosen: Scheduler
    cost: CostModel
    machine: Machine
    choices: Choices

    @cached_property
    def policy(self) -> tuple[Scheduler, dict[str, Any]]:
        """The policy of the step, which may be the one behind an order, and its options."""
        how = self.chosen.function
        under, known = made_by(how) if isinstance(how, Schedule) else (None, {})
        asked = {} if self.chosen.own else options_of_passes(True)
        own = {name: value for name, value in self.choices.options.items() if name not in asked}
        return (self.chosen, own) if under is None else (under, known)

    def draft(self) -> Draft:
        """The step, with the sums over ranks that its policy asks for."""
        policy, options = self.policy
        how, data = policy.function, self.chosen.parallel == "data"
        sums = (how.summed(self.graph, options) if isinstance(how, OnAllRanks)
                else sums_in(how) if isinstance(how, Schedule) and data else None)
        draft = Draft.of(self.graph, self.cost, self.machine, sums, self.chosen.name)
        return draft if policy.rewrite is None else policy.rewrite(draft, **taken(policy.rewrite, options))

    def order(self, draft: Draft) -> Ordered:
        """The policy's order. Raises PlanError for a function that takes something else."""
        policy, options = self.policy
        how, cost = policy.function, draft.cost if policy.rewrite is None else draft.priced
        if draft.sums is not None and self.machine.collective is not None:
            cost = with_communication(draft.graph, cost, self.machine.collective)
        if isinstance(how, Schedule):
            return Ordered(how, cost=cost.divided(how.side_sms))
        assert not isinstance(how, Policy)
        try:
            inspect.signature(how).bind(draft.graph, cost, self.machine, **options)
        except TypeError as error:
            raise PlanError(f"scheduler {policy.name}: {error}; a scheduler is a function of (graph, cost, machine)"
                            ) from None
        given = replace(cost, tasks=dict(cost.tasks), kinds=dict(cost.kinds)) if policy.own else cost  # it may change
        made = how(draft.graph, given, self.machine, **options)
        if isinstance(made, Schedule):
            return Ordered(made, cost=cost)
        made = as_ordered(made, policy.name, how) if not isinstance(made, Ordered) else made
        return made if made.cost is not None else replace(made, cost=cost)

    def ordered(self, draft: Draft, found: Ordered) -> Draft:
        """The draft in this order, with the notes that a file of it needs."""
        policy, options = self.policy
        given = isinstance(policy.function, Schedule)
        notes = {} if draft.sums is None else {SUMS: json.dumps(asdict(draft.sums), default=int)}
        if not policy.own and (policy.each or policy.rewrite):
            notes |= policy_notes(policy.name, options)
        if self.choices.options.get(LAG) is not None:
            notes[LAG] = str(self.choices.options[LAG])
        if self.choices.options.get(WAITING) is not None and (groups := groups_in(draft.graph)):
            notes[GROUPS] = " ".join(groups.values())
        if self.choices.experts_over != "none":
            notes[EXPERTS] = self.choices.experts_over
        if self.cost.corun is not None and not given:
            notes[PAIRS] = "priced"
        schedule = self.chosen.function if isinstance(self.chosen.function, Schedule) else found.schedule
        if np.isnan(draft.time).any():  # of communication
            draft = replace(draft, time=(found.cost or self.cost).durations(draft.graph) + self.cost.launch)
        notes = {**schedule.notes, **notes}  # a file's stay
        return replace(draft, schedule=replace(schedule, notes=notes) if notes else schedule, planned=Plan)

    def plan(self, draft: Draft, found: Ordered, limit: int | None) -> Plan:
        """The plan, not proved yet."""
        assert draft.schedule is not None
        cost, shared, remarks = found.cost or self.cost, self.choices.shard, found.remarks + draft.remarks
        if shared.level:
            cost, remarks = costs(draft, cost), remarks + searched(draft, shared)
        return Plan(self.chosen.name, draft.graph, draft.schedule, cost, self.machine.size, limit,
                    {**self.choices.options, **self.policy[1], **found.notes}, remarks)
