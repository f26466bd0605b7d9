"""The diagnosis after `compare` and `train`: numbers that are true, reasons only where they hold, advice
that follows."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from command_line import reported, shown

from minidl.cli import runs
from minidl.core.machine import Machine
from minidl.pricing.cost import CostModel, Cross, Link
from minidl.training.job import Job
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer
from minidl.views.diagnosis import Surroundings, lanes, of_run, of_speedup

CALM = Surroundings(others=0.1, cores=4, median=99.0, p10=1.0, p90=1.1)


@pytest.fixture(scope="module")
def plans():
    found = {}
    for name in ("in_order", "multi_stream"):
        recorded = Recorded(Job(model="mlp", data="digits", scheduler=name))
        cost = CostModel.analytic()
        found[name] = replace(recorded.plan(cost), cost=replace(cost, source="measured"))
    # costs as measured ones: a time for each task
    graph = found["in_order"].graph
    times = {graph.name(t): 30.0 for t in range(len(graph))}
    return {name: replace(plan, cost=CostModel(tasks=times, unit="us", sync=5.0, wake=60.0, source="measured"))
            for name, plan in found.items()}


def said(diagnosis) -> str:
    return "; ".join(diagnosis.reasons)


def test_what_fits_needs_no_reason(plans):
    plan = plans["in_order"]
    found = of_run(plan, replace(CALM, others=3.0, median=plan.predicted_step_ms * 1.03))
    assert found.fits
    assert str(found).endswith(": as predicted")
    assert not found.reasons


def test_each_reason_holds_only_where_it_does(plans):
    base, plan = plans["in_order"], plans["multi_stream"]
    assert (lanes(base), lanes(plan)) == (1, 2)
    assert "other processes used 0.70 of 2 cores" in said(of_run(plan, replace(CALM, others=0.7, cores=2)))
    assert "other processes" not in said(of_run(plan, CALM))
    assert "2 streams on 1 core;" in said(of_run(plan, replace(CALM, cores=1))) + ";"
    assert "streams on" not in said(of_run(plan, CALM))
    assert "3 ranks as threads on 2 cores" in said(of_run(base, replace(CALM, cores=2, ranks=3)))
    apart = "handing a task to another core took 10.00 us after the run, and 5.00 when costs were measured"
    assert apart in said(of_run(plan, replace(CALM, hand_over=10.0)))
    assert apart in said(of_speedup(base, plan, CALM, replace(CALM, hand_over=10.0, median=200.0)))
    assert "another core" not in said(of_run(plan, replace(CALM, hand_over=9.9)))
    assert "another core" not in said(of_run(plan, CALM))
    assert "steps take 1.000 to 2.000 ms" in said(of_run(plan, replace(CALM, p90=2.0)))
    assert "tasks last 30 us, and handing one to another stream takes 65 us" in said(of_run(plan, CALM))
    assert "tasks last" not in said(of_run(base, CALM)), "one stream hands nothing over"
    assert "memory bound" in said(of_run(plan, CALM))
    assert "ignores interference" in said(of_run(plan, CALM))
    assert "crossing" not in said(of_run(plan, CALM))
    assumed = replace(plan.cost, cross=Cross(source="assumed"))
    assert "crossing from core to core costs is assumed" in said(of_run(replace(plan, cost=assumed), CALM))
    assert "crossing" not in said(of_run(replace(base, cost=assumed), CALM))
    analytic = replace(plan, cost=CostModel.analytic())
    assert "computed from flops and bytes" in said(of_run(analytic, CALM))


def test_cores_are_asked_again_after_a_run_on_two_streams(monkeypatch):
    asked = []
    monkeypatch.setattr(runs, "measure_hand_over", lambda device, cores: (asked.append(cores) or 0.25, 0.0))
    for scheduler, hand_over in (("in_order", 0.0), ("multi_stream", 0.25)):
        job = Job(model="mlp", scheduler=scheduler)
        trainer = Trainer(Recorded(job), CostModel.analytic())
        trainer.step()
        assert runs.surroundings(trainer).hand_over == hand_over
        assert len(asked) == (hand_over > 0)


def test_ranks_that_share_a_core_with_their_communication_are_a_reason():
    recorded = Recorded(Job(model="mlp", parallel="data", scheduler="barrier"), 0, 2)
    cost = replace(CostModel.analytic(), cores=1)
    slow = Machine(2, collective=lambda sizes: 1000.0)
    plan = recorded.plan(cost, slow)
    summing = plan.notes["communication"] / 1000
    assert f"one core, which also sums gradients: {summing:.3f} ms a step" in said(of_run(plan, CALM))
    assert "sums gradients" not in said(of_run(recorded.plan(replace(cost, cores=2), slow), CALM))
    assert "sums gradients" not in said(of_run(recorded.plan(cost, Machine(2, collective=lambda sizes: 1e-3)), CALM))
    assert "or sum larger parts (--scheduler buckets)." in str(of_run(plan, CALM))
    buckets = Recorded(Job(model="mlp", parallel="data", scheduler="buckets"), 0, 2).plan(cost, slow)
    assert "Give each rank a second core." in str(of_run(buckets, CALM)), "it sums large parts already"


def test_messages_are_a_reason_where_they_are_a_share_of_the_step():
    recorded = Recorded(Job(model="mlp", parallel="pipeline", scheduler="gpipe", micro_batches=4))

    def found(link):
        return said(of_run(recorded.plan(replace(CostModel.analytic(), link=link), Machine(2)), CALM))

    assert "each rank waits for 4 messages a step, which take 300 us each" in found(Link(300.0, 1e3, core=True))
    assert "messages" not in found(Link(0.01, 1e3, core=True))
    assert "messages" not in found(Link(300.0, 1e3))


def test_the_speedup_is_that_of_the_steps(plans):
    base, plan = plans["in_order"], plans["multi_stream"]
    wanted = base.predicted_step_ms / plan.predicted_step_ms
    busy = replace(CALM, others=0.7, cores=2)
    found = of_speedup(base, plan, replace(CALM, median=1.0), replace(busy, median=2.0))
    assert found.headline == f"predicted {wanted:.2f}x, measured 0.50x"
    assert "other processes used 0.70 of 2 cores" in said(found)
    assert of_speedup(base, plan, replace(CALM, median=wanted), replace(busy, median=1.0)).fits
    # the first one was slowed down, by what was around it
    other = of_speedup(base, plan, replace(CALM, median=2 * wanted, p90=5.0), replace(busy, median=1.0))
    assert "steps take 1.000 to 5.000 ms" in said(other)
    assert "other processes" not in said(other)


def test_a_run_that_is_faster_than_predicted_had_wrong_costs(plans):
    found = of_run(plans["in_order"], replace(CALM, others=3.0, median=0.01))
    assert "faster than predicted" in said(found)
    assert "--costs" in found.advice[0]


def test_advice_follows_the_reasons_once_each(plans):
    found = of_run(plans["multi_stream"], replace(CALM, others=3.0))
    assert 1 <= len(found.advice) <= len(found.reasons)
    assert len(set(found.advice)) == len(found.advice)
    text = str(found)
    assert all(line in text for line in (*found.reasons, *found.advice))
    nothing = replace(plans["in_order"])
    assert "no reason was found" in str(of_run(nothing, CALM))


@pytest.mark.few(1)
@pytest.mark.parametrize("arguments", [
    ["compare", "--model", "mlp", "--steps", "3", "--schedulers", "in_order,multi_stream"],
    ["train", "--model", "mlp", "--steps", "3"],
    ["train", "--model", "mlp", "--steps", "3", "--parallel", "pipeline", "--ranks", "2", "--micro-batches", "2",
     "--scheduler", "zb_h1"]], ids=["compare", "train", "ranks"])
def test_compare_and_train_say_it(arguments, capsys):
    record = reported(capsys, *arguments)
    found = record["diagnosis"] if arguments[0] == "train" else record["diagnosis"]["multi_stream"]
    assert set(found) == {"headline", "fits", "reasons", "advice"}
    if arguments[0] == "train":
        figures = [float(x) for x in re.findall(r"([\d.]+) ms", found["headline"])]
        wanted = [record["predicted_step_ms"], record["step_ms"]["median"]]
        assert figures == pytest.approx(wanted, abs=1.1e-3)  # the record's figures are rounded
        ratio = record["step_ms"]["median"] / record["predicted_step_ms"]
    else:
        first, second = record["arms"]
        predicted = first["predicted_step_ms"] / second["predicted_step_ms"]
        measured = first["step_ms"]["median"] / second["step_ms"]["median"]
        figures = [float(x) for x in re.findall(r"([\d.]+)x", found["headline"])]
        assert figures == pytest.approx([predicted, measured], abs=0.011, rel=2e-3)
        ratio = predicted / measured
    if abs(abs(ratio - 1) - 0.05) > 1e-3:
        assert found["fits"] == (abs(ratio - 1) <= 0.05)
    assert bool(found["reasons"]) == bool(found["advice"])
    assert found["headline"].split()[0] in shown(capsys, *arguments)
