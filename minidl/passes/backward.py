"""O and W of a stage become one task B where the order has one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.columns import offsets, spread
from ..core.schedule import Schedule
from ..core.tasks import Kind, repack, unpack
from .boundary import Mask
from .draft import Draft
from .rewrite import fuse


def fused_in(schedule: Schedule, stages: int, micro_batches: int) -> bool | Mask:
    """Where the schedule has one B in place of O and W: bools [stage, micro-batch], or False. The proof reports tasks
    out of range."""
    own = unpack(schedule.keys)
    unit, micro_batch = own.unit, own.micro_batch
    joint = (own.kind == Kind.B) & (unit < stages) & (micro_batch < micro_batches)
    return spread((unit[joint], micro_batch[joint]), True, (stages, micro_batches)) if joint.any() else False


def backwards_apart(draft: Draft) -> Draft:
    """O, then W, in the place of each B of the order: each of the two can be cut, but not both as one task."""
    order = draft.order
    joint = unpack(order.keys).kind == Kind.B
    if not joint.any() or draft.versions is not None:
        return draft
    keys = np.repeat(order.keys, 1 + joint)
    second = np.append(False, (keys[1:] == keys[:-1]))
    keys = np.where(unpack(keys).kind == Kind.B, repack(keys, kind=np.where(second, Kind.W, Kind.O)), keys)
    known = draft.graph.find(keys) >= 0
    ptr = offsets(known)[offsets(1 + joint)[order.ptr]]
    return replace(draft, schedule=Schedule(order.lanes, ptr, keys[known], notes=order.notes))


def fused_backwards(draft: Draft) -> Draft:
    """The tasks of the order. Raises GraphError if another task needs one of the two and the other needs that task."""
    which = fused_in(draft.order, draft.placement.stages, draft.micro_batches)
    return draft if isinstance(which, bool) else draft.merged(*fuse(draft.graph, which))
