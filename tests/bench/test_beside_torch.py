"""Benchmarks beside torch: lanes on busy cores, wide tasks, memory for time."""

from __future__ import annotations

import os
import re
from pathlib import Path

import cores
import memory
import numpy as np
import pytest
import wide
from helpers import torch_or_skip

import minidl as ml
from minidl import models
from minidl.core.tasks import Kind
from minidl.passes.recompute import runs_again
from minidl.runtime.executors import runtime
from minidl.training.job import Job
from minidl.training.recorded import Recorded


# ---------------------------------------------------------------------------------------------------------------- cores
def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_cores_are_busy_only_while_lanes_are_timed():
    before = children()
    with pytest.raises(KeyError), cores.busy_cores():
        assert len(children() - before) == len(os.sched_getaffinity(0))
        raise KeyError
    assert children() == before


@pytest.mark.slow
def test_two_lanes_on_busy_cores_have_a_ratio_to_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cores, "CASES", {"small": (lambda: models.mlp(16, 32, 32, 10), (32, 16), 0)})
    monkeypatch.setattr(cores, "QUANTUM", 0.01)
    assert cores.under_load("small", 0.05)["two lanes / one lane"]["n"] >= 5


@pytest.mark.slow
def test_a_network_has_a_ratio_to_torch_for_each_number_of_threads():
    torch_or_skip()
    entry = cores.beside_torch(cores.BESIDE["GRU, 28 x 128, batch 64"](), 0.05)
    assert min(entry["one lane / one thread"]["n"], entry["two lanes / two threads"]["n"]) >= 5


# ----------------------------------------------------------------------------------------------------------- wide tasks
def test_chosen_widths_are_never_predicted_slower_than_whole_tasks_or_one_core(monkeypatch):
    monkeypatch.setattr(wide, "CORES", (2, 4))
    monkeypatch.setattr(wide, "CASES", {"small": (lambda: models.mlp(16, 32, 32, 10), (32, 16), 0)})
    gains = wide.scaling("small", 0.04)["speedup"]
    assert [*gains] == [*wide.SCALED]
    assert [*gains["whole tasks"]] == ["1", *map(str, wide.CORES)]
    for count, whole in gains["whole tasks"].items():
        assert gains["widths chosen"][count] >= whole >= 0.999


@pytest.mark.slow
def test_a_network_beside_torch_has_a_ratio():
    torch_or_skip()
    entry = wide.against_torch(wide.beside_torch()["lenet, batch 64"](), 0.02)
    assert entry["minidl / torch"]["n"] >= 5
    assert entry["predicted_ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg, batch 32", "unet, batch 8", "unet, batch 1",
                                  "mlp 1024-2048-2048-10, batch 256"])
def test_both_sides_of_a_network_beside_torch_say_the_same(name: str):
    torch_or_skip()
    graph, _, step, outputs = wide.beside_torch()[name]()
    mine, theirs = outputs()
    np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-3 * float(np.abs(theirs).max()))
    assert step() > 0
    assert len(graph) > 10


# --------------------------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize(("name", "arguments", "blocks"), [("gpt", {"preset": "tiny", "layers": 3}, 3),
                                                           ("resnet20", {}, 9)])
def test_of_each_block_only_the_output_is_kept(name, arguments, blocks):
    graph = Recorded(Job(model=name, model_args=arguments, batch_size=2)).graph
    pattern = memory.CASES[name][-1]
    layers = np.unique(graph.unit[graph.kind == Kind.F]).tolist()
    inside = [u for u in layers if re.search(pattern, graph.unit_names[u])]
    kept = memory.between_blocks(graph, pattern)
    assert len([u for u in kept if u in inside]) == blocks
    assert {*layers} - {*kept} < {*inside}
    assert runs_again(graph, {*layers} - {*kept})


def test_of_an_offloading_run_the_far_memory_does_not_count():
    graph = Recorded(Job(model="gpt", model_args={"preset": "tiny", "layers": 2}, batch_size=2)).graph
    plan = ml.plan(graph, "in_order", offload="activations")
    run = runtime(plan.program())
    assert memory.allocated(run) == plan.peak_bytes[0] < ml.plan(graph, "in_order").peak_bytes[0]
    run.close()


def test_checkpointed_blocks_of_torch_learn_what_the_others_do(monkeypatch):
    torch_or_skip()
    bench, case, *rest = memory.CASES["resnet20"]
    monkeypatch.setitem(memory.CASES, "resnet20", (bench, case._replace(batch=2), *rest))
    plain, again = memory.CASES["resnet20"][0].sides(case._replace(batch=2)), memory.checkpointed("resnet20")
    for _ in range(2):
        assert plain.step() == pytest.approx(again.step(), rel=1e-4)
