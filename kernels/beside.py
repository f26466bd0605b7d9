"""Convolutions with few outputs, which leave most of LANES empty: the outputs of neighbouring pixels of a line are one
pixel with several times as many outputs, made by a wider window with zeros at its ends. (For 2 pixels and a window of
5, 6 steps in place of 10.) A number that is not finite makes NaN of all outputs of its pixels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .registry import Thunk, loop
from .taps import LANES

WORTH = 0.7  #: of the steps, at most


class Like(NamedTuple):
    """The shape and type of an array."""

    shape: tuple[int, ...]
    dtype: Any


def together(outputs: int, line: int, taps: int, stride: int, dilation: int, groups: int) -> int:
    """How many pixels of a line become one; 1 where that saves nothing."""
    found = max((n for n in range(1, LANES // max(outputs, 1) + 1) if line % n == 0), default=1) if line else 1
    few = taps + (found - 1) * stride <= WORTH * found * taps
    return found if few and dilation == groups == 1 else 1


def widened(w: Any, pixels: int, stride: int) -> Like:
    """The wider weights of weights (o, kh, kw, c): (pixels * o, kh, wider, c)."""
    outputs, lines, columns, channels = w.shape
    return Like((pixels * outputs, lines, columns + (pixels - 1) * stride, channels), w.dtype)


def joined(y: Any, pixels: int) -> Like:
    """The pixels of y (n, h, w, o): (n, h, w / pixels, pixels * o)."""
    n, h, w, o = y.shape
    return Like((n, h, w // pixels, pixels * o), y.dtype)


def spread(w: Any, bias: Any, stride: int, wide: Any, biases: Any) -> Thunk:
    """Writes weights (o, kh, kw, c) into wider ones, and a bias, unless it is None, for each pixel."""
    return loop(_spread, w, np.empty(0, w.dtype) if bias is None else bias, stride, wide, biases)


def folded(wide: Any, stride: int, dw: Any) -> Thunk:
    """Adds up the gradient of the wider weights."""
    return loop(_folded, wide, stride, dw)


def _spread(w, bias, stride, wide, biases):  # type: ignore[no-untyped-def]
    outputs = w.shape[0]
    wide[:] = 0
    for p in range(wide.shape[0] // outputs):
        biases[p * outputs : p * outputs + len(bias)] = bias
        for o in range(outputs):
            for ky in range(w.shape[1]):
                for kx in range(w.shape[2]):
                    for c in range(w.shape[3]):
                        wide[p * outputs + o, ky, p * stride + kx, c] = w[o, ky, kx, c]


def _folded(wide, stride, dw):  # type: ignore[no-untyped-def]
    outputs = dw.shape[0]
    for o in range(outputs):
        for ky in range(dw.shape[1]):
            for kx in range(dw.shape[2]):
                for c in range(dw.shape[3]):
                    total = wide[o, ky, kx, c]
                    for p in range(1, wide.shape[0] // outputs):
                        total += wide[p * outputs + o, ky, p * stride + kx, c]
                    dw[o, ky, kx, c] = total
