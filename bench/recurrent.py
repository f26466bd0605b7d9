"""Recurrent layers: minidl against torch eager, both with one thread, steps interleaved.

    python bench/recurrent.py [--seconds 20] [--only LSTM] [--tasks 10] [--out FILE.json]      needs the extra `parity`

28 steps of 28 values to 128 hidden ones, then 10 classes from the last state; SGD with momentum.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from against_torch import Case, Sides, main
from common import sgd_step

import minidl as ml
from minidl import nn

STEPS, INPUTS, HIDDEN = 28, 28, 128
CASES = {kind: Case(kind, {}, 64, 0.85) for kind in ("LSTM", "GRU")}


def classifier(nn: Any, kind: str) -> Any:
    """Classes from the last state of a recurrent layer; `nn`: ours or torch's."""

    class Classifier(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = getattr(nn, kind)(INPUTS, HIDDEN), nn.Linear(HIDDEN, 10)

        def forward(self, x: Any) -> Any:
            return self.head(self.layer(x)[0][-1])

    return Classifier()


def sides(case: Case) -> Sides:
    """One step of SGD with momentum on numbers at random."""
    import torch

    torch.set_num_threads(1)
    ml.seed(0)
    model, rng = classifier(nn, case.model), np.random.default_rng(0)
    x, y = rng.standard_normal((STEPS, case.batch, INPUTS), np.float32), rng.integers(0, 10, case.batch)
    graph = ml.record(sgd_step(model), x, y, name=case.model)
    twin = classifier(torch.nn, case.model)
    twin.load_state_dict({name: torch.from_numpy(a.copy()) for name, a in model.state_dict().items()})
    opt = torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9, fused=True)
    tx, ty = torch.from_numpy(x), torch.from_numpy(y)

    def step() -> float:
        opt.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(twin(tx), ty)
        loss.backward()
        opt.step()
        return loss.item()

    def outputs() -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            return model(ml.array(x)).numpy(), twin(tx).numpy()

    return Sides(graph, (x, y), step, outputs)


if __name__ == "__main__":
    raise SystemExit(main(__doc__, "recurrent", CASES, sides))
