"""Pipeline policies on given times or of a network: plan, simulate one or all of them, check a plan, explain a task."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import schedulers
from ..core.graph import TaskGraph
from ..core.machine import Machine
from ..plans.plan import PipelinePlan
from ..pricing.cost import CostModel
from ..schedulers import pipeline as pipelines
from ..system.loading import foreseen
from . import show
from .flags import UsageError, job
from .inputs import collective, costs, link, recorded_step, scheduler_of

if TYPE_CHECKING:
    from ..training.recorded import Recorded

SHOWN = 4000  #: the most tasks of a readable grid


def planned(arguments: Any, name: str | None = None, cost: CostModel | None = None, capped: bool = True
            ) -> PipelinePlan:
    """The proved plan for the flags. `name`: another policy; `cost`: replaces the network's; `capped`: whether cap and
    limit hold. Raises UsageError, PipelineError, MemoryLimitError or CostError."""
    if arguments.model:
        recorded, cost, options = network(arguments, name, cost, capped)
        made = recorded.plan(cost, **options)
    else:
        times, cost = _given(arguments)
        chosen, machine, options = _asked(arguments, name, capped)
        made = schedulers.plan(times, chosen, cost, machine, **options)
    assert isinstance(made, PipelinePlan)
    return made


def network(arguments: Any, name: str | None = None, cost: CostModel | None = None, capped: bool = True
            ) -> tuple[Recorded, CostModel, dict[str, Any]]:
    """The recorded step of a rank of the first replica, its costs, and what `Recorded.plan` takes beside them."""
    chosen, machine, options = _asked(arguments, name, capped)
    recorded = recorded_step(job(arguments, chosen.name), 0, arguments.replicas)
    cost = cost or replace(costs(arguments, recorded), link=link(arguments))
    cut = _cut(arguments, recorded, chosen.function)
    return recorded, cost, {"machine": machine, "stage_of_unit": cut, **options}


def _asked(arguments: Any, name: str | None, capped: bool) -> tuple[schedulers.Scheduler, Machine, dict[str, Any]]:
    """The policy, its machine and its options by the flags."""
    if not arguments.ranks:
        raise UsageError("the number of ranks is missing; give --ranks P")
    chosen = scheduler_of(arguments, name)
    options = dict(arguments.scheduler_arg)
    options |= chosen.known(objective=arguments.objective, time_limit=arguments.time_limit)
    return chosen, _machine(arguments, capped), chosen.known(chunks=arguments.chunks) | options


def _machine(arguments: Any, capped: bool = True) -> Machine:
    """The machine of the flags; with or without its cap and limit."""
    return Machine(arguments.ranks, arguments.memory_limit if capped else None,
                   arguments.activation_cap if capped else None, collective(arguments, arguments.replicas),
                   arguments.replicas)


def _cut(arguments: Any, recorded: Recorded, order: Any) -> Any:
    """The stage of each unit, balanced by costs that are never measured: a plan and its check must have equal ones."""
    cost = CostModel.analytic() if arguments.costs in ("measured", "analytic") else CostModel.load(arguments.costs)
    stages = (order.place(arguments.ranks, arguments.chunks).stages if isinstance(order, pipelines.Policy)
              else arguments.ranks * (arguments.chunks or pipelines.chunks_in(order, arguments.ranks)))
    return pipelines.balanced(recorded.graph, cost, stages)


def _given(arguments: Any) -> tuple[pipelines.Pipeline, CostModel | None]:
    """A pipeline on the times of the flags, by default 1, and the costs of a file. Raises UsageError for both."""
    cost = None
    if "--costs" in arguments.given and not arguments.model:
        if times := arguments.given & {"--forward", "--output-grad", "--weight-grad"}:
            raise UsageError(f"--costs {arguments.costs} has all times; leave {' and '.join(sorted(times))} out")
        cost = CostModel.load(arguments.costs)
        if cost.source == "analytic":
            raise UsageError(f"--costs {arguments.costs} has rates of a device, not times of stages; measure them "
                             f"with minidl profile, or give --forward, --output-grad and --weight-grad")
        cost = replace(cost, link=link(arguments)) if arguments.given & {"--latency", "--bandwidth"} else cost
    forward, output_grad, weight_grad = (1.0 if value is None else value
                                         for value in (arguments.forward, arguments.output_grad, arguments.weight_grad))
    return pipelines.Pipeline(arguments.micro_batches, forward, output_grad, weight_grad, arguments.latency), cost


def text(plan: PipelinePlan) -> str:
    """Grid and figures as text."""
    price = pipelines.price(plan)
    rows = [("makespan", price.makespan, "barrier to barrier"),
            ("largest span", price.max_span, "first start to last end on one rank"),
            ("period", price.period,
             "per step when steps are chained" if plan.steady is None else "per mini-batch in steady state"),
            ("bubble rate", price.bubble_rate, "idle share of the largest span"),
            ("peak activations", max(price.peak_activations),
             f"live full stages; per rank {_short(price.peak_activations)}"),
            ("waits", plan.waits, "between lanes of one rank, with messages on lanes of their own")]
    if plan.peak_bytes:
        rows.append(("peak bytes", max(plan.peak_bytes), f"per rank {_short(plan.peak_bytes)}"))
    grid = pipelines.grid(plan, plan.timeline, show.width()) if len(plan.schedule) <= SHOWN else ""
    unit = f" ({plan.cost.unit})" if plan.cost.unit else ""
    text = (f"{grid}\n\n" if grid else "") + show.table((f"{plan.scheduler}{unit}", "", "meaning"), rows)
    if status := plan.notes.get("status"):
        verdict = "proved" if status["proved"] else "not proved, the time limit came first (--time-limit)"
        text += f"\n\n{status['objective']} {status['value']:g}, bound {status['bound']:g}: {verdict}"
    for what, choice in plan.notes.get("choices", {}).items():
        tried = ", ".join(f"{name} {time:g}" for name, time in choice["makespans"].items())
        text += f"\n\n{what} {choice['picked']}, the best by simulation; makespans: {tried}"
    if other := plan.notes.get("beside"):
        text += f"\n\n{other['said']}"
    if joint := plan.notes.get("joint"):
        than = "" if joint["interleaved"] is None else f"; interleaved 1F1B takes {joint['interleaved']:g}"
        text += (f"\n\n{joint['policy']} on stages of {_short(joint['layers'])} layers, {joint['placement']}: the "
                 f"fastest of {joint['tried']} arrangements by simulation, {joint['makespan']:g}{than}")
    return text


def said(plan: PipelinePlan) -> dict[str, Any]:
    """The notes for JSON: the status of a search for an optimum, the choices that were tried, the published policies
    beside an order of one's own."""
    notes = plan.notes
    return notes.get("status", {}) | {key: notes[key] for key in ("choices", "joint", "beside") if key in notes}


def _short(values: Any) -> str:
    text = [f"{v:,}" if isinstance(v, int) else f"{v:g}" for v in values]
    return " ".join(text if len(text) <= 12 else [*text[:6], "...", *text[-3:]])


def table(arguments: Any) -> int:
    """Prints all policies that accept these numbers, and the one of the flags; the best of each column is marked."""
    plans, left_out = every(arguments)
    found = [{"scheduler": name, "chunks": plan.placement.chunks, "stale": plan.stale,
              **pipelines.price(plan).as_json()} for name, plan in plans.items()]
    if not found:
        raise UsageError("no policy accepts these numbers: " + next(iter(left_out.values()), ""))
    return show.emit(arguments, {"policies": found, "left_out": left_out}, lambda: _table_text(found, left_out))


def every(arguments: Any) -> tuple[dict[str, PipelinePlan], dict[str, str]]:
    """The plans by all policies, and by the one of the flags; and why others cannot plan this."""
    found: dict[str, PipelinePlan] = {}
    left_out: dict[str, str] = {}
    # a search for an optimum takes its time
    names = [n for n in sorted(schedulers.names("pipeline")) if "time_limit" not in schedulers.find(n).options]
    if "--scheduler" in arguments.given and arguments.scheduler not in names:
        names.insert(0, scheduler_of(arguments).name)
    with show.progress("pricing policies", len(names)) as done:
        for i, name in enumerate(names):
            try:
                found[name] = planned(arguments, name)
            except ValueError as error:
                if not foreseen(error):
                    raise
                left_out[name] = str(error).splitlines()[0].removeprefix(f"{name}: ")
            done(i + 1)
    return found, left_out


def _table_text(found: list[dict[str, Any]], left_out: dict[str, str]) -> str:
    columns: dict[str, Callable[[dict[str, Any]], float]] = {
        "makespan": lambda r: r["makespan"], "span": lambda r: r["max_span"], "period": lambda r: r["period"],
        "bubble": lambda r: r["bubble_rate"], "activations": lambda r: max(r["peak_activations"])}
    # the makespan of a stale plan covers several mini-batches, so it is not compared
    best = {name: min((of(r) for r in found if not r["stale"]), default=math.inf) for name, of in columns.items()}
    rows = []
    for r in sorted(found, key=lambda r: (r["stale"], r["period"], r["scheduler"])):
        cells = [f"{of(r):.4g}"
                 + (" *" if not r["stale"] and math.isclose(of(r), best[name], rel_tol=1e-9, abs_tol=1e-12) else "  ")
                 for name, of in columns.items()]
        rows.append((r["scheduler"], str(r["chunks"]), *(c.rjust(11) for c in cells),
                     "stale weights" if r["stale"] else ""))
    text = show.table(("scheduler", "chunks", *(name.rjust(11) for name in columns), ""), rows)
    notes = "".join(f"\n  {name}: {why}" for name, why in left_out.items())
    return text + "\n\n* the best of the synchronous ones" + (f"\nleft out:{notes}" if notes else "")


def given(arguments: Any) -> tuple[TaskGraph | pipelines.Pipeline, schedulers.Scheduler, CostModel | None, Machine,
                                   dict[str, Any]]:
    """The order of a file as `minidl.plan` takes it: the step, the order, costs, the machine and options. Raises
    ScheduleError for a file that is not a plan."""
    if not arguments.ranks:
        raise UsageError("the number of ranks is missing; give --ranks P, --micro-batches M and, if a rank has "
                         "several stages, --chunks V")
    order, like, chunks = pipelines.read_file(arguments.plan), None, arguments.chunks
    if "--scheduler" in arguments.given:
        policy = scheduler_of(arguments).staged
        if not policy.placements and not policy.arranges:  # else it chooses where stages live, by the times
            like = planned(arguments, cost=None if "--costs" in arguments.given else CostModel.analytic(), capped=False)
        chunks = like.placement.chunks if like is not None else None if policy.arranges else chunks
    graph: TaskGraph | pipelines.Pipeline
    graph, cost = _given(arguments)
    options = {"chunks": chunks, "like": like, "shard": arguments.shard or 0}
    if arguments.model:
        under = arguments.scheduler if "--scheduler" in arguments.given else arguments.plan
        recorded = recorded_step(job(arguments, under), 0, arguments.replicas)
        pipelines.cut_in(order, recorded.graph)  # rejects the plan of another network
        graph = recorded.graph
        cost = (replace(costs(arguments, recorded), link=link(arguments)) if "--costs" in arguments.given
                else CostModel.analytic())
        options["stage_of_unit"] = _cut(arguments, recorded, order)
    return graph, schedulers.Scheduler(arguments.plan, "pipeline", order), cost, _machine(arguments), options
