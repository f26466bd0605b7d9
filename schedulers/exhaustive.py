"""The shortest order of a few tasks on two streams, by branch and bound: for graphs so small that this is cheap.

It knows only predecessors, durations and the cost of a wait; no contention and no iteration boundary.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.columns import Rows
from .shared_lanes import ways

Orders = list[list[int]]  #: the tasks of both streams in order


def shortest(preds: Sequence[Sequence[int]], duration: Sequence[float], sync: float, known: float,
             effort: int) -> tuple[float, Orders | None, int]:
    """(makespan, orders, effort left) of the best orders shorter than `known`; (`known`, None, ..) without any. If some
    effort is left, nothing shorter exists.

    `effort`: how many partial orders to try. `sync`: the time from the end of a task to the start of a task on the
    other stream that waits for it. Ids must be in a legal order.
    """
    count, best = len(duration), known
    found: Orders | None = None
    succs = Rows.of(preds).transposed(count).lists()
    tail = ways(succs, duration)
    by_tail = sorted(range(count), key=lambda t: (-tail[t], t))
    order: Orders = [[], []]
    end, lane_of, seen = dict[int, float](), dict[int, int](), set[object]()

    def extend(done: int, free: tuple[float, float], rest: float) -> None:
        """Tries all continuations of `order`. `done`: its tasks as bits; `free`: when each stream is free; `rest`: the
        remaining work."""
        nonlocal best, found, effort
        limit = best * (1 - 1e-9)
        if done == (1 << count) - 1:
            if max(free) < limit:
                best, found = max(free), [list(lane) for lane in order]
            return
        if effort <= 0 or (sum(free) + rest) / 2 >= limit:
            return
        open_ends = tuple((t, lane_of[t], at) for t, at in sorted(end.items())
                          if at + sync > min(free) and any(not done >> s & 1 for s in succs[t]))
        if (state := (done, free, open_ends)) in seen:  # an earlier partial order led to it
            return
        seen.add(state)
        effort -= 1
        ready = [t for t in by_tail if not done >> t & 1 and all(done >> p & 1 for p in preds[t])]
        starts = [[max(free[lane], *(end[p] + sync * (lane_of[p] != lane) for p in preds[t]), 0.0) for lane in (0, 1)]
                  for t in ready]
        if any(min(at) + tail[t] >= limit for t, at in zip(ready, starts, strict=True)):
            return
        for t, at in zip(ready, starts, strict=True):
            for lane in sorted((0, 1), key=lambda lane: at[lane]):
                if lane and not order[0] and not order[1]:
                    continue  # both streams are equal here
                order[lane].append(t)
                end[t], lane_of[t] = at[lane] + duration[t], lane
                extend(done | 1 << t, (free[0], end[t]) if lane else (end[t], free[1]), rest - duration[t])
                order[lane].pop()
                del end[t], lane_of[t]

    extend(0, (0.0, 0.0), sum(duration))
    return best, found, effort
