"""The width of tasks: which run whole, and which in parts that several lanes share (`minidl.passes.split`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.graph import TaskGraph
from ..core.machine import PlanError, shorten
from ..core.tasks import GraphError, parse_task
from ..plans.plan import Plan

Parts = int | Mapping[int, int]  #: of every task that can be cut, or of some by their keys


def in_parts(graph: Any, split: int | Mapping[str, int], make: Callable[[Parts], Plan]) -> Plan:
    """The plan with the parts that `split` says: one number for all tasks, or numbers by the tasks' names. `make`: from
    parts to a plan. Raises PlanError for numbers or names that make no sense."""
    if split == 1:
        return make(1)
    if not isinstance(graph, TaskGraph):
        raise PlanError("split needs a recorded step: tasks on given times have no rows")
    return make(_number(split) if not isinstance(split, Mapping) else
                {_key(graph, name): _number(count, name) for name, count in split.items()})


def _number(count: Any, name: str = "") -> int:
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count < 1024:
        raise PlanError(f"split{f' of {name[:40]}' if name else ''} is {shorten(count)}; it must be a number of parts, "
                        f"from 1 to 1023")
    return count


def _key(graph: TaskGraph, name: str) -> int:
    try:
        graph.index(name)
    except GraphError as error:
        raise PlanError(f"split: {error}") from None
    return parse_task(name)
