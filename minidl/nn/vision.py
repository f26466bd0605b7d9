"""The layers of convolutional networks. Images are (n, h, w, c); `state_dict` shows weights in torch's shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import ops
from ..autograd import random
from ..autograd.arguments import Float, Size, TwoCounts, TwoSizes
from ..autograd.initial import constant
from ..autograd.op import layout_hint
from ..autograd.tensor import Parameter, ShapeError, Tensor
from ..ops.windows import lengths
from .activations import layer
from .module import Dropout, Module, state

__all__ = ["AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AvgPool1d", "AvgPool2d", "BatchNorm1d", "BatchNorm2d",
           "Conv1d", "Conv2d", "ConvTranspose1d", "ConvTranspose2d", "Dropout2d", "GlobalAvgPool", "GroupNorm",
           "InstanceNorm2d", "MaxPool1d", "MaxPool2d", "PixelShuffle", "Upsample", "ZeroPad2d"]


class Conv2d(Module):
    """x (n, h, w, inputs) -> (n, oh, ow, outputs). The weight is (outputs, kh, kw, inputs / groups) in memory and
    (outputs, inputs / groups, kh, kw) in a state dict; uniform in +-1/sqrt(taps * inputs / groups), as in torch."""

    op: Callable[..., Tensor] = staticmethod(ops.conv2d)
    axes = 2

    def __init__(self, in_channels: Size, out_channels: Size, kernel_size: TwoSizes, stride: TwoSizes = 1,
                 padding: TwoCounts = 0, dilation: TwoSizes = 1, groups: Size = 1, bias: bool = True, *,
                 dtype: Float = "float32") -> None:
        self._add(out_channels, in_channels, kernel_size, groups, out_channels * bias, dtype)
        self.geometry = self._numbers(stride=stride, padding=padding, dilation=dilation) | {"groups": groups}

    def _numbers(self, **given: Any) -> dict[str, Any]:
        return {name: lengths(value, f"{type(self).__name__}: {name}", int("padding" not in name), self.axes)
                for name, value in given.items()}

    def _add(self, rows: int, columns: int, kernel_size: Any, groups: int, biases: int, dtype: str) -> None:
        """A weight (rows, taps..., columns / groups), and a bias if there are `biases`."""
        (taps,) = self._numbers(kernel_size=kernel_size).values()
        if rows % groups or columns % groups:
            raise ValueError(f"{type(self).__name__}: groups is {groups}; it must divide {columns} and {rows} channels")
        bound = 1 / math.sqrt(columns // groups * math.prod(taps))
        self.weight = Parameter(random.uniform(bound, (rows, *taps, columns // groups), dtype),
                                axes=(0, len(taps) + 1, *range(1, len(taps) + 1)))
        if biases:
            self.bias = Parameter(random.uniform(bound, biases, dtype))

    def forward(self, x: Tensor) -> Tensor:
        return type(self).op(x, self.weight, getattr(self, "bias", None), **self.geometry)


class Conv1d(Conv2d):
    """x (n, length, inputs) -> (n, out, outputs); the weight lacks kh."""

    op, axes = staticmethod(ops.conv1d), 1


class ConvTranspose2d(Conv2d):
    """x (n, h, w, inputs) -> (n, oh, ow, outputs). The weight is (inputs, kh, kw, outputs / groups) in memory and
    (inputs, outputs / groups, kh, kw) in a state dict."""

    op = staticmethod(ops.conv_transpose2d)

    def __init__(self, in_channels: Size, out_channels: Size, kernel_size: TwoSizes, stride: TwoSizes = 1,
                 padding: TwoCounts = 0, output_padding: TwoCounts = 0, groups: Size = 1, bias: bool = True,
                 dilation: TwoSizes = 1, *, dtype: Float = "float32") -> None:
        self._add(in_channels, out_channels, kernel_size, groups, out_channels * bias, dtype)
        self.geometry = self._numbers(stride=stride, padding=padding, output_padding=output_padding,
                                      dilation=dilation) | {"groups": groups}


class ConvTranspose1d(ConvTranspose2d):
    """x (n, length, inputs) -> (n, out, outputs); the weight lacks kh."""

    op, axes = staticmethod(ops.conv_transpose1d), 1


class _BatchNorm(Module):
    """Normalises over all axes but the last, which holds the channels."""

    axes: tuple[int, ...] = ()

    def __init__(self, num_features: Size, eps: float = 1e-5, momentum: float = 0.1, *,
                 dtype: Float = "float32") -> None:
        self.eps, self.momentum = eps, momentum
        self.weight = Parameter(constant(1, num_features, dtype))
        self.bias = Parameter(constant(0, num_features, dtype))
        self.running_mean = state(np.zeros(num_features, dtype), "running_mean")
        self.running_var = state(np.ones(num_features, dtype), "running_var")
        self.num_batches_tracked = state(np.zeros((), np.int64), "num_batches_tracked")

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim not in self.axes:
            known = " or ".join(map(str, self.axes))
            raise ShapeError(f"{type(self).__name__} needs {known} axes, not shape {x.shape}")
        running = (self.running_mean, self.running_var, self.num_batches_tracked)
        return ops.batch_norm(x, self.weight, self.bias, running, training=self.training, momentum=self.momentum,
                              eps=self.eps)


class BatchNorm1d(_BatchNorm):
    """x (n, c) or (n, length, c)."""

    axes = (2, 3)


class BatchNorm2d(_BatchNorm):
    """x (n, h, w, c)."""

    axes = (4,)


class Dropout2d(Dropout):
    """Drops whole channels of images (n, h, w, c) with probability `p` while training."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * ops.dropout(ops.ones(x.shape[0], 1, 1, x.shape[-1], dtype=x.dtype), self.p)


class GroupNorm(Module):
    """x (n, ..., channels): each sample's channels in equal groups, each normalised over its places and channels."""

    def __init__(self, num_groups: Size, num_channels: Size, eps: float = 1e-5, affine: bool = True,
                 *, dtype: Float = "float32") -> None:
        if num_channels % num_groups:
            raise ValueError(f"GroupNorm({num_groups}, {num_channels}): the groups must divide the channels")
        self.groups, self.channels, self.eps = num_groups, num_channels, eps
        if affine:
            self.weight = Parameter(constant(1, num_channels, dtype))
            self.bias = Parameter(constant(0, num_channels, dtype))

    def forward(self, x: Tensor) -> Tensor:
        if not x.ndim or x.shape[-1] != self.channels:
            raise ShapeError(f"{type(self).__name__}: input {x.shape} does not end in {self.channels} channels"
                             f"{layout_hint(x, self.channels)}")
        return ops.group_norm(x, self.groups, getattr(self, "weight", None), getattr(self, "bias", None), self.eps)


class InstanceNorm2d(GroupNorm):
    """x (n, h, w, channels): each channel of each sample normalised over its places; no running statistics."""

    def __init__(self, num_features: Size, eps: float = 1e-5, *, affine: bool = False,
                 dtype: Float = "float32") -> None:
        super().__init__(num_features, num_features, eps, affine, dtype=dtype)


class ZeroPad2d(Module):
    """Zeros around images (n, h, w, c): `padding` on all sides, or (left, right, top, bottom)."""

    def __init__(self, padding: int | Sequence[int]) -> None:
        self.padding = tuple(padding) if isinstance(padding, Sequence) else (padding,) * 4
        if len(self.padding) != 4:
            raise ValueError(f"ZeroPad2d: padding is {padding}; give one number, or four: left, right, top, bottom")

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4:
            raise ShapeError(f"ZeroPad2d: an image (n, h, w, c) is needed, not {x.shape}")
        return ops.pad(x, (0, 0, *self.padding))


AdaptiveAvgPool1d = layer("AdaptiveAvgPool1d", ops.adaptive_avg_pool1d)
AdaptiveAvgPool2d = layer("AdaptiveAvgPool2d", ops.adaptive_avg_pool2d)
AvgPool1d = layer("AvgPool1d", ops.avg_pool1d)
AvgPool2d = layer("AvgPool2d", ops.avg_pool2d)
GlobalAvgPool = layer("GlobalAvgPool", ops.global_avg_pool)
MaxPool1d = layer("MaxPool1d", ops.max_pool1d)
MaxPool2d = layer("MaxPool2d", ops.max_pool2d)
PixelShuffle = layer("PixelShuffle", ops.pixel_shuffle)
Upsample = layer("Upsample", ops.interpolate)
