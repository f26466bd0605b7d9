"""The predicted times against a plain reading of the model: earliest starts in lane order."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import edge_pairs, lane_pairs, planned, scheduled_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl import loops, simulation
from minidl.cost import CostModel, Link
from minidl.graph import COMMUNICATION, GraphBuilder, Kind
from minidl.schedule import Lane, Schedule, ScheduleError
from minidl.simulation import simulate, times
from minidl.timeline import What


def by_hand(graph, schedule, cost):
    """Start and end of each task by repeating the rule until nothing changes."""
    duration = cost.durations(graph) + cost.launch
    lane = np.empty(len(graph), int)
    lane[schedule.ids(graph)] = schedule.lane_of_each()
    rank = [schedule.lanes[i].rank for i in lane]
    start = np.zeros(len(graph))
    for _ in range(len(graph) + 1):
        for a, b in lane_pairs(graph, schedule):
            start[b] = max(start[b], start[a] + duration[a])
        for a, b in edge_pairs(graph):
            delay = 0.0
            if rank[a] != rank[b]:
                delay = cost.link.latency
                shared = set(graph.writes[a].tolist()) & set(graph.reads[b].tolist())
                if cost.link.bandwidth and graph[a].kind not in COMMUNICATION:
                    delay += sum(graph.buffer(x).bytes for x in shared) / cost.link.bandwidth
            elif lane[a] != lane[b]:
                delay = cost.sync
            start[b] = max(start[b], start[a] + duration[a] + delay)
    return start, start + duration


@given(scheduled_graphs(tasks=14, lanes=4, ranks=2), st.integers(0, 3), st.sampled_from([None, 64.0]), st.integers(0, 3), st.integers(0, 2))
@settings(deadline=None)
def test_times_are_the_earliest(pair, latency, bandwidth, launch, sync):
    graph, schedule = pair
    cost = CostModel(kinds={"F": 1, "O": 2, "W": 3, "U": 0.5}, link=Link(latency, bandwidth), launch=launch, sync=sync)
    start, end, ready = times(graph, schedule, cost)
    expected_start, expected_end = by_hand(graph, schedule, cost)
    np.testing.assert_allclose(start, expected_start)
    np.testing.assert_allclose(end, expected_end)
    assert (ready <= start).all()
    timeline = simulate(graph, schedule, cost)
    assert timeline.predicted
    assert timeline.makespan == pytest.approx(end.max() - start.min())
    tasks = timeline.what == What.TASK
    assert sorted(zip(timeline.key[tasks].tolist(), timeline.start[tasks].tolist(), strict=True)) == sorted(
        zip(graph.keys.tolist(), start.tolist(), strict=True))


def test_two_lanes_overlap():
    graph = planned(("0F0", "", "x"), ("0O0", "x", "d"), ("0W0", "x", "g"), ("0U0", "g", ""))
    cost = CostModel.given(2, 3, 5, update=1)
    one = Schedule.of(graph, {Lane(0): range(4)})
    two = Schedule.of(graph, {Lane(0): [0, 1], Lane(0, "sub"): [2, 3]})
    assert simulate(graph, one, cost).makespan == 11
    assert simulate(graph, two, cost).makespan == 8
    assert simulate(graph, two, CostModel(kinds=cost.kinds, sync=0.5, launch=0.25)).makespan == 8 + 0.5 + 3 * 0.25


def test_waking_another_lane_takes_time_only_where_it_waits():
    b = GraphBuilder()
    x, y, z, u = (b.buffer(name, 8) for name in "xyzu")
    for unit, (reads, writes) in enumerate([([], [x]), ([], [y]), ([x], [z]), ([y], [u])]):
        b.task(unit, Kind.F, reads=reads, writes=writes)
    graph = b.build()
    schedule = Schedule.of(graph, {Lane(0, "main"): [0, 1, 3], Lane(0, "sub"): [2]})
    cost = CostModel(kinds={"F": 10}, sync=2, wake=3)
    begin, end, _ = times(graph, schedule, cost)
    assert begin.tolist() == [0, 13, 12, 23]  # 2 waits for 0, and 1 for its lane, which has to wake the other
    late = Schedule.of(graph, {Lane(0, "main"): [0, 1, 2], Lane(0, "sub"): [3]})
    assert times(graph, late, cost)[0].tolist() == [0, 10, 23, 22]
    awake = CostModel(tasks={"0F0": 1, "1F0": 10, "2F0": 5, "3F0": 20}, sync=2, wake=3)
    busy = Schedule.of(graph, {Lane(0, "main"): [0, 2], Lane(0, "sub"): [1, 3]})
    assert times(graph, busy, awake)[0].tolist() == [0, 0, 1, 10]  # nobody waits for anybody


def test_a_pair_is_one_action_that_shows_its_results_at_its_end():
    """0F0 and 1F0 run as one action; what needs 0F0 waits for both."""
    graph = planned(("0F0", "", "a"), ("1F0", "", "b"), ("2F0", "a", "c"))
    cost = CostModel(kinds={"F": 1.0})
    schedule = Schedule.from_names({Lane(0): ["(0F0;1F0)"], Lane(0, "b"): ["2F0"]})
    start, end, _ = times(graph, schedule, cost)
    assert start.tolist() == [0, 0, 2]
    assert end.tolist() == [2, 2, 3]


def test_a_pair_that_waits_for_itself_is_a_deadlock_not_a_hang():
    """1F0 is paired with 0F0 but needs 2F0, which needs 0F0."""
    graph = planned(("0F0", "", "a"), ("2F0", "a", "b"), ("1F0", "b", "c"))
    schedule = Schedule.from_names({Lane(0): ["(0F0;1F0)"], Lane(0, "b"): ["2F0"]})
    with pytest.raises(ScheduleError, match=r"deadlock: a pair waits for itself"):
        simulate(graph, schedule, CostModel(kinds={"F": 1.0}))


def test_schedules_that_cannot_run_are_refused():
    graph = planned(("0F0", "", "a"), ("1F0", "a", "b"), ("2F0", "b", "c"))
    cost = CostModel(kinds={"F": 1.0})
    with pytest.raises(ScheduleError, match=r"stands before|deadlock"):
        simulate(graph, Schedule.from_names({Lane(0): ["2F0", "0F0"], Lane(0, "b"): ["1F0"]}), cost)
    with pytest.raises(ScheduleError, match=r"unknown task 9F0"):
        simulate(graph, Schedule.from_names({Lane(0): ["0F0", "1F0", "2F0", "9F0"]}), cost)
    for schedule in (Schedule.from_names({Lane(0): ["0F0", "1F0"]}), Schedule.from_names({Lane(0): ["0F0", "1F0", "2F0", "2F0"]}),
                     Schedule.from_names({Lane(0): ["0F0", "1F0", "1F0"]})):
        with pytest.raises(ScheduleError, match=r"is missing|stands twice"):
            simulate(graph, schedule, cost)


def test_a_send_takes_the_time_of_its_bytes_and_its_receive_the_latency():
    builder = GraphBuilder()
    a, b, c = builder.buffer("a", 100), builder.buffer("b", 100), builder.buffer("c", 100)
    builder.task(0, Kind.F, writes=[a])
    builder.task(0, Kind.SF, reads=[a], writes=[b], nbytes=100)
    builder.task(1, Kind.RF, reads=[b], writes=[c], nbytes=100)
    builder.task(1, Kind.F, reads=[c])
    graph = builder.build()
    schedule = Schedule.of(graph, {Lane(0): [0], Lane(0, "send 1"): [1], Lane(1, "receive 0"): [2], Lane(1): [3]})
    start, _, _ = times(graph, schedule, CostModel(kinds={"F": 1.0, "SF": 4.0, "RF": 0.0}, link=Link(2)))
    assert start.tolist() == [0, 1, 7, 7]


def test_nothing_takes_no_time():
    graph = planned()
    timeline = simulate(graph, Schedule.of(graph, {Lane(0): []}), CostModel())
    assert timeline.makespan == 0


def test_the_compiled_way_gives_the_same(monkeypatch):
    graph = ml.unroll(planned(("0F0", "w", "x"), ("0W0", "x", "g"), ("0U0", "g w", "w"), ("0O0", "x", "d")), 20)
    schedule = Schedule.of(graph, {Lane(0): [t.index for t in graph if t.kind in (Kind.F, Kind.O)],
                                   Lane(0, "sub"): [t.index for t in graph if t.kind in (Kind.W, Kind.U)]})
    cost = CostModel.given(1, 2, 3, update=0.5)
    short = times(graph, schedule, cost)
    monkeypatch.setattr(loops, "LONG", 1)
    assert simulation.run_loop is loops.run_loop
    for a, b in zip(short, times(graph, schedule, cost), strict=True):
        assert a.tolist() == b.tolist()
