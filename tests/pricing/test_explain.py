"""When a task must end: a task that ends so much later makes the step no longer, and one that ends later still does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pipelines
import pytest
from helpers import drawn, recorded, scheduled_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl import schedulers
from minidl.pricing.cost import Link
from minidl.pricing.explain import places
from minidl.pricing.simulation import simulate


def check(graph, schedule, cost):
    """Every task in turn, with its time and more."""
    time = dict(zip((graph.name(t) for t in range(len(graph))), cost.durations(graph).tolist(), strict=True))
    found = places(graph, schedule, cost)
    whole = found.end.max()
    for t, name in enumerate(time):
        slack = found.must_end[t] - found.end[t]
        assert slack >= -1e-9, name

        def makespan(more, name=name):
            longer = replace(cost, tasks=time | {name: time[name] + more})
            return simulate(graph, schedule, longer).makespan

        assert makespan(slack) == pytest.approx(whole), name
        assert makespan(slack + 1) == pytest.approx(whole + 1), name


@settings(max_examples=drawn(40), deadline=None)
@given(scheduled_graphs(tasks=8, ranks=2), st.lists(st.integers(0, 3), min_size=8, max_size=8), st.integers(0, 4),
       st.integers(0, 2))
def test_a_task_may_end_later_by_its_slack_and_no_more(pair, durations, latency, sync):
    graph, schedule = pair
    time = {graph.name(t): float(durations[t % 8]) for t in range(len(graph))}
    check(graph, schedule, ml.CostModel(time, link=Link(latency=float(latency)), sync=float(sync)))


@pytest.mark.parametrize("name", ["gpipe", "zb_h1", "dualpipe_v"])
def test_slack_counts_what_messages_take_and_that_pairs_end_together(name):
    plan = pipelines.plan(name, 2, 4, ml.CostModel.given(1.0, 2.0, 1.0, 3.0))
    check(plan.graph, plan.schedule, plan.cost)
    critical = places(plan.graph, plan.schedule, plan.cost)
    assert np.isclose(critical.must_end, critical.end).any()


def test_slack_beside_another_stream():
    graph = recorded()
    check(graph, schedulers.multi_stream(graph), ml.CostModel(kinds=dict.fromkeys("FOWU", 4.0), sync=3.0))
