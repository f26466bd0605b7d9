"""Update rules: SGD, Adam, NAdam, RMSprop. Values that vary from step to step (learning rate, Adam's powers) are read
from arrays; `update` makes the kernels of a rule."""

from __future__ import annotations

from typing import Any

import numpy as np

from .cuda import Grid
from .registry import Thunk, kernel, like, loop
from .update import Rule, define


# ------------------------------------------------------------------------------------------------------------------ SGD
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


define(Rule("sgd", shared=1, flops=4.0, states=lambda momentum=0.0, **constants: int(momentum != 0),
            formula=_sgd_formula, loop=_sgd_loop, numbers=_sgd_numbers, order=_sgd_order))


# ----------------------------------------------------------------------------------------------------------------- Adam
@kernel("adam_tick", flops=lambda reads, writes: 2.0)
def adam_tick(xp: Any, powers: Any, skip: Any = None, *, beta1: float, beta2: float) -> Any:
    """powers (3,) float64 = (step, beta1^step, beta2^step), advanced by one step unless the flag `skip` (1,) int32 is
    set."""
    after = powers * xp.array([1.0, beta1, beta2]) + xp.array([1.0, 0.0, 0.0])
    return after if skip is None else xp.where(skip != 0, powers, after)


@adam_tick.cpu
def _(powers: Any, *rest: Any, beta1: float, beta2: float) -> Any:
    *skip, after = rest
    if skip:
        return [loop(_adam_tick_guarded, powers, skip[0], after, beta1, beta2)]
    return [loop(_adam_tick, powers, after, beta1, beta2)]


@adam_tick.cuda()
def _(powers: Any, *rest: Any, beta1: float, beta2: float) -> Any:
    name = "adam_tick" if len(rest) == 1 else "adam_tick_guarded"
    return [Grid("optimizer.cu", name, (1,), (1,), (powers, *rest, float(beta1), float(beta2)))]


def _adam_tick(powers, after, beta1, beta2):  # type: ignore[no-untyped-def]
    after[0] = powers[0] + 1.0
    after[1] = powers[1] * beta1
    after[2] = powers[2] * beta2


def _adam_tick_guarded(powers, skip, after, beta1, beta2):  # type: ignore[no-untyped-def]
    after[0] = powers[0] + (0.0 if skip[0] else 1.0)
    after[1] = powers[1] * (1.0 if skip[0] else beta1)
    after[2] = powers[2] * (1.0 if skip[0] else beta2)


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


def _adam_loop(p: Any, g: Any, m: Any, v: Any, lr: Any, powers: Any, **constants: Any) -> Thunk:
    return loop(_adam, p, g, m, v, lr, powers, *(like(p, x) for x in _adam_numbers(**constants)))


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


define(Rule("adam", shared=2, flops=12.0, states=lambda **constants: 2, formula=_adam_formula, loop=_adam_loop,
            numbers=_adam_numbers))


# ---------------------------------------------------------------------------------------------------------------- NAdam
@kernel("nadam_tick", flops=lambda reads, writes: 8.0)
def nadam_tick(xp: Any, powers: Any, skip: Any = None, *, beta1: float, beta2: float, decay: float) -> Any:
    """powers (5,) float64 = (step t, product of mu_1 .. mu_t, beta2^t, mu_t, mu_(t+1)), advanced by one step unless the
    flag `skip` (1,) int32 is set; mu_t = beta1 (1 - 0.96^(t decay) / 2)."""
    step, product, power, *_ = (powers[i : i + 1] for i in range(5))  # arrays: NumPy's scalars have another power
    t = step + 1.0
    mu, following = (beta1 * (1 - 0.5 * 0.96 ** (number * decay)) for number in (t, t + 1.0))
    after = xp.concatenate([t, product * mu, power * beta2, mu, following])
    return after if skip is None else xp.where(skip != 0, powers, after)


@nadam_tick.cpu
def _(powers: Any, *rest: Any, beta1: float, beta2: float, decay: float) -> Any:
    *skip, after = rest
    return [loop(_nadam_tick, powers, skip[0] if skip else np.zeros(1, np.int32), after, beta1, beta2, decay)]


@nadam_tick.cuda()
def _(powers: Any, *rest: Any, beta1: float, beta2: float, decay: float) -> Any:
    name = "nadam_tick" if len(rest) == 1 else "nadam_tick_guarded"
    return [Grid("optimizer.cu", name, (1,), (1,), (powers, *rest, float(beta1), float(beta2), float(decay)))]


def _nadam_tick(powers, skip, after, beta1, beta2, decay):  # type: ignore[no-untyped-def]
    t = powers[0] + 1.0
    mu, following = beta1 * (1 - 0.5 * 0.96 ** (t * decay)), beta1 * (1 - 0.5 * 0.96 ** ((t + 1.0) * decay))
    on = skip[0] == 0
    after[0] = t if on else powers[0]
    after[1] = powers[1] * mu if on else powers[1]
    after[2] = powers[2] * beta2 if on else powers[2]
    after[3] = mu if on else powers[3]
    after[4] = following if on else powers[4]


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


def _nadam_loop(p: Any, g: Any, m: Any, v: Any, lr: Any, powers: Any, **constants: Any) -> Thunk:
    return loop(_nadam, p, g, m, v, lr, powers, *(like(p, x) for x in _nadam_numbers(**constants)))


def _nadam(p, g, m, v, lr, powers, beta1, rest1, beta2, rest2, eps, shrink):  # type: ignore[no-untyped-def]
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


define(Rule("nadam", shared=2, flops=15.0, states=lambda **constants: 2, formula=_nadam_formula, loop=_nadam_loop,
            numbers=_nadam_numbers))


# -------------------------------------------------------------------------------------------------------------- RMSprop
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
    rate = lr[0]
    for i in range(p.size):
        d = g[i] + decay * p[i]
        s = alpha * v[i] + rest * d * d
        v[i] = s
        p[i] -= rate * (d / (np.sqrt(s) + eps))


def _rmsprop_momentum(p, g, v, u, lr, alpha, rest, eps, keep, decay):  # type: ignore[no-untyped-def]
    rate = lr[0]
    for i in range(p.size):
        d = g[i] + decay * p[i]
        s = alpha * v[i] + rest * d * d
        b = keep * u[i] + d / (np.sqrt(s) + eps)
        v[i] = s
        u[i] = b
        p[i] -= rate * b


def _rmsprop_centered(p, g, v, a, lr, alpha, rest, eps, keep, decay):  # type: ignore[no-untyped-def]
    rate = lr[0]
    for i in range(p.size):
        d = g[i] + decay * p[i]
        s = alpha * v[i] + rest * d * d
        m = alpha * a[i] + rest * d
        v[i] = s
        a[i] = m
        p[i] -= rate * (d / (np.sqrt(s - m * m) + eps))


def _rmsprop_centered_momentum(p, g, v, a, u, lr, alpha, rest, eps, keep, decay):  # type: ignore[no-untyped-def]
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


define(Rule("rmsprop", shared=1, flops=8.0, formula=_rmsprop_formula, loop=_rmsprop_loop, numbers=_rmsprop_numbers,
            states=lambda momentum=0.0, centered=False, **constants: 1 + int(centered) + int(momentum != 0)))
