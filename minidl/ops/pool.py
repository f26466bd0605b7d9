"""Maximum and average over windows of an image, channels last."""

from __future__ import annotations

from ..autograd.arguments import TwoCounts, TwoSizes
from ..autograd.op import Op, same_dtype
from ..autograd.tensor import Tensor
from ..kernels.pool import Pair, outputs
from .reduce import mean
from .windows import along_one_axis, lengths


class Pool(Op):
    """x (n, h, w, c) -> (n, oh, ow, c). The forward pass of `max_pool2d` saves which tap had the maximum; the first of
    equal ones gets the gradient."""

    def __init__(self, name: str, window: TwoSizes, stride: TwoSizes | None, padding: TwoCounts,
                 ceil_mode: bool) -> None:
        self.name = name
        self.geometry: dict[str, Pair] = {
            "window": lengths(window, "kernel_size"), "padding": lengths(padding, "padding", 0),
            "stride": lengths(window if stride is None else stride, "stride")}
        self.ceil = bool(ceil_mode)

    def forward(self, x: Tensor) -> Tensor:
        dtype = same_dtype(self, x)
        window, padding = self.geometry["window"], self.geometry["padding"]
        if x.ndim != 4:
            raise self.error(f"needs an image (n, h, w, c), not {x.shape}")
        if any(2 * p > w for p, w in zip(padding, window, strict=True)):
            raise self.error(f"padding {padding} is more than half of the window {window}")
        size = outputs(x.shape[1:3], **self.geometry, ceil=self.ceil)
        if min(size) < 1:
            raise self.error(f"the window {window} is larger than the image {x.shape[1:3]} with padding {padding}")
        self.x = self.dense(x)
        y = self.out([x.shape[0], *size, x.shape[3]], dtype)
        self.kept = [self.out(y.shape, "int32")] if self.name == "max_pool2d" else []
        return self.call(self.name, [self.x], [y, *self.kept], **self.geometry, ceil=self.ceil)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by(f"{self.name}_grad", [*self.kept, self.dense(dy)], self.x, size=self.x.shape[1:3],
                            **self.geometry)


def max_pool2d(x: Tensor, kernel_size: TwoSizes, stride: TwoSizes | None = None, padding: TwoCounts = 0, *,
               ceil_mode: bool = False) -> Tensor:
    """The maximum of each window: x (n, h, w, c) -> (n, oh, ow, c). `stride`: by default the size of the window.
    `padding`: at most half of the window. `ceil_mode`: the last windows may reach beyond the image and its padding, so
    that none of it is left out."""
    return Pool("max_pool2d", kernel_size, stride, padding, ceil_mode)(x)


def avg_pool2d(x: Tensor, kernel_size: TwoSizes, stride: TwoSizes | None = None, padding: TwoCounts = 0, *,
               ceil_mode: bool = False) -> Tensor:
    """The mean of each window, padding counted as zeros: x (n, h, w, c) -> (n, oh, ow, c). `stride`: by default the
    size of the window. `ceil_mode`: the last windows may reach beyond the image and its padding, so that none of it is
    left out; they are means of fewer values."""
    return Pool("avg_pool2d", kernel_size, stride, padding, ceil_mode)(x)


max_pool1d, avg_pool1d = along_one_axis(max_pool2d), along_one_axis(avg_pool2d)


def global_avg_pool(x: Tensor, keepdims: bool = False) -> Tensor:
    """The mean of each channel: (n, h, w, c) -> (n, c), or (n, 1, 1, c)."""
    return mean(x, axis=(1, 2), keepdims=keepdims)
