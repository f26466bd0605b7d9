"""One stream where that is best: never predicted slower than in_order, whatever the costs; and the reason is said."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from command_line import SMALL, run_json
from helpers import drawn, network, planned_graphs
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl import schedulers
from minidl.pricing.corun import CoRun
from minidl.pricing.cost import CostModel, Cross
from minidl.pricing.memory import Memory
from minidl.schedulers.multi_region import planned
from minidl.schedulers.single import MARGIN

TASKS = {"F": 10.0, "O": 10.0, "W": 10.0, "U": 5.0}
LONG = CostModel(kinds=TASKS, source="measured")
NAMES = ("multi_stream", "multi_region")
#: what makes two streams slow, each alone -> words of the reason
SLOW = {"one core": {"cores": 1},
        "slow each other down": {},  # pairs, see `priced`
        "side by side slow each other down": {"memory": Memory(1e-6, 1e-6, cache=0)},
        "slow to reach from another": {"cross": Cross(1.0)},
        "slow to reach from another (assumed": {"cross": Cross(1.0, source="assumed")},
        "us are too short to be handed over in 900.0 us": {"sync": 600.0, "wake": 300.0}}


def priced(graph, words):
    if SLOW[words]:
        return replace(LONG, **SLOW[words])
    groups = {graph.name(t): "any" for t in range(len(graph))}
    return replace(LONG, corun=CoRun(groups, {"any": {"any": 2.5}}))


@pytest.fixture(autouse=True)
def little_effort(monkeypatch):
    module = sys.modules[planned.__module__]
    monkeypatch.setattr(module, "EFFORT", 500)
    monkeypatch.setattr(module, "LATE_SETS", 4)


def predicted(graph, name, cost, **options):
    return ml.plan(graph, name, cost, **options).step


def costs(graph, seed):
    """Costs with anything that the simulator knows of lanes."""
    rng = np.random.default_rng(seed)
    some = lambda: rng.choice([0.0, 0.3, 3.0, 30.0]).item()  # noqa: E731
    groups = {graph.name(t): "abc"[rng.integers(3)] for t in range(len(graph))}
    slowdown = {a: {b: rng.uniform(0.9, 3.0) for b in "abc"} for a in "abc"}
    return CostModel(tasks={name: rng.exponential(5.0) for name in groups}, launch=some(), sync=some(), spin=some(),
                     doze=some(), wake=some(), cross=Cross(some() / 99, some() / 99),
                     corun=[None, CoRun(groups, slowdown)][rng.integers(2)],
                     memory=[None, Memory(300.0, 400.0, 3, cache=256)][rng.integers(2)],
                     cores=[None, 1, 2][rng.integers(3)], source=["given", "measured"][rng.integers(2)])


@settings(max_examples=drawn(100))
@given(planned_graphs(), st.integers(0, 2**32), st.integers(2, 4))
def test_multi_stream_is_never_predicted_slower_than_in_order(graph, seed, streams):
    cost = costs(graph, seed)
    assert predicted(graph, "multi_stream", cost, streams=streams) <= predicted(graph, "in_order", cost) * (1 + 1e-9)


@settings(max_examples=drawn(15), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.integers(1, 5), st.integers(0, 2**32), st.booleans())
def test_multi_region_is_never_predicted_slower_than_in_order(layers, seed, crossing):
    graph = network(layers)
    cost = costs(graph, seed)
    assert predicted(graph, "multi_region", cost, crossing=crossing) <= predicted(graph, "in_order", cost) * (1 + 1e-9)


@pytest.mark.few(3)
@pytest.mark.parametrize("words", SLOW)
@pytest.mark.parametrize("name", NAMES)
def test_one_stream_where_two_are_slower_and_why(name, words):
    graph = network(5)
    graph = replace(graph, bytes=np.full(len(graph), 8))
    assert len(ml.plan(graph, name, LONG).schedule.lanes) == 2
    assert not ml.plan(graph, name, LONG).remarks
    plan = ml.plan(graph, name, priced(graph, words))
    assert len(plan.schedule.lanes) == 1
    assert replace(plan.schedule, notes={}).to_csv() == schedulers.in_order(graph).to_csv()
    (remark,) = plan.remarks
    assert remark.startswith("one stream is used, which takes ")
    assert words in remark
    assert "\n" not in remark


def test_a_gain_within_the_error_of_measured_costs_is_not_taken():
    """In a graph of two tasks beside each other, W hides behind O and saves its share of the step."""
    graph = network(2)
    few = {**TASKS, "U": 0.0}
    for share, streams in ((MARGIN / 2, 1), (MARGIN * 2, 2)):
        hidden = share * (10 * 3 + 10) / (1 - share)
        tasks = {"1W0": hidden, "0W0": 10.0}
        cost = CostModel(kinds=few, tasks=tasks, source="measured")
        assert len(schedulers.multi_stream(graph, cost).lanes) == streams
        assert len(schedulers.multi_stream(graph, replace(cost, source="given")).lanes) == 2
        if streams == 1:
            assert ml.plan(graph, "multi_stream", cost).remarks[0].endswith("not exact enough for so small a gain")


@pytest.mark.parametrize(("doze", "streams"), [(5.0, 2), (7.0, 2), (9.0, 1)])
def test_a_gain_that_waking_a_lane_once_would_undo_is_not_taken(doze, streams):
    """W hides behind O and saves 8 of 48, if no lane sleeps; none does as long as it spins."""
    graph = network(2)
    cost = CostModel(kinds={**TASKS, "U": 0.0}, tasks={"1W0": 8.0, "0W0": 10.0}, doze=doze, spin=1e9,
                     source="measured")
    plan = ml.plan(graph, "multi_stream", cost)
    assert len(plan.schedule.lanes) == streams
    assert streams == 2 or f"to wake a lane once, in {doze:.1f} us, costs more than that saves" in plan.remarks[0]


@settings(max_examples=drawn(50))
@given(planned_graphs(), st.integers(2, 4), st.integers(0, 2**32))
def test_costs_that_charge_nothing_for_streams_leave_multi_stream_as_published(graph, streams, seed):
    rng = np.random.default_rng(seed)
    for cost in (CostModel.analytic(), CostModel(tasks={graph.name(t): rng.exponential() for t in range(len(graph))})):
        plan = ml.plan(graph, "multi_stream", cost, streams=streams)
        assert len(plan.schedule.lanes) == streams
        assert not plan.remarks


def test_the_map_of_the_authors_is_kept_whatever_it_costs():
    from test_single_device import training

    graph = training("densenet121")[2]
    cost = replace(CostModel.analytic(), sync=1e4)
    assert len(schedulers.multi_stream(graph, cost, map="densenet121").lanes) == 2
    assert len(schedulers.multi_stream(graph, cost).lanes) == 1


@pytest.fixture
def slow_streams(tmp_path):
    """A file of costs by which two streams are slower."""
    path = tmp_path / "costs.json"
    replace(CostModel.analytic(), sync=1e4).save(path)
    return str(path)


@pytest.mark.parametrize("command", [["plan"], ["simulate"], ["explain", "1W0"], ["train", "--steps", "2"],
                                     ["train", "--dry-run"]], ids=" ".join)
def test_commands_say_why(command, slow_streams, capsys, tmp_path):
    page = tmp_path / "page.html"
    html = ["--html", str(page)] if "--dry-run" not in command else []
    _, record = run_json(capsys, *command, *SMALL, "--scheduler", "multi_stream", "--costs", slow_streams, *html)
    (remark,) = record["remarks"]
    assert "too short to be handed over in 10,000.0 us" in remark
    assert not html or json.dumps(remark)[1:-1] in page.read_text()


def test_compare_says_why_for_the_arm(slow_streams, capsys, tmp_path):
    page = tmp_path / "page.html"
    _, record = run_json(capsys, "compare", *SMALL, "--steps", "2", "--costs", slow_streams, "--html", str(page),
                         "--schedulers", "in_order,multi_stream,multi_region")
    none, *some = (arm["remarks"] for arm in record["arms"])
    assert none == []
    for remarks in some:
        assert "too short to be handed over" in remarks[-1]
        assert remarks[-1] in page.read_text()
