"""The units of a step become stages: all that a stage does for a micro-batch in one direction is one task."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.tasks import Kind, repack, unpack
from .draft import Draft
from .rewrite import coarsened


def in_stages(draft: Draft) -> Draft:
    """The step whose units are stages. Micro-batches distinguish the tasks of a stage of both directions; an update of
    the second direction is part 1. Raises GraphError if stages would wait for each other in a circle."""
    coarse, group = coarsened(draft.graph, draft.stage)
    own, stages = unpack(coarse.keys), draft.placement.stages
    part = np.where(own.kind == Kind.U, own.unit // stages, own.part)
    return draft.merged(replace(coarse, keys=repack(coarse.keys, unit=own.unit % stages, part=part),
                                unit_names=coarse.unit_names[:stages]), group)
