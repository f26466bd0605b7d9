"""Weight gradients across the border of an iteration: some W and U of step t run beside the forward of step t+1.

The pass cuts a recorded step in the graphs that a steady run needs. Each holds every task at most once. A delayed task is
that of the step before: its name says so, `4W0@1` is 4W0 one step late, as in the kernel of a software pipeline. What delayed tasks read is kept in two copies, used in turn,
so that no forward overwrites what a weight gradient still needs. Staleness there is none: U(t) comes before F(t+1) by
the graph. The pass runs nothing and knows no schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .graph import ROLES, GraphError, Kind, Role, Rows, StorageSpec, TaskGraph, View

Mask = NDArray[np.bool_]


class BorderError(GraphError):
    """A task that cannot cross the border; `task` is its id in the recorded graph."""

    def __init__(self, message: str, task: int) -> None:
        super().__init__(message)
        self.task = task


@dataclass(frozen=True)
class Border:
    """The graphs of a run whose `delayed` tasks (a mask over the recorded graph) cross the border.

    `first[p]`: a step with nothing delayed from before; `body[p]`: a step with the delayed tasks of the one before;
    `drain[p]`: only the delayed tasks of a step. p is the parity of the step whose forward they hold (`drain`: whose
    backward they finish). `carried` are the storages with two copies, `copies[s]` their ids; those among them in
    `snapshots` are scalars that the host sets: they are copied at the start of each step.
    """

    recorded: TaskGraph
    delayed: Mask
    first: tuple[TaskGraph, TaskGraph]
    body: tuple[TaskGraph, TaskGraph]
    drain: tuple[TaskGraph, TaskGraph]
    copies: dict[int, tuple[int, int]]
    snapshots: tuple[int, ...]

    @property
    def carried_bytes(self) -> int:
        """What the two copies take more than one would."""
        return sum(self.recorded.storages[s].bytes for s in self.copies)


def must_stay(graph: TaskGraph) -> Mask:
    """Mask of tasks that cannot be delayed: F, O and B, what they need within the step, and what yields an output."""
    stays = ~np.isin(graph.kind, [int(Kind.W), int(Kind.U)])
    outputs = {view.storage for view in graph.outputs}
    for task in reversed(range(len(graph))):
        stays[task] = stays[task] or stays[graph.succs[task]].any() or any(int(graph.buffer_storage[b]) in outputs for b in graph.writes[task])
    return stays


def cross_border(graph: TaskGraph, delayed: Iterable[int]) -> Border:
    """Cuts a recorded step at its border. `delayed`: ids of W and U tasks.

    Raises BorderError for a task that cannot be delayed because another of its step, not delayed, needs it.
    """
    late = np.zeros(len(graph), bool)
    late[list(delayed)] = True
    stays = must_stay(graph)
    for task in np.flatnonzero(late).tolist():
        if stays[task]:
            raise BorderError(f"task {graph.name(task)} cannot cross the border: F, O or an output of its own step needs it", task)
        early = [s for s in graph.succs[task].tolist() if not late[s]]
        if early:
            raise BorderError(f"task {graph.name(task)} cannot cross the border alone: {graph.name(early[0])} of the same step needs it", task)
    now, then = np.flatnonzero(~late).tolist(), np.flatnonzero(late).tolist()
    written = set(graph.buffer_storage[graph.writes.ids].tolist())
    touched = {s for t in then for s in graph.buffer_storage[graph.reads[t]].tolist()}
    made_early = set(graph.buffer_storage[np.concatenate([graph.writes[t] for t in now])].tolist())
    inputs = {v.storage for v in graph.inputs}
    snapshots = tuple(sorted(s for s in touched if graph.storages[s].role == Role.SCALAR and s not in written and s not in inputs))
    carried = sorted(s for s in touched if (not graph.storages[s].role.persistent and (s in made_early or s in inputs)) or s in snapshots)
    storages, copies = list(graph.storages), {}
    for s in carried:
        spec = graph.storages[s]
        copies[s] = (len(storages), len(storages) + 1)
        storages += [StorageSpec(f"{spec.name}'{p}", spec.shape, spec.dtype, spec.bytes, Role.STATE) for p in (0, 1)]
    base = replace(graph, storages=tuple(storages))

    def part(parity: int, *, current: bool, previous: bool) -> TaskGraph:
        tasks = [(t, 1 - parity if current else parity) for t in then if previous] + [(t, parity) for t in now if current]
        part = _assembled(base, tasks, copies, current, parity)
        return replace(part, iteration=np.repeat(np.array([1, 0], np.int32), [len(then) * previous, len(now) * current]))

    return Border(graph, late, (part(0, current=True, previous=False), part(1, current=True, previous=False)),
                  (part(0, current=True, previous=True), part(1, current=True, previous=True)),
                  (part(0, current=False, previous=True), part(1, current=False, previous=True)), copies, snapshots)


def _assembled(base: TaskGraph, tasks: list[tuple[int, int]], copies: dict[int, tuple[int, int]], current: bool, parity: int) -> TaskGraph:
    """The tasks in this order, each on the copies of its parity. A buffer of a carried storage has an id per copy."""
    buffers = len(base.buffer_bytes)
    carried = np.flatnonzero(np.isin(base.buffer_storage, list(copies)))
    number = {(int(b), p): buffers + 2 * i + p for i, b in enumerate(carried) for p in (0, 1)}

    def rows(of: Rows) -> Rows:
        return Rows.of([sorted(number.get((b, p), b) for b in of[t].tolist()) for t, p in tasks])

    def moves(p: int) -> dict[int, int]:
        return {s: pair[p] for s, pair in copies.items()}

    moved = (moves(0), moves(1))

    def views(of_the_caller: tuple[View, ...]) -> tuple[View, ...]:
        return tuple(replace(v, storage=moved[parity].get(v.storage, v.storage)) for v in of_the_caller) if current else ()

    ids = np.array([t for t, _ in tasks], np.int64)
    extra = np.repeat(carried, 2)
    state = np.full(len(extra), ROLES.index(Role.STATE), base.buffer_role.dtype)
    names = tuple(f"{base.buffer_names[b]}'{p}" for b in carried for p in (0, 1)) if base.buffer_names else ()
    return replace(
        base, unit=base.unit[ids], kind=base.kind[ids], micro_batch=base.micro_batch[ids], iteration=base.iteration[ids],
        flops=base.flops[ids], bytes=base.bytes[ids], reads=rows(base.reads), writes=rows(base.writes),
        buffer_bytes=np.concatenate([base.buffer_bytes, base.buffer_bytes[extra]]),
        buffer_role=np.concatenate([base.buffer_role, state]),
        buffer_storage=np.concatenate([base.buffer_storage, np.array([copies[int(base.buffer_storage[b])][p] for b in carried for p in (0, 1)],
                                                                     base.buffer_storage.dtype)]),
        buffer_names=base.buffer_names + names if base.buffer_names else (),
        launches=tuple(tuple(launch.moved(moved[p]) for launch in base.launches[t]) for t, p in tasks) if base.launches else (),
        inputs=views(base.inputs), outputs=views(base.outputs))
