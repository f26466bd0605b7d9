"""Bidirectional pipelines hold every stage twice: one half of the micro-batches goes down the ranks, the other half up.

To cut a recorded network, the stages of the second direction count as separate stages, which share their parameters
with those of the first (`minidl.schedulers.pipeline.tied`): the rank of the first direction updates them, the other has
copies. Running statistics live on the rank of the first direction too (`minidl.schedulers.pipeline.statistics`). The
step must sum the gradients of each half separately (`minidl.micro_batch(..., group=1)`), and a
run gives the bits of one process that does so.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...graph import ROLES, Ints, Role, TaskGraph
from ...passes.boundary import Mask
from ...tasks import Kind, repack, unpack
from .placement import PipelineError
from .statistics import moved_last

LASTING = [i for i, role in enumerate(ROLES) if role.persistent]


def apart(graph: TaskGraph, stage_of_unit: Ints, stages: int) -> tuple[TaskGraph, Ints]:
    """The graph in which the micro-batches of the second direction have separate units and stages, with new tasks at
    its end; and the stage of each unit. Raises PipelineError if gradients of both directions are added to one buffer,
    or another state than running statistics follows the micro-batches."""
    units = len(stage_of_unit)
    count = int(graph.micro_batch.max(initial=0)) + 1
    computes = np.isin(graph.kind, (Kind.F, Kind.O, Kind.W, Kind.B))
    second = computes & (2 * graph.micro_batch >= count)
    forward = np.zeros(units, bool)
    forward[graph.unit[graph.kind == Kind.F]] = True
    for t in np.flatnonzero(graph.kind == Kind.W).tolist():
        if forward[graph.unit[t]]:
            _check_gradients(graph, t, second)
    names = graph.unit_names + ("",) * (units - len(graph.unit_names))
    doubled = replace(graph, keys=repack(graph.keys, unit=graph.unit + units * second), unit_names=names + names)
    found, stage_of = moved_last(doubled, np.append(stage_of_unit, stage_of_unit + stages), stages, second)
    kept = np.zeros((2, len(found.buffer_bytes)), bool)
    for i, tasks in enumerate((computes & ~second, second)):
        kept[i, found.writes.take(np.flatnonzero(tasks)).ids] = True
    shared = np.flatnonzero(kept.all(axis=0) & np.isin(found.buffer_role, LASTING))
    if shared.size:
        raise PipelineError(f"{found.buffer(int(shared[0])).name} follows the micro-batches one after another, but "
                            f"half of them go through the ranks the other way; use a network without such a state, or "
                            f"a policy that holds each stage once")
    return found, stage_of


def _check_gradients(graph: TaskGraph, task: int, second: Mask) -> None:
    """Raises PipelineError if the task adds to a gradient that the other direction has begun."""
    for b in np.intersect1d(graph.reads[task], graph.writes[task]).tolist():
        if graph.buffer_role[b] == ROLES.index(Role.GRADIENT):
            other = [p for p in graph.preds[task].tolist() if b in graph.writes[p] and second[p] != second[task]]
            if other:
                raise PipelineError(f"{graph.name(task)} adds to the gradient of {graph.name(other[0])}, but the two "
                                    f"go through the ranks in opposite directions; record the second half of the "
                                    f"micro-batches as a second group: minidl.micro_batch(number, group=1)")


def together(coarse: TaskGraph, stages: int) -> TaskGraph:
    """The graph of stages with one number for a stage of both directions. Micro-batches distinguish its tasks; an
    update of the second direction is part 1."""
    own = unpack(coarse.keys)
    return replace(coarse, keys=repack(coarse.keys, unit=own.unit % stages,
                                       part=np.where(own.kind == Kind.U, own.unit // stages, own.part)),
                   unit_names=coarse.unit_names[:stages])
