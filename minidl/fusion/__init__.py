"""Fusion: several launches become one if one kernel can do them all. For devices on which launches are expensive.

Each rule is a function on a `Draft` and can be left out, so that its gain can be measured. The new graph has fewer
tasks and the same inputs, outputs, parameters and mathematics. Its bits may differ from the old graph's, and are the
same under every schedule. This package knows kernels by name and the scratch memory that a device needs for them;
it knows no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..core.graph import TaskGraph
from .attention import flash_attention
from .batch_norm import batch_norm_act, batch_norm_grad
from .casts import casts
from .draft import Draft
from .places import in_place
from .products import additions, epilogue, slabs, slopes
from .squeeze_excite import squeeze_excite
from .updates import updates, weight_updates

RULES: dict[str, Callable[[Draft], None]] = {rule.__name__: rule for rule in (
    casts, batch_norm_act, batch_norm_grad, squeeze_excite, flash_attention, epilogue, slabs, additions, slopes,
    weight_updates, updates, in_place)}


def fused(graph: TaskGraph, device: Any, rules: Iterable[str] = tuple(RULES)) -> TaskGraph:
    """The graph with these rules applied, in their fixed order, for a device. Raises ValueError for an unknown rule,
    and for a graph without kernels."""
    if len(graph) and not graph.launches:
        raise ValueError(f"graph {graph.name_of_graph!r} has no kernels to fuse")
    draft = Draft(graph, device)
    for name in rules:
        if name not in RULES:
            raise ValueError(f"unknown fusion {name!r}; known: {', '.join(RULES)}")
        RULES[name](draft)
    return draft.graph_of_it()
