"""Weight gradients and updates across the iteration boundary: some W and U of step t run beside the forward of step
t+1.

This is software pipelining. A recorded step becomes a loop: a prologue (the first step, without late tasks), a body (a
step, with the late tasks of the step before), an epilogue (late tasks alone). The name of a late task says so: `4W0@1`
is 4W0 one step late. The step that runs beside late tasks must not overwrite what they read: where the edges of the
graph do not ensure this, the buffer becomes a double buffer. Nothing is stale: by the edges of the graph, U(t) still
comes before F(t+1). The pass runs nothing; of a schedule it uses only which tasks are late.

Stale pipelines, which never drain, have a body as their graph, with late tasks in the order that they need
(`minidl.passes.steady`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..core.columns import Ints, Rows, spread
from ..core.graph import Role, TaskGraph, check_kinds, moved_views
from ..core.schedule import Schedule
from ..core.tasks import SENDS, GraphError, Kind, repack, task_name, unpack

Mask = NDArray[np.bool_]


class BoundaryError(GraphError):
    """A task cannot cross the iteration boundary. `task`: its id in the recorded graph."""

    def __init__(self, message: str, task: int = -1) -> None:
        super().__init__(message)
        self.task = task


@dataclass(frozen=True)
class Loop:
    """The graphs of a step that repeats. All have the same storages, each with one number.

    `prologue[p]`: the first step, without late tasks; `body[p]`: a step, and before it the late tasks of the step
    before; `epilogue[p]`: only the late tasks of a step. p is the parity of the step whose forward the part holds
    (`epilogue`: of the step that it finishes); without double buffers there is one of each. A step without late tasks
    is its own prologue and body, and has no epilogue. `lasting`: storages that outlive a call, besides parameters and
    states; `doubled`: the storages of the recorded step that are double buffers. `snapshots`: pairs (scalar that the
    host sets and late tasks read, storage that keeps the value of their step); the copy is made at the end of each
    call.
    """

    prologue: tuple[TaskGraph, ...]
    body: tuple[TaskGraph, ...]
    epilogue: tuple[TaskGraph, ...] = ()
    lasting: tuple[int, ...] = ()
    doubled: tuple[int, ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()


def must_stay(graph: TaskGraph) -> Mask:
    """Mask of the tasks that cannot be late: F, O and B, the tasks that they need, and those that make an output."""
    stays = ~np.isin(graph.kind, [int(Kind.W), int(Kind.U)])
    wanted = np.isin(graph.buffer_storage, [view.storage for view in graph.outputs])
    for task in reversed(range(len(graph))):
        stays[task] = stays[task] or stays[graph.succs[task]].any() or wanted[graph.writes[task]].any()
    return stays


def cross_boundary(graph: TaskGraph, late: Iterable[int]) -> Loop:
    """The loop of a recorded step whose tasks `late` (ids of W and U) run one step late. Raises BoundaryError for a
    task that cannot be late because a task of its step that is not late needs it."""
    check_kinds(graph=(graph, TaskGraph))
    crosses = spread(list(late), True, len(graph))
    if not crosses.any():
        return Loop((graph,), (graph,))
    _check(graph, crosses)
    then, now, given = np.flatnonzero(crosses), np.flatnonzero(~crosses), [view.storage for view in graph.inputs]

    def touched(rows: Rows, tasks: Ints) -> Mask:
        return spread(graph.buffer_storage[rows.take(tasks).ids], True, len(graph.storages))

    made, read_late, written_late = (touched(*rows) for rows in ((graph.writes, now), (graph.reads, then),
                                                                 (graph.writes, then)))
    scalar = np.array([s.role == Role.SCALAR for s in graph.storages], bool)
    snapshots = (read_late | written_late) & scalar & ~(made | written_late)
    snapshots[given], made[given] = False, True
    lasting = (read_late | written_late) & made & ~np.array([s.role.persistent for s in graph.storages], bool)
    # which copy of a buffer a group of tasks uses; the group is the parity of the tasks' step, plus 2 for late tasks
    copy = np.zeros((len(graph.buffer_bytes), 4), np.int64)
    copy[lasting[graph.buffer_storage]] = (0, 1, 0, 1)
    copy[snapshots[graph.buffer_storage]] = (0, 0, 1, 1)
    doubled = lasting & _overtaken(_part(graph, then, now, copy, 0, lasting)[0], graph, then, now, given)
    copy[(lasting & ~doubled)[graph.buffer_storage]] = 0
    none, parities = np.empty(0, np.int64), range(1 + int(doubled.any()))
    prologue, body, epilogue = ([_part(graph, *tasks, copy, p, lasting) for p in parities]
                                for tasks in ((none, now), (then, now), (then, none)))
    moves, twice = body[0][1], np.flatnonzero(doubled).tolist()
    return Loop(tuple(part for part, _ in prologue), tuple(part for part, _ in body),
                tuple(part for part, _ in epilogue), (*np.flatnonzero(lasting).tolist(), *(moves[1][s] for s in twice)),
                tuple(twice), tuple((s, moves[2][s]) for s in np.flatnonzero(snapshots).tolist()))


def _check(graph: TaskGraph, crosses: Mask) -> None:
    stays = must_stay(graph)
    for task in np.flatnonzero(crosses).tolist():
        if stays[task]:
            raise BoundaryError(f"task {graph.name(task)} cannot cross the iteration boundary: a forward or output "
                                f"gradient task or an output of its own step needs it", task)
        if early := [s for s in graph.succs[task].tolist() if not crosses[s]]:
            raise BoundaryError(f"task {graph.name(task)} cannot cross the iteration boundary alone: "
                                f"{graph.name(early[0])} of the same step needs it and is not late", task)


def _part(graph: TaskGraph, then: Ints, now: Ints, copy: Ints, parity: int,
          lasting: Mask) -> tuple[TaskGraph, list[dict[int, int]]]:
    """The graph of the late tasks `then` of the step before and the tasks `now` of the step of this parity, each on its
    copies; and for each group a map from a storage to its copy. Without `now`, the late tasks are of the step of this
    parity."""
    rows = np.concatenate([then, now])
    tasks = graph.take(rows, repack(graph.keys[rows], late=np.repeat([1, 0], [len(then), len(now)])))
    before = 1 - parity if len(now) else parity
    part, moves = tasks.with_copies(copy, np.repeat([2 + before, parity], [len(then), len(now)]))
    outlives = spread([*np.flatnonzero(lasting).tolist(), *(m[s] for m in moves for s in m)], True, len(part.storages))
    ours = moves[parity]
    return replace(_as_states(part, outlives), inputs=moved_views(graph.inputs, ours) if len(now) else (),
                   outputs=moved_views(graph.outputs, ours) if len(now) else ()), moves


def _as_states(graph: TaskGraph, outlives: Mask) -> TaskGraph:
    """The graph in which these storages outlive a step."""
    role = np.where(outlives[graph.buffer_storage], Role.STATE.number, graph.buffer_role)
    return replace(graph, buffer_role=role.astype(graph.buffer_role.dtype), storages=tuple(
        replace(s, role=Role.STATE) if outlives[i] else s for i, s in enumerate(graph.storages)))


def _overtaken(body: TaskGraph, graph: TaskGraph, then: Ints, now: Ints, given: Iterable[int]) -> Mask:
    """The storages of `graph` that a step would overwrite too early if they had one copy: those that the host fills,
    and those that a task of the step writes although no edge puts it after all late tasks that use them. `body`: the
    loop's body with two copies of every lasting storage, so that only unavoidable edges are left."""
    after = [0] * len(body)  # the late tasks that surely come before each task, as bits
    for task in range(len(body)):
        after[task] = 1 << task if task < len(then) else 0
        for p in body.preds[task].tolist():
            after[task] |= after[p]
    bit = {task: 1 << i for i, task in enumerate(then.tolist())}
    users = [sum(bit.get(task, 0) for task in tasks) for tasks in graph.storage_users.lists()]
    found = spread(list(given), True, len(graph.storages))
    for i, task in enumerate(now.tolist(), len(then)):
        for s in graph.buffer_storage[graph.writes[task]].tolist():
            found[s] |= bool(users[s] & ~after[i])
    return found


# -------------------------------------------------------------------------------------------- schedules with late tasks
def late_tasks(graph: TaskGraph, schedule: Schedule) -> Ints:
    """The ids in the recorded graph of a schedule's late tasks. Raises ScheduleError for unknown tasks."""
    late = schedule.keys[unpack(schedule.keys).late == 1]
    ids = graph.find(repack(late, late=0))
    if (ids < 0).any():
        key = int(late[int(np.argmax(ids < 0))])
        raise schedule.error(f"unknown task {task_name(key)}: the graph has no {task_name(repack(key, late=0))}", [key])
    return ids


def with_late(schedule: Schedule, graph: TaskGraph, tasks: Ints) -> Schedule:
    """The schedule with these tasks of the graph made late."""
    return replace(schedule, keys=repack(schedule.keys, late=np.isin(schedule.keys, graph.keys[tasks])), slots=None)


def loop(graph: TaskGraph, schedule: Schedule) -> Loop:
    """The loop that a schedule runs, of a recorded step or a body. Raises ScheduleError if tasks cannot be late."""
    if graph.late.any():
        now, late = graph.take(np.flatnonzero(~graph.late)), graph.take(np.flatnonzero(graph.late))
        return Loop((now,), (graph,), (replace(late, inputs=(), outputs=()),))
    try:
        return cross_boundary(graph, late_tasks(graph, schedule).tolist())
    except BoundaryError as error:
        raise schedule.error(str(error), [int(repack(graph.keys[error.task], late=1))]) from None


def outliving(body: TaskGraph) -> TaskGraph:
    """A body in which results of a step that its late tasks read outlive the step."""
    made, read = (spread(body.buffer_storage[rows.take(np.flatnonzero(tasks)).ids], True, len(body.storages))
                  for rows, tasks in ((body.writes, ~body.late & ~np.isin(body.kind, SENDS)), (body.reads, body.late)))
    return _as_states(body, made & read & ~np.array([spec.role.persistent for spec in body.storages], bool))
