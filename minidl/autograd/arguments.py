"""Arguments that do not fit the types in a signature: one line names the function, the argument, and the types."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from .tensor import FLOATS, Tensor

Size = Annotated[int, 1, np.inf]  #: a whole number of at least 1
Count = Annotated[int, 0, np.inf]  #: the same of at least 0
Rate = Annotated[float, 0, 1]  #: a number of at least 0 and below 1
Float = Annotated[str, FLOATS]  #: one of these words, or NumPy's type of that name
Nonlinearity = Annotated[str, ("tanh", "relu")]
OneSize = Size | tuple[Size]
TwoSizes = Size | tuple[Size, Size]
OneCount = Count | tuple[Count]
TwoCounts = Count | tuple[Count, Count]

#: a type in a signature -> the types of values that it takes, and its name; a bool is no number
TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool, np.bool_), "True or False"), int: ((int, np.integer), "a whole number"),
    float: ((int, float, np.integer, np.floating), "a number"), str: ((str,), "text"), NoneType: ((NoneType,), "None"),
    Tensor: ((Tensor, np.ndarray, np.generic, bool, int, float, list, tuple), "a tensor")}


def _fits(value: Any, hint: Any, bounds: bool) -> bool:
    """Whether a value is of the type, and with `bounds` within them."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Float and isinstance(value, np.dtype | type):
        return getattr(value, "__name__", str(value)) in FLOATS
    if origin is Annotated:
        return _fits(value, parts[0], True) and (not bounds or bool(
            value in parts[1] if parts[0] is str else parts[1] <= value < parts[2]))
    if origin in (Union, UnionType):
        return any(_fits(value, part, bounds) for part in parts)
    if origin in (tuple, Sequence):
        return (isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
                and (len(value) > 0 if origin is Sequence else len(value) == len(parts))
                and all(_fits(v, parts[i % len(parts)], bounds) for i, v in enumerate(value)))
    return hint not in TYPES or (isinstance(value, TYPES[hint][0])
                                 and (hint not in (int, float) or not isinstance(value, bool)))


def _words(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return ", or ".join(map(_words, parts))
    if origin in (tuple, Sequence):
        return "a sequence of them" if origin is Sequence else f"a tuple of {len(parts)}"
    if origin is Annotated and parts[0] is str:
        return " or ".join(parts[1])
    if origin is Annotated:
        return f"{_words(parts[0])} >= {parts[1]}" + (f" and below {parts[2]}" if parts[2] < np.inf else "")
    return TYPES[hint][1]


@cache
def _hints(function: Callable[..., Any]) -> tuple[inspect.Signature, Mapping[str, Any]]:
    """The signature of a function, or of a layer that is made from one; its types, with torch's `dim` for `axis`."""
    hints = get_type_hints(inspect.unwrap(getattr(function, "function", function)), include_extras=True)
    return inspect.signature(function), {"dim": hints.get("axis"), **hints}


def check_arguments(name: str, function: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raises TypeError for arguments that the function `name` cannot have, and ValueError for numbers out of range."""
    signature, hints = _hints(function)
    if "axis" in signature.parameters:
        named = {{"dim": "axis", "keepdim": "keepdims"}.get(n, n): value for n, value in named.items()}
    try:
        given = signature.bind(*args, **named).arguments
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    for argument, value in given.items():
        if not _fits(value, hint := hints.get(argument), True):
            wrong = ValueError if _fits(value, hint, False) else TypeError
            raise wrong(f"{name}: {argument} is {repr(value)[:40]}; it must be {_words(hint)}")


def checked(function: Any, first: bool) -> Any:
    """The function, whose arguments are checked `first`, or only if it fails, which costs nothing if it does not. A
    layer's `__init__` is named after the layer."""
    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        name = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
        if first:
            check_arguments(name, function, args, named)
        try:
            return function(*args, **named)
        except (TypeError, AttributeError, ValueError):
            check_arguments(name, function, args, named)
            raise

    return call
