"""Pipeline policies on given times or of a network: plan, simulate one or all of them, check a plan, explain a task."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .. import schedulers
from ..files import read_text
from ..plans import Machine, Plan
from ..pricing.collectives import Collective
from ..pricing.cost import CostModel, Link
from ..runtime.memory import MemoryLimitError
from ..schedule import ScheduleError
from ..schedulers import pipeline as pipelines
from ..schedulers.layer_times import with_communication
from ..tasks import Kind
from ..training.trainer import Recorded
from . import show
from .flags import UsageError, job
from .inputs import costs, scheduler_of

SHOWN = 4000  #: the most tasks of a readable grid


def planned(arguments: Any, name: str | None = None, cost: CostModel | None = None, capped: bool = True) -> Plan:
    """The proved plan for the flags. `name`: another policy; `cost`: replaces the network's; `capped`: whether cap and
    limit hold. Raises UsageError, PipelineError, MemoryLimitError or CostError."""
    if not arguments.ranks:
        raise UsageError("the number of ranks is missing; give --ranks P")
    chosen = scheduler_of(arguments, name)
    options = dict(arguments.scheduler_arg)
    options |= chosen.known(objective=arguments.objective, time_limit=arguments.time_limit)
    cap = arguments.activation_cap if capped else None
    if arguments.model:
        recorded = _recorded(arguments, chosen.name)
        cost = cost or replace(costs(arguments, recorded), link=_link(arguments))
        machine = Machine(arguments.ranks, arguments.memory_limit if capped else None, cap, _collective(arguments),
                          arguments.replicas)
        stages = (arguments.ranks * (arguments.chunks or 1) if chosen.own
                  else pipelines.place(chosen.name, arguments.ranks, arguments.chunks).stages)
        options = chosen.known(chunks=arguments.chunks,
                               stage_of_unit=pipelines.balanced(recorded.graph, _cut_by(arguments), stages)) | options
        return recorded.plan(cost, machine, **options)
    if chosen.name.endswith(".csv"):
        return _saved(arguments, chosen.name)
    if chosen.own:
        raise UsageError(f"{chosen.name} plans recorded networks; give one with --model")
    placement = pipelines.place(chosen.name, arguments.ranks, arguments.chunks)
    return pipelines.plan(chosen.name, arguments.ranks, arguments.micro_batches, _given(arguments, placement),
                          arguments.chunks, cap, **options)


def _given(arguments: Any, placement: Any) -> CostModel:
    """The times of the flags, by default 1."""
    forward, output_grad, weight_grad = (1.0 if value is None else value
                                         for value in (arguments.forward, arguments.output_grad, arguments.weight_grad))
    return pipelines.costs(placement, forward, output_grad, weight_grad, arguments.latency)


def _saved(arguments: Any, file: str) -> Plan:
    """The plan in a CSV, on the times of the flags. Raises ScheduleError for one that is not valid."""
    made = pipelines.read_plan(pipelines.read_schedule(read_text(file, "plan"), file), arguments.ranks,
                               arguments.micro_batches, arguments.chunks, arguments.activation_cap)
    return pipelines.prove(replace(made, scheduler=file, cost=_given(arguments, made.placement)))


def _recorded(arguments: Any, name: str) -> Recorded:
    """The step of a rank of the first replica."""
    return Recorded(replace(job(arguments), scheduler=name), 0, arguments.replicas)


def _collective(arguments: Any) -> Callable[[Mapping[int, int]], float]:
    """How long replicas take to sum so many bytes, by stage."""
    shape = Collective(arguments.replicas, _link(arguments), arguments.collective, arguments.servers)
    return lambda sizes: shape.time(sum(sizes.values()))


def _link(arguments: Any) -> Link:
    return Link(arguments.latency, None if arguments.bandwidth is None else arguments.bandwidth / 1e6)  # microseconds


def _cut_by(arguments: Any) -> CostModel:
    """The costs by which a network is cut into stages. They must be equal for a plan and its check, so they are never
    measured."""
    return CostModel.analytic() if arguments.costs in ("measured", "analytic") else CostModel.load(arguments.costs)


def text(plan: Plan) -> str:
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
    grid = pipelines.grid(plan, plan.timeline) if len(plan.schedule) <= SHOWN else ""
    unit = f" ({plan.cost.unit})" if plan.cost.unit else ""
    text = (f"{grid}\n\n" if grid else "") + show.table((f"{plan.scheduler}{unit}", "", "meaning"), rows)
    if status := plan.notes.get("status"):
        verdict = "proved" if status["proved"] else "not proved, the time limit came first (--time-limit)"
        text += f"\n\n{status['objective']} {status['value']:g}, bound {status['bound']:g}: {verdict}"
    for what, choice in plan.notes.get("choices", {}).items():
        tried = ", ".join(f"{name} {time:g}" for name, time in choice["makespans"].items())
        text += f"\n\n{what} {choice['picked']}, the best by simulation; makespans: {tried}"
    if joint := plan.notes.get("joint"):
        than = "" if joint["interleaved"] is None else f"; interleaved 1F1B takes {joint['interleaved']:g}"
        text += (f"\n\n{joint['policy']} on stages of {_short(joint['layers'])} layers, {joint['placement']}: the "
                 f"fastest of {joint['tried']} arrangements by simulation, {joint['makespan']:g}{than}")
    return text


def said(plan: Plan) -> dict[str, Any]:
    """The policy's notes for JSON: the status of a search for an optimum, or the choices that were tried."""
    return plan.notes.get("status", {}) | {key: plan.notes[key] for key in ("choices", "joint") if key in plan.notes}


def _short(values: Any) -> str:
    text = [f"{v:,}" if isinstance(v, int) else f"{v:g}" for v in values]
    return " ".join(text if len(text) <= 12 else [*text[:6], "...", *text[-3:]])


def table(arguments: Any) -> int:
    """Prints all policies that accept these numbers; the best of each column is marked."""
    found: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    # a search for an optimum takes its time
    names = [n for n in pipelines.names() if "time_limit" not in schedulers.find(n).options]
    with show.progress("pricing policies", len(names)) as done:
        for i, name in enumerate(names):
            try:
                plan = planned(arguments, name)
                price = pipelines.price(plan)
                found.append({"scheduler": name, "chunks": plan.placement.chunks,
                              "stale": plan.versions is not None, **price.as_json()})
            except ValueError as error:
                left_out[name] = str(error).splitlines()[0].removeprefix(f"{name}: ")
            done(i + 1)
    if not found:
        raise UsageError("no policy accepts these numbers: " + next(iter(left_out.values()), ""))
    show.emit(arguments, {"policies": found, "left_out": left_out}, lambda: _table_text(found, left_out))
    return 0


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


def check(arguments: Any) -> int:
    """Returns 0 for a valid pipeline plan, and prices it if a network's costs are given; 1 for a plan that is not
    valid, with the culprit marked in its grid. Raises ScheduleError for a file that is not a plan."""
    if not arguments.ranks:
        raise UsageError("the number of ranks is missing; give --ranks P, --micro-batches M and, if a rank has "
                         "several stages, --chunks V")
    schedule = pipelines.read_schedule(read_text(arguments.plan, "plan"), arguments.plan)
    chosen = pipelines.POLICIES.get(arguments.scheduler) if "--scheduler" in arguments.given else None
    if chosen and chosen.arranges and arguments.model:
        raise UsageError(f"{arguments.scheduler} cuts a network as suits it, and a plan's CSV does not hold the cut")
    picks = chosen is not None and bool(chosen.placements or chosen.arranges)  # where stages live, by the times
    like = (planned(arguments, cost=CostModel.analytic(), capped=False)
            if "--scheduler" in arguments.given and not picks else None)
    chunks = (like.placement.chunks if like is not None
              else None if chosen and chosen.arranges else arguments.chunks)  # one that arranges chooses its own
    recorded = _recorded(arguments, arguments.scheduler) if arguments.model else None
    stages = None
    if recorded:
        count = (arguments.ranks * (chunks or pipelines.chunks_in(schedule, arguments.ranks)) if like is None
                 else like.placement.stages)
        cost = costs(arguments, recorded) if "--costs" in arguments.given else CostModel.analytic()
        where = None if like is None else like.placement.table
        parts = None if like is None else like.placement.parts
        stale = like is not None and like.versions is not None
        stages = pipelines.cut(recorded.graph, cost, count,
                               pipelines.balanced(recorded.graph, _cut_by(arguments), count),
                               where if parts is None else parts[Kind.U, 0], stale)
        if like is not None and stale:
            stages, _ = pipelines.with_followers(stages, like.placement)
    try:
        proved = pipelines.read_plan(schedule, arguments.ranks, arguments.micro_batches, chunks,
                                     arguments.activation_cap, graph=stages.graph if stages else None,
                                     limit=arguments.memory_limit, like=like, replicas=arguments.replicas)
    except (ScheduleError, MemoryLimitError) as error:
        why = error if isinstance(error, ScheduleError) else ScheduleError(str(error))
        show.emit(arguments, {"valid": False, "error": why.message, "tasks": list(why.tasks)},
                  f"not valid: {why.message}\n{why.grid}".rstrip())
        return 1
    record: dict[str, Any] = {"valid": True, "tasks": len(proved.schedule), "waits": proved.waits,
                              "peak_bytes": max(proved.peak_bytes) if proved.peak_bytes else None,
                              "peak_activations": list(proved.peaks)}
    if stages and "--costs" in arguments.given:
        times = with_communication(proved.graph, stages.cost(proved.graph, cost), _collective(arguments))
        record["predicted_step_ms"] = round(replace(proved, cost=times).predicted_step_ms, 4)
    show.emit(arguments, record,
              lambda: f"{proved.schedule.grid()}\n\nvalid on {proved.ranks} ranks: {_said(record)}")
    return 0


def _said(record: dict[str, Any]) -> str:
    words = [f"{record['tasks']} tasks", f"{record['waits']} waits",
             f"{max(record['peak_activations']):g} activations at the peak"]
    words += [f"{record['peak_bytes']:,} bytes at the peak"] if record["peak_bytes"] else []
    return ", ".join(words + ([f"{record['predicted_step_ms']:.3f} ms a step predicted"]
                              if "predicted_step_ms" in record else []))
