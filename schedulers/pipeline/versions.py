"""Weight versions of a step with several updates: the version that each task reads becomes part of the graph.

In a stale pipeline micro-batches run on weights of some updates ago. The parameters themselves are always the newest
version, which updates change in place. Before an update changes them, it copies the version if it is still to be read,
or moves an average towards it. Copies are buffers of the graph like activations, so its edges are enough for the proof;
a copy takes the place of one that is read no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ...graph import ROLES, Ints, Launch, Role, Rows, TaskGraph, View
from ...plans import Versions
from ...schedule import Schedule
from ...tasks import Kind, as_recorded, unpack
from .placement import PipelineError


def updates(graph: TaskGraph) -> Ints:
    """The tasks of a graph of stages that change parameters."""
    changes = np.zeros(len(graph), bool)
    changes[graph.writes.row_of_each()[graph.buffer_role[graph.writes.ids] == ROLES.index(Role.PARAMETER)]] = True
    return np.flatnonzero(changes & (graph.kind == Kind.U))


def versions_of(schedule: Schedule, versions: Versions, ordered: Schedule) -> Versions:
    """The versions of a policy's schedule for `ordered`, which also has updates and other tasks: these have the version
    of their time."""
    read = dict(zip(schedule.keys.tolist(), versions.read.tolist(), strict=True))
    of_its_time = unpack(ordered.keys).micro_batch // versions.every
    return replace(versions, read=np.array([read.get(key, other) for key, other in
                                            zip(ordered.keys.tolist(), of_its_time.tolist(), strict=True)], np.int64))


def wanted(graph: TaskGraph, schedule: Schedule, versions: Versions) -> Callable[[int, int], int]:
    """A function from a task and a stage to the version that the task reads of the stage's weights. Tasks of other
    stages read the version that the stage's own forward reads (see `follow.py`)."""
    ids, own = graph.find(as_recorded(schedule.keys)), unpack(schedule.keys)
    if graph.late.any():
        ids = graph.find(schedule.keys)
    read = dict(zip(ids.tolist(), versions.read.tolist(), strict=True))
    forward = {(unit, micro_batch): version for unit, micro_batch, version in zip(
        *(column[own.kind == Kind.F].tolist() for column in (own.unit, own.micro_batch, versions.read)), strict=True)}

    def version(task: int, stage: int) -> int:
        return int(read[task] if graph.unit[task] == stage else forward[stage, int(graph.micro_batch[task])])

    return version


def with_versions(name: str, body: TaskGraph, schedule: Schedule, versions: Versions) -> TaskGraph:
    """The body of a loop whose tasks read the versions of their stage's weights that `versions` gives for the schedule.

    Version 0 is the newest one when a step begins, with all updates of the steps before; each update of a stage, in the
    order of micro-batches, makes the next one. When the loop begins, all older versions are alike: copies then hold the
    parameters' own values. A moving average replaces old versions if `versions` says so. Let d be the age of all
    versions that are read: the average begins with the weights, and each update first moves it by 1/d of the way to the
    weights. It is then W_t - d G, where G is the moving average of updates with decay (d - 1) / d, and 0 at first.
    Raises PipelineError for a version that does not exist in time, or no longer, or for different ages under an
    average.
    """
    version = wanted(body, schedule, versions)
    parameter = ROLES.index(Role.PARAMETER)
    changing = updates(body)
    reads, writes = ([set(rows[t].tolist()) for t in range(len(body))] for rows in (body.reads, body.writes))
    launches = list(body.launches)
    part = unpack(body.keys).part
    average = versions.history == "average"
    for stage, copy in sorted({(int(body.unit[t]), int(part[t])) for t in changing}):
        mine = changing[(body.unit[changing] == stage) & (part[changing] == copy)]
        own = sorted({b for t in mine.tolist() for b in writes[t] if body.buffer_role[b] == parameter})
        users = [t for t in range(len(body)) if body.kind[t] != Kind.U and reads[t] & set(own)]
        late = int(body.late[mine].sum())  # updates of the step before: version 0 comes after them
        newest = dict(zip(users, (np.searchsorted(mine, users) - late).tolist(), strict=True))
        old = {}
        for t in users:
            found = version(t, stage) - len(mine) * int(body.late[t])
            if found > newest[t]:
                raise PipelineError(f"{name}: {body.name(t)} reads version {version(t, stage)} of its weights before "
                                    f"it exists")
            if found < newest[t] and (versions.history != "none" or body.unit[t] == stage):
                old[t] = found
        if average:
            age = _age(body, {t: newest[t] - v for t, v in old.items()})
            slots, lasting = dict.fromkeys(old, 0), {0} if old else set()
            moves = dict.fromkeys(mine.tolist() if old else [], 0)
        else:
            slots, moves, lasting = _slots(name, body, mine, old, late)
        names = ["average"] if average and old else [f"kept {i}" for i in range(max(moves.values(), default=-1) + 1)]
        body, copies = _with_copies(body, own, names, lasting)
        for t, slot in slots.items():
            buffers, storages = copies[slot]
            reads[t] = {buffers.get(b, b) for b in reads[t]}
            launches[t] = tuple(launch.moved(storages) for launch in launches[t])
        for t, slot in moves.items():
            buffers, storages = copies[slot]
            reads[t] |= {*own, *(buffers.values() if average else ())}
            writes[t] |= {*buffers.values()}
            launches[t] = (*(_averaged(body, storages, age) if average else copied(body, storages)), *launches[t])
    return replace(body, reads=Rows.of([sorted(row) for row in reads]),
                   writes=Rows.of([sorted(row) for row in writes]), launches=tuple(launches))


def _slots(name: str, body: TaskGraph, mine: Ints, old: dict[int, int],
           late: int) -> tuple[dict[int, int], dict[int, int], set[int]]:
    """Places for old versions, as few as the loop allows: (task that reads one -> place, update that copies the
    version that it is about to change -> place, the places that must outlive a step). `mine`: the updates in order;
    `old`: task -> version, of which an update after it has been made."""
    end: dict[int, int] = {}  # update -> the last task that reads its copy, counted on into the next step
    made: dict[int, int] = {}
    for t, wanted in old.items():
        steps, k = divmod(wanted + late, len(mine))
        made[t] = int(mine[k])
        if steps < -1 or (steps == -1 and t > made[t]):
            raise PipelineError(f"{name}: {body.name(t)} reads weights that are older than a step of {len(mine)} "
                                f"updates; take more micro-batches")
        end[made[t]] = max(end.get(made[t], -1), t - steps * len(body))
    place: dict[int, int] = {}
    for u in sorted(end, key=lambda u: (end[u] < len(body), u)):
        taken = {place[v] for v in place for turn in (-len(body), 0, len(body))
                 if v + turn <= end[u] and u <= end[v] + turn}
        place[u] = min({*range(len(place) + 1)} - taken)
    return ({t: place[u] for t, u in made.items()}, place,
            {place[u] for u in end if end[u] >= len(body) or body.late[u]})


def _age(graph: TaskGraph, old: dict[int, int]) -> int:
    """The age, in updates, of the weights that tasks read as an average. `old`: task -> age."""
    age = max(old.values(), default=0)
    for t, found in old.items():
        if found != age:
            raise PipelineError(f"{graph.name(t)} reads weights {found} updates old, but other tasks of its stage read "
                                f"weights {age} updates old; a moving average gives only one age")
    return age


def copied(graph: TaskGraph, storages: dict[int, int]) -> tuple[Launch, ...]:
    """Launches that copy each storage (key) as a whole to its target (value)."""
    return tuple(Launch("copy", (whole(graph, s),), (whole(graph, copy),)) for s, copy in storages.items())


def _averaged(graph: TaskGraph, storages: dict[int, int], age: int) -> tuple[Launch, ...]:
    """Launches that move the average of the storages by one version."""
    return tuple(Launch("lerp", (whole(graph, copy), whole(graph, s)), (whole(graph, copy),),
                        constants=(("weight", 1 / age),)) for s, copy in storages.items())


def whole(graph: TaskGraph, storage: int) -> View:
    """All elements of a storage."""
    spec = graph.storages[storage]
    return View(storage, (spec.bytes // np.dtype(spec.dtype).itemsize,), (1,), 0, spec.dtype)


def _with_copies(graph: TaskGraph, own: list[int], names: list[str],
                 lasting: set[int]) -> tuple[TaskGraph, list[tuple[dict[int, int], dict[int, int]]]]:
    """The graph with copies of a stage's parameters, and for each copy two maps: original -> copied buffer, original ->
    copied storage. `lasting`: the copies that outlive a step."""
    held = sorted({int(graph.buffer_storage[b]) for b in own})
    copies = []
    for i, name in enumerate(names):
        first, at = len(graph.storages), len(graph.buffer_bytes)
        role = Role.STATE if i in lasting else Role.WORKSPACE
        specs = [replace(graph.storages[s], name=f"{graph.storages[s].name}, {name}", role=role, live=None,
                         filled=graph.storages[s].live if i in lasting else None) for s in held]
        place = {s: first + n for n, s in enumerate(held)}
        graph = graph.with_buffers(np.array(own), np.array([place[int(graph.buffer_storage[b])] for b in own]),
                                   [f"{graph.buffer_names[b]}, {name}" for b in own] if graph.buffer_names else [],
                                   storages=specs)
        roles = graph.buffer_role.copy()
        roles[at:] = ROLES.index(role)
        graph = replace(graph, buffer_role=roles)
        copies.append(({b: at + n for n, b in enumerate(own)}, place))
    return graph, copies
