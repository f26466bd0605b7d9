"""The growth of planning (with its proof), simulating and pricing pipelines, from a thousand tasks to ten million.

    python bench/planning.py [--largest 1e7] [--out FILE.json]

Each size and scheduler runs in its own process, on one core, so peak memory is of that case alone; loops are compiled
before timing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import machine, save

# ranks, micro-batches
SHAPES = [(8, 48), (16, 64), (32, 128), (64, 256), (128, 512), (256, 1024), (512, 2048), (1024, 4096)]
SCHEDULERS = ("one_f_one_b", "zb_h1", "fast_forward_greedy")


def measure(name: str, ranks: int, micro_batches: int) -> dict[str, Any]:
    """Seconds of each step for one plan, and the process's peak memory."""
    from minidl.pricing.simulation import times
    from minidl.schedulers import pipeline

    seconds: dict[str, float] = {}

    def timed(step: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = work()
        seconds[step] = round(time.perf_counter() - begin, 4)
        return result

    cost = pipeline.costs(pipeline.place(name, ranks), 1, 1, 1)
    for _ in range(2):  # the first round only loads compiled loops
        warm = pipeline.plan(name, 64, 512, cost=pipeline.costs(pipeline.place(name, 64), 1, 1, 1))
        times(warm.graph, warm.schedule, pipeline.costs(warm.placement, 1, 1, 1))
    plan = timed("plan", lambda: pipeline.plan(name, ranks, micro_batches, cost))  # proved
    timed("simulate", lambda: times(plan.graph, plan.schedule, cost))
    price = timed("price", lambda: pipeline.price(plan))
    total = seconds["plan"] + seconds["simulate"]
    return {"scheduler": name, "ranks": ranks, "micro_batches": micro_batches, "tasks": len(plan.graph),
            "seconds": seconds, "plan_validate_simulate_s": round(total, 4),
            "simulated_tasks_per_s": round(len(plan.graph) / seconds["simulate"]),
            "us_per_task_planned": round(seconds["plan"] / len(plan.graph) * 1e6, 3), "makespan": price.makespan,
            "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=float, default=1.3e7, help="leave out plans with more tasks than this")
    parser.add_argument("--out", metavar="FILE.json")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
        print(json.dumps(measure(arguments.one[0], *map(int, arguments.one[1:]))))
        return
    cases = []
    steps = ("plan", "simulate", "price")
    print(f"{'scheduler':20} {'tasks':>10} {''.join(f'{step:>10}' for step in steps)} {'M tasks/s':>10} {'GiB':>6}")
    for ranks, micro_batches in SHAPES:
        for name in SCHEDULERS:
            if 3 * ranks * micro_batches > arguments.largest:
                continue
            done = subprocess.run([sys.executable, __file__, "--one", name, str(ranks), str(micro_batches)],
                                  capture_output=True, text=True, check=True)
            case = json.loads(done.stdout)
            cases.append(case)
            seconds = "".join(f"{case['seconds'][step]:10.3f}" for step in steps)
            print(f"{name:20} {case['tasks']:10} {seconds} {case['simulated_tasks_per_s'] / 1e6:10.2f} "
                  f"{case['peak_gib']:6.2f}", flush=True)
    save("planning", {**machine(), "cases": cases}, arguments.out)


if __name__ == "__main__":
    main()
