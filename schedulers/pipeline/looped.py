"""Many chunks per rank: looped breadth-first, modulo allocation with fast-forwarding, and Hanayo's waves."""

from __future__ import annotations

import numpy as np

from ...core.columns import Ints
from ...core.placement import Placement
from ...core.placement import modulo as grouped
from ...core.schedule import Schedule
from ...core.tasks import Kind
from .flush import in_turn
from .listing import work_conserving
from .problem import Problem, RankOrder, schedule_of


def looped_bfs(problem: Problem) -> Schedule:
    """Every chunk takes all micro-batches before the next one starts (Lamy-Poirier, 2022).

    Bubble (p-1)(F+O+W)/v for m >= p, peak m.
    """
    p, m, v = problem.ranks, problem.micro_batches, problem.chunks
    stage, micro_batch = np.repeat(np.arange(v), m) * p, np.tile(np.arange(m), v)
    return schedule_of([in_turn((stage + rank, micro_batch), (stage[::-1] + rank, micro_batch), m * v)
                        for rank in range(p)])


def modulo(problem: Problem) -> Schedule:
    """Modulo allocation in strict order: all F, all O, all W, in each phase chunk by chunk (out-of-order
    backprop, 2022). Consecutive stages of a rank, a group, take each micro-batch together; on a link with latency the
    size of groups is picked by simulation.

    Bubble (p-1)(F+O)/v for groups of one stage and m >= p, peak m.
    """
    return schedule_of([_phases(problem.placement.held(rank), problem.micro_batches) for rank in range(problem.ranks)])


def _phases(held: Ints, micro_batches: int) -> RankOrder:
    """All F, all O, all W of a rank's stages: group by group, in a group micro-batch by micro-batch."""
    groups = np.split(held, np.flatnonzero(np.diff(held) > 1) + 1)
    up = [np.tile(group, micro_batches) for group in groups]
    stage = np.concatenate([*up, *(np.tile(group[::-1], micro_batches) for group in groups[::-1]), *up])
    number = [np.repeat(np.arange(micro_batches), len(group)) for group in groups]
    return RankOrder(np.repeat([Kind.F, Kind.O, Kind.W], len(held) * micro_batches), stage,
                     np.concatenate([*number, *number[::-1], *number]))


def modulo_greedy(problem: Problem) -> Schedule:
    """Modulo allocation, work-conserving (defined here): O before F before W, oldest micro-batch first; on a link
    with latency the size of groups is picked by simulation.

    At m = 1, with groups of one of L layers: makespan L(F+O) + W + 2(L-1)c for W <= (p-1)(O+c).
    """
    return work_conserving(problem, (Kind.O, Kind.F, Kind.W))


def hanayo(problem: Problem) -> Schedule:
    """Waves 0 1 .. p-1 p-1 .. 0 with an even number of chunks per rank (Liu et al., 2023).

    Reconstructed from its idea: work-conserving on the wave placement, backward before forward, the oldest micro-batch
    first. For m <= p never slower than 1F1B, without latency; for more it may be slower, and its peak may be above p.
    """
    return work_conserving(problem, (Kind.B, Kind.F), fused=True)


def groupings(problem: Problem, group: int | None = None) -> dict[str, Placement]:
    """The placements to choose from: stage i on rank (i // group) mod p. A free link wants groups of one; on any
    other the number that divides the chunks is searched, and groups that grow (`growing`), unless it is given."""
    p, v = problem.ranks, problem.chunks
    if group is not None or not problem.latency:
        return {str(size := 1 if group is None else group): grouped(p, v, size)}
    sizes = [size for size in range(1, v + 1) if v % size == 0]
    found = {str(size): grouped(p, v, size) for size in sizes}
    return found | {f"growing from {size}": growing(problem, size) for size in sizes[:-1]}


def growing(problem: Problem, first: int) -> Placement:
    """Groups as large as possible while all weight gradients, except in the first `first` stages, hide behind the
    output gradients that follow: groups that end last in the backward pass are small, and groups that end long before
    are large.

    At m = 1 the makespan is about L(F+O) + first W + 2hc with h hops, of which contiguous stages have p-1 and looped
    ones L-1. On p >= log2(v) + 1 ranks and equal times groups double, 1, 2, 4, ..., up to a rank's v stages, so h is
    p-1 and one more for each rank that has not all of its stages yet. No plan that uses all ranks is below
    L(F+O) + W + 2(p-1)c: the last output gradient's own weight gradient comes after it.
    """
    p, v, o, w = problem.ranks, problem.chunks, problem.output_grad, problem.weight_grad
    table = np.empty(problem.stages, np.int64)
    left, busy = np.full(p, v), np.zeros(p)  # of each rank: stages still to come, and O and W of those it has so far
    now = float(w[:first].sum())  # how long before the step's end the output gradients of the next stage end
    stage, last = 0, -1
    while stage < len(table):
        room = np.searchsorted(np.cumsum(w[stage : stage + v]), (now - busy) * (1 + 1e-9), "right")
        size = np.minimum(np.maximum(room, 1), left)  # of the group, if it is this rank's
        size[last] = 0 if last >= 0 and left.sum() > left[last] else size[last]
        rank = int(np.lexsort((np.arange(p), busy, -left, -np.minimum(room, size)))[0])
        took = slice(stage, stage + size[rank])
        table[took], last = rank, rank
        left[rank] -= size[rank]
        busy[rank] += o[took].sum() + w[took].sum()
        now += o[took].sum() + problem.latency
        stage = took.stop
    return Placement("modulo", p, table[None])
