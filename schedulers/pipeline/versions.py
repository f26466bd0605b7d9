"""Weight versions of a recorded step that updates several times: which one each task reads becomes part of the graph.

In a stale pipeline micro-batches run on weights of some updates ago. Here each stage keeps as many copies of its
parameters as are read at a time; an update copies the newest ones to where nobody reads any more and changes them
there, or changes them in place. The graph's edges then say all that there is to prove. The last update of a step leaves
the newest version in the parameters themselves, so nothing is under way between two steps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...graph import ROLES, Ints, Launch, Role, Rows, TaskGraph, View, derive_edges
from ...schedule import Schedule
from ...tasks import Kind
from .placement import PipelineError, Placement


def updates(graph: TaskGraph) -> Ints:
    """The tasks of a graph of stages that change parameters."""
    changes = np.zeros(len(graph), bool)
    changes[graph.writes.row_of_each()[graph.buffer_role[graph.writes.ids] == ROLES.index(Role.PARAMETER)]] = True
    return np.flatnonzero(changes & (graph.kind == Kind.U))


def with_updates(graph: TaskGraph, schedule: Schedule, placement: Placement) -> Schedule:
    """The order of forwards and backwards with the graph's other tasks, each as soon as what it needs on
    its rank has run."""
    lanes: dict[object, list[int]] = {}
    for i, lane in enumerate(schedule.lanes):
        lanes[lane] = [t for t in graph.find(schedule.order(i)).tolist() if t >= 0]
    stands = {t for tasks in lanes.values() for t in tasks}
    main = {lane.rank: lanes[lane] for lane in schedule.lanes}
    for t in range(len(graph)):
        if t not in stands:
            tasks, needed = main[int(placement.table[0][graph.unit[t]])], set(graph.preds[t].tolist())
            tasks.insert(1 + max((i for i, other in enumerate(tasks) if other in needed), default=-1), t)
    return Schedule.of(graph, lanes)  # type: ignore[arg-type]


def with_versions(graph: TaskGraph, schedule: Schedule, read: Ints) -> TaskGraph:
    """The graph of stages in which the forward and backward of a micro-batch read version `read[stage, micro-batch]` of
    their stage's weights. Version 0 is what the step begins with; each update of a stage, in the order of
    micro-batches, makes the next. The schedule says how long a version is read. Raises PipelineError for a version that
    is not there in time."""
    place = np.empty(len(graph), np.int64)
    place[schedule.ids(graph)] = np.arange(len(graph))
    parameter = ROLES.index(Role.PARAMETER)
    changing = updates(graph)
    reads, writes = ([rows[t].tolist() for t in range(len(graph))] for rows in (graph.reads, graph.writes))
    launches = list(graph.launches)
    for stage in np.unique(graph.unit[changing]).tolist():
        mine = sorted(changing[graph.unit[changing] == stage].tolist(), key=lambda t: int(graph.micro_batch[t]))
        own = sorted({b for t in mine for b in writes[t] if graph.buffer_role[b] == parameter})
        users = [t for t in range(len(graph)) if graph.unit[t] == stage and graph.kind[t] != Kind.U
                 and set(reads[t]) & set(own)]
        version = {t: int(read[stage, graph.micro_batch[t]]) for t in users}
        last = [max([place[t] for t in users if version[t] == v], default=-1) for v in range(len(mine) + 1)]
        for t in users:
            v = version[t]
            if not 0 <= v <= len(mine) or (v and place[t] < place[mine[v - 1]]):
                raise PipelineError(f"{graph.name(t)} reads version {v} of its weights before it is there")
        slot, copies = _slots([int(place[t]) for t in mine], last)
        graph, buffers, storages = _with_slots(graph, own, copies)

        for t in (*users, *mine):
            before, after = (slot[version[t]],) * 2 if t in version else (slot[mine.index(t)], slot[mine.index(t) + 1])
            reads[t] = [buffers[before].get(b, b) for b in reads[t]]
            writes[t] = [buffers[after].get(b, b) for b in writes[t]]
            copied = _copied(graph, storages[before], storages[after]) if before != after else ()
            launches[t] = (*copied, *(launch.moved(storages[after]) for launch in launches[t]))
    graph = replace(graph, reads=Rows.of([sorted(row) for row in reads]),
                    writes=Rows.of([sorted(row) for row in writes]), launches=tuple(launches))
    return graph.take(_order(graph, schedule, changing))


def _order(graph: TaskGraph, schedule: Schedule, changing: Ints) -> Ints:
    """All tasks in an order that has that of each lane, and what is needed for results that are not parameters: on
    parameters and their copies the order of the lane is meant, not that in which the step was recorded."""
    versioned = np.zeros(len(graph.buffer_bytes), bool)
    versioned[graph.writes.take(changing).ids] = True

    def others(rows: Rows) -> Rows:
        return Rows.of([[b for b in rows[t].tolist() if not versioned[b]] for t in range(len(graph))])

    needed = [set(row) for row in (derive_edges(others(graph.reads), others(graph.writes),
                                                len(graph.buffer_bytes))[t].tolist() for t in range(len(graph)))]
    lanes = [graph.find(schedule.order(i)).tolist() for i in range(len(schedule.lanes))]
    order: list[int] = []
    done: set[int] = set()
    while any(lanes):
        ready = [lane for lane in lanes if lane and needed[lane[0]] <= done]
        if not ready:
            raise PipelineError(f"{', '.join(graph.name(lane[0]) for lane in lanes if lane)} wait for each other")
        for lane in ready:
            done.add(lane[0])
            order.append(lane.pop(0))
    return np.array(order, np.int64)


def _copied(graph: TaskGraph, before: dict[int, int], after: dict[int, int]) -> tuple[Launch, ...]:
    """What copies a stage's parameters from one copy to another."""
    def view(storage: int) -> View:
        spec = graph.storages[storage]
        return View(storage, (spec.bytes // np.dtype(spec.dtype).itemsize,), (1,), 0, spec.dtype)

    return tuple(Launch("copy", (view(before[s]),), (view(after[s]),)) for s in before)


def _slots(made: list[int], last: list[int]) -> tuple[list[int], int]:
    """Which copy each version lies in, and how many there are. Version k + 1 is made at place `made[k]`; version v is
    read until `last[v]`, and by the update that makes the next one. Copy 0, the parameters, has the first and the
    last."""
    slot = [0]
    for k, at in enumerate(made):
        busy = {slot[v] for v in range(k + 1) if last[v] > at}
        final = k + 1 == len(made)
        free = [0] if final else [slot[k], *range(max(slot) + 2)]
        slot.append(next((s for s in free if s not in busy), -1))
        if slot[-1] < 0:
            raise PipelineError("the parameters are still read after the last update of a step; "
                                "the step must end with it")
    return slot, max(slot) + 1


def _with_slots(graph: TaskGraph, own: list[int],
                copies: int) -> tuple[TaskGraph, list[dict[int, int]], list[dict[int, int]]]:
    """The graph with copies of a stage's parameters, and for each copy which buffer and which storage takes
    the place of which."""
    held = sorted({int(graph.buffer_storage[b]) for b in own})
    buffers, storages = [{b: b for b in own}], [{s: s for s in held}]
    for copy in range(1, copies):
        first, at = len(graph.storages), len(graph.buffer_bytes)
        specs = [replace(graph.storages[s], name=f"{graph.storages[s].name}, copy {copy}", role=Role.STATE, live=None)
                 for s in held]
        place = {s: first + i for i, s in enumerate(held)}
        graph = graph.with_buffers(np.array(own), np.array([place[int(graph.buffer_storage[b])] for b in own]),
                                   [f"{graph.buffer_names[b]}, copy {copy}" for b in own] if graph.buffer_names else [],
                                   storages=specs)
        role = graph.buffer_role.copy()
        role[at:] = ROLES.index(Role.STATE)
        graph = replace(graph, buffer_role=role)
        buffers.append({b: at + i for i, b in enumerate(own)})
        storages.append(place)
    return graph, buffers, storages
