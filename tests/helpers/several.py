"""The network and batches of the tests of several steps in one launch, on the CPU and on CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers import bits

import minidl as ml
from minidl import nn, optim
from minidl.autograd.tape import Tape, use

RNG = np.random.default_rng(0)
BATCHES = [(RNG.standard_normal((5, 6)).astype("f"), RNG.integers(0, 3, 5)) for _ in range(7)]


class Recorded:
    """A network with dropout, whose counter and whose Adam's powers change with each step."""

    def __init__(self, device: Any) -> None:
        self.device = device
        with use(Tape(device)):
            ml.seed(1)
            self.model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
            self.optimizer = optim.Adam(self.model.parameters(), 0.05)
            self.graph = ml.record(self.step, *BATCHES[0])

    def step(self, x: Any, y: Any) -> Any:
        logits = self.model(x)
        loss = nn.cross_entropy(logits, y)
        loss.backward()
        self.optimizer.step()
        return loss, logits

    def weights(self) -> Any:
        return bits(*(t.numpy() for _, t in self.model.named_tensors()))
