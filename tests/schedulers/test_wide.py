"""Widths of tasks: never predicted slower than whole tasks or all in parts, and orders in which lanes share them."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
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
from minidl.pricing.cost import CostError, counts_up_to
from minidl.schedulers.search.wide import CHAIN, balanced, choices, in_widths
from minidl.schedulers.shared_lanes import critical_path

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
    whole, parted = (ml.plan(mlp, "multi_stream", COST, split=split) for split in (1, 3))
    names = [parted.graph.name(t) for t in range(len(parted.graph))]
    cut = sum(name.endswith("/1") for name in names)
    assert f" lanes, {cut} tasks in up to {max(int(name.partition('/')[2] or 0) for name in names)} parts" in (
        parted.timeline.report().splitlines()[0])
    assert "in up to" not in whole.timeline.report()


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


def test_numbers_of_streams_go_up_to_the_cores():
    assert [counts_up_to(n) for n in (2, 3, 7, 20, 50)] == [
        [2], [2, 3], [2, 3, 4, 5, 6, 7], [*range(2, 17), 20], [*range(2, 17), 24, 32, 48, 50]]
    for most in range(2, 64):  # the plan for fewer cores is a candidate for more
        assert {*counts_up_to(most)} - {most} <= {*counts_up_to(most + 1)}
    assert all(counts_up_to(most) == [*range(2, most + 1)] for most in range(2, 17))


def part_costs(graph: TaskGraph, seed: int, gains: int = 16) -> ml.CostModel:
    """Measured costs at random: parts take more than their share, and hardly less if there are more than `gains`."""
    rng, tasks = np.random.default_rng(seed), dict[str, float]()
    for name in (t.name for t in graph):
        whole, lost = float(rng.lognormal(5, 1)), float(rng.uniform(0, 0.2))
        tasks[name] = whole
        for n in counts_up_to(16):
            tasks |= {f"{name}/{p + 1}/{n}": whole * (1 / min(n, gains) + lost * rng.uniform(0, 0.2)) for p in range(n)}
    return ml.CostModel(tasks, source="measured", sync=0.5)


@pytest.mark.parametrize(("seed", "most"), [(0, 3), pytest.param(2, 16, marks=pytest.mark.slow)])
def test_more_cores_are_never_predicted_slower_nor_is_auto_than_one_stream_or_full_width(
        mlp: TaskGraph, seed: int, most: int):
    cost, before = part_costs(mlp, seed, gains=2 + seed), {"auto": np.inf, 1: np.inf}
    for cores in (n for n in (1, 2, 3, 4, 5, 8, 11, 16) if n <= most):
        now = {split: ml.plan(mlp, "multi_stream", replace(cost, cores=cores), split=split).step for split in before}
        assert all(now[split] <= before[split] * (1 + 1e-9) for split in now)
        assert now["auto"] <= now[1] <= ml.plan(mlp, "in_order", cost).step * (1 + 1e-9)
        if cores > 1:
            full = ml.plan(mlp, "multi_stream", replace(cost, cores=cores), split=cores, streams=cores).step
            assert now["auto"] <= full * (1 + 1e-9)
        before = now
    assert before["auto"] < 0.7 * ml.plan(mlp, "in_order", cost).step


def test_widths_between_one_and_all_lanes_are_chosen_where_more_parts_gain_nothing(mlp: TaskGraph):
    cost = replace(part_costs(mlp, 7, gains=4), cores=8)
    found = ml.plan(mlp, "multi_stream", cost, split="auto")
    assert {*widths(found.graph.keys).values()} & {2, 3, 4}
    assert found.step < 0.9 * ml.plan(mlp, "multi_stream", cost, split=8).step
    assert found.step < 0.9 * ml.plan(mlp, "multi_stream", cost).step
    assert " parts, by which a step is predicted" in found.remarks[-1]


@pytest.mark.parametrize("lanes", [2, 4, 16])
def test_balanced_widths_shorten_the_critical_path_to_a_lane_s_share_of_the_work(mlp: TaskGraph, lanes: int):
    cost = part_costs(mlp, 3)
    times = in_widths(mlp, cost, lanes)
    width = balanced(mlp, times, lanes, cost.sync)
    assert width.max() <= lanes
    longest, total = (np.array([times[n][i, t] for t, n in enumerate(width.tolist())]) for i in (0, 1))
    path = critical_path(mlp, longest)
    assert all(b in mlp.succs[a] for a, b in pairwise(path))
    assert longest[path].sum() < times[1][0, critical_path(mlp, times[1][0])].sum()
    wider = [(t, min(n for n in times if n > width[t])) for t in path if width[t] < lanes]
    gains = [longest[t] - times[n][0, t] - cost.sync - (times[n][1, t] - total[t]) / lanes
             for t, n in wider if times[n][0, t] < np.inf]
    assert longest[path].sum() <= total.sum() / lanes or max(gains, default=0) <= 0
    assert width[mlp.kind == Kind.W].mean() <= width[np.isin(mlp.kind, CHAIN)].mean()


def test_a_part_is_priced_by_the_number_of_parts(mlp: TaskGraph):
    tasks = {t.name: 8.0 for t in mlp} | {f"0F0/{p}/2": 5.0 for p in (1, 2)} | {f"0F0/{p}/4": 3.0 for p in (1, 2, 3, 4)}
    cost = ml.CostModel(tasks | {"0F0/1": 7.0, "0F0/2": 7.0, "0F0/3": 7.0}, source="measured")
    for count, each in ((2, 5.0), (4, 3.0), (3, 7.0)):
        graph = ml.plan(mlp, "in_order", cost, split={"0F0": count}).graph
        assert [cost.durations(graph)[graph.index(f"0F0/{p + 1}")] for p in range(count)] == [each] * count
    graph = ml.plan(mlp, "in_order", split={"0F0": 4}).graph
    with pytest.raises(CostError, match="lack task 0F0/4"):
        replace(cost, tasks={n: t for n, t in cost.tasks.items() if n[-2:] != "/4"}).durations(graph)


def test_multi_region_is_not_slower_than_lanes_that_share_the_parts(mlp: TaskGraph, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(import_module("minidl.schedulers.multi_region"), "EFFORT", 3_000)
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
    found = [choice for _, choice in choices(mlp, ml.CostModel({**cost.tasks, **slow}, source="measured"), 2)]
    key = mlp.keys[mlp.index("2F0")]
    assert {key in one for one in found} == {True, False}
    kinds = [{Kind(int(mlp.kind[mlp.find(np.array([k]))[0]])) for k in one} for one in found]
    assert {Kind.F, Kind.O} in kinds  # narrow weight gradients beside a wide chain


def test_measured_costs_have_the_parts(mlp: TaskGraph):
    cost = replace(ml.measure(mlp, seconds=0.01, parts=2), cores=2)
    assert {"0F0", "0F0/1/2", "0F0/2/2"} <= cost.tasks.keys()
    assert {"0F0", "0F0/2/2", "0F0/4/4"} <= ml.measure(mlp, seconds=0.01, parts=[2, 4]).tasks.keys()
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

