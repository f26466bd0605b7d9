"""Muon (Jordan et al. 2024): a matrix moves by its momentum, made nearly orthogonal by Newton-Schulz steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from .cuda import FLAG, Call, Copy, c_type, pointer
from .gradients import square_sum_work
from .hints import flushing, restored
from .linear import gemm, product
from .registry import KERNELS, flat, kernel, like, loop
from .update import moved, over_tensors, unless


def _factors(x: Any) -> tuple[Any, Any, bool]:
    """The two matrices whose product is the smaller one of x x^T and x^T x, and whether it is the second."""
    right = x.shape[0] > x.shape[1]
    return (x.T, x, True) if right else (x, x.T, False)


def _flops(reads: Any, writes: Any) -> float:
    """Of the usual five steps: three products each."""
    short, long = sorted(writes[0].shape)
    return 5.0 * (4 * short * short * long + 2 * short**3)


def _work(reads: Any, writes: Any, **constants: Any) -> list[Any]:
    """The direction, its product with a polynomial, the Gram matrix, and the polynomial of it; a sum of squares."""
    (m, n), dtype = writes[0].shape, writes[0].dtype
    k = min(m, n)
    return [((m, n), dtype), ((m, n), dtype), ((k, k), dtype), ((k, k), dtype), ((1,), "float64")]


@kernel("muon", flops=_flops, work=_work)
def muon(xp: Any, p: Any, g: Any, m: Any, lr: Any, skip: Any = None, *, momentum: float, nesterov: bool,
         coefficients: tuple[float, float, float], eps: float, steps: int, scale: float, weight_decay: float = 0.0,
         guarded: bool = False) -> Any:
    """p and m after a step, as in torch: m += (1 - momentum) (g - m); the direction x = m, or with `nesterov` g +
    momentum (m - g), divided by its norm, at least `eps`; `steps` times x = a x + (b s + c s s) x with s = x x^T;
    p = (1 - lr weight_decay) p - lr scale x. torch rounds x to bfloat16 first; here it has the parameter's type."""
    t, (a, b, c) = p.dtype.type, coefficients
    after = m + t(1 - momentum) * (g - m)
    x = g + t(momentum) * (after - g) if nesterov else after
    x = x / xp.maximum(xp.sqrt(xp.square(x.astype("float64")).sum()), eps).astype(p.dtype)
    for _ in range(steps):
        first, second, right = _factors(x)
        s = xp.matmul(first, second)
        s = t(b) * s + t(c) * xp.matmul(s, s)
        x = t(a) * x + (xp.matmul(x, s) if right else xp.matmul(s, x))
    new = (1 - lr[0] * t(weight_decay)) * p - lr[0] * t(scale) * x
    return (new, after) if skip is None else (xp.where(skip != 0, p, new), xp.where(skip != 0, m, after))


@muon.cpu
def _(p: Any, g: Any, m: Any, lr: Any, *rest: Any, momentum: float, nesterov: bool,
      coefficients: tuple[float, float, float], eps: float, steps: int, scale: float, weight_decay: float = 0.0,
      guarded: bool = False) -> Any:
    skip, (after, m_after, x, y, s, poly, total) = (rest[0], rest[1:]) if guarded else (None, rest)
    a, b, c = (like(p, value) for value in coefficients)
    thunks = [loop(_start, flat(m_after), flat(g), flat(x), like(p, momentum), like(p, 1 - momentum), bool(nesterov)),
              *KERNELS["square_sum"].bind([x], [total], [], {}), loop(_unit, flat(x), total, float(eps))]
    first, second, right = _factors(x)
    one = like(p, 1.0)
    thunks += [gemm(first, second, s), gemm(s, s, poly), loop(_mix, flat(poly), flat(s), c, b),
               gemm(x, poly, y) if right else gemm(poly, x, y), loop(_mix, flat(x), flat(y), a, one)] * steps
    thunks += [loop(_end, flat(after), flat(x), lr, like(p, scale), like(p, weight_decay))]
    return [*moved(p, after), *moved(m, m_after), *([unless(skip, thunks)] if guarded else thunks)]


def _start(m, g, x, keep, rest, nesterov):  # type: ignore[no-untyped-def]
    before = flushing()
    for i in range(m.size):
        m[i] += rest * (g[i] - m[i])
        x[i] = g[i] + keep * (m[i] - g[i]) if nesterov else m[i]
    restored(before)


def _unit(x, total, eps):  # type: ignore[no-untyped-def]
    norm = x.dtype.type(max(np.sqrt(total[0]), eps))
    for i in range(x.size):
        x[i] /= norm


def _mix(y, x, own, other):  # type: ignore[no-untyped-def]
    for i in range(y.size):
        y[i] = own * y[i] + other * x[i]


def _end(p, x, lr, scale, shrink):  # type: ignore[no-untyped-def]
    rate = lr[0]
    keep, far = p.dtype.type(1) - rate * shrink, rate * scale
    for i in range(p.size):
        p[i] = keep * p[i] - far * x[i]


def _cuda_work(reads: Any, writes: Any, **constants: Any) -> list[Any]:
    """The same, and the partial sums of squares."""
    return [*_work(reads, writes), *square_sum_work(writes[:1], ())]


def _cuda_mix(y: Any, x: Any, own: float, other: float) -> list[Call]:
    """y = own y + other x."""
    return over_tensors("muon.cu", f"muon_mix<{c_type(y)}>", [[y, x]], own, other)


@muon.cuda(work=_cuda_work)
def _(p: Any, g: Any, m: Any, lr: Any, *rest: Any, momentum: float, nesterov: bool,
      coefficients: tuple[float, float, float], eps: float, steps: int, scale: float, weight_decay: float = 0.0,
      guarded: bool = False) -> Any:
    skip, (after, m_after, x, y, s, poly, total, *work) = (rest[0], rest[1:]) if guarded else (None, rest)
    (a, b, c), t = map(float, coefficients), c_type(p)
    calls: list[Call] = [Copy(old, new) for old, new in ((p, after), (m, m_after))
                         if old.size and pointer(old) != pointer(new)]
    calls += over_tensors("muon.cu", f"muon_start<{t}>", [[m_after, g, x]], float(momentum), float(1 - momentum),
                          bool(nesterov), FLAG, skip=skip)
    calls += KERNELS["square_sum"].cuda_calls([x], [total], work, {})
    calls += over_tensors("muon.cu", f"muon_unit<{t}>", [[x]], total, float(eps))
    first, second, right = _factors(x)
    for _ in range(steps):
        calls += [*product(first, second, s), *product(s, s, poly), *_cuda_mix(poly, s, c, b),
                  *(product(x, poly, y) if right else product(poly, x, y)), *_cuda_mix(x, y, a, 1.0)]
    return [*calls, *over_tensors("muon.cu", f"muon_end<{t}>", [[after, x]], lr, float(scale), float(weight_decay),
                                  skip=skip)]
