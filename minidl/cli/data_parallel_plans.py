"""Data parallelism: plans on given layer times, or on a network's costs for a rank's share of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import schedulers
from ..core.machine import Machine
from ..core.timeline import Timeline
from ..passes.rewrite import unroll
from ..plans.plan import Plan
from ..pricing.cost import CostModel
from ..pricing.simulation import simulate
from ..schedulers.data_parallel import hidden
from ..schedulers.layer_times import layers
from . import show
from .flags import UsageError, job
from .inputs import collective, costs, recorded_step, scheduler_of

if TYPE_CHECKING:
    from ..training.recorded import Recorded

SHOWN = 4  #: how many iterations are drawn


def planned(arguments: Any) -> Plan:
    """The plan for the flags."""
    chosen = scheduler_of(arguments)
    if not arguments.model:
        return _of_times(arguments, chosen)
    recorded, cost, options = network(arguments)
    return recorded.plan(cost, **options)


def given(arguments: Any) -> dict[str, Any]:
    """The options of the scheduler that are set by flags."""
    return dict(arguments.scheduler_arg) | scheduler_of(arguments).known(k=arguments.k, buckets=arguments.buckets)


def _of_times(arguments: Any, chosen: schedulers.Scheduler) -> Plan:
    times = {f"--{name.replace('_', '-')}": getattr(arguments, name)
             for name in ("forward", "output_grad", "weight_grad", "comm")}
    missing = [flag for flag, value in times.items() if value is None]
    if missing:
        raise UsageError(f"give the layers' times with {', '.join(missing)}, or a network with --model")
    lists = {flag: np.atleast_1d(np.asarray(value, np.float64)).tolist() for flag, value in times.items()}
    if len({len(v) for v in lists.values()}) > 1:
        raise UsageError(f"one time for each layer is needed: "
                         f"{', '.join(f'{flag} has {len(v)}' for flag, v in lists.items())}")
    if any(not np.isfinite(t) or t < 0 for t in lists["--comm"]):
        raise UsageError("--comm: a time must be a finite number >= 0")
    *compute, comm = lists.values()
    graph, cost = layers(*compute, parts=arguments.parts)
    options = chosen.known(buckets=min(2, len(comm)), part_bytes=1) | given(arguments)
    machine = Machine(2, arguments.memory_limit, collective=lambda sizes: float(
        sum(comm[u] * n / arguments.parts for u, n in sizes.items())))
    return schedulers.plan(graph, chosen, cost, machine, **options)


def network(arguments: Any) -> tuple[Recorded, CostModel, dict[str, Any]]:
    """The recorded step of a rank, its costs, and what `Recorded.plan` takes beside them."""
    if not arguments.ranks:
        raise UsageError("the number of ranks is missing; give --ranks P")
    recorded = recorded_step(job(arguments), 0, arguments.ranks)
    machine = Machine(arguments.ranks, arguments.memory_limit, collective=collective(arguments, arguments.ranks))
    return recorded, costs(arguments, recorded), {"machine": machine, **given(arguments)}


def figures(plan: Plan) -> dict[str, Any]:
    """Period, lower bound, and the share of hidden communication."""
    notes = plan.notes
    record = {"scheduler": plan.scheduler, "period": plan.period}
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
               "k": "layers whose weight gradients wait"}
    rows = [(name, value, meaning.get(name, "")) for name, value in found.items() if name != "scheduler"]
    unit = f" ({plan.cost.unit})" if plan.cost.unit else ""
    return grid + show.table((f"{plan.scheduler}{unit}", "", "meaning"), rows)


def several(plan: Plan) -> Timeline:
    """The predicted timeline of several iterations."""
    return simulate(unroll(plan.graph, SHOWN), plan.schedule.repeated(SHOWN), plan.cost)
