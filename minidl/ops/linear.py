"""The linear layer and the plain matrix product."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..autograd.op import Layer, Op, same_dtype
from ..autograd.tensor import Tensor, array, new
from ..core.graph import Role
from .reduce import sum_to
from .shape import flatten, reshape, unsqueeze, with_axes


class Linear(Layer):
    """x (n, i), w (o, i), b (o,) -> (n, o)."""

    name = "linear"
    precision = "low"

    def forward(self, x: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        dtype = same_dtype(self, x, w, *bias)
        if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
            raise self.error(f"input {x.shape} does not fit weight {w.shape}; expected (n, "
                             f"{w.shape[-1] if w.shape else '?'})")
        if any(b.shape != w.shape[:1] for b in bias):
            raise self.error(f"bias {bias[0].shape} does not fit weight {w.shape}")
        self.x, self.w, self.bias = self.dense(x), w, bias
        return self.out_by("linear", [self.x, w, *bias], [x.shape[0], w.shape[0]], dtype)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by("matmul", [self.dense(dy), self.w], self.x)

    def weights_grad(self, dy: Tensor, wanted: Sequence[int]) -> dict[int, Tensor]:
        grads = [self.grad(t) for t in (self.w, *(self.bias if 2 in wanted else ()))]
        self.call("linear_weight_grad", [self.x, self.dense(dy)], grads, bias=len(grads) > 1)
        return dict(enumerate(grads, 1))


class MatMul(Op):
    """(..., m, k) @ (..., k, n), leading axes broadcast."""

    name = "matmul"
    precision = "low"

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        dtype = same_dtype(self, a, b)
        if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
            raise self.error(f"shapes {a.shape} and {b.shape} do not fit")
        try:
            lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except ValueError:
            raise self.error(f"leading axes of {a.shape} and {b.shape} do not broadcast") from None
        self.a, self.b = a, b
        return self.out_by("matmul", [a, b], [*lead, a.shape[-2], b.shape[-1]], dtype)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        t = (self.a, self.b)[i]
        turned = with_axes(other := (self.b, self.a)[i], [*range(other.ndim - 2), other.ndim - 1, other.ndim - 2])
        left, right = (turned, dy) if i else (dy, turned)
        lead = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        g = new(f"grad {t.storage.name}", [*lead, left.shape[-2], right.shape[-1]], dy.dtype, Role.GRADIENT)
        return sum_to(self.call("matmul", [left, right], [g]), t)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., i), weight (o, i), bias (o,) -> x weight^T + bias (..., o)."""
    if x.ndim not in (0, 2):
        flat = linear(flatten(x, 0, -2) if x.ndim > 2 else unsqueeze(x, 0), weight, bias)
        return reshape(flat, [*x.shape[:-1], weight.shape[0]])
    return Linear()(x, weight, *(() if bias is None else (bias,)))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product a (..., m, k) @ b (..., k, n) -> (..., m, n); leading axes broadcast, vectors as in NumPy."""
    a, b = (t if isinstance(t, Tensor) else array(t) for t in (a, b))
    row, column = a.ndim == 1, b.ndim == 1
    y = MatMul()(unsqueeze(a, 0) if row else a, unsqueeze(b, 1) if column else b)
    return reshape(y, [*y.shape[:-2], *y.shape[-2:][row : 2 - column]]) if row or column else y
