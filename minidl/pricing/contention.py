"""Times of tasks that slow each other down: event by event, since the speed of a task depends on its neighbours.

The rules are the same as in `minidl.core.columns.run_lanes`, plus contention between the lanes of a rank. Lanes and
tasks are plain numbers here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.columns import Floats, filled, run_loop

NEVER = 1e308


def contend(ptr: Any, tasks: Any, rank: Any, lane_of: Any, pred_ptr: Any, preds: Any, far: Any, distance: Any,
            duration: Any, group: Any, factor: Any, share: Any, *, sync: float, spin: float, doze: float, wake: float,
            cores: float, serial: float, iterations: int) -> tuple[Floats, Floats, Floats]:
    """Begin, end, and when the last predecessor was there, by iteration and task; -1 where a task never ran.

    As in `run_lanes`, and: while tasks of groups b run on other lanes of its rank, a task of group a runs at
    1 / (1 + the sum of (`factor[a][b]` - 1)) of its speed. If more tasks run on a rank than it has `cores`, all run
    slower by as much. A task alone needs its `share` of a lane's bandwidth; beside others it gets what
    `minidl.pricing.memory` says, where `serial` is s. A lane that has waited for `spin` when the last task that it
    waits for ends, on another lane of its rank, sleeps: it starts `doze` later, and the lane that wakes it is free only
    `wake` later. At first all lanes of a rank but the first one with tasks sleep. An edge comes from the iteration
    `distance` before. `far` and `distance`: one number per edge. All columns are `prepared`.
    """
    n, lanes, ranks, every = len(duration), len(rank), int(max(rank)) + 1, iterations * len(duration)
    of_lanes = [filled(n, lanes, x) for x in (0, NEVER, -1, 0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1, 0, 0)]
    of_ranks = [filled(n, ranks + 1, 0), filled(n, ranks, 0), filled(n, ranks, NEVER)]
    of_tasks = [filled(n, every, x) for x in (-1, -1.0, -1.0, 0.0)]
    _, after = run_loop(
        _contend, n, iterations, *map(float, (sync, spin, doze, wake, cores, serial)), ptr, tasks, rank, lane_of,
        pred_ptr, preds, far, distance, duration, group, factor, share, *of_lanes, *of_ranks, *of_tasks)
    begin, end, ready = (np.array(t).reshape(iterations, n) for t in (after.begin, after.end, after.ready))
    return begin, end, ready


def _contend(iterations, sync, spin, doze, wake, cores, serial, ptr, tasks, rank, lane_of,  # type: ignore[no-untyped-def]
             pred_ptr, preds, far, distance, duration, group, factor, share, at, due, running, kind, left, slow, since,
             stop, slack, free, idle, sleeper, stack, by_rank, rank_ptr, placed, coming, waiting, begin, end, ready):
    """Columns by lane: `at`: how many of its tasks have begun, over all iterations; `due`: when the next can start;
    `running`: the task that runs, `kind`: its group, `left`: the work left at time `since`, `stop`: when it would end,
    `slack`: the rounding error of that; `idle`: when its last task ended. `coming[r]`: when something happens next on
    rank r. `waiting`, `sleeper`: see `run_lanes`. `stack`: lanes to look at, the last one first; at first all."""
    n, top = len(duration), len(rank)
    for lane in range(top):  # the lanes of each rank
        rank_ptr[rank[lane] + 1] += 1
    for r in range(len(coming)):
        rank_ptr[r + 1] += rank_ptr[r]
    for lane in range(top):
        r = rank[lane]
        by_rank[rank_ptr[r] + placed[r]] = lane
        if doze > 0:
            for before in range(lane):
                if rank[before] == r and ptr[before + 1] > ptr[before]:
                    free[lane] = doze
        placed[r] += 1
        stack[lane] = top - 1 - lane
    now, here, place, ender = 0.0, 0, rank_ptr[1], -1
    while True:
        while top > 0:  # when can the next task of these lanes start?
            top -= 1
            lane = stack[top]
            size = ptr[lane + 1] - ptr[lane]
            due[lane] = NEVER
            if at[lane] == iterations * size:
                continue
            task, base = tasks[ptr[lane] + at[lane] % size], at[lane] // size * n
            arrival, blocked = 0.0, -1
            for e in range(pred_ptr[task], pred_ptr[task + 1]):
                p = preds[e]
                before = base - distance[e] * n + p
                if before < 0:
                    continue
                reach = end[before]
                if reach < 0:
                    blocked = before
                    break
                if lane_of[p] != lane:
                    reach += sync if rank[lane_of[p]] == rank[lane] else far[e]
                if reach > arrival:
                    arrival = reach
            if blocked >= 0:
                sleeper[lane], waiting[blocked] = waiting[blocked], lane
                continue
            r = rank[lane]
            if ender >= 0 and ender != lane and rank[ender] == r and now - idle[lane] >= spin:
                arrival += doze
                free[ender] = now + wake
            ready[base + task] = arrival
            due[lane] = max(arrival, free[lane])
            coming[r] = min(coming[r], due[lane])
        ended, last = -1, rank_ptr[here + 1]
        while place < last:  # the next lane of this rank whose task ends now
            lane = by_rank[place]
            place += 1
            if running[lane] >= 0 and stop[lane] - slack[lane] <= now:
                ended = lane
                break
        if ended >= 0:
            action = running[ended]
            running[ended], end[action], idle[ended] = -1, now, now
            ender, stack[0], top = ended, ended, 1  # its own lane last, when it is known whether it wakes another
            other = waiting[action]
            while other >= 0:
                stack[top] = other
                top += 1
                other = sleeper[other]
            continue
        first, following = rank_ptr[here], NEVER
        for i in range(first, last):  # tasks that are due start
            lane = by_rank[i]
            if running[lane] < 0 and due[lane] <= now:
                size = ptr[lane + 1] - ptr[lane]
                task, base = tasks[ptr[lane] + at[lane] % size], at[lane] // size * n
                at[lane] += 1
                running[lane], begin[base + task] = base + task, now
                kind[lane], left[lane], slow[lane], since[lane] = group[task], duration[task], 1.0, now
                stop[lane], slack[lane] = now + duration[task], 1e-9 * duration[task]
        busy, need = 0.0, 0.0
        for i in range(first, last):
            if running[by_rank[i]] >= 0:
                busy += 1.0
                need += share[running[by_rank[i]] % n]
        level = 0.0 if serial > 0 and need > 1 else 1.0  # the most of a lane's bandwidth that a task gets
        while level < 1:
            rest, lacking = need / (1 + serial * (need - 1)), 0.0
            for i in range(first, last):
                if running[by_rank[i]] >= 0:
                    part = share[running[by_rank[i]] % n]
                    if part > level:
                        lacking += 1.0
                    else:
                        rest -= part
            if lacking == 0 or rest / lacking <= level:
                break
            level = rest / lacking
        for i in range(first, last):  # and neighbours slow each other down
            lane = by_rank[i]
            if running[lane] < 0:
                soon = due[lane]
            else:
                mine, much = factor[kind[lane]], 1.0
                for j in range(first, last if len(factor) > 1 else first):
                    if j != i and running[by_rank[j]] >= 0:
                        much += mine[kind[by_rank[j]]] - 1.0
                if busy > cores * much:
                    much = busy / cores
                if share[running[lane] % n] > level * much:
                    much = share[running[lane] % n] / level
                if much != slow[lane]:
                    left[lane] -= (now - since[lane]) / slow[lane]
                    slow[lane], since[lane] = much, now
                    stop[lane] = now + left[lane] * much
                soon = stop[lane]
            if soon < following:
                following = soon
        coming[here] = following
        here = 0
        for r in range(1, len(coming)):
            if coming[r] < coming[here]:
                here = r
        if coming[here] == NEVER:
            return
        now, place, ender = coming[here], rank_ptr[here], -1
