"""Maximum and average over windows of an image with channels last: x (n, h, w, c) -> y (n, oh, ow, c).

With `ceil` windows at the end may reach beyond the image and its padding: elements there count for nothing, neither as
a value nor as a tap. Only the references need to be told: the other forms see it by the size of y.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .cuda import c_type, each
from .hints import apart
from .registry import flat, inlined, kernel, loop
from .window import window as window_of

Pair = tuple[int, int]
TOGETHER = 8  #: channels that the CPU's loops compute together; with fewer, one over a window's taps is faster


def _seen(y: Sequence[int], window: Pair, stride: Pair) -> list[tuple[slice, ...]]:
    """For each tap the slice of a padded image that it reads; y (n, oh, ow, c)."""
    return [(slice(None), slice(ky, ky + (y[1] - 1) * stride[0] + 1, stride[0]),
             slice(kx, kx + (y[2] - 1) * stride[1] + 1, stride[1]))
            for ky in range(window[0]) for kx in range(window[1])]


def outputs(size: Sequence[int], window: Pair, stride: Pair, padding: Pair, ceil: bool) -> list[int]:
    """Lines and columns of y; not positive where the window does not fit. With `ceil` there is one more where the image
    does not end with a window, unless that window would begin behind the image and its padding before it."""
    found = []
    for n, k, s, p in zip(size, window, stride, padding, strict=True):
        more = s - 1 if ceil else 0
        count = (n + 2 * p - k + more) // s + 1
        found.append(count - 1 if ceil and (count - 1) * s >= n + p else count)
    return found


def _extent(size: Sequence[int], y: Sequence[int], window: Pair, stride: Pair, padding: Pair) -> list[int]:
    """Lines and columns that the image has with its padding, and with what windows reach beyond it."""
    return [max(size[a] + 2 * padding[a], (y[1 + a] - 1) * stride[a] + window[a]) for a in (0, 1)]


def _windows(xp: Any, x: Any, fill: float, window: Pair, stride: Pair, padding: Pair, ceil: bool) -> Any:
    """(taps, n, oh, ow, c): the values that each tap of the window reads; `fill` outside the image."""
    y = (len(x), *outputs(x.shape[1:3], window, stride, padding, ceil))
    extent = _extent(x.shape[1:3], y, window, stride, padding)
    around = [(padding[a], extent[a] - x.shape[1 + a] - padding[a]) for a in (0, 1)]
    padded = xp.pad(x, ((0, 0), *around, (0, 0)), constant_values=fill)
    return xp.stack([padded[seen] for seen in _seen(y, window, stride)])


def _shares(xp: Any, size: Sequence[int], y: Sequence[int], dtype: Any, window: Pair, stride: Pair, padding: Pair
            ) -> Any:
    """(oh, ow, 1): one over the number of taps that are in the image or its padding, for each window."""
    lines, columns = (xp.minimum(window[a], size[a] + 2 * padding[a] - stride[a] * xp.arange(y[1 + a])) for a in (0, 1))
    return (1 / (lines[:, None] * columns)).astype(dtype)[:, :, None]


def _spread(xp: Any, shares: Any, size: Pair, window: Pair, stride: Pair, padding: Pair) -> Any:
    """The reverse of `_windows`: shares (taps, n, oh, ow, c) added up at their pixels, (n, *size, c)."""
    _, n, _, _, c = shares.shape
    padded = xp.zeros((n, *_extent(size, shares.shape[1:], window, stride, padding), c), shares.dtype)
    for share, seen in zip(shares, _seen(shares.shape[1:], window, stride), strict=True):
        padded[seen] += share
    return padded[:, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]


def _flops(reads: Any, writes: Any) -> float:
    return float(max(reads[0].size, writes[0].size))


@kernel("max_pool2d", axes="nHWc->nHWc,nHWc", flops=_flops)
def max_pool2d(xp: Any, x: Any, *, window: Pair, stride: Pair, padding: Pair, ceil: bool = False) -> Any:
    """y, and for each maximum the number of the first tap inside the image that has it (int32)."""
    seen = _windows(xp, x, -xp.inf, window, stride, padding, ceil)
    top, left = (xp.maximum(0, padding[a] - stride[a] * xp.arange(seen.shape[2 + a])) for a in (0, 1))
    # padding is -inf, x may be as well
    tap = xp.maximum(seen.argmax(axis=0), (top[:, None] * window[1] + left)[:, :, None])
    return xp.take_along_axis(seen, tap[None], axis=0)[0], tap.astype("int32")


@max_pool2d.cpu
def _(x: Any, y: Any, tap: Any, *, window: Pair, stride: Pair, padding: Pair, ceil: bool = False) -> Any:
    if _in_fours(x, y, window, stride, padding):
        return [loop(_max_of_four, flat(x), flat(y), flat(tap), (*x.shape, *y.shape[1:3]))]
    return [loop(_max_pool2d, x, y, tap, (*window, *stride, *padding))]


@max_pool2d.cuda()
def _(x: Any, y: Any, tap: Any, *, window: Pair, stride: Pair, padding: Pair, ceil: bool = False) -> Any:
    return each("pool.cu", f"max_pool2d<{c_type(x)}>", y.size, flat(x), flat(y), flat(tap),
                window_of(x, y, window, stride, padding), y.size)


@inlined
def _better(v, most):  # type: ignore[no-untyped-def]
    """Whether a later tap's value wins; the first NaN does."""
    return (v > most) | ((v != v) & (most == most))


def _in_fours(x: Any, y: Any, window: Pair, stride: Pair, padding: Pair) -> bool:
    """Whether windows are squares of four pixels side by side, all inside the image."""
    return (tuple(window) == tuple(stride) == (2, 2) and not any(padding)
            and 2 * y.shape[1] <= x.shape[1] and 2 * y.shape[2] <= x.shape[2]
            and x.flags.c_contiguous and y.flags.c_contiguous)


@inlined
def _filled(channels, left):  # type: ignore[no-untyped-def]
    """Numbers that a pixel's loop writes: its channels, and those behind them that fill its last vector. Pixels are
    written in the order of memory, so the next ones write theirs over them. At the end, where fewer than that are
    left, its channels alone."""
    wide = -(-channels // TOGETHER) * TOGETHER
    return wide if wide <= left else channels


def _max_of_four(x, y, tap, sizes):  # type: ignore[no-untyped-def]
    apart()
    zero, one, two, three = np.int32(0), np.int32(1), np.int32(2), np.int32(3)
    n, height, width, channels, lines, columns = sizes
    at = 0
    for line in range(n * lines):
        above = (line // lines * height + line % lines * 2) * width * channels
        for _ in range(columns):
            below = above + width * channels
            a, b, d, e = x[above:], x[above + channels:], x[below:], x[below + channels:]
            best, which = y[at:], tap[at:]
            for k in range(_filled(channels, best.size)):
                right_above, right_below = _better(b[k], a[k]), _better(e[k], d[k])
                most, other = b[k] if right_above else a[k], e[k] if right_below else d[k]
                lower = _better(other, most)
                best[k] = other if lower else most
                which[k] = (three if right_below else two) if lower else one if right_above else zero
            at, above = at + channels, above + 2 * channels


def _max_pool2d(x, y, tap, geometry):  # type: ignore[no-untyped-def]
    apart()
    kh, kw, sh, sw, ph, pw = geometry
    n, h, w, c = x.shape
    for i in range(n):
        for oy in range(y.shape[1]):
            for ox in range(y.shape[2]):
                best, which = y[i, oy, ox], tap[i, oy, ox]
                top, left = max(0, ph - oy * sh), max(0, pw - ox * sw)
                bottom, right = min(kh, h + ph - oy * sh), min(kw, w + pw - ox * sw)
                for k in range(c if c < TOGETHER else 0):
                    most, number = -x.dtype.type(np.inf), np.int32(top * kw + left)
                    for ky in range(top, bottom):
                        for kx in range(left, right):
                            v = x[i, oy * sh - ph + ky, ox * sw - pw + kx, k]
                            if _better(v, most):
                                most, number = v, np.int32(ky * kw + kx)
                    best[k], which[k] = most, number
                if c < TOGETHER:
                    continue
                for k in range(c):
                    best[k] = -np.inf
                    which[k] = top * kw + left
                for ky in range(top, bottom):
                    for kx in range(left, right):
                        pixel = x[i, oy * sh - ph + ky, ox * sw - pw + kx]
                        number = np.int32(ky * kw + kx)
                        for k in range(c):
                            v = pixel[k]
                            better = (v > best[k]) | ((v != v) & (best[k] == best[k]))
                            best[k] = v if better else best[k]
                            which[k] = number if better else which[k]


@kernel("max_pool2d_grad", axes="nHWc,nHWc->nHWc", flops=_flops)
def max_pool2d_grad(xp: Any, tap: Any, dy: Any, *, size: Pair, window: Pair, stride: Pair, padding: Pair) -> Any:
    """dy goes to the tap that had the maximum."""
    taps = xp.arange(window[0] * window[1]).reshape(-1, 1, 1, 1, 1)
    return _spread(xp, xp.where(taps == tap, dy, dy.dtype.type(0)), size, window, stride, padding)


@max_pool2d_grad.cpu
def _(tap: Any, dy: Any, dx: Any, *, size: Pair, window: Pair, stride: Pair, padding: Pair) -> Any:
    if _in_fours(dx, dy, window, stride, padding) and tap.flags.c_contiguous:
        return [loop(_max_of_four_grad, flat(tap), flat(dy), flat(dx), (*dx.shape, *dy.shape[1:3]))]
    return [loop(_max_pool2d_grad, tap, dy, dx, (*window, *stride, *padding))]


@max_pool2d_grad.cuda()
def _(tap: Any, dy: Any, dx: Any, *, size: Pair, window: Pair, stride: Pair, padding: Pair) -> Any:
    return each("pool.cu", f"max_pool2d_grad<{c_type(dx)}>", dx.size, flat(tap), flat(dy), flat(dx),
                window_of(dx, dy, window, stride, padding), dx.size)


def _max_of_four_grad(tap, dy, dx, sizes):  # type: ignore[no-untyped-def]
    apart()
    zero = dx.dtype.type(0)
    n, height, width, channels, lines, columns = sizes
    for line in range(n * height):
        to, end = line * width * channels, (line + 1) * width * channels
        above, below = line % height // 2, np.int32(line % height % 2 * 2)
        at = (line // height * lines + above) * columns * channels
        for _ in range(columns if above < lines else 0):
            which, given, left, right = tap[at:], dy[at:], dx[to:], dx[to + channels:]
            filled = _filled(channels, given.size)
            for k in range(filled):
                left[k] = given[k] if which[k] == below else zero
            for k in range(filled):
                right[k] = given[k] if which[k] == below + np.int32(1) else zero
            at, to = at + channels, to + 2 * channels
        dx[to:end] = zero


def _max_pool2d_grad(tap, dy, dx, geometry):  # type: ignore[no-untyped-def]
    apart()
    kh, kw, sh, sw, ph, pw = geometry
    n, h, w, c = dx.shape
    zero = dx.dtype.type(0)
    dx[:] = 0
    for i in range(n):
        for oy in range(dy.shape[1]):
            for ox in range(dy.shape[2]):
                which, given = tap[i, oy, ox], dy[i, oy, ox]
                for k in range(c if c < TOGETHER else 0):
                    t = np.int64(which[k])
                    dx[i, oy * sh - ph + t // kw, ox * sw - pw + t % kw, k] += given[k]
                if c < TOGETHER:
                    continue
                for ky in range(max(0, ph - oy * sh), min(kh, h + ph - oy * sh)):
                    for kx in range(max(0, pw - ox * sw), min(kw, w + pw - ox * sw)):
                        pixel = dx[i, oy * sh - ph + ky, ox * sw - pw + kx]
                        number = np.int32(ky * kw + kx)
                        for k in range(c):
                            pixel[k] += given[k] if which[k] == number else zero


@kernel("avg_pool2d", axes="nHWc->nHWc", flops=_flops)
def avg_pool2d(xp: Any, x: Any, *, window: Pair, stride: Pair, padding: Pair, ceil: bool = False) -> Any:
    """The mean over all taps; those in the padding count as zeros."""
    seen = _windows(xp, x, 0, window, stride, padding, ceil)
    return seen.sum(axis=0) * _shares(xp, x.shape[1:3], seen.shape[1:], x.dtype, window, stride, padding)


@avg_pool2d.cpu
def _(x: Any, y: Any, *, window: Pair, stride: Pair, padding: Pair, ceil: bool = False) -> Any:
    return [loop(_avg_pool2d, x, y, (*window, *stride, *padding))]


@avg_pool2d.cuda()
def _(x: Any, y: Any, *, window: Pair, stride: Pair, padding: Pair, ceil: bool = False) -> Any:
    return each("pool.cu", f"avg_pool2d<{c_type(x)}>", y.size, flat(x), flat(y),
                window_of(x, y, window, stride, padding), y.size)


def _avg_pool2d(x, y, geometry):  # type: ignore[no-untyped-def]
    kh, kw, sh, sw, ph, pw = geometry
    n, h, w, c = x.shape
    for i in range(n):
        for oy in range(y.shape[1]):
            for ox in range(y.shape[2]):
                out = y[i, oy, ox]
                for k in range(c):
                    out[k] = 0
                for ky in range(max(0, ph - oy * sh), min(kh, h + ph - oy * sh)):
                    for kx in range(max(0, pw - ox * sw), min(kw, w + pw - ox * sw)):
                        pixel = x[i, oy * sh - ph + ky, ox * sw - pw + kx]
                        for k in range(c):
                            out[k] += pixel[k]
                lines, columns = min(kh, h + 2 * ph - oy * sh), min(kw, w + 2 * pw - ox * sw)
                share = y.dtype.type(1.0 / (lines * columns))
                for k in range(c):
                    out[k] *= share


@kernel("avg_pool2d_grad", axes="nHWc->nHWc", flops=_flops)
def avg_pool2d_grad(xp: Any, dy: Any, *, size: Pair, window: Pair, stride: Pair, padding: Pair) -> Any:
    """Every tap of a window gets the same share of its dy."""
    g = dy * _shares(xp, size, dy.shape, dy.dtype, window, stride, padding)
    return _spread(xp, xp.broadcast_to(g, (window[0] * window[1], *dy.shape)), size, window, stride, padding)


@avg_pool2d_grad.cpu
def _(dy: Any, dx: Any, *, size: Pair, window: Pair, stride: Pair, padding: Pair) -> Any:
    return [loop(_avg_pool2d_grad, dy, dx, (*window, *stride, *padding))]


@avg_pool2d_grad.cuda()
def _(dy: Any, dx: Any, *, size: Pair, window: Pair, stride: Pair, padding: Pair) -> Any:
    return each("pool.cu", f"avg_pool2d_grad<{c_type(dx)}>", dx.size, flat(dy), flat(dx),
                window_of(dx, dy, window, stride, padding), dx.size)


def _avg_pool2d_grad(dy, dx, geometry):  # type: ignore[no-untyped-def]
    apart()
    kh, kw, sh, sw, ph, pw = geometry
    n, h, w, c = dx.shape
    dx[:] = 0
    for i in range(n):
        for oy in range(dy.shape[1]):
            for ox in range(dy.shape[2]):
                g = dy[i, oy, ox]
                lines, columns = min(kh, h + 2 * ph - oy * sh), min(kw, w + 2 * pw - ox * sw)
                share = dx.dtype.type(1.0 / (lines * columns))
                for ky in range(max(0, ph - oy * sh), min(kh, h + ph - oy * sh)):
                    for kx in range(max(0, pw - ox * sw), min(kw, w + pw - ox * sw)):
                        pixel = dx[i, oy * sh - ph + ky, ox * sw - pw + kx]
                        for k in range(c):
                            pixel[k] += g[k] * share
