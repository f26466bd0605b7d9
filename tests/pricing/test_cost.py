"""Durations: given, analytic, by name; what is missing or makes no sense is told."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from helpers import planned
from hypothesis import given
from hypothesis import strategies as st

import minidl as ml
from minidl import CostError, CostModel, Link, schedulers
from minidl.core.graph import GraphBuilder
from minidl.core.tasks import Kind
from minidl.pricing.corun import CoRun
from minidl.pricing.cost import Cross
from minidl.pricing.memory import Memory
from minidl.pricing.sms import Sms

GRAPH = planned(("0F0", "", "a"), ("1F0", "a", "b"), ("1O0", "b", "c"), ("1W0", "b", "d"),
                ("0B0", "c", "e"), ("0U0", "e", ""))


def test_times_by_kind_and_unit():
    cost = CostModel.given([1, 2], output_grad=3, weight_grad=[4, 5], update=0.5)
    assert cost.durations(GRAPH).tolist() == [1, 2, 3, 5, 3 + 4, 0.5]
    assert CostModel.given(1, 2, 3).durations(GRAPH).tolist() == [1, 1, 2, 3, 5, 0]


def test_names_come_before_kinds_and_hold_in_every_iteration():
    cost = CostModel(tasks={"1W0": 9.0, "0F0": 7.0, "55F0": 1.0}, kinds={k.name: 1.0 for k in Kind})
    assert cost.durations(GRAPH).tolist() == [7, 1, 1, 9, 1, 1]
    assert cost.durations(ml.unroll(GRAPH, 2)).tolist() == [7, 1, 1, 9, 1, 1] * 2


def test_the_roofline():
    builder = GraphBuilder()
    builder.task(0, Kind.F, flops=4000.0, nbytes=10)
    builder.task(1, Kind.F, flops=10.0, nbytes=6000)
    cost = CostModel.analytic(flops_per_us=1000, bytes_per_us=2000, launch=0.25)
    assert cost.durations(builder.build()).tolist() == [4, 3]
    assert (cost.source, cost.launch) == ("analytic", 0.25)


def test_communication_costs_the_links_time():
    builder = GraphBuilder()
    for i, kind in enumerate((Kind.A, Kind.SF, Kind.RF, Kind.SO, Kind.RO, Kind.AG, Kind.D, Kind.X)):
        builder.task(i, kind, nbytes=100)
    cost = CostModel(link=Link(latency=3, bandwidth=50), far=Link(bandwidth=25))
    assert cost.durations(builder.build()).tolist() == [5, 2, 0, 2, 0, 5, 4, 5]
    assert Link(1).time(10**9) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, [1.0, -2.0], [float("nan")]])
def test_costs_that_make_no_sense_are_refused_by_name(bad):
    with pytest.raises(CostError, match=r"the cost of F is .*; it must be a finite number >= 0"):
        CostModel(kinds={"F": bad})
    if not isinstance(bad, list):
        for make, name in ((lambda: CostModel(tasks={"4W0": bad}), "4W0"), (lambda: CostModel(launch=bad), "launch"),
                           (lambda: CostModel(sync=bad), "sync"), (lambda: CostModel(link=Link(bad)), "latency")):
            with pytest.raises(CostError, match=f"the (cost of )?{name} is"):
                make()


@pytest.mark.parametrize(("what", "wrong", "says"), [
    *(("link", Link(0, bandwidth), "the bandwidth is") for bandwidth in (0.0, -1.0, float("nan"), float("inf"))),
    *(("kinds", {"flops_per_us": 1.0, "bytes_per_us": 1.0, rate: 0.0}, f"{rate} is 0") for rate in (
        "flops_per_us", "bytes_per_us")),
    *(("cross", cross, "another lane is") for cross in (Cross(-1.0), Cross(0, np.inf))),
    ("doze", -1.0, "the cost of doze is -1"), ("cores", 0, "whole number"), ("cores", 1.5, "whole number"),
    *(("link", Link(core=core), f"core is {core!r}; it must be true or false") for core in ("no", 0, None)),
    ("tasks", {"4W0": 1e-320}, "the cost of 4W0 is 1e-320; it must be a finite number >= 1e-100"),
    ("kinds", {"F": 1e308}, r"the cost of F is 1e\+308; it must be a finite number >= 0, at most 1e\+18")])
def test_fields_that_make_no_sense_are_refused_by_name(what, wrong, says):
    with pytest.raises(CostError, match=says):
        CostModel(**{what: wrong})


def test_what_is_missing_is_told():
    with pytest.raises(CostError, match=r"lack task 0B0 \(2 of 6 tasks are missing\)"):
        CostModel(kinds={"F": 1, "O": 1, "W": 1}).durations(GRAPH)
    with pytest.raises(CostError, match=r"1 costs are given for F, but the graph has units up to 1"):
        CostModel.given([1], 1, 1).durations(GRAPH)


NUMBER = st.just(0.0) | st.floats(1e-100, 1e9)


@given(st.dictionaries(st.sampled_from(["0F0", "4W0", "2F1"]), NUMBER),
       st.dictionaries(st.sampled_from(["F", "O", "W", "U"]), st.one_of(NUMBER, st.lists(NUMBER, min_size=1))), NUMBER,
       NUMBER, NUMBER, st.one_of(st.none(), st.floats(1e-3, 1e9)))
def test_json_round_trip(tmp_path_factory, tasks, kinds, latency, launch, sync, bandwidth):
    path = tmp_path_factory.mktemp("cost") / "cost.json"
    cost = CostModel(tasks, kinds, Link(latency, bandwidth), launch, sync, source="measured", unit="ms", device="a CPU",
                     links={"0->1": Link(sync, bandwidth), "12->0": Link()}, cores=2, spin=1.0, doze=launch, wake=3.0,
                     cross=Cross(sync, latency), far=Link(latency, bandwidth), sizes={"layers": [1, 2]},
                     corun=CoRun({"0F0": "a"}, {"a": {"a": 1.5}}, "estimated", {"a": [0.5, 0.25]}, 1.5),
                     memory=Memory(2.0 + latency, 3.0, 4, 5), sms=Sms(128, 8, [32, 64], {"0F0": [3.0, 2.0]}, side=32))
    cost.save(path)
    assert CostModel.load(path) == cost


@pytest.mark.parametrize("text", [
    "", "{", "[]", "3", '{"tasks": {}}', '{"link": 3}', '{"link": {"latency": 1}, "colour": 2}',
    '{"link": {}, "kinds": {"F": "fast"}}', '{"link": {}, "tasks": 3}', '{"link": {}, "kinds": {"F": null}}',
    '{"link": {}, "tasks": {"frank": 1}}', '{"link": {}, "kinds": {"X": 1}}', b"\xff\xfe",
    '{"link": {}, "source": "analytic"}', '{"link": {}, "source": "analytic", "kinds": {"flops_per_us": 1}}',
    '{"link": {}, "source": 3}', '{"link": {}, "unit": ["us"]}', '{"link": {}, "launch": 1e308}',
    '{"link": {}, "launch": "5"}', '{"link": {}, "launch": true}', '{"link": {}, "sync": 1' + "0" * 400 + "}",
    '{"link": {}, "kinds": {"F": [[1, 2], [3]]}}', '{"link": {}, "kinds": {"F": [1, 1e308]}}',
    '{"link": {"bandwidth": 1e-300}}', '{"link": {"latency": null}}', '{"tasks": ["0F0"], "link": {}}',
    '{"link": {}, "corun": {"groups": [1]}}', '{"link": {}, "corun": {"groups": {"0F0": 3}}}',
    '{"link": {}, "corun": {"slowdown": [1]}}', '{"link": {}, "corun": {"slowdown": {"a": 1}}}',
    '{"link": {}, "corun": {"slowdown": {"a": {"b": "2"}}}}', '{"link": {}, "corun": {"slowdown": {"a": {"b": 0}}}}',
    '{"link": {}, "corun": {"slowdown": {"a": {"b": 1e-300}}}}', '{"link": {}, "corun": 3}',
    '{"link": {}, "memory": 3}', '{"link": {}, "memory": {"one": 1}}', '{"link": {}, "memory": {"one": 1, "every": 0}}',
    '{"link": {}, "links": 3}', '{"link": {}, "links": {"0->1": 3}}', '{"link": {}, "links": {"0-1": {}}}',
    '{"link": {}, "links": {"0->1": {"bandwidth": 0}}}', '{"link": {}, "links": {"->1": {}}}',
    '{"link": {}, "links": {"0->1": {"latency": -1}}}', '{"link": {}, "links": {"00->1": {}}}', "[" * 100_000,
    '{"link": ' * 10_000, "1" * 10_000, '{"link": {}, "launch": 1, "launch": 2}',
    '{"link": {"latency": 1, "latency": 1}}', '{"link": {"core": "no"}}'])
def test_files_that_are_no_cost_model_are_refused_by_name(tmp_path, text):
    path = tmp_path / "cost.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CostError, match=r"cost\.json") as caught:
        CostModel.load(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_file_with_a_byte_order_mark_is_read_and_a_pipe_is_not_waited_for(tmp_path):
    path = tmp_path / "cost.json"
    CostModel.given(np.array([1, 2]), 2, 3).save(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert CostModel.load(path) == CostModel.given([1, 2], 2, 3), "arrays are saved as lists"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        CostModel.load(tmp_path / "pipe")


def test_sums_of_the_largest_costs_are_finite():
    most = ml.pricing.cost.MOST
    cost = CostModel(tasks={"0F0": most}, kinds=dict.fromkeys("FOWBU", most), link=Link(most, ml.pricing.cost.LEAST),
                     launch=most, sync=most, wake=most, step=most)
    timeline = ml.simulate(GRAPH, schedulers.in_order(GRAPH), cost)
    assert np.isfinite(timeline.makespan)
    assert np.isfinite(cost.link.time(2**60))
    with pytest.raises(CostError, match="the cost of F is 1e"):
        CostModel.given(1e308, 1e308, 1e308)


def test_a_measured_model_knows_every_task_and_changes_nothing():
    from helpers import SMALL

    model, opt, step = SMALL.make()
    graph = ml.record(step, *SMALL.batches(1)[0])
    before = SMALL.state(model, opt)
    cost = ml.measure(graph, seconds=0.01)
    assert SMALL.state(model, opt) == before
    assert cost.source == "measured"
    assert np.isfinite(cost.durations(graph)).all()
    assert json.dumps(dict(cost.tasks))


@pytest.mark.parametrize(("text", "says"), [("{}", "it lacks 'link'; start from one of --save-costs"),
                                            ("[1]", "'list' object is not a mapping")])
def test_a_file_by_hand_is_told_where_to_start(text, says, tmp_path):
    (tmp_path / "own.json").write_text(text)
    with pytest.raises(CostError, match=f"own.json is not a cost model: {says}$"):
        CostModel.load(tmp_path / "own.json")


def test_the_text_of_costs_is_short():
    """A notebook shows this text after `measure`. With all tasks, it was pages for a large network."""
    cost = CostModel(tasks={f"{i}F0": 1.0 for i in range(2000)}, kinds={"U": 1.0}, source="measured")
    assert repr(cost) == "<CostModel measured: 2,000 tasks, kinds {'U': 1.0}>"


@pytest.mark.parametrize("time", ["2", None, True, ["1", "2"], [1, None]])
def test_times_of_a_pipeline_are_numbers(time):
    """A text counted as the number that it spells, True as 1."""
    with pytest.raises(CostError, match=r"^a forward time is .*; it must be a number$"):
        ml.plan(ml.Pipeline(4, forward=time), "gpipe", machine=ml.Machine(ranks=2))
