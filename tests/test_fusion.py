"""Launches put together: the same mathematics with fewer of them, under every schedule; on the CPU with the same bits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import cuda_runtime
import numpy as np
import pytest
from helpers import bits

import minidl as ml
from minidl import models, nn, optim
from minidl.executors import CheckingExecutor, GraphExecutor, SequentialExecutor, StreamExecutor
from minidl.executors.checking import random_schedule
from minidl.fusion import RULES, fused
from minidl.graph import TaskGraph
from minidl.tape import Tape, current, use

TINY = {"resnet20": {"preset": "tiny"}, "resnet50": {"preset": "tiny"}, "densenet121": {"preset": "tiny"}, "mobilenet_v3_large": {"preset": "tiny"},
        "mlp": {"hidden": 24}, "lenet": {}}
RNG = np.random.default_rng(0)


class Job:
    """A network with an optimizer, and two batches."""

    def __init__(self, name: str, optimizer: Any = lambda p: optim.SGD(p, 0.05, momentum=0.9), batch: int = 4, device: Any = None) -> None:
        self.device = device or ml.device.cpu()
        with use(Tape(self.device)):
            ml.seed(3)
            self.model = models.create(name, **TINY[name])
            self.optimizer = optimizer(self.model.parameters())
            rng = np.random.default_rng(1)
            self.batches = [(rng.standard_normal((batch, *self.model.input_shape)).astype(np.float32), rng.integers(0, self.model.classes, batch))
                            for _ in range(2)]
            self.graph = ml.record(self.step, *self.batches[0])

    def step(self, x: Any, y: Any) -> Any:
        loss = nn.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def run(self, executor: Any) -> tuple[list[float], list[Any]]:
        losses = [float(executor(*batch)) for batch in self.batches]
        return losses, [t.numpy() for _, t in self.model.named_tensors()]


def kernels(graph: TaskGraph) -> Counter[str]:
    return Counter(launch.kernel for task in graph.launches for launch in task)


@pytest.mark.parametrize("rule", [*RULES, "all"])
@pytest.mark.parametrize("name", TINY)
def test_on_the_cpu_the_bits_are_the_same(name, rule):
    plain, job = Job(name), Job(name)
    wanted = plain.run(SequentialExecutor(plain.graph))
    graph = fused(job.graph, job.device, RULES if rule == "all" else [rule])
    found = job.run(StreamExecutor(graph, random_schedule(graph, 2, np.random.default_rng(5))))
    assert found[0] == wanted[0]
    assert bits(*found[1]) == bits(*wanted[1])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["resnet20", "densenet121", "mobilenet_v3_large"])
def test_any_legal_order_reads_what_it_means(name, seed):
    job = Job(name)
    graph = fused(job.graph, job.device)
    for _ in range(2):
        CheckingExecutor(graph, random_schedule(graph, 3, np.random.default_rng(seed)), seed=seed)(*job.batches[0])


@pytest.mark.parametrize("name", ["resnet20", "densenet121", "mlp"])
def test_on_cuda_all_schedules_have_the_same_bits_and_the_mathematics_is_that_of_the_parts(name):
    plain = Job(name, batch=2, device=cuda_runtime.device(0))
    wanted = plain.run(SequentialExecutor(plain.graph, plain.device))
    found = []
    for seed, kind in enumerate((StreamExecutor, GraphExecutor)):
        job = Job(name, batch=2, device=cuda_runtime.device(seed))
        graph = fused(job.graph, job.device)
        found.append(job.run(kind(graph, random_schedule(graph, 3, np.random.default_rng(seed)), device=job.device)))
    assert found[0][0] == found[1][0]
    assert bits(*found[0][1]) == bits(*found[1][1])
    np.testing.assert_allclose(found[0][0], wanted[0], rtol=1e-4)
    for a, b in zip(found[0][1], wanted[1], strict=True):
        assert np.linalg.norm(a - b) <= 1e-3 * max(np.linalg.norm(b), 1e-3)


def test_what_is_left():
    count = {name: (kernels(Job(name).graph), kernels(fused(Job(name).graph, ml.device.cpu()))) for name in TINY}
    before, after = count["resnet20"]
    assert after["relu"] == after["relu_grad"] == after["sgd"] == 0
    assert after["sgd_many"] == 1
    assert after["batch_norm_act"] + after["batch_norm"] == before["batch_norm"]
    before, after = count["densenet121"]
    assert after["batch_norm"] == after["relu"] == after["relu_grad"] == 0
    before, after = count["mlp"]
    assert after["relu"] == 0
    assert after["relu_grad"] == before["relu"]
    before, after = count["mobilenet_v3_large"]
    assert after["hardswish"] <= 1
    assert after["batch_norm_act"] > 2 * after["batch_norm"]


def test_slabs_take_the_copies_away_where_convolutions_take_gaps():
    there = cuda_runtime.device()
    job = Job("densenet121", batch=2, device=there)
    before, after = kernels(job.graph), kernels(fused(job.graph, there, ["slabs"]))
    assert before["copy"] - after["copy"] == 2 * 4  # of the second layer of each block; the first concat copies two things


def test_adam_with_clipping():
    def adam(p: Any) -> Any:
        return optim.AdamW(p, 0.01, max_norm=0.1)

    plain, job = Job("lenet", adam), Job("lenet", adam)
    wanted = plain.run(SequentialExecutor(plain.graph))
    graph = fused(job.graph, job.device, ["updates"])
    assert kernels(graph)["adam_many"] == 1
    assert job.run(SequentialExecutor(graph))[0] == wanted[0]
    assert bits(*[p.numpy() for p in job.model.parameters()]) == bits(*[p.numpy() for p in plain.model.parameters()])


def test_a_value_that_somebody_else_needs_stays():
    """The batch norm's output is returned, so it cannot vanish into the activation."""
    ml.seed(0)
    norm = nn.BatchNorm1d(3)

    def step(x: Any) -> Any:
        y = norm(x)
        return y, ml.ops.relu(y)

    graph = ml.record(step, np.zeros((4, 3), np.float32))
    assert kernels(fused(graph, current().device)) == kernels(graph)


def test_an_unknown_rule():
    with pytest.raises(ValueError, match="unknown fusion 'everything'; known: batch_norm_act, epilogue, slabs, updates"):
        fused(Job("mlp").graph, ml.device.cpu(), ["everything"])
