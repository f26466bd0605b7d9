"""One iteration in which each rank runs its first ready task: the simulator of hints (`minidl.passes.hint`).

Task times are drawn: a micro-batch is longer or shorter on all ranks, as sequences are, and each task by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..core.columns import Content, Floats, Ints, Rows, spread
from ..core.graph import TaskGraph
from ..core.schedule import Schedule
from ..core.tasks import Kind, unpack
from ..passes.hint import Hint, joined, windows
from ..pricing.greedy import Played, greedy
from ..pricing.simulation import Clock, Lanes
from .plan import PipelinePlan
from .ranks import iteration

VARIES = (Kind.F, Kind.O, Kind.W, Kind.B, Kind.R)  #: the kinds whose times are drawn
OWN = 0.5  #: the spread of each task by itself, as a share of the spread of micro-batches


@dataclass(frozen=True)
class Picks(Content):
    """The tasks of all ranks, with lanes for each kind and stage. A machine is a rank, or a link in one direction.
    `place`: of each task in the order; `kept`: whether ranks keep it, or take it as a hint."""

    graph: TaskGraph
    schedule: Schedule
    machine: Ints
    place: Ints
    clock: Clock
    delay: Floats
    kept: bool

    @classmethod
    def of(cls, plan: PipelinePlan) -> Picks:
        """The iteration of a plan. Ranks compute on one lane, so tasks do not slow each other down."""
        if kept := plan.hint is None:
            plan = replace(plan, hint=Hint(dict.fromkeys(windows(plan.graph, plan.schedule), plan.micro_batches)))
        talks = not plan.synthetic or plan.cost.link.bandwidth is not None
        graph, schedule = plan.applied if not talks else plan.with_messages
        order = plan.fixed.with_messages[1] if talks else plan.schedule
        if not plan.synthetic:
            graph, schedule, _ = iteration(plan.division)
        of = joined(schedule)
        machines = sorted(set(of), key=lambda lane: (lane.name == "main", lane))  # links come before ranks
        numbers = np.array([machines.index(lane) for lane in of])
        machine = spread(schedule.ids(graph), numbers[schedule.lane_of_each()], len(graph))
        lanes = Lanes.of_tasks([np.flatnonzero(machine == m).tolist() for m in range(len(machines))],
                               [lane.rank for lane in machines])
        clock = Clock.of(graph, plan.cost, lanes).without_contention()
        return cls(graph, schedule, machine, spread(graph.find(order.keys), order.place, len(graph)), clock,
                   clock.edges(lanes)[2], kept)

    @cached_property
    def _chains(self) -> Ints:
        """Pairs (n, 2) of tasks that follow each other on a lane."""
        ids, ptr = self.schedule.ids(self.graph), self.schedule.ptr
        after = np.flatnonzero(spread(ptr[:-1][np.diff(ptr) > 0], False, len(ids), True))
        return np.stack([ids[after - 1], ids[after]], axis=1)

    def ready(self, end: Floats) -> Floats:
        """When each task could run if the others end at `end`."""
        preds = self.graph.preds
        return spread(np.append(preds.row_of_each(), self._chains[:, 1]),
                      np.append(end[preds.ids] + self.delay, end[self._chains[:, 0]]), len(end), by=np.maximum)

    def play(self, duration: Floats | None = None, kept: bool | None = None,
             more: Iterable[tuple[int, int]] = ()) -> Played:
        """One iteration. `kept`: replaces the iteration's. `more`: pairs of tasks of one machine; the second waits for
        the first as well."""
        pairs = self._chains
        if self.kept if kept is None else kept:
            pairs = np.concatenate([np.stack([own[:-1], own[1:]], axis=1) for own in self.orders])
        pairs = np.concatenate([pairs, np.array([*more], np.int64).reshape(-1, 2)])
        preds = self.graph.preds
        source, target = np.append(preds.ids, pairs[:, 0]), np.append(preds.row_of_each(), pairs[:, 1])
        delay = np.append(np.broadcast_to(self.delay, len(preds.ids)), np.zeros(len(pairs)))
        return greedy(Rows.from_pairs(source, target, len(self.graph)), delay[np.argsort(source, kind="stable")],
                      self.machine, self.clock.duration if duration is None else duration, self.place,
                      int(self.machine.max(initial=0)) + 1)

    @cached_property
    def orders(self) -> list[Ints]:
        """The tasks of each machine in the order."""
        return [own[np.argsort(self.place[own], kind="stable")] for m in range(int(self.machine.max(initial=0)) + 1)
                for own in [np.flatnonzero(self.machine == m)]]

    def drawn(self, sigma: float, seed: int) -> Floats:
        """The durations of one draw, with the given ones as means: lognormal, of spread `sigma` for each micro-batch,
        and OWN times that for each task by itself."""
        random, own = np.random.default_rng(seed), unpack(self.graph.keys)
        micro = factors(random, sigma, int(own.micro_batch.max(initial=0)) + 1)[own.micro_batch]
        varies = np.isin(own.kind, VARIES)
        # by key: plans of the same tasks draw the same times
        single = spread(np.argsort(self.graph.keys), factors(random, OWN * sigma, len(own.kind)), len(own.kind))
        return np.where(varies, self.clock.duration * micro * single, self.clock.duration)


def factors(random: np.random.Generator, spread: float, size: int | tuple[int, ...]) -> Floats:
    """Lognormal factors with this spread and the mean 1."""
    return np.exp(spread * random.standard_normal(size) - spread**2 / 2)


@dataclass(frozen=True)
class Draws(Content):
    """Step times by draw: of the policy's own order, of the order with the hint's cap (None if there is no cap), and of
    the hint (None if the order is none)."""

    own: Floats
    fixed: Floats | None
    hint: Floats | None


def draws(own: PipelinePlan, plan: PipelinePlan, sigma: float, count: int, seed: int = 0) -> Draws:
    """The times of `count` draws under a plan with a hint, under its order, and under the policy's own order `own`,
    which has no hint."""
    columns = [[each.play(each.drawn(sigma, seed + i)).end.max() for i in range(count)]
               for each in map(Picks.of, (own, plan.fixed, plan))]
    return Draws(*map(np.array, columns))
