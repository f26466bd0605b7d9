"""NAdam with decoupled weight decay, and the count of its steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from .adam import counted, looped
from .cuda import Grid
from .hints import flushing, restored
from .registry import kernel, loop
from .update import Rule, define


@kernel("nadam_tick", flops=lambda reads, writes: 8.0)
def nadam_tick(xp: Any, powers: Any, skip: Any = None, *, beta1: float, beta2: float, decay: float) -> Any:
    """powers (n, 5) float64 = (step t, product of mu_1 .. mu_t, beta2^t, mu_t, mu_(t+1)) of each parameter, advanced
    by one step unless the flag `skip` (1,) int32 is set; mu_t = beta1 (1 - 0.96^(t decay) / 2)."""
    step, product, power, *_ = (powers[:, i : i + 1] for i in range(5))  # arrays: NumPy's scalars have another power
    t = step + 1.0
    mu, following = (beta1 * (1 - 0.5 * 0.96 ** (number * decay)) for number in (t, t + 1.0))
    after = xp.concatenate([t, product * mu, power * beta2, mu, following], axis=1)
    return after if skip is None else xp.where(skip != 0, powers, after)


@nadam_tick.cpu
def _(powers: Any, *rest: Any, beta1: float, beta2: float, decay: float) -> Any:
    *skip, after = rest
    return [loop(_nadam_tick, powers, after, *skip or [np.zeros(1, np.int32)], beta1, beta2, decay)]


@nadam_tick.cuda()
def _(powers: Any, *rest: Any, beta1: float, beta2: float, decay: float) -> Any:
    name = "nadam_tick" if len(rest) == 1 else "nadam_tick_guarded"
    return [Grid("nadam.cu", name, (len(powers),), (1,), (powers, *rest, float(beta1), float(beta2), float(decay)))]


def _nadam_tick(powers, after, skip, beta1, beta2, decay):  # type: ignore[no-untyped-def]
    for i in range(len(powers)):
        t = powers[i, 0] + 1.0
        mu, following = beta1 * (1 - 0.5 * 0.96 ** (t * decay)), beta1 * (1 - 0.5 * 0.96 ** ((t + 1.0) * decay))
        after[i, 0] = powers[i, 0] if skip[0] else t
        after[i, 1] = powers[i, 1] if skip[0] else powers[i, 1] * mu
        after[i, 2] = powers[i, 2] if skip[0] else powers[i, 2] * beta2
        after[i, 3] = powers[i, 3] if skip[0] else mu
        after[i, 4] = powers[i, 4] if skip[0] else following


def _nadam_formula(xp: Any, p: Any, g: Any, m: Any, v: Any, lr: Any, powers: Any, *, beta1: float, beta2: float,
                   eps: float, weight_decay: float = 0.0) -> Any:
    """NAdam (Dozat 2016) with decoupled weight decay, as in torch."""
    t = p.dtype.type
    p = p - lr[0] * t(weight_decay) * p
    m = t(beta1) * m + t(1 - beta1) * g
    v = t(beta2) * v + t(1 - beta2) * g * g
    now = lr[0] * ((1 - powers[3]) / (1 - powers[1])).astype(p.dtype)
    ahead = lr[0] * (powers[4] / (1 - powers[1] * powers[4])).astype(p.dtype)
    return [p - (now * g + ahead * m) / (xp.sqrt(v) / xp.sqrt(1 - powers[2]).astype(p.dtype) + t(eps)), m, v]


def _nadam_numbers(*, beta1: float, beta2: float, eps: float, weight_decay: float = 0.0) -> tuple[float, ...]:
    return tuple(float(x) for x in (beta1, 1 - beta1, beta2, 1 - beta2, eps, weight_decay))


def _nadam(p, g, m, v, lr, powers, beta1, rest1, beta2, rest2, eps, shrink):  # type: ignore[no-untyped-def]
    before = flushing()
    rate = lr[0]
    now = rate * p.dtype.type((1.0 - powers[3]) / (1.0 - powers[1]))
    ahead = rate * p.dtype.type(powers[4] / (1.0 - powers[1] * powers[4]))
    root = p.dtype.type(np.sqrt(1.0 - powers[2]))
    keep = p.dtype.type(1) - rate * shrink
    for i in range(p.size):
        a = beta1 * m[i] + rest1 * g[i]
        b = beta2 * v[i] + rest2 * g[i] * g[i]
        m[i] = a
        v[i] = b
        p[i] = p[i] * keep - (now * g[i] + ahead * a) / (np.sqrt(b) / root + eps)
    restored(before)


define(Rule("nadam", flops=15.0, states=lambda **constants: 2, formula=_nadam_formula, order=counted, counts=1,
            loop=looped(_nadam, _nadam_numbers), numbers=_nadam_numbers))
