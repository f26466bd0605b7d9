"""Training on stale weights compared with synchronous training: accuracy and staleness.

    python bench/stale.py [--ranks 4] [--epochs 12] [--seeds 3] [--out FILE.json]

The embedded digits on an MLP, in loop-back ranks of this process. Each stale run is compared with one process that
updates after as many micro-batches, on the newest weights. Bits do not depend on time, so a busy machine gives the same
accuracies. The staleness of a run is counted in its version log, beside the steady state's: a run begins anew in each
epoch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import machine, save

import minidl as ml
from minidl import schedulers
from minidl.cli import show
from minidl.core.tasks import Kind, unpack
from minidl.pricing.cost import CostModel, Link
from minidl.runtime.comm.loopback import run_ranks
from minidl.training.job import Job
from minidl.training.pipeline_trainer import PipelineTrainer
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer, TrainingError

MICRO_BATCHES, BATCH = 16, 128
#: the policies that run, with their options
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "pipedream": ("pipedream", {}), "pipedream, history=average": ("pipedream", {"history": "average"}),
    "layerpipe2": ("layerpipe2", {}), "layerpipe2, history=average": ("layerpipe2", {"history": "average"}),
    "layerpipe": ("layerpipe", {}),
    "paci, a=1": ("paci", {"mini_batches": 16}), "paci, a=2": ("paci", {"mini_batches": 8}),
    "paci, a=4": ("paci", {"mini_batches": 4}), "pipedream_2bw, a=4": ("pipedream_2bw", {"mini_batches": 4})}
RATES = (0.005, 0.02)


def trained(job: Job, ranks: int, epochs: int) -> dict[str, Any]:
    """Accuracy of a run (None if it diverges), and its staleness if it has ranks."""
    cost, link = CostModel.analytic(), Link(50.0, 1e3)
    own = [Recorded(job) for _ in range(ranks)]
    steps = own[0].train_data.steps(epochs)

    def work(communicator: Any) -> Any:
        trainer = PipelineTrainer(own[communicator.rank], cost, communicator, link)
        _run(trainer, steps)
        return trainer

    try:
        if job.parallel == "none":
            alone = Trainer(own[0], cost)
            _run(alone, steps)
            return {"accuracy": alone.evaluate()["accuracy"]}
        trainer = run_ranks(ranks, work)[0]
    except TrainingError:
        return {"accuracy": None}
    return {"accuracy": trainer.evaluate()["accuracy"], **trainer.staleness(),
            "peak_bytes": list(trainer.plan.peak_bytes)}


def _run(trainer: Trainer, steps: int) -> None:
    for step in range(steps):
        if trainer.job.rates_by_delay:
            trainer.learn_by(lambda n: trainer.job.lr, step)
        trainer.step()
    trainer.finish() if isinstance(trainer, PipelineTrainer) else trainer.settle()


def steady_staleness(name: str, told: Mapping[str, Any], ranks: int) -> float:
    """The mean number of updates between reading weights and changing them, in the steady state of the policy. All
    stages cost the same here, unlike the stages of a network that `layerpipe` divides."""
    every = schedulers.find(name).staged.update_every(MICRO_BATCHES, told.get("mini_batches", 1))
    filled = ml.plan(ml.Pipeline(every if "mini_batches" in told else 8 * ranks), name, machine=ml.Machine(ranks),
                     **dict(told) | ({"mini_batches": 8 * ranks} if "mini_batches" in told else {}))
    own = unpack(filled.schedule.keys)
    last = (own.kind == Kind.F) & (own.micro_batch >= own.micro_batch.max() + 1 - 2 * every * ranks)
    return float((own.micro_batch // every - filled.versions.read)[last].mean())


def accuracies(found: Mapping[str, list[float | None]]) -> str:
    """Means over seeds: on stale weights / on the newest."""
    def percent(values: list[float | None]) -> str:
        known = [value for value in values if value is not None]
        return "diverges" if len(known) < len(values) else f"{100 * float(np.mean(known)):.1f} %"

    return f"{percent(found['accuracy'])} / {percent(found['synchronous'])}"


def rows(record: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    found = []
    for name, arm in record["arms"].items():
        found.append((name, arm["a"], *map(accuracies, arm["rates"].values()),
                      f"{arm['mean']:.2f} of {arm['steady']:.2f}, at most {arm['most']}", arm["drift"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="ranks of a pipeline (default 4)")
    parser.add_argument("--epochs", type=int, default=12, help="epochs of each run (default 12)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each setting (default 3)")
    parser.add_argument("--out", metavar="FILE.json", help="file for the record")
    arguments = parser.parse_args()
    base: dict[str, Any] = {"model": "mlp", "model_args": {"layers": 5, "hidden": 64}, "batch_size": BATCH,
                            "micro_batches": MICRO_BATCHES}
    about, synchronous, arms, count = machine(), {}, {}, 0
    with show.progress("training", len(ARMS) * len(RATES) * arguments.seeds) as done:
        for name, (policy, told) in ARMS.items():
            every = schedulers.find(policy).staged.update_every(MICRO_BATCHES, told.get("mini_batches", 1))
            arms[name] = {"a": every, "rates": {}, "steady": steady_staleness(policy, told, arguments.ranks)}
            for rate in RATES:
                found = []
                for seed in range(arguments.seeds):
                    job = Job(**base, update_every=every, lr=rate, seed=seed)
                    if (every, rate, seed) not in synchronous:
                        synchronous[every, rate, seed] = trained(job, 1, arguments.epochs)["accuracy"]
                    stale = Job(**base, update_every=every, lr=rate, seed=seed, scheduler=policy, parallel="pipeline",
                                scheduler_args=told)
                    found.append(trained(stale, arguments.ranks, arguments.epochs))
                    count += 1
                    done(count)
                arms[name]["rates"][str(rate)] = {
                    "accuracy": [f["accuracy"] for f in found],
                    "synchronous": [synchronous[every, rate, seed] for seed in range(arguments.seeds)]}
                arms[name] |= {key: value for f in found for key, value in f.items() if key != "accuracy"}
    record = {"machine": about, "ranks": arguments.ranks, "epochs": arguments.epochs, "micro_batches": MICRO_BATCHES,
              "network": base["model_args"], "arms": arms}
    print(show.table(("scheduler", "a", *(f"lr {rate:g}: stale / newest" for rate in RATES),
                      "updates late, of those in steady state", "drift"), rows(record)))
    save("stale", record, arguments.out)


if __name__ == "__main__":
    main()
