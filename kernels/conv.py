"""Convolution over images with channels last: forward and its two gradients, each apart.

x (n, h, w, c), weight (o, kh, kw, c / groups), y (n, oh, ow, o); all contiguous. The CPU lowers to matrix products:
a chunk of rows of patches is gathered, then multiplied, so that the patches stay in the cache. A 1x1 convolution is
a product without any gathering; one filter per channel (depthwise) has loops of its own in `depthwise`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .depthwise import depthwise, depthwise_input_grad, depthwise_weight_grad, depthwise_work
from .linear import gemm
from .registry import Thunk, compiled, flat, kernel, loop, ufunc
from .sums import row_sums, row_sums_work

CHUNK = 512  #: rows of patches at a time, where the image allows
Pair = tuple[int, int]


def output_length(length: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """How many places a window of `kernel` taps has along an axis; not positive where it does not fit."""
    return (length + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _flops(reads: Any, writes: Any) -> float:
    """Two for each tap of each output: the larger image's pixels are not what counts, but those of y, or dy."""
    x, w = reads[0], reads[1]
    return 2.0 * (writes[0].size if writes[0].shape[-1] == w.shape[0] else x.size) * w.size / w.shape[0]


# ------------------------------------------------------------------------------------------------------------- references
def _taps(xp: Any, x: Any, kh: int, kw: int, stride: Pair, padding: Pair, dilation: Pair, oh: int, ow: int) -> Any:
    """(ky, kx, the pixels of padded x that this tap sees (n, oh, ow, c)) for every tap."""
    padded = xp.pad(x, ((0, 0), (padding[0], padding[0]), (padding[1], padding[1]), (0, 0)))
    for ky in range(kh):
        for kx in range(kw):
            top, left = ky * dilation[0], kx * dilation[1]
            yield ky, kx, padded[:, top : top + (oh - 1) * stride[0] + 1 : stride[0], left : left + (ow - 1) * stride[1] + 1 : stride[1]]


def _grouped(x: Any, groups: int) -> Any:
    """(..., c) as (groups, pixels, c / groups)."""
    return x.reshape(-1, groups, x.shape[-1] // groups).transpose(1, 0, 2)


@kernel("conv2d", flops=_flops, work=lambda reads, writes, **geometry: _work(reads[0].shape, reads[1].shape, writes[0].shape, reads[0].dtype, **geometry))
def conv2d(xp: Any, x: Any, w: Any, b: Any = None, *, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Any:
    """y[n, oy, ox] = sum over taps of x[n, oy s - p + ky d, ox s - p + kx d] w[:, ky, kx] (+ b)."""
    o, kh, kw, _ = w.shape
    oh, ow = (output_length(x.shape[1 + a], (kh, kw)[a], stride[a], padding[a], dilation[a]) for a in (0, 1))
    y = 0
    for ky, kx, pixels in _taps(xp, x, kh, kw, stride, padding, dilation, oh, ow):
        y = y + xp.matmul(_grouped(pixels, groups), w[:, ky, kx].reshape(groups, o // groups, -1).transpose(0, 2, 1))
    y = y.transpose(1, 0, 2).reshape(x.shape[0], oh, ow, o)
    return y if b is None else y + b


@kernel("conv2d_input_grad", flops=_flops, work=lambda reads, writes, **geometry: _work(writes[0].shape, reads[1].shape, reads[0].shape, reads[0].dtype, **geometry))
def conv2d_input_grad(xp: Any, dy: Any, w: Any, *, size: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Any:
    """dx (n, *size, c): every tap's product goes back to the pixel that it came from."""
    o, kh, kw, each = w.shape
    n, oh, ow, _ = dy.shape
    dx = xp.zeros((n, *size, each * groups), dy.dtype)
    padded = xp.pad(dx, ((0, 0), (padding[0], padding[0]), (padding[1], padding[1]), (0, 0)))
    for ky in range(kh):
        for kx in range(kw):
            g = xp.matmul(_grouped(dy, groups), w[:, ky, kx].reshape(groups, o // groups, each))
            top, left = ky * dilation[0], kx * dilation[1]
            padded[:, top : top + (oh - 1) * stride[0] + 1 : stride[0], left : left + (ow - 1) * stride[1] + 1 : stride[1]] += (
                g.transpose(1, 0, 2).reshape(n, oh, ow, -1))
    dx[...] = padded[:, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]
    return dx


@kernel("conv2d_weight_grad", flops=lambda reads, writes: 2.0 * reads[1].size * writes[0].size / writes[0].shape[0],
        work=lambda reads, writes, **geometry: _weight_grad_work(reads, writes, **geometry))
def conv2d_weight_grad(xp: Any, x: Any, dy: Any, *, taps: Pair, bias: bool, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Any:
    """dw (o, *taps, c / groups); with `bias` also db (o,), the sum of dy over samples and pixels."""
    n, oh, ow, o = dy.shape
    dw = xp.empty((o, *taps, x.shape[-1] // groups), x.dtype)
    for ky, kx, pixels in _taps(xp, x, *taps, stride, padding, dilation, oh, ow):
        dw[:, ky, kx] = xp.matmul(_grouped(dy, groups).transpose(0, 2, 1), _grouped(pixels, groups)).reshape(o, -1)
    return (dw, dy.sum(axis=(0, 1, 2))) if bias else dw


# -------------------------------------------------------------------------------------------------------------- CPU forms
def _is_plain(taps: Pair, stride: Pair, padding: Pair, groups: int) -> bool:
    """A product of pixels and weights as they lie."""
    return taps == stride == (1, 1) and padding == (0, 0) and groups == 1


def _is_depthwise(channels: int, outputs: int, groups: int) -> bool:
    return 1 < channels == outputs == groups


def _lines(y: tuple[int, ...]) -> int:
    """How many lines of the output make a chunk."""
    return max(1, min(CHUNK // max(y[2], 1), y[0] * y[1]))


def _patches(x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...]) -> tuple[int, int]:
    """The shape of a chunk of patches; few channels lie better with the taps first, since pixels run on for longer."""
    rows, columns = _lines(y) * y[2], w[1] * w[2] * w[3]
    return (columns, rows) if w[2] * w[3] < 16 else (rows, columns)


def _work(x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...], dtype: Any, *, stride: Pair, padding: Pair, dilation: Pair,
          groups: int, size: Pair | None = None) -> list[Any]:
    if _is_plain(w[1:3], stride, padding, groups):
        return []
    if _is_depthwise(x[3], w[0], groups):
        return depthwise_work(x, w, padding, dtype)
    return [((_lines(y) * y[2], w[1] * w[2] * w[3]) if size else _patches(x, w, y), dtype)]


def _weight_grad_work(reads: Any, writes: Any, *, taps: Pair, bias: bool, **geometry: Any) -> list[Any]:
    x, dy, dw = reads[0].shape, reads[1].shape, writes[0].shape
    dtype = reads[0].dtype
    work = row_sums_work(dy[3]) if bias else []
    if _is_plain(taps, geometry["stride"], geometry["padding"], geometry["groups"]):
        return work
    if _is_depthwise(x[3], dw[0], geometry["groups"]):
        return [*work, *depthwise_work(x, dw, geometry["padding"], dtype)]
    return [*work, (_patches(x, dw, dy), dtype), (dw, dtype)]


class _Chunks:
    """The patches of an image, chunk by chunk and group by group."""

    def __init__(self, x: Any, patches: Any, rows: int, y: tuple[int, ...], taps: Pair, each: int, stride: Pair, padding: Pair,
                 dilation: Pair, groups: int) -> None:
        self.x, self.patches, self.each, self.groups = flat(x), patches, each, groups
        self.shape = (*x.shape[1:], *taps, *stride, *padding, *dilation, y[1], y[2])
        self.width, self.total, self.lines = y[2], y[0] * y[1], rows // max(y[2], 1)

    def __iter__(self) -> Any:
        """(slice of y's pixels, group, the patches' array (pixels, taps * channels), arguments of the loop) for each."""
        for first in range(0, self.total, self.lines):
            rows = min(self.lines, self.total - first) * self.width
            pixels = slice(first * self.width, first * self.width + rows)
            for group in range(self.groups):
                yield pixels, group, rows, (self.x, first, group * self.each, self.shape)


@conv2d.cpu
def _(x: Any, w: Any, *rest: Any, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> list[Thunk]:
    bias, rest = (rest[:1], rest[1:]) if rest[0].ndim == 1 else ((), rest)
    y, *work = rest
    o, kh, kw, each = w.shape
    pixels = y.reshape(-1, o)
    add = [loop(_add_bias, pixels, b) for b in bias]
    if not y.size:
        return []
    if _is_plain((kh, kw), stride, padding, groups):
        return [gemm(x.reshape(-1, each), w.reshape(o, each).T, pixels), *add]
    if _is_depthwise(x.shape[3], o, groups):
        return [*depthwise(x, w, y, *work, stride=stride, padding=padding, dilation=dilation), *add]
    weights = w.reshape(groups, o // groups, -1)
    thunks: list[Thunk] = []
    for part, group, rows, arguments in _Chunks(x, work[0], _lines(y.shape) * y.shape[2], y.shape, (kh, kw), each, stride, padding, dilation, groups):
        gather, patches = _gatherer(work[0], rows, kw * each, arguments)
        thunks += [gather, gemm(patches, weights[group].T, _columns(pixels[part], group, groups))]
    return [*thunks, *add]


@conv2d_input_grad.cpu
def _(dy: Any, w: Any, dx: Any, *work: Any, size: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> list[Thunk]:
    o, kh, kw, each = w.shape
    pixels = dy.reshape(-1, o)
    if not dy.size:
        return [partial(dx.fill, 0)]
    if _is_plain((kh, kw), stride, padding, groups):
        return [gemm(pixels, w.reshape(o, each), dx.reshape(-1, each))]
    if _is_depthwise(dx.shape[3], o, groups):
        return depthwise_input_grad(dy, w, dx, *work, stride=stride, padding=padding, dilation=dilation)
    weights = w.reshape(groups, o // groups, -1)
    thunks: list[Thunk] = [partial(dx.fill, 0)]
    for part, group, rows, arguments in _Chunks(dx, work[0], len(work[0]), dy.shape, (kh, kw), each, stride, padding, dilation, groups):
        patches = work[0][:rows]
        thunks += [gemm(_columns(pixels[part], group, groups), weights[group], patches), _loop(_scatter, patches, *arguments)]
    return thunks


@conv2d_weight_grad.cpu
def _(x: Any, dy: Any, dw: Any, *rest: Any, taps: Pair, bias: bool, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> list[Thunk]:
    o, each = dy.shape[3], dw.shape[3]
    pixels = dy.reshape(-1, o)
    sums: list[Thunk] = []
    if bias:
        db, total, *rest = rest
        sums = row_sums(pixels, db, total)
    work = rest
    if not dy.size:
        return [partial(dw.fill, 0), *sums]
    if _is_plain(taps, stride, padding, groups):
        return [gemm(pixels.T, x.reshape(-1, each), dw.reshape(o, each)), *sums]
    if _is_depthwise(x.shape[3], o, groups):
        return [*depthwise_weight_grad(x, dy, dw, *work, stride=stride, padding=padding, dilation=dilation), *sums]
    weights, part_of = dw.reshape(groups, o // groups, -1), work[1].reshape(groups, o // groups, -1)
    thunks: list[Thunk] = []
    for part, group, rows, arguments in _Chunks(x, work[0], _lines(dy.shape) * dy.shape[2], dy.shape, taps, each, stride, padding, dilation, groups):
        gather, patches = _gatherer(work[0], rows, taps[1] * each, arguments)
        out = part_of[group] if part.start else weights[group]
        thunks += [gather, gemm(_columns(pixels[part], group, groups).T, patches, out)]
        if part.start:
            thunks.append(ufunc(np.add, weights[group], out, weights[group]))
    return [*thunks, *sums]


def _columns(pixels: Any, group: int, groups: int) -> Any:
    """One group's channels of (pixels, channels)."""
    each = pixels.shape[1] // groups
    return pixels[:, group * each : (group + 1) * each]


def _gatherer(work: Any, rows: int, run: int, arguments: tuple[Any, ...]) -> tuple[Thunk, Any]:
    """The call that gathers a chunk, and the patches (rows, taps * channels) as a view, either way round in memory."""
    if run < 16:
        patches = work.reshape(-1)[: rows * len(work)].reshape(len(work), rows)
        return _loop(_gather_across, patches, *arguments), patches.T
    return _loop(_gather, work[:rows], *arguments), work[:rows]


def _loop(function: Any, *arguments: Any) -> Thunk:
    return partial(compiled(function, *arguments), *arguments)


def _add_bias(y, b):  # type: ignore[no-untyped-def]
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] += b[j]


# Indices are cast to unsigned because a signed one might mean "from the end", and that check keeps loops from being
# vectorised. `shape`: h, w, c of x, then taps, stride, padding, dilation, then the lines and columns of y.
def _gather(patches, x, first, channel, shape):  # type: ignore[no-untyped-def]
    h, w, c, kh, kw, sh, sw, ph, pw, dh, dw, oh, ow = shape
    each = patches.shape[1] // (kh * kw)
    for line in range(patches.shape[0] // ow):
        n, oy = (first + line) // oh, (first + line) % oh
        for ky in range(kh):
            iy = oy * sh - ph + ky * dh
            inside = 0 <= iy < h
            to = ky * kw * each
            for ox in range(ow):
                row = patches[line * ow + ox]
                ix = ox * sw - pw
                start = ((n * h + iy) * w + ix) * c + channel
                if inside and dw == 1 and each == c and ix >= 0 and ix + kw <= w:
                    for j in range(kw * each):
                        row[np.uintp(to + j)] = x[np.uintp(start + j)]
                    continue
                for kx in range(kw):
                    at = to + kx * each
                    if inside and 0 <= ix + kx * dw < w:
                        pixel = start + kx * dw * c
                        for j in range(each):
                            row[np.uintp(at + j)] = x[np.uintp(pixel + j)]
                    else:
                        for j in range(each):
                            row[np.uintp(at + j)] = 0


def _gather_across(patches, x, first, channel, shape):  # type: ignore[no-untyped-def]
    h, w, c, kh, kw, sh, sw, ph, pw, dh, dw, oh, ow = shape
    each = patches.shape[0] // (kh * kw)
    step = sw * c
    for line in range(patches.shape[1] // ow):
        n, oy = (first + line) // oh, (first + line) % oh
        to = line * ow
        for ky in range(kh):
            iy = oy * sh - ph + ky * dh
            for kx in range(kw):
                left = kx * dw - pw
                low = min(ow, max(0, (sw - 1 - left) // sw))  # the columns of y whose tap lies inside x
                high = max(low, min(ow, (w - 1 - left) // sw + 1))
                if not 0 <= iy < h:
                    low = high = ow
                for i in range(each):
                    row = patches[(ky * kw + kx) * each + i]
                    start = ((n * h + iy) * w + left) * c + channel + i
                    for ox in range(low):
                        row[np.uintp(to + ox)] = 0
                    if step == 1:
                        for ox in range(low, high):
                            row[np.uintp(to + ox)] = x[np.uintp(start + ox)]
                    else:
                        for ox in range(low, high):
                            row[np.uintp(to + ox)] = x[np.uintp(start + ox * step)]
                    for ox in range(high, ow):
                        row[np.uintp(to + ox)] = 0


def _scatter(patches, x, first, channel, shape):  # type: ignore[no-untyped-def]
    h, w, c, kh, kw, sh, sw, ph, pw, dh, dw, oh, ow = shape
    each = patches.shape[1] // (kh * kw)
    for line in range(patches.shape[0] // ow):
        n, oy = (first + line) // oh, (first + line) % oh
        for ky in range(kh):
            iy = oy * sh - ph + ky * dh
            if not 0 <= iy < h:
                continue
            at = ky * kw * each
            for ox in range(ow):
                row = patches[line * ow + ox]
                ix = ox * sw - pw
                start = ((n * h + iy) * w + ix) * c + channel
                if dw == 1 and each == c and ix >= 0 and ix + kw <= w:
                    for j in range(kw * each):
                        x[np.uintp(start + j)] += row[np.uintp(at + j)]
                    continue
                for kx in range(kw):
                    if 0 <= ix + kx * dw < w:
                        pixel = start + kx * dw * c
                        for j in range(each):
                            x[np.uintp(pixel + j)] += row[np.uintp(at + kx * each + j)]
