"""Wide tasks: steps on two lanes with whole tasks, with all tasks in two parts, and with widths chosen by measured
costs, over one lane; predicted and measured.

    python bench/wide.py [--seconds 20] [--only NAME] [--out FILE.json]

Costs are measured once before, in random legal orders of one lane. The arms run in turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import interleave, machine, ratio, save, spread

import minidl as ml
from minidl import models, nn, optim

#: how to make a network, and the shape of its batch: tokens if there is a vocabulary
CASES: dict[str, tuple[Callable[[], Any], tuple[int, ...], int]] = {
    "MLP 1024-2048-2048-10, batch 256": (lambda: models.mlp(1024, 2048, 2048, 10), (256, 1024), 0),
    "GPT 4 x 256, 4 x 256 tokens": (lambda: models.gpt(512, 256, 256, 4, 8, 0.0), (4, 256), 512),
    "ResNet-18, 64 px, batch 16": (lambda: models.create("resnet18", image_size=64), (16, 64, 64, 3), 0),
    "LSTM 28 x 128, batch 64": (lambda: models.create("rnn", vocabulary=256, length=28, width=128, layers=2), (64, 28),
                                256),
}
ARMS = {"in_order": {}, "multi_stream": {}, "all in parts": {"split": 2}, "widths chosen": {"split": "auto"}}


def recorded(model: Any, shape: tuple[int, ...], vocabulary: int) -> tuple[Any, Any, Any]:
    """A step of SGD with momentum, and its inputs."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, vocabulary, shape) if vocabulary else rng.standard_normal(shape, np.float32)
    y = rng.integers(0, vocabulary, shape) if vocabulary else rng.integers(0, 10, shape[0])
    opt = optim.SGD(model.parameters(), lr=0.001, momentum=0.9)

    def step(x: Any, y: Any) -> Any:
        out = model(x)
        loss = nn.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))
        loss.backward()
        opt.step()
        return loss

    return ml.record(step, x, y), x, y


def measured(case: str, seconds: float) -> dict[str, Any]:
    """The entry of a case."""
    make, shape, vocabulary = CASES[case]
    ml.seed(0)
    graph, x, y = recorded(make(), shape, vocabulary)
    cost = ml.measure(graph, parts=2, seconds=seconds / 4)
    plans = {name: ml.plan(graph, "in_order" if name == "in_order" else "multi_stream", cost, **how)
             for name, how in ARMS.items()}
    with ExitStack() as stack:
        runs = {name: stack.enter_context(closing(ml.StreamExecutor(plan.graph, plan.schedule)))
                for name, plan in plans.items()}
        samples = interleave({name: lambda run=run: run(x, y) for name, run in runs.items()}, seconds=seconds)
    return {"tasks": len(graph), "chosen": plans["widths chosen"].remarks[-1],
            "predicted_ms": {name: round(plan.predicted_step_ms, 3) for name, plan in plans.items()},
            "peak_bytes": {name: max(plan.peak_bytes) for name, plan in plans.items()},
            "step_ms": {name: spread(s) for name, s in samples.items()},
            **{f"in_order / {name}": ratio(samples, "in_order", name) for name in plans if name != "in_order"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="per network")
    parser.add_argument("--only", choices=CASES, help="one network")
    parser.add_argument("--out", help="where to write the record")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "networks": {}}
    for case in [arguments.only] if arguments.only else CASES:
        entry = record["networks"][case] = measured(case, arguments.seconds)
        print(f"\n{case}   ({entry['tasks']} tasks; {entry['chosen']})", flush=True)
        for name, step in entry["step_ms"].items():
            gain = entry.get(f"in_order / {name}", {"median": 1.0, "p10": 1.0, "p90": 1.0})
            print(f"  {name:14} predicted {entry['predicted_ms'][name]:8.2f} ms, measured {step['median']:8.2f} ms, "
                  f"{gain['median']:5.2f}x of one lane (p10 {gain['p10']:.2f}, p90 {gain['p90']:.2f})", flush=True)
    save("wide", record, arguments.out)


if __name__ == "__main__":
    main()
