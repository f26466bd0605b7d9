"""Data-parallel ranks whose task times vary: their steps if sums keep their order, and if the ranks choose the next one
together, the first that is ready on all of them (`--order hint`).

Each rank has tasks of its own, and all ranks share each sum. Times are drawn as in `ready.py`: a micro-batch is longer
or shorter on its rank, and each task by itself. Or the loads of experts are (`loads.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core.columns import Floats, Rows, spread
from ..core.tasks import COLLECTIVE, unpack
from ..passes.rewrite import unroll
from ..pricing.greedy import greedy
from ..pricing.simulation import Clock, Lanes
from .loads import checked, times_of
from .plan import Plan
from .ready import OWN, VARIES, Draws, factors

STEPS = 5  #: in a row; the time of a step is the mean of those between the first, which fills the lanes, and the last


class Ranks:
    """The tasks of all ranks over some steps. Task t of rank r has the number r n + t, and a sum the number t."""

    def __init__(self, plan: Plan, loads: Floats | None = None) -> None:
        self.loads = loads
        graph, schedule = unroll(plan.graph, STEPS), plan.schedule.repeated(STEPS)
        lanes = Lanes.of(graph, schedule)
        clock = Clock.of(graph, plan.cost, lanes).without_contention()
        self.graph, self.count, self.ranks, self.own = graph, len(graph), plan.ranks, unpack(graph.keys)
        self.sums = np.isin(self.own.kind, COLLECTIVE)
        self.duration, self._ids = np.tile(clock.duration, self.ranks), schedule.ids(graph)
        self._lane, self._edges = schedule.lane_of_each(), clock.edges(lanes)
        lane_of, place = (spread(self._ids, of_each, self.count) for of_each in (self._lane, np.arange(self.count)))
        self._machine = (np.arange(self.ranks)[:, None] * len(schedule.lanes) + lane_of).ravel()
        self._machines, self._place = self.ranks * len(schedule.lanes), np.tile(place, self.ranks)

    def steps(self, duration: Floats, chosen: bool) -> float:
        """The time of a step. `chosen`: whether sums that are ready may overtake others."""
        source, target, delay = self._edges
        follows = np.flatnonzero(self._lane[1:] == self._lane[:-1])
        before, after = self._ids[follows], self._ids[follows + 1]
        if chosen:
            before, after = before[kept := ~self.sums[after]], after[kept]
        turn = np.arange(self.ranks)[:, None] * self.count  # of each rank's tasks; a sum is one task of all ranks
        first, then = ((np.where(self.sums[ids], 0, turn) + ids).ravel()
                       for ids in (np.append(source, before), np.append(target, after)))
        wait = np.tile(np.append(np.broadcast_to(delay, len(source)), np.zeros(len(before))), self.ranks)
        total = self.count * self.ranks
        played = greedy(Rows.from_pairs(first, then, total), wait[np.argsort(first, kind="stable")], self._machine,
                        duration, self._place, self._machines)
        real = np.tile(~self.sums, self.ranks) | (np.arange(total) < self.count)  # of a sum, only rank 0's
        last = spread(np.tile(self.own.iteration, self.ranks)[real], played.end[real], STEPS, by=np.maximum)
        return float(last[-2] - last[0]) / (STEPS - 2)

    def drawn(self, sigma: float, seed: int) -> Floats:
        """The durations of one draw; if there are loads, only those vary."""
        random, own = np.random.default_rng(seed), self.own
        if self.loads is not None:
            return self.duration * times_of(self.graph, self.loads, self.ranks, sigma, random).ravel()
        micro = own.micro_batch + own.iteration * (1 + int(own.micro_batch.max(initial=0)))
        each = factors(random, sigma, (self.ranks, 1 + int(micro.max(initial=0))))[:, micro]
        single = factors(random, OWN * sigma, (self.ranks, self.count))
        return np.where(np.tile(np.isin(own.kind, VARIES), self.ranks), self.duration * (each * single).ravel(),
                        self.duration)


def draws(plan: Plan, sigma: float, count: int, seed: int = 0, loads: Sequence[float] | None = None) -> Draws:
    """The times of `count` draws with sums in the policy's order, and, if they are a hint, as the ranks choose them.
    `loads`: of the experts, whose tasks vary then. Raises PlanError for loads that the plan cannot have."""
    ranks = Ranks(plan, None if loads is None else checked(loads, plan.graph, plan.ranks))
    times = [ranks.drawn(sigma, seed + i) for i in range(count)]
    own, hint = (np.array([ranks.steps(time, chosen) for time in times]) if plan.chosen_sums or not chosen else None
                 for chosen in (False, True))
    assert own is not None
    return Draws(own, None, hint)
