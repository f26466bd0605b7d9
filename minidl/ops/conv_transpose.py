"""Transposed convolution, on the kernels of `conv2d`."""

from __future__ import annotations

from collections.abc import Sequence

from ..autograd.arguments import TwoCounts, TwoSizes
from ..autograd.op import Layer, layout_hint, same_dtype
from ..autograd.tensor import Tensor
from ..kernels.conv import Geometry
from .conv import geometry_of
from .windows import along_one_axis, lengths


class ConvTranspose2d(Layer):
    """x (n, h, w, c), weight (c, kh, kw, o / groups), bias (o,) -> (n, oh, ow, o). It is the gradient of a convolution
    from y to x toward y, so its own gradient toward x is that convolution."""

    name = "conv_transpose2d"
    precision = "low"

    def __init__(self, geometry: Geometry, extra: tuple[int, int]) -> None:
        self.geometry, self.extra = geometry, extra

    def forward(self, x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        dtype, groups = same_dtype(self, x, w, *bias), self.geometry.groups
        if x.ndim != 4 or w.ndim != 4:
            raise self.error(f"needs an input (n, h, w, c) and a weight (c, kh, kw, o / groups), "
                             f"not {x.shape} and {w.shape}")
        if x.shape[3] != w.shape[0] or w.shape[0] % groups or not w.size:
            raise self.error(f"input {x.shape} does not fit weight {w.shape} with {groups} groups; expected "
                             f"{w.shape[0]} channels{layout_hint(x, w.shape[0])}")
        outputs = w.shape[3] * groups
        if any(b.shape != (outputs,) for b in bias):
            raise self.error(f"bias {bias[0].shape} does not fit weight {w.shape}")
        stride, padding, dilation, _ = self.geometry
        if any(e >= s for e, s in zip(self.extra, stride, strict=True)):
            raise self.error(f"the output padding {self.extra} must be below the stride {stride}, or the convolution "
                             f"back has more rows than the input")
        self.size = tuple((n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, s, p, d, k, e in zip(
            x.shape[1:3], stride, padding, dilation, w.shape[1:3], self.extra, strict=True))
        if min(self.size) < 1:
            raise self.error(f"the output would have the size {self.size}; the padding {padding} is too large")
        self.x, self.w, self.bias = self.dense(x), self.dense(w), bias
        y = self.out([x.shape[0], *self.size, outputs], dtype)
        self.call("conv2d_input_grad", [self.x, self.w], [y], size=self.size, geometry=self.geometry)
        for b in bias:
            self.call("add", [y, b], [y])
        return y

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by("conv2d", [self.dense(dy), self.w], self.x, geometry=self.geometry)

    def weights_grad(self, dy: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        found, dy = {}, self.dense(dy)
        if 1 in wanted:
            found[1] = self.grad_by("conv2d_weight_grad", [dy, self.x], self.w, taps=self.w.shape[1:3], bias=False,
                                    geometry=self.geometry)
        if 2 in wanted:
            found[2] = self.grad(self.bias[0])
            self.call("sum", [dy], [found[2].seen([1, 1, 1, found[2].size])], axes=(0, 1, 2))
        return found


def conv_transpose2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: TwoSizes = 1,
                     padding: TwoCounts = 0, output_padding: TwoCounts = 0, groups: int = 1,
                     dilation: TwoSizes = 1) -> Tensor:
    """x (n, h, w, c), weight (c, kh, kw, o / groups), bias (o,) -> (n, oh, ow, o), with
    oh = (h - 1) stride - 2 padding + dilation (kh - 1) + output_padding + 1. Numbers, or (vertical, horizontal)."""
    op = ConvTranspose2d(geometry_of(stride, padding, dilation, groups), lengths(output_padding, "output_padding", 0))
    return op(x, weight, *(() if bias is None else (bias,)))


conv_transpose1d = along_one_axis(conv_transpose2d)
