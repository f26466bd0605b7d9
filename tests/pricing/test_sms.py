"""Times over the SMs of a GPU, and lanes that divide them: formula, predictions, the share that is chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import recorded_classifier
from hypothesis import given
from hypothesis import strategies as st

from minidl import models, optim, schedulers
from minidl.core.machine import PlanError
from minidl.core.schedule import SIDE, Schedule, ScheduleError
from minidl.core.tasks import Kind
from minidl.pricing.corun import CoRun
from minidl.pricing.cost import CostModel
from minidl.pricing.simulation import times
from minidl.pricing.sms import Sms


@pytest.fixture(scope="module")
def step():
    model = models.mlp(64, 24, 24, 10)
    graph = recorded_classifier(model, optim.SGD(model.parameters(), lr=0.1), 4, 64)
    return graph, CostModel(kinds=dict.fromkeys(("F", "O", "W", "U"), 10.0))


def table(graph, quarter, half):
    return Sms(128, 8, (32, 64), {graph.name(t): (quarter, half) for t in range(len(graph))})


# -------------------------------------------------------------------------------------------------------------- formula
@given(fixed=st.floats(0, 10), shared=st.floats(0, 1000), sms=st.integers(1, 132))
def test_what_is_shared_out_is_shared_out_at_every_count(step, fixed, shared, sms):
    """A task of time fixed + shared / SMs, measured at three counts, is predicted exactly from the least of them on."""
    graph, _ = step

    def time(n):
        return 1 + fixed + shared / n

    factors = (time(32) / time(132), time(64) / time(132))
    told = Sms(132, 4, (32, 64), {graph.name(t): factors for t in range(len(graph))})
    found = told.factors(graph, sms)
    if sms >= 32:
        np.testing.assert_allclose(found, time(sms) / time(132), rtol=1e-9)
    else:
        np.testing.assert_allclose(found, time(32) / time(132) * 32 / sms, rtol=1e-9)


def test_a_task_without_times_needs_all(step):
    graph, _ = step
    np.testing.assert_allclose(Sms(128).factors(graph, 32), 4.0)
    np.testing.assert_allclose(Sms(128).factors(graph, 128), 1.0)


@pytest.mark.parametrize(("more", "message"), [
    ({"counts": (64, 32)}, "must be ascending"), ({"counts": (128,)}, "must be ascending"),
    ({"counts": (0, 4)}, "must be ascending"), ({"bandwidth": 0}, "must be above 0"),
    ({"counts": (32,), "slower": {"0F0": (0.5,)}}, "the slowdown of 0F0 with fewer SMs must be 1 numbers from 1 on"),
    ({"counts": (32,), "slower": {"0F0": (2, 3)}}, "must be 1 numbers"),
    ({"side": 12}, "of 128 SMs the side lanes can have 8 to 120, in steps of 8")])
def test_what_makes_no_sense_is_one_line(more, message):
    with pytest.raises((ValueError, PlanError), match=message):
        Sms(128, **more)


# ---------------------------------------------------------------------------------------------------------- predictions
def test_each_lane_has_the_times_of_its_share(step):
    """The first lane takes the times of the other SMs, all others those of the share; undivided, no time changes."""
    graph, cost = step
    sms = replace(table(graph, 3.0, 2.0), side=32)
    weights = np.isin(graph.kind, (Kind.W, Kind.U))
    order = schedulers.multi_stream(graph, replace(cost, sms=None))
    ids, line = order.ids(graph), times(graph, order, replace(cost, sms=sms))
    took = line.end - line.start
    aside = np.zeros(len(graph), bool)
    aside[ids] = order.lane_of_each() > 0
    assert aside.any()
    assert not (aside & ~weights).any()
    np.testing.assert_allclose(took[aside], 30.0)
    np.testing.assert_allclose(took[~aside], 10 * sms.factors(graph, 96)[0])
    plain = times(graph, order, replace(cost, sms=replace(sms, side=0)))
    np.testing.assert_allclose(plain.end - plain.start, 10.0)


def test_lanes_that_divide_the_sms_share_the_bandwidth_alone(step):
    """Two groups that need 0.5 and 0.75 of it slow each other down by 1.25, those that need 0.2 and 0.5 not at all."""
    group, nbytes, took = np.array([1, 1, 2, 3]), np.array([40, 10, 75, 20]), np.array([8.0, 2, 10, 10])
    found = Sms(128, bandwidth=10.0).slowdown(group, nbytes, took, 4)
    np.testing.assert_allclose(found[1:, 1:], [[1, 1.25, 1], [1.25, 1.5, 1], [1, 1, 1]])
    np.testing.assert_allclose(found[0], 1)
    np.testing.assert_allclose(Sms(128).slowdown(group, nbytes, took, 4), 1)


# ---------------------------------------------------------------------------------------------------------------- plans
def test_multi_region_chooses_the_share(step):
    """Weight gradients that do not need many SMs get few, where lanes slow each other down otherwise."""
    graph, cost = step
    groups, pairs = schedulers.profile_groups(graph, cost)
    much = {a: {b: 1.9} for a, b in pairs}
    for a, b in pairs:
        much.setdefault(b, {})[a] = 1.9
    cost = replace(cost, corun=CoRun(groups, much),
                   sms=replace(Sms(128, 8, (16, 32, 64)), slower={
                       graph.name(t): (1.0, 1.0, 1.0) if graph.kind[t] in (Kind.W, Kind.U) else (6.0, 3.0, 1.05)
                       for t in range(len(graph))}))
    plain, auto = (schedulers.plan(graph, "multi_region", cost, **more) for more in ({}, {"side_sms": "auto"}))
    assert plain.schedule.side_sms == 0
    assert auto.schedule.side_sms == 16
    assert auto.timeline.makespan < plain.timeline.makespan
    given = schedulers.plan(graph, "multi_region", cost, side_sms=64)
    assert given.schedule.side_sms == given.cost.sms.side == 64
    assert given.timeline.makespan > auto.timeline.makespan


def test_a_share_that_does_not_pay_is_not_taken_and_said(step):
    graph, cost = step
    made = schedulers.plan(graph, "multi_region", replace(cost, sms=table(graph, 4.0, 2.0)), side_sms="auto")
    assert made.schedule.side_sms == made.cost.sms.side == 0
    assert "the SMs are not divided" in made.remarks[-1]


def test_a_plan_keeps_its_share(step, tmp_path):
    """In its CSV, with which it is priced and run again."""
    graph, cost = step
    cost = replace(cost, sms=table(graph, 1.0, 1.0))
    made = schedulers.plan(graph, "multi_region", cost, side_sms=32)
    text = made.schedule.to_csv()
    assert f"# {SIDE}: 32\n" in text
    again = schedulers.plan(graph, Schedule.from_csv(text, "plan.csv"), cost)
    assert again.schedule.side_sms == again.cost.sms.side == 32
    assert again.timeline.makespan == made.timeline.makespan
    assert again.program().schedule.side_sms == 32
    wrong = replace(made.schedule, notes={SIDE: "many"})
    with pytest.raises(ScheduleError, match="the note 'side SMs' of a schedule is 'many'; it must be a number of SMs"):
        schedulers.plan(graph, wrong, cost)


def test_shares_that_cannot_be_are_one_line(step):
    graph, cost = step
    with pytest.raises(PlanError, match="side_sms=32 needs times with a part of a GPU's SMs; measure the costs on CU"):
        schedulers.plan(graph, "multi_region", cost, side_sms=32)
    cost = replace(cost, sms=table(graph, 1.0, 1.0))
    with pytest.raises(PlanError, match="side_sms is 12; of 128 SMs the side lanes can have 8 to 120, in steps of 8"):
        schedulers.plan(graph, "multi_region", cost, side_sms=12)
    with pytest.raises(PlanError, match="side_sms is 'many'; it must be a number of SMs or auto"):
        schedulers.plan(graph, "multi_region", cost, side_sms="many")
