"""Data-parallel ranks: the figures of their plans, and their text."""

from __future__ import annotations

from typing import Any

from ..core.tasks import Kind
from ..plans.plan import Plan
from ..pricing.exposed import exposed
from ..schedulers.data_parallel import hidden
from . import show

SHOWN = 4  #: how many iterations are drawn


def figures(plan: Plan) -> dict[str, Any]:
    """Period, lower bound, and the share of hidden communication; of exchanges, how long they take and how long a rank
    only waits for them."""
    notes = plan.notes
    record = {"scheduler": plan.scheduler, "period": plan.period}
    graph, schedule, _ = plan.priced
    if (exchanges := graph.kind == Kind.X).any():
        record |= {"exchange": float((plan.cost.durations(graph)[exchanges] + plan.cost.launch).sum()),
                   "exposed_exchange": float(exposed(graph, schedule, plan.cost).sum())}
    if "compute" in notes:
        record |= {name: notes[name] for name in ("lower_bound", "compute", "communication")} | {"hidden": hidden(plan)}
    return record | ({"k": notes["k"]} if "k" in notes else {})


def text(plan: Plan) -> str:
    """The plan's schedule and figures as text."""
    grid = plan.programs[0].schedule.grid(show.width()) + "\n\n" if len(plan.graph) <= 200 else ""
    found = figures(plan)
    meaning = {"period": "per step, in the steady state", "lower_bound": "no order is faster", "compute": "of a step",
               "communication": "of a step" if found.get("communication") else "links take no time; --bandwidth and "
               "--latency give them one", "hidden": "share of the communication",
               "k": "layers whose weight gradients wait", "exchange": "of a step",
               "exposed_exchange": "of a step, in which a rank only waits for it"}
    rows = [(name, value, meaning.get(name, "")) for name, value in found.items() if name != "scheduler"]
    unit = f" ({plan.cost.unit})" if plan.cost.unit else ""
    return grid + show.table((f"{plan.scheduler}{unit}", "", "meaning"), rows)
