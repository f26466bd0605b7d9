"""Pipelines: their plans as text, and a table of all policies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .. import schedulers
from ..plans.plan import PipelinePlan
from ..schedulers import pipeline as pipelines
from ..system.loading import foreseen
from . import show
from .flags import UsageError
from .inputs import scheduler_of
from .problem import problem

SHOWN = 4000  #: the most tasks of a readable grid


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
        hops = [f"{hop} {count:,}" for hop, count in plan.sent_bytes.items()]
        rows.append(("sent bytes", sum(plan.sent_bytes.values()), f"in a step; {' '.join(hops)}"))
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
    if rounds := plan.notes.get("rounds"):
        text += f"\n\n{rounds['slots']} slots of layers go around the ranks, the longest takes {rounds['longest']:g}"
    if joint := plan.notes.get("joint"):
        than = "" if joint["interleaved"] is None else f"; interleaved 1F1B takes {joint['interleaved']:g}"
        text += (f"\n\n{joint['policy']} on stages of {_short(joint['layers'])} layers, {joint['placement']}: the "
                 f"fastest of {joint['tried']} arrangements by simulation, {joint['makespan']:g}{than}")
    return text


def said(plan: PipelinePlan) -> dict[str, Any]:
    """The bytes of each hop, and the notes for JSON: the status of a search for an optimum, the choices that were
    tried, the published policies beside an order of one's own."""
    notes, hops = plan.notes, {"sent_bytes": plan.sent_bytes} if plan.sent_bytes else {}
    kept = {key: notes[key] for key in ("choices", "joint", "rounds", "beside") if key in notes}
    return hops | notes.get("status", {}) | kept | notes.get("order", {})


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
    found, left_out = dict[str, PipelinePlan](), dict[str, str]()
    # a search for an optimum takes its time
    names = [n for n in sorted(schedulers.names("pipeline")) if "time_limit" not in schedulers.find(n).options]
    if "--scheduler" in arguments.given and arguments.scheduler not in names:
        names.insert(0, scheduler_of(arguments).name)
    with show.progress("pricing policies", len(names)) as done:
        for i, name in enumerate(names):
            try:
                made = problem(arguments, name).plan()
                assert isinstance(made, PipelinePlan)
                found[name] = made
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
        rows.append((r["scheduler"], r["chunks"], *cells, "stale weights" if r["stale"] else ""))
    text = show.table(("scheduler", "chunks", *columns, ""), rows)
    notes = "".join(f"\n  {name}: {why}" for name, why in left_out.items())
    return text + "\n\n* the best of the synchronous ones" + (f"\nleft out:{notes}" if notes else "")
