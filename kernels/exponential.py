"""exp, and rows of it, in the loops of numba: without a branch, so that the compiler can vectorise the loops; its own
exp is one call for each number. Numba's files of compiled loops know only the source of their own file, so a change
here is a change in each file that calls these functions.

exp(a) = 2^n exp(r): n is a / log(2), rounded by a large sum, whose low bits are n; exp(r) = 1 + r + r^2 q(r)."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from .registry import inlined

PER, HIGH, LOW, ROUND = (np.float32(v) for v in (1 / math.log(2), 0.693145751953125, 1.42860682030941723e-6, 12582912))
# fitted: relative error 4e-9
Q0, Q1, Q2, Q3, Q4 = (np.float32(v) for v in (
    0.49999993415, 0.16666520172587782, 0.04166839417540638, 0.008368772720922749, 0.0013814429011935125))
ONE, LEAST, MANTISSA, BIAS = np.float32(1), np.float32(-88), np.int32(23), np.int32(127 << 23)
SIGN, REST, LOWEST = np.int32(31), np.int32(0x7FFFFFFF), np.int32(-0x80000000)
DOUBLE_PER, DOUBLE_HIGH, DOUBLE_LOW = 1 / math.log(2), 6.93147180369123816490e-01, 1.90821492927058770002e-10
DOUBLE_ROUND, DOUBLE_LEAST, DOUBLE_LOWEST = 1.5 * 2.0**52, -709.0, np.int64(-0x8000000000000000)
D0, D1, D2, D3, D4, D5, D6, D7, D8, D9, D10, D11 = (1 / math.factorial(n) for n in range(2, 14))


def _double_exp(a):  # type: ignore[no-untyped-def]
    b = max(a, DOUBLE_LEAST)
    t = b * DOUBLE_PER + DOUBLE_ROUND
    n = t - DOUBLE_ROUND
    r = b - n * DOUBLE_HIGH - n * DOUBLE_LOW
    r2 = r * r
    r4 = r2 * r2
    q = ((D0 + D1 * r) + (D2 + D3 * r) * r2) + (((D4 + D5 * r) + (D6 + D7 * r) * r2)
                                                + ((D8 + D9 * r) + (D10 + D11 * r) * r2) * r4) * r4
    power = np.int64((np.float64(t).view(np.int64) << 52) + (1023 << 52))
    return (1.0 + (r + r2 * q)) * np.int64(power).view(np.float64)


@partial(inlined, double=_double_exp, fastmath={"contract"})
def exp(a):  # type: ignore[no-untyped-def]
    """exp(a), a at most 88, to 1e-7 of it in float32; exactly 0 below -88, in float64 below -709."""
    b = max(a, LEAST)
    t = b * PER + ROUND
    n = t - ROUND
    r = b - n * HIGH - n * LOW
    r2 = r * r
    q = (Q0 + Q1 * r) + ((Q2 + Q3 * r) + Q4 * r2) * r2
    power = np.int32(np.int32(np.float32(t).view(np.int32) << MANTISSA) + BIAS)
    return (ONE + (r + r2 * q)) * np.int32(power).view(np.float32)


def _double_largest(x):  # type: ignore[no-untyped-def]
    top = DOUBLE_LOWEST
    for j in range(x.size):
        bits = np.float64(x[j]).view(np.int64)
        top = max(top, bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF))
    top ^= (top >> 63) & 0x7FFFFFFFFFFFFFFF
    return np.int64(top).view(np.float64) if x.size else -np.inf


@partial(inlined, double=_double_largest)
def largest(x):  # type: ignore[no-untyped-def]
    """The largest number of a row; minus infinity without one. Found as whole numbers of the same order: the largest of
    those is found in vectors, since none of them is "no number"."""
    top = LOWEST
    for j in range(x.size):
        bits = np.float32(x[j]).view(np.int32)
        top = max(top, np.int32(bits ^ np.int32(np.int32(bits >> SIGN) & REST)))
    top = np.int32(top ^ np.int32(np.int32(top >> SIGN) & REST))
    return np.int32(top).view(np.float32) if x.size else np.float32(-np.inf)


@partial(inlined, fastmath={"reassoc"})
def exps(x, scale):  # type: ignore[no-untyped-def]
    """A row x becomes exp((x - top) scale), `top` the largest of it or, if all of it is minus infinity, 0 -> (top, the
    sum of the new row). The scale is positive. (In place: two rows that may be one keep a loop from its vectors.)"""
    top = largest(x)
    if top == -np.inf:
        top = x.dtype.type(0)
    total = x.dtype.type(0)
    for j in range(x.size):
        e = exp((x[j] - top) * scale)
        x[j] = e
        total += e
    return top, total
