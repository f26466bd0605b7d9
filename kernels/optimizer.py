"""Updates of parameters in place. First an update rule, the two kernels that `define` makes of it, and launches over
many tensors; then the rules: SGD, Adam, NAdam, RMSprop. Values that vary from step to step (learning rate, Adam's
powers) are read from arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .cuda import FLAG, Call, Copy, Grid, LaunchError, Struct, c_type, pointer
from .registry import Thunk, flat, kernel, like, loop, ufunc


@dataclass(frozen=True)
class Rule:
    """An update rule. One called sgd has two kernels: `sgd` for one parameter, and `sgd_many` for `count` parameters.

    Both read each parameter, its gradient and its states; then, once for all, the learning rate (and other `shared`
    operands), with `clipped` a factor (1,) for the gradients, and with `guarded` a flag (1,) int32: if it is not 0,
    nothing changes. They write each parameter, its states and, if `copy` is a type, a copy of the parameter in that
    type. Gradients may have a smaller type than their parameters. On CUDA they set the device's flag if a gradient
    times its factor is not finite, unless nothing changes.
    """

    name: str
    shared: int  #: how many operands all parameters share
    flops: float  #: per element
    states: Callable[..., int]  #: how many states a parameter has
    formula: Callable[..., Sequence[Any]]  #: (xp, p, g, *states, *shared) -> p and states after
    loop: Callable[..., Thunk]  #: (p, g, *states, *shared), in place and flat
    numbers: Callable[..., Sequence[Any]]  #: the last scalar arguments of the CUDA kernel
    #: the operands of the kernel for one parameter -> their order in the kernel for many
    order: Callable[..., list[Any]] = lambda arrays, **constants: list(arrays)


class Update(NamedTuple):
    """The operands of one parameter. `wide`: scratch for a gradient that the CPU's loops cannot use directly."""

    p: Any
    g: Any
    states: list[Any]
    after: Any
    states_after: list[Any]
    copy: Any
    wide: Any

    @property
    def moves(self) -> list[tuple[Any, Any]]:
        """Pairs of arrays before and after the update: the parameter and its states."""
        return [(self.p, self.after), *zip(self.states, self.states_after, strict=True)]


def _needs_wide(p: Any, g: Any, clipped: bool) -> bool:
    return clipped or p.dtype != g.dtype


def define(rule: Rule) -> None:
    """Defines both kernels of a rule."""

    def many(xp: Any, *reads: Any, count: int, clipped: bool = False, guarded: bool = False, copy: str = "",
             **constants: Any) -> Any:
        own = 2 + rule.states(**constants)
        common = reads[count * own :]
        after: list[Any] = []
        for i in range(count):
            p, g, *states = reads[i * own : (i + 1) * own]
            g = g.astype(p.dtype) * (common[rule.shared] if clipped else p.dtype.type(1))
            new = rule.formula(xp, p, g, *states, *common[: rule.shared], **constants)
            if guarded:
                new = [xp.where(common[-1] != 0, old, n) for old, n in zip((p, *states), new, strict=True)]
            after += [*new, *([new[0].astype(copy)] if copy else [])]
        return tuple(after) if len(after) > 1 else after[0]

    def many_work(reads: Any, writes: Any, count: int, clipped: bool = False, guarded: bool = False, copy: str = "",
                  **constants: Any) -> list[Any]:
        own = 2 + rule.states(**constants)
        return [(p.shape, p.dtype) for p, g in (reads[i * own : i * own + 2] for i in range(count))
                if _needs_wide(p, g, clipped)]

    def bind(arrays: Sequence[Any], on_cuda: bool, count: int, clipped: bool = False, guarded: bool = False,
             copy: str = "", **constants: Any) -> list[Any]:
        left, states = list(arrays), rule.states(**constants)

        def take(n: int) -> list[Any]:
            head, left[:] = left[:n], left[n:]
            return head

        reads, shared = [take(2 + states) for _ in range(count)], take(rule.shared)
        (factor,), (skip,) = (take(1) if present else [None] for present in (clipped, guarded))
        writes = [take(1 + states + bool(copy)) for _ in range(count)]
        wide = [take(not on_cuda and _needs_wide(p, g, clipped)) for p, g, *_ in reads]
        assert not left, f"{rule.name} has {len(left)} arrays too many"
        updates = [Update(p, g, before, after, rest[:states], *rest[states:] or [None], *w or [None])
                   for (p, g, *before), (after, *rest), w in zip(reads, writes, wide, strict=True)]
        if on_cuda:
            return _on_cuda(rule.name, updates, factor, skip, *shared, *rule.numbers(**constants))
        return [thunk for u in updates for thunk in _on_cpu(rule, u, factor, skip, shared, constants)]

    def one(xp: Any, *reads: Any, **constants: Any) -> Any:
        return many(xp, *rule.order(reads, **constants), count=1, **constants)

    def one_work(reads: Any, writes: Any, **constants: Any) -> list[Any]:
        return many_work(rule.order(reads, **constants), writes, 1, **constants)

    def flops(reads: Any, writes: Any) -> float:
        return rule.flops * writes[0].size

    def axes(reads: Any, **constants: Any) -> str:
        labels = ["C"] * len(reads)  # what all parameters share
        for i in rule.order(range(len(reads)), **constants)[: 2 + rule.states(**constants)]:
            labels[i] = "="
        return f"{','.join(labels)}->=,=,=,=,="

    for reference in (one, many):
        reference.__module__, reference.__doc__ = rule.formula.__module__, rule.formula.__doc__
    single = kernel(rule.name, flops=flops, work=one_work, axes=axes)(one)
    single.cpu(lambda *arrays, **constants: bind(rule.order(arrays, **constants), False, 1, **constants))
    single.cuda()(lambda *arrays, **constants: bind(rule.order(arrays, **constants), True, 1, **constants))
    several = kernel(f"{rule.name}_many", flops=lambda reads, writes: sum(rule.flops * w.size for w in writes),
                     work=many_work)(many)
    several.cpu(lambda *arrays, **constants: bind(arrays, False, **constants))
    several.cuda()(lambda *arrays, **constants: bind(arrays, True, **constants))


# ------------------------------------------------------------------------------------------------------------------ CPU
def _on_cpu(rule: Rule, u: Update, factor: Any, skip: Any, shared: Sequence[Any],
            constants: dict[str, Any]) -> list[Thunk]:
    """The update in place, with the calls before and after it."""
    moved = [thunk for before, after in u.moves for thunk in _moved(before, after)]
    thunks: list[Thunk] = []
    if u.wide is not None:
        thunks += [partial(np.copyto, u.wide, u.g) if factor is None else partial(np.multiply, u.g, factor, out=u.wide)]
    g = u.g if u.wide is None else u.wide
    thunks += [rule.loop(flat(u.after), flat(g), *map(flat, u.states_after), *shared, **constants)]
    if skip is not None:
        thunks = [partial(_run_unless, skip, thunks)]
    return [*moved, *thunks, *([] if u.copy is None else [partial(np.copyto, u.copy, u.after, casting="unsafe")])]


def _moved(before: Any, after: Any) -> list[Thunk]:
    """A copy where the two arrays differ. Loops work in place, since only loops without aliases are vectorised."""
    return [] if before.ctypes.data == after.ctypes.data else [ufunc(np.positive, before, after)]


def _run_unless(skip: Any, thunks: Sequence[Thunk]) -> None:
    if not skip[0]:
        for thunk in thunks:
            thunk()


# ----------------------------------------------------------------------------------------------------------------- CUDA
AT_ONCE = 62  #: tensors per launch: as many as fit in the 4 KiB of a launch's arguments
SHARE = 2048  #: elements per block


class _Tensors(ctypes.Structure):
    """`Tensors` of update.cuh."""

    _fields_ = [("start", ctypes.c_int * (AT_ONCE + 1)), ("size", ctypes.c_longlong * AT_ONCE),
                ("of", ctypes.c_void_p * AT_ONCE * 6), ("factor", ctypes.c_void_p), ("skip", ctypes.c_void_p)]


def over_tensors(source: str, kernel: str, groups: Sequence[Sequence[Any]], *arguments: Any, factor: Any = None,
                 skip: Any = None) -> list[Call]:
    """Launches of `kernel` (Tensors, arguments), as few as its table allows. A group has the arrays of one tensor: up
    to six arrays of its size, or None."""
    groups = [g for g in groups if g[0].size]
    calls: list[Call] = []
    for begin in range(0, len(groups), AT_ONCE):
        some, table, blocks = groups[begin : begin + AT_ONCE], _Tensors(), 0
        for i, group in enumerate(some):
            table.size[i] = group[0].size
            blocks += -(-group[0].size // SHARE)
            for k, array in enumerate(group):
                table.of[k][i] = None if array is None else pointer(flat(array))
            table.start[i + 1 :] = [blocks] * (AT_ONCE - i)
        table.factor, table.skip = (None if a is None else pointer(a) for a in (factor, skip))
        calls.append(Grid(source, kernel, (blocks,), (256,), (Struct("Tensors", bytes(table)), *arguments)))
    return calls


def _on_cuda(name: str, updates: Sequence[Update], factor: Any, skip: Any, *arguments: Any) -> list[Call]:
    """All updates in place, after copies where arrays differ. The kernel's last argument is the device's flag."""
    calls: list[Call] = [Copy(before, after) for u in updates for before, after in u.moves
                         if after.size and pointer(before) != pointer(after)]
    alike: dict[str, list[Any]] = {}
    for u in updates:
        for array, wanted in ((factor, str(u.p.dtype)), (skip, "int32")):
            if array is not None and str(array.dtype) != wanted:
                raise LaunchError(f"{name}: the factor or flag must be {wanted}, not {array.dtype}")
        typed = (u.after, u.g, u.after if u.copy is None else u.copy)
        states = [*u.states_after, None, None, None][:3]
        alike.setdefault(", ".join(map(c_type, typed)), []).append((u.after, u.g, *states, u.copy))
    for types, groups in alike.items():
        calls += over_tensors("optimizer.cu", f"{name}<{types}>", groups, *arguments, FLAG, factor=factor, skip=skip)
    return calls


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
