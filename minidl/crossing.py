"""Schedules in which tasks cross the border of an iteration, beside the recorded step that they are for.

A schedule names every task of the step once; `4W0@1` says that 4W0 runs one step late, beside the next forward. A step
as it repeats is then a body of the border (`minidl.border`), and this schedule is that of the body.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .border import Border, BorderError, cross_border
from .graph import Ints, TaskGraph, task_name, unpack
from .memory import plan_memory
from .schedule import Schedule

_BARE = (1 << 48) - 1  # a task's key without its iteration


@dataclass(frozen=True)
class Steady:
    """A step as it repeats: `graph` is the recorded one, or a body of the `border` where tasks cross it."""

    graph: TaskGraph
    schedule: Schedule
    border: Border | None = None

    @property
    def parts(self) -> tuple[TaskGraph, ...]:
        """All graphs that such a run needs, without those that differ only in the copy that they use."""
        return (self.graph,) if self.border is None else (self.graph, self.border.first[0], self.border.drain[0])

    def peak_bytes(self, limit: int | None = None) -> int:
        """Of the part that needs most. Raises MemoryLimitError above the limit."""
        return max(plan_memory(part, self.schedule.only(part), limit).peak_bytes for part in self.parts)


def delayed(graph: TaskGraph, schedule: Schedule) -> Ints:
    """The ids in the recorded graph of the tasks that run one step late. Raises ScheduleError for unknown ones."""
    if graph.iteration.any():
        return np.empty(0, np.int64)
    late = schedule.keys[unpack(schedule.keys)[3] == 1]
    ids = graph.find(late & _BARE)
    if (ids < 0).any():
        key = int(late[int(np.argmax(ids < 0))])
        raise schedule.error(f"unknown task {task_name(key)}: the graph has no {task_name(key & _BARE)}", [key])
    return ids


def steady(graph: TaskGraph, schedule: Schedule) -> Steady:
    """Proves the schedule. Raises ScheduleError, also for tasks that cannot cross."""
    late = delayed(graph, schedule)
    try:
        border = cross_border(graph, late) if len(late) else None
    except BorderError as error:
        raise schedule.error(str(error), [int(graph.keys[error.task]) + _BARE + 1]) from None
    body = border.body[0] if border else graph
    return Steady(body, schedule.validate(body), border)


def late(schedule: Schedule, graph: TaskGraph, tasks: Ints) -> Schedule:
    """The schedule with these tasks of the graph marked as one step late."""
    keys = schedule.keys.copy()
    keys[np.isin(keys, graph.keys[tasks])] += _BARE + 1
    return replace(schedule, keys=keys, slots=None)

