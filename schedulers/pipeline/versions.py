"""Weight versions of a recorded step with several updates: the version that each task reads becomes part of the graph.

In a stale pipeline micro-batches run on weights of some updates ago. The parameters themselves are always the newest
version, which updates change in place. Before an update changes them, it copies the versions that are still to be read,
or moves an average towards them. Copies are buffers of the step like its activations: the graph's edges are enough for
the proof, and the memory plan reuses a copy's memory after its last read.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...graph import ROLES, Ints, Launch, Role, Rows, TaskGraph, View, derive_edges
from ...plans import Versions
from ...schedule import Schedule
from ...tasks import Kind, unpack
from .placement import PipelineError, Placement


def updates(graph: TaskGraph) -> Ints:
    """The tasks of a graph of stages that change parameters."""
    changes = np.zeros(len(graph), bool)
    changes[graph.writes.row_of_each()[graph.buffer_role[graph.writes.ids] == ROLES.index(Role.PARAMETER)]] = True
    return np.flatnonzero(changes & (graph.kind == Kind.U))


def with_updates(graph: TaskGraph, schedule: Schedule, placement: Placement) -> Schedule:
    """The order of forwards and backwards with the graph's other tasks, each as soon as the tasks it needs on its rank
    have run."""
    home = placement.home(graph.keys, int(graph.micro_batch.max(initial=0)) + 1)
    lanes: dict[object, list[int]] = {}
    for i, lane in enumerate(schedule.lanes):
        lanes[lane] = [t for t in graph.find(schedule.order(i)).tolist() if t >= 0]
    stands = {t for tasks in lanes.values() for t in tasks}
    main = {lane.rank: lanes[lane] for lane in schedule.lanes}
    for t in range(len(graph)):
        if t not in stands:
            tasks, needed = main[int(home[t])], set(graph.preds[t].tolist())
            tasks.insert(1 + max((i for i, other in enumerate(tasks) if other in needed), default=-1), t)
    return Schedule.of(graph, lanes)  # type: ignore[arg-type]


def versions_of(schedule: Schedule, versions: Versions, ordered: Schedule) -> Versions:
    """The versions of a policy's schedule for `ordered`, which also has updates and other tasks: these have the version
    of their time."""
    read = dict(zip(schedule.keys.tolist(), versions.read.tolist(), strict=True))
    of_its_time = unpack(ordered.keys).micro_batch // versions.every
    return replace(versions, read=np.array([read.get(key, other) for key, other in
                                            zip(ordered.keys.tolist(), of_its_time.tolist(), strict=True)], np.int64))


def with_versions(graph: TaskGraph, schedule: Schedule, versions: Versions) -> TaskGraph:
    """The graph of stages whose tasks read the versions of their stage's weights that `versions` gives for the
    schedule. Version 0 is the start of the step; each update of a stage, in the order of micro-batches, makes the next
    version.

    A moving average replaces old versions if `versions` says so. Let d be the age of all versions that are read: the
    average is W_0 until update d, and from then on each update first moves it by 1/d of the way to the weights. It is
    then W_t - d G, where G is the moving average of updates with decay (d - 1) / d; it is exact while weights move
    evenly. Raises PipelineError for a version that does not exist in time, or for different ages under an average.
    """
    place, version = np.empty((2, len(graph)), np.int64)
    ids = schedule.ids(graph)
    place[ids], version[ids] = np.arange(len(graph)), versions.read
    parameter = ROLES.index(Role.PARAMETER)
    changing = updates(graph)
    reads, writes = ([set(rows[t].tolist()) for t in range(len(graph))] for rows in (graph.reads, graph.writes))
    launches = list(graph.launches)
    part = unpack(graph.keys).part
    for stage, copy in sorted({(int(graph.unit[t]), int(part[t])) for t in changing}):
        mine = sorted(changing[(graph.unit[changing] == stage) & (part[changing] == copy)].tolist(),
                      key=lambda t: int(graph.micro_batch[t]))
        own = sorted({b for t in mine for b in writes[t] if graph.buffer_role[b] == parameter})
        users = [t for t in range(len(graph)) if graph.unit[t] == stage and graph.kind[t] != Kind.U
                 and reads[t] & set(own)]
        newest = dict(zip(users, np.searchsorted(place[mine], place[users]).tolist(), strict=True))
        for t in users:
            if not 0 <= version[t] <= newest[t]:
                raise PipelineError(f"{graph.name(t)} reads version {version[t]} of its weights before it exists")
        old = [t for t in users if version[t] < newest[t]]
        average = versions.history == "average"
        age = _age(graph, {t: (newest[t], newest[t] - int(version[t])) for t in old}) if average else 0
        kept = [0] * bool(old) if average else sorted({int(version[t]) for t in old})
        graph, copies = _with_copies(graph, own, ["average" if average else f"version {v}" for v in kept])
        for (buffers, storages), v in zip(copies, kept, strict=True):
            reading = [t for t in old if average or version[t] == v]
            for t in reading:
                reads[t] = {buffers.get(b, b) for b in reads[t]}
                launches[t] = tuple(launch.moved(storages) for launch in launches[t])
            moving = [t for t in mine[age:] if place[t] < place[reading].max()] if average else []
            for t in {mine[v], *moving}:
                reads[t] |= {*own, *(buffers.values() if t != mine[v] else ())}
                writes[t] |= {*buffers.values()}
                before = copied(graph, storages) if t == mine[v] else _averaged(graph, storages, age)
                launches[t] = (*before, *launches[t])
    graph = replace(graph, reads=Rows.of([sorted(row) for row in reads]),
                    writes=Rows.of([sorted(row) for row in writes]), launches=tuple(launches))
    return graph.take(_order(graph, schedule, changing))


def _order(graph: TaskGraph, schedule: Schedule, changing: Ints) -> Ints:
    """All tasks in an order that keeps the order of each lane, and the edges from other lanes or for results that are
    not parameters. Within a lane, accesses to parameters and their copies follow the lane's order, not the order of
    recording."""
    versioned = np.zeros(len(graph.buffer_bytes), bool)
    versioned[graph.writes.take(changing).ids] = True

    def others(rows: Rows) -> Rows:
        return Rows.of([[b for b in rows[t].tolist() if not versioned[b]] for t in range(len(graph))])

    results = derive_edges(others(graph.reads), others(graph.writes), len(graph.buffer_bytes))
    lane = np.empty(len(graph), np.int64)
    lane[schedule.ids(graph)] = schedule.lane_of_each()
    needed = [{*results[t].tolist(), *(p for p in graph.preds[t].tolist() if lane[p] != lane[t])}
              for t in range(len(graph))]
    lanes = [graph.find(schedule.order(i)).tolist() for i in range(len(schedule.lanes))]
    order: list[int] = []
    done: set[int] = set()
    while any(lanes):
        ready = [tasks for tasks in lanes if tasks and needed[tasks[0]] <= done]
        if not ready:
            raise PipelineError(f"{', '.join(graph.name(tasks[0]) for tasks in lanes if tasks)} wait for each other")
        for tasks in ready:
            done.add(tasks[0])
            order.append(tasks.pop(0))
    return np.array(order, np.int64)


def _age(graph: TaskGraph, old: dict[int, tuple[int, int]]) -> int:
    """The age, in updates, of the weights that tasks read as an average. `old`: task -> (newest version, age)."""
    age = max((age for _, age in old.values()), default=0)
    for t, (newest, found) in old.items():
        if found != min(newest, age):
            raise PipelineError(f"{graph.name(t)} reads weights {found} updates old, but other tasks of its stage read "
                                f"weights {age} updates old; a moving average gives only one age")
    return age


def copied(graph: TaskGraph, storages: dict[int, int]) -> tuple[Launch, ...]:
    """Launches that copy each storage (key) as a whole to its target (value)."""
    return tuple(Launch("copy", (_whole(graph, s),), (_whole(graph, copy),)) for s, copy in storages.items())


def _averaged(graph: TaskGraph, storages: dict[int, int], age: int) -> tuple[Launch, ...]:
    """Launches that move the average of the storages by one version."""
    return tuple(Launch("lerp", (_whole(graph, copy), _whole(graph, s)), (_whole(graph, copy),),
                        constants=(("weight", 1 / age),)) for s, copy in storages.items())


def _whole(graph: TaskGraph, storage: int) -> View:
    spec = graph.storages[storage]
    return View(storage, (spec.bytes // np.dtype(spec.dtype).itemsize,), (1,), 0, spec.dtype)


def _with_copies(graph: TaskGraph, own: list[int],
                 names: list[str]) -> tuple[TaskGraph, list[tuple[dict[int, int], dict[int, int]]]]:
    """The graph with copies of a stage's parameters, and for each copy two maps: original -> copied buffer, original ->
    copied storage."""
    held = sorted({int(graph.buffer_storage[b]) for b in own})
    copies = []
    for name in names:
        first, at = len(graph.storages), len(graph.buffer_bytes)
        specs = [replace(graph.storages[s], name=f"{graph.storages[s].name}, {name}", role=Role.WORKSPACE, live=None)
                 for s in held]
        place = {s: first + i for i, s in enumerate(held)}
        graph = graph.with_buffers(np.array(own), np.array([place[int(graph.buffer_storage[b])] for b in own]),
                                   [f"{graph.buffer_names[b]}, {name}" for b in own] if graph.buffer_names else [],
                                   storages=specs)
        role = graph.buffer_role.copy()
        role[at:] = ROLES.index(Role.WORKSPACE)
        graph = replace(graph, buffer_role=role)
        copies.append(({b: at + i for i, b in enumerate(own)}, place))
    return graph, copies
