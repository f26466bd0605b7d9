"""List scheduling: a free rank never waits while one of its tasks is ready, and runs the one with the lowest priority
value.

The loop is one pass over the tasks in order of their start, with two heaps per rank: coming tasks, by the time at which
they will be ready, and ready tasks, by priority.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np

from ...core.columns import Floats, Ints, Rows, offsets, run_loop
from ...core.graph import TaskGraph
from ...core.placement import PipelineError
from ...core.schedule import Lane, Schedule
from ...core.tasks import Kind
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


def admission(graph: TaskGraph, micro_batches: int, admit: int, directions: int = 1) -> Rows:
    """Extra edges: the last backward of micro-batch i admits the first forward of i + admit of the same direction."""
    ends = np.flatnonzero((graph.unit == 0) & ((graph.kind == Kind.O) | (graph.kind == Kind.B)))
    starts = np.flatnonzero((graph.unit == 0) & (graph.kind == Kind.F))
    each = micro_batches // directions
    admits = np.arange(micro_batches) % each < each - admit
    return Rows.from_pairs(ends[admits], starts[np.flatnonzero(admits) + admit], len(graph))


def list_schedule(graph: TaskGraph, rank: Ints, duration: Floats, priority: Ints, ranks: int, latency: float,
                  extra: Rows | None = None) -> Schedule:
    """The schedule by the rule in this module's docstring, with one lane per rank.

    `rank`, `duration`, `priority`: one per task. `extra`: more edges within ranks (successors of each task), for rules
    of admission. Raises PipelineError if they make a circle.
    """
    n, succs = len(graph), graph.succs
    if extra is not None:
        succs = Rows.from_pairs(np.append(succs.row_of_each(), extra.row_of_each()), np.append(succs.ids, extra.ids), n)
    base = offsets(np.bincount(rank, minlength=ranks))
    eps = 1e-9 * float(duration.max(initial=0))
    done, after = run_loop(
        _list, n, succs.ptr, succs.ids.astype(np.int64), np.bincount(succs.ids, minlength=n), rank.astype(np.int64),
        duration.astype(np.float64), priority.astype(np.int64), float(latency), eps, base[:-1].copy(), np.zeros(n),
        np.zeros(ranks), np.full(ranks, np.inf), np.zeros(n, np.int64))
    if done < n:
        raise PipelineError("the rule of admission blocks all remaining tasks")
    return Schedule(tuple(Lane(r) for r in range(ranks)), base, graph.keys[after.order])


def _list(succ_ptr, succs, missing, rank, duration, priority, latency, eps, place,  # type: ignore[no-untyped-def]
          ready_at, free, next_start, order):
    """Returns how many tasks were placed; the next task of rank r goes to `order[place[r]]`. `starts` may have entries
    that are no longer a rank's next start; they are passed over."""
    ranks = len(place)
    coming, ready, starts = [[(0.0, 0)][:0] for _ in range(ranks)], [[(0, 0)][:0] for _ in range(ranks)], [(0.0, 0)][:0]
    for s in range(len(missing)):
        if missing[s] == 0:
            heappush(coming[rank[s]], (0.0, s))
            next_start[rank[s]] = 0.0
    for r in range(ranks):
        heappush(starts, (next_start[r], r))
    done = 0
    while len(starts) > 0:
        now, r = heappop(starts)
        if now != next_start[r] or len(coming[r]) + len(ready[r]) == 0:
            continue
        while len(coming[r]) > 0 and coming[r][0][0] <= now + eps:
            s = heappop(coming[r])[1]
            heappush(ready[r], (priority[s], s))
        task = heappop(ready[r])[1]
        order[place[r]] = task
        place[r] += 1
        done += 1
        free[r] = finish = max(now, ready_at[task]) + duration[task]
        next_start[r] = np.inf
        for i in range(succ_ptr[task], succ_ptr[task + 1]):
            s = succs[i]
            ready_at[s] = max(ready_at[s], finish + latency if rank[s] != r else finish)
            missing[s] -= 1
            if missing[s] == 0:
                q = rank[s]
                heappush(coming[q], (ready_at[s], s))
                if q != r and len(ready[q]) == 0 and max(free[q], ready_at[s]) < next_start[q]:
                    next_start[q] = max(free[q], ready_at[s])
                    heappush(starts, (next_start[q], q))
        if len(ready[r]) > 0:
            next_start[r] = finish
        elif len(coming[r]) > 0:
            next_start[r] = max(finish, coming[r][0][0])
        heappush(starts, (next_start[r], r))
    return done
