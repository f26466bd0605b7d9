"""Adam and AdamW, and the count of their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .cuda import Grid
from .hints import flushing, restored
from .registry import Thunk, kernel, like, loop
from .update import Rule, define


@kernel("adam_tick", flops=lambda reads, writes: 2.0)
def adam_tick(xp: Any, powers: Any, skip: Any = None, *, beta1: float, beta2: float) -> Any:
    """powers (n, 3) float64 = (step, beta1^step, beta2^step) of each parameter, advanced by one step unless the flag
    `skip` (1,) int32 is set."""
    after = powers * xp.array([1.0, beta1, beta2]) + xp.array([1.0, 0.0, 0.0])
    return after if skip is None else xp.where(skip != 0, powers, after)


@adam_tick.cpu
def _(powers: Any, *rest: Any, beta1: float, beta2: float) -> Any:
    *skip, after = rest
    return [loop(_adam_tick, powers, after, *skip or [np.zeros(1, np.int32)], beta1, beta2)]


@adam_tick.cuda()
def _(powers: Any, *rest: Any, beta1: float, beta2: float) -> Any:
    name = "adam_tick" if len(rest) == 1 else "adam_tick_guarded"
    return [Grid("adam.cu", name, (len(powers),), (1,), (powers, *rest, float(beta1), float(beta2)))]


def _adam_tick(powers, after, skip, beta1, beta2):  # type: ignore[no-untyped-def]
    for i in range(len(powers)):
        after[i, 0] = powers[i, 0] + (0.0 if skip[0] else 1.0)
        after[i, 1] = powers[i, 1] * (1.0 if skip[0] else beta1)
        after[i, 2] = powers[i, 2] * (1.0 if skip[0] else beta2)


def looped(body: Any, numbers: Callable[..., Sequence[float]]) -> Callable[..., Thunk]:
    """The loop of a rule, whose last arguments are these numbers in the parameter's type."""
    return lambda p, *rest, **constants: loop(body, p, *rest, *(like(p, x) for x in numbers(**constants)))


def counted(arrays: Any, **constants: Any) -> list[Any]:
    """For one parameter the powers come after lr."""
    p, g, m, v, lr, powers, *rest = arrays
    return [p, g, m, v, powers, lr, *rest]


def _adam_formula(xp: Any, p: Any, g: Any, m: Any, v: Any, lr: Any, powers: Any, *, beta1: float, beta2: float,
                  eps: float, weight_decay: float = 0.0, decoupled: bool = False) -> Any:
    """Adam (Kingma, Ba 2015) with L2 weight decay, or decoupled decay (AdamW; Loshchilov, Hutter 2019)."""
    t = p.dtype.type
    if weight_decay and decoupled:
        p = p - lr[0] * t(weight_decay) * p
    elif weight_decay:
        g = g + t(weight_decay) * p
    m = t(beta1) * m + t(1 - beta1) * g
    v = t(beta2) * v + t(1 - beta2) * g * g
    size = lr[0] / (1 - powers[1]).astype(p.dtype)
    return [p - size * m / (xp.sqrt(v) / xp.sqrt(1 - powers[2]).astype(p.dtype) + t(eps)), m, v]


def _adam_numbers(*, beta1: float, beta2: float, eps: float, weight_decay: float = 0.0,
                  decoupled: bool = False) -> tuple[float, ...]:
    shrink, grow = (weight_decay, 0.0) if decoupled else (0.0, weight_decay)
    return tuple(float(x) for x in (beta1, 1 - beta1, beta2, 1 - beta2, eps, shrink, grow))


def _adam(p, g, m, v, lr, powers, beta1, rest1, beta2, rest2, eps, shrink, grow):  # type: ignore[no-untyped-def]
    before = flushing()
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
    restored(before)


define(Rule("adam", flops=12.0, states=lambda **constants: 2, formula=_adam_formula, order=counted, counts=1,
            loop=looped(_adam, _adam_numbers), numbers=_adam_numbers))
