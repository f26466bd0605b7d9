"""The forms of a kernel, called alone: its reference, and its CPU form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidl.kernels import KERNELS


def outputs(found: Any) -> tuple[Any, ...]:
    """What a reference makes of one or of several arrays."""
    return found if isinstance(found, tuple) else (found,)


def reference(name: str, reads: Sequence[Any], **constants: Any) -> list[Any]:
    """The arrays that the reference makes over NumPy."""
    return [np.asarray(v) for v in outputs(KERNELS[name].reference(np, *reads, **constants))]


def exact(name: str, reads: Sequence[Any], **constants: Any) -> list[Any]:
    """What the reference makes of the same numbers in float64."""
    wide = [r.astype("float64") if r.dtype.kind in "fV" else r.copy() for r in map(np.asarray, reads)]
    with np.errstate(all="ignore"):
        return reference(name, wide, **constants)


def blank(like: Sequence[Any], dtype: Any = None) -> list[Any]:
    """Arrays to write to, of these shapes: full of NaN and of this type, or of 77 where they hold whole numbers."""
    return [np.full(v.shape, np.nan, dtype or v.dtype) if v.dtype.kind in "fV" else np.full(v.shape, 77, v.dtype)
            for v in like]


def bound(name: str, reads: Sequence[Any], writes: Sequence[Any], **constants: Any) -> list[Any]:
    """The calls of a CPU form, whose scratch arrays are full of NaN."""
    kernel = KERNELS[name]
    work = [np.full(shape, np.nan if np.dtype(t).kind == "f" else 1, t)
            for shape, t in (kernel.work(reads, writes, **constants) if kernel.work else ())]
    return list(kernel.bind(reads, writes, work, constants))


def on_cpu(name: str, reads: Sequence[Any], writes: Sequence[Any], **constants: Any) -> Sequence[Any]:
    """What a kernel's CPU form writes."""
    for thunk in bound(name, reads, writes, **constants):
        thunk()
    return writes
