"""Convolution on the CPU without matrix products: loops that keep a block of sums in vector registers.

A block is PIXELS pixels times LANES output channels. One step reads LANES weights and adds their products with one
value of each pixel; weights are copied first, so that a step's weights are neighbours. Each output adds its products in
the same order, with one rounding each, whatever the size of a vector register is: all machines get the same bits. For
the gradient of the weights, the sums are LANES output channels times PIXELS weights, and a step is one pixel.

These lines import numba, so `conv` imports them where a kernel is bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit

from .registry import Thunk, flat, loop, memory
from .taps import LANES, Part, blocks_of
from .taps import lines as lines_of
from .vectors import PIXELS, TWICE, add, add_products, add_products_twice, alike, offsets_at, store, zeros


# ------------------------------------------------------------------------------------------------------- the loops
# Indices are cast to unsigned because a signed one might mean "from the end", and that check keeps loops from being
# vectorised.
@njit(nogil=True, error_model="numpy")
def _frame(padded, x, start, h, w, c, top, left, height, width):  # type: ignore[no-untyped-def]
    """Copies the image (h, w, c) that begins at `start` into one of (height, width, c), with zeros around it."""
    for i in range(height):
        to, line = i * width * c, i - top
        low = min(left, width) * c if 0 <= line < h else width * c
        high = low + max(0, min(w, width - left)) * c if 0 <= line < h else width * c
        begin = start + line * w * c - low
        for k in range(low):
            padded[np.uintp(to + k)] = 0
        for k in range(low, high):
            padded[np.uintp(to + k)] = x[np.uintp(begin + k)]
        for k in range(high, width * c):
            padded[np.uintp(to + k)] = 0


def _pack(w, steps, shape, bias, numbers, packed):  # type: ignore[no-untyped-def]
    groups, outputs, rows = shape
    at = 0
    for g in range(groups):
        for first in range(0, outputs, LANES):
            count = min(LANES, outputs - first)
            for j in range(LANES):
                packed[at + j] = bias[g * outputs + first + j] if j < count and len(bias) else 0
            for t in numbers:
                start = g * steps[0] + first * steps[1] + t * steps[2]
                for r in range(rows):
                    at += LANES
                    for j in range(count):
                        packed[np.uintp(at + j)] = w[np.uintp(start + r * steps[3] + j * steps[1])]
                    for j in range(count, LANES):
                        packed[np.uintp(at + j)] = 0
            at += LANES


@njit(nogil=True, error_model="numpy", inline="always")
def _sums(source, pixel, reads, taps, run, packed, begin):  # type: ignore[no-untyped-def]
    """A block of sums, from the bias at `begin` on."""
    sums, to = alike(packed, begin), begin + LANES
    for t in range(len(taps)):
        at = pixel + taps[t]
        for k in range(run):
            sums = add_products(sums, source, at + k, reads, packed, to)
            to += LANES
    return sums


@njit(nogil=True, error_model="numpy", inline="always")
def _sums_twice(source, pixel, reads, taps, run, packed, begin, apart):  # type: ignore[no-untyped-def]
    """The same for two blocks, whose weights are so far apart."""
    sums, to = (alike(packed, begin), alike(packed, begin + apart)), begin + LANES
    for t in range(len(taps)):
        at = pixel + taps[t]
        for k in range(run):
            sums = add_products_twice(sums[0], sums[1], source, at + k, reads, packed, to, to + apart)
            to += LANES
    return sums


def _convolve(x, packed, y, padded, shape, taps):  # type: ignore[no-untyped-def]
    n, h, w, c, top, left, height, width, copied, groups, rows, run, oh, ow, sy, sx = shape[:16]
    outputs, yh, yw, y0, x0, ys, xs, lines, columns = shape[16:25]
    reads, writes = offsets_at(shape, 25), offsets_at(shape, 25 + PIXELS)
    depth = (1 + len(taps) * run) * LANES
    source, across = x, w * c
    if copied:
        source, across = padded, width * c
    for i in range(n):
        start = i * h * w * c
        if copied:
            _frame(padded, x, start, h, w, c, top, left, height, width)
            start = 0
        begin = 0
        for g in range(groups):
            first = 0
            while first < outputs:
                twice = TWICE and first + LANES < outputs
                count = min(LANES, outputs - first)
                for oy in range(0, oh, lines):
                    for ox in range(0, ow, columns):
                        line, column = min(oy, oh - lines), min(ox, ow - columns)  # the last may overlap another
                        pixel = start + line * sy * across + column * sx * c + g * rows
                        at = ((i * yh + y0 + line * ys) * yw + x0 + column * xs) * outputs * groups
                        at += g * outputs + first
                        if twice:
                            sums, others = _sums_twice(source, pixel, reads, taps, run, packed, begin, depth)
                            store(others, y, at + LANES, writes, min(LANES, outputs - first - LANES))
                        else:
                            sums = _sums(source, pixel, reads, taps, run, packed, begin)
                        store(sums, y, at, writes, count)
                blocks = 1 + twice
                first += LANES * blocks
                begin += depth * blocks


@njit(nogil=True, error_model="numpy", inline="always")
def _over_pixels(source, begin, offsets, across, apart, lanes, lines, columns):  # type: ignore[no-untyped-def]
    """The sums over lines of pixels, from the first value on."""
    sums, to = zeros(lanes), 0
    for line in range(lines):
        at = begin + line * across
        for _ in range(columns):
            sums = add_products(sums, source, at, offsets, lanes, to)
            at += apart
            to += LANES
    return sums


@njit(nogil=True, error_model="numpy", inline="always")
def _over_pixels_twice(source, begin, offsets, across, apart, lanes, half, lines, columns):  # type: ignore[no-untyped-def]
    """The same for two blocks of outputs, the second from lanes[half] on."""
    sums, to = (zeros(lanes), zeros(lanes)), 0
    for line in range(lines):
        at = begin + line * across
        for _ in range(columns):
            sums = add_products_twice(sums[0], sums[1], source, at, offsets, lanes, to, to + half)
            at += apart
            to += LANES
    return sums


@njit(nogil=True, error_model="numpy", inline="always")
def _add_over_pixels(source, begin, offsets, across, apart, lanes, half, lines, columns,  # type: ignore[no-untyped-def]
                     totals, to, second, into):
    """Adds these sums to totals from `to` on; if there are two blocks, the second one's `second` further."""
    if second:
        sums, others = _over_pixels_twice(source, begin, offsets, across, apart, lanes, half, lines, columns)
        add(others, totals, to + second, into)
    else:
        sums = _over_pixels(source, begin, offsets, across, apart, lanes, lines, columns)
    add(sums, totals, to, into)


@njit(nogil=True, error_model="numpy")
def _side_by_side(lanes, to, dy, at, step, count, pixels):  # type: ignore[no-untyped-def]
    """Copies `count` outputs of each pixel, with zeros up to LANES."""
    for pixel in range(pixels):
        for j in range(count):
            lanes[np.uintp(to + pixel * LANES + j)] = dy[np.uintp(at + j)]
        for j in range(count, LANES):
            lanes[np.uintp(to + pixel * LANES + j)] = 0
        at += step


def _weight_sums(x, dy, totals, padded, lanes, shape, taps, blocks):  # type: ignore[no-untyped-def]
    n, h, w, c, top, left, height, width, copied, _, rows, run, oh, ow, sy, sx = shape[:16]
    step, chunk = shape[16:18]
    rest, whole, into = offsets_at(shape, 18), offsets_at(shape, 18 + PIXELS), offsets_at(shape, 18 + 2 * PIXELS)
    source, across, half, depth = x, w * c, chunk * ow * LANES, len(taps) * run * LANES
    if copied:
        source, across = padded, width * c
    totals[:] = 0
    for i in range(n):
        start = i * h * w * c
        if copied:
            _frame(padded, x, start, h, w, c, top, left, height, width)
            start = 0
        for begin in range(0, oh, chunk):
            end = min(begin + chunk, oh)
            total = b = 0
            while b < len(blocks):
                group = blocks[b, 0]
                twice = TWICE and b + 1 < len(blocks) and blocks[b + 1, 0] == group
                at = (i * oh + begin) * ow * step
                for other in range(1 + twice):
                    _side_by_side(lanes, other * half, dy, at + blocks[b + other, 1], step, blocks[b + other, 2],
                                  (end - begin) * ow)
                for t in range(len(taps)):
                    at = start + begin * sy * across + group * rows + taps[t]
                    for k in range(0, run - run % PIXELS, PIXELS):
                        _add_over_pixels(source, at + k, None, sy * across, sx * c, lanes, half, end - begin, ow,
                                         totals, total + k * LANES, depth * twice, whole)
                    if run % PIXELS:
                        k = run - run % PIXELS
                        _add_over_pixels(source, at + k, rest, sy * across, sx * c, lanes, half, end - begin, ow,
                                         totals, total + k * LANES, depth * twice, into)
                    total += run * LANES
                total += depth * twice
                b += 1 + twice


def _unpack(totals, numbers, blocks, dw):  # type: ignore[no-untyped-def]
    _, taps, rows = dw.shape
    flat_dw, at = dw.reshape(dw.size), 0
    for b in range(len(blocks)):
        for t in numbers:
            for j in range(blocks[b, 2]):
                to = ((blocks[b, 1] + j) * taps + t) * rows
                for r in range(rows):
                    flat_dw[np.uintp(to + r)] = totals[np.uintp(at + r * LANES + j)]
            at += rows * LANES


# ------------------------------------------------------------------------------------------------------------ calls
def _numbers(values: Sequence[int]) -> Any:
    return np.array(values, np.int64)


def _source(x: Any, part: Part, groups: int) -> tuple[list[int], Any]:
    """Arguments of both loops for the image and its taps: numbers, and the places of runs of neighbouring values."""
    (v, h), each = part[:2], x.shape[3] // groups
    across = (h.length if part.copied else x.shape[2]) * x.shape[3]
    joined = groups == 1 and bool(h.offsets) and h.offsets == tuple(range(h.offsets[0], h.offsets[0] + len(h.offsets)))
    offsets, run = (h.offsets[:1], len(h.offsets) * each) if joined else (h.offsets, each)
    return ([*x.shape, v.before, h.before, v.length, h.length, part.copied, groups, each, run, v.outputs, h.outputs,
             v.step, h.step], _numbers([oy * across + ox * x.shape[3] for oy in v.offsets for ox in offsets]))


def _which(part: Part, taps: Sequence[int]) -> Any:
    return _numbers([ky * taps[1] + kx for ky, kx in part.numbers])


def convolve(x: Any, w: Any, bias: Any, y: Any, part: Part, taps: Sequence[int], packed: Any, padded: Any
             ) -> list[Thunk]:
    """y (n, h, w, groups * o) at the part's places = the products of x (n, h, w, groups * c) with w (groups, o, taps,
    c), + bias unless it is None. `packed`, `padded`: scratch."""
    groups, outputs = w.shape[:2]
    v, h = part[:2]
    shape, places = _source(x, part, groups)
    columns = min(PIXELS, h.outputs)
    lines = min(PIXELS // max(columns, 1), v.outputs)
    block = [divmod(min(i, lines * columns - 1), max(columns, 1)) for i in range(PIXELS)]
    across = (h.length if part.copied else x.shape[2]) * x.shape[3]
    step = outputs * groups
    shape += [outputs, *y.shape[1:3], v.first, h.first, v.apart, h.apart, lines, columns,
              *(line * v.step * across + column * h.step * x.shape[3] for line, column in block),
              *((line * v.apart * y.shape[2] + column * h.apart) * step for line, column in block)]
    if not y.size:
        return []
    steps, sizes = tuple(s // w.itemsize for s in w.strides), (groups, outputs, w.shape[3])
    bias = np.empty(0, w.dtype) if bias is None else bias
    return [loop(_pack, memory(w), steps, sizes, bias, _which(part, taps), packed),
            loop(_convolve, flat(x), packed, flat(y), padded, _numbers(shape), places)]


def weight_sums(x: Any, dy: Any, dw: Any, pixels: Sequence[int], part: Part, taps: Sequence[int], groups: int,
                rows: tuple[int, int], totals: Any, padded: Any, lanes: Any) -> list[Thunk]:
    """dw (o, taps, c / groups) = for each tap the products of x and dy, summed over pixels. `dy`: the memory of pixels
    (n, h, w), each with rows[1] outputs, of which dw has those from rows[0] on, where dy begins. The last arrays:
    scratch."""
    shape, places = _source(x, part, groups)
    run, each = shape[11], range(PIXELS)
    rest = [min(i, max(run % PIXELS - 1, 0)) for i in each]
    shape += [rows[1], lines_of(pixels), *rest, *(LANES * i for i in each), *(LANES * i for i in rest)]
    blocks = np.array(blocks_of(rows, len(dw), groups), np.int64)
    return [loop(_weight_sums, flat(x), dy, totals, padded, lanes, _numbers(shape), places, blocks),
            loop(_unpack, totals, _which(part, taps), blocks, dw)]
