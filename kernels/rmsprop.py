"""RMSprop: plain, with momentum, centered."""

from __future__ import annotations

from typing import Any

import numpy as np

from .hints import flushing, restored
from .registry import Thunk, like, loop
from .update import Rule, define


def _rmsprop_formula(xp: Any, p: Any, g: Any, v: Any, *rest: Any, alpha: float, eps: float, momentum: float = 0.0,
                     weight_decay: float = 0.0, centered: bool = False) -> Any:
    """v = alpha v + (1 - alpha) g'^2; d = g' / (sqrt(v) + eps), with g' = g + weight_decay p; p -= lr d, or with a
    momentum u = momentum u + d; p -= lr u (Tieleman, Hinton 2012). Centered: v - a^2 in place of v under the root, with
    a = alpha a + (1 - alpha) g' (Graves 2013). The states are v, a, u."""
    *states, lr = rest
    t = p.dtype.type
    g = g + t(weight_decay) * p if weight_decay else g
    v, root, after = t(alpha) * v + t(1 - alpha) * g * g, None, []
    if centered:
        a = t(alpha) * states.pop(0) + t(1 - alpha) * g
        root, after = xp.sqrt(v - a * a), [a]
    d = g / ((xp.sqrt(v) if root is None else root) + t(eps))
    if not states:
        return [p - lr[0] * d, v, *after]
    u = t(momentum) * states[0] + d
    return [p - lr[0] * u, v, *after, u]


def _rmsprop_numbers(*, alpha: float, eps: float, momentum: float = 0.0, weight_decay: float = 0.0,
                     centered: bool = False) -> Any:
    return (*(float(x) for x in (alpha, 1 - alpha, eps, momentum, weight_decay)), centered)


def _rmsprop_loop(p: Any, g: Any, v: Any, *rest: Any, momentum: float = 0.0, centered: bool = False,
                  **constants: Any) -> Thunk:
    *states, lr = rest
    alpha, rest_, eps, keep, decay = (like(p, x) for x in _rmsprop_numbers(momentum=momentum, **constants)[:-1])
    body: Any = {(False, 0): _rmsprop, (False, 1): _rmsprop_momentum, (True, 1): _rmsprop_centered,
                 (True, 2): _rmsprop_centered_momentum}[centered, len(states)]
    return loop(body, p, g, v, *states, lr, alpha, rest_, eps, keep, decay)


def _rmsprop(p, g, v, lr, alpha, rest, eps, keep, decay):  # type: ignore[no-untyped-def]
    before = flushing()
    rate = lr[0]
    for i in range(p.size):
        d = g[i] + decay * p[i]
        s = alpha * v[i] + rest * d * d
        v[i] = s
        p[i] -= rate * (d / (np.sqrt(s) + eps))
    restored(before)


def _rmsprop_momentum(p, g, v, u, lr, alpha, rest, eps, keep, decay):  # type: ignore[no-untyped-def]
    before = flushing()
    rate = lr[0]
    for i in range(p.size):
        d = g[i] + decay * p[i]
        s = alpha * v[i] + rest * d * d
        b = keep * u[i] + d / (np.sqrt(s) + eps)
        v[i] = s
        u[i] = b
        p[i] -= rate * b
    restored(before)


def _rmsprop_centered(p, g, v, a, lr, alpha, rest, eps, keep, decay):  # type: ignore[no-untyped-def]
    before = flushing()
    rate = lr[0]
    for i in range(p.size):
        d = g[i] + decay * p[i]
        s = alpha * v[i] + rest * d * d
        m = alpha * a[i] + rest * d
        v[i] = s
        a[i] = m
        p[i] -= rate * (d / (np.sqrt(s - m * m) + eps))
    restored(before)


def _rmsprop_centered_momentum(p, g, v, a, u, lr, alpha, rest, eps, keep, decay):  # type: ignore[no-untyped-def]
    before = flushing()
    rate = lr[0]
    for i in range(p.size):
        d = g[i] + decay * p[i]
        s = alpha * v[i] + rest * d * d
        m = alpha * a[i] + rest * d
        b = keep * u[i] + d / (np.sqrt(s - m * m) + eps)
        v[i] = s
        a[i] = m
        u[i] = b
        p[i] -= rate * b
    restored(before)


define(Rule("rmsprop", flops=8.0, formula=_rmsprop_formula, loop=_rmsprop_loop, numbers=_rmsprop_numbers,
            states=lambda momentum=0.0, centered=False, **constants: 1 + int(centered) + int(momentum != 0)))
