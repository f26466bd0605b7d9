"""PD-ASGD: forward and backward threads on one device, and an update as soon as a layer has its gradient.

"PD-ASGD" and "LayUp" (2410.05985, versions 1 to 3). Forward threads run one batch after another on the newest weights
of each layer, and hand them to backward threads, which compute a layer's gradients and update it at once; nobody waits
for other batches. So a forward may mix versions of weights.

Here a batch is a micro-batch with an update of its own. A simulated clock gives the moments: a task reads, of each
weight, the newest version whose update has ended when the task starts. A step in the order of these moments (the end of
an update, the start of every other task) reads exactly that, and keeps no old weights. So an asynchronous run has bits:
all schedules of the new step are equal to it. A step ends when its last batch has ended. Threads may race in real time
instead (`minidl.runtime.race`); the clock then only predicts them.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from ..core.columns import Floats
from ..core.graph import Role, TaskGraph
from ..core.machine import Machine, PlanError
from ..core.placement import Refused
from ..core.schedule import Lane, Schedule
from ..core.tasks import Kind
from ..passes.draft import Draft
from ..pricing.cost import CostModel
from .batches import Batches, staleness
from .ordered import Ordered


def moments(graph: TaskGraph, time: Floats, name: str, forward: int = 1, backward: int = 2,
            queue: int | None = None) -> tuple[list[int], dict[Lane, list[int]]]:
    """(the tasks of a step in the order of their moments, the tasks of each thread).

    At most `backward + queue` batches are under way (`queue`: by default as many as forward threads), so with one
    thread each and no queue a batch waits for the update of the one before. Ties: ends of updates first, then the
    lower key. Raises PlanError for numbers that make no sense, and Refused as `Batches.of` does.
    """
    queue = forward if queue is None else queue
    if min(forward, backward) < 1 or queue < 0:
        raise PlanError(f"{name} needs at least one forward and one backward thread and a queue of at least 0, not "
                        f"{forward}, {backward} and {queue}")
    found = Batches.of(graph, name)
    forward, backward = (min(threads, len(found.forward)) for threads in (forward, backward))  # others have no batch
    names = [f"forward{i}" if i else "main" for i in range(forward)] + [f"backward{i}" for i in range(backward)]
    lanes = {Lane(0, each): list[int]() for each in names}
    order, threads = list[int](), [*lanes.values()]
    idle = {True: [*range(forward)], False: [*range(forward, len(threads))]}
    coming = {True: [*range(len(found.forward))], False: list[int]()}  # batches in turn, whether they go forward
    under_way = 0
    events: list[tuple[float, int, int, int, int, int]] = []  # (moment, rank of ties, key, thread, batch, place)

    def go(now: float, thread: int, batch: int, place: int) -> None:
        """The next task of a thread begins; without one, the thread becomes idle."""
        tasks = (found.forward if thread < forward else found.backward)[batch]
        task = tasks[place] if place < len(tasks) else -1
        changes = task >= 0 and graph.kind[task] == Kind.U
        heapq.heappush(events, (now + (time[task] if changes else 0.0), 0 if changes else 1 if task >= 0 else 2,
                                int(graph.keys[task]) if task >= 0 else batch, thread, batch, place))

    now = 0.0
    while True:
        for ahead in (False, True):
            while idle[ahead] and coming[ahead] and (not ahead or under_way < backward + queue):
                under_way += ahead
                go(now, heapq.heappop(idle[ahead]), coming[ahead].pop(0), 0)
        if not events:
            break
        now, kind, _, thread, batch, place = heapq.heappop(events)
        if kind == 2:
            heapq.heappush(idle[thread < forward], thread)
            coming[False] += [batch] if thread < forward else []
            under_way -= thread >= forward
            continue
        task = (found.forward if thread < forward else found.backward)[batch][place]
        order.append(task)
        threads[thread].append(task)
        go(now + (time[task] if kind else 0.0), thread, batch, place + 1)
    threads[0] += found.rest
    return order + found.rest, lanes


def asynchronous(draft: Draft, forward: int = 1, backward: int = 2, queue: int | None = None) -> Draft:
    """The step in the order of its moments. Raises Refused if a task would read something else than weights and their
    states of another batch."""
    order = np.array(moments(draft.graph, draft.time, draft.name, forward, backward, queue)[0], np.int64)
    found, before = draft.take(order), _read(draft.graph)
    if _read(found.graph) != before:
        raise _shared(draft.name)
    return found


def _shared(name: str) -> Refused:
    return Refused(name, "updates of several batches share a value, such as Adam's powers or a norm",
                   "take --optimizer sgd without --clip, or one backward thread and queue=0")


def _read(graph: TaskGraph) -> dict[tuple[int, int], int]:
    """(key of a task, buffer) -> the key of the task that has written what it reads; not for parameters and states."""
    own, writer = graph.role_is(Role.PARAMETER, Role.STATE), dict[int, int]()
    found: dict[tuple[int, int], int] = {}
    for t, key in enumerate(graph.keys.tolist()):
        found |= {(key, b): writer.get(b, -1) for b in graph.reads[t].tolist() if not own[b]}
        writer |= dict.fromkeys(graph.writes[t].tolist(), key)
    return found


def _apart(graph: TaskGraph) -> bool:
    """Whether each storage is written by one batch alone, except by updates of parameters."""
    changing = graph.changed_by(graph.role_is(Role.PARAMETER)) & (graph.kind == Kind.U)
    found, batch = Batches.of(graph, "pd_asgd"), dict[int, int]()
    return all(batch.setdefault(s, i) == i for i, tasks in enumerate(zip(found.forward, found.backward, strict=True))
               for part in tasks for t in part if not changing[t]
               for s in graph.buffer_storage[graph.writes[t]].tolist())


def pd_asgd(graph: TaskGraph, cost: CostModel, machine: Machine, *, forward: int = 1, backward: int = 2,
            queue: int | None = None, clock: str = "simulated") -> Ordered:
    """Forward threads run batches (micro-batches) one after another on the newest weights of each layer; backward
    threads update each layer as soon as it has its gradient, and nobody waits (PD-ASGD, 2410.05985). `queue`: how many
    batches may be ahead of those that backward threads work on, by default the number of forward threads. One thread
    each with queue=0 is SGD, bit for bit. `clock`: "simulated", or "real": the threads race, so runs differ, and each
    repeats from its log."""
    _, lanes = moments(graph, cost.durations(graph), "pd_asgd", forward, backward, queue)
    lanes = {lane: sorted(tasks) for lane, tasks in lanes.items()}  # if tasks have been cut since the step was ordered
    late = np.concatenate([*staleness(graph).values(), [0]])
    notes: dict[str, Any] = {"stale": bool(late.any()), "staleness": {
        "mean": round(float(late[:-1].mean()), 4), "most": int(late.max())}}
    if clock not in ("simulated", "real"):
        raise PlanError(f"pd_asgd: the clock is simulated or real, not {clock!r}")
    if clock == "real":
        most = backward + (forward if queue is None else queue)
        if most > 1 and not _apart(graph):
            raise _shared("pd_asgd")
        notes = {"stale": most > 1, "race": {"threads": (forward, backward), "most": most}}
    return Ordered(Schedule.of(graph, {lane: tasks for lane, tasks in lanes.items() if tasks}), notes)
