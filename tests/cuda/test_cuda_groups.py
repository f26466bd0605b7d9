"""Weight gradients that wait for company, on CUDA's forms: fewer nodes, and the bits of single launches."""

from __future__ import annotations

from typing import Any

import cuda_runtime
import numpy as np
import pytest
from cuda_on_cpu import run_kernel
from helpers import classified

import minidl as ml
from minidl import models, nn, optim
from minidl.autograd.tape import Tape, use
from minidl.core.tasks import Kind
from minidl.fusion import fused
from minidl.kernels.conv import Geometry
from minidl.passes.draft import Draft
from minidl.passes.group import grouped
from minidl.runtime.bound import Bound
from minidl.runtime.executors import GraphExecutor

ONE, NONE = (1, 1), (0, 0)


def launch(rng: Any, dtype: str) -> tuple[str, list[Any], list[Any], dict[str, Any]]:
    """A weight gradient at random: kernel, arrays that it reads and writes, constants."""
    bias = bool(rng.integers(2))
    n, side, i, o = (int(v) for v in rng.integers((1, 1, 1, 1), (14, 8, 40, 40)))
    kind = str(rng.choice(["linear", "pointwise", "depthwise"]))
    if kind == "linear":
        reads, shape, constants = [(n, i), (n, o)], (o, i), {}
    elif kind == "pointwise":
        reads, shape = [(n, side, side, i), (n, side, side, o)], (o, 1, 1, i)
        constants = {"taps": ONE, "geometry": Geometry(ONE, NONE, ONE, 1)}
    else:
        taps, stride = int(rng.choice([3, 5])), int(rng.integers(1, 3))
        geometry = Geometry((stride, stride), (taps // 2, taps // 2), ONE, i + 1)
        reads = [(n, side, side, i + 1), (n, *geometry.output((side, side), (taps, taps)), i + 1)]
        shape, constants = (i + 1, taps, taps, 1), {"taps": (taps, taps), "geometry": geometry}
    arrays = [rng.standard_normal(s).astype(dtype) for s in reads]
    writes = [np.full(shape, np.nan, dtype), *([np.full(shape[:1], np.nan, dtype)] if bias else [])]
    return f"{'linear' if kind == 'linear' else 'conv2d'}_weight_grad", arrays, writes, {"bias": bias, **constants}


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("seed", range(4))
def test_a_group_has_the_bits_of_single_launches(seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    alone = [launch(rng, dtype) for _ in range(int(rng.integers(2, 50)))]
    single = [call for kernel, reads, writes, constants in alone
              for call in run_kernel(kernel, reads, writes, seed, constants)]
    of = tuple((kernel, len(reads), len(writes), (*constants.items(),)) for kernel, reads, writes, constants in alone)
    reads, writes = ([a for one in alone for a in one[i]] for i in (1, 2))
    joined = [np.full_like(a, np.nan) for a in writes]
    calls = run_kernel("group", reads, joined, seed, of=of)
    assert [a.tobytes() for a in joined] == [a.tobytes() for a in writes]
    assert len(calls) < len(single)


class Blocks(nn.Module):
    """Inverted bottlenecks, small enough for the stand-in: pointwise, depthwise and linear layers."""

    input_shape = (4, 4, 4)

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Conv2d(4, 8, 1) for _ in range(3))
        self.each = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False) for _ in range(3))
        self.thin = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in range(3))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        for wide, each, thin in zip(self.wide, self.each, self.thin, strict=True):
            x = x + thin(nn.relu(each(nn.relu(wide(x)))))
        return self.last(x.mean((1, 2)))


def left(policy: str, seed: int, **options: Any) -> list[bytes]:
    """What two captured steps leave on a device that reorders all it may."""
    device, rng = cuda_runtime.device(seed), np.random.default_rng(0)
    x, y = rng.standard_normal((4, 4, 4, 4)).astype("f"), rng.integers(0, 3, 4)
    with use(Tape(device)):
        ml.seed(1)
        model = Blocks()
        step = classified(model, optim.SGD(model.parameters(), 0.1, momentum=0.9))
        graph = fused(ml.record(step, x, y), device, ("epilogue", "slabs"))
        plan = ml.plan(graph, policy, **options)
        run = GraphExecutor(plan.graph, plan.schedule)
        losses = [run(x, y).numpy() for _ in range(2)]
        return [a.tobytes() for a in (*losses, *(p.numpy() for p in model.parameters()))]


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["in_order", "multi_stream", "multi_region"])
@pytest.mark.parametrize("size", [2, 3, 99])
def test_a_captured_step_with_groups_has_the_bits_of_one_without(policy: str, size: int) -> None:
    assert left(policy, size, group_weights=size) == left("in_order", 0)


def test_mobilenet_has_at_most_twelve_nodes_of_free_weight_gradients() -> None:
    """MobileNetV3 a0.25 at 32 pixels, as it is captured with fusion; those that no output gradient waits for."""
    device = cuda_runtime.device()
    with use(Tape(device)):
        model = models.create("mobilenet_v3_large", width=0.25, image_size=32)
        step = classified(model, optim.SGD(model.parameters(), 0.1, momentum=0.9))
        graph = fused(ml.record(step, np.zeros((32, 32, 32, 3), "f"), np.zeros(32, np.int64)), device)

    def nodes(graph: Any) -> int:
        bound = Bound(graph, None, device)
        return sum(len(bound.thunks(t)) for t in np.flatnonzero(graph.kind == Kind.W).tolist()
                   if (graph.kind[graph.succs[t]] == Kind.U).all())

    assert nodes(graph) > 80
    assert nodes(grouped(Draft.of(graph), 16).graph) <= 12
