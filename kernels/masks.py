"""Comparisons, which make masks (arrays of bool); logic on masks; a choice by a mask, and its gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .cuda import c_type, elements
from .registry import kernel, like, ufunc

COMPARISONS: dict[str, Any] = {"equal": np.equal, "not_equal": np.not_equal, "less": np.less,
                               "less_equal": np.less_equal, "greater": np.greater, "greater_equal": np.greater_equal}
LOGIC: dict[str, Any] = {"logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor,
                         "logical_not": np.logical_not}


def _one_each(reads: Any, writes: Any) -> float:
    return float(writes[0].size)


def _mask_kernel(name: str, function: Any, template: bool) -> None:
    """Defines a kernel from a NumPy ufunc; inputs of one type broadcast to the mask's shape."""
    definition = kernel(name, axes="...,...->...", flops=_one_each)(lambda xp, *inputs: getattr(xp, name)(*inputs))
    definition.cpu(lambda *arrays: [ufunc(function, *arrays)])
    definition.cuda()(lambda *arrays: elements("masks.cu", f"{name}<{c_type(arrays[0])}>" if template else name,
                                               arrays[:-1], arrays[-1]))


for _name, _function in COMPARISONS.items():
    _mask_kernel(_name, _function, True)
for _name, _function in LOGIC.items():
    _mask_kernel(_name, _function, False)


@kernel("where", axes="...,...,...->...", flops=_one_each)
def where(xp: Any, mask: Any, a: Any, b: Any) -> Any:
    """a where the mask is true, b elsewhere."""
    return xp.where(mask, a, b)


@where.cpu
def _(mask: Any, a: Any, b: Any, y: Any) -> Any:
    return [partial(np.copyto, y, b), partial(np.copyto, y, a, where=np.broadcast_to(mask, y.shape))]


@where.cuda()
def _(mask: Any, a: Any, b: Any, y: Any) -> Any:
    return elements("masks.cu", f"where<{c_type(y)}>", [mask, a, b], y)


@kernel("where_grad", axes="...,...->...", flops=_one_each)
def where_grad(xp: Any, mask: Any, dy: Any, *, chosen: bool) -> Any:
    """dy where the mask is `chosen`, 0 elsewhere: the gradient toward a or toward b."""
    zero = dy.dtype.type(0)
    return xp.where(mask, dy, zero) if chosen else xp.where(mask, zero, dy)


@where_grad.cpu
def _(mask: Any, dy: Any, dx: Any, *, chosen: bool) -> Any:
    # copies, not products with a mask: infinity times zero is NaN
    mask, zero = np.broadcast_to(mask, dx.shape), like(dx, 0)
    return ([partial(dx.fill, 0), partial(np.copyto, dx, dy, where=mask)] if chosen
            else [partial(np.copyto, dx, dy), partial(np.copyto, dx, zero, where=mask)])


@where_grad.cuda()
def _(mask: Any, dy: Any, dx: Any, *, chosen: bool) -> Any:
    return elements("masks.cu", f"where_grad<{c_type(dx)}>", [mask, dy], dx, chosen)
