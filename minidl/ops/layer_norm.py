"""Layer norm, and RMS norm (Zhang, Sennrich 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..autograd.op import Layer, statistics_dtype
from ..autograd.tensor import Tensor


class LayerNorm(Layer):
    """Normalises over the last axes. The output gradient and the weight gradient each need only what the forward pass
    has saved. Weight, bias and saved statistics are float32 where x has 16 bits."""

    name = "layer_norm"
    first = 0  #: which of the saved statistics, mean and scale, is the first that the output gradient needs

    def __init__(self, axes: int, eps: float) -> None:
        self.axes, self.eps = axes, eps

    def forward(self, x: Tensor, *affine: Tensor) -> Tensor:
        dtype = statistics_dtype(self, x, *affine)
        self.width = math.prod(x.shape[x.ndim - self.axes :])
        wrong = any(t.shape != x.shape[x.ndim - self.axes :] for t in affine)
        if not 0 < self.axes <= x.ndim or not self.width or wrong:
            raise self.error(f"input {x.shape} does not fit {[t.shape for t in affine] or f'{self.axes} axes'}")
        self.x, self.affine = x, affine
        self.rows = self._rows(x)
        y = self.out(x.shape, x.dtype)
        self.kept_sums = [self.out([self.rows.shape[0]], dtype), self.out([self.rows.shape[0]], dtype)]
        self.call(self.name, [self.rows, *map(self._row, affine)], [self._rows(y), *self.kept_sums], eps=self.eps)
        return y

    def _rows(self, t: Tensor) -> Tensor:
        t = self.dense(t)
        return Tensor(t.storage, [t.size // self.width, self.width], offset=t.offset, parts=t.parts)

    def _row(self, t: Tensor) -> Tensor:
        t = self.dense(t)
        return Tensor(t.storage, [t.size], offset=t.offset, parts=t.parts)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        dx = self.grad(self.x)
        reads = [self.rows, *self.kept_sums[self.first :], self._rows(dy), *map(self._row, self.affine[:1])]
        self.call(f"{self.name}_input_grad", reads, [self._rows(dx)])
        return dx

    def weights_grad(self, dy: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        grads = [self.grad(t) for t in self.affine]
        self.call("layer_norm_weight_grad", [self.rows, *self.kept_sums, self._rows(dy)], [self._row(g) for g in grads],
                  bias=len(grads) > 1)
        return dict(enumerate(grads, 1))


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, axes: int = 1,
               eps: float = 1e-5) -> Tensor:
    """x normalised over its last `axes` axes, times `weight` plus `bias`, which have the shape of those axes. A bias
    needs a weight."""
    if bias is not None and weight is None:
        raise ValueError("layer_norm: a bias needs a weight")
    return LayerNorm(axes, eps)(x, *(t for t in (weight, bias) if t is not None))


class RMSNorm(LayerNorm):
    """Divides by the root mean square over the last axes: a layer norm whose mean is 0."""

    name = "rms_norm"
    first = 1


def rms_norm(x: Tensor, weight: Tensor | None = None, *, axes: int = 1, eps: float | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over its last `axes` axes, times `weight`, which has their shape. `eps`: by default
    the machine epsilon of x's type, as in torch; float32's if x has 16 bits."""
    wide = x.dtype if x.dtype == "float64" else "float32"
    return RMSNorm(axes, float(np.finfo(wide).eps) if eps is None else eps)(x, *(() if weight is None else (weight,)))
