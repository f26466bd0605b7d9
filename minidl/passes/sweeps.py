"""Backward passes that are shorter than the chain of layers, by name. Each is a pass over a recorded step before it is
ordered, so every policy takes its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.graph import TaskGraph
from .deeppcr import deeppcr
from .draft import Draft
from .highway import highway
from .jacobi import jacobi

#: name -> a pass that returns the draft, and a remark if its gradients are inexact
BACKWARD: dict[str, Callable[..., tuple[Draft, str]]] = {"exact": lambda draft: (draft, ""), "jacobi": jacobi,
                                                             "highway": highway, "deeppcr": deeppcr}


def swept(graph: TaskGraph, backward: str, **options: Any) -> tuple[TaskGraph, tuple[str, ...]]:
    """The step with this backward pass, and remarks. `options`: the pass's; None: its default. Raises Refused for
    a step that it cannot serve."""
    told = {name: value for name, value in options.items() if value is not None}
    draft, remark = BACKWARD[backward](Draft.of(graph), **told)
    return draft.graph, (remark,) if remark else ()
