"""Dropout and random numbers from a counter-based generator: bits are a pure function of (seed, draw, sample, element).

So every executor, device and layout of ranks drops the same elements and draws the same numbers, and the backward pass
of dropout computes the bits again instead of keeping a mask. The generator is Philox4x32-10 (Salmon et al., SC 2011).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .cuda import Grid, c_type, each
from .registry import Thunk, flat, inlined, kernel, loop


def philox(xp: Any, c0: Any, c1: Any, c2: Any, c3: Any, k0: int, k1: int) -> tuple[Any, Any, Any, Any]:
    """Four words of 32 random bits for each counter (uint64 arrays that hold 32-bit words)."""
    low = xp.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c0 * xp.uint64(0xD2511F53), c2 * xp.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = ((p1 >> xp.uint64(32)) ^ c1 ^ xp.uint64(k0), p1 & low,
                          (p0 >> xp.uint64(32)) ^ c3 ^ xp.uint64(k1), p0 & low)
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


@kernel("dropout", axes="s*,C->s*", flops=lambda reads, writes: 10.0 * writes[0].size)
def dropout(xp: Any, x: Any, counter: Any, *, rate: float, seed: int, draw: int, sample: int) -> Any:
    """x (n, ...): each element becomes 0 with probability `rate`, else x / (1 - rate). Applied to dy it is the
    gradient.

    `counter` (1,) uint64, read from a buffer, plus `draw`, modulo 2^64, is the number of this dropout. `sample`: the
    global index of the first sample.
    """
    n, size = x.shape[0], x.size // max(x.shape[0], 1)
    blocks = (size + 3) // 4
    c0 = xp.broadcast_to(xp.arange(blocks, dtype=xp.uint64)[None, :], (n, blocks))
    c1 = xp.broadcast_to(xp.arange(sample, sample + n, dtype=xp.uint64)[:, None], (n, blocks))
    number = xp.zeros_like(c0) + counter + xp.uint64(draw)
    words = philox(xp, c0, c1, number & xp.uint64(0xFFFFFFFF), number >> xp.uint64(32), seed & 0xFFFFFFFF, seed >> 32)
    bits = xp.stack(words, axis=-1).reshape(n, blocks * 4)[:, :size].reshape(x.shape)
    keep = bits >= xp.uint64(int(rate * 2**32))
    return xp.where(keep, x * x.dtype.type(1 / (1 - rate)), x.dtype.type(0))


@dropout.cpu
def _(x: Any, counter: Any, y: Any, **numbers: Any) -> Any:
    rows = (x.shape[0], x.size // max(x.shape[0], 1))
    return [dropped(x.reshape(rows), counter, y.reshape(rows), **numbers)]


def dropped(x: Any, counter: Any, y: Any, first: int = 0, apart: int = 0, per_row: int = 1, *, rate: float, seed: int,
            draw: int, sample: int) -> Thunk:
    """The call that drops elements of x (rows, size), which may be y. Four elements share a block of the generator:
    row 0 begins with block `first`, each further row `apart` later, and belongs to `per_row` samples more."""
    numbers = (np.uint64(int(rate * 2**32)), x.dtype.type(1 / (1 - rate)), np.uint64(seed & 0xFFFFFFFF),
               np.uint64(seed >> 32), np.uint64(draw), np.uint64(sample), np.uint64(first), np.uint64(apart),
               np.uint64(per_row))
    if x is y and not x.shape[1] % 4:
        return loop(_dropout_in_place, y, counter, *numbers)
    return loop(_dropout, x, counter, y, *numbers)


@dropout.cuda()
def _(x: Any, counter: Any, y: Any, *, rate: float, seed: int, draw: int, sample: int) -> Any:
    n = x.shape[0]
    size = x.size // max(n, 1)
    return each("dropout.cu", f"dropout<{c_type(x)}>", n * -(-size // 4), flat(x), counter, flat(y), n, size,
                int(rate * 2**32), 1 / (1 - rate), seed, draw, sample)


@partial(inlined, forceinline=True)
def _words(c0, own, number, k0, k1):  # type: ignore[no-untyped-def]
    """`philox` of one counter, without a branch, so that the compiler can vectorise a loop."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c1, c2, c3 = own, number & low, number >> half
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & low, (p0 >> half) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


def _dropout(x, counter, y, threshold, factor, seed0, seed1, draw, sample,  # type: ignore[no-untyped-def]
             first, apart, per_row):
    zero, number, whole = x.dtype.type(0), counter[0] + draw, x.shape[1] // 4
    for n in range(x.shape[0]):
        begin, own = first + np.uint64(n) * apart, sample + np.uint64(n) * per_row
        for block in range(whole):
            c0, c1, c2, c3 = _words(begin + np.uint64(block), own, number, seed0, seed1)
            j = 4 * block
            x0, x1, x2, x3 = x[n, j], x[n, j + 1], x[n, j + 2], x[n, j + 3]
            y[n, j] = x0 * factor if c0 >= threshold else zero
            y[n, j + 1] = x1 * factor if c1 >= threshold else zero
            y[n, j + 2] = x2 * factor if c2 >= threshold else zero
            y[n, j + 3] = x3 * factor if c3 >= threshold else zero
        words = _words(begin + np.uint64(whole), own, number, seed0, seed1)
        for j in range(4 * whole, x.shape[1]):
            y[n, j] = x[n, j] * factor if words[j - 4 * whole] >= threshold else zero


def _dropout_in_place(y, counter, threshold, factor, seed0, seed1, draw, sample,  # type: ignore[no-untyped-def]
                      first, apart, per_row):
    """As `_dropout`, for one array: a compiler that cannot tell whether two arrays are one uses no vectors. Rows are
    whole blocks."""
    zero, number = y.dtype.type(0), counter[0] + draw
    for n in range(y.shape[0]):
        begin, own = first + np.uint64(n) * apart, sample + np.uint64(n) * per_row
        for block in range(y.shape[1] // 4):
            c0, c1, c2, c3 = _words(begin + np.uint64(block), own, number, seed0, seed1)
            j = 4 * block
            y0, y1, y2, y3 = y[n, j], y[n, j + 1], y[n, j + 2], y[n, j + 3]
            y[n, j] = y0 * factor if c0 >= threshold else zero
            y[n, j + 1] = y1 * factor if c1 >= threshold else zero
            y[n, j + 2] = y2 * factor if c2 >= threshold else zero
            y[n, j + 3] = y3 * factor if c3 >= threshold else zero


@kernel("draw", axes=lambda reads, *, shape, **_: "C->s*" if shape else "",
        flops=lambda reads, writes: 20.0 * writes[0].size)
def draw(xp: Any, counter: Any, *, shape: tuple[int, ...], dtype: str, normal: bool, low: int, span: int, seed: int,
         draw: int, sample: int) -> Any:
    """Random numbers of this shape: standard normal ones (Box and Muller 1958), or uniform in low + [0, span), rounded
    down for whole numbers. `counter`, `seed`, `draw`, `sample`: as for dropout; axis 0 has the samples.

    Two numbers take the four words of one block: a uniform one has 24 bits of its two words for float32, else 53; a
    normal one takes its radius from the first word and its angle from the second.
    """
    rows = shape[0] if shape else 1
    size = int(np.prod(shape[1:]))
    blocks = (size + 1) // 2
    c0 = xp.broadcast_to(xp.arange(blocks, dtype=xp.uint64)[None, :], (rows, blocks))
    c1 = xp.broadcast_to(xp.arange(sample, sample + rows, dtype=xp.uint64)[:, None], (rows, blocks))
    number = xp.zeros_like(c0) + counter + xp.uint64(draw)
    words = philox(xp, c0, c1, number & xp.uint64(0xFFFFFFFF), number >> xp.uint64(32), seed & 0xFFFFFFFF, seed >> 32)
    a, b = (xp.stack(words[k::2], axis=-1).reshape(rows, 2 * blocks)[:, :size].reshape(shape) for k in (0, 1))
    if normal:
        radius = xp.sqrt(-2 * xp.log((a + xp.uint64(1)).astype(xp.float64) * 2.0**-32))
        return (radius * xp.cos(b.astype(xp.float64) * (2 * np.pi * 2.0**-32))).astype(dtype)
    bits = 24 if dtype == "float32" else 53
    share = (((a << xp.uint64(21)) | (b >> xp.uint64(11))) >> xp.uint64(53 - bits)).astype(xp.float64) * 2.0**-bits
    return xp.floor(low + share * span).astype(dtype) if dtype == "int64" else (low + share * span).astype(dtype)


@draw.cpu
def _(counter: Any, y: Any, *, shape: tuple[int, ...], dtype: str, normal: bool, low: int, span: int, seed: int,
      draw: int, sample: int) -> Any:
    rows = y.shape[0] if y.ndim else 1
    return [loop(_draw, counter, y.reshape(rows, y.size // max(rows, 1)), normal, dtype == "int64",
                 24 if dtype == "float32" else 53, float(low), float(span), np.uint64(seed & 0xFFFFFFFF),
                 np.uint64(seed >> 32), np.uint64(draw), np.uint64(sample))]


@draw.cuda()
def _(counter: Any, y: Any, *, shape: tuple[int, ...], dtype: str, normal: bool, low: int, span: int, seed: int,
      draw: int, sample: int) -> Any:
    rows = shape[0] if shape else 1
    size = y.size // max(rows, 1)
    return each("dropout.cu", f"draw<{c_type(y)}>", rows * -(-size // 2), counter, flat(y), rows, size, int(normal),
                int(dtype == "int64"), 24 if dtype == "float32" else 53, float(low), float(span), seed, draw, sample)


@inlined
def _number(a, b, normal, whole, bits, low, span):  # type: ignore[no-untyped-def]
    if normal:
        radius = np.sqrt(-2 * np.log(np.float64(a + np.uint64(1)) * 2.0**-32))
        return radius * np.cos(np.float64(b) * (2 * np.pi * 2.0**-32))
    share = np.float64(((a << np.uint64(21)) | (b >> np.uint64(11))) >> np.uint64(53 - bits)) * 2.0**-bits
    return np.floor(low + share * span) if whole else low + share * span


def _draw(counter, y, normal, whole, bits, low, span, seed0, seed1, draw, sample):  # type: ignore[no-untyped-def]
    number = counter[0] + draw
    for n in range(y.shape[0]):
        for block in range((y.shape[1] + 1) // 2):
            c0, c1, c2, c3 = _words(np.uint64(block), np.uint64(n) + sample, number, seed0, seed1)
            y[n, 2 * block] = _number(c0, c1, normal, whole, bits, low, span)
            if 2 * block + 1 < y.shape[1]:
                y[n, 2 * block + 1] = _number(c2, c3, normal, whole, bits, low, span)


@kernel("tick")
def tick(xp: Any, counter: Any, *, draws: int) -> Any:
    """The counter of draws (1,) uint64, increased by `draws`, modulo 2^64."""
    return counter + xp.uint64(draws)


@tick.cpu
def _(counter: Any, after: Any, *, draws: int) -> Any:
    return [loop(_tick, counter, after, np.uint64(draws))]


@tick.cuda()
def _(counter: Any, after: Any, *, draws: int) -> Any:
    return [Grid("dropout.cu", "tick", (1,), (1,), (counter, after, draws))]


def _tick(counter, after, draws):  # type: ignore[no-untyped-def]
    after[0] = counter[0] + draws
