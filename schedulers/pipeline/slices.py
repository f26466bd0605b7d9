"""Seq1F1B: every micro-batch is cut into slices along its sequence, which go through the pipeline one by one.

Attention looks back: the forward of a slice needs the earlier slices of its micro-batch on the same stage, its backward
the later ones. So forwards run in the order of slices and backwards in reverse. With q slices, slice j of micro-batch i
is micro-batch i q + j of the plan, of a synthetic pipeline as of a recorded network.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...core.columns import Rows
from ...core.graph import TaskGraph
from ...core.placement import PipelineError, check_numbers
from ...core.tasks import Kind, unpack
from ..ordered import Ordered
from .flush import in_turn
from .problem import Problem, schedule_of
from .stages import stage_graph


def seq1f1b(problem: Problem, slices: int = 2) -> Ordered:
    """1F1B over q slices of each micro-batch, for sequences (Seq1F1B, Sun et al., 2024): min(p-s-2+q, mq) forwards on
    rank s, then one forward and one backward in turn. Peak (p+q-1)/q on rank 0, bubble (p-1)(F+O+W)/q.

    The closed forms are for slices of equal times. Those of a network (one that can read slices one after the other, as
    gpt) have equal lengths, and later ones attend to more keys; its tasks are priced one by one. Raises PipelineError
    for fewer than one slice.
    """
    p, m, q = problem.ranks, problem.micro_batches, slices
    if q < 1:
        raise PipelineError(f"seq1f1b: {q} slices; a micro-batch has at least 1")
    check_numbers(p, m * q, problem.cap)
    up = np.arange(m * q)
    down = up // q * q + q - 1 - up % q
    schedule = schedule_of([in_turn((rank, up), (rank, down), p - rank - 1 + q) for rank in range(p)])
    kinds = {kind: np.divide(times, q).tolist() for kind, times in problem.cost.kinds.items()}
    graph = None if problem.recorded else sliced_graph(p, m, q)
    return Ordered(schedule, {"slices": q}, graph=graph, cost=replace(problem.cost, kinds=kinds), slices=q)


def sliced_graph(stages: int, micro_batches: int, slices: int) -> TaskGraph:
    """Stages with fused backward, for micro-batches in slices. In the sequential order all slices of a micro-batch run
    forward, then backward from the last to the first."""
    s, total = stages, micro_batches * slices
    graph = stage_graph(s, total, True)
    own = unpack(graph.keys)
    back, slice_of = own.kind == Kind.B, own.micro_batch % slices
    activation = own.micro_batch * s + own.unit
    after, before = ~back & (slice_of > 0), back & (slice_of < slices - 1)
    rows = np.concatenate([graph.reads.row_of_each(), np.flatnonzero(after), np.flatnonzero(before)])
    ids = np.concatenate([graph.reads.ids, activation[after] - s, s * total + activation[before] + s])
    order = np.lexsort((np.arange(len(graph)), np.where(back, slices - 1 - slice_of, slice_of), back,
                        own.micro_batch // slices))
    return replace(graph, reads=Rows.from_pairs(rows, ids, len(graph)).sorted(),
                   name_of_graph=f"{s} stages, {micro_batches} micro-batches in {slices} slices").take(order)


def slices_in(graph: TaskGraph) -> int:
    """Into how many slices a step, with O and W apart, cuts each micro-batch: without slices, no output gradient needs
    a later micro-batch's. Raises PipelineError if micro-batches have different numbers of slices."""
    task, needed = graph.preds.row_of_each(), graph.preds.ids
    later = graph.micro_batch[needed] > graph.micro_batch[task]
    waiting = np.unique(graph.micro_batch[task[later & (graph.kind[task] == Kind.O) & (graph.kind[needed] == Kind.O)]])
    total = int(graph.micro_batch[graph.kind == Kind.F].max(initial=0)) + 1
    slices = total // max(total - len(waiting), 1)
    each = np.arange(total)
    if not np.array_equal(waiting, each[each % slices < slices - 1]):
        raise PipelineError(f"{len(waiting)} of {total} micro-batches need output gradients of later ones, as slices "
                            f"do; but then each sequence must have the same number of slices")
    return slices
