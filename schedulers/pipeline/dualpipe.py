"""DualPipe and DualPipeV (DeepSeek, 2024 and 2025): a forward of one stream runs as a pair with a backward of the
other.

Both have the same eight steps; they differ in what the two streams are. The results of a pair are visible at its end.
"""

from __future__ import annotations

import numpy as np

from ...core.schedule import Schedule
from ...core.tasks import Kind
from .problem import Problem, RankOrder, schedule_of

Entry = tuple[Kind, int, bool]  # kind, stream, whether it is a pair with the entry before


def dualpipe(problem: Problem) -> Schedule:
    """Two directions with half of the micro-batches each (DualPipe; DeepSeek, 2024); every rank holds two full stages,
    so weights exist twice. It adds up the gradients of each half of the micro-batches separately, and then both sums,
    so it is bit-identical to Chimera and to one process that does so (`minidl.micro_batch(number, group=...)`), but
    not to other schedules.

    Needs even numbers of ranks and micro-batches, and m >= 2p. Peak p + 1.
    """
    p, half = problem.ranks, problem.micro_batches // 2
    orders = []
    for rank in range(p):
        up = rank >= p // 2
        streams = [(rank, 0), (p - 1 - rank, half)]
        entries = _steps(p // 2, min(rank, p - 1 - rank), half)
        orders.append(_order(entries, streams[::-1] if up else streams))
    return schedule_of(orders)


def dualpipe_v(problem: Problem) -> Schedule:
    """One direction over a V of 2p stages; the two streams are a rank's two chunks (DualPipeV; DeepSeek, 2025). Needs
    m >= 2p. Peak p + 1/2."""
    p, m = problem.ranks, problem.micro_batches
    return schedule_of([_order(_steps(p, rank, m), [(rank, 0), (2 * p - 1 - rank, 0)]) for rank in range(p)])


def _steps(depth: int, place: int, micro_batches: int) -> list[Entry]:
    """The eight steps of the rank at `place` of `depth` (depth - 1: where the streams turn or meet)."""
    inner = depth - place - 1
    entries: list[Entry] = []
    waiting: list[int] = []  # streams of the postponed weight gradients, oldest first

    def forward(stream: int) -> None:
        entries.append((Kind.F, stream, False))

    def backward(stream: int, split: bool = False) -> None:
        entries.append((Kind.O if split else Kind.B, stream, False))
        if split:
            waiting.append(stream)

    def weight() -> None:
        entries.append((Kind.W, waiting.pop(0), False))

    def pair(f: int, b: int) -> None:
        entries.extend([(Kind.F, f, False), (Kind.B, b, True)])

    for _ in range(2 * inner):  # 1
        forward(0)
    for _ in range(place + 1):  # 2
        forward(0)
        forward(1)
    for _ in range(inner):  # 3
        backward(1, split=True)
        weight()
        forward(1)
    for i in range(micro_batches - 2 * depth + place + 1):  # 4
        if i == 0 and inner == 0:  # a pair would only delay what both neighbours wait for
            forward(0)
            backward(1)
        else:
            pair(0, 1)
        pair(1, 0)
    for _ in range(inner):  # 5
        backward(1)
        pair(1, 0)
    split, turn = False, (place + 1) // 2
    for i in range(place + 1):  # 6: the second half of these backwards postpones its weight gradients
        split = split or (i == turn and place % 2 == 1)
        backward(1, split)
        split = split or (i == turn and place % 2 == 0)
        backward(0, split)
    for _ in range(inner):  # 7
        weight()
        backward(0, split=True)
    while waiting:  # 8
        weight()
    return entries


def _order(entries: list[Entry], streams: list[tuple[int, int]]) -> RankOrder:
    """Streams are (stage, first micro-batch); each kind takes a stream's micro-batches in ascending order."""
    taken: dict[tuple[Kind, int], int] = {}
    micro = []
    for kind, stream, _ in entries:
        row = Kind.B if kind == Kind.O else kind  # O and B share one sequence
        i = taken[row, stream] = taken.get((row, stream), -1) + 1
        micro.append(streams[stream][1] + i)
    # the postponed weight gradients belong to the split backwards, in their order
    split: dict[int, list[int]] = {0: [], 1: []}
    for i, (kind, stream, _) in enumerate(entries):
        if kind == Kind.O:
            split[stream].append(micro[i])
        elif kind == Kind.W:
            micro[i] = split[stream].pop(0)
    return RankOrder([kind for kind, _, _ in entries], [streams[s][0] for _, s, _ in entries], micro,
                 np.array([joined for _, _, joined in entries]))
