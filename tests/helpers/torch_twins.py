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


class MLP(nn.Module):
    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.depth = len(sizes) - 1
        for i in range(self.depth):
            setattr(self, f"layer{i}", nn.Linear(sizes[i], sizes[i + 1]))

    def forward(self, x: Any) -> Any:
        x = x.flatten(1)
        for i in range(self.depth - 1):
            x = F.relu(getattr(self, f"layer{i}")(x))
        return getattr(self, f"layer{self.depth - 1}")(x)


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
        first = [k for k, _ in kernels].index(3)
        self.count, size, strides = len(kernels), inputs, [stride if i == first else 1 for i in range(len(kernels))]
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


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Any) -> Any:
        return torch.cat([x, self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))], 1)


class DenseNet(nn.Module):
    def __init__(self, blocks: Sequence[int], growth: int, classes: int, small: bool) -> None:
        super().__init__()
        f, channels = nn.Sequential(), 2 * growth
        f.add_module("conv0",
                     nn.Conv2d(3, channels, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False))
        stem = [("norm0", nn.BatchNorm2d(channels)), ("relu0", nn.ReLU()), ("pool0", nn.MaxPool2d(3, 2, 1))]
        for name, layer in [] if small else stem:
            f.add_module(name, layer)
        for i, count in enumerate(blocks, 1):
            block = nn.Sequential()
            for j in range(count):
                block.add_module(f"denselayer{j + 1}", DenseLayer(channels + j * growth, growth))
            f.add_module(f"denseblock{i}", block)
            channels += count * growth
            if i < len(blocks):
                transition = nn.Sequential()
                halve = nn.Conv2d(channels, channels // 2, 1, bias=False)
                layers = {"norm": nn.BatchNorm2d(channels), "relu": nn.ReLU(), "conv": halve, "pool": nn.AvgPool2d(2)}
                for name, layer in layers.items():
                    transition.add_module(name, layer)
                f.add_module(f"transition{i}", transition)
                channels //= 2
        f.add_module("norm5", nn.BatchNorm2d(channels))
        self.features, self.classifier = f, nn.Linear(channels, classes)

    def forward(self, x: Any) -> Any:
        return self.classifier(F.relu(self.features(x)).mean((2, 3)))


def divisible(channels: float) -> int:
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


class Unit(nn.Sequential):
    def __init__(self, i: int, o: int, k: int, stride: int = 1, groups: int = 1, act: Any = None) -> None:
        layers = [nn.Conv2d(i, o, k, stride, k // 2, groups=groups, bias=False),
                  nn.BatchNorm2d(o, eps=1e-3, momentum=0.01)]
        super().__init__(*layers, *([act()] if act else []))


class Excite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        middle = divisible(channels // 4)
        self.fc1, self.fc2 = nn.Conv2d(channels, middle, 1), nn.Conv2d(middle, channels, 1)

    def forward(self, x: Any) -> Any:
        return x * F.hardsigmoid(self.fc2(F.relu(self.fc1(x.mean((2, 3), keepdim=True)))))


class Inverted(nn.Module):
    def __init__(self, i: int, k: int, e: int, o: int, excite: bool, swish: bool, stride: int) -> None:
        super().__init__()
        act = nn.Hardswish if swish else nn.ReLU
        layers = [Unit(i, e, 1, act=act)] if e != i else []
        layers.append(Unit(e, e, k, stride, e, act))
        layers += [Excite(e)] if excite else []
        self.block, self.same = nn.Sequential(*layers, Unit(e, o, 1)), stride == 1 and i == o

    def forward(self, x: Any) -> Any:
        return x + self.block(x) if self.same else self.block(x)


class MobileNetV3(nn.Module):
    """Without dropout, whose draws are not ours."""

    def __init__(self, width: float, classes: int) -> None:
        super().__init__()
        table = [(3, 16, 16, 0, 0, 1), (3, 64, 24, 0, 0, 2), (3, 72, 24, 0, 0, 1), (5, 72, 40, 1, 0, 2),
                 (5, 120, 40, 1, 0, 1), (5, 120, 40, 1, 0, 1), (3, 240, 80, 0, 1, 2), (3, 200, 80, 0, 1, 1),
                 (3, 184, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1), (3, 480, 112, 1, 1, 1), (3, 672, 112, 1, 1, 1),
                 (5, 672, 160, 1, 1, 2), (5, 960, 160, 1, 1, 1), (5, 960, 160, 1, 1, 1)]
        i = divisible(16 * width)
        layers: list[Any] = [Unit(3, i, 3, 2, act=nn.Hardswish)]
        for k, e, o, excite, swish, stride in table:
            layers.append(Inverted(i, k, divisible(e * width), divisible(o * width), bool(excite), bool(swish), stride))
            i = divisible(o * width)
        self.features = nn.Sequential(*layers, Unit(i, 6 * i, 1, act=nn.Hardswish))
        hidden = divisible(1280 * width)
        self.classifier = nn.Sequential(nn.Linear(6 * i, hidden), nn.Hardswish(), nn.Identity(),
                                        nn.Linear(hidden, classes))

    def forward(self, x: Any) -> Any:
        return self.classifier(self.features(x).mean((2, 3)))


BLOCKS = {"densenet121": (6, 12, 24, 16), "densenet169": (6, 12, 32, 32)}
STAGES = {"resnet18": (False, (2, 2, 2, 2)), "resnet50": (True, (3, 4, 6, 3)), "resnet101": (True, (3, 4, 23, 3)),
          "resnet152": (True, (3, 8, 36, 3))}


def twin(name: str, arguments: dict[str, Any]) -> Any:
    """The torch network for one of ours; `arguments` are complete."""
    if name == "mlp":
        hidden = [arguments["hidden"]] * (arguments["layers"] - 1)
        return MLP([arguments["features"] or arguments["image_size"] ** 2, *hidden, arguments["classes"]])
    if name == "lenet":
        return LeNet(**arguments)
    if name == "resnet20":
        return ResNet(False, [arguments["layers"]] * 3, arguments["width"], arguments["classes"], True)
    if name in BLOCKS:
        return DenseNet([min(n, arguments["layers"]) for n in BLOCKS[name]], arguments["growth"], arguments["classes"],
                        arguments["image_size"] < 64)
    if name == "mobilenet_v3_large":
        return MobileNetV3(arguments["width"], arguments["classes"])
    bottleneck, blocks = STAGES[name]
    return ResNet(bottleneck, [min(n, arguments["layers"]) for n in blocks], arguments["width"], arguments["classes"],
                  arguments["image_size"] < 64)
