"""The steady state of a stale pipeline, which never drains: the body of a loop in which steps overlap.

A policy orders several steps in a row; on each rank, what stands from its first task of one step to its first task of
the next is the body. The step before is not complete there: its last backwards and updates are late tasks (`4B6@1`).
The first step is the body without them, and the last one is completed by them alone (`minidl.passes.boundary`).

Synchronous late tasks come before everything that the next step reads of them. Here the next step's forwards run on
older weights, so the order of the lanes decides which weights a task reads (`versions.py`). Of all else each task must
read what it reads in one process: that is proved here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...graph import ROLES, Ints, Launch, Role, Rows, StorageSpec, TaskGraph, derive_edges
from ...passes.boundary import Mask, outliving
from ...plans import Plan, Versions
from ...schedule import Schedule
from ...tasks import Kind, as_recorded, repack, unpack
from .placement import PipelineError, Placement
from .policies import Policy
from .problem import Problem
from .versions import updates, versions_of, wanted, whole, with_versions

STEPS = 4  #: steps that a policy orders; the third one is the body


def steady_order(name: str, chosen: Policy, problem: Problem,
                 options: Mapping[str, Any]) -> tuple[Schedule, Placement, Versions]:
    """The order of a body, where a policy's tasks of the step before are late, their placement, and the weight versions
    that they read, counted from the start of their own step: version -1 is one update before it.

    Raises PipelineError for a policy whose order or versions differ from step to step, or which works on micro-batches
    of more than two steps at a time.
    """
    several = int(options.get("mini_batches", 1))
    count = problem.micro_batches * several
    if "mini_batches" in chosen.options:
        options = {**options, "mini_batches": several * STEPS}
    else:
        problem = replace(problem, micro_batches=count * STEPS)
    schedule, placement, versions = _several(name, chosen, problem, options)
    keys, read = [], []
    for i, lane in enumerate(schedule.lanes):
        own = unpack(schedule.order(i))
        step = own.micro_batch // count
        since = versions.read[schedule.ptr[i] : schedule.ptr[i + 1]] - step * (count // versions.every)
        first, begin, end = (int(np.argmax(step >= k)) for k in (1, STEPS - 2, STEPS - 1))
        late = STEPS - 2 - step[begin:end]
        if ((late < 0) | (late > 1)).any() or end - begin != np.count_nonzero(step == 1):
            raise PipelineError(f"{name} works on micro-batches of more than two steps of {count} at a time on rank "
                                f"{lane.rank}; take more micro-batches")
        keys.append(repack(schedule.order(i)[begin:end], micro_batch=own.micro_batch[begin:end] % count, late=late))
        read.append(since[begin:end])
        if not (np.array_equal(schedule.order(i)[:first], as_recorded(keys[-1][late == 0]))
                and np.array_equal(np.maximum(since[:first], 0), np.maximum(read[-1][late == 0], 0))):
            raise PipelineError(f"{name} does not repeat on rank {lane.rank}: its first step differs from the later "
                                f"ones by more than what is left of the step before")
    return (Schedule(schedule.lanes, np.cumsum([0, *map(len, keys)]), np.concatenate(keys)), placement,
            replace(versions, read=np.concatenate(read)))


def _several(name: str, chosen: Policy, problem: Problem,
             options: Mapping[str, Any]) -> tuple[Schedule, Placement, Versions]:
    """What the policy orders: several steps in a row."""
    if chosen.on_network is not None:
        return chosen.parted(problem, options)
    made = chosen.ordered(problem, options)
    if isinstance(made, Plan):
        raise PipelineError(f"{name} makes its own graph and cannot order a recorded graph")
    schedule = made if isinstance(made, Schedule) else made[0]
    versions = chosen.read(problem, schedule, options)
    assert versions is not None
    return schedule, problem.placement, versions


def with_updates(name: str, graph: TaskGraph, schedule: Schedule, placement: Placement,
                   versions: Versions) -> tuple[TaskGraph, Schedule, Versions]:
    """The body of a recorded step in stages: its graph, the schedule with updates and the graph's other tasks, and the
    version that each entry reads. Raises PipelineError where a task would read another value than in one process."""
    schedule, versions = _later(name, graph, schedule, versions)
    ordered = _joined(graph, schedule, placement, versions)
    versions = versions_of(schedule, versions, ordered)
    body = graph.take(*_order(name, graph, ordered))
    set_once = _set_once(body)
    _check_values(name, graph, body, set_once)
    body = _kept(body, ordered, set_once)
    return outliving(with_versions(name, body, ordered, versions)), ordered, versions


def _later(name: str, graph: TaskGraph, schedule: Schedule, versions: Versions) -> tuple[Schedule, Versions]:
    """The body with more late tasks: a task is late if one that it needs on another rank is. So the body of a rank that
    has no forwards may begin before its first task of a step."""
    lane_of, late = np.full((2, len(graph)), -1)
    ids = graph.find(as_recorded(schedule.keys))
    lanes, read = [], []
    for i in range(len(schedule.lanes)):
        own = slice(schedule.ptr[i], schedule.ptr[i + 1])
        mine = ids[own]
        lanes.append(mine.tolist())
        read.append(versions.read[own].tolist())
        lane_of[mine[mine >= 0]] = i
        late[mine[mine >= 0]] = unpack(schedule.keys[own]).late[mine >= 0]
    pairs = [(p, t) for t in range(len(graph)) for p in graph.preds[t].tolist()
             if min(lane_of[p], lane_of[t]) >= 0 and lane_of[p] != lane_of[t]]
    keys = [schedule.order(i).tolist() for i in range(len(lanes))]
    while behind := [t for p, t in pairs if late[p] > late[t]]:
        i = int(lane_of[behind[0]])
        at = lanes[i].index(behind[0])
        moved = [t for t in lanes[i][at:] if t >= 0]
        if late[moved].any() or at == 0:
            raise PipelineError(f"{name} works on micro-batches of more than two steps at a time on rank "
                                f"{schedule.lanes[i].rank}; take more micro-batches")
        late[moved] = 1
        keys[i][at:] = repack(np.array(keys[i][at:]), late=1).tolist()
        lanes[i], read[i], keys[i] = ([*column[at:], *column[:at]] for column in (lanes[i], read[i], keys[i]))
    return (replace(schedule, keys=np.concatenate([np.array(k, np.int64) for k in keys])),
            replace(versions, read=np.concatenate([np.array(r, np.int64) for r in read])))


def _joined(graph: TaskGraph, schedule: Schedule, placement: Placement, versions: Versions) -> Schedule:
    """The order of forwards and backwards with the graph's other tasks, each as soon as the tasks it needs on its rank
    have run; late if one of them is. What brings a version of a weight to another rank stands before the first task
    that reads it."""
    home = placement.home(graph.keys, int(graph.micro_batch.max(initial=0)) + 1)
    lanes: list[list[tuple[int, int]]] = []  # (task, late)
    for i in range(len(schedule.lanes)):
        keys = schedule.order(i)
        found = graph.find(as_recorded(keys)).tolist()
        lanes.append([(t, late) for t, late in zip(found, unpack(keys).late.tolist(), strict=True) if t >= 0])
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
    return Schedule(schedule.lanes, np.cumsum([0, *map(len, lanes)]), repack(graph.keys[ids], late=when))


def _order(name: str, graph: TaskGraph, schedule: Schedule) -> tuple[Ints, Ints]:
    """All tasks in an order that keeps the order of each lane and what ranks need of each other, and their keys. Within
    a lane, accesses to parameters follow the lane's order, not the order of recording."""
    versioned = np.zeros(len(graph.buffer_bytes), bool)
    versioned[graph.writes.take(updates(graph)).ids] = True

    def others(rows: Rows) -> Rows:
        return Rows.of([[b for b in rows[t].tolist() if not versioned[b]] for t in range(len(graph))])

    results = derive_edges(others(graph.reads), others(graph.writes), len(graph.buffer_bytes))
    ids, late, lane = graph.find(as_recorded(schedule.keys)), *np.empty((2, len(graph)), np.int64)
    late[ids], lane[ids] = unpack(schedule.keys).late, schedule.lane_of_each()
    needed: list[set[int]] = [set() for _ in range(len(graph))]
    for t in range(len(graph)):
        for p in {*results[t].tolist(), *(p for p in graph.preds[t].tolist() if lane[p] != lane[t])}:
            if late[p] > late[t]:
                raise PipelineError(f"{name}: {graph.name(t)} needs {graph.name(p)}, which runs one step late")
            if late[p] == late[t]:
                needed[t].add(p)
            elif lane[p] != lane[t]:  # of the step before; now it runs after
                needed[p].add(t)
    lanes = [ids[schedule.ptr[i] : schedule.ptr[i + 1]].tolist() for i in range(len(schedule.lanes))]
    order: list[int] = []
    done: set[int] = set()
    while any(lanes):
        ready = [tasks for tasks in lanes if tasks and needed[tasks[0]] <= done]
        if not ready:
            raise PipelineError(f"{name}: {', '.join(graph.name(tasks[0]) for tasks in lanes if tasks)} wait for each "
                                f"other")
        for tasks in ready:
            done.add(tasks[0])
            order.append(tasks.pop(0))
    return np.array(order, np.int64), repack(graph.keys[order], late=late[order])


def _set_once(body: TaskGraph) -> Mask:
    """Mask of the buffers that have one value in a whole step, which late tasks must still find: inputs, and scalars
    that the host sets or that a forward reads, such as the number of dropouts."""
    role = np.array([ROLES[r] for r in body.buffer_role], object)
    written, forward = (np.zeros(len(body.buffer_bytes), bool) for _ in range(2))
    written[body.writes.ids] = True
    forward[body.reads.take(np.flatnonzero(body.kind == Kind.F)).ids] = True
    found: Mask = (role == Role.INPUT) | ((role == Role.SCALAR) & (~written | forward))
    return found


def _check_values(name: str, graph: TaskGraph, body: TaskGraph, exempt: Mask) -> None:
    """Raises PipelineError where a task of a loop reads what another task has written than in one process, or a late
    task makes an output. Parameters are exempt, as are the buffers of the mask."""
    exempt = exempt | (body.buffer_role == ROLES.index(Role.PARAMETER))
    late = np.flatnonzero(body.late)
    made = {int(body.buffer_storage[b]): t for t in late.tolist() for b in body.writes[t].tolist()}
    for view in body.outputs:
        if view.storage in made:
            raise PipelineError(f"{name}: {body.name(made[view.storage])} makes what the step returns, one step late")
    alone = [(t, step) for step in range(STEPS) for t in range(len(graph))]
    of = graph.find(as_recorded(body.keys)).tolist()
    runs = [(t, step - int(body.late[i])) for step in range(STEPS + 1) for i, t in enumerate(of)]
    wanted, found = (_read(graph, order, exempt) for order in (alone, [run for run in runs if run[1] >= 0]))
    for read, writer in wanted.items():
        if found[read] != writer:
            t, b = read
            raise PipelineError(f"{name}: {graph.name(t)} would read {graph.buffer(b).name} after the next step has "
                                f"changed it; take more micro-batches")


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


def _kept(body: TaskGraph, schedule: Schedule, set_once: Mask) -> TaskGraph:
    """The body in which the last task of each rank that is not late keeps what `set_once` marks for the late tasks, and
    then counts on, if a late task would do so."""
    reads, writes = ([set(rows[t].tolist()) for t in range(len(body))] for rows in (body.reads, body.writes))
    launches = list(body.launches)
    for i in range(len(schedule.lanes)):
        tasks = body.find(schedule.order(i))
        late, last = tasks[body.late[tasks] == 1].tolist(), int(tasks[body.late[tasks] == 0][-1])
        wanted = sorted({b for t in late for b in reads[t] if set_once[b]})
        first = {int(body.buffer_storage[b]): b for b in wanted}
        counts = [(t, launch) for t in late for launch in launches[t]
                  if {view.storage for view in launch.writes} <= first.keys()]
        for t, launch in counts:
            launches[t] = tuple(x for x in launches[t] if x is not launch)
            used = {view.storage for x in launches[t] for view in x.views}
            mine = {first[view.storage] for view in launch.views if view.storage not in used}
            reads[t], writes[t] = reads[t] - mine, writes[t] - mine
        wanted = sorted({b for t in late for b in reads[t] if set_once[b]})
        specs = [replace(body.storages[int(body.buffer_storage[b])], live=None, role=Role.STATE) for b in wanted]
        at, place = len(body.buffer_bytes), {int(body.buffer_storage[b]): len(body.storages) + n
                                             for n, b in enumerate(wanted)}
        body = body.with_storages([_renamed(spec) for spec in specs])
        number = {b: at + n for n, b in enumerate(wanted)}
        for t in late:
            if reads[t] & number.keys():
                reads[t] = {number.get(b, b) for b in reads[t]}
                launches[t] = tuple(launch.moved(place) for launch in launches[t])
        copies = [Launch("copy", (whole(body, s),), (whole(body, copy),)) for s, copy in place.items()]
        launches[last] += (*copies, *(launch for _, launch in counts))
        reads[last] |= {*wanted, *(first[view.storage] for _, launch in counts for view in launch.reads)}
        writes[last] |= {*number.values(), *(first[view.storage] for _, launch in counts for view in launch.writes)}
    return replace(body, reads=Rows.of([sorted(row) for row in reads]), writes=Rows.of([sorted(row) for row in writes]),
                   launches=tuple(launches))


def _renamed(spec: StorageSpec) -> StorageSpec:
    return replace(spec, name=f"{spec.name}, kept")
