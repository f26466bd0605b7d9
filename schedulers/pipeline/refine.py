"""Moves single tasks of any schedule while neither makespan nor largest span grows, under an activation cap.

A span is as long as the longest path to its end; only a move of a task on that path can shorten it, so moves are drawn
from there: two neighbours of the path that are neighbours on their rank change places, or any of its tasks moves a few
places. Each move is timed exactly and kept unless something got worse: moves that change nothing lead out of most dead
ends. Deterministic: the draws come from a fixed seed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...core.columns import Floats, Ints, run_loop, spread
from ...core.graph import TaskGraph
from ...core.schedule import Schedule
from ...core.tasks import Kind

EFFORT = 4_000_000  #: about how many tasks are timed in all
REACH = 4  #: the most places by which a task moves
SAME = 1e-11  #: times with a smaller relative difference are equal


def refine(graph: TaskGraph, schedule: Schedule, duration: Floats, latency: float, cap: float,
           tries: int | None = None, kept: float = 1.0,
           bounds: tuple[float, float] | None = None) -> tuple[float, float, Schedule]:
    """(makespan, largest span, schedule) after so many tries, by default as many as the effort allows: the first one
    times the schedule as it is, each further one moves a task. `cap`: the most live activations per rank, in units of
    one chunk; `kept`: the share of one that stays from its O to its W. With lower `bounds` of largest span and
    makespan, a shorter span may lengthen the makespan, and the search ends at both.

    The schedule must have one lane per rank, equally many tasks on each, O and W apart, and no pairs.
    """
    tries = tries or max(1, EFFORT // len(graph))
    ids = schedule.ids(graph)
    n, ranks = len(ids), len(schedule.lanes)
    each = n // ranks
    rank = spread(ids, schedule.lane_of_each(), n)
    _, after = run_loop(
        _refine, n * tries, each, tries, float(cap), kept, bounds is not None, *(bounds or (0.0, 0.0)), float(latency),
        1e-9 * float(duration.max()), graph.kind.astype(np.int64), rank, graph.preds.ptr, graph.preds.ids, duration,
        ids.copy(), np.zeros(n, np.int64), np.zeros(n), np.zeros(n, np.int64), np.zeros(n, np.int64),
        np.zeros(ranks, np.int64), np.zeros(ranks), np.zeros(2))
    makespan, span = after.best.tolist()
    return makespan, span, replace(schedule, keys=graph.keys[_renumbered(graph, after.order)], slots=None)


def _renumbered(graph: TaskGraph, order: Ints) -> Ints:
    """The same order with the micro-batches of each stage and kind numbered as they come, since networks add gradients
    up in the order of the micro-batches. All micro-batches take the same times, so no task starts later: where each
    task of a micro-batch ends before another one starts, so do the i-th ones of all to end and to start."""
    group = graph.unit[order].astype(np.int64) * len(Kind) + graph.kind[order]
    found = order.copy()
    found[np.argsort(group, kind="stable")] = order[np.lexsort((graph.micro_batch[order], group))]
    return found


def _refine(n, tries, cap, kept, span_first, least_span, least_end, latency, eps, kind, rank,  # type: ignore[no-untyped-def]
            pred_ptr, preds, duration, order, place, end, cause, path, at, free, best):
    """`order[r * n + i]`: the i-th task of rank r; `cause[t]`: the task for which t waited last, or -1."""
    ranks = len(at)
    best[0], best[1] = 1e300, 1e300
    length, source, target, dice = 0, 0, 0, 12345
    for attempt in range(tries):
        live, fits = 0.0, True
        first = source // n * n
        for e in range(first, first + n):  # the rank of the last move must stay within the cap
            k = kind[order[e]]
            if k == 0:
                live += 1.0
                fits = fits and live <= cap + 1e-9
            else:
                live -= 1.0 - kept if k == 1 else kept
        done, span, makespan, worst, latest = 0, 0.0, 0.0, 0, 0
        if fits:
            for t in range(len(end)):
                end[t] = -1.0
            for r in range(ranks):
                at[r], free[r] = 0, 0.0
            moved = True
            while moved:
                moved = False
                for r in range(ranks):
                    while at[r] < n:
                        e = r * n + at[r]
                        t = order[e]
                        arrival, why = 0.0, -1
                        for i in range(pred_ptr[t], pred_ptr[t + 1]):
                            q = preds[i]
                            if end[q] < 0:
                                why = -2
                                break
                            reach = end[q] + (latency if rank[q] != r else 0.0)
                            if reach > arrival:
                                arrival, why = reach, q
                        if why == -2:
                            break
                        if at[r] > 0 and free[r] >= arrival:
                            arrival, why = free[r], order[e - 1]
                        place[t], cause[t], end[t] = e, why, arrival + duration[t]
                        free[r] = end[t]
                        at[r] += 1
                        done += 1
                        moved = True
        if done == len(end):
            for r in range(ranks):
                if free[r] > makespan:
                    makespan, latest = free[r], r
                length_of = free[r] - end[order[r * n]] + duration[order[r * n]]
                if length_of > span:
                    span, worst = length_of, r
        if span <= least_span:
            worst = latest
        if done == len(end) and span <= best[1] + eps and (
                makespan <= best[0] + eps or (span_first and span < best[1] - eps)):
            best[0], best[1] = makespan, span
            length, t = 0, order[worst * n + n - 1]
            while t >= 0:
                path[length] = place[t]
                length += 1
                t = cause[t]
        else:  # undo the move
            t = order[target]
            step = 1 if source > target else -1
            while target != source:
                order[target] = order[target + step]
                target += step
            order[source] = t
        if attempt == tries - 1 or (best[1] <= least_span and best[0] <= least_end):
            return
        source = target = -1
        for _ in range(4 * length if span_first or attempt % 2 else 0):  # one goes behind the next of the path
            dice = (dice * 1103515245 + 12345) % 2147483648
            step = dice // 65536 % (length - 1)
            dice = (dice * 1103515245 + 12345) % 2147483648
            e, k = path[step + 1], kind[order[path[step + 1]]]
            reach = 1 << dice // 65536 % 5 if k == 2 else 1  # a weight gradient also further
            if e + 1 == path[step] and k != kind[order[e + 1]] and e + reach < (e // n + 1) * n:
                source, target = e, e + reach
                break
        if source < 0:
            dice = (dice * 1103515245 + 12345) % 2147483648
            source = path[dice // 65536 % length]
            dice = (dice * 1103515245 + 12345) % 2147483648
            draw = dice // 65536 % (2 * REACH)
            target = source + (draw - REACH if draw < REACH else draw - REACH + 1)
            target = max(source // n * n, min(source // n * n + n - 1, target))
        t = order[source]
        step = 1 if target > source else -1
        e = source
        while e != target:
            order[e] = order[e + step]
            e += step
        order[target] = t
