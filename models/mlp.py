"""A fully connected network."""

from __future__ import annotations

from typing import Any

from minidl import nn


class MLP(nn.Module):
    """Linear layers with ReLU between them; images are flattened."""

    def __init__(self, *sizes: int) -> None:
        if len(sizes) < 2:
            raise ValueError(f"mlp{sizes}: at least an input and an output size are needed")
        self.depth = len(sizes) - 1
        for i, (inputs, outputs) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
            setattr(self, f"layer{i}", nn.Linear(inputs, outputs))

    def forward(self, x: Any) -> Any:
        x = x.flatten() if x.ndim > 2 else x
        for i in range(self.depth):
            x = getattr(self, f"layer{i}")(x)
            if i < self.depth - 1:
                x = nn.relu(x)
        return x


def mlp(*sizes: int) -> MLP:
    """x (n, sizes[0]) or images of that many values -> logits (n, sizes[-1])."""
    return MLP(*sizes)
