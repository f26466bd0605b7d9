"""Loss scaling on stages: each divides its own gradients by the scale, and the flags of all decide whether to step.

In one process one task divides all gradients (`minidl.optim.GradScaler`). Here each stage has such a task for its own
gradients, with its own flag. The flags travel like the sums of squares for clipping, and the task that updates the
scale reads all of them. So every rank skips the same steps, and has the same scale, with the bits of one process.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...graph import Floats, Ints, Launch, Role, Rows, StorageSpec, TaskGraph, View
from ...tasks import Kind, pack
from .placement import PipelineError

FLAG = ((1,), "int32", 4)  #: shape, type and bytes of a flag


def makers(graph: TaskGraph) -> Ints:
    """Buffer -> the unit that makes it in the forward or backward pass, or -1."""
    found = np.full(len(graph.buffer_bytes), -1, np.int64)
    made = graph.kind[graph.writes.row_of_each()] != Kind.U
    found[graph.writes.ids[made]] = graph.unit[graph.writes.row_of_each()[made]]
    return found


def unscaled_by_each(graph: TaskGraph, stage_of_unit: Ints, time: Floats) -> tuple[TaskGraph, Ints, Floats]:
    """The graph in which each stage divides its own gradients by the loss scale; also the stage of each unit and the
    time of each task. Raises PipelineError if several optimizers share one scale."""
    scaling = [t for t in np.flatnonzero(graph.kind == Kind.U).tolist()
               if any(launch.kernel == "unscale" for launch in graph.launches[t])] if graph.launches else []
    if len(scaling) > 1:
        raise PipelineError("the step scales its loss for several optimizers or updates; a pipeline can have only one")
    if not scaling or len(np.unique(stage_of_unit)) == 1:
        return graph, stage_of_unit, time
    (task,) = scaling
    copy, unscale, update = graph.launches[task]  # as `GradScaler.unscale` records them
    gradients, flag = unscale.reads[:-1], update.reads[-1]
    buffer = {int(graph.buffer_storage[b]): b for b in (*graph.reads[task].tolist(), *graph.writes[task].tolist())}
    maker = makers(graph)
    stage = stage_of_unit[[maker[buffer[view.storage]] for view in gradients]]
    stages = np.unique(stage).tolist()
    first = len(graph.storages)
    specs = [StorageSpec(f"not finite, stage {s}", *FLAG, Role.GRADIENT) for s in stages]
    specs += [StorageSpec(f"inverse loss scale, stage {s}", (1,), "float32", 4, Role.WORKSPACE) for s in stages]
    buffer |= {first + i: len(graph.buffer_bytes) + i for i in range(len(specs))}
    graph = graph.with_storages(specs)
    launches = []
    for i, s in enumerate(stages):
        mine = np.flatnonzero(stage == s).tolist()
        inverse = [View(first + len(stages) + i, (1,), (1,), 0, "float32")] if unscale.work else []
        launches.append(replace(
            unscale, reads=(*(gradients[k] for k in mine), copy.reads[0]),
            writes=(*(unscale.writes[k] for k in mine), replace(flag, storage=first + i)),
            work=(*inverse, *(unscale.work[1 + k] for k in mine if unscale.work))))
    both = (Launch("any_set", tuple(replace(flag, storage=first + i) for i in range(len(stages))), (flag,)), update)
    share = np.array([sum(float(np.prod(view.shape)) for view in launch.reads) for launch in launches])
    share /= share.sum()
    units = len(stage_of_unit) + np.arange(len(stages))

    def rows(stage_of: list[tuple[View, ...]]) -> Rows:
        return Rows.of([sorted({buffer[view.storage] for view in views}) for views in stage_of])

    def with_row(all_rows: Rows, views: tuple[View, ...]) -> Rows:
        return Rows.of([sorted({buffer[v.storage] for v in views}) if t == task else all_rows[t].tolist()
                        for t in range(len(graph))])

    counted = replace(
        graph, reads=with_row(graph.reads, (*both[0].reads, *update.reads[:2])),
        writes=with_row(graph.writes, (flag, *update.writes)),
        launches=tuple(both if t == task else own for t, own in enumerate(graph.launches)),
        unit_names=(*graph.unit_names, *[""] * (len(stage_of_unit) - len(graph.unit_names)),
                    *(f"loss scale, stage {s}" for s in stages)))
    split = counted.insert(
        np.full(len(stages), task - 1), pack(units, Kind.U, np.zeros(len(stages), np.int64)),
        rows([launch.reads for launch in launches]), rows([(*launch.writes, *launch.work) for launch in launches]),
        np.rint(share * graph.bytes[task]).astype(np.int64), [(launch,) for launch in launches])
    rest = time.copy()
    rest[task] = 0
    return split, np.append(stage_of_unit, stages), np.insert(rest, task, share * time[task])
