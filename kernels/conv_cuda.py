"""Convolution on CUDA. The way it is computed depends only on shapes, type and geometry:

| way       | where                                       | forward          | input gradient  | weight gradient  |
|-----------|---------------------------------------------|------------------|-----------------|------------------|
| pointwise | 1x1, stride 1, no padding, one group        | product          | product         | product          |
| depthwise | one filter for each of two or more channels | depthwise.cu     | depthwise.cu    | depthwise.cu     |
| lowered   | float64, for which cuDNN has little         | im2col, product  | product, col2im | im2col, product  |
| library   | all others                                  | cuDNN            | cuDNN           | cuDNN            |

The first two add the bias themselves; for the others another launch adds it. The bias's gradient is the sum of dy over
all pixels. Small products for the weight gradient are made by row_products.cu, with that sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .conv import Geometry, Pair, conv2d, conv2d_input_grad, conv2d_weight_grad, is_product
from .cuda import Call, Convolution, Zeros, c_type, dense, each, elements
from .depthwise import cuda_depthwise, cuda_depthwise_input_grad, cuda_depthwise_weight_grad, cuda_depthwise_work
from .linear import product
from .registry import flat
from .row_products import cuda_row_products, cuda_row_products_work
from .sums import cuda_row_sums, cuda_row_sums_work
from .window import window

PATCHES = 256 * 2**20  #: the most bytes of patches at a time, unless one sample needs more


def way(x: Any, w: Any, geometry: Geometry) -> str:
    """The name of the way, for x (n, h, w, c) and w (o, kh, kw, c / groups)."""
    if tuple(w.shape[1:3]) == (1, 1) and geometry == Geometry((1, 1), (0, 0), geometry.dilation, 1):
        return "pointwise"
    if 1 < x.shape[3] == w.shape[0] == geometry.groups:
        return "depthwise"
    return "lowered" if str(x.dtype) == "float64" else "library"


def _samples(x: Any, w: Any, y: Any, geometry: Geometry) -> int:
    """How many samples are lowered together."""
    size = y.shape[1] * y.shape[2] * w.shape[1] * w.shape[2] * x.shape[3] * np.dtype(x.dtype).itemsize
    return int(max(1, min(x.shape[0], PATCHES // max(size, 1))))


def _work(x: Any, w: Any, y: Any, geometry: Geometry) -> list[Any]:
    """The scratch array of patches, if any."""
    if way(x, w, geometry) != "lowered":
        return []
    rows = _samples(x, w, y, geometry) * y.shape[1] * y.shape[2]
    return [((rows * w.shape[1] * w.shape[2] * x.shape[3],), x.dtype)]


def _matrices(pixels: Any, groups: int) -> Any:
    """(..., c) as a matrix (pixels, c), or for several groups as (groups, pixels, c / groups)."""
    matrix = pixels.reshape(-1, pixels.shape[-1])
    return matrix if groups == 1 else matrix.reshape(len(matrix), groups, -1).transpose(1, 0, 2)


def _filters(w: Any, groups: int) -> Any:
    """(o, kh, kw, c / groups) as a matrix (o, taps), or for several groups as (groups, o / groups, taps)."""
    return w.reshape(len(w), -1) if groups == 1 else w.reshape(groups, len(w) // groups, -1)


def _parts(kernel: str, x: Any, w: Any, y: Any, patches: Any,
           geometry: Geometry) -> Iterator[tuple[slice, Any, Sequence[Call]]]:
    """For each part of the samples: its slice, the matrix (or matrices) of its patches, and the launch of im2col or
    col2im between the patches and x."""
    step, groups = _samples(x, w, y, geometry), geometry.groups
    for start in range(0, x.shape[0], step):
        part = slice(start, start + step)
        rows = len(y[part]) * y.shape[1] * y.shape[2]
        here = patches[: rows * w.shape[1] * w.shape[2] * x.shape[3]]
        source, out = (x[part], here) if kernel == "im2col" else (here, x[part])
        launch = each("conv.cu", f"{kernel}<{c_type(x)}>", out.size, flat(source), flat(out),
                      window(x[part], y, w.shape[1:3], *geometry[:3]), groups, out.size)
        yield part, here.reshape((rows, -1) if groups == 1 else (groups, rows, -1)), launch


def _transposed(matrices: Any) -> Any:
    return matrices.swapaxes(-1, -2)


@conv2d.cuda(work=lambda reads, writes, geometry, act="": _work(reads[0], reads[1], writes[0], geometry))
def _(x: Any, w: Any, *rest: Any, geometry: Geometry, act: str = "") -> list[Call]:
    bias, (y, *patches) = (rest[0], rest[1:]) if rest[0].ndim == 1 else (None, rest)
    groups, found = geometry.groups, way(x, w, geometry)
    if not y.size:
        return []
    end = dense("elementwise.cu", f"{act}<{c_type(y)}>", y, y) if act else []
    if not x.size:  # nothing but padding
        calls: list[Call] = [Zeros(y)]
    elif found == "pointwise":
        return product(_matrices(x, 1), _filters(w, 1).T, _matrices(y, 1), bias, act=act)
    elif found == "depthwise":
        return [*cuda_depthwise(x, w, bias, y, geometry=geometry[:3]), *end]
    elif found == "library":
        calls = [Convolution("forward", x, w, y, *geometry)]
    else:
        calls = []
        for part, matrix, lower in _parts("im2col", x, w, y, patches[0], geometry):
            calls += [*lower, *product(matrix, _transposed(_filters(w, groups)), _matrices(y[part], groups))]
    added = [] if bias is None else elements("elementwise.cu", f"add<{c_type(y)}>", [y, bias], y)
    return [*calls, *added, *end]


@conv2d_input_grad.cuda(work=lambda reads, writes, size, geometry: _work(writes[0], reads[1], reads[0], geometry))
def _(dy: Any, w: Any, dx: Any, *patches: Any, size: Pair, geometry: Geometry) -> list[Call]:
    groups, found = geometry.groups, way(dx, w, geometry)
    if not dx.size or not dy.size:
        return [Zeros(dx)] if dx.size else []
    if found == "pointwise":
        return product(_matrices(dy, 1), _filters(w, 1), _matrices(dx, 1))
    if found == "depthwise":
        return cuda_depthwise_input_grad(dy, w, dx, geometry=geometry[:3])
    if found == "library":
        return [Convolution("input_grad", dx, w, dy, *geometry)]
    calls: list[Call] = []
    for part, matrix, back in _parts("col2im", dx, w, dy, patches[0], geometry):
        calls += [*product(_matrices(dy[part], groups), _filters(w, groups), matrix), *back]
    return calls


def _weight_grad_work(reads: Any, writes: Any, taps: Pair, bias: bool, geometry: Geometry) -> list[Any]:
    (x, dy), dw = reads, writes[0]
    if is_product(x, dw, geometry):
        return cuda_row_products_work(_rows(x.shape)[0], dw.shape[0], dw.shape[3], bias)
    own = cuda_depthwise_work(dy.shape, dw.shape) if way(x, dw, geometry) == "depthwise" else _work(x, dw, dy, geometry)
    return [*own, *(cuda_row_sums_work(*_rows(dy.shape)) if bias else [])]


def _rows(y: tuple[int, ...]) -> Pair:
    return y[0] * y[1] * y[2], y[3]


@conv2d_weight_grad.cuda(work=_weight_grad_work)
def _(x: Any, dy: Any, dw: Any, *rest: Any, taps: Pair, bias: bool, geometry: Geometry) -> list[Call]:
    biases, work = rest[:bias], rest[bias:]
    if is_product(x, dw, geometry):
        return cuda_row_products(_matrices(dy, 1), _matrices(x, 1), dw, biases[0] if bias else None, *work)
    found, sums = way(x, dw, geometry), biases[0] if biases else None
    if found == "pointwise" and x.size and dy.size:
        return product(_matrices(dy, 1).T, _matrices(x, 1), _filters(dw, 1), sums=sums, work=work[0] if work else None)
    own = 1 if found in ("depthwise", "lowered") else 0
    added = [] if sums is None else cuda_row_sums(dy.reshape(_rows(dy.shape)), sums, *work[own:])
    return [*_weight_grad(x, dy, dw, *work[:own], geometry=geometry), *added]


def _weight_grad(x: Any, dy: Any, dw: Any, *work: Any, geometry: Geometry) -> list[Call]:
    groups, found = geometry.groups, way(x, dw, geometry)
    if not x.size or not dy.size:
        return [Zeros(dw)] if dw.size else []
    if found == "depthwise":
        return cuda_depthwise_weight_grad(x, dy, dw, *work, geometry=geometry[:3])
    if found == "library":
        return [Convolution("weight_grad", x, dw, dy, *geometry)]
    calls: list[Call] = []
    for part, matrix, lower in _parts("im2col", x, dw, dy, work[0], geometry):
        calls += [*lower, *product(_transposed(_matrices(dy[part], groups)), matrix, _filters(dw, groups),
                                   accumulate=part.start > 0)]
    return calls
