"""Convolutional networks: minidl against torch (channels last), both with one thread, steps interleaved.

    python bench/cnn.py [--seconds 20] [--only lenet] [--tasks 10] [--out FILE.json]      needs the extra `parity`
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT), str(ROOT / "tests" / "helpers")]

from against_torch import Case, Sides, main
from common import sgd_step

import minidl as ml
from minidl import models

CASES = {"lenet": Case("lenet", {}, 64, 0.8), "resnet20": Case("resnet20", {}, 32, 1.0),
         "mobilenet_v3": Case("mobilenet_v3_large", {"width": 0.25, "image_size": 32, "classes": 10}, 32, 0.2, True),
         "densenet121": Case("densenet121", {"growth": 12, "image_size": 32, "classes": 10}, 8, 0.8)}


def sides(case: Case) -> Sides:
    """One step of SGD with momentum on images at random, or on rows of numbers."""
    from torch_twins import twin

    ml.seed(0)
    return of_both(models.create(case.model, **case.arguments),
                   twin(case.model, {**models.arguments(case.model), **case.arguments}), case.batch)


def of_both(model: Any, network: Any, batch: int) -> Sides:
    """The same of a network and its twin in torch, which gets its weights; `model.labels`: how many labels a sample
    has, if not one."""
    import torch
    from torch_twins import images, load

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, *model.input_shape), np.float32)
    y = rng.integers(0, model.classes, batch * getattr(model, "labels", 1))
    graph = ml.record(sgd_step(model), x, y)
    network = load(network, model).to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, fused=True)
    tx, ty = images(x) if x.ndim == 4 else torch.from_numpy(x), torch.from_numpy(y)

    def step() -> float:
        opt.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(network(tx), ty)
        loss.backward()
        opt.step()
        return loss.item()

    def outputs() -> tuple[np.ndarray, np.ndarray]:
        model.eval(), network.eval()
        with torch.no_grad():
            found = model(ml.array(x)).numpy(), network(tx).numpy()
        model.train(), network.train()
        return found

    return Sides(graph, (x, y), step, outputs)


if __name__ == "__main__":
    raise SystemExit(main(__doc__, "cnn", CASES, sides))
