"""Updates one step late, beside the gradients of the next step (DPU, ZeRO-Offload: Ren et al. 2021, 2101.06840).

Gradients are of a copy of the weights, which a step takes over when all its gradients are done, before its own update.
So U(t) needs nothing of step t+1 and step t+1 nothing of U(t): w(t+1) = Opt(w(t), gradient at w(t-1)). When a loop
begins, the copy holds the weights.
"""

from __future__ import annotations

import numpy as np

from ..core.columns import Ints
from ..core.graph import Role
from ..core.placement import Refused
from ..core.tasks import Kind
from ..pricing.corun import BYTES_PER_US
from .draft import Draft
from .versions import updates


def last_updates(draft: Draft) -> Ints:
    """The U tasks of a step that ends with them. Raises Refused for a step that does not, or updates nothing."""
    if not draft.graph.launches:
        raise Refused(draft.name, "given times say nothing of weights and states", "give a model")
    found = np.flatnonzero(draft.graph.kind == Kind.U)
    if not len(updates(draft.graph)) or len(found) != len(draft.graph) - found[0]:
        raise Refused(draft.name, "the updates of a step must be its last tasks", "update once, after all backward "
                      "passes")
    return found


def delayed(draft: Draft) -> Draft:
    """The step whose gradients are of the weights before the last update."""
    graph, e, end = draft.graph, draft.edit(), int(last_updates(draft)[0]) - 1
    number = int(graph.micro_batch.max()) + 1
    for u in updates(graph).tolist():
        own = {b for b in graph.writes[u].tolist() if graph.buffer(b).role == Role.PARAMETER}
        copies = e.copies(own, "one update late", role=Role.STATE, live=None, filled=True)
        e.use(copies, *(t for t in range(end + 1) if own & e.reads[t]))
        nbytes = sum(int(graph.buffer_bytes[b]) for b in own)
        e.task(end, int(graph.unit[u]), Kind.U, number, part=graph[u].part, stage=e.stage[u], reads=own,
               writes=copies.buffers.values(), launches=e.copy(copies.storages), nbytes=nbytes,
               time=draft.cost.launch + nbytes / BYTES_PER_US)
    return e.draft
