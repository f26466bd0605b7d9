"""SGD: plain, with momentum, Nesterov's."""

from __future__ import annotations

from typing import Any

from .hints import flushing, restored
from .registry import Thunk, like, loop
from .update import Rule, define


def _sgd_formula(xp: Any, p: Any, g: Any, *rest: Any, momentum: float = 0.0, weight_decay: float = 0.0,
                 nesterov: bool = False) -> Any:
    """v = momentum v + g'; p -= lr v, with g' = g + weight_decay p; Nesterov: p -= lr (g' + momentum v)."""
    *states, lr = rest
    g = g + p.dtype.type(weight_decay) * p if weight_decay else g
    if not states:
        return [p - lr[0] * g]
    v = p.dtype.type(momentum) * states[0] + g
    return [p - lr[0] * (g + p.dtype.type(momentum) * v if nesterov else v), v]


def _sgd_loop(p: Any, g: Any, *rest: Any, momentum: float = 0.0, weight_decay: float = 0.0,
              nesterov: bool = False) -> Thunk:
    *states, lr = rest
    if not states:
        return loop(_sgd, p, g, lr, like(p, weight_decay))
    return loop(_sgd_nesterov if nesterov else _sgd_momentum, p, g, lr, *states, like(p, momentum),
                like(p, weight_decay))


def _sgd_numbers(momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False) -> tuple[Any, ...]:
    return float(momentum), float(weight_decay), bool(nesterov)


def _sgd_order(arrays: Any, momentum: float = 0.0, **constants: Any) -> list[Any]:
    """For one parameter the momentum comes after lr."""
    p, g, lr, *rest = arrays
    return [p, g, rest[0], lr, *rest[1:]] if momentum else [p, g, lr, *rest]


def _sgd(p, g, lr, decay):  # type: ignore[no-untyped-def]
    before = flushing()
    rate = lr[0]
    for i in range(p.size):
        p[i] -= rate * (g[i] + decay * p[i])
    restored(before)


def _sgd_momentum(p, g, lr, v, momentum, decay):  # type: ignore[no-untyped-def]
    before = flushing()
    rate = lr[0]
    for i in range(p.size):
        u = momentum * v[i] + (g[i] + decay * p[i])
        v[i] = u
        p[i] -= rate * u
    restored(before)


def _sgd_nesterov(p, g, lr, v, momentum, decay):  # type: ignore[no-untyped-def]
    before = flushing()
    rate = lr[0]
    for i in range(p.size):
        d = g[i] + decay * p[i]
        u = momentum * v[i] + d
        v[i] = u
        p[i] -= rate * (d + momentum * u)
    restored(before)


define(Rule("sgd", flops=4.0, states=lambda momentum=0.0, **constants: int(momentum != 0),
            formula=_sgd_formula, loop=_sgd_loop, numbers=_sgd_numbers, order=_sgd_order))
