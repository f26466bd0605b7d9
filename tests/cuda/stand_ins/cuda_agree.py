"""A CUDA form, run on the CPU, against the reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cuda_on_cpu import run_kernel
from forms import blank, exact

#: relative to the norm of what is right
TOLERANCE = {"float64": 1e-13, "float32": 1e-6, "float16": 1e-3}
DTYPES = list(TOLERANCE)


def written(name: str, reads: Sequence[Any], like: Sequence[Any], run: Callable[..., Any] = run_kernel,
            aliases: dict[int, int] | None = None, **constants: Any) -> tuple[list[Any], Any]:
    """What a form writes, and its calls: for two orders of threads the same bits; what is read stays. `like`: arrays of
    the shapes and types that it writes. `aliases`: which array is read (value) where another one is written (key)."""
    results, aliases = [], aliases or {}
    for seed in (3, 8):
        given = [r.copy() if i in aliases.values() else r for i, r in enumerate(reads)]
        before = [r.copy() for r in given]
        writes = [given[aliases[k]] if k in aliases else w for k, w in enumerate(blank(like))]
        calls = run(name, given, writes, seed, constants)
        results.append(writes)
        for i, (now, then) in enumerate(zip(given, before, strict=True)):
            assert i in aliases.values() or now.tobytes() == then.tobytes(), f"{name} changed what it reads"
    for k, (found, again) in enumerate(zip(*results, strict=True)):
        assert found.tobytes() == again.tobytes(), f"{name}: output {k} depends on the order of threads"
    return results[0], calls


def agree(name: str, reads: list[Any], aliases: dict[int, int] | None = None, times: float = 1.0, scale: float = 1e-30,
          in_sums: Sequence[int] = (), **constants: Any) -> list[Any]:
    """What a CUDA form writes, which is close to the reference in float64. `scale`: the size of numbers that cancel
    in the outputs, if these may be smaller. `in_sums`: outputs that are float32 if others are float16."""
    expected = exact(name, reads, **constants)
    dtype = next(r.dtype for r in reads if r.dtype.kind == "f")
    like = [w for k, v in enumerate(expected)
            for w in blank([v], sums_of(dtype.name) if k in in_sums else dtype)]
    results, _ = written(name, reads, like, aliases=aliases, **constants)
    for k, (found, wanted) in enumerate(zip(results, expected, strict=True)):
        if found.dtype.kind != "f":
            np.testing.assert_array_equal(found, wanted)
            continue
        error, size = (float(np.linalg.norm(a.ravel())) for a in (found.astype("float64") - wanted, wanted))
        assert error <= times * TOLERANCE[found.dtype.name] * max(size, scale), f"{name}: output {k}"
    return results


def near(found: Sequence[Any], wanted: Sequence[Any], tolerance: float) -> None:
    """Each is close to what is wanted, relative to the largest of its elements; whole numbers are equal."""
    for y, e in zip(found, wanted, strict=True):
        assert y.shape == e.shape
        if y.dtype.kind not in "fV":
            np.testing.assert_array_equal(y, e)
            continue
        scale = np.abs(e).max(initial=0) or 1
        np.testing.assert_allclose(y.astype("float64") / scale, e / scale, rtol=0, atol=tolerance)


def sums_of(dtype: str) -> str:
    """The type of what is summed over elements of a type."""
    return "float32" if dtype == "float16" else dtype


def draw(shape: Any, seed: int, dtype: str, centre: float = 0.0) -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) + centre).astype(dtype)
