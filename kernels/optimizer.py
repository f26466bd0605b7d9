"""Updates of parameters in place. What varies from step to step (learning rate, Adam's powers) is read from arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .registry import flat, kernel, like, loop


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
        return [loop(_sgd, flat(p), flat(g), lr, flat(rest[0]), decay)]
    v, after, v_after = rest
    return [loop(_sgd_momentum, flat(p), flat(g), lr, flat(v), flat(after), flat(v_after), like(p, momentum), decay, nesterov)]


def _sgd(p, g, lr, after, decay):  # type: ignore[no-untyped-def]
    for i in range(p.size):
        after[i] = p[i] - lr[0] * (g[i] + decay * p[i])


def _sgd_momentum(p, g, lr, v, after, v_after, momentum, decay, nesterov):  # type: ignore[no-untyped-def]
    rate = lr[0]
    for i in range(p.size):
        d = g[i] + decay * p[i]
        u = momentum * v[i] + d
        v_after[i] = u
        after[i] = p[i] - rate * (d + momentum * u if nesterov else u)


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
    return [loop(_adam, flat(p), flat(g), flat(m), flat(v), lr, powers, flat(after), flat(m_after), flat(v_after), t(beta1),
                 t(1 - beta1), t(beta2), t(1 - beta2), t(eps), t(weight_decay), decoupled)]


def _adam(p, g, m, v, lr, powers, after, m_after, v_after, beta1, rest1, beta2, rest2, eps, decay, decoupled):  # type: ignore[no-untyped-def]
    one = p.dtype.type(1)
    rate = lr[0]
    size = rate / p.dtype.type(1.0 - powers[1])
    root = p.dtype.type(np.sqrt(1.0 - powers[2]))
    for i in range(p.size):
        d, q = g[i], p[i]
        if decoupled:
            q = q * (one - rate * decay)
        else:
            d = d + decay * q
        a = beta1 * m[i] + rest1 * d
        b = beta2 * v[i] + rest2 * d * d
        m_after[i], v_after[i] = a, b
        after[i] = q - size * a / (np.sqrt(b) / root + eps)
