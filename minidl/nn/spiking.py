"""Spiking neurons, which read a sample in several time steps and keep a membrane potential between them.

Meng, Xiao, Yan, Wang, Lin, Luo, "Towards memory- and time-efficient backpropagation for training spiking neural
networks" (SLTT, 2302.14311). Each time step multiplies the gradients through time by at most 1 - 1/tau, so little of
them is left; without them (`Potentials(stop=True)`) the backward of a time step can follow its forward, and memory
does not grow with the number of time steps.
"""

from __future__ import annotations

from .. import ops
from ..autograd.tensor import Tensor
from .module import Module

__all__ = ["LIF", "Potentials"]

SURROGATES = ("triangle", "rectangle")


class Potentials:
    """The membrane potentials between the time steps of a batch: one for all calls of a network, as in
    `model(x, potentials)`. `stop`: whether gradients do not flow to earlier time steps. `steps`: time steps so far."""

    def __init__(self, stop: bool = False) -> None:
        self.stop, self.steps = stop, 0
        self._kept: dict[Module, Tensor] = {}

    def before(self, neuron: Module) -> Tensor | None:
        """The neuron's potential after the last time step; None in the first one."""
        v = self._kept.get(neuron)
        return v.detach() if v is not None and self.stop else v

    def keep(self, neuron: Module, v: Tensor) -> None:
        """Sets the neuron's potential after this time step."""
        self._kept[neuron] = v


class LIF(Module):
    """Leaky integrate-and-fire, one time step: x and the potential v before it give u = (1 - 1/tau) v + x, and u = x in
    the first step; spikes s = 1 where u is at least 1, else 0; and the potential u - s. The gradient of a spike toward
    u is max(0, 1 - abs(u - 1)) ("triangle"), or 1 where abs(u - 1) <= 1/2 ("rectangle")."""

    def __init__(self, tau: float = 1.1, surrogate: str = "triangle") -> None:
        if not tau >= 1:
            raise ValueError(f"LIF(tau={tau:g}): tau must be at least 1")
        if surrogate not in SURROGATES:
            raise ValueError(f"LIF(surrogate={surrogate!r}): known surrogates: {', '.join(SURROGATES)}")
        self.left, self.surrogate = 1 - 1 / tau, surrogate

    def forward(self, x: Tensor, potentials: Potentials) -> Tensor:
        v = potentials.before(self)
        u = x if v is None else v * self.left + x
        s = ops.spike(u, self.surrogate)
        potentials.keep(self, u - s)
        return s
