"""Hints for a name that a module lacks: a line for names that torch has, or similar names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import NoReturn


def missing(module: str, known: Sequence[str], instead: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module with these names. `instead`: a name of torch -> what to use here."""

    def raise_for(name: str) -> NoReturn:
        near = [] if name.startswith("_") else get_close_matches(name, known, 3, 0.6)
        hint = (f"; use {instead[name]}" if name in instead else f"; similar names: {', '.join(near)}" if near else "")
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")

    return raise_for
