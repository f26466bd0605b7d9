"""Data-parallel policies whose sums and updates have the time of the next gradients: delayed updates and ACCO.

Gradients keep the compute lane; sums run on the lane of communication, and updates on a lane of their own, one step
late. A pass over the step makes this possible: `minidl.passes.delayed`, `minidl.passes.halves`.
"""

from __future__ import annotations

import numpy as np

from ..core.columns import Ints
from ..core.graph import TaskGraph
from ..core.machine import Machine
from ..core.schedule import Lane, Schedule
from ..core.tasks import COLLECTIVE, Kind
from ..passes.boundary import cross_boundary
from ..pricing.cost import CostModel
from .ordered import Ordered


def delayed_update(graph: TaskGraph, cost: CostModel, machine: Machine) -> Ordered:
    """Sums and updates of a step beside all gradients of the next one, which are of the weights before that update:
    w(t+1) = Opt(w(t), gradient at w(t-1)) (DPU, ZeRO-Offload: Ren et al., 2021). Also on one rank. Copies weights."""
    return _beside(graph, {"stale": True}, "gradients are of the weights before the last update")


def acco(graph: TaskGraph, cost: CostModel, machine: Machine) -> Ordered:
    """Sums and updates of one half of the micro-batches beside the gradients of the other half: the first half is at
    weights that the first half before it predicts, v(t+1) = Opt(w(t), g1(t)), the second at w(t), and w(t+1) =
    Opt(w(t), mean of g1(t) and g2(t)); no gradient is stale (ACCO: Nabli, Belilovsky, Oyallon, 2024). Sums twice a
    step. A copy of weights, states and gradients."""
    return _beside(graph, {}, "the first half of each batch is at predicted weights")


def _beside(graph: TaskGraph, notes: dict[str, bool], remark: str) -> Ordered:
    body = cross_boundary(graph, lasting_updates(graph).tolist()).body[0]
    update, talks = body.kind == Kind.U, np.isin(body.kind, COLLECTIVE)
    copies = np.array([{launch.kernel for launch in launches} == {"copy"} for launches in body.launches], bool)
    apart = update & ~copies
    lanes = {Lane(0): ~(apart | talks), Lane(0, "comm"): talks, Lane(0, "update"): apart}
    return Ordered(Schedule.of(body, {lane: np.flatnonzero(mine).tolist() for lane, mine in lanes.items()}), notes,
                   remarks=(remark,))


def lasting_updates(graph: TaskGraph) -> Ints:
    """The updates of what the user has, parameters and states, and the updates that these need, such as norms."""
    needed = np.array([spec.live is not None for spec in graph.storages], bool)[graph.buffer_storage]
    found = []
    for u in np.flatnonzero(graph.kind == Kind.U)[::-1].tolist():
        if needed[graph.writes[u]].any():
            found.append(u)
            needed[graph.reads[u]] = True
    return np.array(found[::-1], np.int64)
