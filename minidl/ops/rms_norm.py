"""RMS norm (Zhang, Sennrich 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..autograd.op import Op, statistics_dtype
from ..autograd.tensor import Tensor


class RMSNorm(Op):
    """Divides by the root mean square over the last axes. The output gradient and the weight gradient each need only
    what the forward pass has saved. The weight and what is saved are float32 where x has 16 bits."""

    name = "rms_norm"

    def __init__(self, axes: int, eps: float) -> None:
        self.axes, self.eps = axes, eps

    def forward(self, x: Tensor, *weight: Tensor) -> Tensor:
        dtype = statistics_dtype(self, x, *weight)
        self.width = math.prod(x.shape[x.ndim - self.axes :])
        if not 0 < self.axes <= x.ndim or not self.width or any(w.shape != x.shape[x.ndim - self.axes :]
                                                                for w in weight):
            raise self.error(f"input {x.shape} does not fit {[w.shape for w in weight] or f'{self.axes} axes'}")
        self.x, self.weight, self.rows = x, weight, self._rows(x)
        y, n = self.out(x.shape, x.dtype), self.rows.shape[0]
        self.mean, self.scale = self.out([n], dtype), self.out([n], dtype)
        self.call("rms_norm", [self.rows, *map(self._row, weight)], [self._rows(y), self.mean, self.scale],
                  eps=self.eps)
        return y

    def _rows(self, t: Tensor) -> Tensor:
        t = self.dense(t)
        return Tensor(t.storage, [t.size // self.width, self.width], offset=t.offset, parts=t.parts)

    def _row(self, t: Tensor) -> Tensor:
        t = self.dense(t)
        return Tensor(t.storage, [t.size], offset=t.offset, parts=t.parts)

    def output_grad(self, dy: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        found = self.weight_grad(dy, [1]) if 1 in wanted else {}
        if 0 in wanted:
            found[0] = self.grad(self.x)
            self.call("rms_norm_input_grad", [self.rows, self.scale, self._rows(dy), *map(self._row, self.weight)],
                      [self._rows(found[0])])
        return found

    def weight_grad(self, dy: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        if 0 in wanted:  # an input that depends only on parameters
            return self.output_grad(dy, wanted)
        grad = self.grad(self.weight[0])
        self.call("layer_norm_weight_grad", [self.rows, self.mean, self.scale, self._rows(dy)], [self._row(grad)],
                  bias=False)
        return {1: grad}


def rms_norm(x: Tensor, weight: Tensor | None = None, *, axes: int = 1, eps: float | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over its last `axes` axes, times `weight`, which has their shape. `eps`: by default
    the machine epsilon of x's type, as in torch; that of float32 where x has 16 bits."""
    wide = x.dtype if x.dtype == "float64" else "float32"
    return RMSNorm(axes, float(np.finfo(wide).eps) if eps is None else eps)(x, *(() if weight is None else (weight,)))
