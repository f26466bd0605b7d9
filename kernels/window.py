"""A window over an image as an argument of CUDA kernels: `struct Window` in window.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .cuda import Struct

Pair = tuple[int, int]


def window(x: Any, y: Any, taps: Sequence[int], stride: Pair, padding: Pair, dilation: Pair = (1, 1)) -> Struct:
    """The windows of `taps` over x (n, h, w, c), one for each pixel of y (n, oh, ow, ...)."""
    return Struct("Window",
                  np.array([*x.shape, *y.shape[1:3], *taps, *stride, *padding, *dilation], np.int32).tobytes())
