"""Messages between ranks as tasks of a schedule: the proof that none waits for ever.

A send and its receive find each other by the message number that `minidl.program` gives them, whatever other messages
are under way between the two ranks.
"""

from __future__ import annotations

import numpy as np

from ..graph import Rows, TaskGraph
from ..loops import run_loop
from ..schedule import Schedule
from ..tasks import RECEIVES, SENDS, task_name


def check_rendezvous(graph: TaskGraph, schedule: Schedule) -> None:
    """Proves that each send has one receive, and that rendezvous sends, which end only when the receive is posted, do
    not deadlock. Raises ScheduleError.

    A rendezvous send and its receive are one event on two lanes, so lanes and edges must not form a circle through such
    events.
    """
    ids, n = schedule.ids(graph), len(graph)
    source, target = graph.preds.ids.astype(np.int64), graph.preds.row_of_each().astype(np.int64)
    event = np.arange(n)
    meets = np.isin(graph.kind[target], RECEIVES) & np.isin(graph.kind[source], SENDS)
    met = np.bincount(np.concatenate([source[meets], target[meets]]), minlength=n)
    alone = np.flatnonzero(np.isin(graph.kind, [*SENDS, *RECEIVES]) & (met != 1))
    if alone.size:
        key = int(graph.keys[alone[0]])
        what, other = ("send", "receive") if graph.kind[alone[0]] in SENDS else ("receive", "send")
        raise schedule.error(f"{task_name(key)} is a {what} with {met[alone[0]]} {other}s; it must have "
                             f"exactly one", [key])
    event[target[meets]] = source[meets]
    inner = np.ones(n, bool)
    inner[schedule.ptr[:-1][np.diff(schedule.ptr) > 0]] = False
    after = np.flatnonzero(inner)
    source, target = event[np.concatenate([source, ids[after - 1]])], event[np.concatenate([target, ids[after]])]
    real = source != target
    source, target = source[real], target[real]
    succs = Rows.from_pairs(source, target, n)
    done, *_, left, _ = run_loop(_drain, n, succs.ptr, succs.ids, np.bincount(target, minlength=n),
                                 np.zeros(n, np.int64))
    if done == n:
        return
    preds = Rows.from_pairs(target, source, n)
    at, way = int(np.argmax(left > 0)), []
    while at not in way:
        way.append(at)
        at = next(int(q) for q in preds[at] if left[q] > 0)
    circle = [int(graph.keys[t]) for t in way[way.index(at) :]]
    raise schedule.error("deadlock under rendezvous sends, where a send ends only when its receive is posted: "
                         + " waits for ".join(task_name(key) for key in [*circle, circle[0]]), circle)


def _drain(succ_ptr, succ_ids, missing, queue):  # type: ignore[no-untyped-def]
    """How many events can happen. `missing` keeps how many events each of the others waits for."""
    tail = 0
    for t in range(len(missing)):
        if missing[t] == 0:
            queue[tail] = t
            tail += 1
    head = 0
    while head < tail:
        t = queue[head]
        head += 1
        for i in range(succ_ptr[t], succ_ptr[t + 1]):
            s = succ_ids[i]
            missing[s] -= 1
            if missing[s] == 0:
                queue[tail] = s
                tail += 1
    return tail
