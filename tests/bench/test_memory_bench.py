"""The benchmark of memory for time: the layers that it keeps, and that its checkpointed twin learns the same."""

import re

import memory
import numpy as np
import pytest
from helpers import torch_or_skip

import minidl as ml
from minidl.core.tasks import Kind
from minidl.passes.recompute import runs_again
from minidl.runtime.executors import runtime
from minidl.training.job import Job
from minidl.training.recorded import Recorded


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
