"""Residual networks (He et al. 2016), with torchvision's strides and names, so that weights can be exchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import nn
from .registry import model


class _Block(nn.Module):
    """Convolutions with batch norm, added to the input, or to its projection where the shape changes."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        self.convolutions(inputs, width, stride)
        outputs = width * self.expansion
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def convolutions(self, inputs: int, width: int, stride: int) -> None:
        raise NotImplementedError

    def residual(self, x: Any) -> Any:
        raise NotImplementedError

    def forward(self, x: Any) -> Any:
        shortcut = self.downsample(x) if hasattr(self, "downsample") else x
        return nn.relu(self.residual(x) + shortcut)


class BasicBlock(_Block):
    """3x3, 3x3."""

    def convolutions(self, inputs: int, width: int, stride: int) -> None:
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)

    def residual(self, x: Any) -> Any:
        return self.bn2(self.conv2(nn.relu(self.bn1(self.conv1(x)))))


class Bottleneck(_Block):
    """1x1, 3x3 (which has the stride), 1x1 to four times the width."""

    expansion = 4

    def convolutions(self, inputs: int, width: int, stride: int) -> None:
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)

    def residual(self, x: Any) -> Any:
        x = nn.relu(self.bn2(self.conv2(nn.relu(self.bn1(self.conv1(x))))))
        return self.bn3(self.conv3(x))


class ResNet(nn.Module):
    """`blocks[i]` blocks of width `width * 2**i` in stage i. The stem is a 7x7 of stride 2 and pooling for large
    images, and a 3x3 for small ones."""

    config = {"architecture": "resnet"}  # timm's

    def __init__(self, block: type[_Block], blocks: Sequence[int], width: int, classes: int, image_size: int,
                 small: bool) -> None:
        self.input_shape, self.classes, self.stages = (image_size, image_size, 3), classes, len(blocks)
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False) if small else nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Sequential() if small else nn.MaxPool2d(3, 2, 1)
        inputs = width
        for i, count in enumerate(blocks):
            stage = [block(inputs if j == 0 else width * 2**i * block.expansion, width * 2**i, 2 if i and j == 0 else 1)
                     for j in range(count)]
            setattr(self, f"layer{i + 1}", nn.Sequential(*stage))
            inputs = width * 2**i * block.expansion
        self.avgpool = nn.GlobalAvgPool()
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Any) -> Any:
        x = self.maxpool(nn.relu(self.bn1(self.conv1(x))))
        for i in range(self.stages):
            x = getattr(self, f"layer{i + 1}")(x)
        return self.fc(self.avgpool(x))


@model(tiny={"image_size": 8, "width": 4, "layers": 1})
def resnet20(classes: int = 10, image_size: int = 32, width: int = 16, layers: int = 3) -> ResNet:
    """For small images: three stages of `layers` basic blocks, which makes 6 `layers` + 2 layers in all."""
    return ResNet(BasicBlock, [layers] * 3, width, classes, image_size, small=True)


def _define(name: str, block: type[_Block], blocks: Sequence[int]) -> Callable[..., nn.Module]:
    """Four stages; `layers` limits the blocks of a stage. Images below 64 pixels start with a 3x3 and no pooling."""

    def build(classes: int = 1000, image_size: int = 224, width: int = 64, layers: int = max(blocks)) -> ResNet:
        return ResNet(block, [min(n, layers) for n in blocks], width, classes, image_size, small=image_size < 64)

    return model(name, tiny={"classes": 10, "image_size": 16, "width": 4, "layers": 1})(build)


resnet18 = _define("resnet18", BasicBlock, (2, 2, 2, 2))
resnet50 = _define("resnet50", Bottleneck, (3, 4, 6, 3))
resnet101 = _define("resnet101", Bottleneck, (3, 4, 23, 3))
resnet152 = _define("resnet152", Bottleneck, (3, 8, 36, 3))
