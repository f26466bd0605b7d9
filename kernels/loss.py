"""Softmax over the last axis and its logarithm; cross-entropy from logits and labels, mean squared error."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from .cuda import Grid, c_type, each, each_row, steps, strides
from .exponential import exps
from .registry import flat, kernel, loop, ufunc

NO_LABEL = -(1 << 62)  #: the label to ignore where none is
OUTSIDE = "a label that the step has computed is out of range"  #: others are known before it runs: check_range
SMALL = 32768  #: up to this many elements, one block computes a mean loss alone


@kernel("softmax", axes="...K->...K", flops=lambda reads, writes: 4.0 * writes[0].size,
        work=lambda reads, writes: [((*reads[0].shape[:-1], 1), reads[0].dtype)])
def softmax(xp: Any, x: Any) -> Any:
    """Over the last axis, shifted by the maximum."""
    e = xp.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@softmax.cpu
def _(x: Any, y: Any, row: Any) -> Any:
    if not x.shape[-1]:
        return []
    return [partial(np.maximum.reduce, x, axis=-1, out=row, keepdims=True), ufunc(np.subtract, x, row, y),
            ufunc(np.exp, y, y),
            partial(np.add.reduce, y, axis=-1, out=row, keepdims=True), ufunc(np.divide, y, row, y)]


@softmax.cuda()
def _(x: Any, y: Any) -> Any:
    return _softmax_calls(x, y, False)


def _softmax_calls(x: Any, y: Any, logarithm: bool) -> list[Grid]:
    *apart, step = steps(x, x.shape)
    rows, width = x.size // max(x.shape[-1], 1), x.shape[-1]
    return each_row("loss.cu", f"softmax<{c_type(x)}>", rows, width, x, strides(x.shape[:-1], apart), step, y,
                    rows, width, logarithm)


@kernel("softmax_grad", axes="...K,...K->...K", flops=lambda reads, writes: 4.0 * writes[0].size,
        work=lambda reads, writes: [((*reads[0].shape[:-1], 1), reads[0].dtype)])
def softmax_grad(xp: Any, y: Any, dy: Any) -> Any:
    """dx = y * (dy - sum(y dy))."""
    return y * (dy - (y * dy).sum(axis=-1, keepdims=True))


@softmax_grad.cpu
def _(y: Any, dy: Any, dx: Any, row: Any) -> Any:
    return [ufunc(np.multiply, y, dy, dx), partial(np.add.reduce, dx, axis=-1, out=row, keepdims=True),
            ufunc(np.subtract, dy, row, dx), ufunc(np.multiply, dx, y, dx)]


@softmax_grad.cuda()
def _(y: Any, dy: Any, dx: Any) -> Any:
    return _softmax_grad_calls(y, dy, dx, False)


def _softmax_grad_calls(y: Any, dy: Any, dx: Any, logarithm: bool) -> list[Grid]:
    *apart, step = steps(dy, y.shape)
    rows, width = y.size // max(y.shape[-1], 1), y.shape[-1]
    return each_row("loss.cu", f"softmax_grad<{c_type(y)}>", rows, width, y, dy, strides(y.shape[:-1], apart), step, dx,
                    rows, width, logarithm)


@kernel("log_softmax", axes="...K->...K", flops=lambda reads, writes: 4.0 * writes[0].size, work=lambda reads, writes: [
    (reads[0].shape, reads[0].dtype), ((*reads[0].shape[:-1], 1), reads[0].dtype)])
def log_softmax(xp: Any, x: Any) -> Any:
    """Over the last axis: x - max - log(sum(exp(x - max)))."""
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))


@log_softmax.cpu
def _(x: Any, y: Any, e: Any, row: Any) -> Any:
    if not x.shape[-1]:
        return []
    return [partial(np.maximum.reduce, x, axis=-1, out=row, keepdims=True), ufunc(np.subtract, x, row, y),
            ufunc(np.exp, y, e),
            partial(np.add.reduce, e, axis=-1, out=row, keepdims=True), ufunc(np.log, row, row),
            ufunc(np.subtract, y, row, y)]


@log_softmax.cuda()
def _(x: Any, y: Any) -> Any:
    return _softmax_calls(x, y, True)


@kernel("log_softmax_grad", axes="...K,...K->...K",
        flops=lambda reads, writes: 4.0 * writes[0].size, work=lambda reads, writes: [
    ((*reads[0].shape[:-1], 1), reads[0].dtype)])
def log_softmax_grad(xp: Any, y: Any, dy: Any) -> Any:
    """dx = dy - exp(y) sum(dy)."""
    return dy - xp.exp(y) * dy.sum(axis=-1, keepdims=True)


@log_softmax_grad.cpu
def _(y: Any, dy: Any, dx: Any, row: Any) -> Any:
    return [partial(np.add.reduce, dy, axis=-1, out=row, keepdims=True), ufunc(np.exp, y, dx),
            ufunc(np.multiply, dx, row, dx),
            ufunc(np.subtract, dy, dx, dx)]


@log_softmax_grad.cuda()
def _(y: Any, dy: Any, dx: Any) -> Any:
    return _softmax_grad_calls(y, dy, dx, True)


@kernel("cross_entropy", flops=lambda reads, writes: 6.0 * reads[0].size)
def cross_entropy(xp: Any, x: Any, labels: Any, *, smoothing: float, ignore: int = NO_LABEL) -> Any:
    """Logits x (n, c), labels (n,) int64 -> (mean loss (), probabilities (n, c)). The target is 1 - smoothing at the
    label plus smoothing / c everywhere. The mean is over the rows whose label is not `ignore`; 0 if there are none."""
    counted = labels != ignore
    shifted = x - x.max(axis=1, keepdims=True)
    e = xp.exp(shifted)
    total = e.sum(axis=1, keepdims=True)
    aim = shifted[xp.arange(x.shape[0]), xp.where(counted, labels, 0)]
    if smoothing:
        aim = x.dtype.type(1 - smoothing) * aim + x.dtype.type(smoothing) * shifted.mean(axis=1, dtype=x.dtype)
    losses = xp.where(counted, xp.log(total)[:, 0] - aim, x.dtype.type(0))
    return losses.sum(dtype=x.dtype) / xp.maximum(counted.sum(), 1).astype(x.dtype), e / total


@cross_entropy.cpu
def _(x: Any, labels: Any, loss: Any, p: Any, *, smoothing: float, ignore: int = NO_LABEL) -> Any:
    return [loop(_cross_entropy, x, labels, loss, p, smoothing, ignore)]


@cross_entropy.cuda(lambda reads, writes, **_: [(reads[1].shape, "float64")])
def _(x: Any, labels: Any, loss: Any, p: Any, losses: Any, *, smoothing: float, ignore: int = NO_LABEL) -> Any:
    """One launch, or two for many logits: each row's loss, then their mean."""
    rows, width = x.shape
    name = f"cross_entropy<{c_type(x)}>"
    arguments = (x, *steps(x, x.shape), labels, *steps(labels, labels.shape), ignore, smoothing, p, loss, losses, rows,
                 width)
    if x.size <= SMALL and width <= 1024:
        return [Grid("loss.cu", name, (1,), (min(32 * rows, 1024),), (*arguments, 32))]
    return [*each_row("loss.cu", name, rows, width, *arguments), *_mean_loss(losses, rows, loss)]


def _mean_loss(parts: Any, count: int, loss: Any) -> list[Grid]:
    return [Grid("loss.cu", f"mean_loss<{c_type(loss)}>", (1,), (1024,), (parts, parts.size, count, loss))]


def _cross_entropy(x, labels, loss, p, smoothing, ignore):  # type: ignore[no-untyped-def]
    sum_of_losses, counted, one = 0.0, 0, x.dtype.type(1)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            p[i, j] = x[i, j]
        top, total = exps(p[i], one)
        factor = one / total
        for j in range(x.shape[1]):
            p[i, j] *= factor
        if labels[i] == ignore:
            continue
        if labels[i] < 0 or labels[i] >= x.shape[1]:
            raise ValueError(OUTSIDE)
        counted += 1
        aim = np.float64(x[i, labels[i]] - top)
        if smoothing > 0:
            mean = 0.0
            for j in range(x.shape[1]):
                mean += x[i, j] - top
            aim = (1.0 - smoothing) * aim + smoothing * mean / x.shape[1]
        sum_of_losses += np.log(total) - aim
    loss[()] = sum_of_losses / max(counted, 1)


def _from_first(begin: int, end: int, reads: Any, **constants: Any) -> tuple[int, int, dict[str, Any]]:
    """The window of a part: its rows of p, and the number of the first."""
    return begin, end, {**constants, "first": begin}


@kernel("cross_entropy_grad", axes="rK,L,->rK", flops=lambda reads, writes: 2.0 * writes[0].size, window=_from_first)
def cross_entropy_grad(xp: Any, p: Any, labels: Any, dy: Any, *, smoothing: float, ignore: int = NO_LABEL,
                       first: int = 0) -> Any:
    """dx = (p - target) * dy / n for the n rows whose label is not `ignore`; 0 for the others. p has the rows from
    `first` on, labels all of them."""
    t, counted = p.dtype.type, labels != ignore
    onehot = xp.arange(p.shape[1])[None, :] == labels[:, None]
    factor = xp.where(counted, dy / xp.maximum(counted.sum(), 1).astype(p.dtype), t(0))
    return (p - t(1 - smoothing) * onehot - t(smoothing / p.shape[1])) * factor[:, None]


@cross_entropy_grad.cpu
def _(p: Any, labels: Any, dy: Any, dx: Any, *, smoothing: float, ignore: int = NO_LABEL, first: int = 0) -> Any:
    t = p.dtype.type
    return [loop(_cross_entropy_grad, p, labels, dy, dx, t(1 - smoothing), t(smoothing / p.shape[1]), ignore, first)]


@cross_entropy_grad.cuda()
def _(p: Any, labels: Any, dy: Any, dx: Any, *, smoothing: float, ignore: int = NO_LABEL) -> Any:
    return each_row("loss.cu", f"cross_entropy_grad<{c_type(p)}>", *p.shape, p, labels, *steps(labels, labels.shape),
                    ignore, ignore != NO_LABEL, dy, smoothing, dx, *p.shape)


def _cross_entropy_grad(p, labels, dy, dx, hit, rest, ignore, first):  # type: ignore[no-untyped-def]
    counted = 0
    for label in labels:
        counted += label != ignore
    factor = dy[()] / p.dtype.type(max(counted, 1))
    for i in range(p.shape[0]):
        label = labels[first + i]
        if label == ignore:
            for j in range(p.shape[1]):
                dx[i, j] = 0
            continue
        for j in range(p.shape[1]):
            dx[i, j] = (p[i, j] - rest) * factor
        dx[i, label] = (p[i, label] - hit - rest) * factor


@kernel("label_weights", axes="C,m->mC")
def label_weights(xp: Any, weight: Any, labels: Any, *, ignore: int = NO_LABEL) -> Any:
    """A weight of each class (c,), labels (n,) int64 -> (n, c): a row has the weight of its label there, and 0
    elsewhere; it is 0 where the label is `ignore`."""
    hit = (xp.arange(len(weight))[None, :] == labels[:, None]) & (labels != ignore)[:, None]
    return xp.where(hit, weight[None, :], weight.dtype.type(0))


@label_weights.cpu
def _(weight: Any, labels: Any, y: Any, *, ignore: int = NO_LABEL) -> Any:
    return [loop(_label_weights, weight, labels, y, ignore)]


@label_weights.cuda()
def _(weight: Any, labels: Any, y: Any, *, ignore: int = NO_LABEL) -> Any:
    return each_row("loss.cu", f"label_weights<{c_type(y)}>", *y.shape, weight, *steps(weight, weight.shape), labels,
                    *steps(labels, labels.shape), ignore, y, *y.shape)


def _label_weights(weight, labels, y, ignore):  # type: ignore[no-untyped-def]
    for i in range(y.shape[0]):
        if labels[i] != ignore and (labels[i] < 0 or labels[i] >= y.shape[1]):
            raise ValueError(OUTSIDE)
        for j in range(y.shape[1]):
            y[i, j] = weight[j] if j == labels[i] and j != ignore else y.dtype.type(0)


@kernel("mse", flops=lambda reads, writes: 3.0 * reads[0].size)
def mse(xp: Any, x: Any, target: Any) -> Any:
    """The mean of (x - target)^2, a scalar."""
    return ((x - target) ** 2).mean(dtype=x.dtype)


@mse.cpu
def _(x: Any, target: Any, loss: Any) -> Any:
    return [loop(_mse, flat(x), flat(target), loss)]


def _mse_blocks(count: int) -> int:
    return 1 if count <= SMALL else min(-(-count // 8192), 1056)


@mse.cuda(lambda reads, writes: [((_mse_blocks(math.prod(reads[0].shape)),), "float64")])
def _(x: Any, target: Any, loss: Any, parts: Any) -> Any:
    """One launch, or two if there are many elements: parts of the sum, then the mean."""
    calls = [Grid("loss.cu", f"mse<{c_type(x)}>", parts.shape, (256 if parts.size > 1 else 1024,),
                  (x, target, x.size, loss, parts))]
    return [*calls, *(_mean_loss(parts, x.size, loss) if parts.size > 1 else [])]


def _mse(x, target, loss):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(x.size):
        total += np.float64((x[i] - target[i]) * (x[i] - target[i]))
    loss[()] = total / x.size


@kernel("mse_grad", axes="=,=,->=", flops=lambda reads, writes: 2.0 * writes[0].size)
def mse_grad(xp: Any, x: Any, target: Any, dy: Any, *, factor: float) -> Any:
    """dx = (x - target) * factor * dy, with factor 2 / size for a mean over so many elements; with x and target
    exchanged, the gradient toward the target."""
    return (x - target) * (dy * x.dtype.type(factor))


@mse_grad.cpu
def _(x: Any, target: Any, dy: Any, dx: Any, *, factor: float) -> Any:
    return [loop(_mse_grad, flat(x), flat(target), dy, flat(dx), x.dtype.type(factor))]


@mse_grad.cuda()
def _(x: Any, target: Any, dy: Any, dx: Any, *, factor: float) -> Any:
    return each("loss.cu", f"mse_grad<{c_type(x)}>", x.size, x, target, dy, factor, dx, x.size)


def _mse_grad(x, target, dy, dx, factor):  # type: ignore[no-untyped-def]
    step = dy[()] * factor
    for i in range(x.size):
        dx[i] = (x[i] - target[i]) * step
