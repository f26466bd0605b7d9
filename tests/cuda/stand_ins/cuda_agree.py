"""A CUDA form, run on the CPU, against the reference in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda_on_cpu import run_kernel

from minidl.kernels import KERNELS

#: relative to the norm of what is right
TOLERANCE = {"float64": 1e-13, "float32": 1e-6, "float16": 1e-3}
DTYPES = list(TOLERANCE)


def agree(name: str, reads: list[Any], aliases: dict[int, int] | None = None, times: float = 1.0, scale: float = 1e-30,
          in_sums: Sequence[int] = (), **constants: Any) -> list[Any]:
    """Runs a CUDA form twice, its threads in other orders: the same bits, close to the reference in float64, and what
    is read stays. `aliases`: which array is read (value) where another one is written (key). `scale`: the size of what
    cancels in the outputs, where they may be smaller. `in_sums`: outputs that are float32 where others are float16."""
    wide = [r.astype("float64") if r.dtype.kind == "f" else r for r in reads]
    expected = KERNELS[name].reference(np, *wide, **constants)
    expected = [np.asarray(v) for v in (expected if isinstance(expected, tuple) else (expected,))]
    dtype = next(r.dtype for r in reads if r.dtype.kind == "f")
    results = []
    for seed in (3, 8):
        given = [r.copy() if i in (aliases or {}).values() else r for i, r in enumerate(reads)]
        before = [r.copy() for r in given]
        writes = [given[aliases[k]] if k in (aliases or {}) else np.full(v.shape, np.nan if v.dtype.kind == "f" else -1,
                  sums_of(dtype.name) if v.dtype.kind == "f" and k in in_sums else dtype if v.dtype.kind == "f"
                                                                         else v.dtype) for k, v in enumerate(expected)]
        run_kernel(name, given, writes, seed=seed, **constants)
        results.append(writes)
        for i, (now, then) in enumerate(zip(given, before, strict=True)):
            assert i in (aliases or {}).values() or now.tobytes() == then.tobytes(), f"{name} changed what it reads"
    for k, (found, again, wanted) in enumerate(zip(*results, expected, strict=True)):
        assert found.tobytes() == again.tobytes(), f"{name}: output {k} depends on the order of threads"
        if found.dtype.kind != "f":
            np.testing.assert_array_equal(found, wanted)
            continue
        error = np.linalg.norm((found.astype("float64") - wanted).ravel())
        assert error <= times * TOLERANCE[found.dtype.name] * max(np.linalg.norm(wanted.ravel()),
                                                                  scale), f"{name}: output {k}"
    return results[0]


def on_cpu(name: str, reads: list[Any], writes: list[Any], **constants: Any) -> list[Any]:
    """What a kernel's CPU form writes, with scratch arrays full of NaN."""
    kernel = KERNELS[name]
    work = [np.full(shape, np.nan if np.dtype(t).kind == "f" else 0, t)
            for shape, t in (kernel.work(reads, writes, **constants) if kernel.work else ())]
    for thunk in kernel.bind(reads, writes, work, constants):
        thunk()
    return writes


def sums_of(dtype: str) -> str:
    """The type of what is summed over elements of a type."""
    return "float32" if dtype == "float16" else dtype


def draw(shape: Any, seed: int, dtype: str, centre: float = 0.0) -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) + centre).astype(dtype)
