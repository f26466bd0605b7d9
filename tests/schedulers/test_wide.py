"""Widths of tasks: never predicted slower than whole tasks or all in parts, and orders in which lanes share them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers import recorded_classifier

import minidl as ml
from minidl import models, optim
from minidl.core.graph import TaskGraph
from minidl.core.machine import PlanError
from minidl.core.tasks import Kind, widths
from minidl.pricing.cost import CostError
from minidl.schedulers.single import counts_up_to
from minidl.schedulers.wide import choices, shared

COST = ml.CostModel.analytic(flops_per_us=2e3)


@pytest.fixture(scope="module")
def mlp() -> TaskGraph:
    model = models.mlp(64, 128, 128, 10)
    opt = optim.SGD(model.parameters(), lr=0.1)
    return recorded_classifier(model, opt, 64, 64)


def split_times(graph: TaskGraph, whole: float, part: float, update: float = 1.0) -> ml.CostModel:
    """Measured costs: each F, O and W takes `whole` us, and each of its two parts `part`."""
    time = {kind: (update, update) if kind == Kind.U else (whole, part) for kind in Kind}
    names = [(t.name, time[t.kind]) for t in graph]
    return ml.CostModel({f"{name}{tail}": t[bool(tail)] for name, t in names for tail in ("", "/1", "/2")},
                        source="measured", sync=1.0)


def test_lanes_share_the_parts_of_the_chain(mlp: TaskGraph):
    whole = ml.plan(mlp, "multi_stream", COST)
    parted = ml.plan(mlp, "multi_stream", COST, split=2)
    assert parted.step < 0.7 * whole.step
    names = [parted.graph.name(t) for t in parted.schedule.ids(parted.graph).tolist()]
    lanes = [names[a:b] for a, b in pairwise(parted.schedule.ptr.tolist())]
    for name in ("0F0", "2F0", "2O0"):
        assert sum(f"{name}/{p}" in tasks for tasks in lanes for p in (1, 2)) == 2
        assert all(not {f"{name}/1", f"{name}/2"} <= {*tasks} for tasks in lanes)


def test_a_report_says_how_many_tasks_are_in_parts(mlp: TaskGraph):
    whole, parted = (ml.plan(mlp, "multi_stream", COST, split=split).timeline.report() for split in (1, 3))
    assert "in parts" not in whole
    assert " lanes, 15 tasks in up to 3 parts" in parted.splitlines()[0]


@pytest.mark.parametrize("streams", [2, 3, 4])
def test_a_shared_order_is_valid_on_any_number_of_lanes(mlp: TaskGraph, streams: int):
    graph = ml.plan(mlp, "in_order", COST, split=streams).graph
    schedule = shared(graph, COST, [f"lane{i}" for i in range(streams)])
    schedule.validate(graph)
    assert sorted(schedule.ids(graph).tolist()) == list(range(len(graph)))
    assert len({lane.name for lane in schedule.lanes}) == streams


@pytest.mark.parametrize("cores", [1, 2, 6, 16])
@pytest.mark.parametrize("split", [1, 2, "auto"])
def test_by_default_no_number_of_streams_up_to_the_cores_is_faster(mlp: TaskGraph, cores: int, split: Any):
    cost = replace(split_times(mlp, 100.0, 55.0), cores=cores)
    if split == "auto":  # into as many parts as there are cores
        cost = replace(cost, tasks={**cost.tasks, **{f"{t.name}/{p + 1}": 10.0 for t in mlp for p in range(cores)}})
    found = ml.plan(mlp, "multi_stream", cost, split=split)
    assert len(found.schedule.lanes) <= max(2, cores)
    for streams in counts_up_to(max(2, cores)):
        if split != "auto":
            assert found.step <= ml.plan(mlp, "multi_stream", cost, split=split, streams=streams).step
    assert found.step <= ml.plan(mlp, "in_order", cost, split=1 if split == "auto" else split).step
    if split == "auto" and cores > 1:
        assert found.step <= ml.plan(mlp, "multi_stream", cost, split=cores).step
    said = [f"{n} streams are used: with {cores} cores, that is predicted" for n in counts_up_to(max(2, cores))]
    assert any(s in remark for s in said for remark in found.remarks) == (cores > 2 and len(found.schedule.lanes) > 1)


def test_numbers_of_streams_double_up_to_the_cores():
    assert [counts_up_to(n) for n in (2, 3, 4, 6, 16)] == [[2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8, 16]]


@pytest.mark.parametrize(("whole", "part"), [(100.0, 50.0), (100.0, 57.0), (100.0, 80.0), (100.0, 110.0), (1.0, 0.9)])
def test_auto_is_never_predicted_slower_than_whole_tasks_or_all_in_parts(mlp: TaskGraph, whole: float, part: float):
    cost = split_times(mlp, whole, part)
    auto = ml.plan(mlp, "multi_stream", cost, split="auto").step
    assert auto <= ml.plan(mlp, "multi_stream", cost).step
    assert auto <= ml.plan(mlp, "multi_stream", cost, split=2).step
    assert auto <= ml.plan(mlp, "in_order", cost).step


def test_multi_region_is_not_slower_than_lanes_that_share_the_parts(mlp: TaskGraph):
    cost = split_times(mlp, 100.0, 50.0)
    found = ml.plan(mlp, "multi_region", cost, split="auto")
    assert widths(found.graph.keys)
    assert found.step <= ml.plan(mlp, "multi_stream", cost, split=2).step * 1.001


def test_auto_cuts_if_parts_are_cheap_and_only_then(mlp: TaskGraph):
    cheap = ml.plan(mlp, "multi_stream", split_times(mlp, 100.0, 51.0), split="auto")
    assert len(widths(cheap.graph.keys)) > 5
    assert "tasks run in 2 parts" in cheap.remarks[-1]
    dear = ml.plan(mlp, "multi_stream", split_times(mlp, 100.0, 130.0), split="auto")
    assert not widths(dear.graph.keys)
    assert dear.remarks[-1] == "all tasks stay whole: parts are not predicted to gain"


def test_choices_leave_out_tasks_whose_parts_take_too_long(mlp: TaskGraph):
    cost = split_times(mlp, 100.0, 50.0)
    slow = {name: 90.0 for name in cost.tasks if name.startswith("2F0/")}
    found = choices(mlp, ml.CostModel({**cost.tasks, **slow}, source="measured"), 2)
    key = mlp.keys[mlp.index("2F0")]
    assert {key in one for one in found} == {True, False}
    kinds = [{Kind(int(mlp.kind[mlp.find(np.array([k]))[0]])) for k in one} for one in found]
    assert {Kind.F, Kind.O} in kinds  # narrow weight gradients beside a wide chain


def test_a_plan_in_parts_is_read_again_from_its_file(mlp: TaskGraph, tmp_path: Any):
    made = ml.plan(mlp, "multi_stream", COST, split={"0F0": 2, "2O0": 3})
    assert {t.name for t in made.graph if t.part} == {"0F0/1", "0F0/2", "2O0/1", "2O0/2", "2O0/3"}
    made.schedule.save(tmp_path / "plan.csv")
    read = ml.plan(mlp, str(tmp_path / "plan.csv"), COST)
    assert read.schedule.keys.tolist() == made.schedule.keys.tolist()
    assert read.step == made.step


def test_measured_costs_have_the_parts(mlp: TaskGraph):
    cost = ml.measure(mlp, seconds=0.01, parts=2)
    assert {"0F0", "0F0/1", "0F0/2"} <= cost.tasks.keys()
    assert ml.plan(mlp, "multi_stream", cost, split="auto").step > 0


@pytest.mark.parametrize(("split", "why"), [
    (0, "split is 0; it must be a number of parts, from 1 to 1023"),
    ("many", "split is 'many'; it must be a number of parts"),
    ({"0F0": 2000}, "split of 0F0 is 2000; it must be a number"),
    ({"77F0": 2}, "split: no task 77F0 in this graph"),
])
def test_numbers_that_make_no_sense_are_refused(mlp: TaskGraph, split: Any, why: str):
    with pytest.raises(PlanError, match=why):
        ml.plan(mlp, "in_order", split=split)


def test_costs_without_parts_are_refused(mlp: TaskGraph):
    whole = ml.CostModel({t.name: 10.0 for t in mlp}, source="measured")
    with pytest.raises((CostError, PlanError), match="lack task 0F0/1"):
        ml.plan(mlp, "multi_stream", whole, split=2)
