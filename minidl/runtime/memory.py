"""The memory plan: where every buffer of a step lies in one arena. Offsets are fixed before the first run.

Two storages may share bytes only if, by the schedule's happens-before, every launch that touches the one has ended
before any launch that touches the other starts. The launches of a task run in order, so what only some of them need
makes room for the others: a stage's task, which has the launches of many layers, needs no more than its layers one by
one. So reuse cannot cause a race, and a step allocates nothing. Parameters and states outlive the step, so they have
their own memory; they count toward the peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..graph import Ints, TaskGraph
from ..schedule import Schedule

ALIGNMENT = 256


class MemoryLimitError(ValueError):
    """The plan needs more memory than the limit. The message says both."""


@dataclass(frozen=True)
class MemoryPlan:
    """`offset[s]`: the byte at which storage s begins in the arena; -1 for persistent storages, which have their own
    memory, and for storages that no task touches. `peak_bytes`: arena, parameters and states together."""

    offset: Ints
    arena_bytes: int
    persistent_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.arena_bytes + self.persistent_bytes


def rounded(nbytes: Ints) -> Ints:
    """Sizes rounded up to the alignment; a storage without elements gets one unit."""
    up: Ints = np.maximum(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
    return up


def plan_memory(graph: TaskGraph, schedule: Schedule, limit: int | None = None) -> MemoryPlan:
    """Packs the storages of a step, largest first, and of equal ones those first that may share with the fewest; each
    at the lowest offset free of storages that may be alive at the same time.

    `limit`: the most bytes of the peak. Raises MemoryLimitError where the plan needs more.
    """
    size = rounded(np.array([s.bytes for s in graph.storages], np.int64))
    persistent = np.array([s.role.persistent for s in graph.storages], bool)
    touched = np.diff(graph.storage_users.ptr) > 0
    touched[[view.storage for view in (*graph.inputs, *graph.outputs)]] = True
    planned = np.flatnonzero(~persistent & touched)
    free = may_share(graph, schedule)
    offset = np.full(len(size), -1, np.int64)
    placed = np.zeros(len(size), bool)
    arena = 0
    shares = np.count_nonzero(free, axis=1)
    for s in sorted(planned.tolist(), key=lambda s: (-size[s], shares[s], s)):
        clash = np.flatnonzero(placed & ~free[s])
        at = 0
        if len(clash):
            order = clash[np.argsort(offset[clash], kind="stable")]
            begin, end = offset[order], np.maximum.accumulate(offset[order] + size[order])
            gap = np.flatnonzero(begin - np.concatenate([[0], end[:-1]]) >= size[s])
            at = int(end[gap[0] - 1]) if len(gap) and gap[0] else 0 if len(gap) else int(end[-1])
        offset[s] = at
        arena = max(arena, at + int(size[s]))
        placed[s] = True
    plan = MemoryPlan(offset, arena, int(size[persistent].sum()))
    if limit is not None and plan.peak_bytes > limit:
        raise MemoryLimitError(f"the plan needs {plan.peak_bytes:,} bytes ({plan.arena_bytes:,} in the arena, "
                               f"{plan.persistent_bytes:,} for parameters and states), more "
                               f"than the limit of {limit:,}")
    return plan


def may_share(graph: TaskGraph, schedule: Schedule) -> Ints:
    """Boolean matrix [s, t]: whether storages s and t are never alive at the same time in any run of the schedule.

    The caller counts as one more lane: it loads all inputs before the first task and reads all outputs after the last.
    Raises ValueError for a schedule of several ranks.
    """
    clocks = schedule.clocks(graph)
    users, (first, final) = graph.storage_users, graph.storage_launches
    n, lanes = len(graph.storages), clocks.clock.shape[1] + 1
    if len(set(clocks.rank.tolist())) > 1:
        raise ValueError("a memory plan is made for one rank at a time")
    begin, ended = np.empty(len(graph), np.int64), np.empty_like(clocks.clock)  # clocks that count launches, not tasks
    for lane in range(lanes - 1):
        tasks = np.flatnonzero(clocks.column == lane)
        tasks = tasks[np.argsort(clocks.place[tasks])]
        launches = np.append(0, np.cumsum(graph.launch_counts[tasks]))
        begin[tasks], ended[:, lane] = launches[:-1], launches[clocks.clock[:, lane]]
    storage, task = users.row_of_each(), users.ids
    # per lane: one past the last launch that touches s; the caller's lane comes last
    last = np.zeros((n, lanes), np.int64)
    np.maximum.at(last, (storage, clocks.column[task]), begin[task] + final + 1)
    known = np.full((n, lanes), np.iinfo(np.int64).max)  # what has surely ended when the first launch on s starts
    known[:, -1] = 1
    before_launch = ended[task]
    before_launch[np.arange(len(task)), clocks.column[task]] = begin[task] + first
    np.minimum.at(known[:, :-1], storage, before_launch)
    inputs, outputs = ([view.storage for view in views] for views in (graph.inputs, graph.outputs))
    known[inputs], last[inputs, -1] = 0, 1
    last[outputs, -1] = 2
    untouched = (last == 0).all(axis=1)
    before = np.ones((n, n), bool)  # before[s, t]: s is no longer needed when t is first touched
    for lane in range(lanes):
        before &= last[:, lane][:, None] <= known[:, lane][None, :]
    share = before | before.T | untouched[:, None] | untouched[None, :]
    touched = users.transposed(len(graph))
    for one, other in _joined(graph, schedule):
        share[np.ix_(touched[one], touched[other])] = share[np.ix_(touched[other], touched[one])] = False
    np.fill_diagonal(share, False)
    result: Ints = share
    return result


def _joined(graph: TaskGraph, schedule: Schedule) -> Iterator[tuple[int, int]]:
    """The pairs of tasks of one action, which may run at the same time."""
    if schedule.joined is None:
        return
    ids = schedule.ids(graph).tolist()
    action: list[int] = []
    for task, joined in zip(ids, schedule.joined, strict=True):
        action = [*action, task] if joined else [task]
        yield from ((other, task) for other in action[:-1])
