"""Experts on data-parallel ranks: the step in order, with weight gradients that hide exchanges, and with two halves of
a batch in turn.

    python bench/exchanges.py [--draws 5] [--ranks 2] [--ranks 4]

Each block has a dense layer, and one with experts and a shared expert. Each of the three waits for EXPERTS seconds in
a forward, an output gradient and a weight gradient, after it has computed a few tokens; an exchange of rows waits for
half as long, as long, or twice as long. The ranks are threads of this process, and run the arms in turn. Predicted are
the periods of plans, measured are steps from barrier to barrier.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from common import machine, save, spread
from hint import Clock

import minidl as ml
from minidl import nn
from minidl.core.tasks import Kind
from minidl.runtime.bound import Bound
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.communication import Communication
from minidl.runtime.executors import runtime

EXPERTS, BLOCKS, WIDTH = 20e-3, 2, 8
RATIOS = (0.5, 1.0, 2.0)  #: time of an exchange over the forward of a layer's experts
ARMS = {"in order": (1, "none"), "weights": (1, "weights"), "two_batches": (2, "two_batches")}  #: micro-batches, hide


class Times:
    """Tasks and exchanges, by their keys in `now`, wait for their times when they have run."""

    def __init__(self) -> None:
        self.now: dict[int, float] = {}
        clock, thunks, exchanged = Clock(), Bound.thunks, Communication.exchanged

        def longer(bound: Bound, task: int, stream: Any = None) -> list[Any]:
            seconds = self.now.get(int(bound.graph.keys[task]), 0.0)
            return [*thunks(bound, task, stream), *([partial(clock.wait, seconds)] if seconds else [])]

        def travels(communication: Communication, key: int, *more: Any) -> Any:
            moves, seconds = exchanged(communication, key, *more), self.now.get(key, 0.0)

            def run() -> Iterator[None]:
                yield from moves()
                until = clock.after(seconds) if seconds else 0.0
                while time.perf_counter() < until:
                    yield

            return run

        Bound.thunks, Communication.exchanged = longer, travels  # type: ignore[method-assign]


def planned(arm: str, exchange: float, ranks: int) -> tuple[Any, Any, list[Any], dict[int, float]]:
    """A rank's model, its plan, the inputs of a step, and how long each task waits, by key. `exchange`: seconds."""
    ml.seed(0)
    micro_batches, hide = ARMS[arm]
    model = nn.Sequential(*(layer for _ in range(BLOCKS) for layer in (
        nn.Linear(WIDTH, WIDTH), nn.MoE(WIDTH, WIDTH, 4, 1, shared=1))))
    optimizer, random = ml.optim.SGD(model.parameters(), lr=0.1), np.random.default_rng(0)
    parts = [part for _ in range(micro_batches) for part in (random.normal(size=(4, WIDTH)).astype("f"),
                                                             np.zeros(4, np.int64))]

    def step(*parts: Any) -> None:
        for i in range(micro_batches):
            with ml.micro_batch(i, 4 * i):
                (nn.cross_entropy(model(parts[2 * i]), parts[2 * i + 1]) * (1 / micro_batches)).backward()
        optimizer.step()

    graph = ml.record(step, *parts)
    cost, more = ml.CostModel(kinds=dict.fromkeys("FOWUX", 0.0)), {"experts_over": "data"}
    own = ml.plan(graph, "barrier", cost, ml.Machine(ranks), **more).graph
    waits = {t: seconds / micro_batches for t, seconds in enumerate(_seconds(own, exchange))}
    cost = ml.CostModel(tasks={own.name(t): 1e6 * seconds for t, seconds in waits.items()})
    plan = ml.plan(graph, "barrier", cost, ml.Machine(ranks), hide=hide, **more)
    return model, plan, parts, {int(own.keys[t]): seconds for t, seconds in waits.items()}


def _seconds(graph: Any, exchange: float) -> Iterator[float]:
    """How long each task waits. A network of two layers takes as long as a layer; counts travel in no time."""
    for task in graph:
        where, kernels = graph.unit_names[task.unit], {launch.kernel for launch in task.launches}
        if task.kind == Kind.X:
            yield exchange * (len(task.launches[0].reads) > 1)
        elif task.kind in (Kind.F, Kind.O, Kind.W) and "linear" in where and "router" not in where:
            yield EXPERTS / (1 + any(name.startswith("grouped") for name in kernels) + ("shared" in where))
        else:
            yield 0.0


def measured(ranks: int, ratio: float, draws: int, times: Times) -> dict[str, Any]:
    """The predicted step and the measured ones of each arm in seconds."""
    every = [{arm: planned(arm, ratio * EXPERTS, ranks) for arm in ARMS} for _ in range(ranks)]
    begun, barrier = threading.Barrier(ranks), threading.Barrier(ranks)

    def work(comm: Any) -> list[float]:
        runs, took = {}, []
        for arm, (_, plan, _, waits) in every[comm.rank].items():
            times.now = waits  # which are the same on all ranks
            begun.wait()
            runs[arm] = runtime(plan.program(comm.rank), transport=comm)
            begun.wait()
        for _ in range(draws + 1):
            for arm, run in runs.items():
                begun.wait()
                begin = time.perf_counter()
                run(*every[comm.rank][arm][2])
                barrier.wait()
                took.append(time.perf_counter() - begin)
        for run in runs.values():
            run.settle()
            run.close()
        return took

    def rank(comm: Any) -> list[float]:
        try:
            return work(comm)
        except BaseException:
            begun.abort()  # where others wait
            barrier.abort()
            raise

    took = np.array(run_ranks(ranks, rank)).reshape(ranks, draws + 1, len(ARMS)).max(axis=0)[1:]
    return {arm: {"predicted": every[0][arm][1].step / 1e6, "measured": took[:, i].tolist()}
            for i, arm in enumerate(ARMS)} | {"bits": _equal(every)}


def _equal(every: list[dict[str, Any]]) -> bool:
    """Whether the parameters that are not shared out have equal bits on all ranks, in order and with hidden
    exchanges."""
    kept = [[p.numpy().tobytes() for layer in own[arm][0] for part in (
        (layer.router, layer.shared) if isinstance(layer, nn.MoE) else (layer,)) for p in part.parameters()]
            for own in every for arm in ("in order", "weights")]
    return all(bits == kept[0] for bits in kept)


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """The predicted and the measured step of each arm, both over the step in order, and their difference."""
    own = found["in order"]
    return {arm: {"predicted_ms": round(1e3 * found[arm]["predicted"], 3),
                  "measured_ms": spread(found[arm]["measured"]),
                  "predicted_ratio": round(found[arm]["predicted"] / own["predicted"], 4),
                  "measured_ratio": spread((np.array(found[arm]["measured"]) / own["measured"]).tolist(), 1.0),
                  "off": round(float(np.median(found[arm]["measured"]) / found[arm]["predicted"] - 1), 4)}
            for arm in ARMS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--out", help="the record's file (default bench/results/exchanges.json)")
    arguments = parser.parse_args()
    about, times, settings = machine(), Times(), []
    for ranks in arguments.ranks or [2, 4]:
        for ratio in RATIOS:
            found = measured(ranks, ratio, arguments.draws, times)
            settings.append({"ranks": ranks, "exchange": ratio, "bits": found["bits"], "arms": summary(found)})
            for arm, a in settings[-1]["arms"].items():
                print(f"{ranks} ranks, an exchange of {ratio:g} experts, {arm}: {a['measured_ms']['median']:.1f} ms "
                      f"measured, {a['predicted_ms']:.1f} predicted ({a['off']:+.1%}); over the step in order "
                      f"{a['measured_ratio']['median']:.3f}, predicted {a['predicted_ratio']:.3f}", flush=True)
    save("exchanges", {"machine": about, "settings": settings}, arguments.out)


if __name__ == "__main__":
    main()
