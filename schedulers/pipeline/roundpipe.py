"""RoundPipe: forwards and backwards are cut apart, and slots of either kind go around the ranks (2604.27085).

A slot is a run of neighbouring layers, through which all micro-batches go in one direction, on one rank; the next slot
is on the next rank. So weights have no rank of their own, a stage may be any size below the longest slot, and the
number of slots need not be a multiple of anything. Forward slots come first, then the joined slot, which has the
forwards of the last layers and their backwards, then backward slots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise, takewhile

import numpy as np

from ...core.columns import Ints
from ...core.graph import GraphBuilder, Role, TaskGraph
from ...core.placement import PipelineError, apart
from ...core.schedule import Lane
from ...core.tasks import Kind, pack, task_name
from ..ordered import Ordered
from .problem import Problem, RankOrder, schedule_of

ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Slot:
    """The layers whose forwards run, ascending, and those whose backwards run after them, descending."""

    forward: range
    backward: range


def roundpipe(problem: Problem, threshold: float = 1.1, fetch: float = 0.0) -> Ordered:
    """Slots of layers go around the ranks, each with all micro-batches; the chains of forwards and of backwards are cut
    apart, and the last forwards joined with the first backwards (RoundPipe, 2026). A stage of the problem is a layer.
    The longest slot takes at most `threshold` times as long as the longest layer. With k p slots of equal length and m
    >= p, the makespan is k m + p - 1 slots.

    Ranks that run forwards of a layer have a copy of its weights, which follow each update. Activations are sent to
    backwards, or computed again there (`recompute`). On given times, `fetch` is the time in which a layer's weights
    come to a rank (H), or its gradients go home (D): a rank has room for the weights of two slots, so that it
    fetches the next one's while it works. Recorded steps do so by `offload="weights"`.
    """
    for wrong, why in ((not threshold >= 1, f"threshold is {threshold:g}; a slot takes at least as long as the longest "
                                            f"layer, so it must be at least 1"),
                       (not 0 <= fetch < np.inf, f"fetch is {fetch:g}; a time must be finite and not negative"),
                       (fetch and problem.recorded, "fetch is for given times; give --offload weights")):
        if wrong:
            raise PipelineError(f"roundpipe: {why}")
    forward, backward = problem.forward.tolist(), problem.fused.tolist()
    slots, ranks, m = best_cut(forward, backward, problem.ranks, threshold), problem.ranks, problem.micro_batches
    up, down = np.zeros((2, problem.stages), np.int64)
    for i, slot in enumerate(slots):
        up[slot.forward] = down[slot.backward] = i % ranks
    place = apart("rounds", ranks, up, down)
    schedule = schedule_of([_in_order(slots[rank::ranks], m) for rank in range(ranks)])
    longest = max(sum(forward[i] for i in slot.forward) + sum(backward[i] for i in slot.backward) for slot in slots)
    notes = {"rounds": {"slots": len(slots), "longest": float(f"{longest:.6g}"),
                        "layers": [[len(slot.forward), len(slot.backward)] for slot in slots]}}
    if not fetch:
        return Ordered(schedule, notes, place)
    graph, lanes, times = _fetching(slots, ranks, m, fetch)
    return Ordered(schedule.with_lanes(lanes), notes, place, graph=graph, cost=replace(problem.cost, tasks=times))


def best_cut(forward: Sequence[float], backward: Sequence[float], ranks: int, threshold: float = 1.1) -> list[Slot]:
    """The slots for these times of layers. The bound T on a slot's time is tried over the times of all runs of layers
    between the longest layer's and `threshold` times it; the one with the least max(slots, ranks) T is taken, as in the
    released code. (There every backward computes its forward again, and the joined slot is timed as if it did. Here it
    is timed as its tasks are: forwards and backwards.)"""
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    least = max(*forward, *backward, both[-1])
    cuts = partial(cut, forward, backward)
    most = least * threshold * ROUNDING
    runs = (accumulate(times[first:]) for times in (forward, backward, both) for first in range(len(times)))
    bounds = sorted({least, *(total for run in runs for total in takewhile(lambda total: total <= most, run)
                              if total > least)})
    cost, i, best = np.inf, 0, list[Slot]()
    while i < len(bounds):  # of bounds with as many slots the first is best
        slots = cuts(bounds[i])
        if max(len(slots), ranks) * bounds[i] < cost:
            cost, best = max(len(slots), ranks) * bounds[i], slots
        if len(slots) <= ranks:
            break
        i = bisect_left(bounds, 1 - len(slots), i, key=lambda most: -len(cuts(most)))
    return best


def cut(forward: Sequence[float], backward: Sequence[float], most: float) -> list[Slot]:
    """Slots of at most `most`, at least the time of each layer and of the last one's forward and backward: as many last
    layers joined as fit, forwards before them filled from the last one on, backwards from the first layer on."""
    count = len(forward)
    rest = count - next(_runs([f + b for f, b in zip(reversed(forward), reversed(backward), strict=True)], most))
    tops = [rest, *(rest - size for size in accumulate(_runs(forward[:rest][::-1], most)))]
    ends = [0, *accumulate(_runs(backward[:rest], most))]
    none = range(0)
    return [*(Slot(range(low, high), none) for low, high in pairwise(tops[::-1])),
            Slot(range(rest, count), range(count - 1, rest - 1, -1)),
            *(Slot(none, range(high - 1, low - 1, -1)) for high, low in pairwise(ends[::-1]))]


def _runs(times: Sequence[float], most: float) -> Iterator[int]:
    """How many items each run has, if it takes as many as fit."""
    size, total = 0, 0.0
    for time in times:
        if size and total + time > most * ROUNDING:
            yield size
            size, total = 0, 0.0
        size, total = size + 1, total + time
    if size:
        yield size


def _in_order(slots: Sequence[Slot], micro_batches: int) -> RankOrder:
    """All micro-batches through one slot after the other."""
    tasks = [(kind, layer, i) for slot in slots for i in range(micro_batches)
             for kind, layers in ((Kind.F, slot.forward), (Kind.B, slot.backward)) for layer in layers]
    return RankOrder(*zip(*tasks, strict=True)) if tasks else RankOrder((), (), ())


def _fetching(slots: Sequence[Slot], ranks: int, micro_batches: int, fetch: float
              ) -> tuple[TaskGraph, dict[Lane, Ints], dict[str, float]]:
    """The step with an H before each slot and a D after each one that has backwards, the lanes of these, and their
    times. They are named by the slot's first layer, or its first backward. A rank has two places for weights and
    gradients, which its slots use in turns."""
    made, times, lanes = GraphBuilder(), dict[str, float](), dict[Lane, list[int]]()
    layers = 1 + max(slot.backward[0] for slot in slots if slot.backward)
    value = {(kind, layer, i): made.buffer(f"the {what} of stage {layer}, micro-batch {i}", 0, role)
             for kind, what, role in ((Kind.F, "activation", Role.ACTIVATION), (Kind.B, "gradient", Role.GRADIENT))
             for i in range(micro_batches) for layer in range(layers)}  # as in a `stage_graph`
    places = {(rank, turn, what): made.buffer(f"{what} {turn} on rank {rank}", 0, Role.WORKSPACE)
              for rank in range(ranks) for turn in range(2) for what in ("weights", "gradients")}
    for number, slot in enumerate(slots):
        rank, turn = number % ranks, number // ranks % 2
        weights, gradients = places[rank, turn, "weights"], places[rank, turn, "gradients"]
        first, part = (slot.forward[0], 0) if slot.forward else (slot.backward[0], 1)
        copies = [(Kind.H, first, part, "in", len({*slot.forward, *slot.backward}))]
        made.task(first, Kind.H, part=part, writes=[weights])
        for i in range(micro_batches):
            for layer in slot.forward:
                below = [value[Kind.F, layer - 1, i]] if layer else []
                made.task(layer, Kind.F, i, reads=[weights, *below], writes=[value[Kind.F, layer, i]])
            for layer in slot.backward:
                above = [value[Kind.B, layer + 1, i]] if layer + 1 < layers else []
                made.task(layer, Kind.B, i, reads=[weights, gradients, value[Kind.F, layer, i], *above],
                          writes=[value[Kind.B, layer, i], gradients])
        if slot.backward:
            copies.append((Kind.D, slot.backward[0], 1, "out", len(slot.backward)))
            made.task(slot.backward[0], Kind.D, part=1, reads=[gradients])
        for kind, layer, part, lane, count in copies:
            key = int(pack(layer, kind, part=part))
            times[task_name(key)] = fetch * count
            lanes.setdefault(Lane(rank, lane), []).append(key)
    return made.build(name="a step that fetches weights"), {
        lane: np.array(keys, np.int64) for lane, keys in lanes.items()}, times
