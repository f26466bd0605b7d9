"""Copies of weights on ranks that read them but do not update them; the copies follow every update.

Such ranks use a tied weight again, or run F or O of a layer whose tasks LayerPipe puts on several ranks: the weights
are on the rank of W, which updates them. Every other rank that reads them has a copy, in the memory that the parameters
have on that rank anyway. A task of kind U with its own part number (`0U3/1` after 0U3) receives the new weights, which
are sent once per update. For `versions.py` such a copy is like the parameters themselves.

Every task of a micro-batch reads the version of a weight that the first stage which uses it reads in its forward (if no
version is kept, a backward reads the newest one that its rank has). So both ends of a tied weight are equal within a
micro-batch, and `steady.py` can bring a version just before the first task that reads it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.graph import Role
from ..core.placement import Refused
from ..core.tasks import Kind
from .draft import Draft
from .versions import updates


def followers(draft: Draft) -> Draft:
    """In a pipeline that never drains, tasks read the copies of their ranks, and new tasks update the copies. The
    placement knows these by their part. Raises Refused if another value that outlives a step, such as a dropout
    counter, is used on several ranks."""
    graph, rank, placement = draft.graph, draft.rank, draft.placement
    parts = np.broadcast_to(placement.table[0], (Kind.U + 1, 1, placement.stages)) if placement.parts is None \
        else placement.parts
    _check_lasting(draft)
    e, changing, following = draft.edit(), updates(graph), list[list[int]]()
    for stage in range(placement.stages):
        mine = changing[graph.unit[changing] == stage].tolist()
        own = {b for t in mine for b in e.writes[t] if graph.buffer(b).role == Role.PARAMETER}
        users = [t for t in range(len(graph)) if e.reads[t] & own and rank[t] != parts[Kind.U, 0, stage]]
        following.append(np.unique(rank[users]).tolist())
        held = {e.storage_of[b] for t in users for b in e.reads[t] & own}
        shared = {b for b in own if e.storage_of[b] in held}
        sent = {}
        for t in mine if users else ():  # the update after the next may come before the copies' task runs
            sent[t] = e.copies(shared, f"sent by {graph.name(t)}", role=Role.ACTIVATION, live=None)
            e.writes[t] |= {*sent[t].buffers.values()}
            e.launches[t] += e.copy(sent[t].storages)
        for n, where in enumerate(following[-1], 1):
            copy = e.copies(shared, f"rank {where}", role=Role.PARAMETER)
            e.use(copy, *(t for t in users if rank[t] == where))
            for t in mine:
                e.task(t, stage, Kind.U, int(graph.micro_batch[t]), part=n, stage=stage,
                       reads=sent[t].buffers.values(), writes=copy.buffers.values(),
                       launches=e.copy({source: copy.storages[s] for s, source in sent[t].storages.items()}))
    if not e.follows:
        return draft
    homes = np.zeros((parts.shape[0], max(parts.shape[1], 1 + max(map(len, following))), placement.stages), np.int64)
    homes[:, : parts.shape[1]] = parts
    for stage, ranks in enumerate(following):
        homes[Kind.U, 1 : 1 + len(ranks), stage] = ranks
    return replace(e.draft, placement=replace(placement, parts=homes))


def _check_lasting(draft: Draft) -> None:
    graph, rank = draft.graph, draft.rank
    lasting = graph.role_is(Role.STATE, Role.SCALAR)
    writer = {b: t for t in range(len(graph)) for b in graph.writes[t].tolist() if lasting[b]}
    for t in range(len(graph)):
        for b in (b for b in graph.reads[t].tolist() if b in writer and rank[writer[b]] != rank[t]):
            raise Refused(draft.name, f"{graph.name(t)} and {graph.name(writer[b])} are on different ranks and both "
                          f"need {graph.buffer(b).name}, which outlives a step, but only weights can be copied",
                          "take a policy that has both on one rank")
