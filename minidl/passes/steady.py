"""The steady state of a stale pipeline, which never drains: the body of a loop in which steps overlap.

A policy gives the order of a body: the step before is not complete there, and its last backwards are late tasks
(`4B6@1`). The first step is the body without them, and the last one is completed by them alone
(`minidl.passes.boundary`).

Synchronous late tasks come before everything that the next step reads of them. Here the next step's forwards run on
older weights, so the order of the lanes decides which weights a task reads (`versions.py`). Everything else each task
must read as in one process: that is proved here.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..core.columns import Ints, Rows, offsets, spread
from ..core.graph import Role, TaskGraph, derive_edges
from ..core.placement import Refused, Versions
from ..core.schedule import Schedule
from ..core.tasks import Kind, as_recorded, repack, unpack
from .boundary import Mask
from .draft import Draft
from .loss_scale import scales
from .rewrite import sums
from .versions import updates, wanted

STEPS = 4  #: steps in a row in which every task must read what it reads in one process


def steady_state(draft: Draft) -> Draft:
    """The body of a loop: updates and the graph's other tasks join the order, late if what they need is, and scalars of
    a step outlive it. Raises Refused if a task would read another value than in one process, and for a step
    whose updates come at other times than the policy's."""
    name, graph, versions = draft.name, draft.graph, draft.versions
    assert versions is not None
    _check_updates(name, graph, versions)
    schedule, versions = _later(name, graph, draft.order, versions)
    ordered = _joined(draft, schedule, versions)
    body = replace(draft.take(*_order(name, graph, ordered)), schedule=ordered,
                   versions=versions.moved(schedule, ordered))
    set_once = _set_once(body.graph)
    _check_values(name, graph, body.graph, set_once)
    return _kept(body, set_once)


def _check_updates(name: str, graph: TaskGraph, versions: Versions) -> None:
    after = {int(i) for i in graph.micro_batch[updates(graph)]}
    count = int(graph.micro_batch[graph.kind == Kind.F].max()) + 1
    if after != (set(range(versions.every - 1, count, versions.every)) if versions.every < count else {0}):
        raise Refused(name, f"it updates after every {versions.every} of {count} micro-batches, but this step was "
                      f"recorded with other updates", f"record it so (a scheduler of your own needs --update-every "
                      f"{versions.every})")


def _later(name: str, graph: TaskGraph, schedule: Schedule, versions: Versions) -> tuple[Schedule, Versions]:
    """The body with more late tasks: a task is late if one that it needs on another rank is. So the body of a rank that
    has no forwards may begin before its first task of a step."""
    ids, keys = graph.find(as_recorded(schedule.keys)), schedule.keys.copy()
    known = ids >= 0
    lane_of, late = (spread(ids[known], column[known], len(graph), -1)
                     for column in (schedule.lane_of_each(), unpack(keys).late))
    summing = sums(graph)  # which has no place yet: an update waits for what it needs
    pairs = [(p, t) for t in range(len(graph)) for q in graph.preds[t].tolist()
             for p in (graph.preds[q].tolist() if summing[q] and graph.kind[t] == Kind.U else [q])
             if min(lane_of[p], lane_of[t]) >= 0 and lane_of[p] != lane_of[t]]
    lanes = np.split(np.arange(len(ids)), schedule.ptr[1:-1])  # the entries of each
    while behind := [t for p, t in pairs if late[p] > late[t]]:
        i = int(lane_of[behind[0]])
        at = int(np.argmax(ids[lanes[i]] == behind[0]))
        moved = lanes[i][at:]
        tasks = ids[moved][known[moved]]
        if late[tasks].any() or at == 0:
            raise Refused(name, f"it works on micro-batches of more than two steps at a time on rank "
                          f"{schedule.lanes[i].rank}", _cure(graph, "take more micro-batches"))
        late[tasks] = 1
        keys[moved] = repack(keys[moved], late=1)
        lanes[i] = np.roll(lanes[i], -at)
    order = np.concatenate(lanes)
    return replace(schedule, keys=keys[order]), replace(versions, read=versions.read[order])


def _cure(graph: TaskGraph, otherwise: str) -> str:
    """The advice of a refusal. With a loss scale, backward passes follow each other over all stages (`together.py`)."""
    wait = "leave the loss scale out, for which backward passes wait on all stages"
    return wait if scales(graph).any() else otherwise


def _joined(draft: Draft, schedule: Schedule, versions: Versions) -> Schedule:
    """The order of forwards and backwards with the graph's other tasks, each as soon as the tasks it needs on its rank
    have run; late if one of them is. A task that brings a version of a weight to another rank comes before the first
    task that reads it."""
    graph, home = draft.graph, draft.rank
    entries = [*zip(graph.find(as_recorded(schedule.keys)).tolist(), unpack(schedule.keys).late.tolist(), strict=True)]
    lanes = [[(t, late) for t, late in entries[a:b] if t >= 0] for a, b in pairwise(schedule.ptr.tolist())]
    stands = {t for tasks in lanes for t, _ in tasks}
    main = {lane.rank: tasks for lane, tasks in zip(schedule.lanes, lanes, strict=True)}
    follows = (unpack(graph.keys).part > 0) & (graph.kind == Kind.U)
    for t in np.flatnonzero(~follows).tolist():
        if t not in stands:
            tasks, needed = main[int(home[t])], set(graph.preds[t].tolist())
            late, at = max(((late, i) for i, (other, late) in enumerate(tasks) if other in needed), default=(0, -1))
            tasks.insert(at + 1, (t, late))
    reads = wanted(graph, schedule, versions)
    for t in np.flatnonzero(follows).tolist():
        tasks, copies = main[int(home[t])], set(graph.writes[t].tolist())
        stage = int(graph.unit[t])
        count = int((graph.unit[updates(graph)] == stage)[~follows[updates(graph)]].sum())
        makes = 1 + int(graph.micro_batch[t]) // versions.every
        first = [(i, when, reads(other, stage) - late * count) for i, (other, late) in enumerate(tasks)
                 for when in (0, 1) if copies & set(graph.reads[other].tolist())]
        late, at = min(((when, i) for i, when, version in first if version >= makes - when * count), default=(-1, -1))
        tasks.insert(*((at, (t, late)) if at >= 0 else (len(tasks), (t, 1))))  # it may be read two steps later
    ids, when = np.array([entry for tasks in lanes for entry in tasks], np.int64).reshape(-1, 2).T
    return Schedule(schedule.lanes, offsets([*map(len, lanes)]), repack(graph.keys[ids], late=when))


def _order(name: str, graph: TaskGraph, schedule: Schedule) -> tuple[Ints, Ints]:
    """All tasks in an order that keeps the order of each lane and what ranks need of each other, and their keys. Within
    a lane, accesses to parameters follow the lane's order, not the order of recording."""
    versioned = spread(graph.writes.take(updates(graph)).ids, True, len(graph.buffer_bytes))

    def others(rows: Rows) -> Rows:
        return Rows.of([[b for b in rows[t].tolist() if not versioned[b]] for t in range(len(graph))])

    results = derive_edges(others(graph.reads), others(graph.writes), len(graph.buffer_bytes))
    ids, late, lane = graph.find(as_recorded(schedule.keys)), *np.empty((2, len(graph)), np.int64)
    late[ids], lane[ids] = unpack(schedule.keys).late, schedule.lane_of_each()
    needed: list[set[int]] = [set() for _ in range(len(graph))]
    for t in range(len(graph)):
        for p in {*results[t].tolist(), *(p for p in graph.preds[t].tolist() if lane[p] != lane[t])}:
            if late[p] > late[t]:
                raise Refused(name, f"{graph.name(t)} needs {graph.name(p)}, which runs one step late",
                              "take another order")
            if late[p] == late[t]:
                needed[t].add(p)
            elif lane[p] != lane[t]:  # of the step before; now it runs after
                needed[p].add(t)
    lanes, done = [own.tolist() for own in np.split(ids, schedule.ptr[1:-1])], dict[int, None]()  # in order
    while any(lanes):
        ready = [tasks for tasks in lanes if tasks and needed[tasks[0]] <= done.keys()]
        if not ready:
            raise Refused(name, f"{', '.join(graph.name(tasks[0]) for tasks in lanes if tasks)} wait for each other",
                          "take another order")
        done |= dict.fromkeys(tasks.pop(0) for tasks in ready)
    order = np.array([*done], np.int64)
    return order, repack(graph.keys[order], late=late[order])


def _set_once(body: TaskGraph) -> Mask:
    """Mask of the buffers that have one value in a whole step, which late tasks must still find: inputs, and scalars
    that the host sets or that a forward reads, such as the number of dropouts."""
    written, forward = (spread(rows.ids, True, len(body.buffer_bytes))
                        for rows in (body.writes, body.reads.where(body.kind == Kind.F)))
    return body.role_is(Role.INPUT) | (body.role_is(Role.SCALAR) & (~written | forward))


def _check_values(name: str, graph: TaskGraph, body: TaskGraph, exempt: Mask) -> None:
    """Raises Refused if a task of a loop reads what another task has written than in one process, or a late
    task makes an output. Parameters are exempt, as are the buffers of the mask."""
    exempt = exempt | body.role_is(Role.PARAMETER)
    late = np.flatnonzero(body.late)
    made = {int(body.buffer_storage[b]): t for t in late.tolist() for b in body.writes[t].tolist()}
    for view in body.outputs:
        if view.storage in made:
            raise Refused(name, f"{body.name(made[view.storage])} makes what the step returns, one step late",
                          _cure(body, "return results of forwards only, or take fewer ranks"))
    alone = [(t, step) for step in range(STEPS) for t in range(len(graph))]
    of = graph.find(as_recorded(body.keys)).tolist()
    runs = [(t, step - int(body.late[i])) for step in range(STEPS + 1) for i, t in enumerate(of)]
    wanted, found = (_read(graph, order, exempt) for order in (alone, [run for run in runs if run[1] >= 0]))
    for read, writer in wanted.items():
        if found[read] != writer:
            t, b = read
            raise Refused(name, f"{graph.name(t)} would read {graph.buffer(b).name} after the next step has changed it",
                          "take more micro-batches")


def _read(graph: TaskGraph, order: list[tuple[int, int]], exempt: Mask) -> dict[tuple[int, int], tuple[int, int]]:
    """(task, buffer) -> the task that has written what it reads in its last whole step, and how many steps before."""
    last: dict[int, tuple[int, int]] = {}
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for t, step in order:
        for b in graph.reads[t].tolist():
            if step == STEPS - 1 and not exempt[b]:
                writer, at = last.get(b, (-1, step))
                found[t, b] = writer, step - at
        last |= dict.fromkeys(graph.writes[t].tolist(), (t, step))
    return found


def _kept(draft: Draft, set_once: Mask) -> Draft:
    """The body in which the last task of each rank that is not late keeps what `set_once` marks for the late tasks, and
    then counts on, if a late task would do so."""
    body, e = draft.graph, draft.edit()
    for i in range(len(draft.order.lanes)):
        tasks = body.find(draft.order.order(i))
        late, last = tasks[body.late[tasks] == 1].tolist(), int(tasks[body.late[tasks] == 0][-1])
        first = {e.storage_of[b]: b for t in late for b in sorted(e.reads[t]) if set_once[b]}
        counts = [(t, launch) for t in late for launch in e.launches[t]
                  if {view.storage for view in launch.writes} <= first.keys()]
        for t, launch in counts:
            e.launches[t] = tuple(x for x in e.launches[t] if x is not launch)
            used = {view.storage for x in e.launches[t] for view in x.views}
            mine = {first[view.storage] for view in launch.views if view.storage not in used}
            e.reads[t] -= mine
            e.writes[t] -= mine
        keep = e.copies({b for t in late for b in e.reads[t] if set_once[b]}, "kept", role=Role.STATE, live=None)
        e.use(keep, *(t for t in late if e.reads[t] & keep.buffers.keys()))
        e.launches[last] += (*e.copy(keep.storages), *(launch for _, launch in counts))
        e.reads[last] |= {*keep.buffers, *(first[view.storage] for _, launch in counts for view in launch.reads)}
        e.writes[last] |= {*keep.buffers.values(),
                           *(first[view.storage] for _, launch in counts for view in launch.writes)}
    return e.draft
