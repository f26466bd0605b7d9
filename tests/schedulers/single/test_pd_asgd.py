"""PD-ASGD: each task reads the version that a clock by hand says, one thread each is SGD, and a log repeats a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from command_line import refusal, run_json

import minidl as ml
from minidl import models, nn, optim
from minidl.autograd.tape import micro_batch
from minidl.core.placement import Refused
from minidl.core.schedule import Schedule
from minidl.core.tasks import Kind, unpack
from minidl.runtime.executors import runtime
from minidl.runtime.replica import Replayed, Replica, replay
from minidl.runtime.version_log import VersionRead, as_lines, from_lines
from minidl.schedulers.batches import staleness

SIZES = (6, 8, 8, 8, 5)
BATCH = 4


def recorded(batches: int = 6, sizes: tuple[int, ...] = SIZES, momentum: float = 0.9) -> tuple[Any, Any]:
    """Model, and the graph of a step in which each micro-batch has an update of its own."""
    ml.seed(4)
    model = models.mlp(*sizes)
    opt = optim.SGD(model.parameters(), lr=0.05, momentum=momentum)

    def step(*parts: Any) -> Any:
        total: Any = 0.0
        for i in range(batches):
            with micro_batch(i, i * BATCH, i):
                loss = nn.cross_entropy(model(parts[2 * i]), parts[2 * i + 1])
                loss.backward()
                total = loss.detach() if i == 0 else total + loss.detach()
                opt.step()
        return total

    return model, ml.record(step, *stream(1, batches)[0])


def stream(steps: int, batches: int = 6, seed: int = 0) -> list[list[Any]]:
    random = np.random.default_rng(seed)
    return [[part for _ in range(batches) for part in (random.normal(size=(BATCH, SIZES[0])).astype("f"),
                                                       random.integers(0, SIZES[-1], BATCH))] for _ in range(steps)]


def costs(graph: Any, seed: int) -> ml.CostModel:
    """Times from 0.5 to 2 for each task, drawn."""
    drawn = np.random.default_rng(seed).uniform(0.5, 2.0, len(graph))
    return replace(ml.CostModel.analytic(), tasks=dict(zip([t.name for t in graph], drawn.tolist(), strict=True)),
                   kinds={}, launch=0.0, source="given")


def ran(data: list[list[Any]], cost: Any = None, one_lane: bool = False, batches: int = 6, momentum: float = 0.9,
        sizes: tuple[int, ...] = SIZES, **options: Any) -> tuple[list[bytes], list[bytes], list[VersionRead], Any]:
    """Losses, parameters, log and plan after these steps."""
    model, graph = recorded(batches, sizes, momentum)
    plan = ml.plan(graph, "pd_asgd", cost(graph) if cost else None, **options)
    program = (ml.plan(plan.graph, "in_order") if one_lane else plan).program()
    execute = runtime(program, logged=True)
    losses = [execute(*parts).numpy().tobytes() for parts in data]
    execute.close()
    log = sorted(execute.log.entries, key=lambda e: (e.step, e.key))
    return losses, [p.numpy().tobytes() for p in model.parameters()], log, plan


def replayed(data: list[list[Any]], log: list[VersionRead], **told: Any) -> tuple[list[bytes], list[bytes]]:
    model, graph = recorded(**told)
    again = Replayed(graph, from_lines(as_lines(log), "log"), "log")
    return [again(*parts).numpy().tobytes() for parts in data], [p.numpy().tobytes() for p in model.parameters()]


def drawn_run(seed: int) -> tuple[dict[str, Any], dict[str, int], list[list[Any]]]:
    """A network, its threads, and its data."""
    random = np.random.default_rng(seed)
    told: dict[str, Any] = {"batches": int(random.integers(1, 9)), "momentum": float(random.choice([0.0, 0.9])),
                            "sizes": (6, *random.integers(3, 40, random.integers(1, 5)).tolist(), 5)}
    options = {name: int(random.integers(least, 4)) for name, least in (("forward", 1), ("backward", 1), ("queue", 0))}
    return told, options, stream(3, told["batches"], seed)


def by_clock(graph: Any, plan: Any, forward: int, backward: int, queue: int) -> dict[tuple[int, int], int]:
    """(key, layer) -> the version that each task of the first step reads, by the definition: how many updates of the
    layer have ended when it starts. The clock goes by the threads' orders alone."""
    time = dict(zip(graph.keys.tolist(), plan.cost.durations(graph).tolist(), strict=True))
    begin: dict[int, float] = {}
    end: dict[int, float] = {}
    threads = [[k for k in plan.schedule.order(i).tolist() if graph[int(graph.find(np.array([k]))[0])].name[:1] != "8"]
               for i in range(len(plan.schedule.lanes))]
    batch = {k: int(unpack(k).micro_batch) for keys in threads for k in keys}
    ahead = {i: [k for k in threads[i] if not plan.schedule.lanes[i].name.startswith("backward")]
             for i in range(len(threads))}
    last = {batch[k]: k for keys in ahead.values() for k in keys}  # of each forward
    of = {b: [k for keys in threads for k in keys if batch[k] == b and k not in ahead[0]
              and not any(k in keys for keys in ahead.values())] for b in range(len(last))}
    while len(end) < len(batch):
        for i, keys in enumerate(threads):
            for before, k in zip([None, *keys], keys, strict=False):
                if k in end or (before is not None and before not in end):
                    continue
                start = end[before] if before is not None else 0.0
                first = before is None or batch[before] != batch[k]
                if first and ahead[i]:
                    over = sorted(end.get(of[b][-1], np.inf) for b in range(batch[k]))
                    full = batch[k] - (backward + queue)  # so many batches must be over
                    start = max(start, over[full] if full >= 0 else 0.0)
                elif first:
                    start = max(start, end.get(last[batch[k]], np.inf))
                if start < np.inf:
                    begin[k], end[k] = start, start + time[k]
    found = {}
    for t in graph:
        key = int(graph.keys[t.index])
        layers = {b.name.rpartition(".")[0] for b in t.reads if b.role == "parameter"}
        if t.kind != Kind.U and layers:
            found[key, t.unit] = sum(u.kind == Kind.U and u.unit == t.unit
                                     and end[int(graph.keys[u.index])] <= begin[key] for u in graph)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(("forward", "backward", "queue"), [(1, 2, 1), (1, 1, 3), (3, 2, 0)])
def test_each_task_reads_the_version_of_a_clock_by_hand(forward: int, backward: int, queue: int) -> None:
    options = {"forward": forward, "backward": backward, "queue": queue}
    for seed in range(2):
        _, _, log, plan = ran(stream(1), lambda graph, seed=seed: costs(graph, seed), **options)
        _, graph = recorded()
        found = {(e.key, e.stage): e.version for e in log if unpack(e.key).kind != Kind.U}
        assert found == by_clock(graph, plan, **options)


def sgd(data: list[list[Any]]) -> tuple[list[bytes], list[bytes]]:
    """Losses and parameters of one update after the other."""
    model, graph = recorded()
    alone = ml.SequentialExecutor(graph)
    return [alone(*parts).numpy().tobytes() for parts in data], [p.numpy().tobytes() for p in model.parameters()]


def test_one_thread_each_without_a_queue_is_sgd_in_bits() -> None:
    data = stream(3)
    found = ran(data, forward=1, backward=1, queue=0)
    assert found[:2] == sgd(data)
    assert not found[3].stale
    assert ran(data)[3].stale
    assert ran(data)[1] != found[1]


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.campaign)
                                             for seed in range(4, 204))])
def test_random_configurations_repeat_and_replay(seed: int) -> None:
    """With random costs and threads: two runs, one lane, and a replay of the log, which has the plan's staleness."""
    told, options, data = drawn_run(seed)
    first = ran(data, lambda graph: costs(graph, seed), **told, **options)
    again, lane = (ran(data, lambda graph: costs(graph, seed), one, **told, **options) for one in (False, True))
    assert first[:3] == again[:3] == lane[:3], seed
    assert replayed(data, first[2], **told) == first[:2], seed
    made = {(e.step, e.stage, unpack(e.key).micro_batch): e.version - 1 for e in first[2]
            if unpack(e.key).kind == Kind.U}
    logged: dict[int, list[int]] = {}
    for e in first[2]:
        if unpack(e.key).kind == Kind.F:
            logged.setdefault(e.stage, []).append(made[e.step, e.stage, unpack(e.key).micro_batch] - e.version)
    planned = staleness(first[3].graph)
    assert {unit: sorted(late) for unit, late in logged.items()} == {
        unit: sorted(late.tolist() * len(data)) for unit, late in planned.items()}, seed


def test_updates_of_whole_models_are_at_least_as_stale_in_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    _, graph = recorded(12)
    layers = staleness(ml.plan(graph, "pd_asgd").graph)
    monkeypatch.setattr("minidl.schedulers.batches._updated_at_once",
                        lambda graph, tasks: sorted(tasks, key=lambda t: graph.kind[t] == Kind.U))
    whole = staleness(ml.plan(graph, "pd_asgd").graph)
    assert all((layers[unit] <= whole[unit]).all() for unit in whole)
    assert sum(late.sum() for late in layers.values()) < sum(late.sum() for late in whole.values())


def test_a_plan_is_an_order_like_another_and_keeps_no_old_weights() -> None:
    plan = ran([])[3]
    assert Schedule.from_csv(plan.schedule.to_csv()).validate(plan.graph)
    assert len(plan.graph.storages) == len(recorded()[1].storages)
    assert {lane.name for lane in plan.schedule.lanes} == {"main", "backward0", "backward1"}


def test_a_log_of_another_run_is_refused() -> None:
    data = stream(1)
    log = ran(data)[2]
    other = [replace(e, version=e.version + 1) if unpack(e.key).kind == Kind.F else e for e in log]
    with pytest.raises(ValueError, match="no order gives the versions of the log"):
        replay([Replica(recorded()[1])], [tuple(data[0])], other, Counter())
    with pytest.raises(ValueError, match="line 2: no entry of a version log"):
        from_lines([as_lines(log)[0], '{"step": 1}'], "x.jsonl")


def test_what_has_no_order_of_batches_is_refused() -> None:
    model = models.mlp(*SIZES)
    opt = optim.SGD(model.parameters(), lr=0.05)

    def step(*parts: Any) -> None:
        for i in range(2):
            with micro_batch(i, i * BATCH, i, follows=i > 0):
                nn.cross_entropy(model(parts[2 * i]), parts[2 * i + 1]).backward()
        opt.step()

    with pytest.raises(Refused, match="each micro-batch needs an update of its own"):
        ml.plan(ml.record(step, *stream(1, 2)[0]), "pd_asgd")


def test_threads_without_a_batch_change_nothing() -> None:
    """However many they are."""
    graph = recorded()[1]
    few, many = (ml.plan(graph, "pd_asgd", forward=n, backward=n, queue=4) for n in (6, 10**20))
    assert few.graph.keys.tolist() == many.graph.keys.tolist()
    assert replace(few.schedule, notes={}).to_csv() == replace(many.schedule, notes={}).to_csv()


FLAGS = ("train", "--model", "mlp", "--model-arg", "preset=tiny", "--batch-size", "16", "--micro-batches", "4",
         "--steps", "3", "--costs", "analytic", "--scheduler", "pd_asgd")


def test_the_command_line_trains_logs_and_replays(capsys: Any, tmp_path: Any) -> None:
    log = str(tmp_path / "log.jsonl")
    code, record = run_json(capsys, *FLAGS, "--log-versions", log)
    assert code == 0
    assert run_json(capsys, *FLAGS, "--replay", log)[1]["params_sha256"] == record["params_sha256"]

    gpt = (*FLAGS, "--model", "gpt", "--optimizer", "sgd", "--model-arg", "layers=1")  # with tied weights
    log_of_gpt = str(tmp_path / "gpt.jsonl")
    record = run_json(capsys, *gpt, "--model-arg", "dropout=0", "--log-versions", log_of_gpt)[1]
    again = run_json(capsys, *gpt, "--model-arg", "dropout=0", "--replay", log_of_gpt)[1]
    assert again["params_sha256"] == record["params_sha256"]

    refused = partial(refusal, capsys, *FLAGS)
    assert "has 3 steps, and this is step 4" in refused("--replay", log, "--steps", "4")
    assert "no order gives the versions" in refused("--replay", log, "--micro-batches", "2")
    assert "at least one forward and one backward thread" in refused("--scheduler-arg", "backward=0")
    assert "forward is True; it must be a whole number" in refused("--scheduler-arg", "forward=True")
    assert "of a network without time steps and dropout" in refused(*gpt[len(FLAGS):])
    assert "share a value, such as Adam's powers" in refused("--optimizer", "adam")
    assert "without split, dither and lag" in refused("--dither", "1")
    assert "--log-versions has no effect here" in refused("--scheduler-arg", "backward=1", "--scheduler-arg", "queue=0",
                                                          "--log-versions", log)
    assert "it goes with an asynchronous scheduler" in refused("--scheduler", "in_order", "--replay", log)
