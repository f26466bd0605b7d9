"""Tasks that a policy does not order, such as updates, come last on the rank of their stage, or as soon as they can."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.columns import offsets, spread
from ..core.schedule import Schedule
from ..core.tasks import Kind, repack, unpack
from .draft import Draft


def updates_last(draft: Draft) -> Draft:
    """The order without tasks that the graph lacks, and with all that it has."""
    graph, known = draft.graph, draft.order.keep(draft.graph.find(draft.order.keys) >= 0)
    rest, rank = spread(known.ids(graph), False, len(graph), True), draft.rank
    return replace(draft, schedule=known.followed_by({
        lane: graph.keys[rest & (rank == lane.rank)] for lane in draft.order.lanes}))


def updates_soon(draft: Draft) -> Draft:
    """Each such task right after the last task of its rank that it waits for, so that what it uses is needed no longer;
    last if it waits for another rank."""
    graph, rank = draft.graph, draft.rank
    order = draft.order.keep(graph.find(draft.order.keys) >= 0)
    ids = order.ids(graph)
    after, lane = spread(ids, np.arange(len(ids)), len(graph), -1), spread(ids, order.lane_of_each(), len(graph), -1)
    soon = []
    for t in np.flatnonzero(after < 0).tolist():
        preds = graph.preds[t]
        if len(preds) and (after[preds] >= 0).all() and (rank[preds] == rank[t]).all():
            last = preds[np.argmax(after[preds])]
            after[t], lane[t] = after[last], lane[last]
            soon.append(t)
    count = np.bincount(lane[soon], minlength=len(order.lanes))
    keys = np.insert(order.keys, after[soon] + 1, graph.keys[soon])
    return updates_last(replace(draft, schedule=Schedule(order.lanes, order.ptr + offsets(count), keys,
                                                         notes=order.notes)))


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
