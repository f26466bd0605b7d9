"""The problem that a command plans, by its flags: a step, a policy or an order, costs, a machine, options."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import schedulers
from ..core.graph import TaskGraph
from ..core.machine import Machine
from ..plans.plan import Plan
from ..pricing.collectives import Collective
from ..pricing.cost import CostModel, Link
from ..pricing.topology import Topology
from ..schedulers import pipeline
from ..schedulers.layer_times import layers
from ..schedulers.saved import SUMS, cut_in, kind_of
from .flags import UsageError, job
from .inputs import costs, scheduler_of, unmeasured

if TYPE_CHECKING:
    from ..training.recorded import Recorded


@dataclass(frozen=True)
class Problem:
    """`step`: of a network, or on given times; `recorded`: a network's, with its job, whose scheduler plans it."""

    step: TaskGraph | pipeline.Pipeline
    scheduler: schedulers.Scheduler
    cost: CostModel | None
    machine: Machine
    options: dict[str, Any] = field(default_factory=dict)
    recorded: Recorded | None = None

    def plan(self) -> Plan:
        """The proved plan."""
        if self.recorded is not None:
            assert self.cost is not None
            return self.recorded.plan(self.cost, self.machine, **self.options)
        return schedulers.plan(self.step, self.scheduler, self.cost, self.machine, **self.options)


def problem(arguments: Any, name: str | None = None, cost: CostModel | None = None, capped: bool = True) -> Problem:
    """The problem of the flags. `name`: another policy; `cost`: replaces the network's; `capped`: whether the cap and
    the limit of a pipeline hold. Raises UsageError, PipelineError or CostError."""
    chosen = scheduler_of(arguments, name)
    flags = "chunks", "k", "buckets", "objective", "time_limit"  # which are options of schedulers
    options = chosen.known(**{name: getattr(arguments, name) for name in flags}) | dict(arguments.scheduler_arg)
    if arguments.subject == "l":
        return _of_layers(arguments, chosen, options)
    if arguments.subject != "s" and not arguments.ranks:
        raise UsageError("the number of ranks is missing; give --ranks P")
    machine = machine_of(arguments, capped)
    if arguments.subject == "p":
        return Problem(*_times(arguments, chosen), machine, options | {"order": arguments.order})
    recorded = _recorded(arguments, name)
    if arguments.subject == "c":
        options["stage_of_unit"] = _cut(arguments, recorded, chosen.function)
    return Problem(recorded.graph, chosen, cost or _costs(arguments, recorded), machine, options, recorded)


def given(arguments: Any) -> Problem:
    """The order of a file. Raises ScheduleError for a file that is not a plan."""
    order, chunks = pipeline.read_file(arguments.plan), arguments.chunks
    like: Any = None
    stages, named = arguments.subject in "cp", "--scheduler" in arguments.given
    if (stages or kind_of(order) == "pipeline") and not arguments.ranks:
        raise UsageError("the number of ranks is missing; give --ranks P, --micro-batches M and, if a rank has several "
                         "stages, --chunks V")
    if stages and named:
        policy = scheduler_of(arguments).staged
        if not policy.placements and not policy.arranges:  # else it chooses where stages live, by the times
            like = problem(arguments, cost=None if "--costs" in arguments.given else CostModel.analytic(),
                           capped=False).plan()
        chunks = like.placement.chunks if like is not None else None if policy.arranges else chunks
    elif arguments.subject == "r" and (named or kind_of(order) != "data" or (arguments.ranks or 1) == 1):
        told = problem(arguments).plan().schedule.notes  # how ranks sum
        order = replace(order, notes={**told, **order.notes, **{k: v for k, v in told.items() if k == SUMS}})
    chosen = schedulers.Scheduler(arguments.plan, "pipeline" if stages else kind_of(order), order)
    options: dict[str, Any] = {"shard": arguments.shard} | (
        {"chunks": chunks, "like": like} if stages else {"experts_over": arguments.experts_over})
    if arguments.subject == "p":
        return Problem(*_times(arguments, chosen), machine_of(arguments), options)
    recorded = _recorded(arguments, arguments.scheduler if stages and named else arguments.plan)
    if stages and cut_in(order, recorded.graph) is None:  # it rejects the plan of another network
        options["stage_of_unit"] = _cut(arguments, recorded, order)
    cost = _costs(arguments, recorded) if "--costs" in arguments.given else CostModel.analytic()
    return Problem(recorded.graph, chosen, cost, machine_of(arguments), options)


def machine_of(arguments: Any, capped: bool = True) -> Machine:
    """The machine of the flags; with or without a pipeline's cap and limit."""
    shape = _sums(arguments)
    return Machine(arguments.ranks or 1, arguments.memory_limit if capped else None, arguments.activation_cap
                   if capped else None, lambda sizes: shape.time(sum(sizes.values())), arguments.replicas)


def _sums(arguments: Any) -> Collective:
    """How the ranks or replicas sum gradients."""
    staged, ranks = arguments.subject in "cp", arguments.ranks or 1
    summing, nodes = arguments.replicas if staged else ranks, _topology(arguments)
    return Collective(summing, _link(arguments), arguments.collective, arguments.servers,
                      nodes and nodes.of_sums(ranks if staged else 1, summing))


def _topology(arguments: Any) -> Topology | None:
    """The nodes of the job, in microseconds. Raises UsageError if they do not divide its ranks, or lack a link."""
    if not arguments.topology:
        return None
    told, total = arguments.topology, (arguments.ranks or 1) * arguments.replicas
    if total % told["nodes"]:
        raise UsageError(f"--topology: {told['nodes']:,} nodes do not divide {total:,} ranks into equal parts")
    for name, exists in (("inside", total > told["nodes"]), ("across", told["nodes"] > 1)):
        if exists and name not in told:
            raise UsageError(f"--topology nodes={told['nodes']} of {total:,} ranks lacks the link {name} nodes; give "
                             f"{name}=LATENCY:BANDWIDTH")
    links = {name: Link(latency, None if rate is None else rate / 1e6) for name in ("inside", "across")
             for latency, rate in [told.get(name, (0.0, None))]}
    return Topology(told["nodes"], total // told["nodes"], links["inside"], links["across"], told.get("rails", 1),
                    told.get("fill", "pipeline"))


def _link(arguments: Any) -> Link:
    """The link between two ranks, in microseconds."""
    return Link(arguments.latency, None if arguments.bandwidth is None else arguments.bandwidth / 1e6)


def _linked(arguments: Any, cost: CostModel) -> CostModel:
    """The costs, with the links between the ranks of a pipeline."""
    nodes = _topology(arguments)
    if nodes is None:
        return replace(cost, link=_link(arguments))
    rail, inside = nodes.of_messages(arguments.ranks or 1, arguments.replicas)
    return replace(cost, link=rail, links=inside)


def _recorded(arguments: Any, under: str | None) -> Recorded:
    """The step of one of the ranks that are all alike, or of a pipeline's first replica."""
    from ..training.recorded import Recorded  # only commands with a network import networks

    return Recorded(job(arguments, under), 0, arguments.replicas if arguments.subject == "c" else arguments.ranks or 1)


def _costs(arguments: Any, recorded: Recorded) -> CostModel:
    cost = costs(arguments, recorded)
    return _linked(arguments, cost) if arguments.subject == "c" else cost


def _cut(arguments: Any, recorded: Recorded, order: Any) -> Any:
    """The stage of each unit, balanced by costs that are never measured: a plan and its check must have equal ones."""
    cost = unmeasured("analytic" if arguments.costs == "measured" else arguments.costs)
    stages: int | None
    if isinstance(order, pipeline.Policy):
        each = order.layered and arguments.chunks is None
        stages = None if each else order.place(arguments.ranks, arguments.chunks).stages
    else:
        stages = arguments.ranks * (arguments.chunks or pipeline.chunks_in(order, arguments.ranks))
    return pipeline.balanced(recorded.graph, cost, stages)


def _times(arguments: Any, chosen: schedulers.Scheduler
           ) -> tuple[pipeline.Pipeline, schedulers.Scheduler, CostModel | None]:
    """A pipeline on the times of the flags, by default 1, and the costs of a file. Raises UsageError for both."""
    cost = None
    if "--costs" in arguments.given:
        if times := arguments.given & {"--forward", "--output-grad", "--weight-grad", "--exchange"}:
            raise UsageError(f"--costs {arguments.costs} has all times; leave {' and '.join(sorted(times))} out")
        cost = unmeasured(arguments.costs)
        if cost.source == "analytic":
            raise UsageError(f"--costs {arguments.costs} has rates of a device, not times of stages; measure them "
                             f"with minidl profile, or give --forward, --output-grad and --weight-grad")
        cost = _linked(arguments, cost) if arguments.given & {"--latency", "--bandwidth", "--topology"} else cost
    forward, output_grad, weight_grad = (1.0 if value is None else value
                                         for value in (arguments.forward, arguments.output_grad, arguments.weight_grad))
    exchange = 0.0 if arguments.exchange is None else arguments.exchange
    own = _linked(arguments, CostModel())
    return pipeline.Pipeline(arguments.micro_batches, forward, output_grad, weight_grad, own.link.latency,
                             own.link.bandwidth, arguments.message_bytes, own.links, arguments.gradient_bytes or 0,
                             exchange), chosen, cost


def _of_layers(arguments: Any, chosen: schedulers.Scheduler, options: dict[str, Any]) -> Problem:
    """Data-parallel ranks on the times of layers, and on the times of their sums or the bytes that these have."""
    sums, parts = "gradient_bytes" if arguments.gradient_bytes else "comm", arguments.parts
    if arguments.gradient_bytes and arguments.comm is not None:
        raise UsageError("--comm has the times of sums, and --gradient-bytes would give them; leave one out")
    times = {f"--{name.replace('_', '-')}": getattr(arguments, name)
             for name in ("forward", "output_grad", "weight_grad", sums)}
    if missing := [flag for flag, value in times.items() if value is None]:
        raise UsageError(f"give the layers' times with {', '.join(missing)}, or a network with --model")
    if arguments.exchange is not None:
        times["--exchange"] = arguments.exchange
    lists = {flag: np.atleast_1d(np.asarray(value, np.float64)).tolist() for flag, value in times.items()}
    if sums == "gradient_bytes" and len(lists["--gradient-bytes"]) == 1:
        lists["--gradient-bytes"] *= len(lists["--forward"])
    if len({len(v) for v in lists.values()}) > 1:
        raise UsageError(f"one time for each layer is needed: "
                         f"{', '.join(f'{flag} has {len(v)}' for flag, v in lists.items())}")
    forward, output_grad, weight_grad, comm, *exchange = lists.values()
    if any(not np.isfinite(t) or t < 0 for t in comm):
        raise UsageError("--comm: a time must be a finite number >= 0")
    time = _sums(arguments).time if sums == "gradient_bytes" else float
    graph, cost = layers(forward, output_grad, weight_grad, *exchange, parts=parts,
                         micro_batches=arguments.micro_batches)
    machine = Machine(arguments.ranks or 2, arguments.memory_limit, collective=lambda sizes: time(
        sum(comm[u] * n / parts for u, n in sizes.items())))
    return Problem(graph, chosen, cost, machine, chosen.known(buckets=min(2, len(comm)), part_bytes=1) | options)
