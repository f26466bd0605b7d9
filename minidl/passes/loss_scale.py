"""Loss scaling and norms on stages: each divides and measures its own gradients, and the flags of all decide whether to
step.

In one process one task divides all gradients (`minidl.optim.GradScaler`). Here each stage has such a task for its own
gradients, with its own flag. The flags travel like the sums of squares for clipping, and the task that updates the
scale reads all of them. So every rank skips the same steps, and has the same scale, bit-identically to one process.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.columns import Ints, spread
from ..core.graph import Launch, Role, TaskGraph
from ..core.placement import Refused
from ..core.tasks import Kind
from .boundary import Mask
from .draft import Draft, Edit
from .rewrite import sums


def makers(graph: TaskGraph) -> Ints:
    """Buffer -> the last task of the forward or backward pass that makes it, or -1."""
    made = graph.writes.where(graph.kind != Kind.U)
    return spread(made.ids, made.row_of_each(), len(graph.buffer_bytes), -1)


def scales(graph: TaskGraph) -> Mask:
    """Mask of the tasks that update the loss scale."""
    return np.array([any(launch.kernel == "scale_update" for launch in launches) for launches in graph.launches], bool)


def loss_scale_by_stage(draft: Draft) -> Draft:
    """Each stage divides its own gradients by the loss scale. Raises Refused if several optimizers share one scale."""
    graph = draft.graph
    scaling = [t for t in np.flatnonzero(graph.kind == Kind.U).tolist() if graph.launches
               and any(launch.kernel == "unscale" for launch in graph.launches[t])]
    if len(scaling) > (len(np.unique(graph.micro_batch[scaling])) if draft.stale else 1):
        raise Refused("loss scaling", "the step scales its loss for several optimizers or updates, but a pipeline can "
                      "do so for one", "take one optimizer, and a policy with one update in a step")
    if not scaling or len(np.unique(draft.stage)) == 1:
        return draft
    e = draft.edit()
    for task in scaling:
        _by_stage(draft, e, task)
    return e.draft


def _by_stage(draft: Draft, e: Edit, task: int) -> None:
    """The same of one update."""
    graph = draft.graph
    copy, unscale, update = graph.launches[task]  # as `GradScaler.unscale` records them
    gradients, flag, access = unscale.reads[:-1], update.reads[-1], e.buffers_of(task)
    buffer = {storage: buffers[-1] for storage, buffers in access.items()}
    stage = draft.stage[makers(graph)[[buffer[view.storage] for view in gradients]]]
    flags, total = [], sum(float(np.prod(view.shape)) for view in gradients) + len(np.unique(stage))
    for s in np.unique(stage).tolist():
        mine = np.flatnonzero(stage == s).tolist()
        raised, buffer[raised.storage] = e.array(f"not finite, stage {s}", (1,), "int32", Role.GRADIENT)
        inverse, buffer[inverse.storage] = e.array(f"inverse loss scale, stage {s}", (1,), "float32", Role.WORKSPACE)
        flags.append(replace(flag, storage=raised.storage))
        launch = replace(
            unscale, reads=(*(gradients[k] for k in mine), copy.reads[0]),
            writes=(*(unscale.writes[k] for k in mine), flags[-1]),
            work=(inverse, *(unscale.work[1 + k] for k in mine)) if unscale.work else ())
        share = sum(float(np.prod(view.shape)) for view in launch.reads) / total
        e.task(task - 1, e.unit(f"loss scale, stage {s}"), Kind.U, int(graph.micro_batch[task]), stage=s,
               reads={buffer[view.storage] for view in launch.reads},
               writes={buffer[view.storage] for view in (*launch.writes, *launch.work)}, launches=[launch],
               time=share * float(draft.time[task]), nbytes=round(share * float(graph.bytes[task])))
    e.launches[task] = (Launch("any_set", tuple(flags), (flag,)), update)
    e.reads[task] = {buffer[view.storage] for view in (*flags, *update.reads[:2])}
    e.writes[task] = {buffer[view.storage] for view in (flag, *update.writes)}
    e.time[task] = 0.0


def norms_by_stage(draft: Draft) -> Draft:
    """Every sum of a gradient's squares, for clipping, on the stage of the gradient."""
    graph, stage, maker = draft.graph, draft.stage.copy(), makers(draft.graph)
    for t in np.flatnonzero(sums(graph)).tolist():
        found = maker[graph.reads[t]]
        if (found >= 0).any():
            stage[t] = stage[found[found >= 0][0]]
            maker[graph.writes[t]] = t  # for example gradients in another type
    return replace(draft, stage=stage)
