"""Messages and sums start earlier, and tasks wait for them later, as long as the planned peak memory does not rise.

The rule comes from Inductor's `simple_overlap` for collectives. Here messages and sums have lanes of their own and
start when their data is there, so the computation moves around them: the task that a lane waits for moves earlier in
its own lane, and a task that is ready moves before one that waits. Pairs that run as one action move together. A move
stays if the simulator says that iterations take less time, and no rank plans more bytes. All orders within the graph's
edges are bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..core.columns import spread
from ..core.graph import TaskGraph
from ..core.placement import Refused
from ..core.tasks import Kind
from ..pricing.simulation import CHAINED, SAME, Clock, Lanes, Times
from .draft import Draft


def more_overlap(draft: Draft, overlap: int = 0) -> Draft:
    """The order after at most `overlap` moves were tried, those for the longest waits first.

    Needs the order of all tasks, with the sums over replicas. Forwards stay behind their place if activations have a
    cap. Raises Refused if the order also says which weights tasks read.
    """
    if draft.stale:
        raise Refused(draft.name, "overlap moves tasks, but their order also says which weights they read",
                      "leave overlap out")
    graph, schedule = draft.graph, draft.order
    lanes = Lanes.of(graph, schedule)
    clock = Clock.of(graph, draft.priced, lanes)
    fixed = (graph.kind == Kind.F) & (draft.machine.activation_cap is not None)
    known, found = _planned(draft), [*clock.iterations(lanes, CHAINED)]
    moves, tried = _moves(graph, lanes, found), set[bytes]()
    while len(tried) < overlap and (move := next(moves, None)):
        j, end, k = move  # the tasks from place j to `end` come before the one at place k
        at = np.r_[:k, j:end, k:j, end : len(lanes.tasks)]
        moved = replace(lanes, tasks=lanes.tasks[at], joined=None if lanes.joined is None else lanes.joined[at])
        if fixed[lanes.tasks[j:end]].any() or (order := moved.tasks.tobytes()) in tried:
            continue
        tried.add(order)
        times = [*clock.iterations(moved, CHAINED)]
        took, before = (each[-1].end.max() - each[-2].end.max() for each in (times, found))
        if took >= before * (1 - SAME):
            continue
        better = replace(draft, schedule=replace(schedule, keys=graph.keys[moved.tasks], joined=moved.joined,
                                                   slots=None))
        price = _planned(better)
        if price[0] < known[0] and all(mine <= other for mine, other in zip(price[1], known[1], strict=True)):
            draft, lanes, known, found = better, moved, price, times
            moves = _moves(graph, lanes, found)
    return draft


def _planned(draft: Draft) -> tuple[float, tuple[int, ...]]:
    """The time of an iteration of the finished plan, and the bytes of each rank."""
    assert draft.planned is not None
    plan = draft.planned(draft.name, draft.graph, draft.order, draft.priced, draft.machine.size)
    return plan.period, plan.peak_bytes


def _moves(graph: TaskGraph, lanes: Lanes, times: list[Times]) -> Iterator[tuple[int, int, int]]:
    """Moves of an action to an earlier place in its lane, for the longest waits of the last iteration first: its first
    and last place (of `lanes.tasks`), the latter exclusive, and the new one. An action passes only those that end after
    all that it needs, so none of them is what it needs."""
    tasks, (start, end, _) = lanes.tasks, times[-1]
    place = spread(tasks, np.arange(len(tasks)), len(tasks))
    first, last = (place, place) if lanes.joined is None else (place[task] for task in lanes.actions)
    needed, by = graph.preds.ids, graph.preds.row_of_each()
    other = first[needed] != first[by]
    # of each place where an action begins
    ready = spread(first[by[other]], end[needed[other]], len(tasks), -np.inf, np.maximum)
    before = np.append(0.0, end[tasks[:-1]])  # when the lane is free
    before[lanes.ptr[:-1][lanes.busy]] = times[-2].end[lanes.last]
    wait = start[tasks] - before
    for k in np.argsort(-wait, kind="stable")[: np.count_nonzero(wait > 0)].tolist():
        lane, then = int(lanes.lane_of[tasks[k]]), int(last[tasks[k]]) + 1
        later = np.arange(then, lanes.ptr[lane + 1])
        later = later[(first[tasks[later]] == later) & (ready[later] < start[tasks[k]])]
        yield from ((int(j), int(last[tasks[j]]) + 1, k) for j in later[:1])
        for t in (t for task in tasks[k:then].tolist() for t in graph.preds[task].tolist()):
            j, begin = int(first[t]), int(lanes.ptr[lanes.lane_of[t]])
            passed = end[tasks[begin:j]] > ready[j]
            if lanes.lane_of[t] != lane and passed.any():
                yield j, int(last[t]) + 1, begin + int(np.argmax(passed))
