"""Convolution with one filter per channel, on the CPU: loops with the channels innermost, so that they are vectorised.

Each sample is copied into a padded image first, so that no tap has to look whether it lies inside. Taps are kept as
(kh, kw, c), channels together. Knows no weights shared between channels: those are matrix products, in `conv`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .registry import Thunk, loop, ufunc

Pair = tuple[int, int]
Geometry = tuple[Pair, Pair, Pair]  # stride, padding, dilation


def depthwise_work(x: tuple[int, ...], w: tuple[int, ...], padding: Pair, dtype: Any) -> list[Any]:
    """Scratch arrays for x (n, h, w, c) and w (c, kh, kw, 1): a padded image, and two sets of taps."""
    return [((x[1] + 2 * padding[0], x[2] + 2 * padding[1], x[3]), dtype), ((2, *w[1:3], x[3]), dtype)]


def _tap_major(w: Any) -> Any:
    """(c, kh, kw, 1) seen as (kh, kw, c)."""
    return w[..., 0].transpose(1, 2, 0)


def _flat(geometry: Geometry) -> tuple[int, ...]:
    return tuple(v for pair in geometry for v in pair)


def depthwise(x: Any, w: Any, y: Any, padded: Any, taps: Any, *, geometry: Geometry) -> list[Thunk]:
    return [ufunc(np.positive, _tap_major(w), taps[0]),
            loop(_forward, x, taps[0], padded, y, _flat(geometry))]


def depthwise_input_grad(dy: Any, w: Any, dx: Any, padded: Any, taps: Any, *, geometry: Geometry) -> list[Thunk]:
    return [ufunc(np.positive, _tap_major(w), taps[0]),
            loop(_input_grad, dy, taps[0], padded, dx, _flat(geometry))]


def depthwise_weight_grad(x: Any, dy: Any, dw: Any, padded: Any, taps: Any, *, geometry: Geometry) -> list[Thunk]:
    return [loop(_weight_grad, x, dy, padded, taps[0], taps[1], _flat(geometry)),
            ufunc(np.positive, taps[0], _tap_major(dw))]


def _forward(x, taps, padded, y, geometry):  # type: ignore[no-untyped-def]
    sh, sw, ph, pw, dh, dw = geometry
    kh, kw, c = taps.shape
    padded[:] = 0
    for n in range(x.shape[0]):
        for i in range(x.shape[1]):
            for j in range(x.shape[2]):
                source, target = x[n, i], padded[i + ph]
                for k in range(c):
                    target[j + pw, k] = source[j, k]
        for oy in range(y.shape[1]):
            for ox in range(y.shape[2]):
                out = y[n, oy, ox]
                for k in range(c):
                    out[k] = 0
                for ky in range(kh):
                    row, t = padded[oy * sh + ky * dh], taps[ky]
                    if kw == 3:
                        a, b, d = row[ox * sw], row[ox * sw + dw], row[ox * sw + 2 * dw]
                        ta, tb, td = t[0], t[1], t[2]
                        for k in range(c):
                            out[k] += a[k] * ta[k] + b[k] * tb[k] + d[k] * td[k]
                    else:
                        for kx in range(kw):
                            a, ta = row[ox * sw + kx * dw], t[kx]
                            for k in range(c):
                                out[k] += a[k] * ta[k]


def _input_grad(dy, taps, padded, dx, geometry):  # type: ignore[no-untyped-def]
    sh, sw, ph, pw, dh, dw = geometry
    kh, kw, c = taps.shape
    for n in range(dy.shape[0]):
        padded[:] = 0
        for oy in range(dy.shape[1]):
            for ox in range(dy.shape[2]):
                g = dy[n, oy, ox]
                for ky in range(kh):
                    row = padded[oy * sh + ky * dh]
                    for kx in range(kw):
                        out, t = row[ox * sw + kx * dw], taps[ky, kx]
                        for k in range(c):
                            out[k] += g[k] * t[k]
        for i in range(dx.shape[1]):
            for j in range(dx.shape[2]):
                source, target = padded[i + ph], dx[n, i]
                for k in range(c):
                    target[j, k] = source[j + pw, k]


def _weight_grad(x, dy, padded, total, part, geometry):  # type: ignore[no-untyped-def]
    sh, sw, ph, pw, dh, dw = geometry
    kh, kw, c = total.shape
    padded[:] = 0
    total[:] = 0
    for n in range(x.shape[0]):
        for i in range(x.shape[1]):
            for j in range(x.shape[2]):
                source, target = x[n, i], padded[i + ph]
                for k in range(c):
                    target[j + pw, k] = source[j, k]
        part[:] = 0
        for oy in range(dy.shape[1]):
            for ky in range(kh):
                row = padded[oy * sh + ky * dh]
                for ox in range(dy.shape[2]):
                    g = dy[n, oy, ox]
                    for kx in range(kw):
                        out, a = part[ky, kx], row[ox * sw + kx * dw]
                        for k in range(c):
                            out[k] += g[k] * a[k]
        for ky in range(kh):
            for kx in range(kw):
                for k in range(c):
                    total[ky, kx, k] += part[ky, kx, k]
