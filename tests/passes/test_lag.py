"""`lag=k`: the inputs of at most k + 1 layers' (micro-batches') weight gradients are alive, and bits stay."""

from __future__ import annotations

from itertools import pairwise

import golden_plans
import numpy as np
import pytest
from test_sweeps import MLP, compared

import minidl as ml
from minidl.core.machine import PlanError
from minidl.core.placement import Refused
from minidl.core.tasks import Kind, task_name, unpack
from minidl.core.timeline import What
from minidl.passes.lag import fenced


def waiting(plan: ml.Plan) -> int:
    """The most layers whose output gradient a W has still to read, when an O ends, by the predicted timeline."""
    graph, line = plan.graph, plan.timeline
    end = {task_name(key): at for key, at, what in zip(line.key.tolist(), line.end.tolist(), line.what.tolist(),
                                                       strict=True) if what == What.TASK}
    maker = {b: t for t in range(len(graph)) for b in graph.writes[t].tolist()}
    spans = []
    for t in np.flatnonzero(graph.kind == Kind.W).tolist():
        made = [maker[b] for b in graph.reads[t].tolist() if graph.kind[maker.get(b, t)] == Kind.O]
        spans.append((max((end[graph.name(m)] for m in made), default=0.0), end.get(graph.name(t), np.inf)))
    return max(sum(begin <= at < stop for begin, stop in spans) for at, _ in spans)


@pytest.mark.parametrize("policy", ["multi_stream", "multi_region"])
def test_no_more_layers_wait_than_the_bound_allows(policy: str) -> None:
    graph = golden_plans.step("mlp")
    cost = ml.CostModel(kinds={"F": 1.0, "O": 1.0, "W": 3.0, "U": 0.5})
    free = waiting(ml.plan(graph, policy, cost, streams=2))
    counts = [waiting(ml.plan(graph, policy, cost, streams=2, lag=k)) for k in range(4)]
    assert all(count <= k + 1 for k, count in enumerate(counts))
    assert counts[-1] == free > counts[0]


@pytest.mark.parametrize(("policy", "ranks", "options"), [
    ("multi_stream", 1, {"streams": 2}), ("multi_region", 1, {"streams": 2}), ("in_order", 1, {}),
    ("reverse_first_k", 2, {}), ("priority", 2, {})])
def test_a_large_bound_changes_no_order(policy: str, ranks: int, options: dict[str, int]) -> None:
    graph = golden_plans.step("norms")
    plain, bound = (ml.plan(graph, policy, machine=ml.Machine(ranks), **options, **more) for more in ({}, {"lag": 99}))
    assert plain.schedule.to_csv() == bound.schedule.to_csv()


@pytest.mark.parametrize("policy", ["zb_h1", "zb_h2", "zb_auto", "zb_v", "fast_forward"])
def test_micro_batches_of_a_stage_wait_within_the_bound(policy: str) -> None:
    graph = golden_plans.step("mlp", 8)
    for lag in range(3):
        plan = ml.plan(graph, policy, machine=ml.Machine(2), lag=lag)
        for lane in range(len(plan.schedule.lanes)):
            own, left = unpack(plan.schedule.order(lane)), {}
            for kind, stage in zip(own.kind.tolist(), own.unit.tolist(), strict=True):
                left[stage] = left.get(stage, 0) + (kind == Kind.O) - (kind == Kind.W)
                assert left[stage] <= lag + 1
        assert max(plan.peak_bytes) <= max(ml.plan(graph, policy, machine=ml.Machine(2)).peak_bytes)


def test_a_smaller_bound_needs_no_more_memory_in_a_pipeline() -> None:
    graph = golden_plans.step("mlp", 8)
    peaks = [ml.plan(graph, "fast_forward", machine=ml.Machine(2), lag=k).peak_bytes[1] for k in range(4)]
    assert all(a <= b for a, b in pairwise(peaks))
    assert peaks[0] < peaks[-1]


@pytest.mark.parametrize("lag", [0, 1])
def test_bits_stay(lag: int) -> None:
    expected, found, _ = compared(lambda draft: (fenced(draft, lag), ""), MLP, "multi_stream")
    assert found == expected


def test_a_bound_that_is_none_and_orders_that_cannot_have_one() -> None:
    graph = golden_plans.step("mlp", 8)
    for wrong in (-1, 1.5, True):
        with pytest.raises(PlanError, match="lag"):
            ml.plan(golden_plans.step("mlp"), "multi_stream", lag=wrong)
    with pytest.raises(Refused, match="weights that they read"):
        ml.plan(graph, "pipedream", machine=ml.Machine(2), lag=1)
    with pytest.raises(Refused, match="in pairs"):
        ml.plan(graph, "dualpipe_v", machine=ml.Machine(2), lag=1)
