"""Patches of an image as the rows of a matrix: gathered for a product, or scattered back and added up.

With few channels, patches have the taps first and the pixels last, so that longer runs of the image are contiguous in
them. Knows no weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .registry import Thunk, loop

ACROSS = 16  #: patches with shorter contiguous runs than this have the taps first


class _Again:
    """A loop bound to many sets of arguments of the same types: compiled once."""

    def __init__(self, function: Any) -> None:
        self.function: Any = function
        self.compiled: Any = None

    def __call__(self, *arguments: Any) -> Thunk:
        if self.compiled is None:
            first: Any = loop(self.function, *arguments)
            self.compiled = first.func
        return partial(self.compiled, *arguments)


class Gather:
    """Gathers chunks of patches into one array. `run`: how many of its numbers are contiguous in the image."""

    def __init__(self, work: Any, run: int) -> None:
        self.work, self.across = work, run < ACROSS
        self.bind = _Again(_gather_across if self.across else _gather)

    def __call__(self, rows: int, arguments: tuple[Any, ...]) -> tuple[Thunk, Any]:
        """The call that gathers, and the patches (rows, taps * channels) as a view, row-major or column-major."""
        if self.across:
            patches = self.work[:rows].reshape(self.work.shape[1], rows)
            return self.bind(patches, *arguments), patches.T
        patches = self.work[:rows]
        return self.bind(patches, *arguments), patches


class Scatter(_Again):
    """Adds chunks of patches (rows, taps * channels) back to the pixels from which they came."""

    def __init__(self) -> None:
        super().__init__(_scatter)


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
                low = min(ow, max(0, (sw - 1 - left) // sw))  # the columns of y whose tap is inside x
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
