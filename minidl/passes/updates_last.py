"""The tasks that a policy does not order, such as updates, come last on the rank of their stage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .draft import Draft


def updates_last(draft: Draft) -> Draft:
    """The order without tasks that the graph lacks, and with all that it has. In a pipeline that never drains nothing
    comes last (`steady.py`)."""
    if draft.stale:
        return draft
    graph, known = draft.graph, draft.order.keep(draft.graph.find(draft.order.keys) >= 0)
    rest = np.ones(len(graph), bool)
    rest[known.ids(graph)] = False
    rank = draft.rank
    return replace(draft, schedule=known.followed_by({
        lane: graph.keys[rest & (rank == lane.rank)] for lane in draft.order.lanes}))
