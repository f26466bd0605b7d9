"""Images in another size: adaptive average pooling, nearest and bilinear upsampling. Channels last.

If windows or repeats are equal, they equal `avg_pool2d` and `broadcast_to`. Otherwise nearest pixels are chosen, and
other rows and columns are weighted sums of rows and columns: two products with small constant matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..autograd.arguments import Size, TwoSizes
from ..autograd.tensor import ShapeError, Tensor, array
from .linear import matmul
from .pool import avg_pool2d
from .rearrange import take
from .reduce import broadcast_to, mean
from .shape import reshape
from .windows import along_one_axis, lengths


def adaptive_avg_pool2d(x: Tensor, output_size: Size | tuple[Size | None, Size | None]) -> Tensor:
    """The means of windows that cover the image: `x (n, h, w, c) -> (n, *output_size, c)`; None keeps the rows or
    columns. Window i of n goes from floor(i h / n) to ceil((i + 1) h / n), as in torch."""
    _check(x)
    rows, columns = output_size if isinstance(output_size, Sequence) and len(output_size) == 2 else [output_size] * 2
    if isinstance(output_size, Sequence):
        rows, columns = x.shape[1] if rows is None else rows, x.shape[2] if columns is None else columns
    to = lengths((rows, columns), "output_size")
    if to == (1, 1):
        return mean(x, axis=(1, 2), keepdims=True)
    if not any(n % m for n, m in zip(x.shape[1:3], to, strict=True)):
        return avg_pool2d(x, (x.shape[1] // to[0], x.shape[2] // to[1]))
    return _products(x, *(_windows(n, m) for n, m in zip(x.shape[1:3], to, strict=True)))


adaptive_avg_pool1d = along_one_axis(adaptive_avg_pool2d, output_size="OneSize")


def interpolate(x: Tensor, size: TwoSizes | None = None, scale_factor: TwoSizes | None = None,
                mode: str = "nearest", align_corners: bool | None = None) -> Tensor:
    """x (n, h, w, c) with `size` rows and columns, or with its own times `scale_factor`, a whole number or two.

    `mode`: nearest or bilinear. `align_corners` (for bilinear): the corner pixels keep their values. As in torch.
    Raises ValueError for another mode, for align_corners with nearest, and unless one of size and scale_factor is
    given.
    """
    _check(x)
    if (size is None) == (scale_factor is None):
        raise ValueError("interpolate: give either size or scale_factor")
    if mode not in ("nearest", "bilinear"):
        raise ValueError(f"interpolate: the mode is {mode!r}; it must be nearest or bilinear")
    if mode == "nearest" and align_corners is not None:
        raise ValueError("interpolate: align_corners has no effect on the mode nearest; it goes with bilinear")
    h, w = x.shape[1:3]
    factors = lengths(scale_factor, "scale_factor") if scale_factor is not None else (0, 0)
    to = (h * factors[0], w * factors[1]) if size is None else lengths(size, "size")
    if mode == "bilinear":
        return _products(x, *(_between(n, m, bool(align_corners)) for n, m in zip((h, w), to, strict=True)))
    if to[0] % h or to[1] % w:
        return take(take(x, np.arange(to[0]) * h // to[0], 1), np.arange(to[1]) * w // to[1], 2)
    n, c = x.shape[0], x.shape[3]
    return reshape(broadcast_to(reshape(x, [n, h, 1, w, 1, c]), (n, h, to[0] // h, w, to[1] // w, c)), [n, *to, c])


def _check(x: Tensor) -> None:
    if x.ndim != 4 or 0 in x.shape[1:]:
        raise ShapeError(f"an image (n, h, w, c) is needed, not {x.shape}")


def _windows(length: int, count: int) -> Any:
    """(count, length): row i has the mean of window i."""
    found = np.zeros((count, length))
    for i in range(count):
        begin, end = i * length // count, -(-(i + 1) * length // count)
        found[i, begin:end] = 1 / (end - begin)
    return found


def _between(length: int, count: int, align_corners: bool) -> Any:
    """(count, length): row i has the weights of the two neighbours of its place."""
    places = np.arange(count)
    at = (places * ((length - 1) / max(count - 1, 1)) if align_corners
          else np.maximum((places + 0.5) * (length / count) - 0.5, 0))
    low = np.minimum(at.astype(int), length - 1)
    share, eye = (at - low)[:, None], np.eye(length)
    return (1 - share) * eye[low] + share * eye[np.minimum(low + 1, length - 1)]


def _products(x: Tensor, rows: Any, columns: Any) -> Tensor:
    """rows (oh, h) x columns^T (w, ow) of each image and channel."""
    n, h, w, c = x.shape
    y = matmul(array(rows, x.dtype), reshape(x, [n, h, w * c]))
    y = matmul(array(columns, x.dtype), reshape(y, [n * len(rows), w, c]))
    return reshape(y, [n, len(rows), len(columns), c])
