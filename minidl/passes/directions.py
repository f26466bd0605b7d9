"""Bidirectional pipelines hold every stage twice: one half of the micro-batches goes down the ranks, the other half up.

The stages of the second direction count as separate stages, which share their parameters with the first direction's:
the rank of the first direction updates them, the other has copies (`copies.py`). The step must sum the gradients of
each half separately (`minidl.micro_batch(..., group=1)`), and a run is bit-identical to one process that does so.

A batch norm in training moves its running mean and variance by the mean and variance of each micro-batch, in their
order. The running ones live on the rank of the first direction; the other rank has no copy. There the forward leaves
the micro-batch's own mean and variance: a batch norm that starts at zero and takes all of the new. At the step's end
they travel with the gradients to the rank of the first direction, which moves the running ones by them, micro-batch by
micro-batch. So it is bit-identical to one process, whose micro-batches of the second direction also come last.

The forwards of a pipeline whose forwards and backwards are cut apart (`roundpipe`) are stages of their own in the same
way: the backward's rank updates the parameters, and the forward's has copies. Backwards read results of forwards by
messages.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.graph import Launch, Role, TaskGraph
from ..core.placement import Refused
from ..core.tasks import Kind
from .boundary import Mask
from .draft import Draft, fill

NORMS = ("batch_norm", "batch_norm_act")  #: kernels whose reads 3 to 5 and last three writes are running statistics


def _computes(graph: TaskGraph) -> Mask:
    """Mask of the tasks of the forward and the backward pass."""
    return np.isin(graph.kind, (Kind.F, Kind.O, Kind.W, Kind.B, Kind.Q))


def two_directions(draft: Draft) -> Draft:
    """The micro-batches of the second direction on stages of their own. Raises Refused if gradients of both
    directions are added to one buffer, or a forward reads a value of the other direction."""
    graph = draft.graph
    second = _computes(graph) & (2 * graph.micro_batch >= int(graph.micro_batch.max(initial=0)) + 1)
    for t in np.flatnonzero((graph.kind == Kind.W) & np.isin(graph.unit, graph.unit[graph.kind == Kind.F])).tolist():
        _check_gradients(graph, t, second)
    _check_values(graph, second)
    return replace(draft, stage=draft.stage + draft.placement.stages * second)


def _check_gradients(graph: TaskGraph, task: int, second: Mask) -> None:
    """Raises Refused if the task adds to a gradient that the other direction has begun."""
    for b in np.intersect1d(graph.reads[task], graph.writes[task]).tolist():
        if graph.buffer(b).role == Role.GRADIENT:
            other = [p for p in graph.preds[task].tolist() if b in graph.writes[p] and second[p] != second[task]]
            if other:
                raise Refused("two directions", f"{graph.name(task)} adds to the gradient of {graph.name(other[0])}, "
                              f"but the two go through the ranks in opposite directions", "record the second half of "
                              "the micro-batches as a second group: minidl.micro_batch(number, group=1)")


def _check_values(graph: TaskGraph, second: Mask) -> None:
    """Raises Refused if a forward, but one of the last micro-batch, reads a value of the other direction, such as
    a running loss over all micro-batches."""
    source, target = graph.preds.ids, graph.preds.row_of_each()
    across = (second[source] != second[target]) & (graph.kind[source] == Kind.F) & (graph.kind[target] == Kind.F)
    across &= graph.micro_batch[target] < graph.micro_batch.max(initial=0)
    for p, t in zip(source[across].tolist(), target[across].tolist(), strict=True):
        for b in np.intersect1d(graph.writes[p], graph.reads[t]).tolist():
            if graph.buffer(b).role == Role.ACTIVATION:
                raise Refused("two directions", f"{graph[t].label} reads {graph.buffer(b).name} of {graph[p].label}, "
                              f"but their micro-batches go through the ranks in opposite directions", "keep a running "
                              "loss for each half of the micro-batches, and add both in the last micro-batch, each "
                              "within its minidl.micro_batch")


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
            zero, b = e.array("zeros", (max(-(-e.specs[own[0].storage].bytes // 8), 1),), "float64", Role.WORKSPACE)
            alone = replace(
                norm, reads=(*norm.reads[:3], *(replace(v, storage=zero.storage) for v in old), *norm.reads[6:]),
                writes=(*norm.writes[:-3], *own), constants=tuple({**dict(norm.constants), "momentum": 1.0}.items()))
            i = e.launches[t].index(norm)
            e.launches[t] = (*e.launches[t][:i], fill(zero, 0.0), alone, *e.launches[t][i + 1 :])
            e.reads[t] -= buffers
            e.writes[t] = e.writes[t] - buffers | {*made, b}
            complete = [e.buffer(b, e.storage_of[b], f"{e.names[b]}, complete") for b in made[:2]]
            stage, end = int(draft.stage[t]), len(graph) - 1
            e.task(end, e.unit(), Kind.U, stage=stage, reads=made[:2], writes=complete)
            e.task(end, e.unit(), Kind.U, stage=stage - stages, reads={*buffers, *complete}, writes=buffers,
                   launches=[Launch("batch_norm_move", (*own[:2], *old), running, (),
                                    (("momentum", dict(norm.constants)["momentum"]),))])
    draft = e.draft
    graph, second = draft.graph, draft.stage >= stages
    up, down = (graph.writes.where(_computes(graph) & mine).ids for mine in (second, ~second))
    shared = np.intersect1d(up, down)
    if (shared := shared[graph.persistent[shared]]).size:
        raise Refused(draft.name, f"{graph.buffer(int(shared[0])).name} follows the micro-batches one after another, "
                      f"but half of them go through the ranks the other way",
                      "use a network without such a state, or a policy that holds each stage once")
    return draft


def forwards_apart(draft: Draft) -> Draft:
    """The forwards on stages of their own."""
    return replace(draft, stage=draft.stage + draft.placement.stages * (draft.graph.kind == Kind.F))
