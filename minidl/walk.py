"""Earliest starts in lane order, where tasks do not slow each other down: then lanes can be walked one by one.

The proof walks in unit time, the simulator in the tasks' own times. Lanes and tasks are plain numbers here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .graph import Floats
from .loops import filled, run_loop


def walk(ptr: Any, tasks: Any, rank: Any, lane_of: Any, pred_ptr: Any, preds: Any, duration: Any, far: Any,
         release: Any, free: Any, *, sync: float = 0.0) -> tuple[int, Floats, Floats, Floats]:
    """(how many tasks ran, begin, end, when the last predecessor was there); the last three by task, -1 where it never
    ran.

    Lane i runs `tasks[ptr[i]:ptr[i + 1]]` in order, not before time `free[i]`, which is set to its end. Task t waits
    for `preds[pred_ptr[t]:pred_ptr[t + 1]]` and until `release[t]`. A predecessor on another lane of its rank counts
    `sync` later, on another rank `far` later: one number per edge, or one for all. `lane_of`: the lane of each task;
    `rank`: the rank of each lane. Where `release` and `far` are empty, they and `sync` do not count. All columns are
    `prepared`.
    """
    n, lanes = len(duration), len(rank)
    of_lanes = [filled(n, lanes, x) for x in (0, -1, 0)]
    of_tasks = [filled(n, n, x) for x in (-1, -1.0, -1.0, 0.0)]
    done, after = run_loop(
        _walk, n, float(sync), int(len(far) > 0), int(len(far) > 1), int(len(release) > 0), ptr, tasks, rank, lane_of,
        pred_ptr, preds, duration, far, release, free, *of_lanes, *of_tasks)
    return done, np.asarray(after.begin), np.asarray(after.end), np.asarray(after.ready)


def _walk(sync, delays, each, waits, ptr, tasks, rank, lane_of, pred_ptr, preds,  # type: ignore[no-untyped-def]
          duration, far, release, free, at, sleeper, stack, waiting, begin, end, ready):
    """Every lane runs until it must wait for a task of another lane, which then wakes it. `waiting[t]`: the first lane
    that waits for task t; `sleeper[lane]`: the next one. `stack`: the lanes that can go on, at first all."""
    done, top = 0, len(stack)
    for lane in range(top):
        stack[lane] = top - 1 - lane
    while top > 0:
        top -= 1
        lane = stack[top]
        i, last, time = ptr[lane] + at[lane], ptr[lane + 1], free[lane]
        while i < last:
            task = tasks[i]
            arrival, blocked = release[task] if waits else 0.0, -1
            for e in range(pred_ptr[task], pred_ptr[task + 1]):
                p = preds[e]
                reach = end[p]
                if reach < 0:
                    blocked = p
                    break
                if delays and lane_of[p] != lane:
                    reach += sync if rank[lane_of[p]] == rank[lane] else far[e * each]
                if reach > arrival:
                    arrival = reach
            if blocked >= 0:
                sleeper[lane], waiting[blocked] = waiting[blocked], lane
                break
            ready[task] = arrival
            if arrival > time:
                time = arrival
            begin[task] = time
            time += duration[task]
            end[task] = time
            done += 1
            other = waiting[task]
            while other >= 0:
                stack[top] = other
                top += 1
                other = sleeper[other]
            i += 1
        at[lane], free[lane] = i - ptr[lane], time
    return done
