"""Schedules that fill and drain once per mini-batch with a fused backward: GPipe, 1F1B, interleaved 1F1B."""

from __future__ import annotations

import numpy as np

from ...core.placement import PipelineError
from ...core.schedule import Schedule
from ...core.tasks import Kind
from .problem import Problem, RankOrder, schedule_of


def gpipe(problem: Problem) -> Schedule:
    """All forwards, then all backwards (GPipe, 2018). Bubble (p-1)(F+O+W), peak m."""
    m = problem.micro_batches
    kind = np.repeat([Kind.F, Kind.B], m)
    micro_batch = np.tile(np.arange(m), 2)
    return schedule_of([RankOrder(kind, np.full(2 * m, rank), micro_batch) for rank in range(problem.ranks)])


def one_f_one_b(problem: Problem) -> Schedule:
    """p - s forwards on rank s, then one backward, one forward in turn (DAPPLE, 2020). Peak p - s, GPipe's bubble."""
    p, m = problem.ranks, problem.micro_batches
    return schedule_of([alternate(min(p - rank, m), np.arange(m), np.full(m, rank), np.arange(m), np.full(m, rank))
                        for rank in range(p)])


def interleaved(problem: Problem, round_size: int | None = None) -> Schedule:
    """1F1B over v chunks per rank, in rounds of micro-batches (Megatron, 2021). Bubble (p-1)(F+O+W)/v.

    A rank takes `round_size` (default p) micro-batches through its first chunk, then through its second, and so on.
    """
    p, m, v = problem.ranks, problem.micro_batches, problem.chunks
    size = checked_round(problem, round_size)
    sides = [rounds(rank, p, m, v, size) for rank in range(p)]
    return schedule_of([alternate(min((v - 1) * size + 2 * (p - 1 - rank), m * v - 1) + 1, *forward[::-1],
                                  *backward[::-1]) for rank, (forward, backward) in enumerate(sides)])


def checked_round(problem: Problem, round_size: int | None) -> int:
    """The round size of an interleaved schedule, by default p. Raises PipelineError with one that fits for another."""
    p, m = problem.ranks, problem.micro_batches
    size = p if round_size is None else round_size
    if size < p:
        raise PipelineError(f"interleaving needs rounds of at least {p} micro-batches (one per rank), not {size}")
    if m % size:
        near = f"{m // size * size} or {(m // size + 1) * size}" if m > size else f"{size}"
        fits = next((n for n in range(p, m + 1) if m % n == 0), None)
        raise PipelineError(f"interleaving over {p} ranks in rounds of {size} needs micro-batches in multiples of "
                            f"{size}, not {m}; use {near}"
                            + (f", or rounds of {fits} (--scheduler-arg round_size={fits})" if fits else ""))
    return size


def rounds(rank: int, p: int, m: int, v: int, size: int
           ) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """(stage, micro-batch) of the forwards and of the backwards of a rank, in rounds of `size` micro-batches."""
    i = np.arange(m * v)
    micro_batch = i // (size * v) * size + i % size
    chunk = i // size % v
    return (chunk * p + rank, micro_batch), ((v - 1 - chunk) * p + rank, micro_batch)


def alternate(warm_up: int, f_micro: np.ndarray, f_stage: np.ndarray, b_micro: np.ndarray,
               b_stage: np.ndarray) -> RankOrder:
    """`warm_up` forwards, then backward and forward in turn, then the remaining backwards."""
    n = len(f_micro)
    place_f = np.where(np.arange(n) < warm_up, np.arange(n), 2 * np.arange(n) - warm_up + 1)
    place_b = np.where(np.arange(n) < n - warm_up, warm_up + 2 * np.arange(n), n + np.arange(n))
    kind, stage, micro = np.empty(2 * n, np.int8), np.empty(2 * n, np.int32), np.empty(2 * n, np.int32)
    kind[place_f], stage[place_f], micro[place_f] = Kind.F, f_stage, f_micro
    kind[place_b], stage[place_b], micro[place_b] = Kind.B, b_stage, b_micro
    return RankOrder(kind, stage, micro)
