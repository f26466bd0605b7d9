"""Networks for language: minidl against torch eager, both with one thread, steps interleaved.

    python bench/language.py [--seconds 20] [--only gpt] [--tasks 10] [--out FILE.json]      needs the extra `parity`

A GPT and a BERT of 4 layers, 128 wide, on 8 rows of 128 tokens of 256 kinds; AdamW; without dropout, and with it.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT), str(ROOT / "tests")]

from cnn import kernel_times
from common import interleave, machine, ratio, save, spread

import minidl as ml
from minidl import models, nn, optim, schedulers

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", {"dropout": 0.0}), "bert": ("bert", {"dropout": 0.0, "head": "masked"}),
    "gpt, dropout": ("gpt", {"dropout": 0.1}), "bert, dropout": ("bert", {"dropout": 0.1, "head": "masked"})}
BATCH, RATE = 8, 1e-3
TARGET = 1.2  #: the largest allowed ratio to torch's step


def ours(name: str, arguments: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """(model, graph, tokens, labels) of one AdamW step."""
    ml.seed(0)
    model = models.create(name, preset="small", **arguments)
    opt = optim.AdamW(model.parameters(), RATE)

    def step(x: Any, y: Any) -> Any:
        loss = nn.cross_entropy(model(x).reshape(-1, model.classes), y.reshape(-1))
        loss.backward()
        opt.step()
        return loss

    ids = np.random.default_rng(0).integers(1, model.classes, (BATCH, model.input_shape[0] + 1))
    x, y = np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
    return model, ml.record(step, x, y, name=name), x, y


def theirs(name: str, arguments: dict[str, Any], model: Any, x: Any, y: Any) -> Any:
    """torch's step, from the same weights."""
    import torch
    from torch_language import load, twin

    torch.set_num_threads(1)
    network = load(twin(name, {**models.arguments(name), **models.preset_arguments(name, "small"), **arguments}), model)
    opt = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    tx, ty = torch.from_numpy(x), torch.from_numpy(y)

    def step() -> float:
        opt.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(network(tx).reshape(-1, model.classes), ty.reshape(-1))
        loss.backward()
        opt.step()
        return loss.item()

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds per network")
    parser.add_argument("--only", choices=CASES, help="one case instead of all")
    parser.add_argument("--tasks", type=int, default=0, help="also print that many of the slowest kernels")
    parser.add_argument("--out", help="file for the record; default bench/results/language.json")
    options = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "threads": 1, "target": TARGET, "networks": {}}
    print(f"{'network':14}{'minidl ms':>12}{'torch ms':>12}{'ratio':>8}{'p10':>7}{'p90':>7}   loss equal")
    for case in [options.only] if options.only else CASES:
        name, arguments = CASES[case]
        model, graph, x, y = ours(name, arguments)
        step = theirs(name, arguments, model, x, y)
        run = ml.StreamExecutor(graph, schedulers.in_order(graph))
        losses = [(float(run(x, y)), step()) for _ in range(3)]
        correct = bool(arguments["dropout"]) or all(abs(a - b) <= 1e-3 for a, b in losses)
        samples = interleave({"minidl": partial(run, x, y), "torch": step}, seconds=options.seconds, warm_up=3)
        slower = ratio(samples, "minidl", "torch")
        entry = {"batch": BATCH, "minidl_ms": spread(samples["minidl"]), "torch_ms": spread(samples["torch"]),
                 "ratio": slower, "correct": correct, "tasks": len(graph)}
        record["networks"][case] = entry
        print(f"{case:14}{entry['minidl_ms']['median']:12.2f}{entry['torch_ms']['median']:12.2f}"
              f"{slower['median']:8.2f}{slower['p10']:7.2f}{slower['p90']:7.2f}   {correct}")
        if options.tasks:
            entry["kernels_ms"] = kernel_times(graph, x, y)
            for key, ms in list(entry["kernels_ms"].items())[: options.tasks]:
                print(f"    {ms:8.3f} ms  {key}")
    save("language", record, options.out)
    return 0 if all(e["correct"] for e in record["networks"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
