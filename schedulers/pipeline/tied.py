"""Parameters that stages on several ranks use, such as tied embeddings: one rank updates them, the others hold copies.

A parameter's home is the first stage that uses it. Every other rank that uses it has a copy, sums the gradients of its
own uses over the micro-batches, and sends the sum to the home once. There the sums are added in the order of use, as in
one process: so the bits are equal. The home counts the sum in the norm, updates, and sends the new weights back. That
is two messages per copy and step, for any number of micro-batches. Sending back the summed gradient would take as many,
and would need the optimizer's states on every rank. The first stage is the home since its backward pass ends last: sums
travel to it meanwhile, and later stages need the new weights latest.

Where a step updates several times, or its pipeline never drains, this holds for each update, and the copies follow the
home as `follow.py` says.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...graph import ROLES, Ints, Launch, Role, Rows, TaskGraph, View
from ...passes.boundary import Mask
from ...tasks import Kind, pack, repack
from .placement import PipelineError

_PARAMETER = ROLES.index(Role.PARAMETER)


def sums_of_uses(graph: TaskGraph) -> Mask:
    """The tasks that add the gradients of a parameter's uses: W of a unit without forward that read only gradients from
    W of other units."""
    weight = graph.kind == Kind.W
    forward = np.zeros(int(graph.unit.max(initial=-1)) + 1, bool)
    forward[graph.unit[graph.kind == Kind.F]] = True
    maker = np.full(len(graph.buffer_bytes), -1, np.int64)
    writer = graph.writes.row_of_each()
    maker[graph.writes.ids] = writer
    found: Mask = weight & ~forward[graph.unit]
    for t in np.flatnonzero(found).tolist():
        makers = maker[graph.reads[t]]
        found[t] = len(makers) > 0 and bool((makers >= 0).all() and weight[makers].all()
                                            and (graph.unit[makers] != graph.unit[t]).all())
    return found


def at_home(graph: TaskGraph, stage_of_unit: Ints) -> Ints:
    """The stage of each unit, with the sum of a parameter's gradients, and its update, on the first stage that uses
    it."""
    stage_of, users = np.array(stage_of_unit), _users(graph)
    added = np.unique(graph.unit[sums_of_uses(graph)])
    for t in np.flatnonzero(np.isin(graph.unit, added) & (graph.kind == Kind.U)).tolist():
        own = users.take(graph.writes[t][graph.buffer_role[graph.writes[t]] == _PARAMETER]).ids
        if len(own):
            stage_of[graph.unit[t]] = stage_of[graph.unit[own]].min()
    return stage_of


def with_copies(graph: TaskGraph, stage_of_unit: Ints, rank_of_stage: Ints,
                stale: bool = False) -> tuple[TaskGraph, Ints, Ints]:
    """The graph in which each rank uses its own copy of parameters that another rank updates; also the stage of each
    unit, and for each task the task that it comes from, or -1.

    The new tasks are of kind U: some mark a gradient as complete, so that it may be sent, and launch nothing; others
    copy the received weights. The sums of uses become U, since they wait for all micro-batches. Stages must be
    `at_home`. Raises PipelineError if the step updates such a parameter several times.

    `stale`: the step is one of a pipeline that never drains. A sum of uses then belongs to the weight gradient of the
    last micro-batch before its update, and ranks have no copies yet.
    """
    rank = np.asarray(rank_of_stage)[stage_of_unit[graph.unit]]
    sums = np.flatnonzero(sums_of_uses(graph))
    units = len(stage_of_unit)
    grown = _Grown(graph, [*stage_of_unit.tolist()], list(range(units, units + len(sums))))
    grown.stage += [int(stage_of_unit[graph.unit[t]]) for t in sums.tolist()]
    unit, kind, micro_batch = graph.unit.copy(), graph.kind.copy(), graph.micro_batch.copy()
    count = int(graph.micro_batch[graph.kind == Kind.F].max(initial=-1)) + 1
    if not stale:
        unit[sums], kind[sums], micro_batch[sums] = grown.sums, Kind.U, 0
    for t in sums.tolist():
        for b in graph.reads[t].tolist():
            makers = graph.writes.row_of_each()[graph.writes.ids == b]
            makers = makers[makers < t]
            if stale:
                micro_batch[t] = max(micro_batch[t], graph.micro_batch[makers[-1]])
            if rank[makers[0]] != rank[t]:
                stage = int(stage_of_unit[graph.unit[makers[0]]])
                if stale:  # the next backward may come before the message has gone
                    grown.copy_over(t, b, stage, count + int(graph.micro_batch[makers[-1]]))
                else:
                    grown.hand_over(t, b, stage)
    if stale:
        return grown.graph(repack(graph.keys, unit=unit, kind=kind, micro_batch=micro_batch))
    writer, users_of = graph.writes.row_of_each(), _users(graph)
    changes = (graph.kind[writer] == Kind.U) & (graph.buffer_role[graph.writes.ids] == _PARAMETER)
    updates_of = Rows.from_pairs(graph.writes.ids[changes], writer[changes], len(graph.buffer_bytes))
    for b in np.unique(graph.writes.ids[changes]).tolist():
        updates, users = updates_of[b], users_of[b]
        if len(updates) > 1 and len(np.unique(rank[users])) > 1:
            raise PipelineError(f"{graph.buffer(b).name} is used by stages on several ranks, and the step updates it "
                                f"{len(updates)} times; their copies follow once per step, so use a policy "
                                f"with one update")
        for r in np.setdiff1d(rank[users], rank[updates]).tolist():
            users_here = users[rank[users] == r]
            grown.copy(b, users_here, int(stage_of_unit[graph.unit[users_here]].min()))
    return grown.graph(repack(graph.keys, unit=unit, kind=kind, micro_batch=micro_batch))


def _users(graph: TaskGraph) -> Rows:
    """Buffer -> the tasks that read it, without updates."""
    reader = graph.reads.row_of_each()
    works = graph.kind[reader] != Kind.U
    return Rows.from_pairs(graph.reads.ids[works], reader[works], len(graph.buffer_bytes))


class _Grown:
    """A graph to which buffers and tasks are added one by one. `sums`: units of the sums of uses."""

    def __init__(self, graph: TaskGraph, stage: list[int], sums: list[int]) -> None:
        self.old, self.stage, self.sums = graph, stage, sums
        self.like: list[int] = []
        self.storage: list[int] = []
        self.names: list[str] = []
        self.specs: list[int] = []
        self.reads = {t: {b: b for b in graph.reads[t].tolist()} for t in range(len(graph))}
        self.moves: dict[int, dict[int, int]] = {}
        #: (the task before it, stage, micro-batch, the buffers it reads, the buffers it writes, launches)
        self.tasks: list[tuple[int, int, int, int, int, tuple[Launch, ...]]] = []

    def hand_over(self, task: int, gradient: int, stage: int) -> None:
        """A new task of the stage marks the gradient as complete; `task` reads its result."""
        given = self._buffer(gradient, int(self.old.buffer_storage[gradient]), f"stage {stage}'s")
        self.reads[task][gradient] = given
        self.tasks.append((task - 1, stage, 0, gradient, given, ()))

    def copy_over(self, task: int, gradient: int, stage: int, micro_batch: int) -> None:
        """A new task of the stage copies the gradient, which is complete; `task` reads the copy."""
        source, target = int(self.old.buffer_storage[gradient]), len(self.old.storages) + len(self.specs)
        self.specs.append(source)
        given = self._buffer(gradient, target, f"stage {stage}'s")
        self.reads[task][gradient] = given
        self.moves.setdefault(task, {})[source] = target
        self.tasks.append((task - 1, stage, micro_batch, gradient, given, self._copied(source, target)))

    def copy(self, parameter: int, users: Ints, stage: int) -> None:
        """The users read a copy of the parameter, which a new task of the stage updates at the end."""
        source, target = int(self.old.buffer_storage[parameter]), len(self.old.storages) + len(self.specs)
        self.specs.append(source)
        given = self._buffer(parameter, target, f"stage {stage}'s copy")
        for t in users.tolist():
            self.reads[t][parameter] = given
            self.moves.setdefault(t, {})[source] = target
        self.tasks.append((len(self.old) - 1, stage, 0, parameter, given, self._copied(source, target)))

    def _copied(self, source: int, target: int) -> tuple[Launch, ...]:
        """The launch that copies a storage to one like it."""
        spec = self.old.storages[source]
        whole = [View(s, (spec.bytes // np.dtype(spec.dtype).itemsize,), (1,), 0, spec.dtype) for s in (source, target)]
        return (Launch("copy", (whole[0],), (whole[1],)),)

    def _buffer(self, like: int, storage: int, whose: str) -> int:
        self.like.append(like)
        self.storage.append(storage)
        self.names.append(f"{self.old.buffer(like).name}, {whose}")
        return len(self.old.buffer_bytes) + len(self.like) - 1

    def graph(self, keys: Ints) -> tuple[TaskGraph, Ints, Ints]:
        """The result of `with_copies`. `keys`: the keys of the old tasks."""
        old, new = self.old, len(self.tasks)
        specs = [replace(old.storages[s], name=f"{old.storages[s].name}, copy") for s in self.specs]
        grown = old.with_buffers(np.array(self.like, np.int64), np.array(self.storage, np.int64),
                                 self.names if old.buffer_names else (), storages=specs)
        which = np.zeros(len(old), np.int64)
        which[list(self.moves)] = np.arange(1, len(self.moves) + 1)
        reads = np.array([b for t in range(len(old)) for b in (self.reads[t][b] for b in old.reads[t].tolist())],
                         np.int64)
        moved = replace(grown, keys=keys).remap(reads, old.writes.ids, [{}, *self.moves.values()], which)
        first = len(self.stage)
        if not new and not self.sums:
            return old, np.array(self.stage), np.arange(len(old))
        after, stages, number, read, write, launches = zip(*self.tasks, strict=True) if new else ((),) * 6
        unit = first + np.arange(new)
        after_each = np.array(after, np.int64)
        made = moved.insert(after_each, pack(unit, np.full(new, Kind.U), np.array(number, np.int64)),
                            Rows.of([[b] for b in read]), Rows.of([[b] for b in write]), np.zeros(new, np.int64),
                            list(launches))
        order = np.argsort(np.concatenate([np.arange(len(old)), after_each]), kind="stable")
        origin = np.where(order < len(old), order, -1)
        names = old.unit_names + ("",) * (first + new - len(old.unit_names))
        return replace(made, unit_names=names), np.array([*self.stage, *stages]), origin
