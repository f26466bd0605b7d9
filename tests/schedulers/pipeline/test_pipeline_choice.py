"""What policies pick by simulation where it is left to them: groups of modulo allocation, forms of fast-forwarding."""

from __future__ import annotations

import json

import numpy as np
import pipelines
import pytest
from command_line import run, run_json
from helpers import ROOT, drawn, recorded_classifier
from hypothesis import given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl import models, optim
from minidl.pricing.cost import CostModel, Link
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline import PipelineError, choice, looped

RECORD = ROOT / "bench" / "results" / "pipeline_parallel_waits.json"
MEASURED = [(s["network"], s["ranks"], s["block"], s["link"]["latency_us"])
            for s in json.loads(RECORD.read_text())["settings"]]
CHUNKS = 8


def made(name, p, m, f=1.0, o=1.0, w=1.0, c=0.0, chunks=None, **options):
    cost = pipeline.costs(pipelines.place(name, p, chunks), f, o, w, c)
    return pipelines.plan(name, p, m, cost, chunks, **options)


def makespan(*args, **options):
    return pipeline.price(made(*args, **options)).makespan


def test_links_decide_between_modulo_and_fast_forward():
    """Two layers of two on each of four ranks, where a hop takes half a layer's time."""
    plan = made("modulo_greedy", 4, 1, 2, 2, 2, 0.5, chunks=2)
    assert plan.notes["choices"]["group"] == {"picked": "2", "makespans": {"1": 24, "2": 21, "growing from 1": 21}}
    assert plan.placement.table[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert makespan("modulo_greedy", 4, 1, 2, 2, 2, 0.5, chunks=2, group=1) == 24, "what is given is taken"
    free = made("modulo_greedy", 4, 1, 2, 2, 2, chunks=2)
    assert "choices" not in free.notes, "a free link wants groups of one"
    assert free.placement.table[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.few(2)
@pytest.mark.parametrize("p", [4, 16, 64])
@pytest.mark.parametrize(("network", "ranks", "block", "latency"), MEASURED, ids=[f"{s[0]}-{s[1]}" for s in MEASURED])
def test_one_micro_batch_comes_near_the_ceiling(network, ranks, block, latency, p):
    """At least 95 % of (F+O+W)/(F+O) over GPipe with measured blocks and links, 8 of them on each rank."""
    f, o, w = (CHUNKS * block[kind] for kind in "FOW")
    found = makespan("modulo_greedy", p, 1, f, o, w, latency, chunks=CHUNKS)
    ceiling = (f + o + w) / (f + o)
    assert makespan("gpipe", p, 1, f, o, w, latency) / found >= 0.95 * ceiling
    assert found >= p * (f + o) + w / CHUNKS + 2 * (p - 1) * latency - 1e-6, "no plan is faster"


@pytest.mark.few(1)
@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize(("network", "ranks", "block", "latency"), MEASURED[::3], ids=lambda v: str(v)[:8])
def test_with_measured_blocks_no_other_plan_is_much_faster(network, ranks, block, latency, p):
    """Of fewer micro-batches than ranks: at least 95 % of the best known."""
    times = [CHUNKS * block[kind] for kind in "FOW"]
    found = makespan("modulo_greedy", p, p // 2, *times, latency, chunks=CHUNKS)
    for name in ("gpipe", "one_f_one_b", "zb_h1", "fast_forward_auto", "looped_bfs", "modulo", "hanayo", "zb_v",
                 "interleaved_zb"):
        chunks = None if pipelines.policy(name).chunks_fixed else CHUNKS
        try:
            assert makespan(name, p, p // 2, *times, latency, chunks=chunks) >= 0.95 * found, name
        except PipelineError:
            continue  # numbers that it cannot work with


def test_groups_grow_from_what_ends_last():
    """1, 2, 4 and then all stages of a rank; what is left of the first ranks' comes at the far end."""
    cost = pipeline.costs(pipelines.place("modulo", 6, CHUNKS), 8, 8, 8, 1e-3)
    problem = pipeline.Problem.of(pipelines.place("modulo", 6, CHUNKS), 1, cost)
    table = looped.growing(problem, 1).table[0]
    hops = int((np.diff(table) != 0).sum())
    sizes = np.diff(np.flatnonzero(np.r_[True, np.diff(table) != 0, True]))
    assert sizes.tolist()[:6] == [1, 2, 4, 8, 8, 8]
    assert hops == 6 - 1 + 3
    assert np.bincount(table).tolist() == [CHUNKS] * 6


@settings(max_examples=drawn(40))
@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 6), st.floats(0.01, 2), st.integers(0, 2**31))
def test_every_placement_has_as_many_stages_on_each_rank(p, v, m, latency, seed):
    """And what is picked is no slower than any that was tried."""
    random = np.random.default_rng(seed)
    place = pipelines.place("modulo", p, v)
    cost = pipeline.costs(place, *random.uniform(0.2, 3, (3, p * v)).tolist(), latency)
    problem = pipeline.Problem.of(place, m, cost)
    for found in looped.groupings(problem).values():
        assert np.bincount(found.table[0], minlength=p).tolist() == [v] * p
    plan = pipelines.plan("modulo_greedy", p, m, cost, v)
    if v > 1:
        tried = plan.notes["choices"]["group"]["makespans"]
        assert min(tried.values()) == tried[plan.notes["choices"]["group"]["picked"]]
        assert pipeline.price(plan).makespan == pytest.approx(min(tried.values()), rel=1e-5)


def test_the_form_of_fast_forwarding_is_picked():
    plan = made("fast_forward_auto", 4, 8)
    assert plan.notes["choices"]["form"] == {
        "picked": "greedy", "makespans": {"greedy": 27, "strict": 30, "released": 28, "push": 30}}
    for form, makespan_of in plan.notes["choices"]["form"]["makespans"].items():
        name = "fast_forward" + {"released": ""}.get(form, f"_{form}")
        assert makespan(name, 4, 8) == makespan_of


def test_a_cap_leaves_out_what_does_not_fit():
    capped = made("fast_forward_auto", 4, 8, activation_cap=4)
    assert capped.notes["choices"]["form"] == {"picked": "push", "makespans": {"push": 30}}
    with pytest.raises(PipelineError, match="the cap is 1"):
        made("fast_forward_auto", 4, 8, activation_cap=1)


def test_equals_stay_with_the_first():
    plan = made("gpipe", 2, 2)
    problem = pipeline.Problem.of(plan.placement, 2, plan.cost)
    order = pipelines.policy("gpipe").order
    notes = choice.best_order(problem, {"one": order, "other": order}, "name").notes
    assert notes == {"choices": {"name": {"picked": "one", "makespans": {"one": 9, "other": 9}}}}


def test_the_command_says_what_was_tried(capsys):
    flags = ["simulate", "--scheduler", "modulo", "--ranks", "4", "--chunks", "2", "--micro-batches", "2"]
    assert "group 2, the best by simulation; makespans: 1 " in run(capsys, *flags, "--latency", "0.5")[1]
    assert set(run_json(capsys, *flags, "--latency", "0.5")[1]["choices"]) == {"group"}
    assert "choices" not in run_json(capsys, *flags, "--latency", "0.5", "--scheduler-arg", "group=2")[1]


def test_a_recorded_network_takes_the_group_that_its_link_asks_for():
    ml.seed(0)
    model = models.mlp(8, *[32] * 8, 4)
    graph = recorded_classifier(model, optim.SGD(model.parameters(), 0.1), 4, 8)
    for latency, wraps in ((1e-6, True), (1e6, False)):
        plan = ml.plan(graph, "modulo_greedy", CostModel(**{**vars(CostModel.analytic()), "link": Link(latency)}),
                       ml.Machine(2), chunks=2)
        assert ((np.diff(plan.placement.table[0]) != 0).sum() > 1) == wraps
        assert plan.programs
    slow = CostModel(**{**vars(CostModel.analytic()), "link": Link(0.0, 1e-6)})
    plan = ml.plan(graph, "modulo_greedy", slow, ml.Machine(2), chunks=2)
    assert (np.diff(plan.placement.table[0]) != 0).sum() == 1, "bytes take time too"
