"""Many chunks per rank, stage i on rank i mod p: looped breadth-first, and modulo allocation with fast-forwarding."""

from __future__ import annotations

import numpy as np

from ...schedule import Schedule
from ...tasks import Kind
from .listing import work_conserving
from .problem import Problem, RankOrder, schedule_of


def looped_bfs(problem: Problem) -> Schedule:
    """Every chunk takes all micro-batches before the next one starts (Lamy-Poirier, 2022).

    Bubble (p-1)(F+O+W)/v for m >= p, peak m.
    """
    p, m, v = problem.ranks, problem.micro_batches, problem.chunks
    chunk, micro_batch = np.repeat(np.arange(v), m), np.tile(np.arange(m), 2 * v)
    kind = np.repeat([Kind.F, Kind.B], m * v)
    stage = np.concatenate([chunk, chunk[::-1]]) * p
    return schedule_of([RankOrder(kind, stage + rank, micro_batch) for rank in range(p)])


def modulo(problem: Problem) -> Schedule:
    """Modulo allocation in strict order: all F, all O, all W, in each phase chunk by chunk (out-of-order
    backprop, 2022).

    Bubble (p-1)(F+O)/v for m >= p, peak m.
    """
    p, m, v = problem.ranks, problem.micro_batches, problem.chunks
    chunk = np.repeat(np.arange(v), m)
    kind, micro_batch = np.repeat([Kind.F, Kind.O, Kind.W], m * v), np.tile(np.arange(m), 3 * v)
    stage = np.concatenate([chunk, chunk[::-1], chunk]) * p
    return schedule_of([RankOrder(kind, stage + rank, micro_batch) for rank in range(p)])


def modulo_greedy(problem: Problem) -> Schedule:
    """Modulo allocation, work-conserving: O before F before W, oldest micro-batch first.

    At m = 1: makespan L(F+O) + W over L layers, one per stage.
    """
    return work_conserving(problem, (Kind.O, Kind.F, Kind.W))
