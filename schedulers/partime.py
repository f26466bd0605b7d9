"""PARTIME: stages of a network on streams of one device, all at once, each on the values of the tick before.

Meloni, Faggi, Marullo, Betti, Tiezzi, Gori, Melacci, "PARTIME: scalable and parallel processing over time with deep
neural networks" (2210.09147). One step of training is one tick: S stages work on S different samples, so a step takes
as long as its longest stage, and a sample needs S steps. Weights are never old; gradients meet activations of later
samples (`minidl.passes.ticks`), which works for data that change slowly and fails for data that jump.
"""

from __future__ import annotations

import numpy as np

from ..core.columns import Ints
from ..core.graph import TaskGraph
from ..core.machine import Machine, PlanError
from ..core.schedule import Lane, Schedule
from ..core.tasks import Kind
from ..passes.draft import Draft
from ..passes.ticks import in_ticks
from ..pricing.cost import CostModel
from .ordered import Ordered
from .pipeline.models import balanced


def stage_of(graph: TaskGraph, cost: CostModel, stages: int) -> Ints:
    """The stage of each task: consecutive blocks of layers of about equal time. Raises PlanError for fewer than 1
    stage, and PipelineError for more stages than blocks."""
    if stages < 1:
        raise PlanError(f"partime needs at least 1 stage, not {stages}")
    found: Ints = balanced(graph, cost, stages)[graph.unit]
    layers = np.isin(graph.unit, graph.unit[graph.kind == Kind.F])
    for t in np.flatnonzero(~layers).tolist():  # a copy goes with what it copies
        found[t] = found[graph.preds[t]].min(initial=stages - 1)
    return found


def ticks(draft: Draft, stages: int = 2) -> Draft:
    """The step as a tick of `stages` stages."""
    return in_ticks(draft, stage_of(draft.graph, draft.priced, stages))


def partime(graph: TaskGraph, cost: CostModel, machine: Machine, *, stages: int = 2) -> Ordered:
    """`stages` of the network on a stream each, all at once on what their neighbours made in the step before (PARTIME,
    Meloni et al., 2022): a step takes as long as the longest stage, a sample as many steps as there are stages. One
    stage is online training, bit for bit."""
    stage = stage_of(graph, cost, stages)
    lanes = {Lane(0, f"stage{s}" if s else "main"): np.flatnonzero(stage == s).tolist() for s in range(stages)}
    late = stages > 1
    return Ordered(Schedule.of(graph, lanes), {"latency": stages, "stale": late}, remarks=(
        f"gradients meet activations of up to {2 * (stages - 1)} ticks later, so data must change slowly "
        f"(--feed ring); a run, also one that goes on, begins with {stages - 1} ticks on zeros",) if late else ())
