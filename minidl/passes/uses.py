"""The home of a parameter is the first stage that uses it: there its gradients are summed, and it is updated.

The first stage is the home since its backward pass ends last: sums of other ranks' uses travel to it meanwhile, and
later stages need the new weights latest (`copies.py`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.columns import Rows, spread
from ..core.graph import Role, TaskGraph
from ..core.tasks import Kind
from .boundary import Mask
from .draft import Draft


def sums_of_uses(graph: TaskGraph) -> Mask:
    """The tasks that add the gradients of a parameter's uses: W of a unit without forward that read only gradients from
    W of other units."""
    weight = graph.kind == Kind.W
    forward = np.isin(graph.unit, graph.unit[graph.kind == Kind.F])
    maker = spread(graph.writes.ids, graph.writes.row_of_each(), len(graph.buffer_bytes), -1)
    found: Mask = weight & ~forward
    for t in np.flatnonzero(found).tolist():
        makers = maker[graph.reads[t]]
        found[t] = len(makers) > 0 and bool((makers >= 0).all() and weight[makers].all()
                                            and (graph.unit[makers] != graph.unit[t]).all())
    return found


def users(graph: TaskGraph) -> Rows:
    """Buffer -> the tasks that read it, without updates."""
    reader = graph.reads.row_of_each()
    works = graph.kind[reader] != Kind.U
    return Rows.from_pairs(graph.reads.ids[works], reader[works], len(graph.buffer_bytes))


def at_home(draft: Draft) -> Draft:
    """The sum of a parameter's gradients, and its update, on the first stage that uses it."""
    graph, stage, used = draft.graph, draft.stage.copy(), users(draft.graph)
    added = np.unique(graph.unit[sums_of_uses(graph)])
    for t in np.flatnonzero(np.isin(graph.unit, added) & (graph.kind == Kind.U)).tolist():
        own = used.take(graph.writes[t][graph.role_is(Role.PARAMETER)[graph.writes[t]]]).ids
        if len(own):
            stage[graph.unit == graph.unit[t]] = draft.stage[own].min()
    return replace(draft, stage=stage)
