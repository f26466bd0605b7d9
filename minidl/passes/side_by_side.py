"""The parts of tasks on ranks: each has a lane of its own, in the order of the whole tasks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from ..core.schedule import Schedule
from ..core.tasks import COMPUTE, unpack
from .draft import Draft


def side_by_side(draft: Draft) -> Draft:
    """The second parts of each rank's tasks on a lane `sub1`, the third ones on `sub2`, and so on. A legal order of one
    lane stays legal, since each lane keeps it. An order with several lanes of a rank that compute, or with sums on such
    a lane, stays as it is, and so does a step on one device: there the policy places all tasks. Stages in parts (of
    `layerpipe`) are no tasks in parts, and stay as well."""
    order = draft.schedule
    if order is None or (draft.placement.parts is not None if draft.staged else draft.sums is None):
        return draft
    own, lane = unpack(order.keys), order.lane_of_each()
    computes = np.isin(own.kind, COMPUTE)
    other = np.where(computes, np.maximum(own.part, 1) - 1, 0)
    main = np.unique(lane[computes])
    if len({order.lanes[i].rank for i in main}) < len(main) or not other.any() or np.isin(lane[~computes], main).any():
        return draft
    lanes, keys = list(order.lanes), [order.keys[(lane == i) & (other == 0)] for i in range(len(order.lanes))]
    for i, part in product(main, range(1, int(other.max()) + 1)):
        lanes.append(replace(order.lanes[i], name=f"sub{part}"))
        keys.append(order.keys[(lane == i) & (other == part)])
    return replace(draft, schedule=Schedule.of_keys(lanes, keys, notes=order.notes))
