"""Native lanes, short tasks: predicted against measured steps on one lane and on two, and whether the plan that is
chosen is the best of those tried.

    python bench/prediction.py [--seconds 20] [--only NAME] [--out FILE.json]

Arms: in_order; two lanes as `multi_stream` has them where costs charge nothing for them; the plans that `multi_stream`
and `multi_region` choose by measured costs. The arms run in turn, each lane of a step held to a core of its own: two
lanes on one core measure the system's choice, not the schedule. Costs are measured in turn with the arms, in random
legal orders of one lane; what lanes cost each other, on lanes that run nothing else.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import interleave, machine, recorded_step, save, spread

import minidl as ml
from minidl import models, schedulers
from minidl.measuring.measure import Profile
from minidl.measuring.pairs import measure_pairs

CASES: dict[str, tuple[Callable[[], Any], int]] = {
    "MLP 16 x 64, batch 8": (lambda: models.mlp(*[64] * 16, 10), 8),
    "MobileNetV3 a0.25, batch 8": (lambda: models.create("mobilenet_v3_large", width=0.25, image_size=32), 8),
    "MobileNetV3 a0.25, batch 32": (lambda: models.create("mobilenet_v3_large", width=0.25, image_size=32), 32),
}
ONE, TWO = "in_order", "two lanes"
CHOSEN = ("multi_stream", "multi_region")
ROUNDS = 5  #: of costs and arms


@contextmanager
def lanes_on_cores(graph: Any, plans: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The executors of these plans, each lane on a core of its own. Every part of a loop has its own worker for the
    second lane."""
    cores, runs = sorted(os.sched_getaffinity(0)), dict[str, Any]()
    with ExitStack() as stack:
        try:
            for name, plan in plans.items():
                before = set(threading.enumerate())
                runs[name] = stack.enter_context(closing(ml.StreamExecutor(graph, plan.schedule)))
                for worker in set(threading.enumerate()) - before:
                    os.sched_setaffinity(worker.native_id or 0, cores[1:2] or cores)
            os.sched_setaffinity(0, cores[:1])
            yield runs
        finally:
            os.sched_setaffinity(0, cores)


def measured(case: str, seconds: float) -> dict[str, Any]:
    """The entry of a case."""
    make, batch = CASES[case]
    ml.seed(0)
    graph, x, y = recorded_step(make(), batch)
    cost = ml.measure(graph)
    groups, pairs = schedulers.profile_groups(graph, cost)
    corun = measure_pairs(graph, cost, groups, pairs)
    known = ml.CostModel(**{**vars(cost), "corun": corun})
    plans = {ONE: ml.plan(graph, ONE, cost), TWO: ml.plan(graph, schedulers.multi_stream(graph), cost),
             **{name: ml.plan(graph, name, known if name == "multi_region" else cost) for name in CHOSEN}}
    cores = os.sched_getaffinity(0)
    samples: dict[str, list[float]] = {name: [] for name in plans}
    errors: dict[str, list[dict[str, float]]] = {name: [] for name in plans}
    with lanes_on_cores(graph, plans) as runs:
        arms = {name: (lambda run=run: run(x, y)) for name, run in runs.items()}
        for seed in range(ROUNDS):
            profile = Profile(graph, seed=seed)
            found = interleave({"costs": profile.run, **arms}, seconds=seconds / ROUNDS, warm_up=2)
            held = os.sched_getaffinity(0)
            os.sched_setaffinity(0, cores)  # the costs are measured on the whole machine
            now = profile.costs()
            os.sched_setaffinity(0, held)
            for name, plan in plans.items():
                predicted = ml.plan(graph, plan.schedule, now).step / 1e6
                errors[name].append({"median": predicted / float(np.median(found[name])) - 1,
                                     "least": predicted / min(found[name]) - 1})
                samples[name] += found[name]
    median = {name: float(np.median(s)) for name, s in samples.items()}
    least = {name: min(s) for name, s in samples.items()}
    return {
        "tasks": len(graph), "step_ms": {name: {**spread(s), "least": round(min(s) * 1e3, 5)}
                                         for name, s in samples.items()},
        "prediction_error": {name: {which: {"median": round(float(np.median([e[which] for e in every])), 4),
                                            "worst": round(max((e[which] for e in every), key=abs), 4)}
                                    for which in ("median", "least")} for name, every in errors.items()},
        "over_best": {name: {"median": round(median[name] / min(median.values()), 4),
                             "least": round(least[name] / min(least.values()), 4)} for name in CHOSEN},
        "lanes": {name: len(plan.schedule.lanes) for name, plan in plans.items()},
        "remarks": {name: [*plan.remarks] for name, plan in plans.items()},
        "costs": {"sync": now.sync, "spin": now.spin, "doze": now.doze, "wake": now.wake, "cores": now.cores,
                  "cross_us_per_kb": {"read": now.cross.read * 1024, "write": now.cross.write * 1024,
                                      "source": now.cross.source}}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="per network")
    parser.add_argument("--only", choices=CASES, help="one network")
    parser.add_argument("--out", help="where to write the record")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "networks": {}}
    for case in [arguments.only] if arguments.only else CASES:
        entry = record["networks"][case] = measured(case, arguments.seconds)
        print(f"\n{case}   ({entry['tasks']} tasks)")
        for name, s in entry["step_ms"].items():
            error = entry["prediction_error"][name]
            print(f"  {name:14} {entry['lanes'][name]} lanes {s['median']:7.4f} ms, least {s['least']:7.4f}; predicted "
                  f"{error['median']['median']:+.1%} of the median, {error['least']['median']:+.1%} of the least")
        for name, over in entry["over_best"].items():
            print(f"  {name}: {over['median']:.3f} of the best median, {over['least']:.3f} of the best least; "
                  f"{'; '.join(entry['remarks'][name])}")
    save("prediction", record, arguments.out)


if __name__ == "__main__":
    main()
