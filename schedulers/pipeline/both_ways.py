"""Bidirectional pipelines hold every stage twice: one half of the micro-batches goes down the ranks, the other half up.

To cut a recorded network, the stages of the second direction count as separate stages, which share their parameters
with those of the first (`minidl.schedulers.pipeline.tied`): the rank of the first direction updates them, the other has
copies. The step must therefore sum the gradients of each half separately (`minidl.micro_batch(..., group=1)`), and a
run gives the bits of one process that does so.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...graph import ROLES, Ints, Role, TaskGraph
from ...passes.boundary import Mask
from ...tasks import Kind, repack, unpack
from .placement import PipelineError


def apart(graph: TaskGraph, stage_of_unit: Ints, stages: int) -> tuple[TaskGraph, Ints]:
    """The graph in which the micro-batches of the second direction have separate units and stages; and the stage of
    each unit. Raises PipelineError if gradients of both directions are added to one buffer."""
    units = len(stage_of_unit)
    count = int(graph.micro_batch.max(initial=0)) + 1
    computes = np.isin(graph.kind, (Kind.F, Kind.O, Kind.W, Kind.B))
    second = computes & (2 * graph.micro_batch >= count)
    lasting = np.isin(graph.buffer_role, [i for i, role in enumerate(ROLES) if role.persistent])
    forward = np.zeros(units, bool)
    forward[graph.unit[graph.kind == Kind.F]] = True
    for t in np.flatnonzero(graph.kind == Kind.W).tolist():
        if forward[graph.unit[t]]:
            _check_gradients(graph, t, second)
    writer = graph.writes.row_of_each()
    kept = computes[writer] & lasting[graph.writes.ids]
    shared = np.intersect1d(graph.writes.ids[kept & second[writer]], graph.writes.ids[kept & ~second[writer]])
    if shared.size:
        raise PipelineError(f"{graph.buffer(int(shared[0])).name} follows the micro-batches one after another, but "
                            f"half of them go through the ranks the other way; use a network without such "
                            f"statistics, or a policy that holds each stage once")
    names = graph.unit_names + ("",) * (units - len(graph.unit_names))
    doubled = replace(graph, keys=repack(graph.keys, unit=graph.unit + units * second), unit_names=names + names)
    return doubled, np.concatenate([stage_of_unit, np.asarray(stage_of_unit) + stages])


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
