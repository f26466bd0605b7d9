"""Torch's names of arguments beside NumPy's: `dim` is `axis`, `keepdim` is `keepdims`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Result = TypeVar("Result")
SAME = {"dim": "axis", "keepdim": "keepdims"}


def with_dim(function: Callable[..., Result]) -> Callable[..., Result]:
    """The function, which now takes both names. Raises TypeError if both are given."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        for torchs, numpys in SAME.items():
            if torchs in kwargs:
                if numpys in kwargs:
                    raise TypeError(f"{function.__name__}: {torchs} and {numpys} are two names of one argument")
                kwargs[numpys] = kwargs.pop(torchs)
        return function(*args, **kwargs)

    return call
