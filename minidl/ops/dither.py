"""Dithered backprop (Wiedemann, Mehari, Kepp, Samek, 2004.04729): gradients that are mostly zeros.

The gradient of each pre-activation, which is the output of a layer with a weight, is rounded at random to multiples of
s standard deviations. A task Q does this; O and W of the layer read its result, whose expected value is the gradient.
The random numbers are drawn as for dropout: a function of the seed, the draw, the sample and the element, so every
schedule and every layout of ranks rounds alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from ..autograd import tape as tapes
from ..autograd.tensor import FLOATS, Node, Tensor, new
from ..core.graph import Role
from ..core.machine import is_number, shorten
from ..core.tasks import Kind
from .conv import Conv2d
from .conv_transpose import ConvTranspose2d
from .dropout import next_draw
from .linear import Linear, MatMul
from .recurrent import Recurrent

LAYERS = (Linear, MatMul, Conv2d, ConvTranspose2d)  #: ops whose output is a pre-activation


@dataclass
class Dither:
    """The rounding of gradients. `layers`, of eager backward passes alone: the unit's name, its elements, the zeros
    among them before and after, and the multiply-adds of O and W together. A zero saves its share of these."""

    s: float
    layers: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, node: Node, dy: Tensor) -> Tensor:
        """The gradient that O and W of this node read."""
        op, tape = node.op, tapes.current()
        weights = [t for t in node.inputs if t.weight]
        if not self.s or not weights or not isinstance(op, (*LAYERS, Recurrent)):
            return dy
        if isinstance(op, Recurrent):
            raise RuntimeError(f"dither: {op.name} computes the gradients of its pre-activations within one kernel, so "
                               f"nothing can round them; train this network without dither")
        if dy.dtype not in FLOATS:
            raise RuntimeError(f"dither rounds float32 and float64, not {dy.dtype}; train without autocast")
        with tape.task(node.unit, Kind.Q, node.micro_batch):
            dy = op.dense(dy)
            counter, key = next_draw()
            noise = new("noise", dy.shape, dy.dtype, Role.WORKSPACE)
            q = new(f"{dy.storage.name}, rounded", dy.shape, dy.dtype, Role.GRADIENT)
            tape.call("draw", [counter], [noise], shape=dy.shape, dtype=dy.dtype, normal=False, low=0, span=1, **key)
            tape.call("dither", [dy, noise], [q], s=float(self.s))
        if not tape.recording:
            self._count(op, node, weights, dy, q)
        return q

    def _count(self, op: Any, node: Node, weights: list[Tensor], dy: Tensor, q: Tensor) -> None:
        passes = 1 + any(t.requires_grad and not t.weight for t in node.inputs)
        x, w = node.inputs[0].shape, max((t.shape for t in weights), key=prod)
        forward = (prod(x) // x[-1] * prod(w) if isinstance(op, ConvTranspose2d) else
                   q.size * x[-1] if isinstance(op, MatMul) else q.size // q.shape[-1] * prod(w))
        self.layers.append({
            "layer": f"{node.unit} {op.name}", "elements": q.size,
            "zeros_before": q.size - int(np.count_nonzero(dy.numpy())),
            "zeros": q.size - int(np.count_nonzero(q.numpy())),
            "multiply_adds": passes * forward})

    def as_json(self) -> dict[str, Any]:
        """Of all layers together: shares of zeros before and after, and of multiply-adds that zeros save."""
        def share(zeros: str, weight: str) -> float:
            whole = sum(layer[weight] for layer in self.layers)
            return round(sum(layer[zeros] / layer["elements"] * layer[weight] for layer in self.layers) / whole, 4)

        return {"s": self.s, "zeros_before": share("zeros_before", "elements"), "zeros": share("zeros", "elements"),
                "skipped_before": share("zeros_before", "multiply_adds"), "skipped": share("zeros", "multiply_adds"),
                "layers": self.layers}


@contextmanager
def dither(s: float) -> Iterator[Dither]:
    """Backward passes inside round the gradients of pre-activations to multiples of s standard deviations, each layer
    and micro-batch by its own; 0 rounds nothing. Raises ValueError for s below 0; the backward pass raises
    RuntimeError for 16-bit gradients and for recurrent layers."""
    if not is_number(s) or not 0 <= s < float("inf"):
        raise ValueError(f"dither is {shorten(s)}; it must be a number of at least 0")
    with tapes.setting(dither=Dither(s)) as tape:
        yield tape.dither
