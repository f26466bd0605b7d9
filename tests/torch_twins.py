"""The networks again in torch, with the same names and shapes of weights: what ours are compared with.

Importing needs torch. Images are channels last on both sides: `images` gives torch its view of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def images(x: Any) -> Any:
    """An array (n, h, w, c) as torch's (n, c, h, w), channels last in memory, the same bytes."""
    return torch.from_numpy(x).permute(0, 3, 1, 2)


def load(twin: Any, model: Any) -> Any:
    """The twin with the weights and states of one of our models."""
    twin.load_state_dict({name: torch.from_numpy(value) for name, value in model.state_dict().items()}, strict=True)
    return twin


class LeNet(nn.Module):
    def __init__(self, classes: int, image_size: int) -> None:
        super().__init__()
        border = 0 if image_size == 32 else 2
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=border), nn.Conv2d(6, 16, 5)
        with torch.no_grad():
            features = self.features(torch.zeros(1, 1, image_size, image_size)).shape[1]
        self.fc1, self.fc2, self.fc3 = nn.Linear(features, 120), nn.Linear(120, 84), nn.Linear(84, classes)

    def features(self, x: Any) -> Any:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        return F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)

    def forward(self, x: Any) -> Any:
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(self.features(x))))))


class Residual(nn.Module):
    """`kernels`: (size, width) of each convolution; the first of size 3 has the stride."""

    def __init__(self, inputs: int, kernels: Sequence[tuple[int, int]], stride: int) -> None:
        super().__init__()
        self.count, size, strides = len(kernels), inputs, [stride if i == [k for k, _ in kernels].index(3) else 1 for i in range(len(kernels))]
        for i, ((kernel, width), step) in enumerate(zip(kernels, strides, strict=True), 1):
            setattr(self, f"conv{i}", nn.Conv2d(size, width, kernel, step, kernel // 2, bias=False))
            setattr(self, f"bn{i}", nn.BatchNorm2d(width))
            size = width
        if stride > 1 or size != inputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, size, 1, stride, bias=False), nn.BatchNorm2d(size))

    def forward(self, x: Any) -> Any:
        y = x
        for i in range(1, self.count + 1):
            y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
            y = F.relu(y) if i < self.count else y
        return F.relu(y + (self.downsample(x) if hasattr(self, "downsample") else x))


class ResNet(nn.Module):
    def __init__(self, bottleneck: bool, blocks: Sequence[int], width: int, classes: int, small: bool) -> None:
        super().__init__()
        self.small, self.stages, inputs = small, len(blocks), width
        self.conv1 = nn.Conv2d(3, width, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        for i, count in enumerate(blocks):
            w = width << i
            kernels = [(1, w), (3, w), (1, 4 * w)] if bottleneck else [(3, w), (3, w)]
            stage = []
            for j in range(count):
                stage.append(Residual(inputs, kernels, 2 if i > 0 and j == 0 else 1))
                inputs = kernels[-1][1]
            setattr(self, f"layer{i + 1}", nn.Sequential(*stage))
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Any) -> Any:
        x = F.relu(self.bn1(self.conv1(x)))
        x = x if self.small else F.max_pool2d(x, 3, 2, 1)
        for i in range(self.stages):
            x = getattr(self, f"layer{i + 1}")(x)
        return self.fc(x.mean((2, 3)))


STAGES = {"resnet18": (False, (2, 2, 2, 2)), "resnet50": (True, (3, 4, 6, 3)), "resnet101": (True, (3, 4, 23, 3)),
          "resnet152": (True, (3, 8, 36, 3))}


def twin(name: str, arguments: dict[str, Any]) -> Any:
    """The torch network for one of ours; `arguments` are complete."""
    if name == "lenet":
        return LeNet(**arguments)
    if name == "resnet20":
        return ResNet(False, [arguments["layers"]] * 3, arguments["width"], arguments["classes"], True)
    bottleneck, blocks = STAGES[name]
    return ResNet(bottleneck, [min(n, arguments["layers"]) for n in blocks], arguments["width"], arguments["classes"],
                  arguments["image_size"] < 64)
