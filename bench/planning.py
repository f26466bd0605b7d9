"""The growth of planning (with its proof), simulating and pricing pipelines, from a thousand tasks to ten million.

    python bench/planning.py [--largest 1e7] [--networks] [--out FILE.json]

Each size and scheduler runs in its own process, on one core, so peak memory is of that case alone; loops are compiled
before timing. With --networks: recorded networks (analytic costs, ZB-H1 in pipelines) by the commands `plan` and `train
--dry-run` with ranks as threads, start-up included.
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


SMALL = ["--model", "gpt", "--model-arg", "preset=tiny", "--model-arg", "layers=24", "--batch-size", "32",
         "--micro-batches", "32", "--scheduler", "zb_h1", "--parallel", "pipeline"]
MEDIUM = ["--model", "gpt2_medium", "--batch-size", "8", "--micro-batches", "8", "--scheduler", "zb_h1",
          "--parallel", "pipeline"]
DRY = ["train", "--dry-run", "--steps", "1"]
#: network -> (command, numbers of ranks, what each shall take at most, in seconds)
NETWORKS: dict[str, list[tuple[list[str], dict[int, float]]]] = {
    "GPT of 24 tiny layers, 32 micro-batches": [(["plan", *SMALL], {4: 5, 16: 8}), ([*DRY, *SMALL], {16: 10, 64: 30})],
    "BERT large": [(["plan", "--model", "bert_large", "--batch-size", "8"], {1: 5})],
    "GPT-2 medium, 8 micro-batches": [(["plan", *MEDIUM], {8: 5})]}


def networks() -> list[dict[str, Any]]:
    """Seconds and processor seconds of each command on a recorded network, and its peak memory."""
    cases = []
    minidl = [sys.executable, "-m", "minidl"]
    subprocess.run([*minidl, *DRY, *SMALL, "--costs", "analytic", "--ranks", "4"], check=True,
                   stdout=subprocess.DEVNULL)  # once, so that there is compiled code
    for name, commands in NETWORKS.items():
        for command, counts in commands:
            for ranks, most in counts.items():
                begin = time.perf_counter()
                child = subprocess.Popen([*minidl, *command, "--costs", "analytic", "--json",
                                          *(["--ranks", str(ranks)] if ranks > 1 else [])],
                                         stdout=subprocess.PIPE, text=True)
                assert child.stdout is not None
                record = json.loads(child.stdout.read())
                used = os.wait4(child.pid, 0)[2]
                cases.append({"network": name, "command": command[0], "ranks": ranks, "tasks": record["tasks"],
                              "s": round(time.perf_counter() - begin, 2), "most_s": most,
                              "cpu_s": round(used.ru_utime + used.ru_stime, 2),
                              "peak_mib": round(used.ru_maxrss / 2**10)})
                print("{network}: {command}, {ranks} ranks, {tasks} tasks: {s} s (at most {most_s}), {cpu_s} s of the "
                      "processor, {peak_mib} MiB".format(**cases[-1]), flush=True)
    return cases


def measure(name: str, ranks: int, micro_batches: int) -> dict[str, Any]:
    """Seconds of each step for one plan, and the process's peak memory."""
    import minidl as ml
    from minidl.pricing.simulation import times
    from minidl.schedulers import pipeline

    seconds: dict[str, float] = {}

    def timed(step: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = work()
        seconds[step] = round(time.perf_counter() - begin, 4)
        return result

    for _ in range(2):  # the first round only loads compiled loops
        warm = ml.plan(ml.Pipeline(512), name, machine=ml.Machine(64))
        times(warm.graph, warm.schedule, warm.cost)
    plan = timed("plan", lambda: ml.plan(ml.Pipeline(micro_batches), name, machine=ml.Machine(ranks)))  # proved
    timed("simulate", lambda: times(plan.graph, plan.schedule, plan.cost))
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
    parser.add_argument("--networks", action="store_true", help="measure a recorded network instead")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
        print(json.dumps(measure(arguments.one[0], *map(int, arguments.one[1:]))))
        return
    if arguments.networks:
        save("planning_networks", {**machine(), "cases": networks()}, arguments.out)
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
