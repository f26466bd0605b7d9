"""Loops of batch norm with an activation on the CPU: each reads and writes its arrays once, and is bit-identical to the
loops one after the other. Activations have the numbers of `channels.ACTIVATIONS`."""

from __future__ import annotations

import numpy as np

from .registry import inlined
from .sums import BLOCK


@inlined
def _activated(s, act, low, three, high, sixth):  # type: ignore[no-untyped-def]
    if act == 1:
        return s if not s <= low else low  # NaN passes through
    if act == 2:
        v = low if s < low else s
        return high if v > high else v
    if act == 3:
        v = s + three
        v = low if v < low else v
        return max(s, -three) * ((high if v > high else v) * sixth)
    return s


@inlined
def _sloped(seen, dy, act, low, three, high, half, third):  # type: ignore[no-untyped-def]
    """The gradient before the activation. `seen`: what it read, or for relu and relu6 what it wrote."""
    if act == 1:
        return dy if seen > low else low
    if act == 2:
        return dy if (seen > low) & (seen < high) else low
    inner = dy * (seen * third + half)
    outer = low if seen < low else dy
    return inner if (seen > -three) & (seen < three) else outer


def activated(x, step, mean, rstd, w, b, act, y):  # type: ignore[no-untyped-def]
    """y = act(batch_norm(x))."""
    low, three, high, sixth = y.dtype.type(0), y.dtype.type(3), y.dtype.type(6), y.dtype.type(1 / 6)
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            s = (x[np.uintp(i * step + j)] - mean[j]) * (rstd[j] * w[j]) + b[j]
            y[i, j] = _activated(s, act, low, three, high, sixth)


def added(x, step, mean, rstd, w, b, z, act, y):  # type: ignore[no-untyped-def]
    """y = act(batch_norm(x) + z)."""
    low, three, high, sixth = y.dtype.type(0), y.dtype.type(3), y.dtype.type(6), y.dtype.type(1 / 6)
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            s = ((x[np.uintp(i * step + j)] - mean[j]) * (rstd[j] * w[j]) + b[j]) + z[i, j]
            y[i, j] = _activated(s, act, low, three, high, sixth)


def affine(mean, rstd, w, b, to):  # type: ignore[no-untyped-def]
    """The mean, rstd w and b in the rows of `to`, as often as they fit."""
    for first in range(0, to.shape[1], len(mean)):
        for j in range(len(mean)):
            to[0, first + j] = mean[j]
            to[1, first + j] = rstd[j] * w[j]
            to[2, first + j] = b[j]


@inlined
def add_block(products, total, product, plain):  # type: ignore[no-untyped-def]
    """Adds the sums of a block of rows."""
    for j in range(len(total)):
        products[j] += product[j]
        total[j] += plain[j]


@inlined
def finish(products, total, rstd, dw, db):  # type: ignore[no-untyped-def]
    """dw and db from the sums of all columns."""
    channels = len(dw)
    for j in range(channels):
        for k in range(j + channels, len(total), channels):
            products[j] += products[k]
            total[j] += total[k]
        dw[j] = products[j] * rstd[j]
        db[j] = total[j]


def sums(x, step, mean, scale, b, rstd, dy, act, dw, db, products, total, product, plain):  # type: ignore[no-untyped-def]
    """dw and db of act(batch_norm(x))."""
    kind, (rows, columns) = dy.dtype.type, dy.shape
    low, three, high, half, third = kind(0), kind(3), kind(6), kind(0.5), kind(1 / 3)
    products[:] = 0
    total[:] = 0
    for first in range(0, rows, BLOCK):
        product[:] = 0
        plain[:] = 0
        for i in range(first, min(first + BLOCK, rows)):
            for j in range(columns):
                d = x[np.uintp(i * step + j)] - mean[j]
                g = _sloped(d * scale[j] + b[j], dy[i, j], act, low, three, high, half, third)
                product[j] += g * d
                plain[j] += g
        add_block(products, total, product, plain)
    finish(products, total, rstd, dw, db)


def kept_sums(x, step, mean, rstd, y, dy, act, ds, dw, db, products, total, product, plain):  # type: ignore[no-untyped-def]
    """dw, db and ds of y = act(s), whose slope follows from y."""
    kind, (rows, columns) = dy.dtype.type, dy.shape
    low, three, high, half, third = kind(0), kind(3), kind(6), kind(0.5), kind(1 / 3)
    products[:] = 0
    total[:] = 0
    for first in range(0, rows, BLOCK):
        product[:] = 0
        plain[:] = 0
        for i in range(first, min(first + BLOCK, rows)):
            for j in range(columns):
                g = _sloped(y[i, j], dy[i, j], act, low, three, high, half, third)
                ds[i, j] = g
                product[j] += g * (x[np.uintp(i * step + j)] - mean[j])
                plain[j] += g
        add_block(products, total, product, plain)
    finish(products, total, rstd, dw, db)


def input_grad(x, step, mean, shift, slope, factor, b, dy, act, dx):  # type: ignore[no-untyped-def]
    """dx of act(batch_norm(x)); the rows before b come from `norm_grad.terms_of`."""
    kind = dy.dtype.type
    low, three, high, half, third = kind(0), kind(3), kind(6), kind(0.5), kind(1 / 3)
    for i in range(dx.shape[0]):
        for j in range(dx.shape[1]):
            d = x[np.uintp(i * step + j)] - mean[j]
            g = _sloped(d * factor[j] + b[j], dy[i, j], act, low, three, high, half, third)
            dx[i, j] = (g - shift[j] - d * slope[j]) * factor[j]
