"""Updates of parameters in place. What varies from step to step (learning rate, Adam's powers) is read from arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .registry import Thunk, flat, kernel, like, loop, ufunc


@kernel("sgd", flops=lambda reads, writes: 4.0 * writes[0].size)
def sgd(xp: Any, p: Any, g: Any, lr: Any, v: Any = None, *, momentum: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False) -> Any:
    """v = momentum v + g'; p -= lr v, with g' = g + weight_decay p; Nesterov: p -= lr (g' + momentum v)."""
    g = g + p.dtype.type(weight_decay) * p if weight_decay else g
    if v is None:
        return p - lr[0] * g
    v = p.dtype.type(momentum) * v + g
    return p - lr[0] * (g + p.dtype.type(momentum) * v if nesterov else v), v


@sgd.cpu
def _(p: Any, g: Any, lr: Any, *rest: Any, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False) -> Any:
    decay = like(p, weight_decay)
    if len(rest) == 1:
        (after,) = rest
        return [*_moved(p, after), loop(_sgd, flat(after), flat(g), lr, decay)]
    v, after, v_after = rest
    step = _sgd_nesterov if nesterov else _sgd_momentum
    return [*_moved(p, after), *_moved(v, v_after), loop(step, flat(after), flat(g), lr, flat(v_after), like(p, momentum), decay)]


def _moved(before: Any, after: Any) -> list[Thunk]:
    """Loops work in place, with no array under two names: only so are they vectorised. A copy where places differ."""
    return [] if before.ctypes.data == after.ctypes.data else [ufunc(np.positive, before, after)]


def _sgd(p, g, lr, decay):  # type: ignore[no-untyped-def]
    rate = lr[0]
    for i in range(p.size):
        p[i] -= rate * (g[i] + decay * p[i])


def _sgd_momentum(p, g, lr, v, momentum, decay):  # type: ignore[no-untyped-def]
    rate = lr[0]
    for i in range(p.size):
        u = momentum * v[i] + (g[i] + decay * p[i])
        v[i] = u
        p[i] -= rate * u


def _sgd_nesterov(p, g, lr, v, momentum, decay):  # type: ignore[no-untyped-def]
    rate = lr[0]
    for i in range(p.size):
        d = g[i] + decay * p[i]
        u = momentum * v[i] + d
        v[i] = u
        p[i] -= rate * (d + momentum * u)


@kernel("adam_tick", flops=lambda reads, writes: 2.0)
def adam_tick(xp: Any, powers: Any, *, beta1: float, beta2: float) -> Any:
    """powers (3,) float64 = (step, beta1^step, beta2^step), one step on."""
    return powers * xp.array([1.0, beta1, beta2]) + xp.array([1.0, 0.0, 0.0])


@adam_tick.cpu
def _(powers: Any, after: Any, *, beta1: float, beta2: float) -> Any:
    return [loop(_adam_tick, powers, after, beta1, beta2)]


def _adam_tick(powers, after, beta1, beta2):  # type: ignore[no-untyped-def]
    after[0] = powers[0] + 1.0
    after[1] = powers[1] * beta1
    after[2] = powers[2] * beta2


@kernel("adam", flops=lambda reads, writes: 12.0 * writes[0].size)
def adam(xp: Any, p: Any, g: Any, m: Any, v: Any, lr: Any, powers: Any, *, beta1: float, beta2: float, eps: float,
         weight_decay: float = 0.0, decoupled: bool = False) -> Any:
    """Adam (Kingma, Ba 2015) with L2 weight decay, or decoupled decay (AdamW; Loshchilov, Hutter 2019)."""
    t = p.dtype.type
    if weight_decay and decoupled:
        p = p - lr[0] * t(weight_decay) * p
    elif weight_decay:
        g = g + t(weight_decay) * p
    m = t(beta1) * m + t(1 - beta1) * g
    v = t(beta2) * v + t(1 - beta2) * g * g
    size = lr[0] / t(1 - powers[1])
    return p - size * m / (xp.sqrt(v) / t(np.sqrt(1 - powers[2])) + t(eps)), m, v


@adam.cpu
def _(p: Any, g: Any, m: Any, v: Any, lr: Any, powers: Any, after: Any, m_after: Any, v_after: Any, *, beta1: float, beta2: float,
      eps: float, weight_decay: float = 0.0, decoupled: bool = False) -> Any:
    t = p.dtype.type
    shrink, grow = (weight_decay, 0.0) if decoupled else (0.0, weight_decay)
    return [*_moved(p, after), *_moved(m, m_after), *_moved(v, v_after),
            loop(_adam, flat(after), flat(g), flat(m_after), flat(v_after), lr, powers, t(beta1), t(1 - beta1), t(beta2), t(1 - beta2),
                 t(eps), t(shrink), t(grow))]


def _adam(p, g, m, v, lr, powers, beta1, rest1, beta2, rest2, eps, shrink, grow):  # type: ignore[no-untyped-def]
    one = p.dtype.type(1)
    rate = lr[0]
    size = rate / p.dtype.type(1.0 - powers[1])
    root = p.dtype.type(np.sqrt(1.0 - powers[2]))
    keep = one - rate * shrink
    for i in range(p.size):
        d = g[i] + grow * p[i]
        a = beta1 * m[i] + rest1 * d
        b = beta2 * v[i] + rest2 * d * d
        m[i] = a
        v[i] = b
        p[i] = p[i] * keep - size * a / (np.sqrt(b) / root + eps)


@kernel("square_sum", flops=lambda reads, writes: 2.0 * reads[0].size)
def square_sum(xp: Any, g: Any) -> Any:
    """The sum of squares (1,) float64."""
    return xp.square(g.astype("float64")).sum().reshape(1)


@square_sum.cpu
def _(g: Any, total: Any) -> Any:
    return [loop(_square_sum, flat(g), total)]


def _square_sum(g, total):  # type: ignore[no-untyped-def]
    a, b, c, d = 0.0, 0.0, 0.0, 0.0  # four sums, so that an addition need not wait for the one before it
    for i in range(0, g.size // 4 * 4, 4):
        a += np.float64(g[i]) * np.float64(g[i])
        b += np.float64(g[i + 1]) * np.float64(g[i + 1])
        c += np.float64(g[i + 2]) * np.float64(g[i + 2])
        d += np.float64(g[i + 3]) * np.float64(g[i + 3])
    for i in range(g.size // 4 * 4, g.size):
        a += np.float64(g[i]) * np.float64(g[i])
    total[0] = (a + b) + (c + d)


@kernel("clip_factor", flops=lambda reads, writes: float(len(reads)))
def clip_factor(xp: Any, *squares: Any, limit: float) -> Any:
    """Sums of squares (1,), added in their order -> (norm (1,) float64, factor (1,) = min(1, limit / (norm + 1e-6)))."""
    total = xp.zeros(1)
    for square in squares:
        total = total + square
    norm = xp.sqrt(total)
    return norm, xp.minimum(limit / (norm + 1e-6), 1.0)


@clip_factor.cpu
def _(*arrays: Any, limit: float) -> Any:
    *squares, norm, factor = arrays
    return [partial(norm.fill, 0), *(ufunc(np.add, norm, s, norm) for s in squares), loop(_clip_factor, norm, factor, limit)]


def _clip_factor(norm, factor, limit):  # type: ignore[no-untyped-def]
    norm[0] = np.sqrt(norm[0])
    factor[0] = limit / (norm[0] + 1e-6)
    if factor[0] > 1:  # not for NaN, which is to be seen
        factor[0] = 1
