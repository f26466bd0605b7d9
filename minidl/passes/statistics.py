"""Running statistics in pipelines that hold every stage twice: the second direction's batches move them last.

A batch norm in training moves its running mean and variance by the mean and variance of each micro-batch, in their
order. The running ones live on the rank of the first direction; the other rank has no copy. There the forward leaves
the micro-batch's own mean and variance: a batch norm that starts at zero and takes all of the new. At the step's end
they travel with the gradients to the rank of the first direction, which moves the running ones by them, micro-batch by
micro-batch. So it is bit-identical to one process, whose micro-batches of the second direction also come last.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.graph import Launch, Role, StorageSpec
from ..core.placement import Refused
from ..core.tasks import Kind
from .directions import computes
from .draft import Draft, fill

NORMS = ("batch_norm", "batch_norm_act")  #: kernels whose reads 3 to 5 and last three writes are running statistics


def running_statistics(draft: Draft) -> Draft:
    """Forwards of the second direction do not touch running statistics; tasks at the end of the step move them: two for
    each batch norm and micro-batch. One marks the micro-batch's statistics as complete, so that they may be sent, and
    launches nothing; one moves the running ones. Raises Refused if another state follows the micro-batches."""
    graph, stages, e = draft.graph, draft.placement.stages, draft.edit()
    for t in np.flatnonzero((draft.stage >= stages) & (graph.kind == Kind.F)).tolist():
        for norm in [launch for launch in e.launches[t] if launch.kernel in NORMS]:
            running, old = norm.writes[-3:], norm.reads[3:6]
            buffers = {b for b in e.writes[t] if e.storage_of[b] in {view.storage for view in running}}
            own, made = [], []
            for view, role in zip(running, (Role.ACTIVATION, Role.ACTIVATION, Role.WORKSPACE), strict=True):
                spec = e.specs[view.storage]
                at, b = e.place(replace(spec, name=f"{spec.name} of micro-batch {graph.micro_batch[t]}", role=role,
                                        live=None))
                own.append(replace(view, storage=at))
                made.append(b)
            words = max(-(-e.specs[own[0].storage].bytes // 8), 1)
            at, b = e.place(StorageSpec("zeros", (words,), "float64", 8 * words, Role.WORKSPACE))
            zero = e.whole(at)
            alone = replace(
                norm, reads=(*norm.reads[:3], *(replace(v, storage=at) for v in old), *norm.reads[6:]),
                writes=(*norm.writes[:-3], *own), constants=tuple({**dict(norm.constants), "momentum": 1.0}.items()))
            i = e.launches[t].index(norm)
            e.launches[t] = (*e.launches[t][:i], fill(zero, 0.0), alone,
                             *e.launches[t][i + 1 :])
            e.reads[t] -= buffers
            e.writes[t] = e.writes[t] - buffers | {*made, b}
            complete = [e.buffer(b, e.storage_of[b], f"{e.names[b]}, complete") for b in made[:2]]
            stage, end = int(draft.stage[t]), len(graph) - 1
            e.task(end, e.unit(), Kind.U, stage=stage, reads=made[:2], writes=complete)
            e.task(end, e.unit(), Kind.U, stage=stage - stages, reads={*buffers, *complete}, writes=buffers,
                   launches=[Launch("batch_norm_move", (*own[:2], *old), running, (),
                                    (("momentum", dict(norm.constants)["momentum"]),))])
    draft = e.draft
    graph, kept = draft.graph, np.zeros((2, len(e.names)), bool)
    for i in (0, 1):
        mine = computes(graph) & ((draft.stage >= stages) == bool(i))
        kept[i, graph.writes.take(np.flatnonzero(mine)).ids] = True
    shared = np.flatnonzero(kept.all(axis=0) & graph.persistent)
    if shared.size:
        raise Refused(draft.name, f"{graph.buffer(int(shared[0])).name} follows the micro-batches one after another, "
                      f"but half of them go through the ranks the other way",
                      "use a network without such a state, or a policy that holds each stage once")
    return draft
