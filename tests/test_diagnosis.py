"""The diagnosis after `compare` and `train`: numbers that are true, reasons only where they hold, advice
that follows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from minidl.cli import main
from minidl.pricing.cost import CostModel
from minidl.pricing.diagnosis import Surroundings, lanes, of_run, of_speedup
from minidl.training.trainer import Job, Recorded

CALM = Surroundings(load=0.1, cores=4, p10=1.0, p90=1.1)


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
    found = of_run(plan, plan.predicted_step_ms * 1.03, replace(CALM, load=9.0))
    assert found.fits
    assert str(found).endswith(": as predicted")
    assert not found.reasons


def test_each_reason_holds_only_where_it_does(plans):
    base, plan = plans["in_order"], plans["multi_stream"]
    assert (lanes(base), lanes(plan)) == (1, 2)
    ms = plan.predicted_step_ms * 2
    assert "load 2.1 on 2 cores" in said(of_run(plan, ms, replace(CALM, load=2.1, cores=2)))
    assert "load" not in said(of_run(plan, ms, CALM))
    assert "2 streams on 1 core;" in said(of_run(plan, ms, replace(CALM, cores=1))) + ";"
    assert "streams on" not in said(of_run(plan, ms, CALM))
    assert "3 ranks as threads on 2 cores" in said(of_run(base, ms, replace(CALM, cores=2, ranks=3)))
    assert "steps take 1.000 to 2.000 ms" in said(of_run(plan, ms, replace(CALM, p90=2.0)))
    assert "tasks last 30 us, and handing one to another stream takes 65 us" in said(of_run(plan, ms, CALM))
    assert "tasks last" not in said(of_run(base, ms, CALM)), "one stream hands nothing over"
    assert "memory bound" in said(of_run(plan, ms, CALM))
    assert "as undisturbed" in said(of_run(plan, ms, CALM))
    analytic = replace(plan, cost=CostModel.analytic())
    assert "computed from flops and bytes" in said(of_run(analytic, 99.0, CALM))


def test_the_speedup_is_that_of_the_steps(plans):
    base, plan = plans["in_order"], plans["multi_stream"]
    wanted = base.predicted_step_ms / plan.predicted_step_ms
    found = of_speedup(base, plan, 1.0, 1.02, replace(CALM, load=2.1, cores=2))
    assert found.headline == f"predicted {wanted:.2f}x, measured {1 / 1.02:.2f}x"
    assert of_speedup(base, plan, wanted, 1.0, CALM).fits
    faster = of_speedup(base, plan, 2 * wanted, 1.0, CALM)
    assert "faster than predicted" in said(faster)
    assert "--costs" in faster.advice[0]


def test_advice_follows_the_reasons_once_each(plans):
    found = of_run(plans["multi_stream"], 99.0, replace(CALM, load=9.0))
    assert 1 <= len(found.advice) <= len(found.reasons)
    assert len(set(found.advice)) == len(found.advice)
    text = str(found)
    assert all(line in text for line in (*found.reasons, *found.advice))
    nothing = replace(plans["in_order"])
    assert "no reason was found" in str(of_run(nothing, 99.0, CALM))


@pytest.mark.parametrize("arguments", [
    ["compare", "--model", "mlp", "--steps", "3", "--schedulers", "in_order,multi_stream"],
    ["train", "--model", "mlp", "--steps", "3"],
    ["train", "--model", "mlp", "--steps", "3", "--parallel", "pipeline", "--ranks", "2", "--micro-batches", "2",
     "--scheduler", "zb_h1"]], ids=["compare", "train", "ranks"])
def test_compare_and_train_say_it(arguments, capsys):
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    found = record["diagnosis"] if arguments[0] == "train" else record["diagnosis"]["multi_stream"]
    assert set(found) == {"headline", "fits", "reasons", "advice"}
    if arguments[0] == "train":
        assert found["headline"] == (f"predicted {record['predicted_step_ms']:.3f} ms, measured "
                                     f"{record['step_ms']['median']:.3f} ms")
        ratio = record["step_ms"]["median"] / record["predicted_step_ms"]
    else:
        first, second = record["arms"]
        predicted = first["predicted_step_ms"] / second["predicted_step_ms"]
        measured = first["step_ms"]["median"] / second["step_ms"]["median"]
        assert found["headline"] == f"predicted {predicted:.2f}x, measured {measured:.2f}x"
        ratio = predicted / measured
    assert found["fits"] == (abs(ratio - 1) <= 0.05) or abs(abs(ratio - 1) - 0.05) < 1e-3  # of rounded figures
    assert bool(found["reasons"]) == bool(found["advice"])
    assert main(arguments) == 0
    assert found["headline"].split()[0] in capsys.readouterr().out
