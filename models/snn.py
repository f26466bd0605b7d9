"""A spiking network, and how it is trained through time (Meng et al., SLTT, 2302.14311).

Each time step reads the whole sample (direct coding) and gives an output; the prediction is the sum of the outputs. A
step of training has one loss and one backward pass per time step (`sltt`), or one backward pass through all of them
(`bptt`). With `chosen=K`, only K of the T time steps have a backward pass (SLTT-K); the loss of each is divided by T
nevertheless.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from .. import nn
from ..autograd import random
from .registry import model

WAYS = ("sltt", "bptt")


class SNN(nn.Module):
    """Linear layers with LIF neurons between them. x (n, ...) -> the sum over time of the outputs (n, classes); with
    `past`, an `nn.Potentials`, one time step and its output."""

    pull = 0.05  #: the share of the mean squared distance between outputs and ones in the loss

    def __init__(self, *sizes: int, steps: int, backward: str, chosen: int, tau: float, surrogate: str) -> None:
        if backward not in WAYS:
            raise ValueError(f"snn: backward must be {' or '.join(WAYS)}, not {backward!r}")
        if not 0 <= chosen <= steps or (chosen and backward == "bptt"):
            raise ValueError(f"snn: chosen is {chosen}; it says how many of the {steps} time steps have a backward "
                             f"pass, with backward=sltt (default: all)")
        self.input_shape, self.classes, self.time_steps = (sizes[0],), sizes[-1], steps
        self.at_once, self.chosen = backward == "sltt", chosen or steps
        self.layers = nn.ModuleList([nn.Linear(i, o) for i, o in pairwise(sizes)])
        self.neurons = nn.ModuleList([nn.LIF(tau, surrogate) for _ in sizes[2:]])

    def past(self) -> nn.Potentials:
        """The state before the first time step."""
        return nn.Potentials(stop=self.at_once)

    def with_backward(self, micro_batch: int) -> list[int]:
        """The time steps with a backward pass, drawn by (seed, micro-batch)."""
        if self.chosen == self.time_steps:
            return [*range(self.time_steps)]
        drawn = random.generator("time steps", micro_batch).permutation(self.time_steps)
        return sorted(drawn[: self.chosen].tolist())

    def loss(self, loss: Any, output: Any) -> Any:
        """The loss of a time step. Outputs are pulled towards ones, as published."""
        apart = output - 1.0
        return loss * (1 - self.pull) + (apart * apart).mean() * self.pull

    def forward(self, x: Any, past: Any = None) -> Any:
        x = x.flatten(1) if x.ndim > 2 else x
        if past is not None:
            return self._step(x, past)
        past = self.past()
        total = self._step(x, past)
        for _ in range(1, self.time_steps):
            total = total + self._step(x, past)
        return total

    def _step(self, x: Any, past: Any) -> Any:
        *inner, last = self.layers
        for layer, neuron in zip(inner, self.neurons, strict=True):
            x = neuron(layer(x), past)
        return last(x)


@model(tiny={"layers": 2, "hidden": 16, "steps": 3})
def snn(classes: int = 10, image_size: int = 8, layers: int = 3, hidden: int = 128, features: int = 0, steps: int = 6,
        backward: str = "sltt", chosen: int = 0, tau: float = 1.1, surrogate: str = "triangle") -> SNN:
    """`layers` linear layers with LIF neurons between them, on grey images or on rows of `features` numbers."""
    sizes = (features or image_size**2, *[hidden] * (layers - 1), classes)
    network = SNN(*sizes, steps=steps, backward=backward, chosen=chosen, tau=tau, surrogate=surrogate)
    network.input_shape = (features,) if features else (image_size, image_size, 1)
    return network
