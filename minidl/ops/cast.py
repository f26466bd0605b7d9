"""Casts to another type."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..autograd.op import Op, check_float
from ..autograd.tensor import FLOATS, HALVES, NUMBERS, ShapeError, Tensor, cast


class Cast(Op):
    """A cast. Between float types a gradient flows, and has x's type, as in every op."""

    name = "cast"

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        for dtype in (x.dtype, self.dtype):
            if dtype in (*FLOATS, *HALVES):
                check_float(self, dtype)
        return cast(x, self.dtype)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return dy


def astype(x: Tensor, dtype: Any) -> Tensor:
    """x in another type, floats rounded to nearest; x itself if it has that type. `dtype`: a name, or NumPy's type.
    From floats to whole numbers the fraction is cut off, and no gradient flows. Raises ShapeError for other types."""
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in NUMBERS:
        raise ShapeError(f"a tensor holds numbers ({', '.join(NUMBERS)}), not {dtype}")
    return x if x.dtype == name else Cast(name)(x)
