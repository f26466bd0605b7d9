"""The tasks that a policy does not order, such as updates, come last on the rank of their stage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.columns import spread
from ..core.schedule import Schedule
from ..core.tasks import Kind, repack, unpack
from .draft import Draft


def updates_last(draft: Draft) -> Draft:
    """The order without tasks that the graph lacks, and with all that it has."""
    graph, known = draft.graph, draft.order.keep(draft.graph.find(draft.order.keys) >= 0)
    rest, rank = spread(known.ids(graph), False, len(graph), True), draft.rank
    return replace(draft, schedule=known.followed_by({
        lane: graph.keys[rest & (rank == lane.rank)] for lane in draft.order.lanes}))


def ended_by_updates(order: Schedule) -> Schedule | None:
    """The order with the updates that a lane does before the next step at its end; None if other tasks are late, or
    updates run between tasks of the next step."""
    lanes = []
    for lane in range(len(order.lanes)):
        keys = order.order(lane)
        own = unpack(keys)
        late = int((own.late > 0).sum())
        if not (own.late[:late] > 0).all() or (own.kind[:late] != Kind.U).any():
            return None
        lanes.append(np.concatenate([keys[late:], repack(keys[:late], late=0)]))
    return replace(order, keys=np.concatenate(lanes))
