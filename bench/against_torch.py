"""What the benchmarks of whole networks share: minidl against torch on one thread, steps interleaved, one record."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import numpy as np
from common import interleave, machine, prediction_errors, ratio, save, spread

import minidl as ml
from minidl import schedulers
from minidl.runtime.bound import Bound


class Case(NamedTuple):
    """A network: the model and its preset or none, its arguments, samples in a batch, the largest allowed ratio to
    torch's step, and whether steps draw random numbers, so that losses differ."""

    model: str
    arguments: dict[str, Any]
    batch: int
    target: float
    random: bool = False
    preset: str | None = None


class Sides(NamedTuple):
    """Ours and torch's with the same weights: the recorded step, its inputs, torch's step, and what both networks say
    to the inputs without training."""

    graph: Any
    inputs: tuple[Any, Any]
    step: Callable[[], float]
    outputs: Callable[[], tuple[Any, Any]]


def launch_times(graph: Any, x: Any, y: Any, rounds: int = 5) -> list[tuple[Any, Any, float]]:
    """Each launch of a step with its task and its seconds, the least of several rounds, in turn by the clock, which
    costs less to read, and by the thread's own time, which leaves out other work."""
    bound = Bound(graph, None, private=True)
    calls = [(task, launch, bound.device.bind(launch, bound.array))
             for task in graph for launch in graph.launches[task.index]]
    best: list[float] = [np.inf] * len(calls)
    bound.load((x, y))
    for clock in (perf_counter, thread_time) * rounds:
        for i, (_, _, thunks) in enumerate(calls):
            begin = clock()
            for thunk in thunks:
                thunk()
            best[i] = min(best[i], clock() - begin)
    return [(task, launch, seconds) for (task, launch, _), seconds in zip(calls, best, strict=True)]


def kernel_times(graph: Any, x: Any, y: Any) -> dict[str, float]:
    """Milliseconds of a step by kernel and kind of task."""
    total: dict[str, float] = defaultdict(float)
    for task, launch, seconds in launch_times(graph, x, y):
        total[f"{task.label.split()[0][len(str(task.unit))]} {launch.kernel}"] += seconds * 1e3
    return {name: round(ms, 3) for name, ms in sorted(total.items(), key=lambda item: -item[1])}


def measure(sides: Sides, case: Case, seconds: float, tasks: int) -> dict[str, Any]:
    """The entry of one network in the record."""
    graph, (x, y), step, _ = sides
    plan = schedulers.in_order(graph)
    mine, theirs = sides.outputs()
    correct = bool(np.allclose(mine, theirs, rtol=1e-3, atol=1e-3 * np.abs(theirs).max()))
    run = ml.StreamExecutor(graph, plan)
    losses = [(float(run(x, y)), step()) for _ in range(2)]
    correct &= case.random or all(abs(a - b) <= 1e-3 * max(1.0, abs(b)) for a, b in losses)
    samples = interleave({"minidl": partial(run, x, y), "torch": step}, seconds=seconds, warm_up=3)
    entry = {"batch": case.batch, "target": case.target, "minidl_ms": spread(samples["minidl"]),
             "torch_ms": spread(samples["torch"]), "ratio": ratio(samples, "minidl", "torch"),
             "ratio_of_least": round(min(samples["minidl"]) / min(samples["torch"]), 4), "correct": correct,
             "tasks": len(graph)}
    entry["prediction_error"] = prediction_errors(graph, {"in_order": plan}, {"in_order": partial(run, x, y)}, seconds)
    if tasks:
        entry["kernels_ms"] = dict([*kernel_times(graph, x, y).items()][:tasks])
    return entry


def main(description: str | None, record_name: str, cases: Mapping[str, Case], sides: Callable[[Case], Sides]) -> int:
    """The command of a benchmark: measures its cases, prints a line for each, and saves the record."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds per network")
    parser.add_argument("--only", choices=cases, help="one network instead of all")
    parser.add_argument("--tasks", type=int, default=0, help="also print that many of the slowest kernels")
    parser.add_argument("--out", help=f"file for the record; default bench/results/{record_name}.json")
    options = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "threads": 1, "networks": {}}
    print(f"{'network':14}{'batch':>6}{'minidl ms':>11}{'torch ms':>11}{'ratio':>8}{'p10':>7}{'p90':>7}{'least':>7}"
          f"{'target':>8}   correct")
    for name in [options.only] if options.only else cases:
        entry = measure(sides(cases[name]), cases[name], options.seconds, options.tasks)
        record["networks"][name], slower = entry, entry["ratio"]
        print(f"{name:14}{entry['batch']:6}{entry['minidl_ms']['median']:11.2f}{entry['torch_ms']['median']:11.2f}"
              f"{slower['median']:8.2f}{slower['p10']:7.2f}{slower['p90']:7.2f}{entry['ratio_of_least']:7.2f}"
              f"{entry['target']:8}   {entry['correct']}", flush=True)
        for key, ms in entry.get("kernels_ms", {}).items():
            print(f"    {ms:8.3f} ms  {key}")
    save(record_name, record, options.out)
    return 0 if all(entry["correct"] for entry in record["networks"].values()) else 1
