"""O and W of a stage become one task B where the order has one."""

from __future__ import annotations

import numpy as np

from ..core.schedule import Schedule
from ..core.tasks import Kind, unpack
from .boundary import Mask
from .draft import Draft
from .rewrite import fused


def fused_in(schedule: Schedule, stages: int, micro_batches: int) -> bool | Mask:
    """Where the schedule has one B in place of O and W: bools [stage, micro-batch], or False. The proof reports tasks
    out of range."""
    own = unpack(schedule.keys)
    unit, micro_batch = own.unit, own.micro_batch
    joint = (own.kind == Kind.B) & (unit < stages) & (micro_batch < micro_batches)
    if not joint.any():
        return False
    fused = np.zeros((stages, micro_batches), bool)
    fused[unit[joint], micro_batch[joint]] = True
    return fused


def fused_backwards(draft: Draft) -> Draft:
    """The tasks of the order. Raises GraphError if another task needs one of the two and the other needs that
    task."""
    which = fused_in(draft.order, draft.placement.stages, draft.micro_batches)
    return draft if isinstance(which, bool) else draft.merged(*fused(draft.graph, which))
