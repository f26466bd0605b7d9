"""Densely connected networks (Huang et al. 2017), with torchvision's names, so that weights can be exchanged.

The features of a dense block lie in one slab with room for all of them: a layer writes its own features after the
earlier ones, which are not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import nn
from .registry import model

BOTTLENECK = 4  #: channels between the two convolutions of a layer, as a multiple of the growth


class _Layer(nn.Module):
    """Norm, relu, 1x1, norm, relu, 3x3: `growth` new features."""

    def __init__(self, inputs: int, growth: int) -> None:
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, BOTTLENECK * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(BOTTLENECK * growth)
        self.conv2 = nn.Conv2d(BOTTLENECK * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Any) -> Any:
        return self.conv2(nn.relu(self.norm2(self.conv1(nn.relu(self.norm1(x))))))


class _Block(nn.Module):
    """Each layer reads the block's input and the features of all earlier layers."""

    def __init__(self, layers: int, inputs: int, growth: int) -> None:
        self.layers, self.outputs = layers, inputs + layers * growth
        for i in range(layers):
            setattr(self, f"denselayer{i + 1}", _Layer(inputs + i * growth, growth))

    def forward(self, x: Any) -> Any:
        for i in range(self.layers):
            x = nn.concat([x, getattr(self, f"denselayer{i + 1}")(x)], axis=3, room=self.outputs)
        return x


class _Transition(nn.Module):
    """Half the features, half the lines and columns."""

    def __init__(self, inputs: int) -> None:
        self.norm, self.conv = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, inputs // 2, 1, bias=False)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Any) -> Any:
        return self.pool(self.conv(nn.relu(self.norm(x))))


class _Features(nn.Module):
    def __init__(self, blocks: Sequence[int], growth: int, small: bool) -> None:
        self.small, self.blocks, channels = small, len(blocks), 2 * growth
        kernel, stride, padding = (3, 1, 1) if small else (7, 2, 3)
        self.conv0 = nn.Conv2d(3, channels, kernel, stride, padding, bias=False)
        if not small:
            self.norm0, self.pool0 = nn.BatchNorm2d(channels), nn.MaxPool2d(3, 2, 1)
        for i, layers in enumerate(blocks):
            block = _Block(layers, channels, growth)
            setattr(self, f"denseblock{i + 1}", block)
            channels = block.outputs
            if i < len(blocks) - 1:
                setattr(self, f"transition{i + 1}", _Transition(channels))
                channels //= 2
        self.outputs = channels
        setattr(self, f"norm{len(blocks) + 1}", nn.BatchNorm2d(channels))

    def forward(self, x: Any) -> Any:
        x = self.conv0(x)
        if not self.small:
            x = self.pool0(nn.relu(self.norm0(x)))
        for i in range(self.blocks):
            x = getattr(self, f"denseblock{i + 1}")(x)
            if i < self.blocks - 1:
                x = getattr(self, f"transition{i + 1}")(x)
        return nn.relu(getattr(self, f"norm{self.blocks + 1}")(x))


class DenseNet(nn.Module):
    """`blocks[i]` layers in block i, with `growth` features each; the stem has twice as many. For images below 64
    pixels the stem is a 3x3 convolution, for larger ones a 7x7 of stride 2 and pooling."""

    config = {"architecture": "densenet"}  # timm's

    def __init__(self, blocks: Sequence[int], growth: int, classes: int, image_size: int) -> None:
        if image_size < 8:
            raise ValueError(f"densenet: images of {image_size} pixels are too small; the least is 8")
        self.input_shape, self.classes = (image_size, image_size, 3), classes
        self.features = _Features(blocks, growth, image_size < 64)
        self.avgpool = nn.GlobalAvgPool()
        self.classifier = nn.Linear(self.features.outputs, classes)

    def forward(self, x: Any) -> Any:
        return self.classifier(self.avgpool(self.features(x)))


def _define(name: str, blocks: Sequence[int]) -> Callable[..., nn.Module]:
    """Four blocks; `layers` limits the layers of a block."""

    def build(classes: int = 1000, image_size: int = 224, growth: int = 32, layers: int = max(blocks)) -> DenseNet:
        return DenseNet([min(n, layers) for n in blocks], growth, classes, image_size)

    return model(name, tiny={"classes": 10, "image_size": 8, "growth": 4, "layers": 2},
                 small={"classes": 10, "image_size": 32, "growth": 12})(build)


densenet121 = _define("densenet121", (6, 12, 24, 16))
densenet169 = _define("densenet169", (6, 12, 32, 32))
