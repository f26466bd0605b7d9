"""Holds calls against the functions that are installed: do they exist, and do they take what they are given.

Compiled packages tell their functions' parameters in the first line of the documentation, with C's types. Where a
package is not installed nothing is held against it.
"""

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

#: the least and the greatest integer of C's types
RANGES = {"intptr_t": (-(2**63), 2**64 - 1), "size_t": (0, 2**64 - 1), "int": (-(2**31), 2**31 - 1),
          "unsigned int": (0, 2**32 - 1), "int64_t": (-(2**63), 2**63 - 1), "uint64_t": (0, 2**64 - 1),
          "uint32_t": (0, 2**32 - 1)}
OTHERS = {"str": str, "unicode": str, "bytes": bytes}


def installed(name: str) -> Any:
    """A module, or None where there is none."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@cache
def parameters(documentation: str) -> list[tuple[str, str, bool]] | None:
    """(C's type, name, may be left out) of each, of the first line `f(int a, b=None)`; None for another first line."""
    found = (re.match(r"[\w.]+\((.*)\)(?: -> .*)?$", documentation.strip().splitlines()[0])
             if documentation.strip() else None)
    if found is None:
        return None
    parts = [p.strip() for p in re.split(r",(?![^\[]*\])", found[1]) if p.strip() not in ("", "self", "*", "/")]
    told = [re.fullmatch(r"(?:(.*\S)\s+)?(\w+)(?::[^=]*)?(=.*|)", p) for p in parts]
    return [(t[1] or "", t[2], bool(t[3])) for t in told if t]


def check(name: str, documentation: str | None, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Raises AssertionError where a call does not fit."""
    wanted = parameters(documentation or "")
    if wanted is None:
        return
    assert len(arguments) <= len(wanted), f"{name} takes {len(wanted)} arguments, not {len(arguments)}"
    given = {w[1]: a for w, a in zip(wanted, arguments, strict=False)}
    assert not given.keys() & named.keys(), f"{name} gets {given.keys() & named.keys()} twice"
    assert named.keys() <= {w[1] for w in wanted}, (
        f"{name} has no parameter {', '.join(named.keys() - {w[1] for w in wanted})}")
    given |= named
    for kind, parameter, optional in wanted:
        assert optional or parameter in given, f"{name} misses its argument {parameter}"
        if parameter in given:
            _check_type(f"{name}: {parameter}", kind, given[parameter])


def _check_type(what: str, kind: str, value: Any) -> None:
    if kind in RANGES:
        assert hasattr(value, "__index__"), f"{what} is {kind}, not {value!r}"
        least, greatest = RANGES[kind]
        assert least <= operator.index(value) <= greatest, f"{what} is {kind}, which {value} does not fit"
    elif kind in OTHERS:
        assert isinstance(value, OTHERS[kind]), f"{what} is {kind}, not {value!r}"


def checked(real: Any, **functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The functions under their names, each held against the one of this name in `real` when it is called."""
    return {name: partial(_checked, name, getattr(real, name).__doc__ if real else None, function)
            for name, function in functions.items()}


def _checked(name: str, documentation: str | None, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    check(name, documentation, arguments, named)
    return function(*arguments, **named)
