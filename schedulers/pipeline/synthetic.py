"""Pipelines on given times, which have nothing to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ...core.columns import Floats, Rows, spread
from ...core.graph import TaskGraph
from ...core.machine import Machine, is_whole, shorten
from ...core.placement import PipelineError, Placement, Refused, check_numbers
from ...core.schedule import Lane, Schedule
from ...core.tasks import Kind, pack, task_name, unpack
from ...passes.backward import fused_in
from ...passes.choices import Choices
from ...passes.draft import Draft
from ...passes.lag import in_time
from ...plans.plan import PipelinePlan
from ...pricing.cost import CostModel, Link
from ..ordered import Ordered
from ..saved import LAG, OLDER
from .models import in_stages
from .problem import Problem, costs
from .stages import stage_graph

if TYPE_CHECKING:
    from ..registry import Scheduler

Times = float | Sequence[float]


@dataclass(frozen=True)
class Pipeline:
    """A pipeline on given times: `minidl.plan` takes one in place of a recorded graph.

    A number is the time of a rank, shared by its chunks; a sequence has one time for each stage. `latency` and
    `bandwidth`: of links; `message_bytes`: of each activation or gradient on a link; `links`: exceptions, by ranks
    (`0->1`). `gradient_bytes`: of each stage, or of all alike, which the machine's replicas sum before an update.
    `exchange`: of a stage's experts in a forward, and as long in an output gradient: tokens to them and back. A rank
    waits for it, but while the other task of a pair computes. Raises PipelineError for numbers that no pipeline has.
    """

    micro_batches: int
    forward: Times = 1.0
    output_grad: Times = 1.0
    weight_grad: Times = 1.0
    latency: float = 0.0
    bandwidth: float | None = None
    message_bytes: int = 0
    links: Mapping[str, Link] = field(default_factory=dict)
    gradient_bytes: int | Sequence[int] = 0
    exchange: Times = 0.0

    def __post_init__(self) -> None:
        check_numbers(1, self.micro_batches, None)
        if not is_whole(self.message_bytes, 0) or self.message_bytes >= 2**63:
            raise PipelineError(f"message_bytes is {shorten(self.message_bytes)}; it must be a whole number >= 0 and "
                                f"below 2^63")

    def layers(self, cost: CostModel | None = None) -> int | None:
        """How many layers have times, here or in `cost`; None if the times are of ranks."""
        times = (self.forward, self.output_grad, self.weight_grad) if cost is None else tuple(cost.kinds.values())
        return next((len(time) for time in times if isinstance(time, Sequence | np.ndarray)), None)

    def cost(self, placement: Placement, layers: CostModel | None = None,
             step: tuple[TaskGraph, Schedule] | None = None) -> CostModel:
        """The costs of these stages; `layers`: of a network's layers, which are summed. `step`: the graph, and an order
        in whose pairs the exchanges of one task travel while the other computes: a pair takes as long as its
        computation, its exchanges, or the longer one of its tasks, as with many layers in a stage. Raises PipelineError
        for a wrong number of times, CostError for bad ones."""
        if layers is not None:
            return in_stages(layers, placement)
        travels = self.travels(placement)
        found = replace(costs(placement, self.forward, self.output_grad, self.weight_grad, self.latency,
                              self.bandwidth), links=self.links)
        if not travels.any():
            return found
        found = replace(found, kinds={**found.kinds, **{k: np.add(found.kinds[k], travels).tolist() for k in "FOB"}})
        if step is None:
            return found
        (graph, order), tasks = step, dict[str, float]()
        own, keys, time = unpack(order.keys), order.keys, found.durations(graph)[order.ids(graph)]
        away = travels[own.unit % placement.stages] * np.isin(own.kind, (Kind.F, Kind.O, Kind.B))
        for then in np.flatnonzero(order.second).tolist():
            both = slice(then - 1, then + 1)
            first, second = (time - away)[both].tolist()
            whole = max(first + second, away[both].sum(), time[both].max())
            tasks |= {task_name(keys[then - 1]): first, task_name(keys[then]): float(whole - first)}
        return replace(found, tasks=tasks)

    def travels(self, placement: Placement) -> Floats:
        """The time of the exchanges of each stage, one way."""
        told = np.asarray(self.exchange, np.float64)
        if told.ndim and len(told) != placement.stages:
            raise PipelineError(f"{len(told)} exchange times are given for {placement.stages} stages")
        if not (np.isfinite(told) & (told >= 0)).all():
            raise PipelineError(f"exchange is {shorten(self.exchange)}; it must be finite and at least 0")
        return np.broadcast_to(told if told.ndim else told * placement.share, placement.stages)


@dataclass(frozen=True)
class GivenTimes:
    """A pipeline on given times: stages from the first line on, of one micro-batch until they are ordered. `cost`: per
    stage or layer, in place of the pipeline's times."""

    problem: Pipeline
    chosen: Scheduler
    cost: CostModel | None
    machine: Machine
    choices: Choices

    def draft(self) -> Draft:
        """One micro-batch in stages."""
        given = self.choices.placement
        place = (self.chosen.staged.place(self.machine.ranks, self.choices.chunks, self.problem.layers(self.cost))
                 if given is None else given)
        if not isinstance(place, Placement):
            raise PipelineError(f"placement is {shorten(place)}; it must be a Placement")
        cost, graph = self.problem.cost(place, self.cost), stage_graph(place.stages, 1)
        return Draft(self.chosen.staged.name, graph, self.machine, cost, place, np.zeros(len(graph)), graph.unit,
                     stale=self.chosen.staged.stale, settled=True)  # costs give the times

    def order(self, draft: Draft) -> Ordered:
        """The policy's order of all micro-batches."""
        own = {name: value for name, value in self.choices.options.items() if name != LAG}
        problem = Problem.of(draft.placement, self.problem.micro_batches, draft.cost, self.machine.activation_cap,
                             draft.graph)
        return self.chosen.staged.best(problem, own, self.choices.placement)

    def ordered(self, draft: Draft, found: Ordered) -> Draft:
        """All micro-batches, in this order. Raises PipelineError for an order of another number."""
        schedule, place = found.schedule, found.placement or draft.placement
        total = int(unpack(schedule.keys).micro_batch.max(initial=-1)) + 1  # a stale plan may span several mini-batches
        if found.versions is None and total != self.problem.micro_batches * found.slices:
            raise PipelineError(f"{self.chosen.staged.name} orders {total} micro-batches; there are "
                                f"{self.problem.micro_batches}")
        sent = self.problem.message_bytes or [*draft.cost.sizes.get("message_bytes", ())] or 0
        if isinstance(sent, list) and "joint" in found.notes:  # which has cut the layers anew
            sent = np.take(sent, np.cumsum(found.notes["joint"]["layers"]) - 1).tolist()
        graph = stage_graph(place.stages, total, fused_in(schedule, place.stages, total), place.directions, sent)
        if found.graph is not None:  # with the same messages, whose slices are alike
            sizes, own = -(-graph.buffer_bytes // found.slices), found.graph.buffer_bytes
            graph = replace(found.graph, buffer_bytes=np.append(sizes, own[len(sizes):]))
        made = replace(draft, graph=graph, placement=place, schedule=schedule, versions=found.versions)
        made = made if LAG not in self.choices.options else in_time(made, self.choices.options[LAG])
        if schedule.joined is not None:
            made = replace(made, cost=self.problem.cost(place, self.cost, (made.graph, made.order)))
        return made if self.machine.replicas == 1 else self._summed(made, found)

    def _summed(self, draft: Draft, found: Ordered) -> Draft:
        """The step whose replicas sum each stage's gradients after the last one, on a lane `comm`, before an update.
        Raises Refused for other steps than of whole stages, and PipelineError without bytes or their time."""
        graph, order, time, count = draft.graph, draft.order, self.machine.collective, draft.placement.stages
        if any(x is not None for x in (found.graph, found.cost, draft.versions)) or draft.placement.directions > 1:
            raise Refused(self.chosen.staged.name, "on given times replicas sum gradients of the given stages once in "
                          "a step, in one direction", "take another policy, or leave the replicas out")
        told = np.ravel(self.problem.gradient_bytes)
        if len(told) not in (1, count) or not told.all() or time is None:
            raise PipelineError(
                f"{self.chosen.staged.name}: {self.machine.replicas} replicas sum gradients, so gradient_bytes must be "
                f"above 0, one number or {count}, and the machine needs a collective")
        sizes, stages = np.broadcast_to(told, count), np.arange(count)
        sums, updates, total = pack(stages, Kind.A), pack(stages, Kind.U), len(graph.buffer_bytes) - count + stages
        each, none = Rows.of(total[:, None].tolist()), Rows.of([()] * count)
        grown = graph.insert(np.full(2 * count, len(graph) - 1), np.append(sums, updates), each.followed_by(each),
                             each.followed_by(none), np.append(sizes, 0 * sizes))
        own = unpack(order.keys)  # a stage is summed when its last gradient is there
        first = np.argsort(spread(own.unit, np.arange(len(order)), count, 0, np.maximum), kind="stable")
        rank = draft.placement.home(updates, 1)[first]
        schedule = order.followed_by({lane: updates[first[rank == lane.rank]] for lane in order.lanes}).with_lanes({
            Lane(r, "comm"): sums[first[rank == r]] for r in np.unique(rank).tolist()})
        tasks = {f"{s}A0": float(time({s: n})) for s, n in enumerate(sizes.tolist())} | {f"{s}U0": 0.0 for s in stages}
        return replace(draft, graph=grown, schedule=schedule,
                       cost=replace(draft.cost, tasks={**draft.cost.tasks, **tasks}))

    def plan(self, draft: Draft, found: Ordered, limit: int | None) -> PipelinePlan:
        """The plan, not proved yet."""
        cost, own, schedule = draft.cost, found.cost, draft.schedule
        assert schedule is not None
        if draft.versions is not None:
            schedule = replace(schedule, notes={**schedule.notes, OLDER: self.chosen.staged.name})
        times = replace(own, link=cost.link, links=cost.links, step=cost.step, unit=cost.unit) if own else cost
        return PipelinePlan(self.chosen.staged.name, draft.graph, schedule, times, self.machine.size, limit,
                            {**self.choices.options, **found.notes}, placement=draft.placement,
                            micro_batches=int(unpack(schedule.keys).micro_batch.max(initial=-1)) + 1,
                            kept=self.choices.options.get("kept", 1.0), slices=found.slices, versions=draft.versions,
                            steady=found.steady)
