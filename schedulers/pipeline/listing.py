"""Orders by list scheduling (`minidl.pricing.greedy`): a free rank never waits while one of its tasks is ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...core.columns import Floats, Ints, Rows
from ...core.graph import TaskGraph
from ...core.placement import PipelineError
from ...core.schedule import Lane, Schedule
from ...core.tasks import Kind
from ...pricing.greedy import greedy
from .problem import Problem
from .stages import stage_graph


def work_conserving(problem: Problem, kinds: Sequence[Kind], fused: bool = False,
                    extra: Callable[[Problem, TaskGraph], Rows] | None = None) -> Schedule:
    """The schedule in which a free rank runs its ready tasks in order of `kinds`, then of micro-batch, then of stage.
    `extra`: more edges of the graph, as in `list_schedule`."""
    graph = stage_graph(problem.stages, problem.micro_batches, fused, problem.placement.directions)
    rank = problem.placement.rank(graph.unit, graph.micro_batch, problem.micro_batches)
    place = np.empty(max(Kind) + 1, np.int64)
    place[list(kinds)] = np.arange(len(kinds))
    priority = (place[graph.kind] * problem.micro_batches + graph.micro_batch) * problem.stages + graph.unit
    return list_schedule(graph, rank, durations(problem, graph), priority, problem.ranks, problem.latency,
                         extra(problem, graph) if extra else None)


def durations(problem: Problem, graph: TaskGraph) -> Floats:
    """One time per task of a stage graph, from the problem's times per stage."""
    forward, output, weight = problem.forward, problem.output_grad, problem.weight_grad
    table = np.zeros((4, problem.stages))
    table[Kind.F], table[Kind.O], table[Kind.W], table[Kind.B] = forward, output, weight, output + weight
    return table[graph.kind, graph.unit]


def list_schedule(graph: TaskGraph, rank: Ints, duration: Floats, priority: Ints, ranks: int, latency: float,
                  extra: Rows | None = None) -> Schedule:
    """The schedule by this rule, with one lane per rank.

    `rank`, `duration`, `priority`: one per task. `extra`: more edges within ranks (successors of each task), for rules
    of admission. Raises PipelineError if they make a circle.
    """
    n, succs = len(graph), graph.succs
    if extra is not None:
        succs = Rows.from_pairs(np.append(succs.row_of_each(), extra.row_of_each()), np.append(succs.ids, extra.ids), n)
    played = greedy(succs, np.array([latency]), rank, duration, priority, ranks)
    if played.done < n:
        raise PipelineError("the rule of admission blocks all remaining tasks")
    return Schedule(tuple(Lane(r) for r in range(ranks)), played.ptr, graph.keys[played.order])
