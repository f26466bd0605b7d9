"""RMS norm: every row is divided by its root mean square, then scaled. The gradient toward the scale is computed by
`layer_norm_weight_grad`, which gets the mean 0. On CUDA x, y and their gradients may have 16 bits; everything else is
float32 then."""

from __future__ import annotations

from typing import Any

import numpy as np

from .cuda import c_type, each_row, sum_type
from .registry import kernel, loop


def _flops(reads: Any, writes: Any) -> float:
    return 4.0 * reads[0].size


@kernel("rms_norm", axes="mD,D->mD,m,m", flops=_flops)
def rms_norm(xp: Any, x: Any, w: Any = None, *, eps: float) -> Any:
    """x (n, d), w (d,) -> (y (n, d), zeros (n,) in the place of a mean, 1/sqrt(mean(x^2) + eps) (n,))."""
    wide = x.astype(sum_type(x))
    scale = (1 / xp.sqrt((wide * wide).mean(axis=1) + eps)).astype(wide.dtype)
    y = wide * scale[:, None]
    return (y if w is None else y * w).astype(x.dtype), xp.zeros_like(scale), scale


@rms_norm.cpu
def _(x: Any, *rest: Any, eps: float) -> Any:
    *w, y, mean, scale = rest
    return [loop(_rms_norm, x, _scale(w, x), y, mean, scale, eps)]


@rms_norm.cuda()
def _(x: Any, *rest: Any, eps: float) -> Any:
    *w, y, mean, scale = rest
    return each_row("rms_norm.cu", f"rms_norm<{c_type(x)}>", *x.shape, x, (*w, scale)[0], bool(w), y, mean, scale,
                    *x.shape, eps)


def _scale(w: list[Any], x: Any) -> Any:
    return w[0] if w else np.ones(x.shape[1], x.dtype)


def _rms_norm(x, w, y, mean, scale, eps):  # type: ignore[no-untyped-def]
    n, d = x.shape
    whole = d // 4 * 4
    for i in range(n):
        # in float64, and four sums, so that an addition need not wait for the one before it
        s0, s1, s2, s3 = 0.0, 0.0, 0.0, 0.0
        for j in range(0, whole, 4):
            s0 += np.float64(x[i, j]) * x[i, j]
            s1 += np.float64(x[i, j + 1]) * x[i, j + 1]
            s2 += np.float64(x[i, j + 2]) * x[i, j + 2]
            s3 += np.float64(x[i, j + 3]) * x[i, j + 3]
        for j in range(whole, d):
            s0 += np.float64(x[i, j]) * x[i, j]
        s = x.dtype.type(1.0 / np.sqrt(((s0 + s1) + (s2 + s3)) / d + eps))
        mean[i], scale[i] = 0, s
        for j in range(d):
            y[i, j] = x[i, j] * s * w[j]


@kernel("rms_norm_input_grad", axes="mD,m,mD,D->mD", flops=lambda reads, writes: 6.0 * reads[0].size)
def rms_norm_input_grad(xp: Any, x: Any, scale: Any, dy: Any, w: Any = None) -> Any:
    """dx = scale (g - n mean(g n)), with g = dy w and n = x scale."""
    n = x * scale[:, None]
    g = dy if w is None else dy * w
    return (scale[:, None] * (g - n * (g * n).mean(axis=1, keepdims=True, dtype=n.dtype))).astype(x.dtype)


@rms_norm_input_grad.cpu
def _(x: Any, scale: Any, dy: Any, *rest: Any) -> Any:
    *w, dx = rest
    return [loop(_rms_norm_input_grad, x, scale, dy, _scale(w, x), dx)]


@rms_norm_input_grad.cuda()
def _(x: Any, scale: Any, dy: Any, *rest: Any) -> Any:
    *w, dx = rest
    return each_row("rms_norm.cu", f"rms_norm_input_grad<{c_type(x)}>", *x.shape, x, scale, dy, (*w, scale)[0],
                    bool(w), dx, *x.shape)


def _rms_norm_input_grad(x, scale, dy, w, dx):  # type: ignore[no-untyped-def]
    n, d = x.shape
    whole = d // 2 * 2
    for i in range(n):
        s = scale[i]
        p0, p1 = 0.0, 0.0
        for j in range(0, whole, 2):
            p0 += np.float64(dy[i, j] * w[j]) * x[i, j]
            p1 += np.float64(dy[i, j + 1] * w[j + 1]) * x[i, j + 1]
        for j in range(whole, d):
            p0 += np.float64(dy[i, j] * w[j]) * x[i, j]
        b = x.dtype.type((p0 + p1) * s * s / d)
        for j in range(d):
            dx[i, j] = s * (dy[i, j] * w[j] - x[i, j] * b)
