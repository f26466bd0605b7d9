"""A network of reversible blocks, whose inputs follow from their outputs (Gomez et al., "The reversible residual
network", 2017): x[k+1] = x[k-1] + F(x[k]), so x[k-1] = x[k+1] - F(x[k])."""

from __future__ import annotations

from typing import Any

from .. import nn
from .registry import model


class Coupling(nn.Module):
    """Two streams (a, b) -> (b, a + F(b)), where F is two linear layers with ReLU between them."""

    def __init__(self, hidden: int) -> None:
        self.first, self.last = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, a: Any, b: Any) -> Any:
        return b, a + self.last(nn.relu(self.first(b)))


class RevNet(nn.Module):
    """x (n, ...) -> logits (n, classes)."""

    def __init__(self, inputs: int, hidden: int, blocks: int, classes: int) -> None:
        self.input_shape, self.classes = (inputs,), classes
        self.left, self.right = nn.Linear(inputs, hidden), nn.Linear(inputs, hidden)
        self.blocks = nn.ModuleList([Coupling(hidden) for _ in range(blocks)])
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Any) -> Any:
        x = x.flatten(1) if x.ndim > 2 else x
        a, b = self.left(x), self.right(x)
        for block in self.blocks:
            a, b = block(a, b)
        return self.head(nn.relu(a + b))


@model(tiny={"blocks": 3, "hidden": 16})
def revnet(classes: int = 10, image_size: int = 8, blocks: int = 8, hidden: int = 64, features: int = 0) -> RevNet:
    """`blocks` reversible blocks of two linear layers, on grey images or on rows of `features` numbers."""
    network = RevNet(features or image_size**2, hidden, blocks, classes)
    network.input_shape = (features,) if features else (image_size, image_size, 1)
    return network
