"""Convolution on the CPU of small images: taps outside the image are skipped, and weights are read once.

Outputs whose windows have the same taps within the image are a kind. A block is PIXELS outputs of one kind, of any
samples, times LANES channels, and no image is copied. The weights of LANES channels are copied to a panel, which all
blocks read while it is in the cache. Each output adds its products in the order of `direct`, with bit-identical sums.
The gradient of the weights goes tap by tap, over all outputs whose windows have this tap within the image.

These lines import numba, so `conv` imports them where a kernel is bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from .registry import Thunk, flat, loop
from .taps import CHUNK, LANES, Place, kinds
from .vectors import PIXELS, add_products, alike, offsets_at, plus, store, transpose, zeros


# Indices are cast to unsigned as in `direct`.
def _convolve(x, w, steps, bias, y, panel, blocks, taps, shape):  # type: ignore[no-untyped-def]
    outputs, count, rows = shape
    for first in range(0, outputs, LANES):
        lanes = min(LANES, outputs - first)
        for j in range(LANES):
            panel[j] = bias[first + j] if j < lanes and len(bias) else 0
        for r in range(0, rows, LANES):
            high = min(LANES, rows - r)
            for t in range(count):
                at, to = first * steps[0] + t * steps[1] + r * steps[2], (1 + t * rows + r) * LANES
                if lanes == LANES and high == LANES and steps[2] == 1:
                    transpose(w, at, steps[0], panel, to)
                elif lanes == LANES and steps[0] == 1:
                    for i in range(high):
                        for j in range(LANES):
                            panel[np.uintp(to + i * LANES + j)] = w[np.uintp(at + i * steps[2] + j)]
                else:
                    for i in range(high):
                        for j in range(lanes):
                            panel[np.uintp(to + i * LANES + j)] = w[np.uintp(at + i * steps[2] + j * steps[0])]
                        for j in range(lanes, LANES):
                            panel[np.uintp(to + i * LANES + j)] = 0
        for b in range(0, len(blocks), 2 + 2 * PIXELS):
            reads, writes = offsets_at(blocks, b + 2), offsets_at(blocks, b + 2 + PIXELS)
            sums = alike(panel, 0)
            for i in range(blocks[b], blocks[b + 1]):
                at, to = taps[i, 0], taps[i, 1]
                for k in range(taps[i, 2]):
                    sums = add_products(sums, x, at + k, reads, panel, to)
                    to += LANES
            store(sums, y, first, writes, lanes)


def _weight_sums(x, dy, dw, grads, starts, places, shape):  # type: ignore[no-untyped-def]
    c, outputs, pixels, step = shape[:4]
    whole, rest = offsets_at(shape, 4), offsets_at(shape, 4 + PIXELS)
    for o in range(0, outputs, PIXELS):
        last = outputs - o - 1
        for pixel in range(pixels):
            at, to = pixel * step + o, pixel * PIXELS
            if last + 1 >= PIXELS:
                for j in range(PIXELS):
                    grads[np.uintp(to + j)] = dy[np.uintp(at + j)]
            else:
                for j in range(PIXELS):
                    grads[np.uintp(to + j)] = dy[np.uintp(at + min(j, last))]
        for t in range(len(starts) - 1):
            for start in range(0, c, LANES):
                first, total = min(start, c - LANES), zeros(x)  # the last vector may overlap another
                for begin in range(starts[t], starts[t + 1], CHUNK):
                    sums = zeros(x)
                    for row in range(begin, min(begin + CHUNK, starts[t + 1])):
                        sums = add_products(sums, grads, places[row, 1], None, x, places[row, 0] + first)
                    total = plus(total, sums)
                store(total, dw, (o * (len(starts) - 1) + t) * c + first, whole if last + 1 >= PIXELS else rest, LANES)


def _joined(taps: Sequence[tuple[int, int]], c: int) -> list[list[int]]:
    """(place in x, place in the panel, number of products) of each run of taps that are neighbours in both."""
    runs = list[list[int]]()
    for at, to in taps:
        if runs and at == runs[-1][0] + runs[-1][2] and to == runs[-1][1] + runs[-1][2] * LANES:
            runs[-1][2] += c
        else:
            runs.append([at, to, c])
    return runs


def _pixels(n: int, shape: Sequence[int], lines: Any, columns: Any, step: int) -> Any:
    """Where the pixels of these lines and columns begin in n images of this shape."""
    places = np.add.outer(np.multiply(lines, shape[1]), np.array(columns, np.int64))
    return (np.add.outer(np.arange(n) * shape[0] * shape[1], places) * step).reshape(-1)


def convolve(x: Any, w: Any, steps: tuple[int, int, int], bias: Any, y: Any, taps: Sequence[int],
             vertical: Sequence[Place], horizontal: Sequence[Place], panel: Any) -> list[Thunk]:
    """y (n, h, w, o) = for each output the products of the places of x (n, h, w, c) that it sees with weights, + bias
    unless it is None. `steps`: from a weight to the next output, tap and channel of x. `panel`: scratch."""
    (n, _, width, c), outputs = x.shape, y.shape[3]
    blocks, runs = [np.empty((0, 2 + 2 * PIXELS), np.int64)], list[list[int]]()
    for v, h in product(kinds(vertical), kinds(horizontal)):
        begin = len(runs)
        runs += _joined([((a * width + b) * c, (1 + (ky * taps[1] + kx) * c) * LANES)
                         for ky, a in v.taps for kx, b in h.taps], c)
        (lines, top), (columns, left) = zip(*v.outputs, strict=True), zip(*h.outputs, strict=True)
        places = [_pixels(n, x.shape[1:3], top, left, c), _pixels(n, y.shape[1:3], lines, columns, outputs)]
        reads, writes = (np.append(p, p[-1:].repeat(-len(p) % PIXELS)).reshape(-1, PIXELS) for p in places)
        blocks.append(np.hstack([np.full((len(reads), 2), [begin, len(runs)]), reads, writes]))
    bias = np.empty(0, w.dtype) if bias is None else bias
    return [loop(_convolve, flat(x), flat(w), steps, bias, flat(y), panel, np.concatenate(blocks).reshape(-1),
                 np.array(runs, np.int64).reshape(-1, 3), (outputs, taps[0] * taps[1], c))]


def weight_sums(x: Any, dy: Any, dw: Any, pixels: Sequence[int], vertical: Sequence[Place], horizontal: Sequence[Place],
                step: int, grads: Any) -> list[Thunk]:
    """dw (o, kh, kw, c) = for each tap the products of x (n, h, w, c) and dy, summed over the outputs `pixels` (n, h,
    w) that see it. `dy`: the memory of those outputs, `step` numbers apart. `grads`: scratch."""
    (n, c), starts, places = (x.shape[0], x.shape[3]), [0], list[Any]()
    for ky, kx in product(range(dw.shape[1]), range(dw.shape[2])):
        (lines, top), (columns, left) = (
            np.array([(i, place) for i, p in enumerate(axis) for at, place in p if at == t], np.int64).reshape(-1, 2).T
            for axis, t in ((vertical, ky), (horizontal, kx)))
        places.append(np.stack([_pixels(n, x.shape[1:3], top, left, c),
                                _pixels(n, pixels[1:], lines, columns, PIXELS)], 1))
        starts.append(starts[-1] + len(places[-1]))
    each, apart = np.arange(PIXELS), dw[0].size
    rest = np.minimum(each, max(len(dw) % PIXELS - 1, 0))
    shape = np.array([c, len(dw), prod(pixels), step, *(each * apart), *(rest * apart)])
    return [loop(_weight_sums, flat(x), dy, flat(dw), grads, np.array(starts), np.concatenate(places), shape)]
