"""List scheduling: a free rank never waits while one of its tasks is ready, and runs the one with the lowest priority
value.

The loop is one pass over the tasks in order of their start, with two heaps per rank: coming tasks, by the time at which
they will be ready, and ready tasks, by priority.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...core.graph import Floats, Ints, Rows, TaskGraph
from ...core.loops import run_loop
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

    `rank`, `duration`, `priority`: one per task. `extra`: more edges (successors of each task), for rules of admission;
    they carry no data and so no latency. Raises PipelineError if they make a circle.
    """
    n = len(graph)
    succs = graph.succs
    missing = np.diff(graph.preds.ptr).astype(np.int64)
    if extra is None:
        extra = Rows(np.zeros(n + 1, np.int64), np.empty(0, np.int32))
    else:
        missing += np.bincount(extra.ids, minlength=n)
    count = np.bincount(rank, minlength=ranks)
    base = np.concatenate([[0], np.cumsum(count)])[:-1].astype(np.int64)
    eps = 1e-9 * float(duration.max(initial=0))
    order = np.zeros(n, np.int64)
    done, after = run_loop(_list, n, succs.ptr, succs.ids, extra.ptr, extra.ids, missing, rank.astype(np.int64),
                           duration.astype(np.float64), priority.astype(np.int64), float(latency), eps, base,
                           np.zeros(n), np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(ranks, np.int64),
                           np.zeros(ranks, np.int64), np.zeros(ranks), np.zeros(ranks, np.int64), np.zeros(ranks),
                           np.zeros(ranks, np.int64), np.zeros(ranks, np.int64), order)
    if done < n:
        raise PipelineError("the rule of admission blocks all remaining tasks")
    ptr = np.append(base, n)
    return Schedule(tuple(Lane(r) for r in range(ranks)), ptr, graph.keys[after.order])


def _list(succ_ptr, succ_ids, extra_ptr, extra_ids, missing, rank, duration, priority, latency, eps, base,  # type: ignore[no-untyped-def]
          ready_at, coming, ready, coming_size, ready_size, free, placed, next_start, heap, where, order):
    """Returns how many tasks were placed; `order[base[r] + i]` is the i-th task of rank r.

    `coming` and `ready` hold one binary heap per rank, from `base[r]` on; `heap` is a heap of ranks by `next_start`,
    and `where[r]` is the place of rank r in it (or -1).
    """
    n, ranks = len(missing), len(base)
    inf = 1e300
    for r in range(ranks):
        heap[r], where[r], next_start[r] = r, r, inf
    finish = 0.0
    done = 0
    task = -1
    while True:
        # tasks freed by the last placed task (at first: all that wait for nothing)
        begin = 0 if task < 0 else succ_ptr[task]
        end = n if task < 0 else succ_ptr[task + 1] + (extra_ptr[task + 1] - extra_ptr[task])
        for i in range(begin, end):
            if task < 0:
                s, at = i, 0.0
                if missing[s] > 0:
                    continue
            else:
                if i < succ_ptr[task + 1]:
                    s = succ_ids[i]
                    at = finish + (latency if rank[s] != rank[task] else 0.0)
                else:
                    s = extra_ids[extra_ptr[task] + i - succ_ptr[task + 1]]
                    at = finish
                if at > ready_at[s]:
                    ready_at[s] = at
                missing[s] -= 1
                if missing[s] > 0:
                    continue
            r = rank[s]
            # push on the heap of coming tasks
            b, c = base[r], coming_size[r]
            coming_size[r] = c + 1
            while c > 0:
                up = (c - 1) // 2
                if ready_at[coming[b + up]] <= ready_at[s]:
                    break
                coming[b + c] = coming[b + up]
                c = up
            coming[b + c] = s
            start = free[r] if ready_size[r] > 0 else max(free[r], ready_at[coming[b]])
            if start < next_start[r]:
                next_start[r] = start
                c = where[r]
                while c > 0:
                    up = (c - 1) // 2
                    if next_start[heap[up]] <= start:
                        break
                    heap[c] = heap[up]
                    where[heap[c]] = c
                    c = up
                heap[c] = r
                where[r] = c
        # the rank that starts first
        r = heap[0]
        now = next_start[r]
        if now >= inf:
            return done
        b = base[r]
        # tasks that are ready by now move to the heap by priority
        while coming_size[r] > 0 and ready_at[coming[b]] <= now + eps:
            s = coming[b]
            coming_size[r] -= 1
            size = coming_size[r]
            if size > 0:
                last = coming[b + size]
                c = 0
                while True:
                    child = 2 * c + 1
                    if child >= size:
                        break
                    if child + 1 < size and ready_at[coming[b + child + 1]] < ready_at[coming[b + child]]:
                        child += 1
                    if ready_at[coming[b + child]] >= ready_at[last]:
                        break
                    coming[b + c] = coming[b + child]
                    c = child
                coming[b + c] = last
            c = ready_size[r]
            ready_size[r] = c + 1
            while c > 0:
                up = (c - 1) // 2
                if priority[ready[b + up]] <= priority[s]:
                    break
                ready[b + c] = ready[b + up]
                c = up
            ready[b + c] = s
        task = ready[b]
        ready_size[r] -= 1
        size = ready_size[r]
        if size > 0:
            last = ready[b + size]
            c = 0
            while True:
                child = 2 * c + 1
                if child >= size:
                    break
                if child + 1 < size and priority[ready[b + child + 1]] < priority[ready[b + child]]:
                    child += 1
                if priority[ready[b + child]] >= priority[last]:
                    break
                ready[b + c] = ready[b + child]
                c = child
            ready[b + c] = last
        start = max(now, ready_at[task])
        finish = start + duration[task]
        free[r] = finish
        order[b + placed[r]] = task
        placed[r] += 1
        done += 1
        if ready_size[r] > 0:
            next_start[r] = finish
        elif coming_size[r] > 0:
            next_start[r] = max(finish, ready_at[coming[b]])
        else:
            next_start[r] = inf
        # the rank sinks to its new place
        c = 0
        while True:
            child = 2 * c + 1
            if child >= ranks:
                break
            if child + 1 < ranks and next_start[heap[child + 1]] < next_start[heap[child]]:
                child += 1
            if next_start[heap[child]] >= next_start[r]:
                break
            heap[c] = heap[child]
            where[heap[c]] = c
            c = child
        heap[c] = r
        where[r] = c
