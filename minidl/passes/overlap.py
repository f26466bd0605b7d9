"""Messages and sums start earlier, and tasks wait for them later, as long as the planned peak memory does not rise.

The rule comes from Inductor's `simple_overlap` for collectives. Here messages and sums have lanes of their own and
start when their data is there, so the computation moves around them: the task that a lane waits for moves earlier in
its own lane, and a task that is ready moves before one that waits. A move stays if the simulator says that iterations
take less time, and no rank plans more bytes. All orders within the graph's edges are bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..core.graph import TaskGraph
from ..core.placement import Refused
from ..core.tasks import Kind
from ..pricing.simulation import CHAINED, SAME, Clock, Lanes, Times
from .draft import Draft


def more_overlap(draft: Draft, overlap: int = 0) -> Draft:
    """The order after at most `overlap` moves were tried, those for the longest waits first.

    Needs the order of all tasks, with the sums over replicas. Forwards stay behind their place if activations have a
    cap. Raises Refused if the order says more than when tasks run: which weights they read, or which run as pairs.
    """
    if not overlap:
        return draft
    if draft.stale or draft.order.joined is not None:
        told = "which weights they read" if draft.stale else "which of them run as pairs"
        raise Refused(draft.name, f"overlap moves tasks, but their order also says {told}", "leave overlap out")
    graph, schedule = draft.graph, draft.order
    lanes = Lanes.of(graph, schedule)
    clock = Clock.of(graph, draft.priced, lanes)
    fixed = (graph.kind == Kind.F) & (draft.machine.activation_cap is not None)
    known, found = _planned(draft), [*clock.iterations(lanes, CHAINED)]
    moves, tried = _moves(graph, lanes, found), set[bytes]()
    while len(tried) < overlap and (move := next(moves, None)):
        j, k = move  # the task at place j comes before the one at place k
        moved = replace(lanes, tasks=np.insert(np.delete(lanes.tasks, j), k, lanes.tasks[j]))
        if fixed[lanes.tasks[j]] or (order := moved.tasks.tobytes()) in tried:
            continue
        tried.add(order)
        times = [*clock.iterations(moved, CHAINED)]
        if _period(times) >= _period(found) * (1 - SAME):
            continue
        better = replace(draft, schedule=replace(schedule, keys=graph.keys[moved.tasks], slots=None))
        price = _planned(better)
        if price[0] < known[0] and all(mine <= before for mine, before in zip(price[1], known[1], strict=True)):
            draft, lanes, known, found = better, moved, price, times
            moves = _moves(graph, lanes, found)
    return draft


def _planned(draft: Draft) -> tuple[float, tuple[int, ...]]:
    """The time of an iteration of the finished plan, and the bytes of each rank."""
    assert draft.planned is not None
    plan = draft.planned(draft.name, draft.graph, draft.order, draft.priced, draft.machine.size)
    return plan.period, plan.peak_bytes


def _period(times: list[Times]) -> float:
    return float(times[-1].end.max() - times[-2].end.max())


def _moves(graph: TaskGraph, lanes: Lanes, times: list[Times]) -> Iterator[tuple[int, int]]:
    """Moves of a task to an earlier place (of `lanes.tasks`) in its lane, for the longest waits of the last iteration
    first. A task passes only those that end after all that it needs, so none of them is what it needs."""
    tasks, (start, end, _) = lanes.tasks, times[-1]
    place = np.empty(len(tasks), np.int64)
    place[tasks] = np.arange(len(tasks))
    ready = np.full(len(tasks), -np.inf)
    np.maximum.at(ready, graph.preds.row_of_each(), end[graph.preds.ids])
    before = np.append(0.0, end[tasks[:-1]])  # when the lane is free
    before[lanes.ptr[:-1][lanes.busy]] = times[-2].end[lanes.last]
    wait = start[tasks] - before
    for k in np.argsort(-wait, kind="stable")[: np.count_nonzero(wait > 0)].tolist():
        lane = int(lanes.lane_of[tasks[k]])
        later = np.arange(k + 1, lanes.ptr[lane + 1])
        yield from ((int(j), k) for j in later[ready[tasks[later]] < start[tasks[k]]][:1])
        for t in graph.preds[int(tasks[k])].tolist():
            j, begin = int(place[t]), int(lanes.ptr[lanes.lane_of[t]])
            passed = end[tasks[begin:j]] > ready[t]
            if lanes.lane_of[t] != lane and passed.any():
                yield j, begin + int(np.argmax(passed))
