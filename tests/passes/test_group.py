"""Weight gradients that wait for company: equal bits under every policy, from files too; who waits, and the price."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import refusal, run
from helpers import Case, recorded
from rank_runs import check

import minidl as ml
from minidl import nn, optim
from minidl.core.graph import TaskGraph
from minidl.core.machine import PlanError
from minidl.core.placement import Refused
from minidl.core.tasks import Kind, task_name
from minidl.devices.native import no_native_lanes
from minidl.passes.group import companies, groups_in
from minidl.passes.lag import layers
from minidl.pricing.cost import CostModel
from minidl.runtime.bound import Bound
from minidl.runtime.executors import SequentialExecutor, StreamExecutor


def case(micro_batches: int = 1, depth: int = 6) -> Case:
    """A network of so many linear layers: units 0, 2, 4 and so on."""
    return Case(("linear", "relu") * (depth - 1), width=16, micro_batches=micro_batches)


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["in_order", "multi_stream", "multi_region"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_groups_have_the_bits_of_single_tasks(policy: str, micro_batches: int) -> None:
    for more in ({"group_weights": 2}, {"group_weights": 99}, {"group_weights": 3, "lag": 1}):
        def grouped(graph: TaskGraph, more: dict[str, int] = more) -> StreamExecutor:
            plan = ml.plan(graph, policy, **more)
            assert groups_in(plan.graph)
            return StreamExecutor(plan.graph, plan.schedule)

        assert case(micro_batches).trained(grouped, 3) == case(micro_batches).trained(SequentialExecutor, 3)


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", [
    *({"scheduler": policy, "options": {"group_weights": size}} for policy, size in (
        ("priority", 2), ("barrier", 99), ("buckets", 2), ("fifo", 99), ("dear", 2), ("reverse_first_k", 99))),
    *({"scheduler": "barrier", "shard": shard, "options": {"group_weights": 3}}
      for shard in ("1", "2,prefetch=0", "3,prefetch=0,keep=none"))], ids=str)
def test_data_parallel_ranks_have_the_bits_of_one_process(settings: dict[str, Any]) -> None:
    """A sum over ranks waits for the group of its gradient."""
    check({"ranks": 1, "replicas": 2, **settings})


def test_a_group_runs_when_its_last_member_could_and_its_updates_after_it() -> None:
    graph = recorded(case())
    plan = ml.plan(graph, "in_order", group_weights=3)
    (unit, members), *_ = groups_in(plan.graph).items()
    names = [task_name(key) for key in plan.schedule.order(0).tolist()]
    last = members.split("+")[-1]
    before = names[names.index(f"{unit}W0") - 1]
    assert members == "10W0+8W0+6W0"
    assert (last, before) == ("6W0", "7O0")
    whole = plan.graph.index(f"{unit}W0")
    assert {plan.graph.name(int(t)) for t in plan.graph.succs[whole]} == {"10U0", "8U0", "6U0"}


@pytest.mark.parametrize("lag", range(4))
def test_a_group_has_no_more_layers_than_may_wait(lag: int) -> None:
    graph = recorded(case(depth=9))
    turn = {t: i for i, (_, own) in enumerate(layers(graph)) for t in own}
    groups = [*companies(graph, 99, lag)]
    assert all(turn[own[-1]] - turn[own[0]] <= lag for own in groups)
    assert max(map(len, groups)) == lag + 1
    assert ml.plan(graph, "multi_stream", group_weights=99, lag=lag).schedule.notes["lag"] == str(lag)


def test_what_the_chain_needs_and_what_is_not_alike_stays_alone() -> None:
    rng = np.random.default_rng(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8),
                          nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, groups=8))
    opt = optim.SGD(model.parameters(), 0.1)

    def step(x: Any) -> Any:
        loss = (model(x) * model(x)).mean()
        loss.backward()
        opt.step()
        return loss

    graph = ml.record(step, rng.standard_normal((2, 8, 8, 3)).astype("f"))
    for own in companies(graph, 99):
        kernels = {graph.launches[t][0].kernel for t in own}
        assert kernels == {"conv2d_weight_grad"}
        assert len({graph.launches[t][0].alike for t in own}) == 1
        assert all(graph.kind[s] == Kind.U for t in own for s in graph.succs[t].tolist())


def test_the_price_of_a_group_is_that_of_its_members_without_the_launches_that_it_saves() -> None:
    graph = recorded(case())
    cost = CostModel(kinds=dict.fromkeys("FOWU", 10.0), launch=2.0, node=3.0)
    alone, plan = ml.plan(graph, "in_order", cost), ml.plan(graph, "in_order", cost, group_weights=99)
    assert alone.step - plan.step == pytest.approx(5 * (2 + 3))
    small = CostModel(kinds=dict.fromkeys("FOWU", 1.0), node=3.0)
    plan = ml.plan(graph, "in_order", small, group_weights=99)  # no less than the longest
    assert ml.plan(graph, "in_order", small).step - plan.step == pytest.approx(5)


def test_auto_leaves_groups_out_unless_they_are_faster() -> None:
    graph = recorded(case())
    free = CostModel(kinds=dict.fromkeys("FOWU", 10.0))
    plan = ml.plan(graph, "multi_stream", free, group_weights="auto")
    assert not groups_in(plan.graph)
    assert "weight gradients do not wait for company: no group is predicted to be faster" in plan.remarks
    dear = CostModel(kinds=dict.fromkeys("FOWU", 10.0), launch=5.0)
    found = ml.plan(graph, "in_order", dear, group_weights="auto")
    assert groups_in(found.graph)
    assert not groups_in(ml.plan(graph, "in_order", dear, group_weights="none").graph)
    assert found.step == min(ml.plan(graph, "in_order", dear, group_weights=n).step for n in (2, 3, 4, 16))
    few = ml.plan(graph, "in_order", dear, ml.Machine(memory_limit=max(found.peak_bytes)), group_weights="auto")
    assert max(few.peak_bytes) <= max(found.peak_bytes)


@pytest.mark.parametrize(("asked", "why"), [
    (1, "group_weights is 1; it must be a whole number of weight gradients, from 2 on"),
    (True, "group_weights is True; it must be"), ("4Y0", "group_weights is '4Y0': '4Y0' is not a task name"),
    ("4W0+99W0", "4W0+99W0 are no weight gradients of this step that are alike"),
    ("4W0+4W0", "4W0+4W0 are no weight gradients"), ("4W0+6W0 6W0+8W0", "6W0+8W0 are no weight gradients"),
    ("4W0+4F0", "4W0+4F0 are no weight gradients of this step that are alike"), ("4W0", "4W0 are no weight gradients")])
def test_what_is_no_group_is_refused_in_one_line(asked: Any, why: str) -> None:
    with pytest.raises((PlanError, Refused), match=re.escape(why)):
        ml.plan(recorded(case()), "in_order", group_weights=asked)


@pytest.mark.skipif(bool(no_native_lanes()), reason="this machine has no native lanes")
def test_a_group_is_one_native_call() -> None:
    from minidl.devices.native.calls import convert

    graph = recorded(case())
    plan = ml.plan(graph, "in_order", group_weights=99)
    bound = Bound(plan.graph, None)
    thunks = bound.thunks(plan.graph.index(f"{next(iter(groups_in(plan.graph)))}W0"))
    assert [len(convert(thunk)) for thunk in thunks] == [1]
    assert len(thunks[0].args[0]) == 12  # six products and six sums for biases


def test_commands_name_the_group(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    net = ["--model", "mlp", "--costs", "analytic"]
    file, picture = str(tmp_path / "plan.csv"), str(tmp_path / "plan.svg")
    assert "7W0 (5W0+3W0+1W0)" in run(capsys, "explain", "3W0", *net, "--group-weights", "4")[1]
    assert run(capsys, "plan", *net, "--group-weights", "4", "--save", file, "--svg", picture)[0] == 0
    assert "7W0" in run(capsys, "check", file, *net)[1]
    assert "7W0 5W0+3W0+1W0" in Path(picture).read_text()
    assert "--group-weights has no effect on a network cut into a pipeline" in refusal(
        capsys, "plan", *net, "--parallel", "pipeline", "--ranks", "2", "--group-weights", "4")
