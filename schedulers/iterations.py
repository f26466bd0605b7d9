"""Iterations of a synchronised graph: the order to which its lanes settle under a policy.

This module chooses orders; the clock prices them (`minidl.pricing.simulation`). It knows neither schedulers' names nor
devices. All ranks do the same at the same time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.columns import Floats, grouped, spread
from ..core.graph import TaskGraph
from ..core.schedule import Lane, Schedule
from ..core.tasks import SUMS, Kind, unpack
from ..passes.boundary import Mask
from ..passes.one_lane import with_exchanges
from ..plans.memory import MemoryLimitError
from ..pricing.cost import CostModel
from ..pricing.simulation import MOST, Carried, Clock, Lanes
from .ordered import Ordered


@dataclass(frozen=True)
class Rules:
    """The rules of a policy. `crosses`: the layers whose updates wait until the next forward pass needs them: all,
    none, or the `first k`, whose weight gradients also wait; other updates come before that forward pass. `first`:
    which ready gradient goes first: the one that has been ready longest (ready), or the one that the next forward needs
    first (need). `overlaps`: communication has its own lane."""

    crosses: str = "all"
    first: str = "ready"
    overlaps: bool = True


def delayable(graph: TaskGraph) -> list[int]:
    """The units, ascending, of which a weight gradient may wait for the end of the backward pass, since no O waits for
    it, or needs another one."""
    updated = np.unique(graph.unit[graph.kind == Kind.U])
    own = np.unique(graph.unit[(graph.kind == Kind.W) & ~awaited(graph)])
    return [int(u) for u in np.setdiff1d(np.intersect1d(own, updated), np.unique(graph.unit[awaited(graph.unfenced)]))]


def awaited(graph: TaskGraph) -> Mask:
    """Mask of the weight gradients for which a task of the chain waits."""
    chain = np.isin(graph.kind, [int(k) for k in (Kind.F, Kind.O, Kind.B)])
    source = graph.preds.ids[chain[graph.preds.row_of_each()]]
    return spread(source[graph.kind[source] == Kind.W], True, len(graph), False)


class Iterations:
    """The order of the compute lane and of the communication of a graph under a policy.

    Communication gets the order in which it would run if every ready transfer could go next. It is played, iteration
    after iteration, until it repeats. From one iteration to the next only the ends of transfers carry over. That is
    enough, because every transfer ends before the first gradient of the next iteration: each forward waits for its own
    layer's transfer, and no gradient comes before the last forward.
    """

    def __init__(self, graph: TaskGraph, cost: CostModel, rules: Rules) -> None:
        self.graph, self.rules = graph, rules
        carried = Carried.of(graph)
        self._quiet = Clock.of(graph, cost, Lanes.of_tasks([range(len(graph))]), carried).without_contention()
        self._time, self._sync = self._quiet.duration.tolist(), cost.sync
        talk = np.isin(graph.kind, SUMS)
        self.communication, self.compute = np.flatnonzero(talk), np.flatnonzero(~talk)
        self.updates = np.flatnonzero(graph.kind == Kind.U)
        self._preds = graph.preds.lists()
        self._release = {t: [p for p in self._preds[t] if not talk[p]] for t in self.communication.tolist()}
        self._gathers = set(np.flatnonzero(graph.kind == Kind.AG).tolist())
        self._awaits = grouped(  # task -> transfers of the iteration before that it awaits
            (target, source) for source, target in zip(carried.source.tolist(), carried.target.tolist(), strict=True)
            if talk[source] and not talk[target])
        self.delayable = delayable(graph)
        self.body = [t for t in self.compute.tolist() if graph.kind[t] != Kind.U]
        self._found: dict[int, tuple[float, list[int]]] = {}

    def _updates(self, k: int) -> dict[int, list[int]]:
        """Task of the body -> updates just before it; those that do not cross are before the first task."""
        graph = self.graph
        crossing: dict[str, Any] = {"all": graph.unit, "none": [], "first k": self.delayable[:k]}
        crosses = np.isin(graph.unit, crossing[self.rules.crosses]).tolist()
        place, last = {t: i for i, t in enumerate(self.body)}, len(self.body) - 1
        for u in self.updates.tolist()[::-1]:
            after = graph.succs[u].tolist() if crosses[u] else self.body[:1]
            place[u] = min((place.get(t, last) for t in after), default=last)
        return grouped((self.body[place[u]], u) for u in self.updates.tolist())

    def _needed(self, k: int) -> dict[int, tuple[int, int]]:
        """For each transfer, when the next iteration needs it: (place of its update, place in the graph)."""
        by_buffer = grouped((b, t) for t in self.communication.tolist() for b in self.graph.writes[t].tolist())
        updates = self._updates(k)
        need: dict[int, tuple[int, int]] = {}
        for place, u in enumerate(u for t in self.body for u in updates.get(t, [])):
            for b in self.graph.reads[u].tolist():
                for t in by_buffer.get(b, []):
                    need.setdefault(t, (place, t))
        return need

    def main(self, k: int) -> list[int]:
        """The compute lane: updates, forward, backward, with the weight gradients of the first k layers at the end."""
        body = self._delayed(self.delayable[:k]) if k else self.body
        updates = self._updates(k)
        return [t for task in body for t in (*updates.get(task, []), task)]

    def _delayed(self, units: Sequence[int]) -> list[int]:
        """The body with the weight gradients of these units last, in ascending order; what needs them follows."""
        rank, unit = {u: i for i, u in enumerate(units)}, self.graph.unit.tolist()
        last, moves = dict[int, int](), ((self.graph.kind == Kind.W) & ~awaited(self.graph)).tolist()
        for t in self.body:
            own = rank.get(unit[t], -1) if moves[t] else -1
            last[t] = max([own, *(last[p] for p in self._preds[t] if p in last)])
        return sorted(self.body, key=lambda t: (last[t], t))

    def periods(self, counts: Sequence[int]) -> list[float]:
        """The period without contention for each number k of `counts`, with the first k layers' W at the end."""
        tried, new = list[tuple[int, list[int], list[list[int]]]](), [k for k in counts if k not in self._found]
        for k in new:
            main = self.main(k)
            for order in self._orders(main, self._needed(k)):
                tried.append((k, order, [main, order] if self.rules.overlaps else [[*main, *order]]))
        times = self._quiet.periods([lanes for *_, lanes in tried]) if tried else []
        for (k, order, _), time in zip(tried, times, strict=True):
            if k not in self._found or time < self._found[k][0]:
                self._found[k] = time, order
        return [self._found[k][0] for k in counts]

    def _orders(self, main: list[int], needed: dict[int, tuple[int, int]]) -> list[list[int]]:
        """The orders of communication that alternate when iterations repeat; usually one."""
        if not self.rules.overlaps:
            return [self.communication.tolist()]
        talk, scale = self.communication.tolist(), sum(self._time)
        ended = [0.0] * len(self._time)
        begin = 0.0
        seen: list[tuple[Floats, list[int]]] = []
        while True:
            begin = self._compute(main, ended, begin)
            order = self._communicate(ended, needed)
            state = np.array([ended[t] for t in talk]) - begin
            for i, (before, _) in enumerate(seen[::-1], 1):
                if np.abs(state - before).max(initial=0.0) <= 1e-9 * scale:
                    return [list(o) for o in dict.fromkeys(tuple(o) for _, o in seen[len(seen) - i :])]
            if len(seen) == MOST:  # it does not repeat
                return [order]
            seen.append((state, order))

    def _compute(self, main: list[int], ended: list[float], begin: float) -> float:
        """Runs the compute lane; returns when it is free. `ended`: when the transfers of the iteration before ended."""
        free, awaits, time, sync = begin, self._awaits, self._time, self._sync
        for task in main:
            for transfer in awaits.get(task, ()):
                free = max(free, ended[transfer] + sync)
            free += time[task]
            ended[task] = free
        return free

    def _communicate(self, ended: list[float], needed: dict[int, tuple[int, int]]) -> list[int]:
        """Runs the communication lane by the policy's rules; returns its order."""
        sequence, channel = list[int](), 0.0
        release = {t: max((ended[p] for p in before), default=0.0) + self._sync for t, before in self._release.items()}
        for gathers, by_need in ((False, self.rules.first == "need"), (True, True)):
            coming = deque(sorted((t for t in release if (t in self._gathers) == gathers),
                                  key=lambda t: (release[t], t)))
            waiting: list[tuple[tuple[float, int], int]] = []
            while coming or waiting:
                if not waiting:
                    channel = max(channel, release[coming[0]])
                while coming and release[coming[0]] <= channel:
                    t = coming.popleft()
                    heapq.heappush(waiting, (needed.get(t, (0, t)) if by_need else (release[t], t), t))
                t = heapq.heappop(waiting)[1]
                channel += self._time[t]
                ended[t] = channel
                sequence.append(t)
        return sequence

    def schedule(self, k: int = 0) -> Schedule:
        """One iteration on the lanes `main` and `comm`."""
        self.periods([k])
        order, main = self._found[k][1], self.main(k)
        if not self.rules.overlaps:
            return Schedule.of(self.graph, {Lane(0): [*main, *order]})
        if exchanges := np.flatnonzero(self.graph.kind == Kind.X).tolist():
            main = [t for t in main if self.graph.kind[t] != Kind.X]
            order = with_exchanges(self.graph, self._quiet, main, exchanges, order)
        return Schedule.of(self.graph, {Lane(0): main, Lane(0, "comm"): order})

    def ordered(self, cost: CostModel, k: int = 0) -> Ordered:
        """The order to which the lanes settle. Its `notes`: sums of one iteration's times, and `lower_bound`: no order
        of this graph has a shorter period."""
        duration, exchanges = self._quiet.duration, self.graph.kind[self.compute] == Kind.X
        work = duration[self.compute]
        return Ordered(self.schedule(k), {
            "compute": float(work[~exchanges].sum()),
            "communication": float(duration[self.communication].sum() + work[exchanges].sum()),
            "lower_bound": lower_bound(self.graph, cost)})


def search(periods: Callable[[Sequence[int]], Sequence[float]], largest: int,
           fits: Callable[[int], bool] | None = None) -> int:
    """The k in 0..largest with the shortest period; of equal ones, the smallest. `periods`: of several k.

    Throughput is roughly concave in k, so 48 values over the whole range are tried, then ever finer ones around the
    best. Up to 48 layers, every k is tried. Raises MemoryLimitError if no k `fits`. Reconstructed.
    """
    known: dict[int, float] = {}
    low, high = 0, largest
    while True:
        step = -(-(high - low) // 48) or 1
        tried = sorted({*range(low, high + 1, step), high})
        new = [n for n in tried if n not in known and (fits is None or fits(n))]
        known |= dict.fromkeys(tried, np.inf) | known | dict(zip(new, periods(new), strict=True))
        best = min((known[n], n) for n in tried)[1]
        if step == 1:
            break
        low, high = max(0, best - step), min(largest, best + step)
    if not np.isfinite(known[best]):
        raise MemoryLimitError("no k fits the memory limit, not even k = 0")
    return min(n for n, t in known.items() if t <= known[best] + 1e-9 * abs(known[best]))


def lower_bound(graph: TaskGraph, cost: CostModel) -> float:
    """A bound: no order of this loop body has a shorter period. It is the largest of the work of a compute stream, the
    channel's work, and each layer's circuit: forward, weight gradient, and to the end of its communication."""
    duration = cost.durations(graph) + cost.launch
    talk = np.isin(graph.kind, SUMS)
    lanes = max(1, int(unpack(graph.keys).part[~talk].max(initial=0)))  # each part has one
    best = max(float(duration[talk].sum()), float(duration[~talk & (graph.kind != Kind.X)].sum()) / lanes)
    preds, rate = graph.preds.lists(), dict[int, float]()  # buffer -> time of communication per byte
    for t in np.flatnonzero(talk).tolist():
        for b in graph.writes[t].tolist():
            rate[b] = rate.get(b, 0.0) + float(duration[t]) / max(1, int(graph.buffer_bytes[graph.writes[t]].sum()))
    makers = grouped((b, t) for t in np.flatnonzero(~talk & (graph.kind != Kind.U)).tolist()
                     for b in graph.writes[t].tolist())
    for u in np.flatnonzero(graph.kind == Kind.U).tolist():
        mine = [b for b in graph.reads[u].tolist() if b in rate]
        first = next((t for t in graph.succs[u].tolist() if graph.kind[t] == Kind.F), None)
        if not mine or first is None:
            continue
        length = np.full(len(graph), -np.inf)  # the longest way from the layer's forward to the end of each task
        length[first] = duration[first]
        for task in range(first + 1, len(graph)):
            if preds[task] and not talk[task]:
                length[task] = max(length[task], duration[task] + max(length[p] for p in preds[task]))
        ready = max(length[t] for b in mine for t in makers.get(b, ()))
        best = max(best, float(ready + duration[u] + sum(rate[b] * int(graph.buffer_bytes[b]) for b in mine)))
    return best
