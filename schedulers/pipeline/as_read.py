"""A pipeline in an order of unknown origin, on the way to a plan: stages of a recorded network, or given times.

Stages come from the order's notes, or are given, or balanced by `cost`; their placement follows from the order. Updates
that it lacks come last, after sums over replicas. A grid of torch's is taken as torch's runtime takes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...core.graph import TaskGraph
from ...core.machine import Machine
from ...core.placement import Placement, Refused
from ...core.schedule import Lane, Schedule
from ...core.tasks import COLLECTIVE, COMMUNICATION, Kind, pack, repack, unpack
from ...passes.choices import Choices
from ...passes.draft import Draft
from ...passes.every import AFTER_THE_ORDER, BEFORE_THE_ORDER, through
from ...passes.placed import moved
from ...passes.replicas import replicas
from ...passes.shard import with_sums
from ...passes.synchronise import norms_apart
from ...plans.plan import PipelinePlan, Plan
from ..layer_times import with_communication
from ..ordered import Ordered
from ..registry import Scheduler, made_by
from ..saved import cut_in
from ..saved import stages_in as options_of_stages
from .models import cut
from .network import Network
from .proof import as_torch_does, read_plan, stages_in
from .synthetic import Pipeline


@dataclass(frozen=True)
class AsRead:
    """An order, and what it is of. Raises ScheduleError or PipelineError as `read_plan` does."""

    problem: TaskGraph | Pipeline
    chosen: Scheduler
    cost: Any  #: CostModel, or None for given times as they are
    machine: Machine
    asked: Choices

    @cached_property
    def micro_batches(self) -> int:
        """The number of micro-batches, or of their slices."""
        graph = self.problem
        return graph.micro_batches if isinstance(graph, Pipeline) else int(graph.micro_batch.max(initial=0)) + 1

    @cached_property
    def _checked(self) -> tuple[Schedule, tuple[str, ...]]:
        """The order, and remarks on it."""
        order = self.chosen.function
        assert isinstance(order, Schedule)
        return as_torch_does(order, self.machine.ranks, self.micro_batches, self.asked.chunks,
                             not isinstance(self.problem, Pipeline))

    @property
    def schedule(self) -> Schedule:
        return self._checked[0]

    @cached_property
    def like(self) -> PipelinePlan | None:
        """A plan by the policy that made the order, if that says more than an order (`read_plan`)."""
        under, known = made_by(self.schedule)
        own = self.asked.options.get("like")
        if own is not None or isinstance(self.problem, Pipeline) or under is None or under.parallel != "pipeline":
            return own
        choices = Choices(self.asked.dropped, chunks=known.pop("chunks", None),
                          stage_of_unit=cut_in(self.schedule, self.problem), options=known)
        road = Network(self.problem, under, self.cost, self.machine, choices)
        draft = through(BEFORE_THE_ORDER, road.draft(), choices)
        found = road.order(draft)
        return road.plan(through(AFTER_THE_ORDER, road.ordered(draft, found), choices), found, None)

    @cached_property
    def whole(self) -> Schedule:
        """The order with whole tasks in the place of their first parts, and without other parts."""
        if not self.wide:
            return self.schedule
        own = unpack(self.schedule.keys)
        part = np.where(np.isin(own.kind, (Kind.F, Kind.O, Kind.W, Kind.B, Kind.R)), own.part, 0)
        first = self.schedule.keep(part <= 1)
        keys = np.where(part == 1, repack(self.schedule.keys, part=0), self.schedule.keys)[part <= 1]
        return replace(first, keys=keys, notes=self.schedule.notes)

    @property
    def wide(self) -> bool:
        """Whether tasks of a network are in parts."""
        return isinstance(self.asked.parts, dict) and max(self.asked.parts.values(), default=1) > 1

    @property
    def sums(self) -> bool:
        """Whether the order has the updates or the sums of its step; torch's grids have neither."""
        return bool(np.isin(unpack(self.schedule.keys).kind, (Kind.U, *COLLECTIVE)).any())

    @property
    def shards(self) -> bool:
        """Whether replicas share something out."""
        return self.asked.shard.where(self.schedule.notes if self.machine.replicas > 1 else {}).level > 0

    @cached_property
    def choices(self) -> Choices:
        """The choices, with the places of the order in which stages are whole."""
        graph = self._read_from[0]
        if graph is None or self.machine.replicas == 1:
            return self.asked
        return replace(self.asked, shard=self.asked.shard.where(_of_stages_here(self.schedule, graph).notes))

    @cached_property
    def _read_from(self) -> tuple[TaskGraph | None, PipelinePlan]:
        """The network's stages, None for given times and stale plans, and the plan before passes."""
        graph, like, chunks, machine = self.problem, self.like, self.asked.chunks, self.machine
        if isinstance(graph, Pipeline):
            if machine.replicas > 1:
                raise Refused(self.chosen.name, "on given times replicas sum gradients under policies, not in an order "
                              "that is read", "name its policy, or leave the replicas out")
            made = read_plan(self.schedule, machine, self.micro_batches, chunks, like=like)
            cost = graph.cost(made.placement, self.cost, (made.graph, made.schedule))
            if size := graph.message_bytes or [*cost.sizes.get("message_bytes", ())]:
                made = read_plan(self.schedule, machine, self.micro_batches, chunks, None, like, size)
            own = like.cost.tasks if like is not None else {}  # of copies
            return None, replace(made, cost=replace(cost, tasks={**own, **cost.tasks}))
        if like is not None and like.stale:  # its graph has what the order says nothing of
            made = read_plan(self.schedule, machine, self.micro_batches, chunks, like.graph, like)
            return None, replace(made, cost=like.cost)
        if like is not None:
            return self._read(like.placement)
        _, made = self._read(stages_in(self.schedule, machine.ranks, self.micro_batches, chunks))
        return self._read(made.placement)  # which says which stages share a rank's scalars

    def _read(self, placement: Placement | int) -> tuple[TaskGraph, PipelinePlan]:
        """A network's stages in these places, or so many, and their plan with the costs of its tasks."""
        assert isinstance(self.problem, TaskGraph)
        stage, order, machine = cut_in(self.schedule, self.problem), self.whole, self.machine
        draft = cut(self.problem, self.cost, placement, self.asked.stage_of_unit if stage is None else stage,
                    machine=machine, dropped=self.asked.dropped, options=options_of_stages(self.schedule.notes))
        if machine.replicas > 1 and not self.sums:
            order = order.keep(~np.isin(unpack(order.keys).kind, COMMUNICATION))  # messages follow from the rest
            machine = replace(machine, replicas=1)
        elif self.shards:
            order = with_sums(order, norms_apart(draft).graph)
        updates, bare = draft.graph.kind == Kind.U, not (unpack(order.keys).kind == Kind.U).any()
        if bare:  # such as torch's grids
            order = _of_stages_here(order, draft.graph)
        if bare and isinstance(placement, Placement):
            order = order.followed_by({lane: draft.graph.keys[updates & (draft.rank == lane.rank)]
                                       for lane in order.lanes if lane.name == "main"})
        made = read_plan(order, machine, self.micro_batches, self.asked.chunks, draft.graph, self.like)
        times = draft.price(made.graph)
        if self.machine.collective is not None:
            times = with_communication(made.graph, times, self.machine.collective)
        return draft.graph, replace(made, cost=times)

    def draft(self) -> Draft:
        """The step that was read, in its order: it has been through the passes before it."""
        made = self._read_from[1]
        unit, place = made.graph.unit, made.placement
        up = place.home(made.graph.keys, made.micro_batches) != place.table[0][unit]  # in the second direction
        return Draft(made.scheduler, made.graph, self.machine, self.cost or made.cost, place,
                     made.cost.durations(made.graph), unit + place.stages * up, settled=True, read=True, planned=Plan,
                     schedule=self.whole if self.shards and self.sums else made.schedule)

    def order(self, draft: Draft) -> Ordered:
        """The order as it is."""
        return Ordered(draft.order, remarks=self._checked[1])

    def ordered(self, draft: Draft, found: Ordered) -> Draft:
        """The draft, for the passes that shards and parts need; with sums over replicas, if the order has none."""
        made = self._read_from[1]
        if made.synthetic or made.stale:
            return draft
        draft = replace(draft, settled=False)
        return draft if self.sums or self.machine.replicas == 1 else replicas(draft)

    def plan(self, draft: Draft, found: Ordered, limit: int | None) -> PipelinePlan:
        """The plan, not proved yet. Raises ScheduleError if parts are on other lanes than those beside the first."""
        made, order = replace(self._read_from[1], limit=limit, remarks=found.remarks), draft.order
        if draft.graph is made.graph:
            return made
        if self.wide and _lanes(order) != _lanes(self.schedule):
            raise self.schedule.error("second parts of tasks must be on lanes of their own, in the order of the first "
                                      "parts")
        return replace(made, graph=draft.graph, schedule=order, cost=draft.priced, ranks=self.machine.size)


def _of_stages_here(order: Schedule, graph: TaskGraph) -> Schedule:
    """The order of all stages' tasks without the gradients that these stages do not have: of a first stage's input, of
    parameters where there are none."""
    own = unpack(order.keys)
    output, weight = (graph.find(pack(own.unit, kind, own.micro_batch)) >= 0 for kind in (Kind.O, Kind.W))
    here = np.select([own.kind == Kind.O, own.kind == Kind.W, own.kind == Kind.B], [output, weight, output | weight],
                     True)
    last = np.maximum.accumulate(np.where(here, np.arange(len(here)), -1))
    before = np.where(last >= order.ptr[order.lane_of_each()], order.keys[last], -1)[~here]
    return replace(order.keep(here), notes=moved(order.notes, dict(zip(order.keys[~here].tolist(), before.tolist(),
                                                                       strict=True))))


def _lanes(schedule: Schedule) -> dict[Lane, list[int]]:
    return {lane: schedule.order(i).tolist() for i, lane in enumerate(schedule.lanes)}
