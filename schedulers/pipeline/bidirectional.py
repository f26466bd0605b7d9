"""Chimera: two pipelines in opposite directions through the same ranks, so that one fills the other's bubbles."""

from __future__ import annotations

from ...core.schedule import Schedule
from ...core.tasks import Kind
from .listing import admission, list_schedule
from .problem import Problem
from .stages import stage_graph


def chimera(problem: Problem) -> Schedule:
    """Half of the micro-batches in each direction (Li, Hoefler, 2021). Needs even numbers of ranks and micro-batches,
    and holds every stage's weights twice. It adds up the gradients of each half of the micro-batches separately, and
    then both sums, so it is bit-identical to DualPipe and to one process that does so (`minidl.micro_batch(number,
    group=...)`), but not to other schedules.

    Reconstructed from its rule: the older micro-batch of its direction first, at most p/2 in flight per direction, in
    slots of F = 1 and B = 2. Up to m = p, backward goes before forward: for m = p the makespan is mF + (2m-2)(O+W).
    Beyond that, forward goes first, so that a new micro-batch enters as soon as one has left. Peak at most p.
    """
    p, m = problem.ranks, problem.micro_batches
    graph = stage_graph(p, m, True, directions=2)
    direction = problem.placement.direction(graph.micro_batch, m)
    backward = graph.kind == Kind.B
    age = graph.micro_batch % (m // 2)
    rank = problem.placement.rank(graph.unit, graph.micro_batch, m)
    later = ~backward if m <= p else backward
    return list_schedule(graph, rank, 1.0 + backward, (later * m + age) * 2 + direction, p, 0.0,
                         admission(graph, m, max(1, p // 2), directions=2))
