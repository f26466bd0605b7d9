"""New tensors: zeros, ones, ranges, random numbers. They are constants; a layer's weights are `Parameter`s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..autograd import random
from ..autograd import tape as tapes
from ..autograd.initial import shape_of
from ..autograd.op import Op
from ..autograd.tensor import FLOATS, Tensor, array
from .dropout import next_draw


def _shape(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """`zeros(2, 3)` as `zeros((2, 3))`."""
    return tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape


def full(shape: int | Sequence[int], value: float, dtype: str | None = None) -> Tensor:
    """A tensor full of one value: bool for one of these, int64 for a whole number, else float32."""
    known = {"b": "bool", "i": "int64", "u": "int64"}.get(np.asarray(value).dtype.kind, "float32")
    return array(np.full(shape, value, dtype or known))


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
    """start, start + step, ... below end, or 0, 1, ... below `start` alone: int64 if all are whole, else float32."""
    if not step:
        raise ValueError("arange: the step is 0")
    whole = all(isinstance(v, int | np.integer | None) for v in (start, end, step))
    values = np.arange(start, step=step) if end is None else np.arange(start, end, step)
    return array(values, dtype or ("int64" if whole else "float32"))


def linspace(start: float, end: float, steps: int, dtype: str = "float32") -> Tensor:
    """`steps` numbers from `start` to `end`, both included, equally far apart."""
    return array(np.linspace(start, end, steps).astype(dtype))


def eye(n: int, m: int | None = None, dtype: str = "float32") -> Tensor:
    """n rows and m columns (default n): 1 on the diagonal, 0 elsewhere."""
    return array(np.eye(n, m, dtype=dtype))


class _Draw(Op):
    """Random numbers, keyed like dropout: by seed, number of the draw and sample, which is the index along axis 0."""

    def __init__(self, name: str, shape: Sequence[int], dtype: str, known: Sequence[str] = FLOATS, low: int = 0,
                 span: int = 1) -> None:
        if dtype not in known:
            raise TypeError(f"{name}: the dtype is {dtype!r}; it must be {' or '.join(known)}")
        self.name = name
        self.law: dict[str, Any] = {"shape": shape_of(shape), "dtype": dtype, "normal": name == "randn", "low": low,
                                    "span": span}

    def forward(self) -> Tensor:
        counter, key = next_draw()
        return self.out_by("draw", [counter], self.law["shape"], self.law["dtype"], **self.law, **key)


def randn(*shape: Any, dtype: str = "float32") -> Tensor:
    """Standard normal numbers. They follow from the seed, the number of earlier draws and dropouts, and the position in
    the batch; so a recorded step draws new ones each time, the same as its eager run."""
    return _Draw("randn", _shape(shape), dtype)()


def rand(*shape: Any, dtype: str = "float32") -> Tensor:
    """Numbers uniform in [0, 1), drawn as by `randn`."""
    return _Draw("rand", _shape(shape), dtype)()


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
    as by `randn`. Raises ValueError if there is no such number."""
    if size is None:
        low, high, size = 0, low, high
    assert size is not None
    if low >= high:
        raise ValueError(f"randint: low is {low} and high {high}; low must be below high")
    return _Draw("randint", size, "int64", ("int64",), low, high - low)()


def randperm(n: int) -> Tensor:
    """0 to n - 1 in a random order, int64. The order follows from the seed and the number of earlier ones. Raises
    RuntimeError in a recorded step, which would have the same order each time it runs."""
    if n < 0:
        raise ValueError(f"randperm: n is {n}; it must be at least 0")
    if tapes.current().recording:
        raise RuntimeError("randperm in a recorded step would give the same order each time the step runs; draw it "
                           "outside and pass it to the step")
    return array(random.next_tensors().permutation(np.arange(n)))
