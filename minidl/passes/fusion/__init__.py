"""Graph to graph: launches that one kernel can do together become one. For devices on which a launch
costs more than work.

Each rule is a function on a `Draft` and can be left out, so that gains can be told apart. The graph that comes out has
fewer tasks, the same inputs, outputs, parameters and mathematics; its bits may differ from those of the graph that went
in, and are the same under every schedule of it. Knows kernels by name and what scratch memory a device needs for them,
and no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ...graph import TaskGraph
from .attention import flash_attention
from .batch_norm import batch_norm_act
from .casts import casts
from .draft import Draft
from .products import epilogue, slabs
from .squeeze_excite import squeeze_excite
from .updates import updates

RULES: dict[str, Callable[[Draft], None]] = {"casts": casts, "batch_norm_act": batch_norm_act,
                                             "squeeze_excite": squeeze_excite, "flash_attention": flash_attention,
                                             "epilogue": epilogue, "slabs": slabs, "updates": updates}


def fused(graph: TaskGraph, device: Any, rules: Iterable[str] = tuple(RULES)) -> TaskGraph:
    """The graph with these rules applied, in their order, for a device.

    Raises ValueError for a rule that is not known, and for a graph without kernels.
    """
    if len(graph) and not graph.launches:
        raise ValueError(f"graph {graph.name_of_graph!r} has no kernels to put together")
    draft = Draft(graph, device)
    for name in rules:
        if name not in RULES:
            raise ValueError(f"unknown fusion {name!r}; known: {', '.join(RULES)}")
        RULES[name](draft)
    return draft.graph_of_it()
