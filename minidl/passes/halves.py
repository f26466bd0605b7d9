"""ACCO: gradients of one half of a batch while ranks sum the other half's (Nabli, Belilovsky, Oyallon, 2406.02613).

The first half of a batch is at predicted weights v, the second at the weights w. With their mean gradients g1 and g2,
v(t+1) = Opt(w(t), g1) and w(t+1) = Opt(w(t), (g1 + g2) / 2), both from the same w(t) and states: no gradient is stale,
and only the first half's weights are a guess. v(t+1) is needed after the second half, and w(t+1) after the next first
half, so sums and updates of one half have the other half's time. When a loop begins, v = w.
"""

from __future__ import annotations

from ..core.columns import grouped
from ..core.graph import Launch, Role
from ..core.placement import Refused
from ..core.tasks import Kind
from ..pricing.corun import BYTES_PER_US
from .delayed import last_updates
from .draft import Draft
from .rewrite import gradients
from .versions import updates


def in_halves(draft: Draft) -> Draft:
    """The step whose first micro-batches are at predicted weights. Raises Refused for an odd number of micro-batches,
    and for a graph without kernels."""
    graph, e, last = draft.graph, draft.edit(), last_updates(draft).tolist()
    count = draft.micro_batches
    if count % 2:
        raise Refused(draft.name, f"a step of {count} micro-batch{'es' * (count > 1)} has no halves", "give an even "
                      "--micro-batches")
    own = {b for u in updates(graph).tolist() for b in graph.writes[u].tolist()
           if graph.buffer(b).role == Role.PARAMETER}
    guess = e.copies(own, "predicted", role=Role.PARAMETER, live=None, filled=True)
    first = [t for t in range(last[0]) if graph.micro_batch[t] < count // 2]
    e.use(guess, *(t for t in first if own & e.reads[t]))
    spent = {int(b) for row in gradients(graph).values() for b in row}
    half = e.copies(spent, "first half", role=Role.GRADIENT)
    # the last task of the first half that adds to gradients -> these
    ends = grouped((max(t for t in first if b in e.writes[t]), b) for b in sorted(spent))
    for t, added in ends.items():  # the mean of its micro-batches
        nbytes = sum(int(graph.buffer_bytes[b]) for b in added)
        e.task(t, int(graph.unit[t]), Kind.W, count, part=graph[t].part, stage=e.stage[t], reads=added, nbytes=nbytes,
               writes=[half.buffers[b] for b in added], time=draft.cost.launch + nbytes / BYTES_PER_US,
               launches=[Launch("scale", (e.whole(s),), (e.whole(half.storages[s]),), constants=(("factor", 2.0),))
                         for s in sorted(e.places(added))])
    changed = {b for u in last for b in graph.writes[u].tolist()} - own - spent
    held = {b for b in changed if graph.persistent[b]}
    to = (guess | half | e.copies(held, "predicted", role=Role.WORKSPACE, live=None)
          | e.copies(changed - held, "predicted"))
    fresh = {e.storage_of[b]: b for b in own | held}  # storages that no prediction has copied yet
    for u in last:
        touched = e.places(e.reads[u] | e.writes[u]) & fresh.keys()
        begin = {b for b in own | held if e.storage_of[b] in touched}
        made = to.of(begin)
        for s in touched:
            del fresh[s]
        nbytes = sum(e.specs[s].bytes for s in touched)
        e.again(last[0] - 1, u, to, "predicted", reads=(to.of(e.reads[u]) - made) | begin,
                writes=to.of(e.writes[u]) | made,
                launches=(*e.copy({s: to.storages[s] for s in sorted(touched)}),
                          *(launch.moved(to.storages) for launch in graph.launches[u])),
                time=e.time[u] + nbytes / BYTES_PER_US, nbytes=e.bytes[u] + nbytes)
    return e.draft
