"""The naive CUDA kernel of each family (naive.cu), to read before the fast form and to time beside it.

A kernel of NAIVE takes the arrays that a kernel of this name reads and writes, and its constants; it returns its
launches. All arrays are contiguous, and floats are float32. No executor runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from .cuda import THREADS, Call, Grid, Struct
from .loss import NO_LABEL
from .window import window as windows


def _each(kernel: str, count: int, *arguments: Any) -> Grid:
    """A launch with a thread for each of `count` elements, rows or channels."""
    return Grid("naive.cu", kernel, (-(-count // THREADS),), (THREADS,), (*arguments, count))


def _rows(kernel: str, x: Any, *arguments: Any) -> Grid:
    return _each(kernel, x.shape[0], *arguments)


def _window(x: Any, y: Any, taps: Sequence[int], geometry: Any) -> tuple[Struct, int, int]:
    stride, padding, dilation, groups = geometry
    return windows(x, y, taps, stride, padding, dilation), y.shape[3], groups


def _max_pool2d(x: Any, y: Any, tap: Any, *, window: Any, stride: Any, padding: Any, ceil: bool = False) -> list[Call]:
    return [_each("max_pool2d", y.size, x, y, tap, windows(x, y, window, stride, padding))]


def _sum(x: Any, y: Any, *, axes: Sequence[int], factor: float = 1.0) -> list[Call]:
    """Over neighbouring axes."""
    n, inner = prod(x.shape[a] for a in axes), prod(x.shape[max(axes) + 1 :])
    return [_each("sum_", y.size, x, y, n, inner, float(factor))]


def _cross_entropy(x: Any, labels: Any, loss: Any, p: Any, *, smoothing: float, ignore: int = NO_LABEL) -> list[Call]:
    return [_rows("softmax", x, x, p, x.shape[1]),
            Grid("naive.cu", "cross_entropy", (1,), (1,),
                 (p, labels, loss, x.shape[1], float(smoothing), ignore, x.shape[0]))]


def _attention(q: Any, k: Any, v: Any, y: Any, p: Any, *, scale: float, causal: bool, offset: int = 0) -> list[Call]:
    return [_each("attention", prod(q.shape[:3]), q, k, v, y, p, q.shape[2], *k.shape[2:], v.shape[3], float(scale),
                  causal, offset)]


def _batch_norm(x: Any, *arrays: Any, eps: float, momentum: float) -> list[Call]:
    return [_each("batch_norm", x.shape[-1], x, *arrays, prod(x.shape[:-1]), float(eps), float(momentum))]


#: kernel -> its naive launches
NAIVE: dict[str, Callable[..., list[Call]]] = {
    "add": lambda x, y, z: [_each("add", z.size, x, y, z)],
    "gelu": lambda x, y: [_each("gelu", y.size, x, y)],
    "matmul": lambda a, b, y: [_each("matmul", y.size, a, b, y, *b.shape)],
    "linear_weight_grad": lambda x, dy, dw, db, bias: [_each("linear_weight_grad", dw.size, x, dy, dw, db, *x.shape,
                                                             dy.shape[1])],
    "conv2d": lambda x, w, y, geometry: [_each("conv2d", y.size, x, w, y, *_window(x, y, w.shape[1:3], geometry))],
    "conv2d_input_grad": lambda dy, w, dx, size, geometry: [
        _each("conv2d_input_grad", dx.size, dy, w, dx, *_window(dx, dy, w.shape[1:3], geometry))],
    "conv2d_weight_grad": lambda x, dy, dw, taps, bias, geometry: [
        _each("conv2d_weight_grad", dw.size, x, dy, dw, *_window(x, dy, taps, geometry))],
    "max_pool2d": _max_pool2d,
    "sum": _sum,
    "softmax": lambda x, y: [_rows("softmax", x, x, y, x.shape[1])],
    "cross_entropy": _cross_entropy,
    "cross_entropy_grad": lambda p, labels, dy, dx, smoothing, ignore=NO_LABEL: [
        _rows("cross_entropy_grad", p, p, labels, dy, dx, p.shape[1], float(smoothing), ignore)],
    "layer_norm": lambda x, w, b, y, mean, scale, eps: [_rows("layer_norm", x, x, w, b, y, mean, scale, x.shape[1],
                                                              float(eps))],
    "rms_norm": lambda x, w, y, mean, scale, eps: [_rows("rms_norm", x, x, w, y, mean, scale, x.shape[1], float(eps))],
    "attention": _attention,
    "batch_norm": _batch_norm,
    "batch_norm_weight_grad": lambda x, mean, rstd, dy, dw, db: [
        _each("batch_norm_weight_grad", x.shape[-1], x, mean, rstd, dy, dw, db, prod(x.shape[:-1]))],
}
