"""Batch size against steps to a target, and what it means for the number of ranks (Lee, Lee, Kim, Kim, Oh, 2003.11316).

    python bench/batch_size.py [--draws 12] [--seeds 3] [--out FILE.json]

For every batch size B and sparsity, runs with drawn learning rates and momenta train a network of one hidden layer on
the embedded digits; K(B) is the least number of steps after which one of them errs on at most 5 % of the test digits,
the mean over seeds. All batch sizes have the same draws. Sparse networks are pruned before training: gradients of masks
are summed over an epoch, and the largest magnitudes of the whole network stay. Time to target is K(B) times the step
that the simulator predicts for B over a number of ranks under a policy; steps follow from `COST` and `LINK`, not from
a machine, and K from bits, so a busy machine gives the same record.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import machine, save

import minidl as ml
from minidl import nn, ops, optim
from minidl.cli import show
from minidl.data import builtin

SIZES, GOAL, EVERY, MOST = (64, 32, 10), 0.05, 5, 400  #: error at most GOAL, looked at every EVERY of MOST steps
BATCHES, SPARSITIES = tuple(2**k for k in range(2, 11)), (0.0, 0.7)
RANKS, POLICIES = (1, 2, 4, 8, 16, 32, 64), ("no_overlap", "barrier", "priority")
COST = ml.CostModel.analytic(flops_per_us=2000.0, launch=0.2)  #: a slow core: computation and sums take about as long
LINK = (10.0, 1e-3)  #: microseconds of a sum over ranks, and per byte


def sobol(count: int) -> np.ndarray:
    """The points after the first two of Sobol's sequence in two dimensions, (count, 2), in (0, 1)."""
    directions = [[1 << (31 - k) for k in range(32)], [1 << 31]]  # of the polynomial x + 1: m_k = 2 m_(k-1) ^ m_(k-1)
    for _ in range(31):
        directions[1].append(directions[1][-1] ^ directions[1][-1] >> 1)
    point, found = [0, 0], []
    for i in range(count + 1):
        found.append(list(point))
        bit = (~i & (i + 1)).bit_length() - 1  # the lowest zero of i, in the order of Gray's code
        point = [p ^ d[bit] for p, d in zip(point, directions, strict=True)]
    return np.array([*found[2:], point]) / 2**32


def rates(count: int) -> list[tuple[float, float]]:
    """Drawn pairs (learning rate, momentum): log-uniform in .01 to 3, and 1 - momentum in .05 to 1."""
    return [(float(0.01 * 300 ** a), float(1 - 0.05 * 20 ** b)) for a, b in sobol(count)]


class Masked(nn.Module):
    """Linear layers with ReLU between whose weights and biases are products with masks."""

    def __init__(self) -> None:
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in zip(SIZES[:-1], SIZES[1:], strict=True)])

    def forward(self, x: Any, *masks: Any) -> Any:
        for i, layer in enumerate(self.layers):
            x = ops.relu(x) if i else x
            x = ops.matmul(x, ops.transpose(ops.mul(layer.weight, masks[2 * i])))
            x = ops.add(x, ops.mul(layer.bias, masks[2 * i + 1]))
        return x


def arrays(split: str) -> tuple[np.ndarray, np.ndarray]:
    images, labels = builtin.raw_digits()
    rows = builtin.fifth(len(images), split)
    return (images[rows].reshape(-1, 64) / 16).astype(np.float32), labels[rows]


def output(weights: list[np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The hidden layer and the logits."""
    hidden = np.maximum(x @ weights[0].T + weights[1], 0)
    return hidden, hidden @ weights[2].T + weights[3]


def masks(weights: list[np.ndarray], x: np.ndarray, y: np.ndarray, sparsity: float) -> list[np.ndarray]:
    """1 for the share 1 - sparsity of all weights whose mask has the largest gradient, summed over batches of 100."""
    total = [np.zeros_like(w) for w in weights]
    for begin in range(0, len(x), 100):
        part, labels = x[begin : begin + 100], y[begin : begin + 100]
        hidden, z = output(weights, part)
        p = np.exp(z - z.max(1, keepdims=True))
        g = (p / p.sum(1, keepdims=True) - np.eye(SIZES[-1])[labels]) / len(part)
        inner = (g @ weights[2]) * (hidden > 0)
        for sums, w, grad in zip(total, weights, (inner.T @ part, inner.sum(0), g.T @ hidden, g.sum(0)), strict=True):
            sums += (w * grad).astype(np.float32)
    size = np.concatenate([np.abs(s).ravel() for s in total])
    kept = np.zeros(len(size), np.float32)
    kept[np.argsort(-size, kind="stable")[: round(len(size) * (1 - sparsity))]] = 1
    ends = np.cumsum([s.size for s in total])
    return [part.reshape(s.shape) for part, s in zip(np.split(kept, ends[:-1]), total, strict=True)]


def recorded(batch: int, momentum: float, seed: int = 0) -> tuple[Any, Any, Any]:
    """Model, optimizer, and the graph of a step on a batch and masks."""
    ml.seed(seed)
    model = Masked()
    opt = optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    def step(x: Any, y: Any, *kept: Any) -> Any:
        loss = nn.cross_entropy(model(x, *kept), y)
        loss.backward()
        opt.step()
        return loss

    ones = [np.ones(p.shape, np.float32) for p in model.parameters()]
    return model, opt, ml.record(step, np.zeros((batch, SIZES[0]), np.float32), np.zeros(batch, np.int64), *ones)


def steps_to_goal(batch: int, sparsity: float, draws: list[tuple[float, float]], seed: int) -> int | None:
    """The least steps of the draws to the goal; None if no run gets there. A run ends where another one was faster."""
    (x, y), (tx, ty) = arrays("train"), arrays("test")
    best: int | None = None
    for rate, momentum in draws:
        model, opt, graph = recorded(batch, momentum, seed)
        weights = [p.numpy().copy() for p in model.parameters()]
        kept = masks(weights, x, y, sparsity)
        opt.param_groups[0].lr = rate
        run, order = ml.StreamExecutor(graph, ml.schedulers.in_order(graph)), np.random.default_rng(seed)
        for k in range(1, best or MOST + 1):
            rows = order.integers(0, len(x), batch)
            loss = run(x[rows], y[rows], *kept)
            if k % EVERY:
                continue
            if not np.isfinite(float(loss.numpy())):
                break
            now = [p.numpy() * m for p, m in zip(model.parameters(), kept, strict=True)]
            if (output(now, tx)[1].argmax(1) != ty).mean() <= GOAL:
                best = k
                break
        run.close()
    return best


def predicted(batch: int, ranks: int, policy: str) -> float:
    """Microseconds per step of a batch that ranks share."""
    _, _, graph = recorded(batch // ranks, 0.9)
    return float(ml.plan(graph, policy, COST, ml.Machine(ranks, collective=lambda sizes: LINK[0] + LINK[1] * sum(
        sizes.values()) if ranks > 1 else 0.0)).period)


def times(steps: dict[str, float | None]) -> Iterator[dict[str, Any]]:
    """For every policy and number of ranks: the batch size with the least time to the target, and this time in ms."""
    for policy in POLICIES:
        for ranks in RANKS:
            each = {b: k * predicted(int(b), ranks, policy) / 1e3 for b, k in steps.items()
                    if k is not None and int(b) % ranks == 0}
            best = min(each, key=lambda b: each[b])
            yield {"policy": policy, "ranks": ranks, "batch": int(best), "ms": round(each[best], 3)}


def paying(rows: list[dict[str, Any]], policy: str) -> int:
    """The most ranks under a policy that save at least a quarter of the time of half as many."""
    mine = [row for row in rows if row["policy"] == policy]
    return max((more["ranks"] for fewer, more in pairwise(mine) if more["ms"] <= 0.75 * fewer["ms"]), default=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=12, help="pairs of rate and momentum of each setting (default 12)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each setting (default 3)")
    parser.add_argument("--out", metavar="FILE.json", help="file for the record")
    arguments = parser.parse_args()
    draws, about, found = rates(arguments.draws), machine(), dict[str, Any]()
    with show.progress("training", len(SPARSITIES) * len(BATCHES)) as done:
        for i, sparsity in enumerate(SPARSITIES):
            each = {}
            for j, batch in enumerate(BATCHES):
                runs = [steps_to_goal(batch, sparsity, draws, seed) for seed in range(arguments.seeds)]
                reached = [k for k in runs if k is not None]
                each[str(batch)] = float(np.mean(reached)) if len(reached) == len(runs) else None
                done(i * len(BATCHES) + j + 1)
            found[str(sparsity)] = {"steps": each, "times": list(times(each))}
    for sparsity, part in found.items():
        print(f"sparsity {sparsity}: steps " + ", ".join(f"{b}: {k}" for b, k in part["steps"].items()))
        print(show.table(("policy", *(f"{r} ranks" for r in RANKS), "ranks that pay"), [
            (policy, *(f"{t['ms']:.2f} ms, B {t['batch']}" for t in part["times"] if t["policy"] == policy),
             paying(part["times"], policy)) for policy in POLICIES]))
    save("batch_size", {"machine": about, "draws": arguments.draws, "seeds": arguments.seeds, "goal": GOAL,
                        "sparsities": found}, arguments.out)


if __name__ == "__main__":
    main()
