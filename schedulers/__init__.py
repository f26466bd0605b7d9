"""Schedulers: pure functions of a graph and costs to a schedule. No device, no MPI, no clock.

Here the ones for a single device, by name; pipelines are in `schedulers.pipeline`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from ..graph import TaskGraph
from ..schedule import Schedule
from .multi_region import RegionPlan, multi_region, profile_groups
from .multi_region import plan as region_plan
from .single import in_order, multi_stream

SINGLE: dict[str, Callable[..., Schedule]] = {"in_order": in_order, "multi_stream": multi_stream,
                                              "multi_region": multi_region}

__all__ = ["SINGLE", "RegionPlan", "arguments", "in_order", "multi_region", "multi_stream", "profile_groups",
           "region_plan", "single"]


def arguments(name: str) -> list[str]:
    """What a single-device scheduler can be told. Raises ValueError for an unknown name."""
    if name not in SINGLE:
        near = difflib.get_close_matches(name, SINGLE, 3, 0.3) or SINGLE
        raise ValueError(f"unknown scheduler {name!r}; near it: {', '.join(near)}")
    return [p for p in inspect.signature(SINGLE[name]).parameters if p != "graph"]


def single(name: str, graph: TaskGraph, **given: Any) -> Schedule:
    """The named single-device scheduler's schedule. Raises ValueError for an unknown name or argument, and for one of a wrong type."""
    check(name, given)
    for argument, wanted in inspect.signature(SINGLE[name], eval_str=True).parameters.items():
        if argument in given and not isinstance(given[argument], wanted.annotation):
            kind = getattr(wanted.annotation, "__name__", wanted.annotation)
            raise ValueError(f"scheduler {name}: {argument} must be of type {kind}, not {repr(given[argument])[:40]}")
    return SINGLE[name](graph, **given)


def check(name: str, given: Iterable[str]) -> None:
    """Raises ValueError for an unknown name or argument."""
    known = arguments(name)
    for argument in given:
        if argument not in known:
            raise ValueError(f"scheduler {name} takes no argument {argument!r}; it takes: {', '.join(known) or 'none'}")
