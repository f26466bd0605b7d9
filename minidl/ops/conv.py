"""Convolution over images, channels last in memory."""

from __future__ import annotations

from collections.abc import Sequence

from ..autograd.arguments import TwoCounts, TwoSizes
from ..autograd.op import Layer, layout_hint, same_dtype
from ..autograd.tensor import Tensor
from ..kernels.conv import Geometry
from .windows import along_one_axis, lengths


class Conv2d(Layer):
    """x (n, h, w, c), weight (o, kh, kw, c / groups), bias (o,) -> (n, oh, ow, o)."""

    name = "conv2d"
    precision = "low"

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def forward(self, x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        dtype = same_dtype(self, x, w, *bias)
        groups = self.geometry.groups
        if x.ndim != 4 or w.ndim != 4:
            raise self.error(f"needs an input (n, h, w, c) and a weight (o, kh, kw, c / groups), "
                             f"not {x.shape} and {w.shape}")
        if x.shape[3] != w.shape[3] * groups or w.shape[0] % groups:
            raise self.error(f"input {x.shape} does not fit weight {w.shape} with {groups} groups; expected "
                             f"{w.shape[3] * groups} channels and a multiple of {groups} "
                             f"outputs{layout_hint(x, w.shape[3] * groups)}")
        if not w.size:
            raise self.error(f"the weight {w.shape} has no elements")
        if any(b.shape != w.shape[:1] for b in bias):
            raise self.error(f"bias {bias[0].shape} does not fit weight {w.shape}")
        size = self.geometry.output(x.shape[1:3], w.shape[1:3])
        if min(size) < 1:
            raise self.error(f"the window {w.shape[1:3]}, dilation {self.geometry.dilation}, is larger than the image "
                             f"{x.shape[1:3]} with padding {self.geometry.padding}")
        self.x, self.w, self.bias = self.dense(x), self.dense(w), [self.dense(b) for b in bias]
        return self.out_by("conv2d", [self.x, self.w, *self.bias], [x.shape[0], *size, w.shape[0]], dtype,
                           geometry=self.geometry)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by("conv2d_input_grad", [self.dense(dy), self.w], self.x, size=self.x.shape[1:3],
                            geometry=self.geometry)

    def weights_grad(self, dy: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        grads = [self.grad(t) for t in (self.w, *(self.bias if 2 in wanted else ()))]
        self.call("conv2d_weight_grad", [self.x, self.dense(dy)], grads, taps=self.w.shape[1:3], bias=len(grads) > 1,
                  geometry=self.geometry)
        return dict(enumerate(grads, 1))


def geometry_of(stride: TwoSizes, padding: TwoCounts, dilation: TwoSizes, groups: int) -> Geometry:
    """Numbers, or (vertical, horizontal)."""
    return Geometry(lengths(stride, "stride"), lengths(padding, "padding", 0), lengths(dilation, "dilation"), groups)


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: TwoSizes = 1, padding: TwoCounts = 0,
           dilation: TwoSizes = 1, groups: int = 1) -> Tensor:
    """x (n, h, w, c), weight (o, kh, kw, c / groups), bias (o,) -> (n, oh, ow, o), with
    oh = (h + 2 padding - dilation (kh - 1) - 1) // stride + 1. Numbers, or (vertical, horizontal)."""
    return Conv2d(geometry_of(stride, padding, dilation, groups))(x, weight, *(() if bias is None else (bias,)))


conv1d = along_one_axis(conv2d)
