"""A fully connected network."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from .. import nn
from .registry import model


class MLP(nn.Module):
    """Linear layers with ReLU between them; images are flattened."""

    def __init__(self, *sizes: int) -> None:
        if len(sizes) < 2:
            raise ValueError(f"mlp{sizes}: at least an input and an output size are needed")
        self.depth = len(sizes) - 1
        self.input_shape: tuple[int, ...] = (sizes[0],)
        self.classes = sizes[-1]
        for i, (inputs, outputs) in enumerate(pairwise(sizes)):
            setattr(self, f"layer{i}", nn.Linear(inputs, outputs))

    def forward(self, x: Any) -> Any:
        x = x.flatten(1) if x.ndim > 2 else x
        for i in range(self.depth):
            x = getattr(self, f"layer{i}")(x)
            if i < self.depth - 1:
                x = nn.relu(x)
        return x


def mlp(*sizes: int) -> MLP:
    """x (n, sizes[0]) or images of that many values -> logits (n, sizes[-1])."""
    return MLP(*sizes)


@model("mlp", tiny={"layers": 2, "hidden": 16})
def _mlp(classes: int = 10, image_size: int = 8, layers: int = 3, hidden: int = 256, features: int = 0) -> MLP:
    """`layers` linear layers on grey images of image_size x image_size, or on rows of `features` numbers."""
    return _on(features, image_size, *[hidden] * (layers - 1), classes)


@model("mlp_large", tiny={"layers": 2, "hidden": 16})
def _large(classes: int = 10, image_size: int = 8, layers: int = 4, hidden: int = 1024,
           features: int = 0) -> nn.Module:
    """An `mlp` whose tasks are long enough that two streams can gain: the network of `train` and `compare` if none is
    given."""
    return _mlp(classes, image_size, layers, hidden, features)


def _on(features: int, image_size: int, *sizes: int) -> MLP:
    network = MLP(features or image_size**2, *sizes)
    network.input_shape = (features,) if features else (image_size, image_size, 1)
    return network


@model(tiny={"layers": 4, "hidden": 16})
def ffnn(classes: int = 10, image_size: int = 28, layers: int = 4, hidden: int = 1024, features: int = 0) -> MLP:
    """The feed-forward network of the pipeline experiments of out-of-order backprop: `layers` layers of `hidden` units
    and the layer of the classes. Reconstructed: its source could not be read. The first values of the weights keep the
    size of activations over many layers (He and others 2015)."""
    network = _on(features, image_size, *[hidden] * layers, classes)
    for name, p in network.named_parameters():
        if name.endswith("weight"):
            nn.init.kaiming_uniform_(p, nonlinearity="relu")
        else:
            nn.init.zeros_(p)
    return network
