"""Convolution with one filter per channel, by loops along channels: on the CPU they are vectorised, on CUDA
neighbouring threads take neighbouring channels.

On the CPU each sample is copied into a padded image first, so that no tap has to look whether it lies inside. With
stride 1 several pixels of a line are one loop over all their channels; taps are therefore kept as (kh, kw, pixels, c),
repeated for each pixel of such a run. Knows no weights shared between channels: those are matrix products, in `conv`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .cuda import THREADS, Call, Grid, Struct, c_type, each
from .registry import Thunk, flat, inlined, loop, memory
from .sums import cuda_row_sums
from .window import window

RUN = 256  #: numbers that one loop takes together at most; the taps of a run should stay in the nearest cache
Pair = tuple[int, int]
Geometry = tuple[Pair, Pair, Pair]  # stride, padding, dilation


def depthwise_work(x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...], geometry: Geometry,
                   dtype: Any, of: int = 0) -> list[Any]:
    """Scratch arrays for x (n, h, w, c), w (c, kh, kw, 1), y (n, oh, ow, c): a padded image, and two sets of taps, of
    as many pixels as for `of` channels."""
    stride, padding, dilation = geometry
    rows = max(x[1] + padding[0], (y[1] - 1) * stride[0] + (w[1] - 1) * dilation[0] + 1)
    pixels = max(n for n in range(1, y[2] + 1) if n == 1 or (stride[1] == 1 and y[2] % n == 0
                                                             and n * (of or y[3]) <= RUN))
    return [((rows, (x[2] + 2 * padding[1]) * y[3]), dtype), ((2, *w[1:3], pixels, y[3]), dtype)]


def depthwise_weight_grad_work(x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...], geometry: Geometry,
                               dtype: Any, rows: Pair) -> list[Any]:
    """The same, and a line of y, if that has some of `rows[1]` channels: so parts add in the order of the whole."""
    return [*depthwise_work(x, w, y, geometry, dtype, rows[1]), ((y[2] * y[3] * (y[3] < rows[1]),), dtype)]


def _tap_major(w: Any) -> Any:
    """(c, kh, kw, 1) seen as (kh, kw, c)."""
    return w[..., 0].transpose(1, 2, 0)


def _repeat(w: Any, taps: Any) -> Thunk:
    return partial(np.copyto, taps, _tap_major(w)[:, :, None])


def _rows(taps: Any) -> Any:
    """(kh, kw, pixels * c)."""
    return taps.reshape(*taps.shape[:2], taps.shape[2] * taps.shape[3])


def _lines(x: Any) -> Any:
    """(n, h, w * c)."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])


def _shape(x: Any, geometry: Geometry) -> tuple[int, ...]:
    return (x.shape[3], *(v for pair in geometry for v in pair))


def depthwise(x: Any, w: Any, y: Any, padded: Any, taps: Any, *, geometry: Geometry) -> list[Thunk]:
    return [_repeat(w, taps[0]), loop(_forward, _lines(x), _rows(taps[0]), padded, _lines(y), _shape(x, geometry))]


def depthwise_input_grad(dy: Any, w: Any, dx: Any, padded: Any, taps: Any, *, geometry: Geometry) -> list[Thunk]:
    return [_repeat(w, taps[0]),
            loop(_input_grad, _lines(dy), _rows(taps[0]), padded, _lines(dx), _shape(dx, geometry))]


def depthwise_weight_grad(x: Any, dy: Any, dw: Any, padded: Any, taps: Any, line: Any, *, geometry: Geometry,
                          rows: Pair) -> list[Thunk]:
    """The rows of the gradient from rows[0] on, of rows[1] in all; dy has these channels, x has all."""
    shape = (*x.shape[:3], *dy.shape[1:3], *rows, *_shape(dy, geometry))
    return [loop(_weight_grad, flat(x), memory(dy), padded, line, _rows(taps[0]), _rows(taps[1]), shape),
            partial(np.copyto, _tap_major(dw), taps[0][:, :, 0])]


# Indices are cast to unsigned so that loops are vectorised, as in `direct`.
def _forward(x, taps, padded, y, shape):  # type: ignore[no-untyped-def]
    c, sh, sw, ph, pw, dh, dw = shape
    kh, kw, run = taps.shape
    padded[:] = 0
    for n in range(x.shape[0]):
        for i in range(x.shape[1]):
            source, target = x[n, i], padded[i + ph]
            for k in range(x.shape[2]):
                target[np.uintp(pw * c + k)] = source[k]
        for oy in range(y.shape[1]):
            for ox in range(y.shape[2] // run):
                out = y[n, oy, ox * run : (ox + 1) * run]
                for k in range(run):
                    out[k] = 0
                for ky in range(kh):
                    row, t = padded[oy * sh + ky * dh], taps[ky]
                    at = ox * sw * run
                    if kw == 3:
                        a, b, d = t[0], t[1], t[2]
                        for k in range(run):
                            out[k] += (row[np.uintp(at + k)] * a[k] + row[np.uintp(at + dw * c + k)] * b[k]
                                       + row[np.uintp(at + 2 * dw * c + k)] * d[k])
                    else:
                        for kx in range(kw):
                            a = t[kx]
                            for k in range(run):
                                out[k] += row[np.uintp(at + kx * dw * c + k)] * a[k]


def _input_grad(dy, taps, padded, dx, shape):  # type: ignore[no-untyped-def]
    c, sh, sw, ph, pw, dh, dw = shape
    kh, kw, run = taps.shape
    for n in range(dy.shape[0]):
        padded[:] = 0
        for oy in range(dy.shape[1]):
            for ox in range(dy.shape[2] // run):
                g = dy[n, oy, ox * run : (ox + 1) * run]
                for ky in range(kh):
                    row = padded[oy * sh + ky * dh]
                    for kx in range(kw):
                        t, at = taps[ky, kx], ox * sw * run + kx * dw * c
                        for k in range(run):
                            row[np.uintp(at + k)] += g[k] * t[k]
        for i in range(dx.shape[1]):
            source, target = padded[i + ph], dx[n, i]
            for k in range(dx.shape[2]):
                target[k] = source[np.uintp(pw * c + k)]


@inlined
def _channels(target, to, source, at, pixels, c, step):  # type: ignore[no-untyped-def]
    """Copies c channels of neighbouring pixels, which have `step` channels each."""
    for _ in range(pixels if c < step else 1):
        for k in range(c if c < step else c * pixels):
            target[np.uintp(to + k)] = source[np.uintp(at + k)]
        to += c
        at += step


@inlined
def _meets(at, pixels, step, length):  # type: ignore[no-untyped-def]
    """Whether one of these pixels, the first at a place that may be outside, lies in an image of this length."""
    return at < length and at + (pixels - 1) * step >= 0


def _weight_grad(x, dy, padded, line, total, part, shape):  # type: ignore[no-untyped-def]
    count, h, w, oh, ow, first, step, c, sh, sw, ph, pw, dh, dw = shape
    kh, kw, run = total.shape
    top, bottom, left, right = kh, 0, kw, 0  # the taps that meet the image: of the others the gradient is 0
    for ky in range(kh):
        if _meets(ky * dh - ph, oh, sh, h):
            top, bottom = min(top, ky), ky + 1
    for kx in range(kw):
        if _meets(kx * dw - pw, ow, sw, w):
            left, right = min(left, kx), kx + 1
    padded[:] = 0
    total[:] = 0
    for n in range(count):
        for i in range(h):
            _channels(padded[i + ph], pw * c, x, (n * h + i) * w * step + first, w, c, step)
        part[top:bottom, left:right] = 0
        for oy in range(oh):
            source, start = dy, (n * oh + oy) * ow * step
            if c < step:
                _channels(line, 0, dy, start, ow, c, step)
                source, start = line, 0
            for ky in range(top, bottom):
                if not _meets(oy * sh + ky * dh - ph, 1, 1, h):
                    continue
                row = padded[oy * sh + ky * dh]
                for ox in range(ow * c // run):
                    g = source[start + ox * run : start + (ox + 1) * run]
                    for kx in range(left, right):
                        out, at = part[ky, kx], ox * sw * run + kx * dw * c
                        for k in range(run):
                            out[k] += g[k] * row[np.uintp(at + k)]
        for ky in range(top, bottom):
            for kx in range(left, right):
                for k in range(run):
                    total[ky, kx, k] += part[ky, kx, k]
    for ky in range(kh):
        for kx in range(kw):
            for first in range(c, run, c):
                for k in range(c):
                    total[ky, kx, k] += total[ky, kx, np.uintp(first + k)]


# ----------------------------------------------------------------------------------------------- CUDA forms
#: neighbours of a line that one thread makes together if there is a kernel for the window: RUN of depthwise.cu
PIXELS = 4
CHANNELS = 64  #: of a block at most, as in depthwise.cu
FILL = 1056  #: blocks that fill a large device


def _special(w: Any, geometry: Geometry) -> str:
    """Which kernels take the window: "3", "5", or "" for those that take any."""
    kh, kw = w.shape[1:3]
    (stride, same), _, dilation = geometry
    return str(kh) if kh == kw and kh in (3, 5) and stride == same and stride in (1, 2) and dilation == (1, 1) else ""


def _blocks(lines: int, pixels: int, channels: int, runs: int, fill: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Blocks (tiles of channels, shares) and threads (channels, lanes): at least `runs` runs of `lines` lines of
    `pixels` each for a thread, and about `fill` blocks at most."""
    tiles = -(-channels // CHANNELS)
    across = -(-channels // tiles)
    lanes = THREADS // across
    shares = -(-lines * -(-pixels // PIXELS) // (lanes * runs))
    return (tiles, max(1, min(shares, -(-fill // tiles)))), (across, lanes)


def _window(x: Any, w: Any, y: Any, geometry: Geometry) -> Struct:
    return window(x, y, w.shape[1:3], *geometry)


def cuda_depthwise(x: Any, w: Any, bias: Any, y: Any, *, geometry: Geometry) -> list[Call]:
    """y of `conv2d`; `bias` may be None."""
    special, term = _special(w, geometry), w if bias is None else bias
    name, arguments = f"depthwise{special}<{c_type(y)}>", (flat(x), flat(w), flat(term), flat(y),
                                                           _window(x, w, y, geometry), bias is not None)
    if not special:
        return [*each("depthwise.cu", name, y.size, *arguments, y.size)]
    return [Grid("depthwise.cu", name, *_blocks(y.shape[0] * y.shape[1], y.shape[2], y.shape[3], 1, FILL), arguments)]


def cuda_depthwise_input_grad(dy: Any, w: Any, dx: Any, *, geometry: Geometry) -> list[Call]:
    special = _special(w, geometry)
    name, arguments = f"depthwise{special}_input_grad<{c_type(dx)}>", (flat(dy), flat(w), flat(dx),
                                                                       _window(dx, w, dy, geometry))
    if not special:
        return [*each("depthwise.cu", name, dx.size, *arguments, dx.size)]
    return [Grid("depthwise.cu", name,
                 *_blocks(dx.shape[0] * dx.shape[1], dx.shape[2], dx.shape[3], 1, FILL), arguments)]


def _weight_grad_blocks(y: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    return _blocks(y[0] * y[1], y[2], y[3], 2, FILL // 2)


def cuda_depthwise_work(y: tuple[int, ...], w: tuple[int, ...]) -> list[Any]:
    """The scratch array of the weight gradient: a sum for each share of the pixels of y (n, oh, ow, c)."""
    (_, shares), _ = _weight_grad_blocks(y)
    return [((shares, y[3] * w[1] * w[2]), "float64")]


def cuda_depthwise_weight_grad(x: Any, dy: Any, dw: Any, part: Any, *, geometry: Geometry) -> list[Call]:
    """One launch where a single share has all pixels, else a second one that adds the shares."""
    special, (blocks, threads) = _special(dw, geometry), _weight_grad_blocks(dy.shape)
    taps = () if special else (min(dw.shape[1] * dw.shape[2], 65535),)
    sums = Grid("depthwise.cu", f"depthwise{special}_weight_grad<{c_type(dw)}>", (*blocks, *taps), threads,
                (flat(x), flat(dy), part, flat(dw), _window(x, dw, dy, geometry)))
    return [sums, *(cuda_row_sums(part, flat(dw)) if len(part) > 1 else [])]
