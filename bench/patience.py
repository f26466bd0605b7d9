"""The cost of `--patience` in a step: the same small network with a watch and without one, in turns; and twice without,
which is the measurement's own error.

    python bench/patience.py [--rounds N] [--out FILE.json]

The record goes to bench/results/patience.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import numpy as np
from common import machine, save

import minidl as ml
from minidl import models, nn, optim
from minidl.core.schedule import Lane, Schedule
from minidl.devices.device import CPU
from minidl.plans.program import lower
from minidl.runtime.runtime import Runtime
from minidl.runtime.standstill import Watcher

STEPS = 100  #: of a turn


def runtime(lanes: str, is_watched: bool) -> tuple[Runtime, Any]:
    """A step of an MLP of three layers of 64 on one lane, and its inputs."""
    ml.seed(1)
    model = models.mlp(64, 64, 64, 10)
    optimizer = optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def step(x: Any, y: Any) -> Any:
        loss = nn.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    draw, device = np.random.default_rng(0), CPU()
    inputs = draw.standard_normal((32, 64)).astype("f"), draw.integers(0, 10, 32)
    device.set_lanes(lanes)
    graph = ml.record(step, *inputs)
    schedule = Schedule.from_names({Lane(0): [graph.name(t) for t in range(len(graph))]})
    return Runtime(lower(graph, schedule), device=device, watched=is_watched), inputs


def turn(run: Runtime, inputs: Any) -> float:
    """The median of some steps, in microseconds."""
    times = []
    for _ in range(STEPS):
        begin = perf_counter()
        run(*inputs)
        times.append(perf_counter() - begin)
    return float(np.median(times)) * 1e6


def measure(rounds: int) -> list[dict[str, Any]]:
    """A row for each kind of lanes: the step, and the ratios of turns to the turn without a watch beside them."""
    rows = []
    for lanes in ("native", "python"):
        arms = {"watched": runtime(lanes, True), "plain": runtime(lanes, False), "again": runtime(lanes, False)}
        found: dict[str, list[float]] = {name: [] for name in arms}
        with tempfile.TemporaryDirectory() as folder, Watcher(folder, 30.0, lambda: arms["watched"][0], None):
            for i in range(rounds):
                for name in sorted(arms, reverse=bool(i % 2)):
                    found[name].append(turn(*arms[name]))
        ratio = {name: np.percentile(np.divide(found[name], found["plain"]), [10, 50, 90]).round(3).tolist()
                 for name in ("watched", "again")}
        rows.append({"lanes": lanes, "step_us": round(float(np.median(found["plain"])), 1), **ratio})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    rows = measure(arguments.rounds)
    print(f"{'lanes':8}{'step us':>10}{'with a watch':>24}{'without, again':>24}  (p10, median, p90 of the ratios)")
    for row in rows:
        print(f"{row['lanes']:8}{row['step_us']:>10}{row['watched']!s:>24}{row['again']!s:>24}")
    save("patience", {"machine": machine(), "rounds": arguments.rounds, "steps": STEPS,
                      "note": "taken beside other work", "rows": rows}, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
