"""Layer norm: every row brought to mean 0 and variance 1, then scaled and shifted. The two gradients are apart:
neither needs the other's sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from .registry import kernel, loop


def _rows_flops(reads: Any, writes: Any) -> float:
    return 8.0 * reads[0].size


@kernel("layer_norm", flops=_rows_flops)
def layer_norm(xp: Any, x: Any, w: Any = None, b: Any = None, *, eps: float) -> Any:
    """x (n, d), w (d,), b (d,) -> (y (n, d), mean (n,), 1/sqrt(variance + eps) (n,))."""
    mean = x.mean(axis=1, dtype=x.dtype)
    centred = x - mean[:, None]
    scale = (1 / xp.sqrt((centred * centred).mean(axis=1) + eps)).astype(x.dtype)
    y = centred * scale[:, None]
    y = y if w is None else y * w
    return y if b is None else y + b, mean, scale


@layer_norm.cpu
def _(x: Any, *rest: Any, eps: float) -> Any:
    *affine, y, mean, scale = rest
    return [loop(_layer_norm, x, *_affine(affine, x), y, mean, scale, eps)]


def _affine(given: list[Any], x: Any) -> list[Any]:
    """Scale and shift, with ones and zeros for what the layer does not have."""
    return [*given, *[np.ones(x.shape[1], x.dtype), np.zeros(x.shape[1], x.dtype)][len(given) :]]


def _layer_norm(x, w, b, y, mean, scale, eps):  # type: ignore[no-untyped-def]
    d = x.shape[1]
    for i in range(x.shape[0]):
        total = 0.0  # sums are in float64
        for j in range(d):
            total += x[i, j]
        m = x.dtype.type(total / d)
        total = 0.0
        for j in range(d):
            total += np.float64((x[i, j] - m) * (x[i, j] - m))
        s = x.dtype.type(1.0 / np.sqrt(total / d + eps))
        mean[i], scale[i] = m, s
        for j in range(d):
            y[i, j] = (x[i, j] - m) * s * w[j] + b[j]


@kernel("layer_norm_input_grad", flops=_rows_flops)
def layer_norm_input_grad(xp: Any, x: Any, mean: Any, scale: Any, dy: Any, w: Any = None) -> Any:
    """dx = scale (g - mean(g) - n mean(g n)), with g = dy w and n = (x - mean) scale."""
    n = (x - mean[:, None]) * scale[:, None]
    g = dy if w is None else dy * w
    return scale[:, None] * (g - g.mean(axis=1, keepdims=True) - n * (g * n).mean(axis=1, keepdims=True))


@layer_norm_input_grad.cpu
def _(x: Any, mean: Any, scale: Any, dy: Any, *rest: Any) -> Any:
    *w, dx = rest
    return [loop(_layer_norm_input_grad, x, mean, scale, dy, _affine(w, x)[0], dx)]


def _layer_norm_input_grad(x, mean, scale, dy, w, dx):  # type: ignore[no-untyped-def]
    d = x.shape[1]
    for i in range(x.shape[0]):
        total, product = 0.0, 0.0
        for j in range(d):
            g = dy[i, j] * w[j]
            total += g
            product += np.float64(g * (x[i, j] - mean[i]))
        a = x.dtype.type(total / d)
        b = x.dtype.type(product * scale[i] * scale[i] / d)
        for j in range(d):
            dx[i, j] = scale[i] * (dy[i, j] * w[j] - a - (x[i, j] - mean[i]) * b)


@kernel("layer_norm_weight_grad", flops=lambda reads, writes: 4.0 * reads[0].size)
def layer_norm_weight_grad(xp: Any, x: Any, mean: Any, scale: Any, dy: Any, *, bias: bool) -> Any:
    """dw (d,) = the sum over rows of dy (x - mean) scale; with `bias` also db (d,) = that of dy."""
    dw = (dy * ((x - mean[:, None]) * scale[:, None])).sum(axis=0)
    return (dw, dy.sum(axis=0)) if bias else dw


@layer_norm_weight_grad.cpu
def _(x: Any, mean: Any, scale: Any, dy: Any, dw: Any, *rest: Any, bias: bool) -> Any:
    db = rest[0] if bias else np.empty_like(dw)
    return [loop(_layer_norm_weight_grad, x, mean, scale, dy, dw, db)]


def _layer_norm_weight_grad(x, mean, scale, dy, dw, db):  # type: ignore[no-untyped-def]
    for j in range(dw.size):
        dw[j] = 0
        db[j] = 0
    for i in range(x.shape[0]):
        for j in range(dw.size):
            dw[j] += dy[i, j] * ((x[i, j] - mean[i]) * scale[i])
            db[j] += dy[i, j]
