"""Exchanges of pipelines on given times: a rank waits for them, but a pair's tasks compute beside the other's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from command_line import refusal, run_json

import minidl as ml
from minidl.core.placement import PipelineError
from minidl.core.tasks import Kind, unpack
from minidl.pricing.cost import CostModel
from minidl.schedulers import pipeline


def plan(policy: str, ranks: int, micro_batches: int, exchange, forward=1.0, output_grad=1.0):
    return ml.plan(ml.Pipeline(micro_batches, forward, output_grad, exchange=exchange), policy,
                   machine=ml.Machine(ranks))


@pytest.mark.parametrize("policy", ["gpipe", "one_f_one_b", "zb_h1", "interleaved", "zb_v"])
def test_a_rank_waits_for_its_exchanges(policy):
    """Without pairs they are part of the forward and of the output gradient."""
    own, longer = plan(policy, 2, 4, 0.5), plan(policy, 2, 4, 0.0, 1.5, 1.5)
    assert own.step == longer.step > plan(policy, 2, 4, 0.0).step
    assert (own.schedule.keys == longer.schedule.keys).all()


@pytest.mark.parametrize("policy", ["dualpipe", "dualpipe_v"])
@pytest.mark.parametrize("exchange", [0.5, 2.0, 9.0])
def test_the_tasks_of_a_pair_hide_each_others_exchanges(policy, exchange):
    found, without = plan(policy, 4, 12, exchange), plan(policy, 4, 12, 0.0)
    order, t = found.schedule, found.timeline
    time = dict(zip(t.key[t.tasks].tolist(), (t.end - t.start)[t.tasks].tolist(), strict=True))  # of the whole action
    x, pairs = exchange * found.placement.share, np.flatnonzero(order.second)
    assert len(pairs)
    work = without.cost.durations(without.graph)
    for then in pairs.tolist():
        keys = order.keys[then - 1 : then + 1]
        own = work[without.graph.find(keys)]
        assert [time[key] for key in keys.tolist()] == pytest.approx([max(own.sum(), 2 * x, own.max() + x)] * 2)
    alone = np.isin(unpack(order.keys).kind, (Kind.F, Kind.O, Kind.B))
    alone[pairs] = alone[pairs - 1] = False
    for key in order.keys[alone].tolist():
        assert time[key] == pytest.approx(work[without.graph.find(np.array([key]))[0]] + x)
    assert without.step < found.step < plan(policy, 4, 12, 0.0, 1.0 + exchange, 1.0 + exchange).step


@pytest.mark.parametrize("policy", ["gpipe", "interleaved", "dualpipe", "dualpipe_v"])
@pytest.mark.parametrize("exchange", [0.5, 9.0])
def test_an_order_that_is_read_has_the_price_of_the_policy_that_made_it(policy, exchange):
    found = plan(policy, 4, 12, exchange)
    again = plan(found.schedule, 4, 12, exchange)
    assert again.step == found.step
    assert pipeline.price(again) == pipeline.price(found)


LAYERS = replace(CostModel.given([1.0, 2.0, 1.0, 3.0] * 2, [1.0] * 8, [2.0] * 8, 0.5, 10.0),
                 sizes={"message_bytes": [9, 5, 9, 7, 8, 5, 9, 3]})


@pytest.mark.parametrize("policy", ["gpipe", "zb_h1", "interleaved", "dualpipe_v"])
@pytest.mark.parametrize(("step", "cost"), [
    (ml.Pipeline(8, latency=0.5, bandwidth=2.0, message_bytes=3), None), (ml.Pipeline(8), LAYERS)])
def test_messages_of_an_order_that_is_read_have_bytes(policy, step, cost):
    """Of the pipeline, or of the layers that a cut ends; also of one that has gone through torch's notation."""
    found = ml.plan(step, policy, cost, ml.Machine(2))
    assert found.step > ml.plan(replace(step, message_bytes=0), policy, cost and replace(cost, sizes={}),
                                ml.Machine(2)).step
    for text in (found.schedule.to_csv(), pipeline.for_torch(found)):
        again = ml.plan(step, pipeline.read_schedule(text), cost, ml.Machine(2))
        assert pipeline.price(again) == pipeline.price(found)


def test_the_command_and_bad_numbers(capsys):
    own = ["simulate", "--scheduler", "dualpipe_v", "--ranks", "2", "--micro-batches", "8"]
    steps = [run_json(capsys, *own, *more)[1]["makespan"] for more in ([], ["--exchange", "0.5"], ["--exchange", "2"])]
    assert steps == sorted({*steps})
    assert "2 exchange times are given for 4 stages" in refusal(capsys, *own, "--exchange", "1,2")
    assert "exchange is -1.0; it must be finite and at least 0" in refusal(capsys, *own, "--exchange", "-1")
    with pytest.raises(PipelineError, match="exchange is nan"):
        plan("gpipe", 2, 4, float("nan"))
