"""Iterations of a synchronised graph in a row: the order of its lanes under a policy, and the period they settle to.

Knows neither names of schedulers nor devices; every rank does the same at the same time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cost import CostModel
from ..graph import COMMUNICATION, Floats, Kind, TaskGraph
from ..schedule import Lane, Schedule


@dataclass(frozen=True)
class Policy:
    """`cut`: what travels together: a layer's gradients, a bucket of layers, or parts of a layer. `crosses`: updates
    wait until the next forward needs them. `first`: which of the ready gradients goes first, the one that has waited
    longest (ready) or the one that the next forward needs first (need)."""

    cut: str = "layer"
    crosses: bool = True
    first: str = "ready"
    overlaps: bool = True
    scatter: bool = False
    delays: bool = False


def delayable(graph: TaskGraph) -> list[int]:
    """Units, ascending, whose weight gradients may wait for the end of the backward pass: no output gradient needs them."""
    chain = np.isin(graph.kind, [int(k) for k in (Kind.F, Kind.O, Kind.B)])
    source, target = graph.preds.ids, graph.preds.row_of_each()
    needed = np.unique(graph.unit[source[(graph.kind[source] == Kind.W) & chain[target]]])
    own = np.unique(graph.unit[graph.kind == Kind.W])
    updated = np.unique(graph.unit[graph.kind == Kind.U])
    return [int(u) for u in np.setdiff1d(np.intersect1d(own, updated), needed)]


class Steady:
    """Iterations in a row, one after the other: the state that passes the border is when each transfer ends.

    Correct because every transfer of an iteration ends before the next one's first gradient: each forward waits for
    its own layer's, and no gradient comes before the last forward.
    """

    def __init__(self, graph: TaskGraph, cost: CostModel, of: Policy) -> None:
        self.graph, self.of = graph, of
        self.duration = cost.durations(graph) + cost.launch
        self._time = self.duration.tolist()
        talk = np.isin(graph.kind, [int(k) for k in COMMUNICATION])
        self.communication, self.compute = np.flatnonzero(talk), np.flatnonzero(~talk)
        self.updates = np.flatnonzero(graph.kind == Kind.U)
        preds = graph.preds
        self.preds = [preds[t][~talk[preds[t]]].tolist() for t in range(len(graph))]
        writer = {b: t for t in self.communication.tolist() for b in graph.writes[t].tolist()}
        by_buffer: dict[int, list[int]] = {}
        for t in self.communication.tolist():
            for b in graph.writes[t].tolist():
                by_buffer.setdefault(b, []).append(t)
        self.awaits = {u: sorted({writer[b] for b in graph.reads[u].tolist() if b in writer}) for u in self.updates.tolist()}
        self.body = [t for t in self.compute.tolist() if graph.kind[t] != Kind.U]
        self.main_updates = self._placed_updates()
        self.need = self._need(by_buffer)

    def _placed_updates(self) -> dict[int, list[int]]:
        """Task of the body -> updates just before it; all of them before the first where a barrier is kept."""
        graph = self.graph
        if not self.of.crosses:
            return {self.body[0]: self.updates.tolist()}
        place = {t: i for i, t in enumerate(self.body)}
        last = len(self.body) - 1
        position: dict[int, int] = {}
        for u in self.updates.tolist()[::-1]:
            after = graph.succs[u].tolist()
            position[u] = min((place[t] if t in place else position.get(t, last) for t in after), default=last)
        before: dict[int, list[int]] = {}
        for u in sorted(position, key=lambda u: (position[u], u)):
            before.setdefault(self.body[position[u]], []).append(u)
        return before

    def _need(self, by_buffer: dict[int, list[int]]) -> dict[int, tuple[int, int]]:
        """For each transfer when the next iteration wants it: (place of its update, place in the graph)."""
        order = [u for t in self.body for u in self.main_updates.get(t, [])]
        need: dict[int, tuple[int, int]] = {}
        for place, u in enumerate(order):
            for b in self.graph.reads[u].tolist():
                for t in by_buffer.get(b, []):
                    need.setdefault(t, (place, t))
        return need

    def main(self, k: int) -> list[int]:
        """The compute lane: updates, forward, backward, with the weight gradients of the first k layers at the end."""
        body = self.body if not k else _delayed(self.graph, self.body, delayable(self.graph)[:k])
        return [t for task in body for t in (*self.main_updates.get(task, []), task)]

    def run(self, k: int = 0, order: list[int] | None = None) -> tuple[float, list[int]]:
        """The period, and the order of communication in the steady state; of a given order, if one is given."""
        if not self.of.overlaps:
            return float(self.duration.sum()), self.communication.tolist()
        main = self.main(k)
        talk = self.communication
        ended = [0.0] * len(self.graph)
        begin = 0.0
        seen: list[tuple[float, Floats, list[int]]] = []
        scale = float(self.duration.sum())
        while True:
            free = self._compute(main, ended, begin)
            sequence = self._communicate(ended, order)
            state = np.array(ended)[talk] - free
            for i, (then, before, _) in enumerate(seen[::-1], 1):
                if np.abs(state - before).max(initial=0.0) <= 1e-9 * scale:
                    orders = {tuple(o): o for _, _, o in seen[len(seen) - i :]}
                    if len(orders) == 1 or order is not None:
                        return (free - then) / i, sequence
                    return min((self.run(k, o) for o in orders.values()), key=lambda found: found[0])
            if len(seen) == 64:  # it wanders: judged by the last half of the way
                period = (free - seen[32][0]) / 32
                return (period, sequence) if order is not None else self.run(k, sequence)
            seen.append((free, state, sequence))
            begin = free

    def _compute(self, main: list[int], ended: list[float], begin: float) -> float:
        """Runs the compute lane; returns when it is free. `ended` holds last iteration's transfers, and gets the tasks."""
        free = begin
        for task in main:
            for transfer in self.awaits.get(task, ()):
                free = max(free, ended[transfer])
            free += self._time[task]
            ended[task] = free
        return free

    def _communicate(self, ended: list[float], order: list[int] | None) -> list[int]:
        """Runs the communication lane, in `order` or as the policy says; returns the order."""
        sequence: list[int] = []
        channel = 0.0
        talk = self.communication.tolist()
        release = {t: max((ended[p] for p in self.preds[t]), default=0.0) for t in talk}
        gather = set(np.flatnonzero(self.graph.kind == Kind.AG).tolist())
        phases = [[t] for t in order] if order is not None else [[t for t in talk if t not in gather], sorted(gather)]
        for phase in phases:
            by_need = order is None and (self.of.first == "need" or phase is phases[1])
            coming = sorted(phase, key=lambda t: (release[t], t))
            waiting: list[tuple[tuple[float, int], int]] = []
            at = 0
            while at < len(coming) or waiting:
                if not waiting:
                    channel = max(channel, release[coming[at]])
                while at < len(coming) and release[coming[at]] <= channel:
                    t = coming[at]
                    heapq.heappush(waiting, (self.need.get(t, (0, t)) if by_need else (release[t], t), t))
                    at += 1
                t = heapq.heappop(waiting)[1]
                channel += self._time[t]
                ended[t] = channel
                sequence.append(t)
        return sequence

    def schedule(self, k: int = 0) -> Schedule:
        """One iteration on the lanes `main` and `comm`."""
        order = self.run(k)[1]
        if not self.of.overlaps:
            return Schedule.of(self.graph, {Lane(0): [*self.main(k), *order]})
        return Schedule.of(self.graph, {Lane(0): self.main(k), Lane(0, "comm"): order})


def _delayed(graph: TaskGraph, body: Sequence[int], units: Sequence[int]) -> list[int]:
    """The body with the weight gradients of these units last, in ascending order; nothing before what it needs."""
    rank = {u: i for i, u in enumerate(units)}
    key = {t: (1, rank[int(graph.unit[t])], t) if graph.kind[t] == Kind.W and int(graph.unit[t]) in rank else (0, 0, t) for t in body}
    missing = {t: sum(p in key for p in graph.preds[t].tolist()) for t in body}
    ready = [key[t] for t in body if not missing[t]]
    heapq.heapify(ready)
    order = []
    while ready:
        task = heapq.heappop(ready)[2]
        order.append(task)
        for s in graph.succs[task].tolist():
            if s in missing:
                missing[s] -= 1
                if not missing[s]:
                    heapq.heappush(ready, key[s])
    return order
