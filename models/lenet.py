"""LeNet-5 (LeCun et al. 1998) as it is used today: ReLU and maximum pooling."""

from __future__ import annotations

from typing import Any

from .. import nn
from .registry import model


class LeNet(nn.Module):
    """For grey images. Images of 32 pixels are used as they are; others, such as MNIST's of 28, are padded by 2."""

    def __init__(self, classes: int, image_size: int) -> None:
        self.input_shape, self.classes = (image_size, image_size, 1), classes
        border = 0 if image_size == 32 else 2
        side = ((image_size + 2 * border - 4) // 2 - 4) // 2
        if side < 1:
            raise ValueError(f"lenet: images of {image_size} pixels are too small; the least is 12")
        self.conv1 = nn.Conv2d(1, 6, 5, padding=border)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(16 * side * side, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Any) -> Any:
        x = self.pool(nn.relu(self.conv1(x)))
        x = self.pool(nn.relu(self.conv2(x)))
        x = x.transpose(0, 3, 1, 2).flatten(1)  # channels first, as in the usual layout of fc1's weights
        return self.fc3(nn.relu(self.fc2(nn.relu(self.fc1(x)))))


@model(tiny={"image_size": 12})
def lenet(classes: int = 10, image_size: int = 28) -> LeNet:
    """x (n, image_size, image_size, 1) -> logits (n, classes)."""
    return LeNet(classes, image_size)
