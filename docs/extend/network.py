"""A new network: a function with defaults for all its arguments. Use it as `--model network.py:wide`."""

import math

from minidl import models, nn
from minidl.models.registry import model


class Wide(nn.Module):
    """Two linear layers. `input_shape` (of one sample) and `classes` say which data it needs; `objective`, which is
    classification unless you set it, what it is trained for."""

    def __init__(self, width, classes):
        self.input_shape, self.classes = (8, 8, 1), classes
        self.first = nn.Linear(math.prod(self.input_shape), width)
        self.second = nn.Linear(width, classes)

    def forward(self, x):
        return self.second(nn.relu(self.first(x.reshape(x.shape[0], -1))))


@model(tiny={"width": 8})  # a name for everybody who imports this, with a preset
def wide(width=128, classes=10):
    return Wide(width, classes)


if __name__ == "__main__":
    print(models.create("wide", width=32))
