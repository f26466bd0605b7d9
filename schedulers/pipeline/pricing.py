"""What a plan costs: three step times, spans, peak activations, bubble rate. The timing model is the simulator's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...cost import CostModel
from ...graph import Floats, Kind, unpack
from ...simulation import Clock, Lanes
from .plan import Plan

ITERATIONS = 6


@dataclass(frozen=True)
class Price:
    """`makespan`: barrier to barrier. `spans`: last end minus first start per rank. `period`: time per iteration when
    iterations are chained without a barrier. `peak_activations`: live full-stage activations per rank. `bubble_rate`:
    the idle share of the largest span."""

    makespan: float
    max_span: float
    period: float
    spans: tuple[float, ...]
    peak_activations: tuple[float, ...]
    bubble_rate: float

    def as_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def price(plan: Plan, cost: CostModel) -> Price:
    """Raises ScheduleError where the plan would deadlock, CostError where a cost is unknown."""
    graph, schedule, cost = plan.graph, plan.schedule, plan.cost or cost
    lanes = Lanes.of(graph, schedule)
    clock = Clock.of(graph, cost, lanes)
    start, end, _ = (t[lanes.tasks] for t in clock.run(lanes))
    rank = np.array([lane.rank for lane in schedule.lanes])[schedule.lane_of_each()]
    ranks = plan.placement.ranks
    first, last = np.full(ranks, np.inf), np.zeros(ranks)
    np.minimum.at(first, rank, start)
    np.maximum.at(last, rank, end)
    busy = np.bincount(rank, clock.duration[lanes.tasks], ranks)
    spans = np.where(np.isfinite(first), last - first, 0.0)
    period = float(np.diff(clock.ends(lanes, ITERATIONS))[-1]) if plan.steady is None else plan.steady
    # a stale plan never drains: its bubble is what its steady state leaves idle
    whole = spans.max() if plan.versions is None else period * (plan.micro_batches // plan.versions.every)
    rate = 1 - busy.max() / whole
    return Price(float(end.max() - start.min()), float(spans.max()), period, tuple(spans.tolist()),
                 tuple(peak_activations(plan).tolist()), float(rate))


def activations(plan: Plan) -> Floats:
    """For every entry of the schedule: live full-stage activations on its rank while it runs.

    An activation lives from the start of F to the end of W or B; what is joined to one action starts and ends together.
    """
    schedule = plan.schedule
    kind = unpack(schedule.keys)[1]
    born = np.cumsum(kind == Kind.F)
    gone = np.concatenate([[0], np.cumsum((kind == Kind.W) | (kind == Kind.B))])
    begin, end = np.arange(len(schedule)), np.arange(len(schedule))
    if schedule.joined is not None:
        first = np.flatnonzero(~np.asarray(schedule.joined))
        action = np.cumsum(~np.asarray(schedule.joined)) - 1
        begin, end = first[action], np.append(first[1:], len(schedule))[action] - 1
    live = born[end] - gone[begin]
    lane = schedule.ptr[:-1]
    at_start = np.concatenate([[0], born])[lane] - gone[lane]
    counted: Floats = (live - at_start[schedule.lane_of_each()]) * plan.placement.share
    return counted


def peak_activations(plan: Plan) -> Floats:
    """The largest number of live full-stage activations per rank."""
    if plan.peaks is not None:
        return np.array(plan.peaks)
    peak = np.zeros(plan.placement.ranks)
    rank = np.array([lane.rank for lane in plan.schedule.lanes], np.int64)[plan.schedule.lane_of_each()]
    np.maximum.at(peak, rank, activations(plan))
    return peak
