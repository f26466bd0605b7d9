"""Convolutional networks: minidl against torch (channels last), both with one thread, steps interleaved.

    python bench/cnn.py [--seconds 20] [--only lenet] [--tasks 10] [--out FILE.json]      needs the extra `parity`
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT), str(ROOT / "tests")]

from common import interleave, machine, prediction_errors, ratio, save, sgd_step, spread

import minidl as ml
from minidl import models, schedulers
from minidl.runtime.bound import Bound

CASES = {"lenet": ("lenet", {}, 64), "resnet20": ("resnet20", {}, 32)}
TARGET = 2.5  #: the largest allowed ratio to torch's step


def ours(name: str, arguments: dict[str, Any], batch: int) -> tuple[Any, Any, Any, Any]:
    """(model, graph, x, y) of one SGD step with momentum."""
    ml.seed(0)
    model = models.create(name, **arguments)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, *model.input_shape), np.float32)
    y = rng.integers(0, model.classes, batch)
    return model, ml.record(sgd_step(model), x, y, name=name), x, y


def theirs(name: str, arguments: dict[str, Any], model: Any, x: Any, y: Any) -> Any:
    """torch's step, from the same weights."""
    import torch
    from torch_twins import images, load, twin

    torch.set_num_threads(1)
    network = load(twin(name, {**models.arguments(name), **arguments}), model).to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, fused=True)
    tx, ty = images(x), torch.from_numpy(y)

    def step() -> float:
        opt.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(network(tx), ty)
        loss.backward()
        opt.step()
        return float(loss)

    return step


def kernel_times(graph: Any, x: Any, y: Any, rounds: int = 5) -> dict[str, float]:
    """Milliseconds of a step by kernel and kind of task, the least of several rounds."""
    bound = Bound(graph, None, private=True)
    calls = [(f"{task.label.split()[0][len(str(task.unit))]} {launch.kernel}", bound.device.bind(launch, bound.array))
             for task in graph for launch in graph.launches[task.index]]
    best: list[float] = [np.inf] * len(calls)
    bound.load((x, y))
    for _ in range(rounds):
        for i, (_, thunks) in enumerate(calls):
            begin = perf_counter()
            for thunk in thunks:
                thunk()
            best[i] = min(best[i], perf_counter() - begin)
    total: dict[str, float] = defaultdict(float)
    for (name, _), seconds in zip(calls, best, strict=True):
        total[name] += seconds * 1e3
    return {name: round(ms, 3) for name, ms in sorted(total.items(), key=lambda item: -item[1])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds per network")
    parser.add_argument("--only", choices=CASES, help="one network instead of all")
    parser.add_argument("--tasks", type=int, default=0, help="also print that many of the slowest kernels")
    parser.add_argument("--out", help="file for the record; default bench/results/cnn.json")
    options = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "threads": 1, "target": TARGET, "networks": {}}
    print(f"{'network':12}{'batch':>6}{'minidl ms':>12}{'torch ms':>12}{'ratio':>8}{'p10':>7}{'p90':>7}   loss equal")
    for case in [options.only] if options.only else CASES:
        name, arguments, batch = CASES[case]
        model, graph, x, y = ours(name, arguments, batch)
        step = theirs(name, arguments, model, x, y)
        run = ml.StreamExecutor(graph, schedulers.in_order(graph))
        mine, other = float(run(x, y)), step()
        correct = abs(mine - other) <= 1e-5 * max(1.0, abs(other))
        samples = interleave({"minidl": partial(run, x, y), "torch": step}, seconds=options.seconds, warm_up=3)
        slower = ratio(samples, "minidl", "torch")
        entry = {"batch": batch, "minidl_ms": spread(samples["minidl"]), "torch_ms": spread(samples["torch"]),
                 "ratio": slower, "correct": correct, "tasks": len(graph)}
        entry["prediction_error"] = prediction_errors(graph, {"in_order": schedulers.in_order(graph)},
                                                      {"in_order": partial(run, x, y)}, options.seconds)
        record["networks"][case] = entry
        print(f"{case:12}{batch:6}{entry['minidl_ms']['median']:12.2f}{entry['torch_ms']['median']:12.2f}"
              f"{slower['median']:8.2f}{slower['p10']:7.2f}{slower['p90']:7.2f}   {correct}")
        if options.tasks:
            entry["kernels_ms"] = kernel_times(graph, x, y)
            for key, ms in list(entry["kernels_ms"].items())[: options.tasks]:
                print(f"    {ms:8.3f} ms  {key}")
    save("cnn", record, options.out)
    return 0 if all(e["correct"] for e in record["networks"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
