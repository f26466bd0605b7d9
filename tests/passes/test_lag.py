"""`lag=k`: at most k + 1 layers' or micro-batches' weight gradients wait at once, however a plan runs; bits stay."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import golden_plans
import numpy as np
import pipelines
import pytest
from command_line import one_line, refusal, run, run_json
from helpers import Network, drawn, recorded_classifier
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_runs import recorded
from test_sweeps import MLP, compared

import minidl as ml
from minidl import nn, optim
from minidl.core.columns import grouped
from minidl.core.graph import Role, TaskGraph
from minidl.core.machine import PlanError
from minidl.core.placement import Refused
from minidl.core.schedule import Lane, Schedule
from minidl.core.tasks import Kind, repack, task_name
from minidl.passes.draft import Draft
from minidl.passes.lag import fenced
from minidl.pricing.simulation import times
from minidl.runtime.checking import random_schedule
from minidl.schedulers.movable import Step
from minidl.training.job import Job
from minidl.training.recorded import Recorded

COST = ml.CostModel(kinds={"F": 1.0, "O": 1.0, "W": 3.0, "U": 0.5, "Q": 0.2})
Waiting = list[tuple[list[int], list[int]]]  #: tasks that make an output gradient, and the W that read it, in order


def waiting(graph: TaskGraph, order: Schedule | None = None) -> list[Waiting]:
    """Weight gradients that wait at once in a step; with an order, for each stage on its rank."""
    whole = np.where(graph.kind == Kind.X, graph.keys, repack(graph.keys, part=0)).tolist()
    kind, gradient = graph.kind.tolist(), graph.role_is(Role.GRADIENT)
    makers, maker, found = grouped(zip(whole, range(len(graph)), strict=True)), dict[int, int](), dict[Any, Any]()
    rank = np.zeros(len(graph), int) if order is None else order.rank_of_tasks(graph)
    place = np.arange(len(graph)) if order is None else np.argsort(order.ids(graph))
    for t in range(len(graph)):
        if kind[t] == Kind.W and order is not None:
            own = found.setdefault((int(graph.unit[t]), int(rank[t])), {})
            own.setdefault(int(repack(whole[t], kind=Kind.O)), []).append(t)
        elif kind[t] == Kind.W:
            read = [maker[b] for b in graph.reads[t].tolist() if gradient[b] and b in maker]
            if read:
                found.setdefault((), {}).setdefault(whole[max(read)], []).append(t)
        elif kind[t] != Kind.U:
            maker |= dict.fromkeys(graph.writes[t].tolist(), t)
    return [sorted(((makers[made], tasks) for made, tasks in each.items()), key=lambda pair: min(place[pair[0]]))
            for each in found.values()]


def held(graph: TaskGraph, lag: int, order: Schedule | None = None) -> bool:
    """Whether at most `lag` + 1 wait in any execution: edges and lanes must end each W before the O that is more than
    `lag` places later begins. Then the first and the last of all that wait are at most `lag` places apart."""
    needs = graph.preds.lists()
    for lane in range(len(order.lanes)) if order is not None else ():
        for a, b in pairwise(graph.find(order.order(lane)).tolist()):
            needs[b] = [*needs[b], a]
    ended, left = [-1] * len(graph), list(range(len(graph)))  # as bits
    while left:
        missing = [p for p in needs[left[-1]] if ended[p] < 0]
        left += missing
        if not missing:
            ended[t := left.pop()] = 0
            for p in needs[t]:
                ended[t] |= ended[p] | 1 << p
    return all(ended[m] >> w & 1 for some in waiting(graph, order) for one, two in combinations(range(len(some)), 2)
               if two - one > lag for m in some[two][0] for w in some[one][1])


def most(graph: TaskGraph, schedule: Schedule, staged: bool, seed: int) -> int:
    """The most that wait at once, if tasks take drawn times."""
    found, each = 0, waiting(graph, schedule if staged else None)
    for time in np.random.default_rng(seed).exponential(size=(5, len(graph))):
        start, end, _ = times(graph, schedule, ml.CostModel(dict(zip(map(task_name, graph.keys), time.tolist(),
                                                                     strict=True))))
        for some in each:
            spans = [(min(start[m] for m in makers), max(end[w] for w in ws)) for makers, ws in some]
            found = max([found, *(sum(a <= at < b for a, b in spans) for at, _ in spans)])
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["multi_stream", "multi_region", "in_order", "reverse_first_k", "priority"])
@pytest.mark.parametrize(("network", "micro_batches"), [("mlp", 1), ("norms", 1), ("tied", 1), ("mlp", 4), ("tied", 2)])
def test_no_more_layers_wait_than_the_bound_allows(policy: str, network: str, micro_batches: int) -> None:
    graph = golden_plans.step(network, micro_batches)
    ranks = 1 + (policy in ("reverse_first_k", "priority"))
    options = {"streams": 2} if policy.startswith("multi") else {}
    for lag in (0, 1, 2):
        plan = ml.plan(graph, policy, COST if ranks == 1 else None, ml.Machine(ranks), lag=lag, **options)
        assert held(plan.graph, lag)
        assert plan.schedule.notes["lag"] == str(lag)
        if policy == "multi_stream":
            assert most(plan.graph, plan.schedule, False, lag) <= lag + 1
    free = fenced(Draft.of(graph), 99).graph
    assert free is graph or not held(graph, 0)


@pytest.mark.few(2)
@pytest.mark.parametrize(("model", "more"), [
    ("gpt", {"data": "pydoc"}), ("rnn", {"data": "pydoc"}), ("resnet20", {}), ("revnet", {}), ("snn", {}),
    ("mlp", {"dither": 1.0}), ("mlp", {"backward": "jacobi"}), ("mlp", {"clip": 1.0, "micro_batches": 2})])
def test_the_bound_holds_for_branches_time_steps_and_sweeps(model: str, more: dict[str, Any]) -> None:
    preset = {"preset": "tiny"} if "data" in more else {}
    graph = Recorded(Job(model=model, model_args=preset, batch_size=8, **more)).graph
    for lag, options in ((0, {}), (2, {}), (1, {"recompute": "all"}), (1, {"split": 2})):
        if options and (model == "revnet" or "backward" in more):
            continue
        plan = ml.plan(graph, "multi_stream", COST, streams=3, lag=lag, **options)
        assert held(plan.graph, lag)
        assert most(plan.graph, plan.schedule, False, lag) <= lag + 1


@settings(max_examples=drawn(15))
@given(st.lists(st.sampled_from([c for c in Network.CHOICES if c != "dropout"]), min_size=1, max_size=5),
       st.integers(1, 2), st.integers(0, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_random_networks_in_random_orders(layers: list[str], micro_batches: int, lag: int, lanes: int,
                                          seed: int) -> None:
    model = Network(layers, 4, 3)
    opt = optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any, y: Any) -> None:
        for i in range(micro_batches):
            with ml.micro_batch(i):
                nn.cross_entropy(model(x[2 * i : 2 * i + 2]), y[2 * i : 2 * i + 2]).backward()
        opt.step()

    graph = ml.record(step, np.zeros((4, 4), np.float32), np.zeros(4, np.int64))
    bound = fenced(Draft.of(graph), lag).graph
    assert held(bound, lag)
    assert most(bound, random_schedule(bound, lanes, np.random.default_rng(seed)), False, seed) <= lag + 1


def test_a_small_bound_costs_time_and_a_large_one_nothing() -> None:
    graph = golden_plans.step("mlp")
    for policy in ("multi_stream", "multi_region"):
        steps = [ml.plan(graph, policy, COST, streams=2, **more).step
                 for more in ({"lag": 0}, {"lag": 1}, {"lag": 2}, {"lag": 99}, {})]
        assert all(a >= b for a, b in pairwise(steps))
        assert steps[0] > steps[-1] == steps[-2]


@pytest.mark.few(1)
@pytest.mark.parametrize(("policy", "ranks", "options"), [
    ("multi_stream", 1, {"streams": 2}), ("multi_region", 1, {"streams": 2}), ("in_order", 1, {}),
    ("reverse_first_k", 2, {}), ("priority", 2, {})])
def test_a_large_bound_changes_no_order(policy: str, ranks: int, options: dict[str, int]) -> None:
    graph = golden_plans.step("norms")
    plain, bound = (ml.plan(graph, policy, machine=ml.Machine(ranks), **options, **more) for more in ({}, {"lag": 99}))
    assert plain.schedule.to_csv() == bound.schedule.to_csv().replace("# lag: 99\n", "")


def test_no_lag_is_the_conventional_backward_pass() -> None:
    """With lag=0 each W ends before the next output gradient that a W reads begins."""
    graph = golden_plans.step("mlp")
    assert ml.plan(graph, "in_order", lag=0).schedule.keys.tolist() == ml.plan(graph, "in_order").schedule.keys.tolist()
    plan = ml.plan(graph, "multi_stream", COST, streams=2, lag=0)
    start, end, _ = times(plan.graph, plan.schedule, plan.cost)
    for (_, ws), (makers, _) in pairwise(waiting(plan.graph)[0]):
        assert max(end[w] for w in ws) <= min(start[m] for m in makers)
    push, bound = (pipelines.plan(name, 3, 6, **more) for name, more in (
        ("fast_forward_push", {}), ("zb_h1", {"lag": 0})))
    for lane in range(3):
        for plan in (push, bound):  # O and W of micro-batches take turns; forwards come between
            assert [n[1:] for n in plan.schedule.names(lane) if n[1] != "F"] == [
                f"{kind}{i}" for i in range(6) for kind in "OW"]


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["zb_h1", "zb_h2", "zb_auto", "zb_v", "fast_forward", "interleaved_zb", "dualpipe_v",
                                    "one_f_one_b", "adl"])
@pytest.mark.parametrize("split", [1, 2])
def test_micro_batches_of_a_stage_wait_within_the_bound(policy: str, split: int) -> None:
    graph, alone = golden_plans.step("mlp", 8), ml.Machine(2)
    try:
        free = ml.plan(graph, policy, machine=alone, split=split)
    except Refused:
        assert (policy, split) in {("adl", 2), ("dualpipe_v", 2)}
        return
    for lag in range(3):
        plan = ml.plan(graph, policy, machine=alone, lag=lag, split=split)
        assert held(plan.graph, lag, plan.schedule)
        assert policy == "adl" or most(plan.graph, plan.schedule, True, lag) <= lag + 1
        assert max(plan.peak_bytes) <= max(free.peak_bytes) + 256 * (split > 1)  # a token


@settings(max_examples=drawn(12))
@given(st.sampled_from(["zb_h1", "fast_forward_greedy", "modulo", "interleaved_zb", "dualpipe", "dualpipe_v"]),
       st.sampled_from([2, 4]), st.integers(0, 2), st.integers(0, 3))
def test_on_given_times_as_well(policy: str, ranks: int, more: int, lag: int) -> None:
    """Pairs stay pairs, except for those with a W, which may have to come earlier."""
    cost, m = ml.CostModel.given(1.0, 1.3, 0.8, 0.2), ranks * (2 + more)
    free, plan = (pipelines.plan(policy, ranks, m, cost, **options) for options in ({}, {"lag": lag}))
    assert held(plan.graph, lag, plan.schedule)
    assert most(plan.graph, plan.schedule, True, lag) <= lag + 1
    pairs = [set(map(tuple, np.stack([p.schedule.keys[:-1], p.schedule.keys[1:]], 1)[p.schedule.second[1:]].tolist()))
             for p in (free, plan)]
    weights = lambda pair: any(ml.core.tasks.unpack(key).kind == Kind.W for key in pair)  # noqa: E731
    assert pairs[1] <= pairs[0]
    assert all(map(weights, pairs[0] - pairs[1]))
    assert pipelines.plan(policy, ranks, m, cost, lag=m).schedule.to_csv() == free.schedule.to_csv()


@pytest.mark.slow
def test_a_long_gpt_needs_half_the_memory_with_a_bound() -> None:
    """The figures of docs/claims: if all weight gradients come last, and if at most 17 wait."""
    sizes = {"layers": 32, "width": 512, "heads": 2, "length": 1024, "dropout": 0.0}
    graph = Recorded(Job(model="gpt", model_args=sizes, data="pydoc", batch_size=4)).graph
    plans = [ml.plan(graph, "reverse_first_k", machine=ml.Machine(2), recompute="all", **more)
             for more in ({"k": 195}, {"k": 17, "lag": 16}, {"k": 0})]
    assert [round(max(plan.peak_bytes) / 1e9, 2) for plan in plans] == [7.13, 3.73, 3.73]
    assert held(plans[1].graph, 16)
    assert not held(plans[0].graph, 16)


@pytest.mark.few(1)
@pytest.mark.parametrize(("policy", "ranks", "micro_batches", "cost", "more"), [
    ("multi_stream", 1, 4, COST, {"streams": 2}), ("reverse_first_k", 2, 4, None, {"k": 2}),
    ("fast_forward", 2, 8, None, {})])
def test_a_smaller_bound_needs_no_more_memory(policy: str, ranks: int, micro_batches: int, cost: ml.CostModel | None,
                                              more: dict[str, int]) -> None:
    """And less where weight gradients pile up."""
    graph = golden_plans.step("mlp", micro_batches)
    bounds = [{"lag": lag} for lag in range(more.get("k", 1) - 1, 4)]
    peaks = [max(ml.plan(graph, policy, cost, ml.Machine(ranks), **more, **bound).peak_bytes)
             for bound in ({"lag": 1}, *bounds, {})]
    assert peaks[1:] == sorted(peaks[1:])
    assert peaks[0] < peaks[-1]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    ["multi_stream", "--micro-batches", "4"],
    ["fast_forward", "--micro-batches", "8", "--parallel", "pipeline", "--ranks", "2"]], ids=lambda flags: flags[0])
def test_the_curve_and_a_limit_try_bounds(flags: list[str], capsys: Any) -> None:
    network = ["--costs", "analytic", "--model", "mlp", "--model-arg", "preset=tiny", "--model-arg", "layers=4",
               "--batch-size", "8", "--scheduler", *flags]
    _, found = run_json(capsys, "plan", *network, "--curve")
    points = [point for point in found["curve"] if point["lag"] is not None]
    assert points
    for point in points[:2]:
        assert f"lag {point['lag']}" in point["choice"]
        assert f"--scheduler-arg lag={point['lag']}" in point["command"]
        made = run_json(capsys, *point["command"].removesuffix(" --save plan.csv").split()[1:])[1]
        assert (made["peak_bytes"], made["predicted_step_ms"]) == (point["peak_bytes"], point["step_ms"])
        within = run_json(capsys, "plan", *network, "--memory-limit", str(point["peak_bytes"]))[1]
        assert within["predicted_step_ms"] <= point["step_ms"]
    _, fixed = run_json(capsys, "plan", *network, "--curve", "--scheduler-arg", "lag=1")
    assert all(point["lag"] is None and "--scheduler-arg lag=1" in point["command"] for point in fixed["curve"])


def test_an_asked_search_of_bounds_goes_with_the_others() -> None:
    graph = golden_plans.step("mlp", 4)
    with pytest.raises(PlanError, match="lag auto goes with offload auto"):
        ml.plan(graph, "multi_stream", lag="auto")
    free = ml.plan(graph, "multi_stream", streams=2)
    limit = ml.plan(graph, "multi_stream", streams=2, lag=1).peak_bytes[0]
    assert limit < free.peak_bytes[0]
    plan = ml.plan(graph, "multi_stream", None, ml.Machine(memory_limit=limit), streams=2, recompute="auto",
                   offload="auto", lag="auto")
    assert plan.peak_bytes[0] <= limit


@pytest.mark.parametrize("layers", [2, 20])  # small, and with too many tasks for updates that move by themselves
def test_an_update_stays_behind_a_weight_gradient_that_must_come_first(layers: int) -> None:
    """Without an activation between two layers, a layer's O waits for its W, and its update for its O."""
    stack = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    opt = optim.SGD(stack.parameters(), lr=0.1)
    graph = recorded_classifier(stack, opt, 2, 4)
    items = Step.of(fenced(Draft.of(graph), 0).graph, COST).items
    assert all(item.fence is None or item.release <= item.fence for item in items)
    ml.plan(graph, "multi_region", COST, lag=0)


@pytest.mark.parametrize("lag", [0, 1])
def test_bits_stay(lag: int) -> None:
    expected, found, _ = compared(lambda draft: (fenced(draft, lag), ""), MLP, "multi_stream")
    assert found == expected


@pytest.mark.few(1)
@pytest.mark.parametrize(("flags", "schedulers"), [
    (["--parallel", "pipeline", "--ranks", "2", "--split", "2"], "one_f_one_b,zb_h2,fast_forward"),
    (["--parallel", "pipeline", "--ranks", "2", "--scheduler-arg", "overlap=20"], "gpipe,zb_h1"),
    (["--parallel", "data", "--ranks", "2"], "barrier,reverse_first_k"), ([], "in_order,multi_stream")])
def test_bits_stay_on_ranks(flags: list[str], schedulers: str, capsys: Any) -> None:
    code, found = run_json(capsys, "compare", "--model", "mlp", "--model-arg", "hidden=16", "--batch-size", "16",
                           "--costs", "analytic", "--micro-batches", "8", "--steps", "2", "--schedulers", schedulers,
                           "--scheduler-arg", "lag=0", *flags)
    assert (code, found["bit_identical"]) == (0, True)


def test_a_stage_without_weight_gradients_has_no_bound() -> None:
    graph = recorded(network="grown")[1]
    plan = ml.plan(graph, "zb_v", machine=ml.Machine(3), lag=0)
    kinds = [set(plan.graph.kind[plan.graph.unit == stage].tolist()) for stage in range(6)]
    assert any(Kind.O in own and Kind.W not in own for own in kinds)
    assert held(plan.graph, 0, plan.schedule)


def test_a_saved_plan_keeps_its_bound(tmp_path: Path, capsys: Any) -> None:
    graph = golden_plans.step("mlp")
    last = np.argsort(np.isin(graph.kind, (Kind.W, Kind.U)), kind="stable")
    free = Schedule.of(graph, {Lane(0): last})
    assert ml.plan(graph, free).peak_bytes
    (tmp_path / "q.csv").write_text("# lag: 0\n" + free.to_csv())
    with pytest.raises(ValueError, match="comes before"):
        ml.plan(graph, str(tmp_path / "q.csv"))
    (tmp_path / "r.csv").write_text("# lag: none\n" + free.to_csv())
    with pytest.raises(ValueError, match="the plan's 'lag' has 'none', which is not a number"):
        ml.plan(graph, str(tmp_path / "r.csv"))
    small = ["--model", "mlp", "--model-arg", "hidden=16", "--batch-size", "16", "--costs", "analytic"]
    staged = ["--parallel", "pipeline", "--ranks", "2", "--micro-batches", "4"]
    path = str(tmp_path / "s.csv")
    asked = "plan", *small, *staged, "--scheduler", "zb_h2", "--save", path
    assert run(capsys, *asked, "--scheduler-arg", "lag=0")[0] == 0
    assert "# lag: 0" in Path(path).read_text()
    assert run(capsys, "check", path, *small, *staged)[0] == 0
    run(capsys, *asked)
    Path(path).write_text("# lag: 0\n" + Path(path).read_text())
    assert "is given, and weight gradients wait longer; give a larger lag" in one_line(
        run(capsys, "train", *small, *staged, "--steps", "1", "--scheduler", path)[2])


def test_a_bound_that_is_none_and_orders_that_cannot_have_one(capsys: Any, monkeypatch: Any) -> None:
    pipelines.little_effort(monkeypatch)
    for wrong in (-1, 1.5, True):
        with pytest.raises(PlanError, match="lag"):
            ml.plan(golden_plans.step("mlp"), "multi_stream", lag=wrong)
    times = "simulate", "--ranks", "2", "--micro-batches", "4", "--scheduler"
    assert "lag is -1; it must be a whole number" in refusal(capsys, *times, "zb_h1", "--scheduler-arg", "lag=-1")
    last = str(Path(__file__).parents[2] / "docs" / "extend" / "pipeline.py") + ":lifo"
    assert "runs 0W0 before the other weight gradients of its stage, but its output gradient later; leave lag out" in (
        refusal(capsys, *times, last, "--scheduler-arg", "lag=1"))
    assert "runs the two gradients of a stage on different lanes" in refusal(
        capsys, *times, "layerpipe", "--ranks", "3", "--forward", "3,1,1", "--output-grad", "1,1,1", "--weight-grad",
        "1,1,5", "--scheduler-arg", "lag=0")
    assert run(capsys, *times, last, "--scheduler-arg", "lag=3")[0] == 0  # nothing has to move
