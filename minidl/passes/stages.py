"""The units of a step become stages: all that a stage does for a micro-batch in one direction is one task."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.columns import spread
from ..core.placement import Refused
from ..core.tasks import Kind, repack, unpack
from .boundary import Mask
from .draft import Draft
from .fill import again_apart
from .rewrite import coarsen


def in_stages(draft: Draft, fill: str | None = None) -> Draft:
    """The step whose units are stages; `fill` says whether they compute again in tasks of their own. Micro-batches
    distinguish the tasks of a stage of both directions; an update of the second direction is part 1, and so is the
    second half of an output gradient that is cut in two. Raises GraphError if stages would wait for each other in a
    circle."""
    coarse, group = coarsen(draft.graph, draft.stage, _lower(draft), again_apart(fill))
    own, stages = unpack(coarse.keys), draft.placement.stages
    part = np.where(own.kind == Kind.U, own.unit // stages, own.part)
    return draft.merged(replace(coarse, keys=repack(coarse.keys, unit=own.unit % stages, part=part),
                                unit_names=coarse.unit_names[:stages]), group)


def _lower(draft: Draft) -> Mask | None:
    """Mask of the tasks of the lower layers of stages whose output gradients are cut in two: between the layers where
    the first half's share of the time is nearest to the wanted one. Raises Refused if there is nowhere to cut."""
    if not draft.placement.halves:
        return None
    graph, found = draft.graph, np.zeros(len(draft.graph), bool)
    writer = graph.writes.row_of_each()
    for stage, share in draft.placement.halves.items():
        mine = draft.stage == stage
        gradients = mine & (graph.kind == Kind.O)
        written = gradients[writer]
        place, unit = graph.buffer_storage[graph.writes.ids[written]], graph.unit[writer[written]]
        lowest, highest = (spread(place, unit, len(graph.storages), rest, by)
                           for rest, by in ((len(graph), np.minimum), (-1, np.maximum)))
        units, time = np.unique(graph.unit[gradients]), np.bincount(graph.unit[gradients], draft.time[gradients])
        # a gradient that layers on both sides add to has one memory
        below = [u for u in units[:-1].tolist() if not ((lowest <= u) & (highest > u)).any()]
        if not below:
            raise Refused(draft.name, f"the output gradient of stage {stage} cannot be cut between two layers",
                          "take fewer stages, or --scheduler-arg method=intra")
        first = [float(time[u + 1 :].sum() / time.sum()) - share for u in below]
        found |= mine & (graph.unit <= below[int(np.argmin(np.abs(first)))])
    return found
