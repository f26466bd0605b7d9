"""Zero Bubble with fixed orders: ZB-H1, ZB-H2, and ZB-H1 over interleaved chunks. The backward is O and W apart.

O goes first because the rank below waits for it; W fills the time in which nothing else can run.
"""

from __future__ import annotations

import numpy as np

from ...core.columns import Ints
from ...core.schedule import Schedule
from ...core.tasks import Kind
from .flush import checked_round, rounds
from .problem import Problem, RankOrder, schedule_of


def zb_h1(problem: Problem) -> Schedule:
    """1F1B whose W lags s micro-batches on rank s (Qi et al., 2023): peak p on every rank.

    Bubble (p-1)(F+O-W) for m >= p and W <= min(F, O), without latency.
    """
    p, m = problem.ranks, problem.micro_batches
    return schedule_of([_same_stage(rank, m, p - rank, rank) for rank in range(p)])


def zb_h2(problem: Problem) -> Schedule:
    """Enough forwards in advance to hide the whole warm-up (Qi et al., 2023): peak 2p-1, needs m >= 2p-1.

    Bubble max(0, (p-1)(F+O+2c-2W)) in the largest span, for W <= min(F, O) and a round trip 2c of at most F+O. The
    makespan also holds the shift between ranks.
    """
    p, m = problem.ranks, problem.micro_batches
    return schedule_of([_same_stage(rank, m, 2 * (p - rank) - 1, 2 * rank) for rank in range(p)])


def interleaved_zb(problem: Problem, round_size: int | None = None) -> Schedule:
    """Interleaved 1F1B whose W lags r chunks on rank r: bubble (p-1)(F+O-W)/v, peak p (Zero Bubble's repository)."""
    p, m, v = problem.ranks, problem.micro_batches, problem.chunks
    size = checked_round(problem, round_size)
    return schedule_of([lagging(*rounds(rank, p, m, v, size), min((v - 1) * size + p - rank, m * v), rank)
                        for rank in range(p)])


def _same_stage(stage: int, micro_batches: int, warm_up: int, lag: int) -> RankOrder:
    tasks = np.full(micro_batches, stage), np.arange(micro_batches)
    return lagging(tasks, tasks, min(warm_up, micro_batches), lag)


def lagging(forward: tuple[Ints, Ints], backward: tuple[Ints, Ints], warm_up: int, lag: int) -> RankOrder:
    """`warm_up` forwards; then in turn O, the W of `lag` backwards before, F; then the remaining W.

    `forward` and `backward` are (stage, micro-batch) in order.
    """
    n = len(forward[0])
    i = np.arange(n)
    lag = min(lag, n)
    place_o = warm_up + i + np.maximum(0, i - lag) + np.minimum(i, n - warm_up)
    place_f = np.where(i < warm_up, i, 0)
    place_f[warm_up:] = place_o[: n - warm_up] + 1 + (i[: n - warm_up] >= lag)
    place_w = np.concatenate([place_o[lag:] + 1, 3 * n - lag + i[:lag]])
    kind, stage, micro = np.empty(3 * n, np.int8), np.empty(3 * n, np.int32), np.empty(3 * n, np.int32)
    for place, which, (stages, micro_batches) in ((place_f, Kind.F, forward), (place_o, Kind.O, backward),
                                                  (place_w, Kind.W, backward)):
        kind[place], stage[place], micro[place] = which, stages, micro_batches
    return RankOrder(kind, stage, micro)
