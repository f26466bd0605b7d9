"""The push style of out-of-order backprop: the released dependency set, and the order that is defined here."""

import pipelines
import pytest

from minidl.core.tasks import task_name
from minidl.schedulers import pipeline


def released_edges(p, m):
    """(before, after) by name on each rank, as the released code adds them for one stage per rank."""
    edges = [(f"{p - 2}F{p - 1}", f"{p - 2}O0")] if p > 1 else []
    for i in range(m):
        edges += [(f"{s}O{i}", f"{s}W{i}") for s in range(p - 1)]
        edges.append((f"{p - 1}O{m - 1}", f"{p - 1}W{i}"))
        if i < m - 1:
            edges += [(f"{s}W{i}", f"{s}O{i + 1}") for s in range(p - 1)]
        if i < m - p:
            edges += [(f"{s}W{i + s}", f"{s}F{i + p}") for s in range(p - 1)]
    return edges


def broken(schedule, p, m):
    place = {task_name(key): i for i, key in enumerate(schedule.keys.tolist())}
    return [edge for edge in released_edges(p, m) if place[edge[0]] > place[edge[1]]]


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 3), (3, 9), (4, 8), (5, 6), (16, 32)])
@pytest.mark.parametrize("latency", [0.0, 0.5])
def test_the_released_rule_keeps_every_released_edge(p, m, latency):
    name = "fast_forward_push_released"
    cost = pipeline.costs(pipelines.place(name, p), 1.0, 1.5, 0.7, latency)
    plan = pipelines.plan(name, p, m, cost)
    assert broken(plan.schedule, p, m) == []
    assert pipeline.price(plan, cost).peak_activations[-1] == m
