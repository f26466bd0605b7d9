"""Data parallelism: schedules priced on given layer times or on a network's costs and a link, and training on MPI ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..graph import TaskGraph
from ..passes.rewrite import unroll
from ..pricing.collectives import Collective
from ..pricing.cost import CostModel, Link
from ..pricing.simulation import simulate as price
from ..program import lower
from ..schedule import Schedule
from ..schedulers import data_parallel
from ..schedulers.layer_times import layers, with_communication
from . import show
from .flags import UsageError, job, nearest

SHOWN = 4  #: iterations in a row that are drawn


def check_scheduler(name: str) -> None:
    if name not in data_parallel.POLICIES:
        raise UsageError(f"unknown data-parallel scheduler {name!r}; {nearest(name, list(data_parallel.POLICIES))}")


def simulate(arguments: Any) -> int:
    """Period, lower bound and how much of the communication is hidden."""
    check_scheduler(arguments.scheduler)
    if arguments.k is not None and arguments.scheduler != "reverse_first_k":
        raise UsageError(f"--k is for reverse_first_k; scheduler {arguments.scheduler} takes none")
    graph, cost = _of_network(arguments) if arguments.model else _of_times(arguments)
    limit = arguments.memory_limit
    plan = data_parallel.plan(arguments.scheduler, graph, cost, arguments.k,
                              None if limit is None else lambda schedule: lower(graph, schedule).peak_bytes <= limit)
    if limit is not None:
        lower(plan.graph, plan.schedule, memory_limit=limit)
    if arguments.svg or arguments.trace:
        _draw(arguments, plan.graph, plan.schedule, cost)
    record = {"scheduler": arguments.scheduler, "period": plan.period, "lower_bound": plan.bound, "compute": plan.compute,
              "communication": plan.communication, "hidden": plan.hidden}
    if arguments.scheduler == "reverse_first_k":
        record["k"] = plan.k
    show.emit(arguments, record, lambda: _text(plan, record, cost.unit))
    return 0


def _of_times(arguments: Any) -> tuple[TaskGraph, CostModel]:
    times = {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in ("forward", "output_grad", "weight_grad", "comm")}
    missing = [flag for flag, value in times.items() if value is None]
    if missing:
        raise UsageError(f"give the layers' times with {', '.join(missing)}, or a network with --model")
    lists = {flag: np.atleast_1d(np.asarray(value, np.float64)).tolist() for flag, value in times.items()}
    if len({len(v) for v in lists.values()}) > 1:
        raise UsageError(f"one time for each layer is needed: {', '.join(f'{flag} has {len(v)}' for flag, v in lists.items())}")
    if any(not np.isfinite(t) or t < 0 for t in lists["--comm"]):
        raise UsageError("--comm: a time must be a finite number >= 0")
    *compute, comm = lists.values()
    graph, cost = layers(*compute, parts=arguments.parts)
    buckets = min(2, len(comm)) if arguments.buckets is None else arguments.buckets
    graph = data_parallel.prepare(arguments.scheduler, graph, buckets=buckets, part_bytes=1)
    return graph, with_communication(graph, cost, lambda sizes: sum(comm[u] * n / arguments.parts for u, n in sizes.items()))


def _of_network(arguments: Any) -> tuple[TaskGraph, CostModel]:
    from ..training.trainer import Recorded
    from .training import costs

    if not arguments.ranks:
        raise UsageError("over how many ranks? give --ranks P")
    recorded = Recorded(job(arguments, "in_order"))
    link = Link(arguments.latency, None if arguments.bandwidth is None else arguments.bandwidth / 1e6)  # microseconds
    collective = Collective(arguments.ranks, link, arguments.collective, arguments.servers)
    graph = data_parallel.prepare(arguments.scheduler, recorded.graph, buckets=arguments.buckets)
    cost = costs(arguments, recorded)
    return graph, with_communication(graph, cost, lambda sizes: collective.time(sum(sizes.values())))


def _text(plan: data_parallel.Plan, record: dict[str, Any], unit: str) -> str:
    grid = lower(plan.graph, plan.schedule).schedule.grid() + "\n\n" if len(plan.graph) <= 200 else ""
    meaning = {"period": "per step, in the steady state", "lower_bound": "no order is faster", "hidden": "share of the communication",
               "k": "layers whose weight gradients wait"}
    rows = [(name, value, meaning.get(name, "")) for name, value in record.items() if name != "scheduler"]
    return grid + show.table((f"{record['scheduler']}{f' ({unit})' if unit else ''}", "", "meaning"), rows)


def _draw(arguments: Any, graph: TaskGraph, schedule: Schedule, cost: CostModel) -> None:
    from ..files import write_atomic
    from ..views.draw import timeline_svg

    timeline = price(unroll(graph, SHOWN), schedule.repeated(SHOWN), cost)
    if arguments.svg:
        write_atomic(arguments.svg, timeline_svg(timeline))
    if arguments.trace:
        timeline.save(arguments.trace)
