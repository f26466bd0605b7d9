"""Losses of a prediction and a target, element by element: L1, smooth L1, binary cross-entropy from logits,
Kullback-Leibler; and their gradients toward the prediction. Their mean or sum is another kernel's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .cuda import c_type, elements
from .registry import flat, kernel, like, loop, ufunc


def _define(name: str, flops: float, reference: Callable[..., Any], cpu: Callable[..., list[Any]]) -> None:
    """A kernel of arrays of one shape; its CUDA form has its name."""
    definition = kernel(name, axes="=,=,=->=", flops=lambda reads, writes: flops * writes[0].size)(reference)
    definition.cpu(cpu)
    definition.cuda()(lambda *arrays, **constants: elements("pair_loss.cu", f"{name}<{c_type(arrays[-1])}>",
                                                            arrays[:-1], arrays[-1], *constants.values()))


def _looped(body: Callable[..., Any]) -> Callable[..., list[Any]]:
    """A CPU form: one loop over flat arrays, and the constants in the arrays' type."""
    return lambda *arrays, **constants: [loop(body, *map(flat, arrays), *(like(arrays[0], c)
                                                                          for c in constants.values()))]


# ------------------------------------------------------------------------------------------------------------------- L1
_define("l1", 2, lambda xp, x, t: xp.abs(x - t), lambda x, t, y: [ufunc(np.subtract, x, t, y), ufunc(np.abs, y, y)])


def _l1_grad(x, t, dy, dx):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        d = x[i] - t[i]
        dx[i] = d if d != d else dy[i] * ((d > 0) - x.dtype.type(d < 0))


_define("l1_grad", 3, lambda xp, x, t, dy: xp.sign(x - t) * dy, _looped(_l1_grad))


# ------------------------------------------------------------------------------------------------------------ smooth L1
def _smooth_l1_reference(xp: Any, x: Any, t: Any, *, beta: float) -> Any:
    """d^2 / (2 beta) where d = |x - t| is below beta, d - beta / 2 elsewhere."""
    d, kind = xp.abs(x - t), x.dtype.type
    return xp.where(d < kind(beta), d * d * kind(0.5 / beta), d - kind(0.5 * beta))


def _smooth_l1(x, t, y, beta):  # type: ignore[no-untyped-def]
    half = x.dtype.type(0.5)
    for i in range(x.size):
        d = abs(x[i] - t[i])
        y[i] = half * d * d / beta if d < beta else d - half * beta


def _smooth_l1_grad(x, t, dy, dx, beta):  # type: ignore[no-untyped-def]
    one = x.dtype.type(1)
    for i in range(x.size):
        d = (x[i] - t[i]) / beta
        d = one if d > one else d
        dx[i] = dy[i] * (-one if d < -one else d)


_define("smooth_l1", 5, _smooth_l1_reference, _looped(_smooth_l1))
_define("smooth_l1_grad", 4, lambda xp, x, t, dy, *, beta: dy * xp.clip(
    (x - t) / x.dtype.type(beta), x.dtype.type(-1), x.dtype.type(1)), _looped(_smooth_l1_grad))


# ------------------------------------------------------------------------------------------------- binary cross-entropy
def _bce_cpu(x: Any, t: Any, y: Any) -> list[Any]:
    # NumPy's exp is vectorised, a loop's is not
    return [ufunc(np.abs, x, y), ufunc(np.negative, y, y), ufunc(np.exp, y, y), ufunc(np.log1p, y, y),
            loop(_bce_rest, flat(x), flat(t), flat(y))]


def _bce_rest(x, t, y):  # type: ignore[no-untyped-def]
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for i in range(x.size):
        v = x[i]
        share = (one if v > zero else zero) - t[i]  # of v, which is no number times 0 if v is infinite
        infinite = zero if share == zero else v * share
        y[i] += (v if v > zero else zero) - v * t[i] if v - v == zero else infinite


def _bce_reference(xp: Any, x: Any, t: Any) -> Any:
    """max(x, 0) - x t + log(1 + exp(-|x|)); for an infinite x the limit: 0 if t is its side, infinity elsewhere."""
    zero = x.dtype.type(0)
    share = (x > 0).astype(x.dtype) - t
    infinite = xp.where(share == 0, zero, x * share)
    return xp.where(x - x == 0, xp.maximum(x, zero) - x * t, infinite) + xp.log1p(xp.exp(-xp.abs(x)))


def _bce_grad_cpu(x: Any, t: Any, dy: Any, dx: Any) -> list[Any]:
    half = like(x, 0.5)
    return [ufunc(np.multiply, x, half, dx), ufunc(np.tanh, dx, dx), ufunc(np.multiply, dx, half, dx),
            ufunc(np.add, dx, half, dx), ufunc(np.subtract, dx, t, dx), ufunc(np.multiply, dx, dy, dx)]


_define("bce_with_logits", 8, _bce_reference, _bce_cpu)
_define("bce_with_logits_grad", 6, lambda xp, x, t, dy: (
    xp.tanh(x * x.dtype.type(0.5)) * x.dtype.type(0.5) + x.dtype.type(0.5) - t) * dy, _bce_grad_cpu)


def _log(xp: Any, x: Any) -> Any:
    return xp.maximum(xp.log(x), x.dtype.type(-100))


def _bce(x, t, y):  # type: ignore[no-untyped-def]
    one, least = x.dtype.type(1), x.dtype.type(-100)
    for i in range(x.size):
        y[i] = -(t[i] * max(np.log(x[i]), least) + (one - t[i]) * max(np.log(one - x[i]), least))


def _bce_prob_grad(x, t, dy, dx):  # type: ignore[no-untyped-def]
    one, least = x.dtype.type(1), x.dtype.type(1e-12)
    for i in range(x.size):
        dx[i] = dy[i] * (x[i] - t[i]) / max((one - x[i]) * x[i], least)


def _bce_target_grad(x, t, dy, dx):  # type: ignore[no-untyped-def]
    one, least = x.dtype.type(1), x.dtype.type(-100)
    for i in range(x.size):
        dx[i] = dy[i] * (max(np.log(one - x[i]), least) - max(np.log(x[i]), least))


# of probabilities x, not logits
_define("bce", 8, lambda xp, x, t: -(t * _log(xp, x) + (1 - t) * _log(xp, 1 - x)), _looped(_bce))
_define("bce_grad", 6, lambda xp, x, t, dy: dy * (x - t) / xp.maximum((1 - x) * x, x.dtype.type(1e-12)),
        _looped(_bce_prob_grad))
_define("bce_target_grad", 8, lambda xp, x, t, dy: dy * (_log(xp, 1 - x) - _log(xp, x)), _looped(_bce_target_grad))


# ---------------------------------------------------------------------------------------------------- Kullback-Leibler
def _kl_reference(xp: Any, x: Any, t: Any) -> Any:
    """t (log t - x) for log-probabilities x and probabilities t; 0 where t is 0, not a number where it is below."""
    zero, one = t.dtype.type(0), t.dtype.type(1)
    none = xp.where((t < 0) | (x != x), t.dtype.type(xp.nan), zero)
    return xp.where(t > 0, t * (xp.log(xp.where(t > 0, t, one)) - x), none)


def _kl(x, t, y):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        y[i] = t[i] * (np.log(t[i]) - x[i]) if t[i] != 0 else x[i] if x[i] != x[i] else t.dtype.type(0)


_define("kl_div", 8, _kl_reference, _looped(_kl))
