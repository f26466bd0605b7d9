"""Batch norm. Its output gradient needs the sums that are its weight gradient, so an edge puts W before O."""

from __future__ import annotations

from collections.abc import Sequence

from ..autograd import tape as tapes
from ..autograd.op import Op, layout_hint, statistics_dtype
from ..autograd.tensor import Tensor


class BatchNorm(Op):
    """x (..., c), weight and bias (c,). `running`: mean and variance (c,) and the count of batches (); the forward task
    changes them while training, and `training=False` uses them instead. All but x are float32 where x has 16 bits."""

    name = "batch_norm"

    def __init__(self, running: Sequence[Tensor], training: bool, momentum: float, eps: float) -> None:
        self.running, self.training, self.momentum, self.eps = list(running), training, momentum, eps
        self.dy: Tensor | None = None  #: the gradient that has been summed

    def forward(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        dtype = statistics_dtype(self, x, w, b, *self.running[:2])
        if not x.ndim or any(t.shape != x.shape[-1:] for t in (w, b, *self.running[:2])):
            raise self.error(f"input {x.shape} does not fit weight {w.shape}: the last axis must be the channels"
                             f"{layout_hint(x, w.size)}")
        if not w.size:
            raise self.error(f"shape {x.shape} has no channels")
        if self.training and x.size <= x.shape[-1]:
            raise self.error(f"shape {x.shape} has one value per channel and so no variance; use a larger "
                             f"batch, or eval()")
        self.x, self.w = x if _pixels(x) else self.dense(x), self.dense(w)
        y, self.mean, self.rstd = self.out(x.shape, x.dtype), self.out(w.shape, dtype), self.out(w.shape, dtype)
        reads = [self.x, self.w, self.dense(b), *self.running]
        if self.training:
            self.call("batch_norm", reads, [y, self.mean, self.rstd, *self.running], eps=self.eps,
                      momentum=self.momentum)
        else:
            self.call("batch_norm_eval", reads[:-1], [y, self.rstd], eps=self.eps)
            if tapes.current().gradients:  # when the gradient is computed, the running mean may have changed
                self.call("copy", [self.running[0]], [self.mean])
        return y

    def weight_grad(self, dy: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        if 0 in wanted:  # an input that depends only on parameters
            return self.output_grad(dy, wanted)
        self.dy, self.sums = dy, [self.grad(self.w), self.grad(self.w)]
        self.call("batch_norm_weight_grad", [self.x, self.mean, self.rstd, self.dense(dy)], self.sums)
        return {1: self.sums[0], 2: self.sums[1]}

    def output_grad(self, dy: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        if self.dy is not dy and (self.training or list(wanted) != [0]):
            found |= self.weight_grad(dy, [1, 2])
        dy = self.dense(dy)
        if 0 in wanted:
            kernel, reads = (("batch_norm_input_grad", [self.x, self.mean, self.rstd, self.w, *self.sums, dy])
                             if self.training else ("batch_norm_eval_input_grad", [dy, self.w, self.rstd]))
            found[0] = self.grad_by(kernel, reads, self.x)
        return found


def _pixels(x: Tensor) -> bool:
    """Whether all pixels are equally far apart and each pixel's channels are contiguous."""
    steps = [s for s, n in zip(x.strides[:-1], x.shape[:-1], strict=True) if n > 1]
    lengths = [n for n in x.shape[:-1] if n > 1]
    evenly = all(a == b * n for a, b, n in zip(steps, steps[1:], lengths[1:], strict=False))
    return evenly and (x.strides[-1] == 1 or x.shape[-1] == 1)


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, running: Sequence[Tensor], *, training: bool = True,
               momentum: float = 0.1, eps: float = 1e-5) -> Tensor:
    """x (..., c) normalised over all axes but the last, times `weight` plus `bias` (c,).

    `running`: mean and variance (c,), updated with weight `momentum` while training, and an int64 count of batches ().
    """
    return BatchNorm(running, training, momentum, eps)(x, weight, bias)
