"""LayerPipe and LayerPipe2 as plans: delayed gradients, every rank works on several batches at once.

Time is a sequence of ticks of one period each. In every tick a rank runs each of its computations once, each for a
different batch; the results of one tick reach other ranks in the next. A computation's tick is therefore its batch's
number plus a constant, and the age of its weights is the ticks between a layer's forward and its weight gradient: twice
the number of ranks after it. A micro-batch here is a batch: weights change after each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...core.graph import GraphBuilder, Ints, Role, TaskGraph
from ...core.placement import Versions
from ...core.schedule import Schedule
from ...core.tasks import Kind, unpack
from ...pricing.cost import CostModel, Link
from ...pricing.simulation import Clock, Lanes
from ..ordered import Ordered
from ..partition import LayerCosts, Piece, assign
from .problem import Problem, RankOrder, schedule_of
from .stale import how_kept, read_after


def layerpipe(problem: Problem, method: str | None = None) -> Ordered:
    """F, O and W of layers spread over ranks by linear partition; `inter` (the default) cuts an O in two if that evens
    the loads. Reconstructed.

    A layer is a stage of the problem. The two parts of a cut O are `4O0` and `4O0/1`. The graph holds a ring of weight
    versions per layer, so its edges prove that a version exists when it is read and lasts until its last read. A stage
    of a recorded network has several layers, so its O is cut between two of them, and its second half needs the first
    (`intra`, the default there, cuts none); ranks that read the weights of others have copies
    (`minidl.passes.followers`).
    """
    method = method or ("intra" if problem.recorded else "inter")
    found = assign(LayerCosts.given(*(t.tolist() for t in (problem.forward, problem.output_grad, problem.weight_grad))),
                   problem.ranks, method)
    ticks = Ticks(problem.stages, found.parts, problem.latency, problem.recorded)
    schedule = schedule_of(ticks.orders(problem.ranks, problem.micro_batches))
    own = unpack(schedule.keys)
    versions = Versions(np.maximum(0, own.micro_batch - np.array(ticks.delays)[own.unit]))
    if not problem.recorded:
        return Ordered(schedule, {"method": found.method}, replace(problem.placement, parts=ticks.homes()), versions,
                       ticks.steady(), ticks.graph(problem.micro_batches), ticks.cost())
    homes = np.zeros((Kind.U + 1, 2, problem.stages), np.int64)
    homes[: Kind.B] = ticks.homes()
    homes[Kind.U] = homes[Kind.W]
    halves = {part.layer: 1 - part.share for i, part in enumerate(found.parts) if ticks.part(i)}
    return Ordered(schedule, placement=replace(problem.placement, parts=homes, halves=halves), versions=versions)


def layerpipe2(problem: Problem, history: str = "exact", decay: str | None = None) -> Ordered:
    """Whole stages: every tick a rank runs F of one batch and O, W of another, 2 S batches earlier (2025). Delay(l) =
    2 S(l): the weights of 2 S updates ago, where S is the number of ranks after the stage's. `history`: "exact" keeps
    the 2 S old versions, "average" one moving average of updates in their place (reconstructed), "predicted" none: F
    runs on w + 2 S (w - w of an update ago). The `decay` of an average is "age" (the default), "window" or "pipemare"
    for (d - 1) / d, (d - 1) / (d + 1) or 0.135^(1 / d), where d = 2 S. Time per batch: the busiest rank's work, or more
    if the latency is long."""
    ticks, schedule, delay = _ticked(problem)
    versions = Versions(read_after(unpack(schedule.keys), delay, history), **how_kept(history, decay))
    return Ordered(schedule, versions=versions, steady=None if problem.recorded else ticks.steady())


def adl(problem: Problem, mini_batches: int = 1) -> Ordered:
    """The ticks of `layerpipe2` and an update after each mini-batch, of the mean of its micro-batches' gradients, each
    at the weights that its forward read, 2 S micro-batches ago (accumulated decoupled learning, 2020; with one
    micro-batch the delays of DDG, 2018). A step of training is divided into so many mini-batches; by default it is one.
    So weights are at most ceil(2 S / m) updates old with m micro-batches."""
    every = problem.micro_batches
    ticks, schedule, delay = _ticked(replace(problem, micro_batches=every * mini_batches))
    read = np.maximum(0, unpack(schedule.keys).micro_batch - delay) // every
    return Ordered(schedule, versions=Versions(read, every),
                   steady=None if problem.recorded else every * ticks.steady())


def petra(problem: Problem) -> Ordered:
    """The ticks of `layerpipe2` for reversible networks such as revnet, without old weights or activations (PETRA,
    2406.02052): a backward computes its stage's inputs from its outputs, which come down with the gradients, on the
    newest weights; its forward ran on weights of 2 S updates ago. Time per batch: as `layerpipe2`, with a forward more
    in O."""
    ticks, schedule, delay = _ticked(problem)
    read = read_after(unpack(schedule.keys), delay, "predicted")
    return Ordered(schedule, versions=Versions(read, history="none"),
                   steady=None if problem.recorded else ticks.steady())


def _ticked(problem: Problem) -> tuple[Ticks, Schedule, Ints]:
    """The ticks of whole stages, their order, and how many ticks after its forward each entry's backward runs."""
    ticks = _staged(problem)
    schedule = schedule_of(ticks.orders(problem.ranks, problem.micro_batches))
    delay: Ints = 2 * (problem.ranks - 1 - problem.placement.table[0, unpack(schedule.keys).unit])
    return ticks, schedule, delay


def _staged(problem: Problem) -> Ticks:
    times = {Kind.F: problem.forward, Kind.O: problem.output_grad, Kind.W: problem.weight_grad}
    return Ticks(problem.stages, [Piece(stage, kind, float(time[stage]), processor=int(rank)) for stage, rank in
                                  enumerate(problem.placement.table[0]) for kind, time in times.items()],
                 problem.latency)


@dataclass(frozen=True)
class Ticks:
    """The ticks of parts on processors. `at[i]` is the tick in which part i runs batch 0. `inner`: W of a layer also
    reads the result of its own O, as for a layer that represents several, and the second part of an O reads the
    first's."""

    layers: int
    parts: Sequence[Piece]
    latency: float
    inner: bool = False

    @cached_property
    def of(self) -> dict[tuple[int, Kind], list[int]]:
        """(layer, kind) -> the parts of this computation."""
        found: dict[tuple[int, Kind], list[int]] = {}
        for i, part in enumerate(self.parts):
            found.setdefault((part.layer, part.kind), []).append(i)
        return found

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
        """The number of part i within its layer's computation: 1 for the second half of a cut output gradient, else
        0."""
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
