"""A task may end later by its slack and no more; each wait is for data, or for the order alone."""

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
from minidl.core.schedule import Lane, Schedule
from minidl.pricing.cost import Link
from minidl.pricing.explain import explain, false_waits, places
from minidl.pricing.simulation import simulate, times


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


@settings(max_examples=drawn(40))
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


def alone(graph, schedule, name):
    """The schedule in which this action runs on a lane of its own on its rank."""
    at = int(graph.index(name))
    first, entry = schedule.first, int(np.flatnonzero(schedule.ids(graph) == at)[0])
    mine = first == first[entry]
    lanes = {lane: schedule.keys[(schedule.lane_of_each() == i) & ~mine] for i, lane in enumerate(schedule.lanes)}
    own = Lane(schedule.lanes[int(schedule.lane_of_each()[entry])].rank, "own")
    second = [schedule.second[(schedule.lane_of_each() == i) & ~mine] for i in range(len(schedule.lanes))]
    return Schedule.of_keys([*lanes, own], [*lanes.values(), schedule.keys[mine]],
                            np.concatenate([*second, schedule.second[mine]]))


def check_waits(graph, schedule, cost):
    """Compares sums, and the start of a task after its false edge is removed, with the simulator."""
    start, end, ready = times(graph, schedule, cost)
    found, ids = false_waits(graph, schedule, cost, most=len(graph)), schedule.ids(graph)
    assert found.count == len(found.largest)
    order = [(-round(wait.idle, 9), -round(wait.wait, 9)) for wait in found.largest]
    assert order == sorted(order)
    told = {wait.task: wait for wait in found.largest}
    for entry, t in enumerate(ids.tolist()):
        one = explain(graph, schedule, cost, graph.name(t))
        untils = [wait.until for wait in one.waits]
        assert untils == sorted(untils, reverse=True)
        assert start[t] == pytest.approx(max(untils, default=0.0))
        assert ready[t] == pytest.approx(max((wait.until for wait in one.waits if wait.why == "data"), default=0.0))
        false = bool(one.waits) and one.waits[0].why == "order" and start[t] > ready[t] + 1e-9
        if schedule.second[entry]:
            continue  # the first one of the pair has been looked at
        assert (one.task in told) == false
        if false:
            wait = told[one.task]
            assert (wait.waits_for, wait.may_start, wait.start) == (one.waits[0].task, ready[t], start[t])
            freed = times(graph, alone(graph, schedule, one.task), cost).start[t]
            assert start[t] - freed == pytest.approx(wait.wait) == pytest.approx(wait.start - wait.may_start)
    for i, lane in enumerate(found.lanes):
        own = ids[schedule.ptr[i] : schedule.ptr[i + 1]][~schedule.second[schedule.ptr[i] : schedule.ptr[i + 1]]]
        assert lane.work + lane.idle_for_data + lane.idle_by_order == pytest.approx(end[own].max(initial=0.0))
        edges = np.unique(np.concatenate([[0.0], start[own], end[own], ready[own]]))  # between two, nothing changes
        middle, length = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
        works = ((start[own, None] < middle) & (middle < end[own, None])).any(axis=0)
        could = ((ready[own, None] < middle) & (middle < start[own, None])).any(axis=0)
        assert lane.idle_by_order == pytest.approx(float(length[~works & could].sum()))
        assert lane.idle_for_data == pytest.approx(float(length[~works & ~could].sum()))
        for t in own.tolist():
            if wait := told.get(graph.name(t)):
                inside = (wait.may_start < middle) & (middle < wait.start)
                assert wait.idle == pytest.approx(float(length[~works & inside].sum()), abs=1e-9)


@settings(max_examples=drawn(40))
@given(scheduled_graphs(tasks=8, ranks=2), st.lists(st.integers(0, 3), min_size=8, max_size=8), st.integers(0, 4))
def test_a_wait_is_for_data_or_by_the_order_alone(pair, durations, latency):
    graph, schedule = pair
    time = {graph.name(t): float(durations[t % 8]) for t in range(len(graph))}
    check_waits(graph, schedule, ml.CostModel(time, link=Link(latency=float(latency))))


@pytest.mark.parametrize("name", ["gpipe", "zb_h1", "dualpipe_v"])
def test_waits_of_pipelines_and_of_pairs(name):
    plan = pipelines.plan(name, 2, 4, ml.CostModel.given(1.0, 2.0, 1.0, 3.0))
    check_waits(plan.graph, plan.schedule, plan.cost)


def test_the_order_alone_keeps_the_lanes_of_zb_h1_waiting():
    plan = pipelines.plan("zb_h1", 4, 8)
    found = false_waits(plan.graph, plan.schedule, plan.cost, most=3)
    assert [lane.idle_by_order for lane in found.lanes] == [3, 2, 1, 0]  # for the cap, which ZB-H2 lifts
    assert [(wait.task, wait.waits_for, wait.wait, wait.idle) for wait in found.largest] == [
        ("0F7", "0W3", 18, 3), ("0F6", "0W2", 15, 3), ("0F5", "0W1", 12, 3)]
    one = explain(plan.graph, plan.schedule, plan.cost, "1F3")
    assert [(wait.task, wait.until, wait.why) for wait in one.waits] == [("1O0", 7, "order"), ("0F3", 4, "data")]
    assert "waits for   1O0 until 7, by the order alone: its dependencies ended 3 before" in str(one)
    wider = pipelines.plan("zb_h2", 4, 8)
    assert sum(lane.idle_by_order for lane in false_waits(wider.graph, wider.schedule, wider.cost).lanes) == 0
