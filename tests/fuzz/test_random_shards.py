"""Random networks on data-parallel ranks, and on random pipelines whose replicas share out states, gradients and
parameters: the bits of one process, and as many bytes as planned on each rank.

    MINIDL_FUZZ_SEED=7000 MINIDL_FUZZ_CASES=300 python -m pytest tests/fuzz/test_random_shards.py -q -m campaign

runs 100 of each; fewer cases, as many fewer. A case takes half a second on ranks and a second on pipelines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from rank_runs import SHARE, WIDTH, alone, on_ranks

from minidl import nn, ops, schedulers
from minidl.core.placement import PipelineError, Refused
from minidl.core.schedule import ScheduleError
from minidl.plans.memory import MemoryLimitError
from minidl.runtime.comm.places import Share

FIRST = int(os.environ.get("MINIDL_FUZZ_SEED", "1000"))
CASES = int(os.environ.get("MINIDL_FUZZ_CASES", "300")) // 3
BLOCK = 10  #: cases of one test of the campaign
POLICIES = [name for name in schedulers.names("pipeline", exact=True)
            if not (policy := schedulers.find(name).staged).stale and not policy.sliced and not policy.reverses]


class Network(nn.Module):
    """Layers of random widths, some with a norm, dropout or a skip; the last one may have the weight of the first."""

    def __init__(self, tied: bool, norm: bool, drop: bool, widths: tuple[int, ...], skips: tuple[bool, ...],
                 sides: tuple[int, ...] = ()) -> None:
        sizes = [WIDTH, *([WIDTH, *widths[1:]] if tied else widths), WIDTH]
        sizes[-2] = WIDTH if tied else sizes[-2]
        self.layers = nn.ModuleList([nn.Linear(a, b, bias=b % 5 > 0)
                                     for a, b in zip(sizes[:-1], sizes[1:], strict=True)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(n) for n in sizes[1:-1]] if norm else [])
        self.drop, self.skips, self.sides = nn.Dropout(0.25) if drop else None, skips, sides
        if tied:
            self.layers[len(widths)].weight = self.layers[0].weight

    def forward(self, x: Any, past: None = None) -> Any:
        assert past is None, "its sequences are not cut into slices"
        kept: list[Any] = []
        for i, layer in enumerate(self.layers):
            before, x = x, ops.tanh(layer(x))
            side = self.sides[i] if i < len(self.sides) else ""
            if side == "statistic":
                ops.mean(x.detach())
            elif side == "loss":
                x = x + ops.mean(x * x) * 0.01
            elif side == "used later" and x.shape[1] == WIDTH:
                kept.append(x)
            elif side == "uses" and kept and x.shape[1] == WIDTH:
                x = x + kept[0] * 0.5
            if i < len(self.norms):
                x = self.norms[i](x.reshape(SHARE, 1, 1, -1)).reshape(SHARE, -1)
            if self.drop is not None and i < len(self.skips):
                x = self.drop(x)
            if i < len(self.skips) and self.skips[i] and before.shape == x.shape:
                x = x + before
        return x


def draw(seed: int) -> dict[str, Any]:
    """The settings of a run."""
    random = np.random.default_rng(seed)

    def some(*values: Any) -> Any:
        return values[int(random.integers(len(values)))]

    depth = int(random.integers(8, 13))
    widths = tuple(int(n) for n in random.choice([7, 12, 12, 13, 20], depth))
    name, level = some(*POLICIES), int(random.integers(1, 4))
    policy = schedulers.find(name).staged
    both = policy.groups > 1
    ranks, replicas = some((2, 2), (2, 2), (2, 3), (2 if both else 3, 2), (4, 2))
    stages = ranks * (1 if both else policy.chunks)
    keep = [some("none"), some(*range(stages)), "+".join(map(str, range(stages)))][int(random.integers(3))]
    prefetch, kept = f",prefetch={random.integers(4)}", f",keep={keep}"
    shard = f"{level}{some('', prefetch, prefetch) if level > 1 else ''}{some('', kept, kept) if level > 2 else ''}"
    saved = some(False, False, True, False if both else "torch")
    return {"scheduler": name, "groups": both, "shard": shard, "ranks": ranks,
            "replicas": replicas, "micro_batches": 2 * ranks, "saved": saved,
            "optimizer": some("sgd", "adam", "adamw"), "clip": some(None, 0.05), "scaled": some(False, True),
            "tied": some(False, False, True), "norm": some(False, True), "drop": some(False, True),
            "recompute": some("none", "all", "sqrt", (0, 3)),
            "offload": "none" if saved == "torch" else some("none", "none", "activations", "all"),
            "network": partial(Network, widths=widths, skips=tuple((random.random(depth) < 0.3).tolist()))} | beside(
                seed, depth)


def beside(seed: int, depth: int) -> dict[str, Any]:
    """For three of four seeds the side branches of a network, and for every second of them a limit for a search."""
    random = np.random.default_rng([seed, 2])
    if seed % 4 == 0:
        return {}
    sides = tuple(random.choice(["", "", "statistic", "loss", "used later", "uses"], depth).tolist())
    return {"sides": sides} | ({"limit": float(random.uniform(0.5, 1.0)), "recompute": "auto", "saved": False}
                               if seed % 2 else {"recompute": str(random.choice(["none", "all", "sqrt"]))})


def draw_ranks(seed: int) -> dict[str, Any]:
    """The settings of a run on ranks that are all alike."""
    random = np.random.default_rng([seed, 1])

    def some(*values: Any) -> Any:
        return values[int(random.integers(len(values)))]

    depth, level, name = int(random.integers(2, 9)), int(random.integers(4)), some("barrier", "buckets", "no_overlap")
    widths = tuple(int(n) for n in random.choice([7, 12, 12, 13, 20], depth))
    prefetch = some("", f",prefetch={random.integers(5)}") if level > 1 else ""
    keep = some("", ",keep=none") if level > 2 else ""
    return {"scheduler": name, "options": {"bucket_bytes": some(100, 700, 3000)} if name == "buckets" else {},
            "shard": f"{level}{prefetch}{keep}", "ranks": 1, "replicas": some(2, 2, 3, 4),
            "micro_batches": some(1, 2, 3), "saved": some(False, True), "optimizer": some("sgd", "adam", "adamw"),
            "clip": some(None, 0.05), "scaled": some(False, True), "tied": some(False, False, True),
            "norm": some(False, True), "drop": some(False, True), "recompute": some("none", "all", "sqrt"),
            "offload": some("none", "none", "activations", "states", "all"),
            "network": partial(Network, widths=widths, skips=tuple((random.random(depth) < 0.3).tolist()))} | beside(
                seed, depth)


def hold(seeds: Sequence[int], draw: Callable[[int], dict[str, Any]] = draw) -> None:
    """Fails with the seed of a run that differs. A policy may not plan these numbers, and some pairs are refused."""
    ran, refused = 0, []
    for seed in seeds:
        settings = draw(seed)
        settings["network"] = partial(settings["network"], sides=settings.get("sides", ()))
        try:
            found = on_ranks(settings)
        except (PipelineError, Refused, MemoryLimitError, ScheduleError) as error:
            if type(error) is ScheduleError and "the grid notation has no name for" not in str(error):
                raise
            refused.append(f"{seed}: {error}")
            continue
        assert found.tensors == alone(settings).tensors, f"seed {seed} has other bits: {settings}"
        ran += 1
    assert 2 * ran >= len(seeds), refused


def test_random_shards() -> None:
    hold([57])


def test_random_shards_of_ranks() -> None:
    """57: tied weights are summed late, in a bucket with a gradient whose norm comes after theirs."""
    hold([0, 57], draw_ranks)


@pytest.mark.slow
def test_a_wrong_share_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares that are sums and no means."""
    monkeypatch.setattr(Share, "_scaled", lambda share, array, ranks: [])
    with pytest.raises(AssertionError, match="seed 39 has other bits"):
        hold([39])


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(FIRST, FIRST + CASES, BLOCK))
def test_many_random_shards(first: int) -> None:
    hold(range(first, min(first + BLOCK, FIRST + CASES)))


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(FIRST, FIRST + CASES, BLOCK))
def test_many_random_shards_of_ranks(first: int) -> None:
    hold(range(first, min(first + BLOCK, FIRST + CASES)), draw_ranks)
