"""Exchanges and sums of gradients on one lane: all ranks start them in one order, which is chosen by known times.

An exchange is on the chain, so it begins when its rows are there. A sum begins when the lane is free, or only if it
ends before the next exchange; whichever gives the shorter step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..core.columns import Floats
from ..core.graph import TaskGraph
from ..pricing.simulation import Clock, Lanes


def with_exchanges(graph: TaskGraph, clock: Clock, main: Sequence[int], exchanges: Sequence[int],
                   sums: Sequence[int]) -> list[int]:
    """The order of the lane of exchanges and sums, beside a lane that computes; `sums`: in the order in which those
    that are ready go. Raises ScheduleError if the lanes cannot run."""
    times = clock.run(Lanes.of_tasks([main, exchanges, sums]))
    orders = [[*_order(graph, clock.duration, times.start, times.end, exchanges, sums, fits)] for fits in (False, True)]
    return orders[int(np.argmin(clock.periods([main, order] for order in orders)))]


def _order(graph: TaskGraph, duration: Floats, start: Floats, end: Floats, exchanges: Sequence[int],
           sums: Sequence[int], fits: bool) -> Iterator[int]:
    """One order. `fits`: a sum must end before the next exchange begins."""
    end, now, sums = end.copy(), 0.0, list(sums)
    left = sorted(exchanges, key=start.__getitem__)
    preds = {t: graph.preds[t].tolist() for t in sums}
    while left or sums:
        until = start[left[0]] if left else np.inf
        ready = {t: max((end[p] for p in preds[t]), default=0.0) for t in sums if not {*preds[t]} & {*sums}}
        can = [t for t, at in ready.items() if at <= now and not (fits and now + duration[t] > until)]
        if until <= now or (not can and until <= min((at for at in ready.values() if at > now), default=np.inf)):
            task, now = left.pop(0), max(now, until)
        elif can:
            sums.remove(task := can[0])
        else:
            now = min(at for at in ready.values() if at > now)
            continue
        now = end[task] = now + duration[task]
        yield task
