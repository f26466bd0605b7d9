"""Two streams through the same ranks, so that one fills the other's bubbles: Chimera, DualPipe and DualPipeV.

In DualPipe and DualPipeV (DeepSeek, 2024 and 2025) a forward of one stream runs as a pair with a backward of the other,
and the results of a pair are visible at its end. Both have the same eight steps; they differ in what the two streams
are.
"""

from __future__ import annotations

import numpy as np

from ...core.columns import Rows
from ...core.schedule import Schedule
from ...core.tasks import Kind
from .listing import list_schedule
from .problem import Problem, schedule_of, spelled
from .stages import stage_graph


def chimera(problem: Problem) -> Schedule:
    """Half of the micro-batches in each direction (Li, Hoefler, 2021). Needs even numbers of ranks and micro-batches,
    and holds every stage's weights twice. It adds up the gradients of each half of the micro-batches separately, and
    then both sums, so it is bit-identical to DualPipe and to one process that does so (`minidl.micro_batch(number,
    group=...)`), but not to other schedules.

    Reconstructed from its rule: the older micro-batch of its direction first, at most p/2 in flight per direction, in
    slots of F = 1 and B = 2. Up to m = p, backward goes before forward: for m = p and O+W >= 2F the makespan is
    mF + (2m-2)(O+W). Beyond that, forward goes first: a new micro-batch enters as soon as one has left. Peak at most p.
    """
    p, m = problem.ranks, problem.micro_batches
    graph = stage_graph(p, m, True, directions=2)
    direction = problem.placement.direction(graph.micro_batch, m)
    backward = graph.kind == Kind.B
    age = graph.micro_batch % (m // 2)
    rank = problem.placement.rank(graph.unit, graph.micro_batch, m)
    later = ~backward if m <= p else backward
    admitted = (graph.unit == 0) & ~backward & (age >= p // 2)  # as soon as the one p/2 before has left
    left = (graph.unit == 0) & backward & (age < m // 2 - p // 2)
    admits = Rows.from_pairs(np.flatnonzero(left), np.flatnonzero(admitted), len(graph))
    return list_schedule(graph, rank, 1.0 + backward, (later * m + age) * 2 + direction, p, 0.0, admits)


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
        streams = [(rank, 0), (p - 1 - rank, half)]
        orders.append(spelled(_steps(p // 2, min(rank, p - 1 - rank), half), streams[:: -1 if rank >= p // 2 else 1]))
    return schedule_of(orders)


def dualpipe_v(problem: Problem) -> Schedule:
    """One direction over a V of 2p stages; the two streams are a rank's two chunks (DualPipeV; DeepSeek, 2025). Needs
    m >= 2p. Peak p + 1/2."""
    p, m = problem.ranks, problem.micro_batches
    return schedule_of([spelled(_steps(p, rank, m), [(rank, 0), (2 * p - 1 - rank, 0)]) for rank in range(p)])


def _steps(depth: int, place: int, micro_batches: int) -> str:
    """The eight steps of the rank at `place` of `depth` (depth - 1: where the streams turn or meet), as `spelled`."""
    inner = depth - place - 1
    pairs = "f&BF&b" * (micro_batches - 2 * depth + place + 1)
    if not inner:  # the first pair would only delay what both neighbours wait for
        pairs = pairs.replace("&", "", 1)
    whole = "Bb" * (place + 1)
    apart = whole[place + 1 :].translate(str.maketrans("Bb", "Oo"))  # whose weight gradients are postponed
    left = (apart + "o" * inner).translate(str.maketrans("Oo", "Ww"))
    return ("f" * (2 * inner) + "fF" * (place + 1) + "OWF" * inner + pairs + "BF&b" * inner + whole[: place + 1] + apart
            + "".join(f"{weight}o" for weight in left[:inner]) + left[inner:])
