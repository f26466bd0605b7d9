"""Columns that nobody can change: the arrays of graphs, schedules and programs are read-only, however they were made.

A proof holds for what was proved, so it must not change afterwards. This module knows arrays alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cached_property, wraps
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def read_only(value: T) -> T:
    """The same array, or tuple of arrays, which can no longer be written; other values as they are."""
    if isinstance(value, np.ndarray):
        value.setflags(write=False)
    elif isinstance(value, tuple):
        for each in value:
            read_only(each)
    return value


def column(function: Callable[[Any], T]) -> cached_property[T]:
    """A property that is computed once and whose arrays are read-only."""
    return cached_property(wraps(function)(lambda self: read_only(function(self))))


class Columns:
    """The base of a frozen dataclass whose fields are arrays, among others: it makes them read-only. Copies and pickles
    have the fields alone, not what is computed from them, and are read-only as well."""

    def __post_init__(self) -> None:
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        Columns.__post_init__(self)
