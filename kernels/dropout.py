"""Dropout with a counter-based generator: its bits are a pure function of (seed, draw, sample, element).

So every executor, device and layout of ranks drops the same elements, and the backward pass computes the bits again
instead of keeping a mask. The generator is Philox4x32-10 (Salmon et al., SC 2011).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .cuda import Grid, c_type, each
from .registry import flat, kernel, loop


def philox(xp: Any, c0: Any, c1: Any, c2: Any, c3: Any, k0: int, k1: int) -> tuple[Any, Any, Any, Any]:
    """Four words of 32 random bits for each counter (uint64 arrays that hold 32-bit words)."""
    low = xp.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c0 * xp.uint64(0xD2511F53), c2 * xp.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = ((p1 >> xp.uint64(32)) ^ c1 ^ xp.uint64(k0), p1 & low,
                          (p0 >> xp.uint64(32)) ^ c3 ^ xp.uint64(k1), p0 & low)
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


@kernel("dropout", flops=lambda reads, writes: 10.0 * writes[0].size)
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
def _(x: Any, counter: Any, y: Any, *, rate: float, seed: int, draw: int, sample: int) -> Any:
    rows = (x.shape[0], x.size // max(x.shape[0], 1))
    return [loop(_dropout, x.reshape(rows), counter, y.reshape(rows), np.uint64(int(rate * 2**32)),
                 x.dtype.type(1 / (1 - rate)), np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32),
                 np.uint64(draw), np.uint64(sample))]


@dropout.cuda()
def _(x: Any, counter: Any, y: Any, *, rate: float, seed: int, draw: int, sample: int) -> Any:
    n = x.shape[0]
    size = x.size // max(n, 1)
    return each("dropout.cu", f"dropout<{c_type(x)}>", n * -(-size // 4), flat(x), counter, flat(y), n, size,
                int(rate * 2**32), 1 / (1 - rate), seed, draw, sample)


def _dropout(x, counter, y, threshold, factor, seed0, seed1, draw, sample):  # type: ignore[no-untyped-def]
    low, half, zero = np.uint64(0xFFFFFFFF), np.uint64(32), x.dtype.type(0)
    number = counter[0] + draw
    whole = x.shape[1] // 4
    rest = x.shape[1] - 4 * whole
    for n in range(x.shape[0]):
        for block in range(whole):  # without a branch, so that the compiler can vectorise it
            c0, c1, c2, c3 = np.uint64(block), np.uint64(n) + sample, number & low, number >> half
            k0, k1 = seed0, seed1
            for _ in range(10):
                p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
                c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & low, (p0 >> half) ^ c3 ^ k1, p0 & low
                k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
            j = 4 * block
            y[n, j] = x[n, j] * factor if c0 >= threshold else zero
            y[n, j + 1] = x[n, j + 1] * factor if c1 >= threshold else zero
            y[n, j + 2] = x[n, j + 2] * factor if c2 >= threshold else zero
            y[n, j + 3] = x[n, j + 3] * factor if c3 >= threshold else zero
        if rest:
            c0, c1, c2, c3 = np.uint64(whole), np.uint64(n) + sample, number & low, number >> half
            k0, k1 = seed0, seed1
            for _ in range(10):
                p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
                c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & low, (p0 >> half) ^ c3 ^ k1, p0 & low
                k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
            j = 4 * whole
            y[n, j] = x[n, j] * factor if c0 >= threshold else zero
            if rest > 1:
                y[n, j + 1] = x[n, j + 1] * factor if c1 >= threshold else zero
            if rest > 2:
                y[n, j + 2] = x[n, j + 2] * factor if c2 >= threshold else zero


@kernel("tick")
def tick(xp: Any, counter: Any, *, draws: int) -> Any:
    """The dropout counter (1,) uint64, increased by `draws`, modulo 2^64."""
    return counter + xp.uint64(draws)


@tick.cpu
def _(counter: Any, after: Any, *, draws: int) -> Any:
    return [loop(_tick, counter, after, np.uint64(draws))]


@tick.cuda()
def _(counter: Any, after: Any, *, draws: int) -> Any:
    return [Grid("dropout.cu", "tick", (1,), (1,), (counter, after, draws))]


def _tick(counter, after, draws):  # type: ignore[no-untyped-def]
    after[0] = counter[0] + draws
