"""Attention without probabilities: its mathematics, where fusion takes it, and that every order of launches
gives the same bits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import run_kernel
from forms import blank, exact, on_cpu, reference
from helpers import bits, kernels

import minidl as ml
from minidl import nn, ops, optim
from minidl.autograd.tape import Tape, use
from minidl.core.graph import Launch, TaskGraph, View
from minidl.core.tasks import strides_of
from minidl.fusion import fused
from minidl.fusion.attention import supported
from minidl.kernels import cuda
from minidl.runtime.checking import random_schedule
from minidl.runtime.executors import GraphExecutor, SequentialExecutor, StreamExecutor

#: n, h, t, s, d, e
SIZES = [(1, 1, 1, 2, 8, 8), (2, 3, 5, 5, 4, 6), (2, 2, 7, 4, 3, 3), (1, 2, 4, 9, 5, 2), (1, 1, 33, 65, 16, 16),
         (2, 1, 150, 150, 4, 3), (1, 2, 150, 70, 3, 4), (1, 1, 70, 150, 4, 4)]  # the last of several blocks
HALVES = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  #: with the largest relative error of rounding


def arrays(sizes: tuple[int, ...], dtype: str = "float64") -> list[Any]:
    """q, k, v, dy."""
    n, h, t, s, d, e = sizes
    rng = np.random.default_rng(sizes)
    return [rng.standard_normal(shape).astype(dtype)
            for shape in ((n, h, t, d), (n, h, s, d), (n, h, s, e), (n, h, t, e))]


def cpu(name: str, reads: list[Any], **constants: Any) -> Any:
    """What the CPU form writes."""
    return on_cpu(name, reads, blank(reference(name, reads, **constants)), **constants)


# ---------------------------------------------------------------------------------------------------------- mathematics
@pytest.mark.few(4)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_attention(sizes, causal):
    """The output and the gradients of the kernels that keep probabilities; lse is what makes these from scores."""
    q, k, v, dy = arrays(sizes)
    constants = {"scale": 0.3, "causal": causal}
    y, p = reference("attention", [q, k, v], **constants)
    wanted = reference("attention_grad", [q, k, v, p, dy], scale=0.3)
    for made in (reference, cpu):
        found, lse = made("flash_attention", [q, k, v], **constants)
        np.testing.assert_allclose(found, y, rtol=1e-12, atol=1e-13)
        seen = p > 0
        np.testing.assert_allclose(np.exp(0.3 * q @ k.swapaxes(-1, -2) - lse[..., None])[seen], p[seen], rtol=1e-12)
        for g, w in zip(made("flash_attention_grad", [q, k, v, y, lse, dy], **constants), wanted, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-11, atol=1e-12)


def test_scores_may_be_large():
    q, k, v, dy = (a * 100 for a in arrays((1, 1, 4, 6, 8, 8), "float32"))
    constants = {"scale": 1.0, "causal": True}
    y, lse = cpu("flash_attention", [q, k, v], **constants)
    wide = exact("flash_attention", [q, k, v], **constants)
    np.testing.assert_allclose(y, wide[0], rtol=1e-2)
    np.testing.assert_allclose(lse, wide[1], rtol=1e-5)
    assert all(np.isfinite(g).all() for g in cpu("flash_attention_grad", [q, k, v, y, lse, dy], **constants))


@pytest.mark.parametrize("dtype", HALVES)
def test_what_cuda_does_is_one_call(dtype):
    q, k, v, dy = arrays((2, 3, 5, 7, 8, 16), dtype)
    constants = {"scale": 0.25, "causal": True}
    y, lse = np.zeros_like(dy), np.zeros(dy.shape[:3], np.float32)
    forward = run_kernel("flash_attention", [q, k, v], [y, lse], **constants)
    grads = [np.zeros_like(a) for a in (q, k, v)]
    backward = run_kernel("flash_attention_grad", [q, k, v, y, lse, dy], grads, **constants)
    assert [[(type(c), c.what) for c in calls] for calls in (forward, backward)] == [
        [(cuda.Attention, "forward")], [(cuda.Attention, "grad")]]
    wanted, p = exact("attention", [q, k, v], **constants)
    wanted = [wanted, *exact("attention_grad", [q, k, v, p, dy], scale=0.25)]
    for found, w in zip([y, *grads], wanted, strict=True):
        assert np.linalg.norm(found.astype(float) - w) <= 2 * HALVES[dtype] * np.linalg.norm(w)


# --------------------------------------------------------------------------------------------------------------- fusion
def launch(dtype: str = "bfloat16", sizes: tuple[int, ...] = (2, 4, 16, 16, 32, 32), scale: float = 0.1,
           mask: bool = False) -> Launch:
    n, h, t, s, d, e = sizes

    def view(*shape: int, kind: str = dtype) -> View:
        return View(0, shape, strides_of(shape), 0, kind)

    reads = (view(n, h, t, d), view(n, h, s, d), view(n, h, s, e), *([view(n, s, kind="int64")] if mask else []))
    return Launch("attention", reads, (view(n, h, t, e), view(n, h, t, s)), (), (("scale", scale), ("causal", False)))


def test_which_launches_are_supported():
    whole = launch()
    q, *others = whole.reads
    assert supported(whole)
    assert supported(launch("float16", (2, 4, 16, 1, 128, 8)))
    assert supported(replace(whole, reads=(replace(q, strides=(3 * 16 * 4 * 32, 32, 3 * 4 * 32, 1), offset=4 * 32),
                                       *others))), "a cut of a projection"
    assert not supported(launch(mask=True))
    assert not supported(replace(whole, constants=(("scale", 0.1), ("causal", True), ("offset", 2))))
    for dtype in ("float32", "float64"):
        assert not supported(launch(dtype))
    for sizes in ((2, 4, 16, 16, 12, 32), (2, 4, 16, 16, 32, 4), (2, 4, 16, 16, 136, 32), (2, 4, 16, 16, 32, 256),
                  (2, 4, 1, 1, 32, 32), (0, 4, 16, 16, 32, 32), (2, 4, 0, 16, 32, 32), (2, 4, 16, 0, 32, 32),
                  (2, 4, 16, 16, 32, 0), (2, 4, 16, 16, 0, 32)):
        assert not supported(launch(sizes=sizes)), sizes
    for scale in (0.0, -0.1):
        assert not supported(launch(scale=scale))
    for change in ({"strides": (2048, 512, 1, 16)}, {"strides": (2048, 0, 32, 1)},
                   {"strides": (2112, 528, 33, 1)}, {"offset": 4}):
        assert not supported(replace(whole, reads=(replace(q, **change), *others))), change


class Sentences(nn.Module):
    """Embedding, and attention with a residual; `heads` of 8 elements."""

    def __init__(self, causal: bool, heads: int) -> None:
        self.embedding, self.attention = (nn.Embedding(11, 8 * heads),
                                          nn.MultiheadAttention(8 * heads, heads, causal=causal))
        self.last = nn.Linear(8 * heads, 3)

    def forward(self, tokens: Any, mask: Any = None) -> Any:
        x = self.embedding(tokens)
        return self.last(x + self.attention(x, None, mask))


class Job:
    """A step of it in 16 bits, in two micro-batches."""

    def __init__(self, low: str, device: Any, *, rules: Any = (), masked: bool = False, causal: bool = True,
                 heads: int = 2) -> None:
        self.device, rng = device, np.random.default_rng(0)
        with use(Tape(self.device)):
            ml.seed(3)
            self.model = Sentences(causal, heads)
            self.optimizer = optim.SGD(self.model.parameters(), 0.5, momentum=0.9)
            self.batch = rng.integers(0, 11, (4, 6)), rng.integers(0, 3, (4, 6))
            mask = ml.array(np.ones((2, 6), np.int64)) if masked else None

            def step(x: Any, y: Any) -> Any:
                for part in range(2):
                    with ml.micro_batch(part):
                        rows = slice(2 * part, 2 * part + 2)
                        logits = self.model(x[rows], mask)
                        loss = nn.cross_entropy(ops.reshape(logits, (12, 3)), ops.reshape(y[rows], (12,)))
                        loss.backward()
                self.optimizer.step()
                return loss

            with ml.autocast(low):
                self.plain = ml.record(step, *self.batch)
        self.graph = fused(self.plain, self.device, rules)

    def run(self, executor: Any, steps: int = 3) -> list[Any]:
        losses = [np.asarray(executor(*self.batch)) for _ in range(steps)]
        return [*losses, *(p.numpy() for p in self.model.parameters())]


@pytest.mark.wide
@pytest.mark.parametrize(("low", "causal"), [("bfloat16", False), ("float16", True)])
def test_all_orders_have_the_same_bits_and_train_as_before(device, low, causal):
    plain = Job(low, device(0), causal=causal)
    wanted = plain.run(SequentialExecutor(plain.plain, plain.device))
    found = []
    for seed, kind in enumerate((SequentialExecutor, StreamExecutor, StreamExecutor, GraphExecutor, GraphExecutor), 1):
        job = Job(low, device(seed), rules=["flash_attention"], causal=causal)
        count, before = kernels(job.graph), kernels(job.plain)
        assert (count["flash_attention"], count["flash_attention_grad"], count["attention"],
                count["attention_grad"]) == (2, 2, 0, 0)
        assert before["attention"] == 2
        schedule = () if kind is SequentialExecutor else (random_schedule(job.graph, 3, np.random.default_rng(seed)),)
        found.append(job.run(kind(job.graph, *schedule, device=job.device)))
    assert len({bits(*arrays) for arrays in found}) == 1
    for a, b in zip(found[0], wanted, strict=True):
        assert np.linalg.norm(a.astype(float) - b.astype(float)) <= 4 * HALVES[low] * np.linalg.norm(b.astype(float))


def test_probabilities_are_no_longer_in_memory(device):
    job = Job("float16", device(), rules=["flash_attention"])
    scores = (2, 2, 6, 6)

    def shapes(graph: TaskGraph) -> set[Any]:
        buffers = {b for table in (graph.reads, graph.writes) for t in range(len(graph)) for b in table[t].tolist()}
        return {graph.storages[graph.buffer_storage[b]].shape for b in buffers}

    assert scores in shapes(job.plain)
    assert scores not in shapes(job.graph)
    assert scores[:3] in shapes(job.graph)


def test_what_flash_kernels_do_not_take_stays(device):
    masked = Job("float16", device(), rules=["flash_attention"], masked=True)
    assert kernels(masked.graph) == kernels(masked.plain)
    there = device()
    with use(Tape(there)):
        single = ml.record(lambda x: ops.attention(x, x, x), np.zeros((2, 2, 6, 8), np.float32))
    assert kernels(fused(single, there, ["flash_attention"])) == kernels(single)


def of_values(device: Any, step: Any) -> Counter[str]:
    """The kernels that a step on one float16 array leaves after the rule."""
    with use(Tape(device)), ml.autocast("float16"):
        graph = ml.record(step, np.zeros((2, 2, 6, 8), np.float32))
    return kernels(fused(graph, device, ["flash_attention"]))


def test_a_gradient_that_lies_otherwise_keeps_the_probabilities(device):
    """Rows that do not lie together: forward and backward go the same way. A parameter's gradient is a
    task of its own."""
    def step(x: Any, axes: tuple[int, ...]) -> Any:
        p = ml.Parameter(np.ones((2, 2, 6, 8), np.float32))
        h = ops.tanh(x + p)
        y = ops.transpose(ops.attention(p, h, h), axes)
        (y * y).sum().backward()
        return p.grad

    there = device()
    found = of_values(there, lambda x: step(x, (0, 2, 1, 3)))
    assert (found["flash_attention_grad"], found["attention_grad"]) == (2, 0)
    found = of_values(there, lambda x: step(x, (0, 1, 3, 2)))
    assert (found["flash_attention"], found["attention_grad"]) == (0, 2)


def test_without_a_gradient_the_forward_pass_is_taken_alone(device):
    with ml.no_grad():
        found = of_values(device(), lambda x: ops.attention(x, x, x))
    assert found["flash_attention"] == 1
    assert found["attention"] == 0


def test_devices_without_flash_kernels_keep_the_others(device, monkeypatch):
    there = device()
    monkeypatch.setattr(there.driver, "architecture", 75)
    assert of_values(there, lambda x: ops.attention(x, x, x))["attention"] == 1
