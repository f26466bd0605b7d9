"""Numbers for the axes of an image, and ops of images as ops along one axis."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..autograd.arguments import OneCount, OneSize  # noqa: F401  the types of `along_one_axis`'s results
from ..autograd.tensor import ShapeError, Tensor
from .shape import squeeze, unsqueeze


def lengths(value: Any, name: str, least: int = 1, axes: int = 2) -> Any:
    """A number for all axes, or one for each, as a tuple. Raises ValueError for anything else, or below `least`."""
    each = tuple(value) if isinstance(value, Sequence) else (value,) * axes
    if len(each) != axes or any(not isinstance(v, int | np.integer) or v < least for v in each):
        raise ValueError(f"{name} is {value!r}; it must be a whole number >= {least}" + ", or two of them" * (axes > 1))
    return tuple(map(int, each))


def along_one_axis(op: Callable[..., Tensor], **types: str) -> Callable[..., Tensor]:
    """The same for x (n, length, c), and a weight that also lacks an axis, with numbers for one axis: they are images
    of one row. `types`: of arguments that are not `TwoSizes` or `TwoCounts`."""
    name, known = op.__name__.replace("2d", "1d"), inspect.signature(op)
    types = {n: t.replace("TwoSizes", "OneSize").replace("TwoCounts", "OneCount")
             for n, t in op.__annotations__.items()} | types

    def along(*args: Any, **named: Any) -> Tensor:
        given = known.bind(*args, **named)
        for n, value in given.arguments.items():
            if n in ("x", "weight"):
                if value.ndim != 3:
                    raise ShapeError(f"{name} needs an input (n, length, c), and {n} of 3 axes, not {value.shape}")
                given.arguments[n] = unsqueeze(value, 1)
            elif types[n].startswith("One") and value is not None:
                least = int("padding" not in n)  # also what the one row takes
                given.arguments[n] = least, *lengths(value, n, least, 1)
        return squeeze(op(*given.args, **given.kwargs), 1)

    along.__name__ = along.__qualname__ = name
    along.__doc__ = f"`{op.__name__}` along one axis: x (n, length, c) -> (n, out, c); a weight has one axis less."
    along.__annotations__ = types
    along.__signature__ = known.replace(parameters=[  # type: ignore[attr-defined]
        p.replace(annotation=types[p.name]) for p in known.parameters.values()])
    return along
