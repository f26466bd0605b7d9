"""Comparisons, which make masks (tensors of bool), logic on masks, and the choice by a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..autograd.op import Op, same_dtype
from ..autograd.tensor import Tensor, array, new, numeric
from ..core.graph import Role
from .cast import astype
from .names import with_dim
from .reduce import sum_to, total


def operand(value: Any, dtype: str) -> Tensor:
    """A number or an array as a tensor of this type, if it fits there without a change; tensors stay as they are."""
    if isinstance(value, Tensor):
        return value
    value = numeric(value)
    with np.errstate(invalid="ignore"):
        fits = np.dtype(dtype).kind == "f" or bool((value.astype(dtype) == value).all())
    return array(value, dtype if fits else None)


class Mask(Op):
    """One or two tensors, broadcast to one shape -> a mask. Logic takes masks alone."""

    precision = "widest"

    def __init__(self, name: str) -> None:
        self.name = name

    def forward(self, *tensors: Tensor) -> Tensor:
        types = {t.dtype for t in tensors}
        if self.name.startswith("logical") and (other := types - {"bool"}):
            raise self.error(f"needs masks (bool), not {', '.join(sorted(other))}; x != 0 makes one")
        if len(types) > 1:
            raise self.error(f"types differ: {', '.join(t.dtype for t in tensors)}; convert one with astype")
        return self.out_by(self.name, tensors, self.broadcast(*tensors), "bool")


class Where(Op):
    """mask, a, b, broadcast to one shape."""

    name = "where"
    precision = "widest"

    def forward(self, mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
        dtype = same_dtype(self, a, b, also=("int64", "bool"))
        if mask.dtype != "bool":
            raise self.error(f"the mask is {mask.dtype}, not bool; x != 0 makes a mask")
        self.mask, self.operands = mask, (a, b)
        return self.out_by("where", [mask, a, b], self.broadcast(mask, a, b), dtype)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        full = new("grad where", dy.shape, dy.dtype, Role.GRADIENT)
        return sum_to(self.call("where_grad", [self.mask, dy], [full], chosen=i == 1), self.operands[i - 1])


def compare(name: str, a: Tensor, b: Any) -> Tensor:
    """The mask of a kernel of `kernels/masks.py`: equal, not_equal, less, less_equal, greater, greater_equal."""
    return Mask(name)(a, operand(b, a.dtype))


def logic(name: str, *masks: Any) -> Tensor:
    """The same for logical_and, logical_or, logical_xor, logical_not."""
    return Mask(name)(*masks)


def where(mask: Any, a: Any, b: Any) -> Tensor:
    """a where the mask is true, b elsewhere; all three broadcast. a or b may be numbers."""
    dtype = next((t.dtype for t in (a, b) if isinstance(t, Tensor)), "float32")
    return Where()(mask if isinstance(mask, Tensor) else array(mask), operand(a, dtype), operand(b, dtype))


def masked_fill(x: Tensor, mask: Any, value: float) -> Tensor:
    """x with `value` where the mask is true."""
    return where(mask, value, x)


def clamp(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """x, at least `min` and at most `max`; the gradient passes where x is not changed."""
    if min is not None:
        x = where(compare("less", x, min), min, x)
    return x if max is None else where(compare("greater", x, max), max, x)


@with_dim
def any_of(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Whether any element over `axis` (default: all) is true; a number is where it is not 0."""
    return compare("greater", total(astype(_true(x), "int64"), axis, keepdims), 0)


@with_dim
def all_of(x: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
    """Whether all elements over `axis` (default: all) are true; a number is where it is not 0."""
    return compare("equal", total(astype(logic("logical_not", _true(x)), "int64"), axis, keepdims), 0)


def _true(x: Tensor) -> Tensor:
    return x if x.dtype == "bool" else compare("not_equal", x, 0)
