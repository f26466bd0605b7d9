"""Ticks: a pipeline in which every rank runs each of its computations once a period, each for a different batch.

The results of one tick reach other ranks in the next. A computation's tick is therefore its batch's number plus a
constant, and the age of its weights is the ticks between a layer's forward and its weight gradient: twice the number of
ranks after it. A micro-batch here is a batch: weights change after each. `layerpipe.py` has the policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...core.columns import Ints, grouped
from ...core.graph import GraphBuilder, Role, TaskGraph
from ...core.tasks import Kind
from ...pricing.cost import CostModel, Link
from ...pricing.simulation import Clock, Lanes
from ..partition import Piece
from .problem import RankOrder


@dataclass(frozen=True)
class Ticks:
    """The ticks of parts on processors. `at[i]` is the tick in which part i runs batch 0. `inner`: W of a layer also
    reads the result of its own O, as for a layer that represents several; the second part of an O reads the first."""

    layers: int
    parts: Sequence[Piece]
    latency: float
    inner: bool = False

    @cached_property
    def of(self) -> dict[tuple[int, Kind], list[int]]:
        """(layer, kind) -> the parts of this computation."""
        return grouped(((part.layer, part.kind), i) for i, part in enumerate(self.parts))

    def needs(self, i: int) -> list[int]:
        """The parts whose results of the same batch part i reads: activations and gradients."""
        layer, kind = self.parts[i].layer, self.parts[i].kind
        below = [] if layer == 0 else self.of[layer - 1, Kind.F]
        if kind == Kind.F:
            return below
        above = self.of[(self.layers - 1, Kind.F) if layer == self.layers - 1 else (layer + 1, Kind.O)]
        own = self.of[layer, Kind.O] if self.inner else []
        own = own if kind == Kind.W else own[: self.part(i)]
        return [*above, *(below if kind == Kind.W else self.of[layer, Kind.F]), *own]

    @cached_property
    def sequence(self) -> list[int]:
        """The parts in the order of one tick: forwards up, output gradients down, weight gradients."""
        return sorted(range(len(self.parts)), key=lambda i: (
            self.parts[i].kind, self.parts[i].layer * (1 if self.parts[i].kind == Kind.F else -1), i))

    def apart(self, i: int, j: int) -> int:
        return int(self.parts[i].processor != self.parts[j].processor)

    @cached_property
    def at(self) -> list[int]:
        at = [0] * len(self.parts)
        for i in self.sequence:
            at[i] = max((at[j] + self.apart(i, j) for j in self.needs(i)), default=0)
        return at

    @cached_property
    def delays(self) -> list[int]:
        """The age of each layer's weights, in updates."""
        return [self.at[self.of[layer, Kind.W][0]] - self.at[self.of[layer, Kind.F][0]] for layer in range(self.layers)]

    def ring(self, layer: int) -> int:
        """The number of weight versions that a layer needs: 2S + 1 if its computations share a rank."""
        w = self.of[layer, Kind.W][0]
        begin = self.at[self.of[layer, Kind.F][0]]
        return 1 + max(self.delays[layer], *(self.at[o] - begin + self.apart(o, w) for o in self.of[layer, Kind.O]))

    def part(self, i: int) -> int:
        """The number of part i within its layer's computation: 1 for the second half of a cut O, else 0."""
        return self.of[self.parts[i].layer, self.parts[i].kind].index(i)

    def runs(self, batches: int) -> list[tuple[int, int]]:
        """(part, batch) in the order of ticks."""
        last = max(self.at) + batches
        return [(i, t - self.at[i]) for t in range(last) for i in self.sequence if 0 <= t - self.at[i] < batches]

    def orders(self, ranks: int, batches: int) -> list[RankOrder]:
        """The order of each rank."""
        mine: list[list[tuple[Kind, int, int, int]]] = [[] for _ in range(ranks)]  # kind, layer, batch, part
        for i, batch in self.runs(batches):
            part = self.parts[i]
            mine[part.processor].append((part.kind, part.layer, batch, self.part(i)))
        columns = [[*zip(*own, strict=True)] or [()] * 4 for own in mine]
        return [RankOrder(kind, layer, batch, part=part) for kind, layer, batch, part in columns]

    def graph(self, batches: int) -> TaskGraph:
        """The tasks in the order of ticks. Version v of a layer's weights is in slot v mod ring."""
        builder = GraphBuilder()
        slots = [[builder.buffer(f"weights {layer}, slot {k}", 0, Role.PARAMETER) for k in range(self.ring(layer))]
                 for layer in range(self.layers)]
        made: dict[tuple[int, int], int] = {}
        for i, batch in self.runs(batches):
            part = self.parts[i]
            ring = slots[part.layer]
            reads = [made[j, batch] for j in self.needs(i)]
            if part.kind == Kind.W:  # it makes the next version of the newest weights
                reads.append(ring[batch % len(ring)])
                writes = [ring[(batch + 1) % len(ring)]]
            else:
                reads.append(ring[max(0, batch - self.delays[part.layer]) % len(ring)])
                name = f"{part.kind.name}{part.layer}{'/1' * self.part(i)} of batch {batch}"
                made[i, batch] = builder.buffer(name, 0)
                writes = [made[i, batch]]
            builder.task(part.layer, part.kind, batch, part=self.part(i), reads=reads, writes=writes)
        return builder.build(name=f"{self.layers} layers, {batches} batches")

    def homes(self) -> Ints:
        """The rank of each [kind, part, layer]."""
        homes = np.zeros((max(Kind.F, Kind.O, Kind.W) + 1, 2, self.layers), np.int64)
        for i, part in enumerate(self.parts):
            homes[part.kind, self.part(i), part.layer] = part.processor
        return homes

    def cost(self) -> CostModel:
        """The times of the parts, by layer."""
        kinds = {name: [0.0] * self.layers for name in ("F", "O", "O/1", "W")}
        for i, part in enumerate(self.parts):
            kinds[part.kind.name + "/1" * self.part(i)][part.layer] = part.time
        return CostModel(kinds=kinds, link=Link(self.latency), unit="")

    def steady(self) -> float:
        """Time per batch: the time of a tick, which waits for data and weight versions of earlier ticks."""
        edges = []  # (source, target, ticks from the source's to the target's)
        for i, part in enumerate(self.parts):
            edges += [(j, i, self.at[i] - self.at[j]) for j in self.needs(i)]
            if part.kind != Kind.W:
                w, delay = self.of[part.layer, Kind.W][0], self.delays[part.layer]
                since = self.at[i] - self.at[w]
                edges += [(w, i, delay + 1 + since), (i, w, self.ring(part.layer) - 1 - delay - since)]
        ranks = sorted({p.processor for p in self.parts})
        lanes = [[i for i in self.sequence if self.parts[i].processor == rank] for rank in ranks]
        source, target, distance = np.array(edges).T
        clock = Clock.of_loop([p.time for p in self.parts], source, target, distance, self.latency)
        return clock.exact_period(Lanes.of_tasks(lanes, ranks))
