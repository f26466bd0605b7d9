"""Weight gradients and updates across the iteration boundary: some W and U of step t run beside the
forward of step t+1.

This is software pipelining. A recorded step becomes a loop: a prologue (a step with nothing owed), a body (a step, and
the late tasks of the one before), an epilogue (late tasks alone). A late task's name says so: `4W0@1` is 4W0 one step
late. What late tasks read must not be overwritten by the step that runs beside them: where the order of the graph does
not see to that, it is kept in two copies that take turns. There is no staleness: U(t) comes before F(t+1) by the graph.
The pass runs nothing; of schedules it knows only which tasks they call late.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..graph import ROLES, Ints, Role, Rows, TaskGraph, moved_views
from ..schedule import Schedule
from ..tasks import GraphError, Kind, repack, task_name, unpack

Mask = NDArray[np.bool_]


class BoundaryError(GraphError):
    """A task that cannot cross the iteration boundary; `task` is its id in the recorded graph."""

    def __init__(self, message: str, task: int) -> None:
        super().__init__(message)
        self.task = task


@dataclass(frozen=True)
class Loop:
    """The graphs of a step that repeats. Their storages are the same, so a storage has one number in all of them.

    `prologue[p]`: a step that finds nothing owed; `body[p]`: a step, and before it the late tasks of the one before;
    `epilogue[p]`: only the late tasks of a step. p is the parity of the step whose forward they hold (`epilogue`: of
    the step that they finish); where nothing is kept in two copies there is one of each. A step without late tasks is
    its own prologue and body, and has no epilogue. `lasting`: storages that outlive a call, beside those of parameters
    and states; `doubled`: those of the recorded step that are kept in two copies. `snapshots`: scalars that the host
    sets and late tasks read -> the storage that keeps their step's value, filled at the end of each call.
    """

    prologue: tuple[TaskGraph, ...]
    body: tuple[TaskGraph, ...]
    epilogue: tuple[TaskGraph, ...] = ()
    lasting: tuple[int, ...] = ()
    doubled: tuple[int, ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()

    @property
    def parts(self) -> tuple[TaskGraph, ...]:
        """All graphs that such a run needs, without those that differ only in the copy that they use."""
        return (self.body[0], self.prologue[0], self.epilogue[0]) if self.epilogue else (self.body[0],)

    @property
    def lasting_bytes(self) -> int:
        """What is kept from one call to the next, beside parameters and states."""
        return sum(self.body[0].storages[s].bytes for s in self.lasting)


def must_stay(graph: TaskGraph) -> Mask:
    """Mask of tasks that cannot be late: F, O and B, what they need within the step, and what yields an output."""
    stays = ~np.isin(graph.kind, [int(Kind.W), int(Kind.U)])
    outputs = {view.storage for view in graph.outputs}
    wanted = np.isin(graph.buffer_storage, list(outputs))
    for task in reversed(range(len(graph))):
        stays[task] = stays[task] or stays[graph.succs[task]].any() or wanted[graph.writes[task]].any()
    return stays


@dataclass(frozen=True)
class Kept:
    """What late tasks make outlive a step: masks over the recorded graph's storages. `lasting`: what they share with
    their own step; `doubled`: those among them that need two copies; `snapshots`: scalars that the host sets. `copy`:
    for every buffer its copy in each group of tasks (the parity of their step, and 2 more for late ones)."""

    lasting: Mask
    doubled: Mask
    snapshots: Mask
    copy: Ints


def kept(graph: TaskGraph, then: Ints, now: Ints) -> Kept:
    """What outlives a step whose tasks `then` run one step late, and `now` do not."""
    touched = np.zeros(len(graph.storages), bool)  # by late tasks
    made = touched.copy()  # within the step, or given to it
    written = touched.copy()
    touched[graph.buffer_storage[graph.reads.take(then).ids]] = True
    touched[graph.buffer_storage[graph.writes.take(then).ids]] = True
    made[graph.buffer_storage[graph.writes.take(now).ids]] = True
    written[graph.buffer_storage[graph.writes.ids]] = True
    given = [view.storage for view in graph.inputs]
    made[given] = True
    persistent = np.array([s.role.persistent for s in graph.storages], bool)
    scalar = np.array([s.role == Role.SCALAR for s in graph.storages], bool)
    lasting = touched & made & ~persistent
    snapshots = touched & scalar & ~written
    snapshots[given] = False
    copy = np.zeros((len(graph.buffer_bytes), 4), np.int64)
    copy[lasting[graph.buffer_storage]] = (0, 1, 0, 1)
    copy[snapshots[graph.buffer_storage]] = (0, 0, 1, 1)
    doubled = lasting & _overtaken(_part(graph, then, now, copy, 0, lasting)[0], graph, then, now, given)
    copy[(lasting & ~doubled)[graph.buffer_storage]] = 0
    return Kept(lasting, doubled, snapshots, copy)


def cross_boundary(graph: TaskGraph, late: Iterable[int]) -> Loop:
    """The loop of a recorded step whose tasks `late` (ids of W and U) run one step late.

    Raises BoundaryError for a task that cannot be late because another of its step, which is not, needs it.
    """
    crosses = np.zeros(len(graph), bool)
    crosses[list(late)] = True
    if not crosses.any():
        return Loop((graph,), (graph,))
    _check(graph, crosses)
    then, now = np.flatnonzero(crosses), np.flatnonzero(~crosses)
    found = kept(graph, then, now)
    none = np.empty(0, np.int64)
    prologue, body, epilogue = (
        tuple(_part(graph, late_ones, step, found.copy, p, found.lasting)[0]
              for p in range(1 + int(found.doubled.any())))
        for late_ones, step in ((none, now), (then, now), (then, none)))
    _, moves = _part(graph, then, now, found.copy, 0, found.lasting)
    twice = np.flatnonzero(found.doubled).tolist()
    return Loop(prologue, body, epilogue, (*np.flatnonzero(found.lasting).tolist(), *(moves[1][s] for s in twice)),
                tuple(twice), tuple((s, moves[2][s]) for s in np.flatnonzero(found.snapshots).tolist()))


def _check(graph: TaskGraph, crosses: Mask) -> None:
    stays = must_stay(graph)
    for task in np.flatnonzero(crosses).tolist():
        if stays[task]:
            raise BoundaryError(f"task {graph.name(task)} cannot cross the iteration boundary: F, O or an "
                                f"output of its own step needs it", task)
        early = [s for s in graph.succs[task].tolist() if not crosses[s]]
        if early:
            raise BoundaryError(f"task {graph.name(task)} cannot cross the iteration boundary alone: "
                                f"{graph.name(early[0])} of the same step needs it", task)


def _part(graph: TaskGraph, then: Ints, now: Ints, copy: Ints, parity: int,
          lasting: Mask) -> tuple[TaskGraph, list[dict[int, int]]]:
    """The late tasks `then` of the step before, and the tasks `now` of the step of this parity, each on its copies; and
    which storage takes the place of which, by group. Without `now` the late tasks are of the step of this parity."""
    rows = np.concatenate([then, now])
    tasks = graph.take(rows, repack(graph.keys[rows], late=np.repeat([1, 0], [len(then), len(now)])))
    before = 1 - parity if len(now) else parity
    part, moves = tasks.with_copies(copy, np.repeat([2 + before, parity], [len(then), len(now)]))
    role = part.buffer_role.copy()
    copies = [m[s] for m in moves for s in m]
    outlives = np.zeros(len(part.storages), bool)
    outlives[: len(lasting)] = lasting
    outlives[copies] = True
    role[outlives[part.buffer_storage]] = ROLES.index(Role.STATE)
    storages = tuple(replace(s, role=Role.STATE) if outlives[i] else s for i, s in enumerate(part.storages))
    ours = moves[parity]
    return replace(part, buffer_role=role, storages=storages,
                   inputs=moved_views(graph.inputs, ours) if len(now) else (),
                   outputs=moved_views(graph.outputs, ours) if len(now) else ()), moves


def _overtaken(body: TaskGraph, graph: TaskGraph, then: Ints, now: Ints, given: Iterable[int]) -> Mask:
    """The storages of `graph` that a step would overwrite too early if they had one copy: what the host fills, and what
    a task of the step writes that need not come after every late task that touches it. `body`: with all in two copies,
    so that its edges are those that there are in any case."""
    after = [0] * len(body)  # the late tasks that surely come before each task, as bits
    for task in range(len(body)):
        mine = 1 << task if task < len(then) else 0
        for p in body.preds[task].tolist():
            mine |= after[p]
        after[task] = mine
    users = [0] * len(graph.storages)  # of each storage the late tasks that touch it, as bits
    for i, task in enumerate(then.tolist()):
        for s in _storages(graph, task, graph.reads, graph.writes):
            users[s] |= 1 << i
    found = np.zeros(len(graph.storages), bool)
    found[list(given)] = True
    for i, task in enumerate(now.tolist(), len(then)):
        for s in _storages(graph, task, graph.writes):
            found[s] |= bool(users[s] & ~after[i])
    return found


def _storages(graph: TaskGraph, task: int, *of: Rows) -> set[int]:
    return {int(graph.buffer_storage[b]) for rows in of for b in rows[task].tolist()}


# -------------------------------------------------------------------------------------------- schedules with late tasks
def late_tasks(graph: TaskGraph, schedule: Schedule) -> Ints:
    """The ids in the recorded graph of the tasks that a schedule calls late. Raises ScheduleError for unknown ones."""
    late = schedule.keys[unpack(schedule.keys).late == 1]
    ids = graph.find(repack(late, late=0))
    if (ids < 0).any():
        key = int(late[int(np.argmax(ids < 0))])
        raise schedule.error(f"unknown task {task_name(key)}: the graph has no {task_name(repack(key, late=0))}", [key])
    return ids


def with_late(schedule: Schedule, graph: TaskGraph, tasks: Ints) -> Schedule:
    """The schedule with these tasks of the graph called late."""
    return replace(schedule, keys=repack(schedule.keys, late=np.isin(schedule.keys, graph.keys[tasks])), slots=None)


def loop(graph: TaskGraph, schedule: Schedule) -> Loop:
    """The loop that a schedule means. Raises ScheduleError for tasks that cannot be late."""
    try:
        return cross_boundary(graph, late_tasks(graph, schedule).tolist())
    except BoundaryError as error:
        raise schedule.error(str(error), [int(repack(graph.keys[error.task], late=1))]) from None
