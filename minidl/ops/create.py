"""New tensors: zeros, ones, ranges, random numbers. They are constants; a layer's weights are `Parameter`s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..autograd import random
from ..autograd import tape as tapes
from ..autograd.tensor import Tensor, array


def _shape(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """`zeros(2, 3)` as `zeros((2, 3))`."""
    return tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape


def full(shape: Sequence[int], value: float, dtype: str = "float32") -> Tensor:
    """A tensor full of one value."""
    return array(np.full(tuple(shape), value, dtype))


def zeros(*shape: Any, dtype: str = "float32") -> Tensor:
    """Zeros: `zeros(2, 3)` or `zeros((2, 3))`."""
    return full(_shape(shape), 0, dtype)


def ones(*shape: Any, dtype: str = "float32") -> Tensor:
    """Ones: `ones(2, 3)` or `ones((2, 3))`."""
    return full(_shape(shape), 1, dtype)


def zeros_like(x: Tensor, dtype: str | None = None) -> Tensor:
    """Zeros of x's shape and, if no other is given, x's type."""
    return full(x.shape, 0, dtype or x.dtype)


def ones_like(x: Tensor, dtype: str | None = None) -> Tensor:
    """Ones of x's shape and, if no other is given, x's type."""
    return full(x.shape, 1, dtype or x.dtype)


def arange(start: float, end: float | None = None, step: float = 1, dtype: str | None = None) -> Tensor:
    """start, start + step, ... below end, or 0, 1, ... below `start` alone: int64 if all are whole numbers, else
    float32."""
    whole = all(isinstance(v, int | np.integer | None) for v in (start, end, step))
    values = np.arange(start, step=step) if end is None else np.arange(start, end, step)
    return array(values, dtype or ("int64" if whole else "float32"))


def linspace(start: float, end: float, steps: int, dtype: str = "float32") -> Tensor:
    """`steps` numbers from `start` to `end`, both included, equally far apart."""
    return array(np.linspace(start, end, steps).astype(dtype))


def eye(n: int, m: int | None = None, dtype: str = "float32") -> Tensor:
    """n rows and m columns (default n): 1 on the diagonal, 0 elsewhere."""
    return array(np.eye(n, m, dtype=dtype))


def randn(*shape: Any, dtype: str = "float32") -> Tensor:
    """Standard normal numbers. They follow from the seed and the number of earlier random tensors.

    Raises RuntimeError in a recorded step, which would have the same numbers each time it runs.
    """
    return array(_generator("randn").standard_normal(_shape(shape)).astype(dtype))


def rand(*shape: Any, dtype: str = "float32") -> Tensor:
    """Numbers uniform in [0, 1), drawn as by `randn`; raises as it does."""
    return array(_generator("rand").random(_shape(shape), np.dtype(dtype)))


def full_like(x: Tensor, value: float, dtype: str | None = None) -> Tensor:
    """One value in x's shape and, if no other is given, x's type."""
    return full(x.shape, value, dtype or x.dtype)


def rand_like(x: Tensor) -> Tensor:
    """`rand` of x's shape and type."""
    return rand(*x.shape, dtype=x.dtype)


def randn_like(x: Tensor) -> Tensor:
    """`randn` of x's shape and type."""
    return randn(*x.shape, dtype=x.dtype)


def randint(low: int, high: Any, size: Sequence[int] | None = None) -> Tensor:
    """Whole numbers (int64) from `low` up to below `high`: `randint(2, 5, (3,))`, or `randint(5, (3,))` from 0; drawn
    as by `randn`; raises as it does."""
    if size is None:
        low, high, size = 0, low, high
    assert size is not None
    return array(_generator("randint").integers(low, high, tuple(size)))


def randperm(n: int) -> Tensor:
    """0 to n - 1 in a random order, int64; drawn as by `randn`; raises as it does."""
    return array(_generator("randperm").permutation(n).astype(np.int64))


def _generator(name: str) -> np.random.Generator:
    if tapes.current().recording:
        raise RuntimeError(f"{name} in a recorded step would give the same numbers each time the step runs; draw them "
                           f"outside and pass them to the step, or use dropout")
    generator: np.random.Generator = random.next_tensors()
    return generator
