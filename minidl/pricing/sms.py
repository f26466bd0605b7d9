"""A task's time over the multiprocessors (SMs) of a GPU that it may use, and lanes that divide them.

A table says how many times longer each task takes with some counts of SMs, measured by itself (`minidl.measuring.sms`).
Between two counts, the time is linear in 1 / SMs: a part that does not depend on them and a part that they share out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core.columns import Floats, Ints
from ..core.graph import TaskGraph
from ..core.machine import PlanError, is_number, is_whole
from ..core.tasks import as_recorded, task_name


@dataclass(frozen=True)
class Sms:
    """`total`: the SMs of the device; `step`: a lane gets a multiple of it. `counts`: measured ones, ascending, below
    the total; `slower`: task name -> how many times longer it takes with each, 1 or more. A task without times is
    assumed to need all SMs. `bandwidth`: of the device's memory, in bytes per time unit; None: it binds nothing.
    `side`: the SMs of all lanes but the first, which has the others; 0: all lanes use all."""

    total: int
    step: int = 8
    counts: Sequence[int] = ()
    slower: Mapping[str, Sequence[float]] = field(default_factory=dict)
    bandwidth: float | None = None
    side: int = 0

    def __post_init__(self) -> None:
        counts = [*self.counts, self.total]
        if not all(is_whole(n, 1) for n in (*counts, self.step)) or counts != sorted(set(counts)):
            raise ValueError(f"the counts of SMs are {counts}; they must be ascending whole numbers, and the last one "
                             f"is all SMs")
        for name, factors in self.slower.items():
            if len(factors) != len(self.counts) or not all(is_number(f) and 1 <= f <= 1e6 for f in factors):
                raise ValueError(f"the slowdown of {name[:40]} with fewer SMs must be {len(self.counts)} numbers from "
                                 f"1 on")
        if self.bandwidth is not None and not (is_number(self.bandwidth) and self.bandwidth > 0):
            raise ValueError(f"the bandwidth of the device's memory must be above 0, not {self.bandwidth!r:.40}")
        if self.side:
            self.check(self.side)

    def check(self, side: int) -> None:
        """Raises PlanError for a share of the side lanes that the device cannot give."""
        if side not in self.choices:
            raise PlanError(f"side_sms is {side}; of {self.total} SMs the side lanes can have {self.step} to "
                            f"{self.total - self.step}, in steps of {self.step}")

    @property
    def choices(self) -> range:
        return range(self.step, self.total - self.step + 1, self.step)

    def factors(self, graph: TaskGraph, sms: int) -> Floats:
        """How many times longer each task of the graph takes with so many SMs than with all."""
        if sms == self.total:
            return np.ones(len(graph))
        at = np.array([1 / n for n in (self.total, *reversed(self.counts))])  # ascending
        least, found = min(self.counts, default=self.total), np.full(len(graph), self.total / sms)
        for t, key in enumerate(graph.keys.tolist()):
            factors = self.slower.get(task_name(as_recorded(key)))
            if factors is not None:
                beyond = max(1.0, least / sms)  # fewer than measured: as if all was shared out
                found[t] = np.interp(1 / max(sms, least), at, (1.0, *reversed(factors))) * beyond
        return found

    def slowdown(self, group: Ints, nbytes: Ints, time: Floats, groups: int) -> Floats:
        """How many times longer tasks of each group take beside each other on lanes that divide the SMs: they share the
        memory's bandwidth alone, so two groups that together need more than there is slow down alike."""
        if self.bandwidth is None:
            return np.ones((groups, groups))
        total = np.maximum(np.bincount(group, time, groups), 1e-9) * self.bandwidth
        share = np.minimum(np.bincount(group, nbytes, groups) / total, 1.0)
        share[0] = 0  # no group
        return np.maximum(share[:, None] + share, 1.0)
