"""Pipeline policies on given times: simulate one or all of them, check a plan, explain a task."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..cost import CostModel, Link
from ..explain import explain as explain_task
from ..files import read_text
from ..passes import coarsen, fuse
from ..schedule import Schedule, ScheduleError
from ..schedulers import pipeline as pipelines
from ..schedulers.pipeline import names as policies
from ..simulation import simulate as price_timeline
from ..training import Recorded
from . import show
from .flags import UsageError, job, nearest
from .training import costs


def simulate(arguments: Any) -> int:
    """One policy's price, or with --table all of them side by side."""
    if arguments.table:
        return table(arguments)
    plan, cost = planned(arguments, arguments.scheduler)
    price = pipelines.price(plan, cost)
    timeline = price_timeline(plan.graph, plan.schedule, cost)
    if arguments.svg:
        draw(arguments.svg, plan, timeline)
    if arguments.trace:
        timeline.save(arguments.trace)
    record = price.as_json()
    if "status" in plan.options:
        record |= plan.options["status"]
    show.emit(arguments, record, lambda: _text(plan, price, timeline))
    return 0


def planned(arguments: Any, name: str) -> tuple[pipelines.Plan, Any]:
    """The plan and the costs that the flags ask for. Raises UsageError, PipelineError or CostError."""
    if not arguments.ranks:
        raise UsageError("how many ranks? give --ranks P")
    if name not in policies():
        raise UsageError(f"unknown pipeline scheduler {name!r}; {nearest(name, policies())}")
    if arguments.model:
        recorded = Recorded(job(arguments))
        cost = replace(costs(arguments, recorded), link=Link(arguments.latency))
        return pipelines.plan_model(recorded.graph, name, arguments.ranks, cost, arguments.chunks,
                                    activation_cap=arguments.activation_cap, **dict(arguments.scheduler_arg))
    times = [1.0 if value is None else value for value in (arguments.forward, arguments.output_grad, arguments.weight_grad)]
    placement = pipelines.place(name, arguments.ranks, arguments.chunks)
    cost = pipelines.costs(placement, times[0], times[1], times[2], arguments.latency)
    options = dict(arguments.scheduler_arg)
    if name == "optimal":
        options |= {"objective": arguments.objective, "time_limit": arguments.time_limit}
    plan = pipelines.plan(name, arguments.ranks, arguments.micro_batches, cost=cost, chunks=arguments.chunks,
                          activation_cap=arguments.activation_cap, **options)
    return plan, plan.cost or cost


def _text(plan: pipelines.Plan, price: pipelines.Price, timeline: Any) -> str:
    rows = [("makespan", price.makespan, "barrier to barrier"), ("largest span", price.max_span, "first start to last end on one rank"),
            ("period", price.period, "per step when steps are chained" if plan.steady is None else "per mini-batch in steady state"),
            ("bubble rate", price.bubble_rate, "idle share of the largest span"),
            ("peak activations", max(price.peak_activations), f"live full stages; per rank {_short(price.peak_activations)}")]
    grid = pipelines.grid(plan, timeline) if len(plan.schedule) <= 4000 else ""
    return (f"{grid}\n\n" if grid else "") + show.table((plan.scheduler, "", "meaning"), rows)


def _short(values: Any) -> str:
    text = [f"{v:g}" for v in values]
    return " ".join(text if len(text) <= 12 else [*text[:6], "...", *text[-3:]])


def draw(path: str, plan: pipelines.Plan, timeline: Any) -> None:
    """The timeline as SVG, with the weight version that each task reads where the plan is stale."""
    from ..draw import timeline_svg
    from ..files import write_atomic

    versions = None if plan.versions is None else {int(k): int(v) for k, v in zip(plan.schedule.keys, plan.versions.of, strict=True)}
    write_atomic(path, timeline_svg(timeline, versions=versions))


def table(arguments: Any) -> int:
    """All policies that can work with these numbers; the best of each column is marked."""
    found: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    names = [n for n in policies() if n != "optimal"]
    with show.progress("pricing policies", len(names)) as done:
        for i, name in enumerate(names):
            try:
                plan, cost = planned(arguments, name)
                price = pipelines.price(plan, cost)
                found.append({"scheduler": name, "chunks": plan.placement.chunks, "stale": plan.versions is not None, **price.as_json()})
            except ValueError as error:
                left_out[name] = str(error).splitlines()[0]
            done(i + 1)
    if not found:
        raise UsageError("no policy can work with these numbers: " + next(iter(left_out.values()), ""))
    show.emit(arguments, {"policies": found, "left_out": left_out}, lambda: _table_text(found, left_out))
    return 0


def _table_text(found: list[dict[str, Any]], left_out: dict[str, str]) -> str:
    columns: dict[str, Callable[[dict[str, Any]], float]] = {
        "makespan": lambda r: r["makespan"], "span": lambda r: r["max_span"], "period": lambda r: r["period"],
        "bubble": lambda r: r["bubble_rate"], "activations": lambda r: max(r["peak_activations"])}
    # a stale plan's makespan is that of several mini-batches, so it does not compete there
    best = {name: min((of(r) for r in found if not r["stale"]), default=math.inf) for name, of in columns.items()}
    rows = []
    for r in sorted(found, key=lambda r: (r["stale"], r["period"], r["scheduler"])):
        cells = [f"{of(r):.4g}" + (" *" if not r["stale"] and math.isclose(of(r), best[name], rel_tol=1e-9, abs_tol=1e-12) else "  ")
                 for name, of in columns.items()]
        rows.append((r["scheduler"], str(r["chunks"]), *(c.rjust(11) for c in cells), "stale weights" if r["stale"] else ""))
    text = show.table(("scheduler", "chunks", *(name.rjust(11) for name in columns), ""), rows)
    notes = "".join(f"\n  {name}: {why}" for name, why in left_out.items())
    return text + "\n\n* the best of the synchronous ones" + (f"\nleft out:{notes}" if notes else "")


def check(arguments: Any) -> int:
    """Exit 0 for a valid pipeline plan; 1 for one that is not, with the culprit marked in its grid."""
    if not arguments.ranks:
        raise UsageError("how many ranks? give --ranks P, --micro-batches M and, if a rank has several stages, --chunks V")
    schedule = pipelines.read_schedule(read_text(arguments.plan, "plan"), arguments.plan)
    try:
        if arguments.model:
            proved = _of_model(arguments, schedule)
        else:
            proved = pipelines.validate(pipelines.read_plan(schedule, arguments.ranks, arguments.micro_batches, arguments.chunks or 1,
                                                            arguments.activation_cap)).schedule
    except ScheduleError as error:
        show.emit(arguments, {"valid": False, "error": error.message, "tasks": list(error.tasks)},
                  f"not valid: {error.message}\n{error.grid}".rstrip())
        return 1
    record = {"valid": True, "tasks": len(proved)}
    show.emit(arguments, record, lambda: f"{proved.grid()}\n\nvalid: {len(proved)} tasks on {proved.ranks} ranks")
    return 0


def _of_model(arguments: Any, schedule: Schedule) -> Schedule:
    """Proves a plan of a network's stages, updates included. Where the cuts lie changes costs, not what is valid."""
    graph = Recorded(job(arguments)).graph
    stages = arguments.ranks * (arguments.chunks or 1)
    coarse, _ = coarsen(graph, pipelines.balanced(graph, CostModel.analytic(), stages).tolist())
    return schedule.validate(fuse(coarse, np.broadcast_to(pipelines.fused_in(schedule, stages, arguments.micro_batches),
                                                          (stages, arguments.micro_batches))))


def explain(arguments: Any) -> int:
    plan, cost = planned(arguments, arguments.scheduler)
    found = explain_task(plan.graph, plan.schedule, cost, arguments.task)
    show.emit(arguments, found.as_json(), str(found))
    return 0


def plan(arguments: Any) -> int:
    """A policy's plan on given times: grid, CSV, SVG."""
    made, cost = planned(arguments, arguments.scheduler)
    timeline = price_timeline(made.graph, made.schedule, cost)
    if arguments.save:
        made.schedule.save(arguments.save)
    if arguments.svg:
        draw(arguments.svg, made, timeline)
    price = pipelines.price(made, cost)
    record = {"tasks": len(made.graph), "edges": made.graph.edges, "waits": 0, **price.as_json()}
    show.emit(arguments, record, lambda: _text(made, price, timeline))
    return 0
