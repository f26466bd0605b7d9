"""Convolution over images with channels last: forward and its two separate gradients.

x (n, h, w, c), weight (o, kh, kw, c / groups), y (n, oh, ow, o); all contiguous. The CPU lowers to matrix products:
a chunk of rows of patches is gathered, then multiplied, so that the patches stay in the cache. A 1x1 convolution is
a product without any gathering. The gathering is in `patches`, one filter per channel in `depthwise`, the CUDA forms in
`conv_cuda`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .depthwise import depthwise, depthwise_input_grad, depthwise_weight_grad, depthwise_work
from .linear import cpu_act, gemm
from .patches import Gather, Scatter
from .registry import Thunk, flat, kernel, loop, ufunc
from .sums import row_sums, row_sums_work

CHUNK = 512  #: rows of patches at a time, where the image allows
Pair = tuple[int, int]


class Geometry(NamedTuple):
    """How a window moves over an image: (vertical, horizontal) each; and the number of groups of channels."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    def output(self, image: Sequence[int], taps: Sequence[int]) -> list[int]:
        """Lines and columns of the output; not positive where the window does not fit."""
        return [(image[a] + 2 * self.padding[a] - self.dilation[a] * (taps[a] - 1) - 1) // self.stride[a] + 1
                for a in (0, 1)]


def _flops(y: Any, w: Any) -> float:
    """A product and a sum for each tap of each element of y (or dy)."""
    return float(2 * y.size * (w.size // w.shape[0]))


# ----------------------------------------------------------------------------------------------- references
def _slices(tap: int, axis: int, count: int, geometry: Geometry) -> slice:
    """The places of a padded axis that a tap sees, one for each of `count` outputs."""
    start = tap * geometry.dilation[axis]
    return slice(start, start + (count - 1) * geometry.stride[axis] + 1, geometry.stride[axis])


def _taps(taps: Sequence[int], y: Sequence[int], geometry: Geometry) -> Iterator[tuple[int, int, Any]]:
    """(ky, kx, slice of the padded image that this tap reads) for every tap; y (n, oh, ow, ...)."""
    for ky in range(taps[0]):
        for kx in range(taps[1]):
            yield ky, kx, (slice(None), _slices(ky, 0, y[1], geometry), _slices(kx, 1, y[2], geometry))


def _padded(xp: Any, x: Any, geometry: Geometry) -> Any:
    (vertical, horizontal), none = geometry.padding, (0, 0)
    return xp.pad(x, (none, (vertical, vertical), (horizontal, horizontal), none))


def _grouped(x: Any, groups: int) -> Any:
    """(..., c) as (groups, pixels, c / groups)."""
    return x.reshape(prod(x.shape[:-1]), groups, x.shape[-1] // groups).transpose(1, 0, 2)


@kernel("conv2d", flops=lambda reads, writes: _flops(writes[0], reads[1]),
        work=lambda reads, writes, geometry, act="": _work(reads[0], reads[1], writes[0], geometry))
def conv2d(xp: Any, x: Any, w: Any, b: Any = None, *, geometry: Geometry, act: str = "") -> Any:
    """y[n, oy, ox] = sum over taps of x[n, oy s - p + ky d, ox s - p + kx d] w[:, ky, kx] (+ b), or relu of it."""
    groups, shape = geometry.groups, (x.shape[0], *geometry.output(x.shape[1:3], w.shape[1:3]), len(w))
    padded, y = _padded(xp, x, geometry), xp.zeros((groups, shape[0] * shape[1] * shape[2], len(w) // groups), x.dtype)
    for ky, kx, seen in _taps(w.shape[1:3], shape, geometry):
        tap = w[:, ky, kx].reshape(groups, len(w) // groups, -1)
        y += xp.matmul(_grouped(padded[seen], groups), tap.transpose(0, 2, 1))
    y = y.transpose(1, 0, 2).reshape(shape)
    y = y if b is None else y + b
    return xp.maximum(y, 0) if act else y


@kernel("conv2d_input_grad", flops=lambda reads, writes: _flops(reads[0], reads[1]),
        work=lambda reads, writes, size, geometry: _work(writes[0], reads[1], reads[0], geometry)[:2])
def conv2d_input_grad(xp: Any, dy: Any, w: Any, *, size: Pair, geometry: Geometry) -> Any:
    """dx (n, *size, c): every tap's product is added to the pixel from which it came."""
    groups, each = geometry.groups, w.shape[3]
    padded = _padded(xp, xp.zeros((len(dy), *size, each * groups), dy.dtype), geometry)
    for ky, kx, seen in _taps(w.shape[1:3], dy.shape, geometry):
        g = xp.matmul(_grouped(dy, groups), w[:, ky, kx].reshape(groups, len(w) // groups, each))
        padded[seen] += g.transpose(1, 0, 2).reshape(*dy.shape[:3], each * groups)
    top, left = geometry.padding
    return padded[:, top : top + size[0], left : left + size[1]]


@kernel("conv2d_weight_grad", flops=lambda reads, writes: _flops(reads[1], writes[0]),
        work=lambda reads, writes, taps, bias, geometry: [*_work(reads[0], writes[0], reads[1], geometry, sums=True),
                                                          *(row_sums_work(reads[1].shape[3]) if bias else [])])
def conv2d_weight_grad(xp: Any, x: Any, dy: Any, *, taps: Pair, bias: bool, geometry: Geometry) -> Any:
    """dw (o, *taps, c / groups); with `bias` also db (o,), the sum of dy over samples and pixels."""
    groups, o = geometry.groups, dy.shape[3]
    padded, dw = _padded(xp, x, geometry), xp.empty((o, *taps, x.shape[3] // groups), x.dtype)
    for ky, kx, seen in _taps(taps, dy.shape, geometry):
        tap = xp.matmul(_grouped(dy, groups).transpose(0, 2, 1), _grouped(padded[seen], groups))
        dw[:, ky, kx] = tap.reshape(o, -1)
    return (dw, dy.sum(axis=(0, 1, 2))) if bias else dw


# ----------------------------------------------------------------------------------------------- CPU forms
def _is_plain(w: Any, geometry: Geometry) -> bool:
    """Whether the convolution is a matrix product of pixels and weights, without patches."""
    return bool(w.shape[1:3] == (1, 1) and geometry == Geometry((1, 1), (0, 0), geometry.dilation, 1))


def _is_depthwise(x: Any, w: Any, geometry: Geometry) -> bool:
    return bool(1 < x.shape[3] == w.shape[0] == geometry.groups)


def _lines(y: Any) -> int:
    """How many lines of the output are a chunk."""
    return int(max(1, min(CHUNK // max(y.shape[2], 1), y.shape[0] * y.shape[1])))


def _work(x: Any, w: Any, y: Any, geometry: Geometry, sums: bool = False) -> list[Any]:
    """Scratch arrays of the three kernels: a chunk of patches, and with `sums` the product of one chunk. With few
    channels, patches have the taps first, so that runs of contiguous numbers are longer."""
    if _is_plain(w, geometry):
        return []
    if _is_depthwise(x, w, geometry):
        return depthwise_work(x.shape, w.shape, y.shape, geometry[:3], x.dtype)
    rows, columns = _lines(y) * y.shape[2], w.size // w.shape[0]
    return [((rows, columns), x.dtype), *([(w.shape, w.dtype)] if sums else [])]


def _chunks(x: Any, w: Any, y: Any, geometry: Geometry) -> Iterator[tuple[slice, int, tuple[Any, ...]]]:
    """(slice of y's pixels, group, arguments of the loop after the patches) for each chunk and group."""
    shape = (*x.shape[1:], *w.shape[1:3], *geometry.stride, *geometry.padding, *geometry.dilation, *y.shape[1:3])
    step, lines, pixels = _lines(y), y.shape[0] * y.shape[1], flat(x)
    for first in range(0, lines, step):
        for group in range(geometry.groups):
            yield (slice(first * y.shape[2], min(first + step, lines) * y.shape[2]), group,
                   (pixels, first, group * w.shape[3], shape))


def _by_group(w: Any, groups: int) -> Any:
    return w.reshape(groups, len(w) // groups, -1)


def _columns(pixels: Any, group: int, groups: int) -> Any:
    """One group's channels of (pixels, channels)."""
    each = pixels.shape[1] // groups
    return pixels[:, group * each : (group + 1) * each]


@conv2d.cpu
def _(x: Any, w: Any, *rest: Any, geometry: Geometry, act: str = "") -> list[Thunk]:
    bias, (y, *work) = (rest[:1], rest[1:]) if rest[0].ndim == 1 else ((), rest)
    pixels, groups = y.reshape(-1, len(w)), geometry.groups
    add = [*(loop(_add_bias, pixels, b) for b in bias), *cpu_act(act, pixels)]
    if _is_plain(w, geometry):
        return [gemm(x.reshape(-1, w.shape[3]), w.reshape(len(w), -1).T, pixels), *add]
    if _is_depthwise(x, w, geometry):
        return [*depthwise(x, w, y, *work, geometry=geometry[:3]), *add]
    weights, gather = _by_group(w, groups), Gather(work[0], w.shape[2] * w.shape[3])
    thunks: list[Thunk] = []
    for part, group, arguments in _chunks(x, w, y, geometry):
        thunk, patches = gather(part.stop - part.start, arguments)
        thunks += [thunk, gemm(patches, weights[group].T, _columns(pixels[part], group, groups))]
    return [*thunks, *add]


@conv2d_input_grad.cpu
def _(dy: Any, w: Any, dx: Any, *work: Any, size: Pair, geometry: Geometry) -> list[Thunk]:
    pixels, groups = dy.reshape(-1, len(w)), geometry.groups
    if _is_plain(w, geometry):
        return [gemm(pixels, w.reshape(len(w), -1), dx.reshape(-1, w.shape[3]))]
    if _is_depthwise(dx, w, geometry):
        return depthwise_input_grad(dy, w, dx, *work, geometry=geometry[:3])
    weights, scatter = _by_group(w, groups), Scatter()
    thunks: list[Thunk] = [partial(dx.fill, 0)]
    for part, group, arguments in _chunks(dx, w, dy, geometry):
        patches = work[0][: part.stop - part.start]
        thunks += [gemm(_columns(pixels[part], group, groups), weights[group], patches), scatter(patches, *arguments)]
    return thunks


@conv2d_weight_grad.cpu
def _(x: Any, dy: Any, dw: Any, *rest: Any, taps: Pair, bias: bool, geometry: Geometry) -> list[Thunk]:
    pixels, groups = dy.reshape(-1, len(dw)), geometry.groups
    db, work, total = (rest[0], rest[1:-1], rest[-1]) if bias else (None, rest, None)
    sums = row_sums(pixels, db, total) if bias else []
    if _is_plain(dw, geometry):
        return [gemm(pixels.T, x.reshape(-1, dw.shape[3]), dw.reshape(len(dw), -1)), *sums]
    if _is_depthwise(x, dw, geometry):
        return [*depthwise_weight_grad(x, dy, dw, *work, geometry=geometry[:3]), *sums]
    weights, later = _by_group(dw, groups), _by_group(work[1], groups)
    gather = Gather(work[0], dw.shape[2] * dw.shape[3])
    thunks: list[Thunk] = [] if len(pixels) else [partial(dw.fill, 0)]
    for part, group, arguments in _chunks(x, dw, dy, geometry):
        thunk, patches = gather(part.stop - part.start, arguments)
        out = later[group] if part.start else weights[group]
        thunks += [thunk, gemm(_columns(pixels[part], group, groups).T, patches, out)]
        if part.start:
            thunks.append(ufunc(np.add, weights[group], out, weights[group]))
    return [*thunks, *sums]


def _add_bias(y, b):  # type: ignore[no-untyped-def]
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] += b[j]
