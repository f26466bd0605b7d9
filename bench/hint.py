"""A pipeline whose order is a hint, beside the same order kept: how much more memory gives, and how much readiness.

    python bench/hint.py [--draws 5] [--ranks 4] [--ranks 8]

Tasks wait instead of computing, and their times vary: B = 2F, lognormal, spread .3 from micro-batch to micro-batch and
half of that by themselves, drawn anew for each step. The ranks are threads of this process. Arms: the policy's own
order; the order at the cap 2p - s; the hint at that cap; the hint at the policy's own cap. For each draw all arms run
in turn, and the simulator plays the same times. Times are of a step from barrier to barrier.
"""

from __future__ import annotations

import argparse
import threading
import time
from functools import partial
from typing import Any

import numpy as np
from common import machine, save, spread

import minidl as ml
from minidl import nn
from minidl.core.tasks import Kind
from minidl.plans.ready import VARIES, Picks
from minidl.runtime.bound import Bound
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import runtime

SIGMA, FORWARD = 0.3, 60e-3  #: seconds of a forward; a backward takes twice as long
ARMS = {"own": {}, "fixed": {"cap": "2p-s"}, "hint": {"cap": "2p-s", "order": "hint"}, "hint, own cap": {
    "order": "hint"}}


class Clock(threading.local):
    """Waits until so many seconds after the last wait of this thread, if that has just ended."""

    until = 0.0

    def after(self, seconds: float) -> float:
        """When that will be."""
        self.until = max(self.until, time.perf_counter() - 5e-4) + seconds
        return self.until

    def wait(self, seconds: float) -> None:
        if (left := self.after(seconds) - time.perf_counter()) > 0:
            time.sleep(left)


class Times:
    """Stands in for the calls of tasks that compute: each waits for its time in `now`, by key."""

    now: dict[int, float]

    def __init__(self) -> None:
        self.clock, usual = Clock(), Bound.thunks

        def thunks(bound: Bound, task: int, stream: Any = None) -> list[Any]:
            key = int(bound.graph.keys[task])
            kind = bound.graph.kind[task]
            return [partial(self.run, key)] if kind in VARIES else [] if kind == Kind.U else usual(bound, task, stream)

        Bound.thunks = thunks  # type: ignore[method-assign]

    def run(self, key: int) -> None:
        self.clock.wait(self.now[key])


def step_of(ranks: int, micro_batches: int) -> tuple[Any, list[Any], ml.CostModel]:
    """A recorded step with a layer for each rank, its inputs, and equal costs for all stages."""
    ml.seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(ranks)))
    optimizer = ml.optim.SGD(model.parameters(), lr=0.1)
    parts = [part for i in range(micro_batches) for part in (np.ones((2, 8), "f") * i, np.zeros(2, np.int64))]

    def step(*parts: Any) -> None:
        for i in range(micro_batches):
            with ml.micro_batch(i, 2 * i):
                (nn.cross_entropy(model(parts[2 * i]), parts[2 * i + 1]) * (1 / micro_batches)).backward()
        optimizer.step()

    graph = ml.record(step, *parts)
    first, micro = int(graph.unit.min()), FORWARD * 1e6
    tasks = {}
    for t in range(len(graph)):
        unit, kind = int(graph.unit[t]) - first, Kind(graph.kind[t])
        no_output = unit == 0 and kind == Kind.W  # the first layer has no output gradient
        tasks[graph.name(t)] = 0.0 if unit >= ranks or kind == Kind.U else micro * (1 + no_output)
    return graph, parts, ml.CostModel(tasks=tasks)


def measured(ranks: int, micro_batches: int, draws: int, times: Times) -> dict[str, Any]:
    """The measured and simulated step times of each arm in seconds, by draw."""
    graph, parts, cost = step_of(ranks, micro_batches)
    stages = np.minimum(np.arange(int(graph.unit.max()) + 1), ranks - 1)
    plans: dict[str, Any] = {arm: ml.plan(graph, "one_f_one_b", cost, ml.Machine(ranks), stage_of_unit=stages, **more)
                             for arm, more in ARMS.items()}
    every = {arm: Picks.of(plan) for arm, plan in plans.items()}
    drawn = every["hint"]
    compute = np.isin(drawn.graph.kind, VARIES)
    times.now = dict.fromkeys(drawn.graph.keys[compute].tolist(), 0.0)
    found: dict[str, dict[str, list[float]]] = {arm: {"measured": [], "simulated": []} for arm in plans}
    begun, barrier = [0.0] * ranks, threading.Barrier(ranks)

    def work(comm: Any) -> list[list[float]]:
        runs = {arm: runtime(plan.program(comm.rank), transport=comm) for arm, plan in plans.items()}
        ends = []
        for seed in range(draws):
            if comm.rank == 0:
                durations = drawn.drawn(SIGMA, seed)
                times.now = dict(zip(drawn.graph.keys[compute].tolist(), (durations[compute] / 1e6).tolist(),
                                     strict=True))
            for run in runs.values():
                barrier.wait()
                begun[comm.rank] = time.perf_counter()
                barrier.wait()
                run(*(parts[i] for i in range(len(parts))))
                ends.append((begun[0], time.perf_counter()))
        for run in runs.values():
            run.close()
        return ends

    ends = np.array(run_ranks(ranks, work)).reshape(ranks, draws, len(plans), 2)
    took = ends[..., 1].max(axis=0) - ends[..., 0].max(axis=0)
    for a, (arm, each) in enumerate(every.items()):
        found[arm]["measured"] = took[:, a].tolist()
        for seed in range(draws):
            found[arm]["simulated"].append(float(each.play(each.drawn(SIGMA, seed)).end.max()) / 1e6)
    return found


def summary(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """The measured and simulated step of each arm, both over the policy's own order, and their difference."""
    own = {how: np.array(found["own"][how]) for how in ("measured", "simulated")}
    return {arm: {**{f"{how}_ms": spread(list(values[how])) for how in own},
                  **{f"{how}_ratio": spread((np.array(values[how]) / own[how]).tolist(), 1.0) for how in own},
                  "off": round(float(np.median(values["measured"]) / np.median(values["simulated"]) - 1), 4)}
            for arm, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--out", help="the record's file (default bench/results/hint.json)")
    arguments = parser.parse_args()
    about, times = machine(), Times()
    settings = []
    for ranks in arguments.ranks or [4, 8]:
        micro_batches = arguments.micro_batches
        arms = summary(measured(ranks, micro_batches, arguments.draws, times))
        settings.append({"ranks": ranks, "micro_batches": micro_batches, "sigma": SIGMA, "arms": arms})
        for arm, a in arms.items():
            print(f"{ranks} ranks, {micro_batches} micro-batches, {arm}: {a['measured_ms']['median']:.1f} ms measured, "
                  f"{a['simulated_ms']['median']:.1f} simulated ({a['off']:+.1%}); over the policy's "
                  f"{a['measured_ratio']['median']:.3f}, simulated {a['simulated_ratio']['median']:.3f}", flush=True)
    save("hint", {"machine": about, "settings": settings}, arguments.out)


if __name__ == "__main__":
    main()
