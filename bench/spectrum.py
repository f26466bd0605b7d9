"""Accuracy of exact, approximate and stale backward passes on the embedded digits, beside the published rule's figures.

    python bench/spectrum.py [METHOD ..] [--seeds 3] [--out FILE.json]

Every arm is a training run of three seeds. `expected` are accuracies of a NumPy model of the published rule, one or two
seeds, so within a point. Bits do not depend on time, so a busy machine gives the same accuracies.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import RESULTS, machine, write
from stale import trained as on_ranks

from minidl import nn
from minidl.cli import show
from minidl.pricing.cost import CostModel
from minidl.runtime.comm.loopback import run_ranks
from minidl.training.gossip_trainer import GossipTrainer
from minidl.training.job import Job
from minidl.training.rank_trainer import RankTrainer
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer

TICKS = 6000  #: steps of a run on a stream
LANES = 64  #: on which the step of a sweep is simulated
ON_4 = {"parallel": "data", "ranks": 4}
CHAIN = {"model_args": {"layers": 8, "hidden": 64}, "batch_size": 16, "lr": 0.02, "momentum": 0.9,
         "simulated": True}
NARROW = CHAIN | {"model_args": {"layers": 8, "hidden": 16}}
RESIDUAL = CHAIN | {"model": f"{Path(__file__).resolve()}:residual", "model_args": {}}
#: a pipeline on four ranks, with updates of single micro-batches of 8
PIPELINE = {"model_args": {"layers": 5, "hidden": 64}, "batch_size": 128, "micro_batches": 16, "update_every": 1,
            "lr": 0.02, "momentum": 0.9, "parallel": "pipeline", "ranks": 4}
#: the same, with a stage for each of nine ranks: layerpipe2's first stage is 2 (ranks - 1) updates late
DEEP = PIPELINE | {"model_args": {"layers": 9, "hidden": 32}, "lr": 0.003, "momentum": None}
ALONE = {"parallel": "none", "ranks": 1}
REVERSIBLE = PIPELINE | {"model": "revnet", "model_args": {"blocks": 6, "hidden": 64}, "lr": 0.005}
#: of a layer and its activation: forward 1, backward 2
BY_LAYER = CostModel(kinds={"F": 0.5, "O": 0.5, "W": 1.0, "U": 0.0}, launch=0.0, source="given")
#: method -> name of an arm -> (settings of the job, epochs or steps, expected accuracy as text)
ARMS: dict[str, dict[str, tuple[dict[str, Any], int, str]]] = {
    "dither": {f"dither {s}": ({"momentum": 0.9, "dither": float(s)}, 15, expected) for s, expected in (
        (0, "99.3 %"), (1, "98.9 %"), (2, "98.6 %"), (4, "98.6 %"), (8, "96.1 to 98.9 %"))},
    "sltt": {f"tau {tau}, {name}": ({"model": "snn", "model_args": {"tau": tau, **told}, "momentum": 0.9}, epochs, said)
             for tau, figures in ((1.1, (97.8, 98.1, 96.7, 95.6)), (2.0, (98.6, 98.6, 98.1, 95.8)))
             for (name, told, epochs), said in zip((
                 ("BPTT", {"backward": "bptt"}, 12), ("SLTT", {}, 12), ("SLTT-2", {"chosen": 2}, 12),
                 ("SLTT-1, 24 epochs", {"chosen": 1}, 24)), (f"{value} %" for value in figures), strict=True)},
    "partime": {f"PARTIME, {name}, {stages} stage{'s' * (stages > 1)}": (
        {"model_args": {"layers": 4, "hidden": 64}, "batch_size": 32, "lr": 0.05, "momentum": 0.0,
         "scheduler": "partime", "scheduler_args": {"stages": stages}, "feed": feed}, TICKS, said)
        for feed, name, figures in (("ring", "one new sample a tick", ("98.0 %", "97.7 %", "98.0 %")),
                                    ("batches", "a fresh batch every tick", ("98.5 %", "12 %", "17 %")),
                                    ("hold=16", "a fresh batch held 16 ticks", ("97 %", "96.8 %", "98.6 %")))
        for stages, said in zip((1, 2, 4), figures, strict=True)},
    "delayed": {f"pipedream on {ranks} ranks, {optimizer}, lr {lr}": (
        {"model_args": {"layers": 9, "hidden": 64}, "batch_size": 128, "micro_batches": 16, "update_every": 1,
         "optimizer": optimizer, "lr": lr, "parallel": "pipeline", "scheduler": "pipedream", "ranks": ranks}, 6, "-")
        for ranks in (2, 8) for lr in (0.001, 0.003) for optimizer in ("adamw", "nadamw")},
    "predicted": {f"layerpipe2 on 4 ranks, {name}, lr {lr}": (
        {"model_args": {"layers": 5, "hidden": 64}, "batch_size": 128, "micro_batches": 16, "update_every": 1, "lr": lr,
         "momentum": 0.9, "parallel": "pipeline", "scheduler": "layerpipe2", "scheduler_args": told, "ranks": 4}, 6,
        "-")
        for lr in (0.02,) for name, told in (
            ("old weights kept", {}), ("predicted", {"history": "predicted"}),
            *((f"average, {decay}", {"history": "average", "decay": decay})
              for decay in ("age", "window", "pipemare")))},
    "correctors": {
        f"{optimizer}, {name}": (DEEP | {"optimizer": optimizer} | told, 1, "-")
        for optimizer in ("adamw", "muon") for name, told in (
            ("newest weights", ALONE), *((f"layerpipe2 on {ranks} ranks, {how}", {
                "scheduler": "layerpipe2", "scheduler_args": given, "ranks": ranks})
                for ranks in (2, 5, 9) for how, given in (
                    ("old weights kept", {}), ("predicted", {"history": "predicted"}),
                    *([("predicted, p = 0.5", {"history": "predicted", "p": 0.5}),
                       ("predicted, average, age", {"history": "predicted", "decay": "age"})] * (ranks == 5)))))},
    "rates": {f"{optimizer}, {given}, {name}": (DEEP | {"optimizer": optimizer, "lr": lr} | told, epochs, "-")
              for optimizer in ("adamw", "muon")
              for given, lr, epochs in (("lr 0.001", 0.001, 1), ("lr 0.009", 0.009, 1), ("six epochs", 0.003, 6))
              for name, told in (("newest weights", ALONE), *((f"layerpipe2 on 5 ranks, {how}", {
                  "scheduler": "layerpipe2", "scheduler_args": history, "ranks": 5})
                  for how, history in (("old weights kept", {}), ("predicted", {"history": "predicted"}))))},
    "beside": {f"{policy} on 2 ranks, {optimizer}, lr {lr}": (
        {"model_args": {"layers": 4, "hidden": 64}, "batch_size": 64, "micro_batches": 2, "optimizer": optimizer,
         "momentum": momentum, "lr": lr, "parallel": "data", "scheduler": policy, "ranks": 2}, 12, "-")
        for optimizer, lr, momentum in (("sgd", 0.1, 0.0), ("sgd", 0.02, 0.9), ("adamw", 0.003, None))
        for policy in ("barrier", "acco", "delayed_update")},
    "sweeps": {
        "8 layers of 64, exact": (CHAIN, 12, "-"),
        **{f"8 layers of 64, Jacobi, {k} sweep{'s' * (k > 1)}": (CHAIN | {"backward": "jacobi", "sweeps": k}, 12, "-")
           for k in (1, 2, 4)},
        **{f"8 layers of 64, Gauss-Seidel, blocks of {block}, 1 sweep": (
            CHAIN | {"backward": "jacobi", "sweeps": 1, "block": block}, 12, "-") for block in (2, 4)},
        "8 layers of 16, exact": (NARROW, 12, "-"),
        "8 layers of 16, DeepPCR backward": (NARROW | {"backward": "deeppcr"}, 12, "-"),
        **{f"8 layers of 16, DeepPCR both ways, {k} Newton iteration{'s' * (k > 1)}": (
            NARROW | {"backward": "deeppcr", "newton": k}, 12, "-") for k in (1, 2, 3)},
        "8 residual blocks, exact": (RESIDUAL, 12, "-"),
        **{f"8 residual blocks, Highway-BP, {k} sweep{'s' * (k != 1)}": (
            RESIDUAL | {"backward": "highway", "sweeps": k}, 12, "-") for k in (0, 1, 2, 4)}},
    "adl": {
        **{f"{name}, updates of {16 // m} micro-batch{'es' * (m < 16)}": (
            PIPELINE | told | {"update_every": 16 // m, "scheduler_args": args(m)}, 6, "-")
           for m in (16, 8, 4) for name, told, args in (
               ("newest weights", ALONE, lambda m: {}),
               ("ADL on 4 ranks", {"scheduler": "adl"}, lambda m: {"mini_batches": m}))},
        **{f"layerpipe2 on 4 ranks, rates by delay over {n} steps": (
            PIPELINE | {"scheduler": "layerpipe2", "rates_by_delay": n}, 6, "-") for n in (20, 60)},
        "layerpipe2 on 4 ranks, rates by delay over 60 steps, average, pipemare": (
            PIPELINE | {"scheduler": "layerpipe2", "rates_by_delay": 60,
                        "scheduler_args": {"history": "average", "decay": "pipemare"}}, 6, "-")},
    "petra": {f"6 reversible blocks, {name}": (REVERSIBLE | told, 6, "-") for name, told in (
        ("newest weights", ALONE), ("layerpipe2 on 4 ranks", {"scheduler": "layerpipe2"}),
        ("PETRA on 4 ranks", {"scheduler": "petra"}))},
    "asynchronous": {name: (
        {"model_args": {"layers": 4, "hidden": 64}, "lr": 0.2, "momentum": 0.0, "batch_size": size, "scheduler": policy,
         "micro_batches": batches, "update_every": 1, "scheduler_args": options, **ranks, "steps": steps}, 0, said)
        for name, policy, size, batches, options, ranks, steps, said in (
            ("SGD, batches of 16", "in_order", 128, 8, {}, {}, 63, "-"),
            ("PD-ASGD, 1 forward to 2 backward threads", "pd_asgd", 128, 8, {}, {}, 63, "-"),
            ("DDP, equal ranks", "barrier", 64, 1, {}, ON_4, 491, "98.1 %"),
            ("LayUp, equal ranks", "layup", 256, 4, {"message": 0.2}, ON_4, 125, "97.8 %"),
            ("DDP, rank 0 four times slower", "barrier", 64, 1, {}, ON_4, 124, "78.6 %"),
            ("LayUp, rank 0 four times slower", "layup", 256, 4, {"message": 0.2, "slow": ((0, 4.0),)}, ON_4, 125,
             "97.2 %"))},
}


class Residual(nn.Module):
    """Residual blocks of two linear layers of 64, on the digits."""

    def __init__(self, blocks: int = 8) -> None:
        self.input_shape, self.classes = (8, 8, 1), 10
        self.stem, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        self.first, self.last = (nn.ModuleList([nn.Linear(64, 64) for _ in range(blocks)]) for _ in range(2))

    def forward(self, x: Any) -> Any:
        x = self.stem(x.flatten(1))
        for first, last in zip(self.first, self.last, strict=True):
            x = x + last(nn.relu(first(x)))
        return self.head(x)


def residual() -> Residual:
    return Residual()


def trained(seed: int, told: dict[str, Any], epochs: int) -> dict[str, Any]:
    """The accuracy of one run, and the means over its epochs of the zeros that dithering makes; or the milliseconds of
    its step on LANES lanes, by analytic costs. At least TICKS epochs are steps."""
    told = dict(told)
    ranks, steps = told.pop("ranks", 1), told.pop("steps", TICKS if epochs >= TICKS else 0)
    simulated = told.pop("simulated", False)
    if told.get("parallel") == "data":
        return {"accuracy": alike(Job(seed=seed, **told), ranks, epochs, steps)}
    if ranks > 1:
        return {"accuracy": on_ranks(Job(seed=seed, **told), ranks, epochs)["accuracy"] or 0.0}
    job = Job(**{"lr": 0.1, "seed": seed, **told})
    recorded = Recorded(job)
    trainer, zeros = Trainer(recorded, BY_LAYER if steps else CostModel.analytic()), []
    each = 1 if steps else recorded.train_data.steps(1)
    for _ in range(steps or epochs):
        for _ in range(each):
            trainer.step()
        if recorded.job.dither:
            trainer.settle()
            zeros.append({name: value for name, value in recorded.zeros().items() if isinstance(value, float)})
    trainer.settle()
    wide = replace(job, scheduler="multi_stream", streams=LANES)
    return {"accuracy": trainer.evaluate()["accuracy"],
            **({"ms": round(Recorded(wide).plan(CostModel.analytic()).predicted_step_ms, 4)} if simulated else {}),
            **({name: round(float(np.mean([z[name] for z in zeros])), 4) for name in zeros[0]} if zeros else {})}


def alike(job: Job, ranks: int, epochs: int, steps: int = 0) -> float:
    """The accuracy of a run on data-parallel ranks of this process, of so many epochs or steps."""
    own = [Recorded(job, rank, ranks) for rank in range(ranks)]

    def work(communicator: Any) -> Any:
        kind = GossipTrainer if job.scheduler == "layup" else RankTrainer
        trainer = kind(own[communicator.rank], BY_LAYER, communicator, (1.0, 1e-3))
        for _ in range(steps or own[0].train_data.steps(epochs)):
            trainer.step()
        trainer.share()
        return trainer

    return float(run_ranks(ranks, work)[0].evaluate()["accuracy"])


def said(arm: dict[str, Any]) -> str:
    """The accuracies of an arm's seeds, and what else was measured, as a text."""
    runs = arm["runs"]
    values = [100 * r["accuracy"] for r in runs]
    found = f"{np.mean(values):.1f} % ({min(values):.1f} to {max(values):.1f})"
    if "zeros" in runs[0]:
        def mean(name: str) -> str:
            return f"{100 * float(np.mean([r[name] for r in runs])):.0f} %"

        found += (f"; zeros {mean('zeros_before')} before, {mean('zeros')} after; multiply-adds saved "
                  f"{mean('skipped_before')} before, {mean('skipped')} after")
    return found + (f"; {runs[0]['ms']:.3g} ms" if "ms" in runs[0] else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", default=list(ARMS), metavar="METHOD", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each arm (default 3)")
    parser.add_argument("--out", metavar="FILE.json", help="file for the record")
    arguments = parser.parse_args()
    file = Path(arguments.out or RESULTS / "spectrum.json")
    before = json.loads(file.read_text())["methods"] if file.is_file() else {}
    about, found = machine(), dict[str, Any]()
    count = sum(len(ARMS[method]) for method in arguments.methods) * arguments.seeds
    with show.progress("training", count) as done:
        for method in arguments.methods:
            found[method] = {}
            for name, (told, epochs, expected) in ARMS[method].items():
                runs = []
                for seed in range(arguments.seeds):
                    runs.append(trained(seed, told, epochs))
                    done(sum(len(arm["runs"]) for m in found.values() for arm in m.values()) + len(runs))
                found[method][name] = {"expected": expected, "epochs": epochs, "runs": runs}
                methods = {m: {**{name: arm for name, arm in before.get(m, {}).items() if name in ARMS[m]},
                               **found.get(m, {})} for m in ARMS if m in found or m in before}
                written = write("spectrum", {"machine": about, "methods": methods}, arguments.out)
    print(f"record: {written}", file=sys.stderr)
    for arms in found.values():
        print(show.table(("arm", "accuracy on test digits, mean (of seeds)", "expected"),
                         [(name, said(arm), arm["expected"]) for name, arm in arms.items()]))


if __name__ == "__main__":
    main()
