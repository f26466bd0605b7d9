"""The layers of convolutional networks. Images are (n, h, w, c); `state_dict` shows weights in torch's shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .. import ops
from ..autograd import random
from ..autograd.arguments import Float, OneCount, OneSize, Rate, Size, TwoCounts, TwoSizes
from ..autograd.initial import constant
from ..autograd.op import layout_hint
from ..autograd.tensor import Parameter, ShapeError, Tensor
from ..ops.conv import pair, single
from .module import Module, state


class _Conv(Module):
    """The base of convolutions: parameters uniform in +-1/sqrt(taps * columns / groups)."""

    def _add(self, rows: int, columns: int, taps: tuple[int, ...], groups: int, biases: int, dtype: str) -> None:
        """A weight (rows, taps..., columns / groups), and a bias if there are `biases`."""
        if rows % groups or columns % groups:
            raise ValueError(f"{type(self).__name__}: groups is {groups}; it must divide {columns} and {rows} channels")
        bound = 1 / math.sqrt(columns // groups * math.prod(taps))
        self.weight = Parameter(random.uniform(bound, (rows, *taps, columns // groups), dtype),
                                axes=(0, len(taps) + 1, *range(1, len(taps) + 1)))
        if biases:
            self.bias = Parameter(random.uniform(bound, biases, dtype))


class Conv2d(_Conv):
    """x (n, h, w, inputs) -> (n, oh, ow, outputs). The weight is (outputs, kh, kw, inputs / groups) in memory and
    (outputs, inputs / groups, kh, kw) in a state dict; uniform in +-1/sqrt(taps * inputs / groups), as in torch."""

    def __init__(self, in_channels: Size, out_channels: Size, kernel_size: TwoSizes, stride: TwoSizes = 1,
                 padding: TwoCounts = 0, dilation: TwoSizes = 1, groups: Size = 1, bias: bool = True, *,
                 dtype: Float = "float32") -> None:
        self.stride, self.padding, self.groups = pair(stride, "stride"), pair(padding, "padding", 0), groups
        self.dilation = pair(dilation, "dilation")
        self._add(out_channels, in_channels, pair(kernel_size, "kernel_size"), groups, out_channels * bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return ops.conv2d(x, self.weight, getattr(self, "bias", None), self.stride, self.padding, self.dilation,
                          self.groups)


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


class _Pool2d(Module):
    """Arguments as for the op. `stride`: by default the size of the window."""

    def __init__(self, kernel_size: TwoSizes, stride: TwoSizes | None = None, padding: TwoCounts = 0, *,
                 ceil_mode: bool = False) -> None:
        self.arguments, self.ceil_mode = (kernel_size, stride, padding), ceil_mode


class Dropout2d(Module):
    """Drops whole channels of images (n, h, w, c) with probability `p` while training."""

    def __init__(self, p: Rate = 0.5) -> None:
        self.rate = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * ops.dropout(ops.ones(x.shape[0], 1, 1, x.shape[-1], dtype=x.dtype), self.rate)


class MaxPool2d(_Pool2d):
    """The maximum of each window."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.max_pool2d(x, *self.arguments, ceil_mode=self.ceil_mode)


class AvgPool2d(_Pool2d):
    """The mean of each window, padding counted as zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.avg_pool2d(x, *self.arguments, ceil_mode=self.ceil_mode)


class GlobalAvgPool(Module):
    """(n, h, w, c) -> (n, c)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.global_avg_pool(x)


class Conv1d(_Conv):
    """x (n, length, inputs) -> (n, out, outputs). The weight is (outputs, k, inputs / groups) in memory and
    (outputs, inputs / groups, k) in a state dict."""

    def __init__(self, in_channels: Size, out_channels: Size, kernel_size: OneSize, stride: OneSize = 1,
                 padding: OneCount = 0, dilation: OneSize = 1, groups: Size = 1, bias: bool = True, *,
                 dtype: Float = "float32") -> None:
        self.stride, self.padding = single(stride, "stride"), single(padding, "padding", 0)
        self.dilation, self.groups = single(dilation, "dilation"), groups
        taps = (single(kernel_size, "kernel_size"),)
        self._add(out_channels, in_channels, taps, groups, out_channels * bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return ops.conv1d(x, self.weight, getattr(self, "bias", None), self.stride, self.padding, self.dilation,
                          self.groups)


class ConvTranspose2d(_Conv):
    """x (n, h, w, inputs) -> (n, oh, ow, outputs). The weight is (inputs, kh, kw, outputs / groups) in memory and
    (inputs, outputs / groups, kh, kw) in a state dict."""

    def __init__(self, in_channels: Size, out_channels: Size, kernel_size: TwoSizes,
                 stride: TwoSizes = 1, padding: TwoCounts = 0, output_padding: TwoCounts = 0, groups: Size = 1,
                 bias: bool = True, dilation: TwoSizes = 1, *, dtype: Float = "float32") -> None:
        self.geometry = (stride, padding, output_padding, groups, dilation)
        self._add(in_channels, out_channels, pair(kernel_size, "kernel_size"), groups, out_channels * bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return ops.conv_transpose2d(x, self.weight, getattr(self, "bias", None), *self.geometry)


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


class AdaptiveAvgPool2d(Module):
    """The means of windows that cover the image: `(n, h, w, c) -> (n, *output_size, c)`; None keeps a length."""

    def __init__(self, output_size: Size | tuple[Size | None, Size | None]) -> None:
        self.size = output_size

    def forward(self, x: Tensor) -> Tensor:
        return ops.adaptive_avg_pool2d(x, self.size)


class Upsample(Module):
    """(n, h, w, c) with other rows and columns; arguments as for `ops.interpolate`."""

    def __init__(self, size: TwoSizes | None = None, scale_factor: TwoSizes | None = None,
                 mode: str = "nearest", align_corners: bool | None = None) -> None:
        self.size, self.scale_factor, self.mode, self.align_corners = size, scale_factor, mode, align_corners

    def forward(self, x: Tensor) -> Tensor:
        return ops.interpolate(x, self.size, self.scale_factor, self.mode, self.align_corners)


class ConvTranspose1d(_Conv):
    """x (n, length, inputs) -> (n, out, outputs). The weight is (inputs, k, outputs / groups) in memory and
    (inputs, outputs / groups, k) in a state dict."""

    def __init__(self, in_channels: Size, out_channels: Size, kernel_size: OneSize, stride: OneSize = 1,
                 padding: OneCount = 0, output_padding: OneCount = 0, groups: Size = 1, bias: bool = True,
                 dilation: OneSize = 1,
                 *, dtype: Float = "float32") -> None:
        self.geometry = (stride, padding, output_padding, groups, dilation)
        taps = (single(kernel_size, "kernel_size"),)
        self._add(in_channels, out_channels, taps, groups, out_channels * bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return ops.conv_transpose1d(x, self.weight, getattr(self, "bias", None), *self.geometry)


class _Pool1d(Module):
    """Arguments as for the op. `stride`: by default the size of the window."""

    def __init__(self, kernel_size: OneSize, stride: OneSize | None = None, padding: OneCount = 0, *,
                 ceil_mode: bool = False) -> None:
        self.window, self.stride, self.padding, self.ceil_mode = kernel_size, stride, padding, ceil_mode


class MaxPool1d(_Pool1d):
    """The maximum of each window: (n, length, c) -> (n, out, c)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.max_pool1d(x, self.window, self.stride, self.padding, ceil_mode=self.ceil_mode)


class AvgPool1d(_Pool1d):
    """The mean of each window, padding counted as zeros: (n, length, c) -> (n, out, c)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.avg_pool1d(x, self.window, self.stride, self.padding, ceil_mode=self.ceil_mode)


class AdaptiveAvgPool1d(Module):
    """The means of windows that cover the whole length: `(n, length, c) -> (n, output_size, c)`."""

    def __init__(self, output_size: OneSize) -> None:
        self.size = output_size

    def forward(self, x: Tensor) -> Tensor:
        return ops.adaptive_avg_pool1d(x, self.size)


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


class PixelShuffle(Module):
    """(n, h, w, c r r) -> (n, h r, w r, c), r the `upscale_factor`."""

    def __init__(self, upscale_factor: Size) -> None:
        self.factor = upscale_factor

    def forward(self, x: Tensor) -> Tensor:
        return ops.pixel_shuffle(x, self.factor)
