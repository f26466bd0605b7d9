"""Parameters that stages on several ranks use, such as tied embeddings: one rank updates them, the others hold copies.

A parameter's home is the first stage that uses it: there its gradients are summed, and it is updated. The backward pass
of the first stage ends last, so sums of other ranks' uses travel to it meanwhile, and later stages need the new weights
latest. Every other rank that uses the parameter has a copy, sums the gradients of its own uses over the micro-batches,
and sends the sum to the home once. There the sums are added in the order of use, as in one process: so the bits are
equal. The home counts the sum in the norm, updates, and sends the new weights back. That is two messages per copy and
step, for any number of micro-batches. Sending back the summed gradient would take as many, and would need the
optimizer's states on every rank.

If a step updates several times, or its pipeline never drains, this holds for each update, and the copies follow the
home as `followers.py` says.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.columns import Rows, spread
from ..core.graph import Role, TaskGraph
from ..core.placement import Refused
from ..core.tasks import Kind, repack
from .boundary import Mask
from .draft import Copies, Draft


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
    return graph.reads.where(graph.kind != Kind.U).transposed(len(graph.buffer_bytes))


def at_home(draft: Draft) -> Draft:
    """The sum of a parameter's gradients, and its update, on the first stage that uses it."""
    graph, stage, used = draft.graph, draft.stage.copy(), users(draft.graph)
    added = np.unique(graph.unit[sums_of_uses(graph)])
    for t in np.flatnonzero(np.isin(graph.unit, added) & (graph.kind == Kind.U)).tolist():
        own = used.take(graph.writes[t][graph.role_is(Role.PARAMETER)[graph.writes[t]]]).ids
        if len(own):
            stage[graph.unit == graph.unit[t]] = draft.stage[own].min()
    return replace(draft, stage=stage)


def copies_of_weights(draft: Draft) -> Draft:
    """Each rank uses its own copy of parameters that another rank updates.

    The new tasks are of kind U: some mark a gradient as complete, so that it may be sent, and launch nothing; others
    copy the received weights. The sums of uses become U, since they wait for all micro-batches; in a pipeline that
    never drains a sum belongs to the weight gradient of the last micro-batch before its update, and ranks have no
    copies yet. Raises Refused if the step updates such a parameter several times.
    """
    graph, rank, count, end = draft.graph, draft.rank, draft.micro_batches, len(draft.graph) - 1
    e, sums = draft.edit(), np.flatnonzero(sums_of_uses(graph)).tolist()
    writer = graph.writes.row_of_each()
    for t in sums:
        last = []
        for b in graph.reads[t].tolist():
            makers = writer[(graph.writes.ids == b) & (writer < t)]
            last.append(int(graph.micro_batch[makers[-1]]))
            if rank[makers[0]] == rank[t]:
                continue
            stage = int(draft.stage[makers[0]])
            if draft.stale:  # the next backward may come before the message has gone
                sent = e.copies([b], f"stage {stage}'s")
                e.use(sent, t)
                e.task(t - 1, e.unit(), Kind.U, count + last[-1], stage=stage, reads=[b], writes=sent.buffers.values(),
                       launches=e.copy(sent.storages))
            else:
                given = e.buffer(b, e.storage_of[b], f"{e.names[b]}, stage {stage}'s")
                e.use(Copies({b: given}, {}), t)
                e.task(t - 1, e.unit(), Kind.U, stage=stage, reads=[b], writes=[given])
        e.keys[t] = int(repack(e.keys[t], micro_batch=max(last)) if draft.stale
                        else repack(e.keys[t], unit=e.unit(), kind=Kind.U, micro_batch=0))
    if draft.stale:
        return e.draft if sums else draft
    changes = (graph.kind[writer] == Kind.U) & graph.role_is(Role.PARAMETER)[graph.writes.ids]
    updates_of = Rows.from_pairs(graph.writes.ids[changes], writer[changes], len(graph.buffer_bytes))
    used = users(graph)
    for b in np.unique(graph.writes.ids[changes]).tolist():
        updates, readers = updates_of[b], used[b]
        if len(updates) > 1 and len(np.unique(rank[readers])) > 1:
            raise Refused(draft.name, f"stages on several ranks use {graph.buffer(b).name}, and the step updates it "
                          f"{len(updates)} times, but copies follow once per step", "update it once")
        for r in np.setdiff1d(rank[readers], rank[updates]).tolist():
            here = readers[rank[readers] == r]
            stage = int(draft.stage[here].min())
            copy = e.copies([b], f"stage {stage}'s copy")
            e.use(copy, *here.tolist())
            e.task(end, e.unit(), Kind.U, stage=stage, reads=[b], writes=copy.buffers.values(),
                   launches=e.copy(copy.storages))
    return e.draft if sums or e.follows else draft
