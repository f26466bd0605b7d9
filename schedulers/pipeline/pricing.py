"""The price of a plan: three step times, spans, peak activations, bubble rate. The simulator gives the times."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ...core.columns import spread
from ...core.tasks import COMMUNICATION, COPIES, unpack
from ...plans.plan import PipelinePlan
from ...pricing.cost import CostModel
from ...pricing.simulation import Clock, Lanes


@dataclass(frozen=True)
class Price:
    """`makespan`: from barrier to barrier. `spans`: last end minus first start, per rank. `period`: time per iteration
    if iterations follow each other without a barrier. `peak_activations`: the most live activations per rank, in units
    of a full stage. `bubble_rate`: the idle share of the largest span."""

    makespan: float
    max_span: float
    period: float
    spans: tuple[float, ...]
    peak_activations: tuple[float, ...]
    bubble_rate: float

    def as_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def price(plan: PipelinePlan, cost: CostModel | None = None) -> Price:
    """The price of a proved plan, on its own costs or on `cost`. Raises CostError if a cost is unknown."""
    plan = plan if cost is None else replace(plan, cost=cost)
    graph, schedule, _ = plan.priced
    lanes = Lanes.of(graph, schedule)
    kind, (started, ended, _) = unpack(schedule.keys).kind, Clock.of(graph, plan.cost, lanes).run(lanes)
    whole = lanes.tasks[~np.isin(kind, COMMUNICATION)]
    makespan = float(ended[whole].max() - started[whole].min())
    entry = np.flatnonzero(~np.isin(kind, (*COMMUNICATION, *COPIES)))
    tasks = lanes.tasks[entry]
    start, end = started[tasks], ended[tasks]
    rank, ranks = schedule.rank_of_each[entry], plan.placement.ranks
    first, last = spread(rank, start, ranks, np.inf, np.minimum), spread(rank, end, ranks, 0.0, np.maximum)
    computes = plan.cost.durations(graph)[tasks] + plan.cost.launch  # without the messages that its core moves
    busy = np.bincount(rank, computes, ranks)
    spans = np.where(np.isfinite(first), last - first, 0.0)
    # for a stale plan that never drains, the bubble is the idle time of its steady state
    repeats = (spans.max() if plan.steady is None or plan.versions is None
               else plan.period * (plan.micro_batches // plan.versions.every))
    return Price(makespan, float(spans.max()), plan.period, tuple(spans.tolist()), plan.peaks,
                 max(0.0, float(1 - busy.max() / repeats)))
