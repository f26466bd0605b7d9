"""List scheduling: a free machine never waits while one of its tasks is ready, and runs the one with the lowest
priority value.

The loop is one pass over the tasks in order of their start, with two heaps per machine: coming tasks, by the time at
which they will be ready, and ready tasks, by priority. A machine is what runs one task at a time: a rank, a link.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from ..core.columns import Floats, Ints, Rows, offsets, run_loop


class Played(NamedTuple):
    """`order[ptr[i]:ptr[i + 1]]`: the tasks of machine i in the order in which they ran; `end`: of each task. `done`:
    how many tasks ran; fewer than there are if edges have a circle."""

    done: int
    ptr: Ints
    order: Ints
    end: Floats


def greedy(succs: Rows, delay: Floats, machine: Ints, duration: Floats, priority: Ints, machines: int) -> Played:
    """The order by the rule in this module's docstring. `delay`: of each edge, or one between all machines."""
    n = len(succs)
    ptr = offsets(np.bincount(machine, minlength=machines))
    eps = 1e-9 * float(duration.max(initial=0))
    done, after = run_loop(
        _greedy, n, succs.ptr, succs.ids.astype(np.int64), np.bincount(succs.ids, minlength=n),
        machine.astype(np.int64), duration.astype(np.float64), priority.astype(np.int64), delay.astype(np.float64),
        int(len(delay) > 1), eps, ptr[:-1].copy(), np.zeros(n), np.zeros(n), np.zeros(machines),
        np.full(machines, np.inf), np.zeros(n, np.int64))
    return Played(done, ptr, after.order, after.end)


def _greedy(succ_ptr, succs, missing, machine, duration, priority, delay, each, eps,  # type: ignore[no-untyped-def]
            place, ready_at, end, free, next_start, order):
    """Returns how many tasks were placed; the next task of machine r goes to `order[place[r]]`. `starts` may have
    entries that are no longer a machine's next start; they are passed over."""
    machines = len(place)
    coming, ready, starts = [[(0.0, 0)][:0] for _ in range(machines)], [[(0, 0)][:0] for _ in range(machines)], [
        (0.0, 0)][:0]
    for s in range(len(missing)):
        if missing[s] == 0:
            heappush(coming[machine[s]], (0.0, s))
            next_start[machine[s]] = 0.0
    for r in range(machines):
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
        end[task] = finish
        next_start[r] = np.inf
        for i in range(succ_ptr[task], succ_ptr[task + 1]):
            s = succs[i]
            ready_at[s] = max(ready_at[s], finish + (delay[i] if each else delay[0] if machine[s] != r else 0.0))
            missing[s] -= 1
            if missing[s] == 0:
                q = machine[s]
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
