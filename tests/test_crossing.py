"""What reading from another core's cache costs: by the definition, task by task; and its effect on plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import recorded, scheduled_graphs
from hypothesis import given, settings

import minidl as ml
from minidl import schedulers
from minidl.graph import GraphBuilder
from minidl.pricing.crossing import CACHE
from minidl.pricing.measure import measure_cross, measure_sync
from minidl.pricing.simulation import Clock, Lanes, simulate, times
from minidl.runtime import device as devices
from minidl.schedule import Lane, Schedule
from minidl.tasks import Kind

COST = ml.CostModel(kinds=dict.fromkeys("FOWU", 10.0), cross=0.25)


def by_definition(graph, schedule):
    """The bytes that each task is the first on its lane to read, and that a task on another lane of its rank wrote."""
    lane, place = {}, {}
    ids = schedule.ids(graph)
    for number in range(len(schedule.lanes)):
        for at, task in enumerate(ids[schedule.ptr[number] : schedule.ptr[number + 1]].tolist()):
            lane[task], place[task] = number, at
    reads = []
    for task in range(len(graph)):
        for b in graph.reads[task].tolist():
            writers = [t for t in range(len(graph)) if b in graph.writes[t].tolist()]
            if writers:
                reads.append((task, max((t for t in writers if t < task), default=writers[-1]), b))
    found = np.zeros(len(graph))
    for task, writer, b in reads:
        earlier = any(place[t] < place[task] for t, w, c in reads if (w, c) == (writer, b) and lane[t] == lane[task])
        if (lane[task] != lane[writer] and schedule.lanes[lane[task]].rank == schedule.lanes[lane[writer]].rank
                and not earlier):
            found[task] += min(int(graph.buffer_bytes[b]), CACHE)
    return found


@settings(max_examples=150, deadline=None)
@given(scheduled_graphs(ranks=2))
def test_a_task_pays_for_what_it_is_the_first_on_its_lane_to_read(scenario):
    graph, schedule = scenario
    at = times(graph, schedule, COST)
    np.testing.assert_allclose(at.end - at.start, 10.0 + 0.25 * by_definition(graph, schedule))
    lanes = Lanes.of(graph, schedule)
    clock = Clock.of(graph, COST, lanes)
    assert clock.period(lanes) == pytest.approx(clock.exact_period(lanes))


def test_what_is_larger_than_a_cache_costs_no_more_than_a_cache():
    builder = GraphBuilder()
    builder.buffer("b", 64 * CACHE)
    builder.task(0, Kind.F, writes=[0])
    builder.task(1, Kind.F, reads=[0])
    graph = builder.build()
    two = Schedule.of(graph, {Lane(0, "a"): [0], Lane(0, "b"): [1]})
    assert simulate(graph, two, COST).makespan == 20 + 0.25 * CACHE
    ranks = Schedule.of(graph, {Lane(0): [0], Lane(1): [1]})
    assert simulate(graph, ranks, COST).makespan == 20


def test_one_lane_pays_nothing_and_cheap_tasks_stay_together():
    graph = recorded()
    one, two = schedulers.in_order(graph), schedulers.multi_stream(graph)
    assert simulate(graph, one, COST).makespan == simulate(graph, one, replace(COST, cross=0.0)).makespan
    assert simulate(graph, two, COST).makespan > simulate(graph, two, replace(COST, cross=0.0)).makespan
    dear = replace(COST, cross=1e3)
    chosen = ml.plan(graph, "multi_region", dear)
    assert chosen.timeline.makespan <= simulate(graph, one, dear).makespan


def test_it_is_saved_with_the_costs(tmp_path):
    COST.save(tmp_path / "costs.json")
    assert ml.CostModel.load(tmp_path / "costs.json").cross == 0.25


@pytest.mark.parametrize("kind", devices.LANES)
def test_it_is_measured(kind):
    device = devices.CPU()
    if kind == "native" and devices.no_native_lanes():
        pytest.skip(devices.no_native_lanes())
    device.set_lanes(kind)
    assert 0 <= measure_cross(device) < 1
    sync, wake = measure_sync(device)
    assert sync > 0
    assert wake > 0
