"""Hanayo: one direction, in waves through the ranks, without a second copy of the weights."""

from __future__ import annotations

from ...core.schedule import Schedule
from ...core.tasks import Kind
from .listing import work_conserving
from .problem import Problem


def hanayo(problem: Problem) -> Schedule:
    """Waves 0 1 .. p-1 p-1 .. 0 with an even number of chunks per rank (Liu et al., 2023).

    Reconstructed from its idea: work-conserving on the wave placement, backward before forward, the oldest micro-batch
    first. Faster than 1F1B; where m is much larger than p, its peak is somewhat above p.
    """
    return work_conserving(problem, (Kind.B, Kind.F), fused=True)
