"""Layer norm: every row is normalised to mean 0 and variance 1, then scaled and shifted. The two gradients are
independent. On CUDA x, y and their gradients may have 16 bits; everything else is float32 then."""

from __future__ import annotations

from typing import Any

import numpy as np

from .columns import sums, sums_work, whole
from .cuda import Grid, c_type, each_row, sum_type
from .hints import wide
from .registry import kernel, loop, regrouped


def _rows_flops(reads: Any, writes: Any) -> float:
    return 8.0 * reads[0].size


@kernel("layer_norm", axes="mD,D,D->mD,m,m", flops=_rows_flops)
def layer_norm(xp: Any, x: Any, w: Any = None, b: Any = None, *, eps: float) -> Any:
    """x (n, d), w (d,), b (d,) -> (y (n, d), mean (n,), 1/sqrt(variance + eps) (n,))."""
    mean = x.mean(axis=1, dtype=sum_type(x))
    centred = x - mean[:, None]
    scale = (1 / xp.sqrt((centred * centred).mean(axis=1) + eps)).astype(mean.dtype)
    y = centred * scale[:, None]
    y = y if w is None else y * w
    return (y if b is None else y + b).astype(x.dtype), mean, scale


@layer_norm.cpu
def _(x: Any, *rest: Any, eps: float) -> Any:
    *affine, y, mean, scale = rest
    return [loop(_layer_norm, x, *_affine(affine, x), y, mean, scale, eps)]


@layer_norm.cuda()
def _(x: Any, *rest: Any, eps: float) -> Any:
    *affine, y, mean, scale = rest
    w, b = (*affine, mean, mean)[:2]
    return each_row("layer_norm.cu", f"layer_norm<{c_type(x)}>", *x.shape, x, w, b, len(affine), y, mean,
                    scale, *x.shape, eps)


def _affine(given: list[Any], x: Any) -> list[Any]:
    """Scale and shift; ones and zeros if the layer has none."""
    return [*given, *[np.ones(x.shape[1], x.dtype), np.zeros(x.shape[1], x.dtype)][len(given) :]]


@regrouped
def _layer_norm(x, w, b, y, mean, scale, eps):  # type: ignore[no-untyped-def]
    n, d = x.shape
    for i in range(n):
        total = 0.0  # sums are in float64
        for j in range(d):
            total += x[i, j]
        m = x.dtype.type(total / d)
        total = 0.0
        for j in range(d):
            centred = np.float64(x[i, j] - m)
            total += centred * centred
        s = x.dtype.type(1.0 / np.sqrt(total / d + eps))
        mean[i], scale[i] = m, s
        for j in range(d):
            y[i, j] = (x[i, j] - m) * s * w[j] + b[j]


@kernel("layer_norm_input_grad", axes="mD,m,m,mD,D->mD", flops=_rows_flops)
def layer_norm_input_grad(xp: Any, x: Any, mean: Any, scale: Any, dy: Any, w: Any = None) -> Any:
    """dx = scale (g - mean(g) - n mean(g n)), with g = dy w and n = (x - mean) scale."""
    n = (x - mean[:, None]) * scale[:, None]
    g = dy if w is None else dy * w
    total = scale[:, None] * (g - g.mean(axis=1, keepdims=True, dtype=n.dtype)
                              - n * (g * n).mean(axis=1, keepdims=True))
    return total.astype(x.dtype)


@layer_norm_input_grad.cpu
def _(x: Any, mean: Any, scale: Any, dy: Any, *rest: Any) -> Any:
    *w, dx = rest
    return [loop(_layer_norm_input_grad, x, mean, scale, dy, _affine(w, x)[0], dx)]


@layer_norm_input_grad.cuda()
def _(x: Any, mean: Any, scale: Any, dy: Any, *rest: Any) -> Any:
    *w, dx = rest
    return each_row("layer_norm.cu", f"layer_norm_input_grad<{c_type(x)}>", *x.shape, x, mean, scale, dy, (*w, mean)[0],
                    bool(w), dx, *x.shape)


@regrouped
def _layer_norm_input_grad(x, mean, scale, dy, w, dx):  # type: ignore[no-untyped-def]
    wide()
    n, d = x.shape
    for i in range(n):
        m, s = mean[i], scale[i]
        total, product = 0.0, 0.0
        for j in range(d):
            g = np.float64(dy[i, j] * w[j])
            total += g
            product += g * np.float64(x[i, j] - m)
        a = x.dtype.type(total / d)
        b = x.dtype.type(product * s * s / d)
        for j in range(d):
            dx[i, j] = s * (dy[i, j] * w[j] - a - (x[i, j] - m) * b)


@kernel("layer_norm_weight_grad", axes="mc,m,m,mc->c,c", flops=lambda reads, writes: 4.0 * reads[0].size)
def layer_norm_weight_grad(xp: Any, x: Any, mean: Any, scale: Any, dy: Any, *, bias: bool) -> Any:
    """dw (d,) = the sum over rows of dy (x - mean) scale; with `bias` also db (d,) = the sum over rows of dy."""
    dw = (dy * ((x - mean[:, None]) * scale[:, None])).sum(axis=0)
    return (dw, dy.sum(axis=0, dtype=dw.dtype)) if bias else dw


@layer_norm_weight_grad.cpu
def _(x: Any, mean: Any, scale: Any, dy: Any, dw: Any, *rest: Any, bias: bool) -> Any:
    db = rest[0] if bias else np.empty_like(dw)
    return [loop(_layer_norm_weight_grad, x, mean, scale, dy, dw, db)]


@layer_norm_weight_grad.cuda(lambda reads, writes, **_: sums_work(*reads[0].shape))
def _(x: Any, mean: Any, scale: Any, dy: Any, dw: Any, *rest: Any, bias: bool) -> Any:
    """One launch, or two for many rows."""
    if not dw.size:
        return []
    *db, parts = rest
    out, grid = [dw, (*db, dw)[0], bias], sums(*x.shape)
    tiles, shares = grid.blocks
    four = "true" if whole(x.shape[1], [x, dy]) else "false"
    calls = [Grid("layer_norm.cu", f"layer_norm_sums<{c_type(x)}, {four}>", grid.blocks, grid.threads,
                  (x, mean, scale, dy, *x.shape, grid.share, parts, *out))]
    if shares > 1:
        calls.append(Grid("layer_norm.cu", f"layer_norm_sums_end<{c_type(x)}>", (tiles,), grid.threads,
                          (parts, shares, len(dw), *out)))
    return calls


def _layer_norm_weight_grad(x, mean, scale, dy, dw, db):  # type: ignore[no-untyped-def]
    wide()
    for j in range(dw.size):
        dw[j] = 0
        db[j] = 0
    for i in range(x.shape[0]):
        for j in range(dw.size):
            dw[j] += dy[i, j] * ((x[i, j] - mean[i]) * scale[i])
            db[j] += dy[i, j]
