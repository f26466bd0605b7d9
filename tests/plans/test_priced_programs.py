"""What is priced is what runs: the simulator times the programs of all ranks, and finds what the whole plan costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_runs import recorded

import minidl as ml
from minidl.core.graph import GraphBuilder
from minidl.core.schedule import Lane, Schedule
from minidl.core.tasks import RECEIVES, SENDS, Kind
from minidl.passes.send_receive import add_communication
from minidl.pricing.cost import CostModel, Link
from minidl.pricing.simulation import Clock, Lanes, simulate

POLICIES = ("gpipe", "one_f_one_b", "zb_h1", "interleaved", "fast_forward", "modulo")
GRAPH = recorded()[1]


def planned(name: str, ranks: int, link: Link) -> ml.Plan:
    return ml.plan(GRAPH, name, replace(CostModel.analytic(), link=link), ml.Machine(ranks))


@settings(max_examples=drawn(30))
@given(st.sampled_from(POLICIES), st.sampled_from([2, 4]), st.sampled_from([Link(), Link(7.0), Link(3.0, 50.0)]))
def test_an_iteration_of_all_programs_costs_what_the_plan_with_messages_does(name, ranks, link):
    plan = planned(name, ranks, link)
    graph, schedule = add_communication(plan.graph, plan.schedule)
    found, whole = plan.timeline, simulate(graph, schedule, plan.cost)
    assert found.makespan == pytest.approx(whole.makespan, rel=1e-12)
    ends = [{t.name(i): (t.start[i], t.end[i]) for i in t.tasks.tolist()} for t in (found, whole)]
    assert ends[0].keys() == ends[1].keys()
    for task, times in ends[0].items():
        assert times == pytest.approx(ends[1][task], rel=1e-12)
    # chained without a border within ranks it can only be as fast or faster
    lanes = Lanes.of(graph, schedule)
    assert plan.period >= float(np.diff(Clock.of(graph, plan.cost, lanes).ends(lanes, 6))[-1]) * (1 - 1e-9)


@pytest.mark.parametrize("name", POLICIES)
def test_the_tasks_and_lanes_are_those_of_the_programs(name):
    plan = planned(name, 2, Link(3.0, 50.0))
    graph, schedule, carried = plan.priced
    lanes = {(lane.rank, lane.name): schedule.names(i) for i, lane in enumerate(schedule.lanes)}
    assert lanes == {(p.rank, lane.name): p.schedule.names(i)
                     for p in plan.programs for i, lane in enumerate(p.schedule.lanes)}
    inside = {(graph.name(a), graph.name(b)) for b in range(len(graph)) for a in graph.preds[b].tolist()}
    own = {(p.graph.name(a), p.graph.name(b)) for p in plan.programs for b in range(len(p.graph))
           for a in p.graph.preds[b].tolist()}
    messages = inside - own
    assert own <= inside
    assert messages == {(t.replace("R", "S"), t) for t in (graph.name(i) for i in range(len(graph))) if "R" in t}
    rank = {task: lane[0] for lane, tasks in lanes.items() for task in tasks}
    assert all(rank[graph.name(a)] == rank[graph.name(b)]
               for a, b in zip(carried.source.tolist(), carried.target.tolist(), strict=True))


def test_a_longer_program_is_a_longer_prediction():
    """The prediction is of what the programs are lowered from, not of the plan without messages."""
    plan = planned("zb_h1", 2, Link())
    longer = planned("gpipe", 2, Link())
    again = replace(plan, cost=longer.cost).with_known(division=longer.division)
    assert again.timeline.makespan == longer.timeline.makespan > plan.timeline.makespan


def test_messages_that_take_no_time_are_not_shown():
    plan = planned("one_f_one_b", 2, Link())
    shown = plan.timeline.without_free_messages()
    assert [str(lane) for lane in plan.timeline.lanes] != [str(lane) for lane in shown.lanes] == ["0/main", "1/main"]
    assert shown.makespan == plan.timeline.makespan
    for i, (a, b) in enumerate(shown.edges.tolist()):
        assert shown.lane[a] != shown.lane[b]
        assert shown.arrived is None or shown.arrived[i] >= shown.end[a]


@pytest.mark.parametrize("name", POLICIES)
def test_messages_that_cores_move_are_work_of_both_ends(name):
    """All of a message's time is on the lanes that compute, half at each end, and none of it between them."""
    link = Link(4.0, 50.0, core=True)
    plan = planned(name, 2, link)
    graph, schedule, _ = plan.priced
    lanes = Lanes.of(graph, schedule)
    clock = Clock.of(graph, plan.cost, lanes)
    sends = np.isin(graph.kind, SENDS)
    extra = clock.duration - np.where(sends, 0.0, plan.cost.durations(graph) + plan.cost.launch)
    for kinds, near in ((SENDS, graph.preds), (RECEIVES, graph.succs)):
        for t in np.flatnonzero(np.isin(graph.kind, kinds)).tolist():
            assert clock.duration[t] == 0
            assert any(extra[o] > 0 for o in near[t].tolist())
    assert extra.sum() == pytest.approx(sum(link.latency + graph.bytes[t] / link.bandwidth
                                            for t in np.flatnonzero(sends)))
    free = planned(name, 2, Link())
    dma = planned(name, 2, Link(4.0, 50.0))
    assert plan.timeline.makespan >= max(free.timeline.makespan, dma.timeline.makespan) * (1 - 1e-12)


def test_the_last_that_makes_a_message_and_the_first_that_reads_it_move_it():
    """Two tasks make it and two read it; half of its time goes to the later maker, half to the earlier reader."""
    builder = GraphBuilder()
    a, b = (builder.buffer(name, 100) for name in "ab")
    got = builder.buffer("got", 100)
    for made in (a, b):
        builder.task(0, Kind.F, made, writes=[made])
    builder.task(0, Kind.SF, destination=1, reads=[a, b], writes=[got], nbytes=100)
    builder.task(1, Kind.RF, destination=1, reads=[got], writes=[got], nbytes=100)
    for reader in (0, 1):
        builder.task(1, Kind.F, reader, reads=[got], writes=[builder.buffer(f"end{reader}", 1)])
    graph = builder.build()
    lanes = Lanes.of(graph, Schedule.of(graph, {Lane(0): [0, 1, 2], Lane(1): [3, 4, 5]}))
    cost = CostModel(kinds={"F": 1.0}, link=Link(4.0, 50.0, core=True))
    assert Clock.of(graph, cost, lanes).duration.tolist() == [1, 1 + 3, 0, 0, 1 + 3, 1]
