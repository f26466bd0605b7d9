"""Layer norm; RMS norm (Zhang, Sennrich 2019); and group norm (Wu, He 2018), a layer norm over groups of channels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..autograd.op import Layer, statistics_dtype
from ..autograd.tensor import ShapeError, Tensor
from .shape import reshape, transpose


class LayerNorm(Layer):
    """Normalises over the last axes; `rms_norm` is a layer norm whose mean is 0. Both gradients need only what the
    forward pass has saved. Weight, bias and saved statistics are float32 where x has 16 bits."""

    def __init__(self, name: str, axes: int, eps: float) -> None:
        self.name, self.axes, self.eps = name, axes, eps

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
        return self.dense(t).seen([t.size // self.width, self.width])

    def _row(self, t: Tensor) -> Tensor:
        return self.dense(t).seen([t.size])

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        dx, sums = self.grad(self.x), self.kept_sums[self.name == "rms_norm" :]
        self.call(f"{self.name}_input_grad", [self.rows, *sums, self._rows(dy), *map(self._row, self.affine[:1])],
                  [self._rows(dx)])
        return dx

    def weights_grad(self, dy: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        grads = [self.grad(t) for t in self.affine]
        self.call("layer_norm_weight_grad", [self.rows, *self.kept_sums, self._rows(dy)], [self._row(g) for g in grads],
                  bias=len(grads) > 1)
        return dict(enumerate(grads, 1))


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, axes: int = 1,
               eps: float = 1e-5) -> Tensor:
    """x normalised over its last `axes` axes, times `weight` plus `bias` of their shape. A bias needs a weight."""
    if bias is not None and weight is None:
        raise ValueError("layer_norm: a bias needs a weight")
    return LayerNorm("layer_norm", axes, eps)(x, *(t for t in (weight, bias) if t is not None))


def rms_norm(x: Tensor, weight: Tensor | None = None, *, axes: int = 1, eps: float | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over its last `axes` axes, times `weight`, which has their shape. `eps`: by default
    the machine epsilon of x's type, as in torch; float32's if x has 16 bits."""
    wide = x.dtype if x.dtype == "float64" else "float32"
    op = LayerNorm("rms_norm", axes, float(np.finfo(wide).eps) if eps is None else eps)
    return op(x, *(() if weight is None else (weight,)))


def group_norm(x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
               eps: float = 1e-5) -> Tensor:
    """x (n, ..., c): each sample's channels in `groups` equal groups, each normalised over its places and channels,
    times `weight` plus `bias` (c,). Raises ShapeError if the groups do not divide the channels."""
    if x.ndim < 2 or groups < 1 or x.shape[-1] % groups:
        raise ShapeError(f"group_norm: {groups} groups do not divide the channels of {x.shape}, which are last")
    n, c = x.shape[0], x.shape[-1]
    for t in (weight, bias):
        if t is not None and t.shape != (c,):
            raise ShapeError(f"group_norm: weight or bias {t.shape} does not fit the {c} channels of {x.shape}")
    places = math.prod(x.shape[1:-1])
    apart = transpose(reshape(x, [n, places, groups, c // groups]), (0, 2, 1, 3))
    y = layer_norm(reshape(apart, [n, groups, places * c // groups]), eps=eps)
    y = reshape(transpose(reshape(y, [n, groups, places, c // groups]), (0, 2, 1, 3)), x.shape)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias
