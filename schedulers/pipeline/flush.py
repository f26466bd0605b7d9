"""Schedules that fill and drain once per mini-batch with a fused backward: GPipe, 1F1B, interleaved 1F1B."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.columns import Ints
from ...core.placement import PipelineError
from ...core.schedule import Schedule
from ...core.tasks import Kind
from .problem import Problem, RankOrder, schedule_of

Tasks = tuple[Ints | int, Ints]  #: stages (one number if all are equal) and micro-batches, in order


def gpipe(problem: Problem) -> Schedule:
    """All forwards, then all backwards (GPipe, 2018). Bubble (p-1)(F+O+W), peak m."""
    return same_stage(problem, [problem.micro_batches] * problem.ranks)


def one_f_one_b(problem: Problem) -> Schedule:
    """p - s forwards on rank s, then one backward, one forward in turn (DAPPLE, 2020). Peak p - s, GPipe's bubble."""
    return same_stage(problem, range(problem.ranks, 0, -1))


def interleaved(problem: Problem) -> Schedule:
    """1F1B over v chunks per rank, in rounds of micro-batches (Megatron, 2021). Bubble (p-1)(F+O+W)/v for m >= p.

    A rank takes a round of micro-batches through its first chunk, then through its second, and so on; m is cut in
    m // p equal rounds, at least one (as torch does).
    """
    p, v, size = problem.ranks, problem.chunks, round_size(problem)
    return schedule_of([in_turn(*rounds(problem, rank, size), (v - 1) * size + 2 * (p - 1 - rank) + 1)
                        for rank in range(p)])


def round_size(problem: Problem) -> int:
    """The round size of an interleaved schedule. Raises PipelineError with numbers of micro-batches that fit."""
    p, m = problem.ranks, problem.micro_batches
    count = max(1, m // p)
    if m % count:
        less, more = (next(n for n in some if not n % max(1, n // p)) for some in (range(m, 0, -1), range(m, 2 * m)))
        raise PipelineError(f"interleaving over {p} ranks in {count} equal rounds cannot take {m} micro-batches; use "
                            f"{less} or {more}")
    return m // count


def rounds(problem: Problem, rank: int, size: int) -> tuple[Tasks, Tasks]:
    """(stage, micro-batch) of the forwards and of the backwards of a rank, in rounds of `size` micro-batches."""
    p, v = problem.ranks, problem.chunks
    i = np.arange(problem.micro_batches * v)
    micro_batch = i // (size * v) * size + i % size
    chunk = i // size % v
    return (chunk * p + rank, micro_batch), ((v - 1 - chunk) * p + rank, micro_batch)


def in_turn(forward: Tasks, backward: Tasks, warm_up: int, lag: int | None = None) -> RankOrder:
    """`warm_up` forwards; then in turn O, the W of `lag` backwards before, F; then the remaining W. Without `lag`, B in
    place of O and no W."""
    n = len(forward[1])
    i = np.arange(n)
    warm_up, late = min(warm_up, n), n if lag is None else min(lag, n)
    place_o = warm_up + i + np.maximum(0, i - late) + np.minimum(i, n - warm_up)
    place_f = np.where(i < warm_up, i, 0)
    place_f[warm_up:] = place_o[: n - warm_up] + 1 + (i[: n - warm_up] >= late)
    place_w = np.concatenate([place_o[late:] + 1, 3 * n - late + i[:late]])
    parts = [(place_f, Kind.F, forward), (place_o, Kind.B if lag is None else Kind.O, backward),
             (place_w, Kind.W, backward)][: 2 if lag is None else 3]
    kind, stage, micro = (np.empty(len(parts) * n, np.int64) for _ in range(3))
    for place, which, (stages, micro_batches) in parts:
        kind[place], stage[place], micro[place] = which, stages, micro_batches
    return RankOrder(kind, stage, micro)


def same_stage(problem: Problem, warm_up: Sequence[int], lag: Sequence[int] | None = None) -> Schedule:
    """`in_turn` on one stage per rank; `warm_up` and `lag` by rank."""
    micro_batch = np.arange(problem.micro_batches)
    return schedule_of([in_turn((rank, micro_batch), (rank, micro_batch), warm_up[rank],
                                None if lag is None else lag[rank]) for rank in range(problem.ranks)])
