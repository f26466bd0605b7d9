"""The sum of a gradient's squares, for clipping, on the stage that computes the gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .draft import Draft
from .loss_scale import makers
from .rewrite import sums


def norms_by_stage(draft: Draft) -> Draft:
    """Every sum of squares on the stage of its gradient."""
    graph, stage, maker = draft.graph, draft.stage.copy(), makers(draft.graph)
    for t in np.flatnonzero(sums(graph)).tolist():
        found = maker[graph.reads[t]]
        if (found >= 0).any():
            stage[t] = stage[found[found >= 0][0]]
            maker[graph.writes[t]] = t  # for example gradients in another type
    return replace(draft, stage=stage)
