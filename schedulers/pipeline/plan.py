"""A plan: a schedule, the graph it orders, where the stages live and what the tasks cost. Data; `checking.prove` is where
plans come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...graph import Ints, TaskGraph
from ...pricing.cost import CostModel
from ...pricing.simulation import simulate
from ...schedule import Schedule
from ...views.timeline import Timeline
from .communication import add_communication, count_waits, talks
from .placement import Placement


@dataclass(frozen=True)
class Versions:
    """Beside a stale schedule: `of[i]` is the weight version that entry i reads.

    Version 0 is what training starts from; stage s has version k + 1 as soon as its weight gradient of micro-batch
    `(k + 1) * every - 1` is done.
    """

    of: Ints
    every: int = 1


@dataclass(frozen=True)
class Plan:
    """One iteration on ranks. `cost` is that of its tasks, and `steady` the time per mini-batch of a stale plan.

    `cap`: live full-stage activations that a rank may hold, of which the share `kept` stays from an output gradient to
    its weight gradient. `limit`: bytes that a rank may hold. `notes`: the policy's options and what else it has to say.
    The proof counts `peaks` and, for a recorded network, `peak_bytes`: of each rank.
    """

    scheduler: str
    placement: Placement
    micro_batches: int
    graph: TaskGraph
    schedule: Schedule
    cost: CostModel
    versions: Versions | None = None
    steady: float | None = None
    cap: float | None = None
    limit: int | None = None
    kept: float = 1.0
    notes: dict[str, Any] = field(default_factory=dict)
    peaks: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] | None = None

    @cached_property
    def waits(self) -> int:
        """Event waits within ranks: of a send for its result, of the first reader for its receive."""
        if talks(self.schedule):
            return len(self.schedule.waits(self.graph))
        return count_waits(self.graph, self.schedule)

    @cached_property
    def priced(self) -> tuple[TaskGraph, Schedule]:
        """What the simulator prices. On links with a bandwidth messages are tasks, since they queue. Raises GraphError
        where `add_communication` does."""
        if self.cost.link.bandwidth is None or talks(self.schedule):
            return self.graph, self.schedule
        return add_communication(self.graph, self.schedule)

    @cached_property
    def timeline(self) -> Timeline:
        """As predicted."""
        return simulate(*self.priced, self.cost)
