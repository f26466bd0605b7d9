"""One loop, two ways to run it: short loops as Python over lists, long ones compiled by numba over arrays.

So small graphs never pay for compilation, and graphs of ten million tasks never pay for Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

LONG = 50_000  #: from this many steps on a loop is worth compiling


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    compiled: Callable[..., Any] = numba.njit(cache=True, nogil=True)(function)
    return compiled


def is_long(steps: int) -> bool:
    return steps >= LONG


def prepared(steps: int, *arrays: Any) -> tuple[Any, ...]:
    """The arrays in the form in which `run_loop` passes them on. Use it for arrays that several calls share, or that
    nobody reads afterwards."""
    return arrays if is_long(steps) else tuple(a.tolist() for a in arrays)


def filled(steps: int, count: int, value: float) -> Any:
    """`count` times one value, in the form in which `run_loop` passes it on."""
    return np.full(count, value) if is_long(steps) else [value] * count


def run_loop(function: Callable[..., Any], steps: int, *arguments: Any) -> tuple[Any, SimpleNamespace]:
    """Calls `function(*arguments)`, which works in place on its arrays, and returns (its result, its arguments after
    the call, by the names of its parameters).

    `function` may use nothing but loops, numbers and indexing. Below `LONG` steps it gets lists in place of arrays;
    `prepared` arrays are passed on as they are.
    """
    names = function.__code__.co_varnames[: len(arguments)]
    if is_long(steps):
        return _compiled(function)(*arguments), SimpleNamespace(**dict(zip(names, arguments, strict=True)))
    lists = [a.tolist() if isinstance(a, np.ndarray) else a for a in arguments]
    result = function(*lists)
    after = [np.array(new, old.dtype) if isinstance(old, np.ndarray) else new
             for new, old in zip(lists, arguments, strict=True)]
    return result, SimpleNamespace(**dict(zip(names, after, strict=True)))
