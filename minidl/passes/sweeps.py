"""Forward and backward passes that are shorter than the chain of layers. Each is a pass over a recorded step before it
is ordered, so every policy takes its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.graph import TaskGraph
from .deeppcr import deeppcr
from .draft import Draft
from .highway import highway
from .jacobi import jacobi
from .newton import newton

#: name -> a pass that returns the draft, and a remark if its gradients are inexact
BACKWARD: dict[str, Callable[..., tuple[Draft, str]]] = {"exact": lambda draft: (draft, ""), "jacobi": jacobi,
                                                             "highway": highway, "deeppcr": deeppcr}


def swept(graph: TaskGraph, backward: str, iterations: int | None = None, **options: Any
          ) -> tuple[TaskGraph, tuple[str, ...]]:
    """The step with this backward pass and, if `iterations` are given, with a forward pass by Newton's method; and
    remarks. `options`: the backward pass's; None: its default. Raises Refused for a step that they cannot serve."""
    told = {name: value for name, value in options.items() if value is not None}
    draft, first = (Draft.of(graph), "") if iterations is None else newton(Draft.of(graph), iterations)
    draft, second = BACKWARD[backward](draft, **told)
    return draft.graph, tuple(remark for remark in (first, second) if remark)
