"""Gradients before their update: the global norm, 16-bit copies, loss scaling. Values that vary from
step to step (clip factor, loss scale) are read from arrays."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import numpy as np

from .cuda import Call, Grid, Struct, Zeros, c_type, pointer
from .registry import Thunk, flat, kernel, loop, ufunc
from .update import over_tensors


# ---------------------------------------------------------------------------------------------------------- global norm
@kernel("square_sum", flops=lambda reads, writes: 2.0 * reads[0].size)
def square_sum(xp: Any, g: Any) -> Any:
    """The sum of squares (1,) float64."""
    return xp.square(g.astype("float64")).sum().reshape(1)


@square_sum.cpu
def _(g: Any, total: Any) -> Any:
    return [loop(_square_sum, flat(g), total)]


def _square_parts(size: int) -> int:
    """How many blocks share the sum: few enough that one block can add up their results."""
    return 1 if size <= 2**16 else min(-(-size // 2**14), 512)


def square_sum_work(reads: Any, writes: Any) -> list[Any]:
    parts = _square_parts(reads[0].size)
    return [((parts,), "float64")] if parts > 1 else []


@square_sum.cuda(work=square_sum_work)
def _(g: Any, total: Any, *work: Any) -> Any:
    parts = _square_parts(g.size)
    kernel = f"square_sums<{c_type(g)}>"
    if not work:
        return [Grid("gradients.cu", kernel, (1,), (1024,), (flat(g), total, g.size))]
    return [Grid("gradients.cu", kernel, (parts,), (256,), (flat(g), work[0], g.size)),
            Grid("gradients.cu", "add_parts", (1,), (512,), (work[0], total, parts))]


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
    """Sums of squares (1,), added in their order -> (norm (1,) float64, factor (1,) = min(1, limit /
    (norm + 1e-6)))."""
    total = xp.zeros(1)
    for square in squares:
        total = total + square
    norm = xp.sqrt(total)
    return norm, xp.minimum(limit / (norm + 1e-6), 1.0)


@clip_factor.cpu
def _(*arrays: Any, limit: float) -> Any:
    *squares, norm, factor = arrays
    return [partial(norm.fill, 0), *(ufunc(np.add, norm, s, norm) for s in squares),
            loop(_clip_factor, norm, factor, limit)]


class _Squares(ctypes.Structure):
    """`Squares` of gradients.cu."""

    AT_ONCE = 480
    _fields_ = [("at", ctypes.c_void_p * AT_ONCE), ("count", ctypes.c_int), ("is_first", ctypes.c_bool),
                ("is_last", ctypes.c_bool)]


@clip_factor.cuda()
def _(*arrays: Any, limit: float) -> Any:
    *squares, norm, factor = arrays
    calls: list[Call] = []
    for begin in range(0, max(len(squares), 1), _Squares.AT_ONCE):
        some = [pointer(s) for s in squares[begin : begin + _Squares.AT_ONCE]]
        table = _Squares(tuple(some), len(some), begin == 0, begin + len(some) == len(squares))
        calls.append(Grid("gradients.cu", f"clip_factor<{c_type(factor)}>", (1,), (256,),
                          (Struct("Squares", bytes(table)), norm, factor, float(limit))))
    return calls


def _clip_factor(norm, factor, limit):  # type: ignore[no-untyped-def]
    norm[0] = np.sqrt(norm[0])
    factor[0] = limit / (norm[0] + 1e-6)
    if factor[0] > 1:  # a NaN stays visible
        factor[0] = 1


# ---------------------------------------------------------------------------------------------------- 16-bit parameters
@kernel("cast_many")
def cast_many(xp: Any, *arrays: Any, dtype: str) -> Any:
    """Any number of contiguous arrays in another float type, each as by `cast`."""
    return tuple(xp.asarray(x).astype(dtype) for x in arrays)


@cast_many.cpu
def _(*arrays: Any, dtype: str) -> Any:
    return [partial(np.copyto, y, x, casting="unsafe") for x, y in _pairs(arrays)]


@cast_many.cuda()
def _(*arrays: Any, dtype: str) -> Any:
    return _alike("cast_many", _pairs(arrays))


def _pairs(arrays: Any) -> list[Any]:
    """Each array that is read, with the array that is written for it."""
    return list(zip(arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :], strict=True))


def _alike(name: str, pairs: Any, *arguments: Any) -> list[Call]:
    """Launches over pairs of tensors, one for each pair of types."""
    alike: dict[str, list[Any]] = {}
    for pair in pairs:
        alike.setdefault(", ".join(map(c_type, pair)), []).append(pair)
    return [call for types, same in alike.items()
            for call in over_tensors("gradients.cu", f"{name}<{types}>", same, *arguments)]


# --------------------------------------------------------------------------------------------------------- loss scaling
@kernel("unscale", flops=lambda reads, writes: sum(float(w.size) for w in writes[:-1]),
        work=lambda reads, writes: [((1,), "float32"), *((w.shape, "bool") for w in writes[:-1])])
def unscale(xp: Any, *reads: Any) -> Any:
    """Any number of gradients, then the loss scale (1,) float32 -> the gradients / scale, in place or in a larger type,
    and a flag (1,) int32: 1 if any of them is not finite, else 0."""
    *gradients, scale = reads
    after = [g * (1 / scale[0]) for g in gradients]
    return *after, xp.array([any(not bool(xp.isfinite(g).all()) for g in after)], "int32")


@unscale.cpu
def _(*arrays: Any) -> Any:
    n = len(arrays) // 3 - 1
    gradients, scale, after, (flag, inverse), finite = (arrays[:n], arrays[n], arrays[n + 1 : 2 * n + 1],
                                                        arrays[2 * n + 1 : 2 * n + 3], arrays[2 * n + 3 :])
    thunks: list[Thunk] = [partial(flag.fill, 0), ufunc(np.divide, np.float32(1), scale, inverse)]
    for g, a, f in zip(gradients, after, finite, strict=True):
        thunks += [partial(np.multiply, g, inverse.reshape(()), out=a, casting="same_kind"), ufunc(np.isfinite, a, f),
                   partial(_note, f, flag)]
    return thunks


def _note(finite: Any, flag: Any) -> None:
    if not finite.all():
        flag[0] = 1


@unscale.cuda()
def _(*arrays: Any) -> Any:
    n = len(arrays) // 2 - 1
    gradients, scale, after, flag = arrays[:n], arrays[n], arrays[n + 1 : -1], arrays[-1]
    return [Zeros(flag), *_alike("unscale", zip(gradients, after, strict=True), scale, flag)]


@kernel("scale_update", flops=lambda reads, writes: 2.0)
def scale_update(xp: Any, scale: Any, good: Any, flag: Any, *, growth: float, backoff: float, interval: int) -> Any:
    """The loss scale (1,) float32 and the number of good steps since it changed (1,) int32, advanced by one step: the
    scale is multiplied by `backoff` if the flag is set, and by `growth` after `interval` good steps unless that would
    be infinite."""
    bad, grows = flag != 0, good + 1 >= interval
    larger = (scale * growth).astype("float32")
    scale = xp.where(bad, (scale * backoff).astype("float32"), xp.where(grows & xp.isfinite(larger), larger, scale))
    return scale, xp.where(bad | grows, 0, good + 1).astype("int32")


@scale_update.cpu
def _(scale: Any, good: Any, flag: Any, scale_after: Any, good_after: Any, *, growth: float, backoff: float,
      interval: int) -> Any:
    return [loop(_scale_update, scale, good, flag, scale_after, good_after, float(growth),
                 float(backoff), int(interval))]


def _scale_update(scale, good, flag, scale_after, good_after, growth, backoff, interval):  # type: ignore[no-untyped-def]
    if flag[0] != 0:
        scale_after[0] = np.float32(scale[0] * backoff)
        good_after[0] = 0
        return
    grows = good[0] + 1 >= interval
    larger = np.float32(scale[0] * growth)
    scale_after[0] = larger if grows and np.isfinite(larger) else scale[0]
    good_after[0] = 0 if grows else good[0] + 1


@scale_update.cuda()
def _(scale: Any, good: Any, flag: Any, scale_after: Any, good_after: Any, *, growth: float, backoff: float,
      interval: int) -> Any:
    return [Grid("gradients.cu", "scale_update", (1,), (1,),
                 (scale, good, flag, scale_after, good_after, float(growth), float(backoff), int(interval)))]


@kernel("any_set", flops=lambda reads, writes: float(len(reads)))
def any_set(xp: Any, *flags: Any) -> Any:
    """Flags (1,) int32 -> a flag (1,) int32: 1 if one of them is not 0, else 0."""
    return (sum(flag != 0 for flag in flags) > 0).astype("int32")


@any_set.cpu
def _(*arrays: Any) -> Any:
    *flags, found = arrays
    return [partial(_any_set, flags, found)]


def _any_set(flags: Any, found: Any) -> None:
    found[0] = any(flag[0] for flag in flags)


@any_set.cuda()
def _(*arrays: Any) -> Any:
    *flags, found = arrays
    return [Zeros(found), *(Grid("gradients.cu", "note_flag", (1,), (1,), (flag, found)) for flag in flags)]
