"""Uneven loads of experts: the slowest rank sets the pace of each exchange, and drawn loads keep the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from command_line import refusal, run, run_json
from hypothesis import given
from hypothesis import strategies as st

import minidl as ml
from minidl.core.machine import PlanError
from minidl.core.tasks import Kind
from minidl.passes.rewrite import unroll
from minidl.plans import chosen, loads
from minidl.schedulers.layer_times import layers

ONES = [1.0] * 4


def plan(ranks: int, exchange: list[float], **options):
    graph, cost = layers(ONES, ONES, ONES, exchange)
    return ml.plan(graph, "fifo", cost, ml.Machine(ranks, collective=lambda sizes: 0.0), **options)


def test_the_fullest_rank_sets_the_pace():
    """In order everything of a layer with experts takes as much longer; two experts of one rank count together."""
    found = plan(2, [0.0, 1.0, 0.0, 1.0])
    even, own, other = (float(chosen.draws(found, 0.0, 1, loads=each).own[0])
                        for each in ([5, 5], [8, 2], [1, 0, 0, 1]))
    assert (even, other) == (19, 19)
    assert own == pytest.approx(19 + 0.6 * (6 + 8))  # 1.6 of an even load: 6 tasks of experts and 8 exchanges
    assert even == pytest.approx(found.period)


@given(given=st.lists(st.integers(0, 99), min_size=4, max_size=4).filter(any), sigma=st.sampled_from([0.0, 0.5]),
       ranks=st.sampled_from([1, 2, 4]))
def test_drawn_loads_keep_the_tokens(given, sigma, ranks):
    graph = unroll(plan(2, [0.0, 1.0, 0.0, 1.0]).graph, 3)
    found = loads.times_of(graph, loads.checked(given, graph, ranks), ranks, sigma, np.random.default_rng(0))
    mine, travels = loads.of_experts(graph), graph.kind == Kind.X
    assert found[:, mine].mean(0) == pytest.approx(1)
    assert (found[:, ~mine & ~travels] == 1).all()
    for t in np.flatnonzero(travels).tolist():
        own = (graph.unit == graph.unit[t]) & (graph.iteration == graph.iteration[t]) & mine
        assert found[:, t] == pytest.approx(found[:, own].max())


def test_spread_costs_time(capsys):
    own = ["simulate", "--parallel", "data", "--scheduler", "fifo", "--forward", "1,1", "--output-grad", "1,1",
           "--weight-grad", "1,1", "--comm", "0,0", "--exchange", "0,1", "--ranks", "4", "--draws", "20"]
    steps = run_json(capsys, *own, "--loads", "1,1,1,1", "--jitter", "0.5")[1]["steps"]
    assert steps["even_loads"]["own"] == steps["without_spread"]["own"] < steps["p10"]["own"]
    assert steps["p10"]["own"] < steps["median"]["own"] < steps["p90"]["own"]
    assert "these loads" in run(capsys, *own[:-2], "--loads", "3,1,1,1")[1]
    for more, says in ((["--loads", "1,1,1"], "3 loads cannot be shared out among 4 ranks"),
                       (["--loads", "1,1,1,-1"], "they must be finite numbers >= 0, not all 0"),
                       (["--jitter", "0.5"], "it goes with --order hint or --loads")):
        assert says in refusal(capsys, *(own if "--jitter" in more else own[:-2]), *more)


def test_without_exchanges_there_are_no_loads():
    with pytest.raises(PlanError, match="the step exchanges nothing"):
        chosen.draws(plan(2, [0.0] * 4), 0.0, 1, loads=[1, 1])


def test_loads_of_a_network(capsys):
    """Experts are where the products over all experts are; there are as many loads as experts in a layer."""
    own = ["simulate", "--parallel", "data", "--ranks", "2", "--scheduler", "barrier", "--model", "moe_gpt",
           "--model-arg", "preset=tiny", "--batch-size", "4", "--costs", "analytic", "--experts-over", "data",
           "--bandwidth", "200MB"]
    steps = run_json(capsys, *own, "--loads", "5,1,1,1")[1]["steps"]
    assert steps["even_loads"]["own"] < steps["without_spread"]["own"]
    assert "3 loads are given; the network has 4 experts" in refusal(capsys, *own, "--loads", "1,2,3")
