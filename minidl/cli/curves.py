"""`plan --curve`: predicted step against planned peak, over kept activations, policies and limits."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

from .. import schedulers
from ..core.draw import curve_svg
from ..core.placement import Refused
from ..plans.plan import Plan
from ..schedulers.search import levels
from ..schedulers.search.curve import Point, curve
from ..system.files import write_atomic
from ..views.page import Shown
from . import data_parallel_plans as data_parallel
from . import show
from .flags import FLAGS, UsageError
from .inputs import named, scheduler_of
from .problem import problem

#: flags of --curve's command that a point's own command has in another way, or not
OTHERWISE = ("--curve", "--json", "--html", "--svg", "--scheduler", "--recompute", "--offload", "--shard")


def show_curve(arguments: Any) -> int:
    """Prints, draws and writes the plans that no other one beats in both step and peak."""
    for flag in ("--memory-limit", "--recompute", "--offload"):
        if flag in arguments.given:
            raise UsageError(f"--curve tries every {flag}; leave it out")
    names = [name for name in named(arguments) if scheduler_of(arguments, name)]
    asked = problem(arguments, names[0])
    recorded, machine, points = asked.recorded, asked.machine, list[Point]()
    assert recorded is not None
    assert asked.cost is not None
    usual, cost = recorded.job, asked.cost

    def make(recompute: str, limit: int | None, shard: Any, lag: int | None) -> Plan:
        recorded.job = replace(usual, scheduler=name, recompute=recompute, shard=shard,
                               scheduler_args={**usual.scheduler_args, **({} if lag is None else {"lag": lag})})
        return replace(asked, machine=replace(machine, memory_limit=limit)).plan()

    for name in names:
        chosen = scheduler_of(arguments, name)
        shards = levels(chosen.parallel, machine, usual.shard)
        try:
            with show.progress(f"planning {name}", 1.0) as done:
                points = curve(recorded.graph, cost, make, shards, points, done,
                               lags=not chosen.own and "lag" not in usual.scheduler_args)
        except Refused:
            if not points and name == names[-1]:
                raise
    record = {"smallest_limit": points[0].peak, "curve": [_row(arguments, point) for point in points]}
    if arguments.svg:
        write_atomic(arguments.svg, curve_svg([
            (p.peak / 1e6, p.plan.predicted_step_ms, f"{p.choice}: {p.peak:,} bytes, {p.plan.predicted_step_ms:.4g} ms")
            for p in points], "planned peak, MB", "predicted step, ms"))
    if arguments.html:
        shown = data_parallel.SHOWN if arguments.subject == "r" else 1
        show.write_page(arguments, record, [replace(Shown.of(p.plan, iterations=shown), title=p.choice)
                                            for p in points])
    least = _command(arguments, points[0])
    rows = [(p.peak, p.plan.as_json()["activation_peak_bytes"], p.plan.predicted_step_ms, p.choice) for p in points]
    heads = ("peak bytes", "activations", "predicted ms", "choice")
    return show.emit(arguments, record, lambda: show.table(heads, rows)
                     + f"\n\nthe command of each plan is in --json and --html; of the smallest peak:\n{least}")


def _row(arguments: Any, point: Point) -> dict[str, Any]:
    known = point.plan.as_json()
    return {"step_ms": known["predicted_step_ms"], "peak_bytes": point.peak,
            "activation_peak_bytes": known["activation_peak_bytes"], "choice": point.choice,
            "scheduler": point.plan.scheduler, "recompute": point.recompute, "offload": point.offload,
            "shard": str(point.shard), "lag": point.lag, "memory_limit": point.limit,
            "command": _command(arguments, point)}


def _command(arguments: Any, point: Point) -> str:
    """The command that makes a point's plan and saves it. It names the slowdowns of pairs, which all policies of the
    curve share; alone, some policies would not ask for any."""
    words, kept = iter(shlex.split(arguments.line)), list[str]()
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in OTHERWISE:
            kept.append(word)
        elif "metavar" in FLAGS[name].options and not equals:
            next(words, None)
    limit = [] if point.limit is None else ["--memory-limit", str(point.limit)]
    if point.plan.cost.corun is not None and arguments.pairs is None and "streams" in schedulers.find(
            point.plan.scheduler).options and arguments.subject == "s" and arguments.costs in ("measured", "analytic"):
        kept += ["--pairs", "measured" if arguments.costs == "measured" else "estimated"]
    away = [] if point.offload == "none" else ["--offload", point.offload]
    shared = ["--shard", str(point.shard)] if point.shard else []
    late = [] if point.lag is None else ["--scheduler-arg", f"lag={point.lag}"]
    return shlex.join([*kept, "--scheduler", point.plan.scheduler, *late, "--recompute", point.recompute, *away,
                       *shared, *limit, "--save", "plan.csv"])
