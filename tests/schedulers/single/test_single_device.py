"""Every arm of one device, on small forms of both networks: the parameters of sequential training, bit for bit."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import pytest
from helpers import classified, late_schedule

import minidl as ml
from minidl import models, optim, schedulers
from minidl.measuring.pairs import measure_pairs
from minidl.passes.boundary import late_tasks
from minidl.runtime.checking import random_schedule
from minidl.runtime.executors import executor
from minidl.schedulers.movable import Step

MAPS = {"densenet121": "densenet121", "mobilenet_v3_large": "mobilenet_v3"}
NAMES = list(MAPS)
STEPS = (20, 80)
ARMS = ("published", "in_order", "multi_stream", "border kept", "multi_region", "late", "random")


def training(name: str, max_norm: float | None = None) -> tuple[Any, Any, Any, list[Any]]:
    ml.seed(1)
    model = models.create(name, preset="tiny")
    opt = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, max_norm=max_norm)

    rng = np.random.default_rng(2)
    batches = [(rng.standard_normal((4, *model.input_shape), np.float32), rng.integers(0, 10, 4))
               for _ in range(max(STEPS))]
    return model, opt, ml.record(classified(model, opt), *batches[0]), batches


def trained(name: str, run_of: Any, steps: int = max(STEPS)) -> list[bytes]:
    """Parameters after 20 and 80 steps; the learning rate changes at every one."""
    model, opt, graph, batches = training(name)
    run, found = run_of(graph), []
    for i, batch in enumerate(batches[:steps]):
        opt.lr = 0.05 / (1 + i / 10)
        run(*batch)
        if i + 1 in STEPS:
            found.append(b"".join(p.numpy().tobytes() for p in model.parameters()))
    if hasattr(run, "close"):
        run.close()
    return found


@functools.cache
def sequential(name: str) -> list[bytes]:
    return trained(name, ml.SequentialExecutor)


def everything_late(graph: Any) -> Any:
    """All that can cross the border crosses it."""
    step = Step.of(graph, ml.CostModel.analytic())
    return step.schedule({i: step.place("sub", step.bounds({}, i, True)[1]) for i in range(len(step.items))})


def run_of(arm: str, name: str) -> Any:
    cost = ml.CostModel.analytic()
    if arm == "random":
        rng = np.random.default_rng(5)

        def steady_random(graph: Any) -> Any:
            late = late_tasks(graph, everything_late(graph))
            return ml.StreamExecutor(graph, late_schedule(graph, late, lambda g: random_schedule(g, 2, rng)))

        return steady_random
    schedule = {"in_order": schedulers.in_order, "multi_stream": schedulers.multi_stream, "late": everything_late,
                "published": lambda g: schedulers.multi_stream(g, map=MAPS[name]),
                "border kept": lambda g: schedulers.multi_region(g, cost, crossing=False),
                "multi_region": lambda g: schedulers.multi_region(g, cost)}[arm]
    return lambda graph: executor(graph, schedule(graph))


@pytest.mark.few(1)
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", NAMES)
def test_20_and_80_steps_leave_the_bits_of_sequential_training(name: str, arm: str) -> None:
    """80 by the published map."""
    found = trained(name, run_of(arm, name), STEPS[arm == "published"])
    assert found == sequential(name)[: len(found)]


def test_the_map_of_densenet() -> None:
    _, _, graph, _ = training("densenet121")
    schedule = schedulers.multi_stream(graph, map="densenet121")
    late = late_tasks(graph, schedule)
    assert ml.plan(graph, "multi_stream", map="densenet121").notes["streams"] == len(schedule.lanes) == 2
    assert {graph.unit_names[graph.unit[t]].split("/")[2] for t in late} == {"denseblock4"}
    main, sub = (schedule.names(lane) for lane in range(2))
    assert not any("@" in n for n in main)
    weights = [int(n.split("W")[0]) for n in sub if "W0@1" in n]
    assert weights == sorted(weights, reverse=True)
    assert len(weights) == 2 * 2
    assert [n for n in sub if "@1" in n] == sub[: len(late)]


def test_the_map_of_mobilenet() -> None:
    _, _, graph, _ = training("mobilenet_v3_large")
    schedule = schedulers.multi_stream(graph, map="mobilenet_v3")
    assert not len(late_tasks(graph, schedule))
    layers = [t.unit for t in graph if t.kind.name == "F" and ("conv2d" in t.label or "linear" in t.label)
              and "/fc" not in t.label]
    main, sub = (schedule.names(lane) for lane in range(2))
    assert len(layers) == 48
    assert f"{layers[1]}W0" in main
    assert all(f"{u}W0" in sub for i, u in enumerate(layers) if i != 1)
    assert sub.index(f"{layers[3]}W0") < sub.index(f"{layers[7]}W0") < sub.index(f"{layers[0]}W0")


@pytest.mark.parametrize(("name", "network"), [("densenet121", "mobilenet_v3_large"), ("mobilenet_v3", "densenet121"),
                                               ("vgg", "densenet121")])
def test_a_map_is_for_its_network(name: str, network: str) -> None:
    with pytest.raises(ValueError, match="map"):
        schedulers.multi_stream(training(network)[2], map=name)


def test_clipping_by_global_norm_keeps_the_border_and_says_so() -> None:
    _, _, graph, _ = training("mobilenet_v3_large", max_norm=1.0)
    cost = ml.CostModel.analytic()
    found = ml.plan(graph, "multi_region", cost)
    assert not len(late_tasks(graph, found.schedule))
    assert any("clipping by global norm" in note for note in found.remarks)


def test_pairs_are_measured_on_copies_and_kept_in_the_file_of_costs(tmp_path: Any) -> None:
    model, _, graph, _ = training("densenet121")
    before = [p.numpy().copy() for p in model.parameters()]
    cost = ml.measure(graph, seconds=0.1)
    groups, pairs = schedulers.profile_groups(graph, cost)
    assert set(groups) == {graph.name(t) for t in range(len(graph))}
    cores = os.sched_getaffinity(0)
    corun = measure_pairs(graph, cost, groups, pairs[:4], rounds=1)
    assert os.sched_getaffinity(0) == cores
    assert all(np.array_equal(p.numpy(), b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(corun.slowdown[a][b] >= 1 and corun.slowdown[b][a] >= 1 for a, b in pairs[:4])
    kept = ml.CostModel(**{**vars(cost), "corun": corun})
    kept.save(tmp_path / "costs.json")
    again = ml.CostModel.load(tmp_path / "costs.json")
    assert again == kept
    assert schedulers.multi_region(graph, again).to_csv() == schedulers.multi_region(graph, kept).to_csv()
