"""Bidirectional pipelines hold every stage twice: one half of the micro-batches goes down the ranks, the other half up.

The stages of the second direction count as separate stages, which share their parameters with the first direction's:
the rank of the first direction updates them, the other has copies (`copies.py`). The step must sum the gradients of
each half separately (`minidl.micro_batch(..., group=1)`), and a run is bit-identical to one process that does so.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.graph import Role, TaskGraph
from ..core.placement import Refused
from ..core.tasks import Kind
from .boundary import Mask
from .draft import Draft


def computes(graph: TaskGraph) -> Mask:
    """Mask of the tasks of the forward and the backward pass."""
    return np.isin(graph.kind, (Kind.F, Kind.O, Kind.W, Kind.B, Kind.Q))


def two_directions(draft: Draft) -> Draft:
    """The micro-batches of the second direction on stages of their own. Raises Refused if gradients of both
    directions are added to one buffer, or a forward reads a value of the other direction."""
    graph = draft.graph
    second = computes(graph) & (2 * graph.micro_batch >= int(graph.micro_batch.max(initial=0)) + 1)
    forward = np.isin(graph.unit, graph.unit[graph.kind == Kind.F])
    for t in np.flatnonzero((graph.kind == Kind.W) & forward).tolist():
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
