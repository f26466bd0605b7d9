"""Softmax over the last axis, and cross-entropy from logits and integer labels."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .registry import kernel, loop, ufunc


@kernel("softmax", flops=lambda reads, writes: 4.0 * writes[0].size, work=lambda reads, writes: [((*reads[0].shape[:-1], 1), reads[0].dtype)])
def softmax(xp: Any, x: Any) -> Any:
    """Over the last axis, shifted by the maximum."""
    e = xp.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@softmax.cpu
def _(x: Any, y: Any, row: Any) -> Any:
    return [partial(np.maximum.reduce, x, axis=-1, out=row, keepdims=True), ufunc(np.subtract, x, row, y), ufunc(np.exp, y, y),
            partial(np.add.reduce, y, axis=-1, out=row, keepdims=True), ufunc(np.divide, y, row, y)]


@kernel("softmax_grad", flops=lambda reads, writes: 4.0 * writes[0].size, work=lambda reads, writes: [((*reads[0].shape[:-1], 1), reads[0].dtype)])
def softmax_grad(xp: Any, y: Any, dy: Any) -> Any:
    """dx = y * (dy - sum(y dy))."""
    return y * (dy - (y * dy).sum(axis=-1, keepdims=True))


@softmax_grad.cpu
def _(y: Any, dy: Any, dx: Any, row: Any) -> Any:
    return [ufunc(np.multiply, y, dy, dx), partial(np.add.reduce, dx, axis=-1, out=row, keepdims=True),
            ufunc(np.subtract, dy, row, dx), ufunc(np.multiply, dx, y, dx)]


@kernel("cross_entropy", flops=lambda reads, writes: 6.0 * reads[0].size)
def cross_entropy(xp: Any, x: Any, labels: Any) -> Any:
    """Logits x (n, c), labels (n,) int64 -> (mean loss (), probabilities (n, c))."""
    shifted = x - x.max(axis=1, keepdims=True)
    e = xp.exp(shifted)
    total = e.sum(axis=1, keepdims=True)
    rows = xp.arange(x.shape[0])
    return (xp.log(total)[:, 0] - shifted[rows, labels]).mean(dtype=x.dtype), e / total


@cross_entropy.cpu
def _(x: Any, labels: Any, loss: Any, p: Any) -> Any:
    # NumPy's exp is vectorised, a loop's is not: shift, exp, then the sums
    return [loop(_shift_rows, x, p), ufunc(np.exp, p, p), loop(_finish_rows, x, labels, loss, p)]


def _shift_rows(x, p):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        top = x[i, 0]
        for j in range(1, x.shape[1]):
            top = max(top, x[i, j])
        for j in range(x.shape[1]):
            p[i, j] = x[i, j] - top


def _finish_rows(x, labels, loss, p):  # type: ignore[no-untyped-def]
    sum_of_losses = 0.0
    for i in range(x.shape[0]):
        total = p[i, 0]
        top = x[i, 0]
        for j in range(1, x.shape[1]):
            total += p[i, j]
            top = max(top, x[i, j])
        sum_of_losses += np.log(total) - (x[i, labels[i]] - top)
        for j in range(x.shape[1]):
            p[i, j] /= total
    loss[()] = sum_of_losses / x.shape[0]


@kernel("cross_entropy_grad", flops=lambda reads, writes: 2.0 * writes[0].size)
def cross_entropy_grad(xp: Any, p: Any, labels: Any, dy: Any) -> Any:
    """dx = (p - onehot(labels)) * dy / n."""
    onehot = xp.arange(p.shape[1])[None, :] == labels[:, None]
    return (p - onehot) * (dy / p.dtype.type(p.shape[0]))


@cross_entropy_grad.cpu
def _(p: Any, labels: Any, dy: Any, dx: Any) -> Any:
    return [loop(_cross_entropy_grad, p, labels, dy, dx)]


def _cross_entropy_grad(p, labels, dy, dx):  # type: ignore[no-untyped-def]
    factor = dy[()] / p.dtype.type(p.shape[0])
    for i in range(p.shape[0]):
        for j in range(p.shape[1]):
            dx[i, j] = p[i, j] * factor
        dx[i, labels[i]] = (p[i, labels[i]] - p.dtype.type(1)) * factor
