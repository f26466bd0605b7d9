"""MobileNetV3-Large (Howard et al. 2019), with torchvision's names, so that weights can be exchanged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .. import nn
from .registry import model

Norm = Callable[[int], nn.Module]
#: kernel, expansion, outputs, squeeze and excite, hardswish (else relu), stride
BLOCKS = (
    (3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2), (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2), (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1), (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1), (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1), (5, 960, 160, True, True, 1))


def divisible(channels: float, by: int = 8) -> int:
    """The nearest multiple of `by`, at least `by`, and never more than 10 % below `channels`."""
    nearest = max(by, int(channels + by / 2) // by * by)
    return nearest + by if nearest < 0.9 * channels else nearest


def _convolution(norm: Norm, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1,
                 act: nn.Module | None = None) -> nn.Sequential:
    """Convolution, norm and, if given, activation."""
    layers = [nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False), norm(outputs)]
    return nn.Sequential(*layers, *([act] if act else []))


class _Excite(nn.Module):
    """Squeeze and excite: every channel times a factor computed from the means of all channels."""

    def __init__(self, channels: int) -> None:
        squeezed = divisible(channels // 4)
        self.avgpool = nn.GlobalAvgPool()
        self.fc1, self.fc2 = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)
        self.scale_activation = nn.Hardsigmoid()

    def forward(self, x: Any) -> Any:
        means = self.avgpool(x).reshape(x.shape[0], 1, 1, x.shape[3])
        return x * self.scale_activation(self.fc2(nn.relu(self.fc1(means))))


class _Inverted(nn.Module):
    """Inverted residual: 1x1 to more channels, one filter per channel, 1x1 back; added to the input if shapes agree."""

    def __init__(self, norm: Norm, inputs: int, kernel: int, expanded: int, outputs: int, excite: bool, swish: bool,
                 stride: int) -> None:
        def act() -> nn.Module:
            return nn.Hardswish() if swish else nn.ReLU()

        self.shortcut = stride == 1 and inputs == outputs
        layers: list[nn.Module] = [] if expanded == inputs else [_convolution(norm, inputs, expanded, 1, act=act())]
        layers.append(_convolution(norm, expanded, expanded, kernel, stride, expanded, act()))
        layers += [_Excite(expanded)] if excite else []
        self.block = nn.Sequential(*layers, _convolution(norm, expanded, outputs, 1))

    def forward(self, x: Any) -> Any:
        y = self.block(x)
        return x + y if self.shortcut else y


class MobileNetV3(nn.Module):
    """MobileNetV3. All numbers of channels are multiplied by `width` and rounded to multiples of 8."""

    config = {"architecture": "mobilenetv3_large"}  # timm's

    def __init__(self, classes: int, image_size: int, width: float, eps: float, momentum: float) -> None:
        if not width > 0:
            raise ValueError(f"mobilenet_v3_large: the width is {width}; it must be above 0")
        self.input_shape, self.classes, self.eps = (image_size, image_size, 3), classes, eps
        norm = partial(nn.BatchNorm2d, eps=eps, momentum=momentum)
        inputs = divisible(16 * width)
        layers: list[nn.Module] = [_convolution(norm, 3, inputs, 3, 2, act=nn.Hardswish())]
        for kernel, expanded, outputs, excite, swish, stride in BLOCKS:
            layers.append(_Inverted(norm, inputs, kernel, divisible(expanded * width), divisible(outputs * width),
                                    excite, swish, stride))
            inputs = divisible(outputs * width)
        self.features = nn.Sequential(*layers, _convolution(norm, inputs, 6 * inputs, 1, act=nn.Hardswish()))
        self.avgpool = nn.GlobalAvgPool()
        hidden = divisible(1280 * width)
        self.classifier = nn.Sequential(nn.Linear(6 * inputs, hidden), nn.Hardswish(), nn.Dropout(0.2),
                                        nn.Linear(hidden, classes))

    def forward(self, x: Any) -> Any:
        return self.classifier(self.avgpool(self.features(x)))


FEW_STEPS = {"classes": 10, "momentum": 0.1}  # with 0.01, running statistics are of use after many hundred steps


@model(tiny={**FEW_STEPS, "image_size": 16, "width": 0.15}, small={**FEW_STEPS, "image_size": 32, "width": 0.25})
def mobilenet_v3_large(classes: int = 1000, image_size: int = 224, width: float = 1.0, eps: float = 1e-3,
                       momentum: float = 0.01) -> MobileNetV3:
    """x (n, image_size, image_size, 3) -> logits (n, classes). `eps` is added to the variances, `momentum` moves the
    running statistics: 1e-3 and 0.01 in torchvision, 1e-5 and 0.1 in most of timm's weights."""
    return MobileNetV3(classes, image_size, width, eps, momentum)
