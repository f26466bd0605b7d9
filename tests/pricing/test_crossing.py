"""What another core's cache costs: by the definition, task by task; its effect on plans; how it is measured."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from helpers import drawn, recorded, scheduled_graphs
from hypothesis import given, settings

import minidl as ml
from minidl import schedulers
from minidl.devices import device as devices
from minidl.measuring import lanes as measure_lanes
from minidl.pricing.cost import Cross
from minidl.pricing.memory import CACHE
from minidl.pricing.simulation import Clock, Lanes, simulate, times

COST = ml.CostModel(kinds=dict.fromkeys("FOWU", 10.0), cross=Cross(0.25, 0.125))


def by_definition(graph, schedule):
    """The bytes that each task reads as the first on its lane, and that a task on another lane of its rank wrote; and
    the bytes that it writes where a task on another lane has touched them since they were written before. Without those
    that are in no cache since the tasks between have touched so much."""
    lane, place = {}, {}
    ids = schedule.ids(graph)
    for number in range(len(schedule.lanes)):
        for at, task in enumerate(ids[schedule.ptr[number] : schedule.ptr[number + 1]].tolist()):
            lane[task], place[task] = number, at
    tasks = range(len(graph))
    read, written = ([set(rows[t].tolist()) for t in tasks] for rows in (graph.reads, graph.writes))

    def apart(a, b):
        return lane[a] != lane[b] and schedule.lanes[lane[a]].rank == schedule.lanes[lane[b]].rank

    def before(task):
        """The tasks before this one, the nearest first; those of the step before follow, and itself last."""
        return [*reversed(range(task)), *reversed(range(task, len(graph)))]

    def near(task, t, b):
        """The bytes of a buffer that task t touched and that are still in a cache."""
        between = before(task)[: before(task).index(t)]
        return max(0, min(int(graph.buffer_bytes[b]), CACHE - int(graph.bytes[between].sum())))

    reads = [(task, next(t for t in before(task) if b in written[t]), b) for task in tasks for b in read[task]
             if any(b in w for w in written)]
    found = np.zeros((2, len(graph)))
    for task, writer, b in reads:
        earlier = any(place[t] < place[task] for t, w, c in reads if (w, c) == (writer, b) and lane[t] == lane[task])
        if apart(task, writer) and not earlier:
            found[0, task] += near(task, writer, b)
    for task in tasks:
        for b in written[task]:
            last = next(i for i, t in enumerate(before(task)) if b in written[t])
            found[1, task] += max((near(task, t, b) for t in before(task)[: last + 1]
                                   if apart(task, t) and b in read[t] | written[t]), default=0)
    return found


@settings(max_examples=drawn(150))
@given(scheduled_graphs(ranks=2))
def test_a_task_pays_for_what_another_lane_has_touched(scenario):
    graph, schedule = scenario
    random = np.random.default_rng(len(graph))
    size = random.choice([CACHE // 20, CACHE // 4, 64 * CACHE], len(graph.buffer_bytes))  # some fit into no cache
    graph = replace(graph, bytes=random.integers(0, CACHE // 3, len(graph)), buffer_bytes=size)
    at = times(graph, schedule, COST)
    np.testing.assert_allclose(at.end - at.start, 10.0 + [0.25, 0.125] @ by_definition(graph, schedule))
    lanes = Lanes.of(graph, schedule)
    clock = Clock.of(graph, COST, lanes)
    assert clock.period(lanes) == pytest.approx(clock.exact_period(lanes))


def test_one_lane_pays_nothing_and_cheap_tasks_stay_together():
    graph = recorded()
    one, two = schedulers.in_order(graph), schedulers.multi_stream(graph)
    assert simulate(graph, one, COST).makespan == simulate(graph, one, replace(COST, cross=Cross())).makespan
    assert simulate(graph, two, COST).makespan > simulate(graph, two, replace(COST, cross=Cross())).makespan
    dear = replace(COST, cross=Cross(1e3))
    chosen = ml.plan(graph, "multi_region", dear)
    assert chosen.timeline.makespan <= simulate(graph, one, dear).makespan


def test_what_lanes_cost_each_other_is_measured(both_lanes):
    device, before = devices.CPU(), os.sched_getaffinity(0)
    found = measure_lanes.measure_lanes(device)
    assert os.sched_getaffinity(0) == before
    assert found["cores"] == len(before)
    assert found["sync"] > 0
    assert found["wake"] > 0
    assert found["spin"] >= 0
    assert found["doze"] >= 0
    assert found["cross"].source == ("measured" if len(measure_lanes.lane_cores()) == 2 else "assumed")
    assert measure_lanes.measure_lanes(device) == found, "once in a process"
    ml.CostModel(**found)


def test_where_two_lanes_share_a_core_crossing_is_assumed_and_not_0(both_lanes):
    device = devices.CPU()
    assert measure_lanes.measure_cross(device, (0,)) == measure_lanes.ASSUMED
    assert measure_lanes.ASSUMED.read > 0
    sync, wake = measure_lanes.measure_hand_over(device, ())
    assert sync > 0
    assert wake > 0


def test_two_cores_are_not_two_threads_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_lanes, "TOPOLOGY", tmp_path)
    assert measure_lanes.two_cores(frozenset({3})) == (3,)
    assert measure_lanes.two_cores(frozenset({7, 3, 5})) == (3, 5), "the machine does not say"
    (tmp_path / "cpu3" / "topology").mkdir(parents=True)
    siblings = tmp_path / "cpu3" / "topology" / "thread_siblings_list"
    siblings.write_text("3-5\n")
    assert measure_lanes.two_cores(frozenset({7, 3, 5})) == (3, 7)
    assert measure_lanes.two_cores(frozenset({5, 3})) == (3, 5), "there is no choice"
    siblings.write_text("3,5\n")
    assert measure_lanes.two_cores(frozenset({7, 3, 5, 6})) == (3, 6)


def test_two_threads_of_a_core_count_once(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_lanes, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(measure_lanes.os, "sched_getaffinity", lambda pid: {0, 1, 2, 5})
    assert measure_lanes.cores() == 4, "the machine does not say"
    for core, threads in {0: "0,4", 1: "1,5", 2: "2,6", 5: "1,5"}.items():
        (tmp_path / f"cpu{core}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{core}" / "topology" / "thread_siblings_list").write_text(threads)
    assert measure_lanes.cores() == 3


def test_lanes_that_the_system_does_not_hold_are_measured_where_they_run(monkeypatch):
    def refuses(*_):
        raise PermissionError

    asked: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_setaffinity", lambda thread, _: asked.append(thread))
        assert 1 <= len(measure_lanes.lane_cores()) <= 2
    assert asked == [0], "of the thread that asks"
    monkeypatch.setattr(os, "sched_setaffinity", refuses)
    assert measure_lanes.lane_cores() == ()
    found = measure_lanes.measure_lanes(devices.CPU())
    assert found["cross"] == measure_lanes.ASSUMED
