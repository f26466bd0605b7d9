"""Fully connected networks: the cost of a task beyond its kernels, minidl against torch, two streams against one, and
prediction against measurement.

    python bench/mlp.py [--seconds 6] [--out FILE.json]      torch's arms need the extra `parity`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import interleave, machine, prediction_errors, ratio, recorded_step, save, spread

import minidl as ml
from minidl import device, models, schedulers
from minidl.devices.lanes import run_program
from minidl.plans.memory import plan_memory
from minidl.runtime.bound import Bound

SHAPES = {"16 x 64, batch 8": ([64] * 16 + [10], 8), "784-512-512-10, batch 64": ([784, 512, 512, 10], 64),
          "8 x 1024, batch 256": ([1024] * 8 + [10], 256)}


def recorded(sizes: list[int], batch: int) -> tuple[Any, Any, Any, Any]:
    """(model, graph, x, y) of one SGD step with momentum."""
    ml.seed(0)
    model = models.mlp(*sizes)
    return model, *recorded_step(model, batch)


def torch_steps(sizes: list[int], x: Any, y: Any, seconds: float) -> dict[str, Any]:
    """The same step in torch on one thread: eager with its fastest optimizer, and compiled."""
    try:
        import torch
    except ImportError:
        print("torch is not installed: its arms are left out (extra `parity`)", file=sys.stderr)
        return {}
    torch.set_num_threads(1)
    tx, ty = torch.from_numpy(x), torch.from_numpy(y)

    def net() -> Any:
        layers: list[Any] = []
        for i, o in zip(sizes[:-1], sizes[1:], strict=True):
            layers += [torch.nn.Linear(i, o), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers[:-1])

    def stepper(**how: Any) -> Any:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **how)

        def step() -> None:
            opt.zero_grad(set_to_none=True)
            torch.nn.functional.cross_entropy(model(tx), ty).backward()
            opt.step()

        return step

    eager = {name: stepper(**how) for name, how in {"fused": {"fused": True}, "foreach": {"foreach": True},
                                                    "for": {"foreach": False}}.items()}
    tried = {name: float(np.median(s)) for name, s in interleave(eager, seconds=seconds / 4).items()}
    best = min(tried, key=lambda name: tried[name])
    arms = {f"torch eager ({best})": eager[best]}
    try:
        model = torch.compile(net())
        opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

        def compiled() -> None:
            opt.zero_grad(set_to_none=True)
            torch.nn.functional.cross_entropy(model(tx), ty).backward()
            opt.step()

        compiled()
        arms["torch compile"] = compiled
    except Exception as error:  # for example without a compiler: the arm is left out, and the record says so
        print(f"torch.compile is left out: {type(error).__name__}: {str(error).splitlines()[0][:120]}", file=sys.stderr)
    return arms


def overhead(graph: Any, x: Any, y: Any, rounds: int = 3000) -> dict[str, float]:
    """Microseconds per task that one Python lane adds to its bare kernel calls.

    Compares the program of a lane with the same calls written one after another, the least that Python can do.
    """
    schedule = schedulers.in_order(graph)
    bound = Bound(graph, plan_memory(graph, schedule))
    bound.load((x, y))
    program = [thunk for t in range(len(graph)) for thunk in bound.thunks(t)]
    names = {f"k{i}": thunk for i, thunk in enumerate(program)}
    source = "def bare():\n" + "".join(f"    {name}()\n" for name in names)
    space: dict[str, Any] = dict(names)
    exec(source, space)
    bare = space["bare"]
    samples: dict[str, list[float]] = {"lane": [], "bare": []}
    for _ in range(rounds):
        for name, run in (("bare", bare), ("lane", lambda: run_program(program))):
            bound.load((x, y))
            begin = perf_counter()
            run()
            samples[name].append(perf_counter() - begin)
    difference = (np.array(samples["lane"]) - np.array(samples["bare"])) / len(graph) * 1e6
    return {**spread(list(difference), 1.0), "calls_per_task": round(len(program) / len(graph), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="per network")
    parser.add_argument("--out", help="where to write the record")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "networks": {}}
    for name, (sizes, batch) in SHAPES.items():
        model, graph, x, y = recorded(sizes, batch)
        cost = ml.measure(graph)
        plans = {"in_order": schedulers.in_order(graph), "multi_stream": schedulers.multi_stream(graph, cost=cost)}
        runs = {key: ml.StreamExecutor(graph, plan) for key, plan in plans.items()}
        arms: dict[str, Any] = {f"minidl {key}": (lambda run=run: run(x, y)) for key, run in runs.items()}
        arms |= torch_steps(sizes, x, y, arguments.seconds)
        samples = interleave(arms, seconds=arguments.seconds)
        entry: dict[str, Any] = {"tasks": len(graph), "step_ms": {arm: spread(s) for arm, s in samples.items()},
                                 "two_streams_against_one": ratio(samples, "minidl in_order", "minidl multi_stream"),
                                 "equal_bits": _equal_bits(sizes, batch)}
        for arm in arms:
            if arm.startswith("torch"):
                entry[f"against {arm}"] = ratio(samples, arm, "minidl in_order")
        entry["prediction_error"] = prediction_errors(graph, plans,
                                                      {key: arms[f"minidl {key}"] for key in plans}, arguments.seconds)
        if batch == 8:
            entry["overhead_us_per_task"] = overhead(graph, x, y)
        if batch == 256:
            device.cpu().set_blas_threads(2)
            try:
                both = interleave({"one stream, two BLAS threads": arms["minidl in_order"]},
                                  seconds=arguments.seconds / 3)
            finally:
                device.cpu().set_blas_threads(1)
            entry["step_ms"] |= {arm: spread(s) for arm, s in both.items()}
        record["networks"][name] = entry
        _show(name, entry)
        for run in runs.values():
            run.close()
    save("mlp", record, arguments.out)


def _equal_bits(sizes: list[int], batch: int) -> bool:
    """Whether three steps under both schedules give the same parameters."""
    found = []
    for name in ("in_order", "multi_stream"):
        model, graph, x, y = recorded(sizes, batch)
        run = ml.StreamExecutor(graph, ml.plan(graph, name).schedule)
        for _ in range(3):
            run(x, y)
        run.close()
        found.append(b"".join(p.numpy().tobytes() for p in model.parameters()))
    return found[0] == found[1]


def _show(name: str, entry: dict[str, Any]) -> None:
    print(f"\n{name}   ({entry['tasks']} tasks, equal bits: {entry['equal_bits']})")
    for arm, s in entry["step_ms"].items():
        print(f"  {arm:32} {s['median']:9.3f} ms   p10 {s['p10']:9.3f}   p90 {s['p90']:9.3f}   n {s['n']}")
    for key, value in entry.items():
        if isinstance(value, dict) and "p10" in value:
            print(f"  {key:32} {value['median']:9.3f}      p10 {value['p10']:9.3f}   p90 {value['p90']:9.3f}")
    print("  prediction error                 " + ", ".join(f"{k} {v['median']:+.1%} (worst {v['worst']:+.1%})"
                                                            for k, v in entry["prediction_error"].items()))


if __name__ == "__main__":
    main()
