"""`hide`: orders in which weight gradients, and a second micro-batch, hide exchanges. Never slower, all valid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import rank_runs
from command_line import refusal, run, run_json
from helpers import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from test_lag import waiting

import minidl as ml
from minidl.core.graph import GraphBuilder, Role
from minidl.core.machine import PlanError
from minidl.core.placement import Refused
from minidl.core.tasks import Kind
from minidl.passes.hide import TURNS
from minidl.pricing.explain import explain, false_waits, places
from minidl.pricing.exposed import exposed
from minidl.schedulers.layer_times import layers

POLICIES = {"barrier": {}, "buckets": {"buckets": 1}, "fifo": {}, "priority": {"part_bytes": 1},
            "dear": {}, "reverse_first_k": {"part_bytes": 1}}


def planned(policy: str, times: dict[str, list[float]], micro_batches: int = 1, parts: int = 4, **options: Any) -> Any:
    """The plan on given times of layers; `comm`: of the sum of each."""
    graph, cost = layers(times["f"], times["o"], times["w"], times["x"], parts=parts, micro_batches=micro_batches)
    machine = ml.Machine(2, collective=lambda sizes: sum(times["c"][u] * n / parts for u, n in sizes.items()))
    return ml.plan(graph, policy, cost, machine, **POLICIES.get(policy, {}), **options)


def alternating(pairs: int, exchange: float) -> dict[str, list[float]]:
    """A dense layer and one with experts, in turn; all tasks take 1, and nothing is summed."""
    n, ones = 2 * pairs, [1.0] * 2 * pairs
    return {"f": ones, "o": ones, "w": ones, "c": [0.0] * n, "x": [0.0, exchange] * pairs}


NUMBER = st.integers(1, 9).map(float)
STEPS = st.integers(1, 5).flatmap(lambda n: st.fixed_dictionaries(
    {key: st.lists(NUMBER, min_size=n, max_size=n) for key in "fow"}
    | {"c": st.lists(st.integers(0, 9).map(float), min_size=n, max_size=n),
       "x": st.lists(st.sampled_from([0.0, 0.5, 2.0, 5.0, 9.0]), min_size=n, max_size=n).filter(any)}))


@settings(max_examples=drawn(60))
@given(times=STEPS, policy=st.sampled_from([*POLICIES]), hide=st.sampled_from([*TURNS]), micro=st.integers(1, 3))
def test_every_order_is_valid_and_no_slower(times, policy, hide, micro):
    micro += micro == 1 and hide == "two_batches"
    own, found = (planned(policy, times, micro, **more) for more in ({}, {"hide": hide}))
    assert found.period <= own.period * (1 + 1e-9)
    assert sorted(found.schedule.keys.tolist()) == sorted(own.schedule.keys.tolist())
    found.schedule.validate(found.programs[0].body[0].graph)
    assert found.period >= found.notes["compute"] * (1 - 1e-9)
    if hide == "none":
        assert (found.schedule.keys == own.schedule.keys).all()


@pytest.mark.parametrize(("exchange", "filled"), [(0.5, 0.5), (1.0, 1.0), (2.0, 1.0)])
@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_each_exchange_backward_but_the_first_is_filled(exchange, filled, pairs):
    """By a weight gradient; before the first one there is none. Forward nothing is hidden."""
    times = alternating(pairs, exchange)
    own, found = (planned("fifo", times, **more) for more in ({}, {"hide": "weights"}))
    assert own.period == 6 * pairs - 1 + 4 * pairs * exchange
    assert found.period == pytest.approx(own.period - (2 * pairs - 1) * filled)


@pytest.mark.few(1)
@pytest.mark.parametrize("exchange", [0.25, 0.5, 1.0])
def test_two_halves_of_a_batch_hide_all_but_the_turn(exchange):
    """Only where the forward pass turns, both halves' rows are on the way."""
    times = alternating(6, exchange)
    found = planned("fifo", times, 2, hide="two_batches")
    assert found.period <= found.notes["compute"] + exchange
    assert found.period < planned("fifo", times, 2, hide="weights").period


def test_sums_start_no_later_than_they_must():
    """Weight gradients that fill no wait stay where they are."""
    times = {key: [1.0] * 6 for key in "fow"} | {"c": [0.0] * 6, "x": [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]}
    order = planned("fifo", times, hide="weights").schedule.names(0)
    assert order[-11:] == ["5W0", "5O0", "4W0", "4O0", "3W0", "3O0", "2O0", "2W0", "1O0", "1W0", "0W0"]


def shared_expert() -> tuple[Any, Any]:
    """A layer with experts and a shared expert (unit 1), which reads the same tokens and was recorded after combine."""
    b = GraphBuilder()
    w = [b.buffer(f"w{i}", 1, Role.PARAMETER) for i in range(2)]
    g = [b.buffer(f"g{i}", 1, Role.GRADIENT) for i in range(2)]
    x, sent, made, back, own, y, dy, dback, dmade, dsent, dx = (b.buffer(name, 1) for name in (
        "x", "sent", "made", "back", "own", "y", "dy", "dback", "dmade", "dsent", "dx"))
    b.task(0, Kind.X, reads=[x], writes=[sent])
    b.task(0, Kind.F, reads=[sent, w[0]], writes=[made])
    b.task(0, Kind.X, part=2, reads=[made], writes=[back])
    b.task(1, Kind.F, reads=[x, w[1]], writes=[own])
    b.task(2, Kind.F, reads=[back, own], writes=[y, dy])
    b.task(1, Kind.W, reads=[x, dy], writes=[g[1]])
    b.task(0, Kind.X, part=3, reads=[dy], writes=[dback])
    b.task(0, Kind.W, reads=[sent, dback], writes=[g[0]])
    b.task(0, Kind.O, reads=[dback, w[0]], writes=[dmade])
    b.task(0, Kind.X, part=1, reads=[dmade], writes=[dsent])
    b.task(2, Kind.O, reads=[dsent], writes=[dx])
    for i in range(2):
        b.task(i, Kind.U, reads=[g[i], w[i]], writes=[w[i]])
    return b.build(), ml.CostModel(kinds={"F": 1.0, "O": 1.0, "W": 1.0, "U": 0.0, "X": 1.0}, unit="")


def test_the_shared_expert_runs_beside_dispatch():
    """Where that hides more than beside combine, which comes first as it was recorded."""
    graph, cost = shared_expert()
    machine = ml.Machine(2, collective=lambda sizes: 0.0)
    cost = replace(cost, tasks={"0X0": 1.0, "0X0/2": 0.0})
    own, found = (ml.plan(graph, "fifo", cost, machine, **more) for more in ({}, {"hide": "weights"}))
    assert [name for name in found.schedule.names(0) if "F" in name] == ["1F0", "0F0", "2F0"]
    assert found.period == found.notes["compute"] < own.period


def test_what_is_refused():
    times = alternating(1, 1.0)
    with pytest.raises(PlanError, match="hide is 'all'; it must be none, weights, two_batches"):
        planned("fifo", times, hide="all")
    with pytest.raises(Refused, match="the step exchanges nothing"):
        planned("fifo", times | {"x": [0.0, 0.0]}, hide="weights")
    with pytest.raises(Refused, match="a single micro-batch has none to take turns with"):
        planned("fifo", times, hide="two_batches")


def test_where_nothing_is_left_the_order_is_the_policys():
    times = {key: [1.0] for key in "fow"} | {"c": [0.0], "x": [1.0]}
    own, found = (planned("fifo", times, **more) for more in ({}, {"hide": "weights"}))
    assert (found.schedule.keys == own.schedule.keys).all()
    assert "nothing is left" in found.remarks[-1]
    assert np.isclose(found.period, own.period)


# --------------------------------------------------------------------------------------------------- exposed exchanges
@settings(max_examples=drawn(30))
@given(times=STEPS, policy=st.sampled_from([*POLICIES, "no_overlap"]), hide=st.sampled_from(["none", "weights"]))
def test_exposed_exchanges_are_the_time_that_they_alone_cost(times, policy, hide):
    """Without sums, a lane computes, or waits for an exchange."""
    hide = {} if policy == "no_overlap" else {"hide": hide}
    graph, schedule, _ = (found := planned(policy, times | {"c": [0.0] * len(times["f"])}, **hide)).priced
    still = exposed(graph, schedule, found.cost)
    assert (still[graph.kind != Kind.X] == 0).all()
    last = max((t for t in np.flatnonzero(np.isin(graph.kind, [Kind.F, Kind.O, Kind.W, Kind.X]))),
               key=lambda t: places(graph, schedule, found.cost).end[t])
    end = places(graph, schedule, found.cost).end
    assert still.sum() == pytest.approx(end[last] - found.notes["compute"])
    for t in np.flatnonzero(graph.kind == Kind.X).tolist():
        assert explain(graph, schedule, found.cost, graph.name(t)).exposed == still[t]
    told = false_waits(graph, schedule, found.cost).exposed
    assert sum(told.values()) == pytest.approx(still.sum())


LAYERS = ["--parallel", "data", "--scheduler", "fifo", "--forward", "1,1,1,1", "--output-grad", "1,1,1,1",
          "--weight-grad", "1,1,1,1", "--comm", "0,0,0,0", "--exchange", "0,1,0,1"]


def test_simulate_and_explain_show_exposed_exchanges(capsys):
    def shown(verb: str, *more: str) -> Any:
        return run_json(capsys, verb, *more, *LAYERS)[1]

    own, found = shown("simulate"), shown("simulate", "--scheduler-arg", "hide=weights")
    assert (own["period"], own["exchange"], own["exposed_exchange"]) == (19, 8, 8)
    assert (found["period"], found["exchange"], found["exposed_exchange"]) == (16, 8, 5)
    wait = shown("explain", "1F0")
    assert (wait["waits"][0]["task"], wait["exposed"]) == ("1X0", 1)
    assert "its lane only waits for the exchange 1X0" in run(capsys, "explain", "1F0", *LAYERS)[1]
    assert shown("explain")["exposed_exchanges"]["3X0/1"] == 1
    assert "1X0/2 1, 3X0 1" in run(capsys, "explain", *LAYERS)[1]
    two = shown("simulate", "--micro-batches", "2", "--scheduler-arg", "hide=two_batches")
    assert two["period"] == pytest.approx(11.5)


@pytest.mark.parametrize(("times", "says"), [("0,1", "--exchange has 2"), ("0,-1,0,1", "the cost of X is -1.0"),
                                             ("0,nan,0,1", "the cost of X is nan"), ("0,inf,0,1", "the cost of X is")])
def test_bad_times_of_exchanges_are_one_line(times, says, capsys):
    assert says in refusal(capsys, "simulate", *LAYERS, "--exchange", times)


# ------------------------------------------------------------------------------------------------------------- on ranks
TRAVELS = ml.CostModel(kinds={"flops_per_us": 2e4, "bytes_per_us": 1e4, "X": 3.0}, launch=1.0, source="analytic")
ON_RANKS: dict[str, dict[str, Any]] = {
    "two ranks": {}, "a shared expert": {"replicas": 3, "told": {"shared": 1}, "scheduler": "fifo"},
    "two batches": {"micro_batches": 2, "hide": "two_batches"},
    "batches in pairs": {"micro_batches": 3, "hide": "two_batches", "clip": 0.05, "optimizer": "adamw"},
    "all at once": {"scheduler": "priority", "options": {"part_bytes": 60}, "recompute": "all", "saved": True},
    "shares of the rest": {"shard": "3,prefetch=0,keep=none", "clip": 0.05}, "a bound": {"options": {"lag": 1}},
    "drops, ties, one token": {"rows": 1, "replicas": 3, "told": {"capacity": 1, "ties": True}, "scheduler": "dear"},
    "skipped steps": {"scaled": True, "bad": (1,), "scheduler": "reverse_first_k"},
    "a hint": {"options": {"order": "hint"}, "scheduler": "fifo"}}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ON_RANKS)
def test_ranks_leave_the_bits_of_one_process(name, monkeypatch):
    monkeypatch.setattr(rank_runs, "COST", TRAVELS)
    told = {"network": "experts", "experts_over": "data", "scheduler": "barrier", "ranks": 1, "replicas": 2,
            "micro_batches": 1, **ON_RANKS[name]}
    hide = told.pop("hide", "weights")
    options = told.pop("options", {})
    own = rank_runs.prepared({**told, "options": options}, 0)[0][1]
    told["options"] = {**options, "hide": hide}
    found = rank_runs.prepared(told, 0)[0][1]
    assert own.schedule.keys.tobytes() != found.schedule.keys.tobytes()
    assert found.period < own.period or "saved" in told
    rank_runs.check(told)


def at_once(plan: Any) -> int:
    """The most layers whose weight gradients wait at once, by the plan's times."""
    body = plan.programs[0].body[0]
    found = places(body.graph, body.schedule, plan.cost)
    spans = [(min(found.start[m] for m in makers), max(found.end[w] for w in own))
             for some in waiting(body.graph) for makers, own in some]
    return max(sum(a <= at < b for a, b in spans) for at, _ in spans)


@pytest.mark.few(1)
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_no_more_weight_gradients_wait_than_the_bound_allows(lag, monkeypatch):
    monkeypatch.setattr(rank_runs, "COST", TRAVELS)
    told = {"network": "experts", "experts_over": "data", "scheduler": "fifo", "ranks": 1, "replicas": 2,
            "micro_batches": 1, "told": {"shared": 1}}
    free, own, found = (rank_runs.prepared({**told, "options": options}, 0)[0][1] for options in (
        {"hide": "weights"}, {"lag": lag}, {"hide": "weights", "lag": lag}))
    assert at_once(found) <= lag + 1
    assert lag or at_once(free) > 1
    assert free.period <= found.period <= own.period * (1 + 1e-9)
