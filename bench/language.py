"""Networks for language: minidl against torch eager, both with one thread, steps interleaved.

    python bench/language.py [--seconds 20] [--only gpt] [--tasks 10] [--out FILE.json]      needs the extra `parity`

A GPT and a BERT of 4 layers, 128 wide, on 8 rows of 128 tokens of 256 kinds; AdamW; without dropout, and with it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT), str(ROOT / "tests" / "helpers")]

from against_torch import Case, Sides, main

import minidl as ml
from minidl import models, nn, optim

BATCH, RATE, TARGET = 8, 1e-3, 1.2
CASES = {f"{name}{', dropout' if dropout else ''}": Case(
    name, {"dropout": dropout, **more}, BATCH, TARGET, bool(dropout), "small")
    for dropout in (0.0, 0.1) for name, more in (("gpt", {}), ("bert", {"head": "masked"}))}


def sides(case: Case) -> Sides:
    """One step of AdamW on tokens at random."""
    import torch
    from torch_language import balance_of, load, twin

    torch.set_num_threads(1)
    ml.seed(0)
    model = models.create(case.model, preset=case.preset, **case.arguments)
    opt = optim.AdamW(model.parameters(), RATE)

    def mine(x: Any, y: Any) -> Any:
        logits = model(x)
        loss = model.loss(nn.cross_entropy(logits.reshape(-1, model.classes), y.reshape(-1)), logits)
        loss.backward()
        opt.step()
        return loss

    ids = np.random.default_rng(0).integers(1, model.classes, (case.batch, model.input_shape[0] + 1))
    x, y = np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
    graph = ml.record(mine, x, y, name=case.model)
    network = load(twin(case.model, {**models.arguments(case.model), **models.preset_arguments(case.model, case.preset),
                                     **case.arguments}), model)
    other = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    tx, ty = torch.from_numpy(x), torch.from_numpy(y)

    def step() -> float:
        other.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(network(tx).reshape(-1, model.classes), ty.reshape(-1))
        (loss := loss + balance_of(network)).backward()
        other.step()
        return loss.item()

    def outputs() -> tuple[np.ndarray, np.ndarray]:
        model.eval(), network.eval()
        with torch.no_grad():
            found = model(ml.array(x)).numpy(), network(tx).numpy()
        model.train(), network.train()
        return found

    return Sides(graph, (x, y), step, outputs)


if __name__ == "__main__":
    raise SystemExit(main(__doc__, "language", CASES, sides))
