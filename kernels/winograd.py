"""Convolution with windows of 3 x 3 and stride 1 by fewer products: Winograd's minimal filtering F(2 x 2, 3 x 3) (Lavin
and Gray, "Fast algorithms for convolutional neural networks", CVPR 2016, section 4.1). Four outputs read a tile of
4 x 4 pixels; in the 16 positions of a transformed tile they take 16 products for each pair of channels, not 36. Each
position is a product of matrices (tiles, channels) (channels, outputs), in tiles of sums as in `tiles`. The gradient
toward the image is the same convolution with turned windows; the weights' is the transpose of these steps.

Each result is a sum over channels (or tiles) in order, then over 9 or 16 positions: its bits do not depend on the
samples beside it. Mean errors (1 to 40 images, 16 to 256 channels) are .3 to .8 of the errors of `direct` for outputs
and toward images, .9 to 1.5 for weights, 1.1 in the middle. A number that is not finite makes NaN of all outputs of its
tile.

These lines import numba, so `conv` imports them where a kernel is bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import chain
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from . import taps
from .registry import Thunk, flat, inlined, loop, memory
from .taps import LANES, PLACES
from .tile_code import BITS, LESS, NUMBER, ROWS, VECTOR, VECTORS, _first, _masked, _place, bare, bare_one
from .tiles import _begin, _lower, _multiplied
from .vectors import _address, transpose

Matrix = Sequence[Sequence[float]]
IMAGE: Matrix = (1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)
WINDOW: Matrix = (1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1)
OUTPUT: Matrix = (1, 0), (1, 1), (1, -1), (0, -1)  #: transposed it makes the outputs
SHIFT = 5  #: a number that is added in this position is added to all outputs of the tile
COLUMNS, LEAST = VECTORS * LANES, -np.float32(np.inf)
CONVOLVED, SUMMED = taps.CONVOLVED // ROWS * ROWS, taps.SUMMED // ROWS * ROWS  #: whole tiles


# ------------------------------------------------------------------------------------------------------- transforms
def _combined(builder: Any, factors: Sequence[float], vectors: Sequence[Any]) -> Any:
    """A sum of vectors with factors; vectors with factors of one size are added first."""
    sums = []
    for size in sorted({abs(factor) for factor in factors} - {0}):
        terms = [(factor, vector) for factor, vector in zip(factors, vectors, strict=True) if abs(factor) == size]
        found = terms[0][1] if terms[0][0] > 0 else builder.fneg(terms[0][1])
        for factor, vector in terms[1:]:
            found = (builder.fadd if factor > 0 else builder.fsub)(found, vector)
        sums.append(found if size == 1 else builder.fmul(found, ir.Constant(VECTOR, [size] * LANES)))
    return reduce(builder.fadd, sums)


def _transformed(builder: Any, matrix: Matrix, grid: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """matrix grid matrix^T, of vectors."""
    half = [[_combined(builder, row, column) for column in zip(*grid, strict=True)] for row in matrix]
    return [[_combined(builder, row, line) for row in matrix] for line in half]


def _spot(builder: Any, address: Any, *steps: tuple[Any, int]) -> Any:
    """A pointer to the vector that is so many steps further."""
    at = NUMBER(0)
    for step, count in steps:
        at = builder.add(at, builder.mul(step, NUMBER(count)))
    return _place(builder, address, at)


def _to_positions(matrix: Matrix) -> Any:
    """to[first + apart p :] = position p of the transform of the vectors x[at + line i + pixel j :], zeros in place of
    those that have not above <= i < below and before <= j < behind, and of their numbers from `count` on."""
    size = range(len(matrix[0]))

    @intrinsic
    def transform(  # type: ignore[no-untyped-def]
            typing, x, at, line, pixel, above, below, before, behind, count, to, first, apart):
        def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            x_, at_, line_, pixel_, above_, below_, before_, behind_, count_, to_, first_, apart_ = arguments
            begin, end = _address(context, builder, x, x_, at_), _address(context, builder, to, to_, first_)
            spots = [[_spot(builder, begin, (line_, i), (pixel_, j)) for j in size] for i in size]

            def inside(i: int, low: Any, high: Any) -> Any:
                return builder.and_(builder.icmp_signed("<=", low, NUMBER(i)),
                                    builder.icmp_signed(">", high, NUMBER(i)))

            def made(load: Callable[[int, int], Any]) -> None:
                values = _transformed(builder, matrix, [[load(i, j) for j in size] for i in size])
                for p, value in enumerate(chain(*values)):
                    builder.store(value, _spot(builder, end, (apart_, p)), align=4)

            lines, pixels = ([inside(i, *ends) for i in size] for ends in ((above_, below_), (before_, behind_)))
            full, some = builder.icmp_signed(">=", count_, NUMBER(LANES)), _first(builder, count_)
            with builder.if_else(reduce(builder.and_, (lines[0], lines[-1], pixels[0], pixels[-1], full))) as (
                    whole, part):
                with whole:
                    made(lambda i, j: builder.load(spots[i][j], align=4))
                with part:
                    made(lambda i, j: _masked(builder, spots[i][j], builder.select(
                        builder.and_(lines[i], pixels[j]), some, BITS(0))))
            return context.get_dummy_value()

        return types.none(x, at, line, pixel, above, below, before, behind, count, to, first, apart), build

    return transform


def _from_positions(matrix: Matrix) -> Any:
    """y[to + line i + pixel j :] = the transform of the positions x[at + apart p :], for i < high and j < wide."""
    @intrinsic
    def transform(typing, x, at, apart, y, to, line, pixel, high, wide):  # type: ignore[no-untyped-def]
        def build(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            x_, at_, apart_, y_, to_, line_, pixel_, high_, wide_ = arguments
            begin, end = _address(context, builder, x, x_, at_), _address(context, builder, y, y_, to_)
            grid = [[builder.load(_spot(builder, begin, (apart_, 4 * i + j)), align=4) for j in range(4)]
                    for i in range(4)]
            for i, values in enumerate(_transformed(builder, matrix, grid)):
                for j, value in enumerate(values):
                    with builder.if_then(builder.and_(builder.icmp_signed("<", NUMBER(i), high_),
                                                      builder.icmp_signed("<", NUMBER(j), wide_)), likely=True):
                        builder.store(value, _spot(builder, end, (line_, i), (pixel_, j)), align=4)
            return context.get_dummy_value()

        return types.none(x, at, apart, y, to, line, pixel, types.int64, types.int64), build

    return transform


def _turned(matrix: Matrix) -> Matrix:
    return list(zip(*matrix, strict=True))


_of_image, _of_window, _of_gradient = map(_to_positions, (IMAGE, WINDOW, OUTPUT))
_output, _window = map(_from_positions, map(_turned, (OUTPUT, WINDOW)))


# ------------------------------------------------------------------------------------------------------------ loops
def _filters(w, outputs, channels, turned, some, filters):  # type: ignore[no-untyped-def]
    """The transformed windows in panels of LANES outputs; `turned`: of LANES channels, for the gradient toward the
    image."""
    apart = outputs * channels
    if turned:
        for c in range(0, channels, LANES):
            for o in range(outputs):
                _of_window(w, (9 * o + 8) * channels + c, -3 * channels, -channels, 0, 3, 0, 3, LANES, filters,
                           c * outputs + o * LANES, apart)
        return
    for o in range(0, outputs, LANES):
        for first in range(0, channels, LANES):
            for t in range(9):
                transpose(w, (9 * o + t) * channels + first, 9 * channels, some, t * LANES * LANES)
            for c in range(LANES):
                _of_window(some, c * LANES, 3 * LANES * LANES, LANES * LANES, 0, 3, 0, 3, LANES, filters,
                           o * channels + (first + c) * LANES, apart)


@inlined
def _next(image, top, left, oh, ow):  # type: ignore[no-untyped-def]
    """The tile of 2 x 2 outputs after one."""
    left += 2
    if left >= ow:
        left, top = 0, top + 2
    if top >= oh:
        top, image = 0, image + 1
    return image, top, left


def _convolve(x, filters, bias, y, work, numbers):  # type: ignore[no-untyped-def]
    n, h, w, c, above, before, oh, ow, outputs = numbers
    count, products = n * (-(-oh // 2)) * (-(-ow // 2)), PLACES * CONVOLVED * c  # which begin there in `work`
    tile, done = (0, 0, 0), (0, 0, 0)
    for begin in range(0, count, CONVOLVED):
        some = min(CONVOLVED, count - begin)
        for t in range(some):
            image, top, left = tile[0], tile[1] - above, tile[2] - before
            at = ((image * h + top) * w + left) * c
            for k in range(0, c, LANES):
                _of_image(x, at + k, w * c, c, -top, h - top, -left, w - left, LANES, work, t * c + k, CONVOLVED * c)
            tile = _next(*tile, oh, ow)
        for p in range(PLACES):
            for k in range(0, outputs, COLUMNS):
                for t in range(p * CONVOLVED, p * CONVOLVED + some, ROWS):
                    at, to = (p * outputs + k) * c, products + t * outputs + k
                    if p == SHIFT and len(bias):
                        _multiplied(work, t * c, c, 1, filters, at, c, bias, k, 0, True, work, to, outputs, ROWS,
                                    min(COLUMNS, outputs - k), LEAST, False)
                    elif k + LANES < outputs:
                        bare(work, t * c, c, filters, at, c, work, to, outputs)
                    else:
                        bare_one(work, t * c, c, filters, at, c, work, to, outputs)
        for t in range(some):
            image, top, left = done
            to = ((image * oh + top) * ow + left) * outputs
            for k in range(0, outputs, LANES):
                _output(work, products + t * outputs + k, CONVOLVED * outputs, y, to + k, ow * outputs, outputs,
                        oh - top, ow - left)
            done = _next(*done, oh, ow)


def _weight_sums(x, dy, dw, totals, work, numbers):  # type: ignore[no-untyped-def]
    n, h, w, c, above, before, oh, ow, outputs, step = numbers
    count, gradients = n * (-(-oh // 2)) * (-(-ow // 2)), PLACES * SUMMED * c  # which begin there in `work`
    less, tile, wide = _lower(outputs), (0, 0, 0), -(-outputs // LANES) * LANES
    talls = less + max(-(-(outputs - less * LESS) // ROWS), 0)
    for begin in range(0, count, SUMMED):
        some = min(SUMMED, count - begin)
        for t in range(some):
            image, top, left = tile
            at = ((image * oh + top) * ow + left) * step
            for k in range(0, outputs, LANES):
                _of_gradient(dy, at + k, ow * step, step, 0, oh - top, 0, ow - left, outputs - k, work,
                             gradients + t * wide + k, SUMMED * wide)
            top, left = top - above, left - before
            at = ((image * h + top) * w + left) * c
            for k in range(0, c, LANES):
                _of_image(x, at + k, w * c, c, -top, h - top, -left, w - left, LANES, work, k * some + t * LANES,
                          SUMMED * c)
            tile = _next(*tile, oh, ow)
        for p in range(PLACES):
            for k in range(0, c, COLUMNS):
                for tall in range(talls):
                    o = _begin(tall, less, outputs, ROWS)
                    to = (p * outputs + o) * c + k
                    _multiplied(work, gradients + p * SUMMED * wide + o, 1, wide, work, p * SUMMED * c + k * some,
                                some, totals, to, c, begin > 0, totals, to, c,
                                min(LESS if tall < less else ROWS, outputs - o), min(COLUMNS, c - k), LEAST,
                                tall < less)
    for o in range(outputs):
        for k in range(0, c, LANES):
            _window(totals, o * c + k, outputs * c, dw, 9 * o * c + k, 3 * c, c, 3, 3)


# ------------------------------------------------------------------------------------------------------------ calls
def convolve(x: Any, w: Any, bias: Any, y: Any, before: Sequence[int], turned: bool, filters: Any, work: Any
             ) -> list[Thunk]:
    """y (n, oh, ow, o) = the products of x (n, h, w, c), with `before` zeros above and on the left, and w (o, 3, 3, c),
    + bias unless it is None. `turned`: x has the outputs of w and y its channels."""
    outputs, channels = w.shape[0], w.shape[3]
    numbers = *x.shape, *before, *y.shape[1:]
    some = work[: 9 * LANES * LANES]
    bias = np.empty(0, w.dtype) if bias is None else bias
    return [loop(_filters, flat(w), outputs, channels, turned, some, filters),
            loop(_convolve, flat(x), filters, bias, flat(y), work, numbers)]


def weight_sums(x: Any, dy: Any, dw: Any, before: Sequence[int], step: int, totals: Any, work: Any) -> list[Thunk]:
    """dw (o, 3, 3, c) = the gradient of the weights, from x and dy (n, oh, ow, o), whose pixels are `step` numbers
    apart."""
    numbers = *x.shape, *before, *dy.shape[1:], step
    return [loop(_weight_sums, flat(x), memory(dy), flat(dw), totals, work, numbers)]
