"""Lanes that share the memory's bandwidth: small cases by hand, and what holds in general."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import drawn, planned, scheduled_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl.core.graph import GraphBuilder
from minidl.core.schedule import Lane, Schedule
from minidl.core.tasks import Kind
from minidl.pricing.cost import CostModel
from minidl.pricing.memory import Memory, far_bytes
from minidl.pricing.simulation import times


def ends(lanes, memory):
    """The ends of tasks, given by lanes as (time, time of its bytes alone); none waits for another lane."""
    builder, cost, ids = GraphBuilder(), {}, []
    for lane in lanes:
        ids.append([])
        for time, moving in lane:
            task = len(cost)
            size = round(moving * memory.one)
            builder.task(task, Kind.F, writes=[builder.buffer(f"b{task}", size)], nbytes=size)
            cost[f"{task}F0"] = time
            ids[-1].append(task)
    graph = builder.build()
    order = Schedule.of(graph, {Lane(0, f"l{i}"): own for i, own in enumerate(ids)})
    end = times(graph, order, CostModel(cost, memory=memory)).end
    return [[float(end[t]) for t in lane] for lane in ids]


FULL = Memory(100.0, 100.0, cache=0)  # two lanes get no more than one


@pytest.mark.parametrize(("lanes", "wanted"), [
    ([[(8, 8)]], [[8]]),
    ([[(8, 8)], [(8, 8)]], [[16], [16]]),  # each at half of the bandwidth
    ([[(8, 0)], [(8, 8)]], [[8], [8]]),  # arithmetic beside bytes
    ([[(8, 4)], [(8, 4)]], [[8], [8]]),  # both together need what there is
    ([[(8, 4)], [(8, 8)]], [[8], [12]]),  # a fair share is all that the first needs; the other moves 4 of 8 by then
    ([[(8, 6)], [(8, 6)]], [[12], [12]]),
    ([[(8, 8)], [(4, 0), (8, 8)]], [[12], [4, 16]]),  # they overlap from 4 on
    ([[(8, 80)], [(8, 80)]], [[16], [16]]),  # a task that its caches serve faster needs one lane's bandwidth
    ([[(8, 8)], [(8, 8)], [(8, 8)]], [[24], [24], [24]]),
    ([[(0, 0), (8, 8)], [(8, 8), (0, 8)]], [[0, 16], [16, 16]])])
def test_lanes_that_together_need_more_than_there_is_take_longer(lanes, wanted):
    assert ends(lanes, FULL) == [pytest.approx(lane) for lane in wanted]


def test_more_lanes_get_more_by_amdahls_law():
    half = Memory(100.0, 150.0, cache=0)  # two lanes get 3/2, so a third is serial: three get 9/5
    assert half.serial == pytest.approx(1 / 3)
    assert ends([[(9, 9)]] * 2, half) == [pytest.approx([12])] * 2
    assert ends([[(9, 9)]] * 3, half) == [pytest.approx([15])] * 3
    assert Memory(100.0, 180.0, lanes=3).serial == pytest.approx(1 / 3)
    assert ends([[(9, 9)], [(9, 0)], [(9, 0)]], half) == [pytest.approx([9])] * 3, "lanes without bytes do not count"


def test_bytes_in_a_cores_cache_need_no_bandwidth():
    graph = planned(("0F0", "", "x"), ("1F0", "x", "y"), ("2F0", "x y", "z"), nbytes=60)
    assert far_bytes(graph, 0).tolist() == [60, 60, 60]
    # in 100 bytes: all of x and, after 60 others, 40 bytes of y as 1F0 writes it; nothing of z after 120 others
    assert far_bytes(graph, 100).tolist() == [0, 60 * 20 / 120, 60 * 60 / 180]
    assert far_bytes(graph, 1000).tolist() == [0, 0, 0]
    assert not far_bytes(planned()).size


def test_communication_needs_no_bandwidth():
    graph = planned(("0F0", "", "x"), ("0A0", "x", "x"))
    assert Memory(1.0, 1.0, cache=0).times(graph).tolist() == [8, 0]


@given(scheduled_graphs(lanes=4), st.integers(0, 2**32 - 1), st.floats(0.1, 8.0), st.sampled_from([0, 300, 4000]))
@settings(max_examples=drawn(200))
def test_no_task_ends_earlier_and_what_is_alone_ends_as_before(scenario, seed, every, cache):
    graph, schedule = scenario
    rng = np.random.default_rng(seed)
    plain = CostModel(tasks={graph.name(t): float(rng.random() * 5) + 0.01 for t in range(len(graph))}, sync=0.5)
    shared = replace(plain, memory=Memory(500.0, 500.0 * every, int(rng.integers(2, 5)), cache))
    before, after = (times(graph, schedule, cost) for cost in (plain, shared))
    assert (after.end >= before.end - 1e-9).all()
    events = sorted(zip(before.start.tolist(), before.end.tolist(), strict=True))
    if shared.memory.serial == 0 or all(b >= end for (_, end), (b, _) in zip(events, events[1:], strict=False)):
        assert after.end == pytest.approx(before.end)
    one = Schedule.of(graph, {Lane(0): [*range(len(graph))]})
    assert times(graph, one, shared).end.tolist() == times(graph, one, plain).end.tolist()


def test_measured_pairs_take_the_place_of_the_bandwidth():
    graph = planned(("0F0", "", "x"), ("1F0", "", "y"))
    two = Schedule.of(graph, {Lane(0): [0], Lane(0, "sub"): [1]})
    cost = CostModel(kinds={"F": 8.0}, memory=Memory(1.0, 1.0, cache=0))
    assert ml.simulate(graph, two, cost).makespan == 16
    assert ml.simulate(graph, two, replace(cost, corun=ml.pricing.corun.CoRun())).makespan == 8


@pytest.mark.parametrize(("wrong", "words"), [
    ({"one": 0.0}, "the bandwidth of the memory is 0.0"), ({"every": float("nan")}, "is nan; it must be a finite"),
    ({"lanes": 1}, "2 or more lanes"), ({"lanes": 2.5}, "expected whole numbers"), ({"cache": -1}, "caches of -1")])
def test_wrong_bandwidths_are_named(wrong, words):
    with pytest.raises(ValueError, match=words):
        Memory(**{"one": 1.0, "every": 1.0, **wrong})
