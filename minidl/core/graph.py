"""Tasks, buffers, and the graph that their reads and writes imply.

The graph knows which tasks must come before which, and nothing else: no device, stream, rank or time. It is held in
columns (integer arrays); a `Task` or `Buffer` is a view on a row, so that a million tasks take only megabytes. Nobody
writes edges by hand: `derive_edges` derives them from what tasks read and write.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .columns import Columns, Floats, Ints, Rows, column, run_loop, spread
from .tasks import MESSAGES, SUMS, WORDS, GraphError, Kind, pack, parse_task, task_name, unpack
from .tasks import Launch as Launch
from .tasks import View as View
from .tasks import moved_views as moved_views

T = TypeVar("T")


def check_kinds(**given: tuple[Any, type]) -> None:
    """Raises TypeError unless each value is of its type. It names a part of the value that has the argument's name."""
    for name, (value, kind) in given.items():
        if not isinstance(value, kind):
            part = f"; take its {name}" if hasattr(value, name) else ""
            raise TypeError(f"{name} is {' '.join(repr(value).split())[:60]}; it must be a {kind.__name__}{part}")


class Role(StrEnum):
    """The role of a buffer. Persistent buffers outlive a step. Far ones are not in the device's memory, but on the host
    or in a file (`minidl.passes.offload`)."""

    INPUT = "input"
    PARAMETER = "parameter"
    STATE = "state"
    SCALAR = "scalar"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    WORKSPACE = "workspace"
    FAR = "far"

    @property
    def persistent(self) -> bool:
        return self in (Role.PARAMETER, Role.STATE, Role.SCALAR, Role.FAR)

    @property
    def number(self) -> int:
        """Its number in `buffer_role`."""
        return ROLES.index(self)


ROLES = tuple(Role)
LISTED = 40  #: the most tasks of a graph in a notebook


# --------------------------------------------------------------------------------------------------------------- views
def _row(column: str, made: Callable[[Any], T]) -> T:
    """A property of a view: its row of this column of the graph, as this type."""
    return property(lambda self: made(getattr(self.graph, column)[self.index]))  # type: ignore[return-value]


def _field(name: str) -> int:
    """A property of a task: this field of its key."""
    return property(lambda self: int(getattr(unpack(self.graph.keys[self.index]), name)))  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A view on one buffer of a graph: the unit of dependencies. Several buffers may share a storage (a slab)."""

    graph: TaskGraph
    index: int

    bytes = _row("buffer_bytes", int)
    role = _row("buffer_role", lambda number: ROLES[number])
    storage = _row("buffer_storage", int)

    @property
    def name(self) -> str:
        return self.graph.buffer_names[self.index] if self.graph.buffer_names else f"b{self.index}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.graph.storages[self.storage].shape

    @property
    def dtype(self) -> str:
        return self.graph.storages[self.storage].dtype


@dataclass(frozen=True, slots=True)
class Task:
    """A view on one row of a graph. `Identity` explains its name."""

    graph: TaskGraph
    index: int

    unit = _row("unit", int)
    kind = _row("kind", Kind)
    micro_batch = _row("micro_batch", int)
    part = _field("part")
    destination = _field("destination")
    late = _row("late", bool)
    iteration = _row("iteration", int)
    name = _row("keys", task_name)
    flops = _row("flops", float)
    bytes = _row("bytes", int)

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return tuple(Buffer(self.graph, int(b)) for b in self.graph.reads[self.index])

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return tuple(Buffer(self.graph, int(b)) for b in self.graph.writes[self.index])

    @property
    def launches(self) -> tuple[Launch, ...]:
        return self.graph.launches[self.index] if self.graph.launches else ()

    @property
    def _where(self) -> str:
        names = self.graph.unit_names
        return names[self.unit] if self.unit < len(names) else ""

    @property
    def label(self) -> str:
        """A readable name: `4W0 (layers.2)`."""
        return f"{self.name} ({self._where})" if self._where else self.name

    @property
    def in_words(self) -> str:
        """Its work: `the update of layers.2, micro-batch 4`."""
        to = f" to rank {self.destination}" if self.kind in MESSAGES else ""
        which = "" if self.kind in SUMS else f", micro-batch {self.micro_batch}"
        return f"the {WORDS[Kind(self.kind)]} of {self._where or f'stage or layer {self.unit}'}{which}{to}"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """One piece of memory: shape, dtype, bytes, role. `live`: the object that holds its data, if they outlive a step.
    `filled`: the object with whose data it is filled before a loop's first step (`minidl.passes.boundary`), or the
    number. `share_of`: the object whose data it has a rank's share of (`minidl.passes.shard`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    role: Role
    live: Any = None
    filled: Any = None
    share_of: Any = None


FENCE = StorageSpec("fence", (1,), "uint8", 1, Role.WORKSPACE)  #: of tokens: buffers that order tasks, and hold nothing


# --------------------------------------------------------------------------------------------------------------- edges
def derive_edges(reads: Rows, writes: Rows, buffers: int) -> Rows:
    """Predecessors of each task: read after write, write after write, write after read, in order of emission.

    A write-after-write edge is left out if there are readers between the two: it follows from their edges.
    """
    tasks = len(reads)
    ptr = np.zeros(tasks + 1, np.int64)
    room = 2 * len(reads.ids) + len(writes.ids)
    edges, after = run_loop(
        _derive, room, reads.ptr, reads.ids, writes.ptr, writes.ids, np.full(buffers, -1, np.int32),
        np.full(buffers, -1, np.int32), np.full(2 * len(reads.ids), -1, np.int32), np.full(tasks, -1, np.int32), ptr,
        np.empty(room, np.int32))
    return Rows(after.ptr, after.preds[:edges].copy())


def _derive(read_ptr, reads, write_ptr, writes, writer, reader, earlier, mark, ptr, preds):  # type: ignore[no-untyped-def]
    """Fills `ptr` and `preds`, ascending in each row; returns how many edges.

    `writer[b]`: the last task that wrote b. `reader[b]`: the place in `reads` of b's last read since then. `earlier`:
    for each place in `reads`, the reading task and the place of the read before. `mark[p]`: the last task to which p
    was added.
    """
    edges = 0
    for t in range(len(ptr) - 1):
        begin = edges
        for i in range(read_ptr[t], read_ptr[t + 1]):
            p = writer[reads[i]]
            if p >= 0 and mark[p] != t:
                mark[p] = t
                preds[edges] = p
                edges += 1
        for i in range(write_ptr[t], write_ptr[t + 1]):
            b = writes[i]
            at = reader[b]
            if at < 0 and writer[b] >= 0 and mark[writer[b]] != t:
                mark[writer[b]] = t
                preds[edges] = writer[b]
                edges += 1
            while at >= 0:
                p = earlier[2 * at]
                if mark[p] != t:
                    mark[p] = t
                    preds[edges] = p
                    edges += 1
                at = earlier[2 * at + 1]
        for i in range(read_ptr[t], read_ptr[t + 1]):
            earlier[2 * i], earlier[2 * i + 1] = t, reader[reads[i]]
            reader[reads[i]] = i
        for i in range(write_ptr[t], write_ptr[t + 1]):
            writer[writes[i]] = t
            reader[writes[i]] = -1
        for i in range(begin + 1, edges):  # few: sorted by insertion
            p, j = preds[i], i
            while j > begin and preds[j - 1] > p:
                preds[j] = preds[j - 1]
                j -= 1
            preds[j] = p
        ptr[t + 1] = edges
    return edges


# --------------------------------------------------------------------------------------------------------------- graph
@dataclass(frozen=True)
class TaskGraph(Columns):
    """Tasks in the order of emission, which is the sequential order, and the edges between them.

    Columns of length `len(graph)`: keys (the identity of each task, see `Identity`), flops, bytes. `reads` and `writes`
    hold buffer ids; `preds` and `succs` are derived. All arrays are read-only. `inputs` and `outputs` are views, for
    graphs that can run; `outputs` has the structure of the recorded step's return value.
    """

    keys: Ints
    flops: Floats
    bytes: Ints
    reads: Rows
    writes: Rows
    buffer_bytes: Ints
    buffer_role: Ints
    buffer_storage: Ints
    buffer_names: tuple[str, ...] = ()
    unit_names: tuple[str, ...] = ()
    storages: tuple[StorageSpec, ...] = ()
    launches: tuple[tuple[Launch, ...], ...] = ()
    inputs: tuple[View, ...] = ()
    outputs: tuple[View, ...] = ()
    name_of_graph: str = field(default="graph", compare=False)
    made_of: Any = field(default=None, compare=False, repr=False)  #: what the recorded step has read: its `check()`

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        """`<TaskGraph mlp: 17 tasks, 43 buffers>`."""
        return f"<TaskGraph {self.name_of_graph}: {len(self)} tasks, {len(self.buffer_bytes)} buffers>"

    def _repr_html_(self) -> str:
        """The first tasks with what they read and write, for notebooks."""
        from html import escape

        rows = [(task.label, ", ".join(b.name for b in task.reads), ", ".join(b.name for b in task.writes))
                for task in islice(self, LISTED)]
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        return (f"<p>{escape(repr(self))}</p><table><tr><th>task</th><th>reads</th><th>writes</th></tr>{body}</table>"
                + (f"<p>and {len(self) - LISTED} more</p>" if len(self) > LISTED else ""))

    def __getitem__(self, task: int | str) -> Task:
        return Task(self, self.index(task) if isinstance(task, str) else range(len(self))[task])

    def __iter__(self) -> Iterator[Task]:
        return (Task(self, i) for i in range(len(self)))

    unit = column(lambda self: unpack(self.keys).unit.astype(np.int32))
    kind = column(lambda self: unpack(self.keys).kind.astype(np.int8))
    micro_batch = column(lambda self: unpack(self.keys).micro_batch.astype(np.int32))
    late = column(lambda self: unpack(self.keys).late.astype(bool))
    iteration = column(lambda self: unpack(self.keys).iteration.astype(np.int32))

    @column
    def persistent(self) -> NDArray[np.bool_]:
        """Mask of the buffers that outlive a step."""
        return self.role_is(*(role for role in Role if role.persistent))

    @property
    def own_buffers(self) -> NDArray[np.bool_]:
        """Mask of the buffers of which every iteration has its own: inputs, and outputs unless they outlive a step."""
        own = self.role_is(Role.INPUT)
        if outputs := {view.storage for view in self.outputs}:
            own |= np.isin(self.buffer_storage, list(outputs)) & ~self.persistent
        return own

    def role_is(self, *roles: Role) -> NDArray[np.bool_]:
        """Mask of the buffers with one of these roles."""
        return np.isin(self.buffer_role, [role.number for role in roles])

    def changed_by(self, buffers: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Mask of the tasks that write a buffer of the mask."""
        return spread(self.writes.row_of_each()[buffers[self.writes.ids]], True, len(self))

    @column
    def _sorted_keys(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.keys, kind="stable")
        keys = self.keys[order]
        twice = np.flatnonzero(keys[1:] == keys[:-1])
        if twice.size:
            raise GraphError(f"task {task_name(keys[twice[0]])} appears twice in the graph")
        return keys, order

    def find(self, keys: Ints) -> Ints:
        """The task id of each key, -1 if the graph has no such task."""
        if not len(self):
            return np.full(len(keys), -1, np.int64)
        sorted_keys, order = self._sorted_keys
        at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
        return np.where(sorted_keys[at] == keys, order[at], -1)

    def index(self, name: str) -> int:
        """The id of a task by its name. Raises GraphError with similar names."""
        found = int(self.find(np.array([parse_task(name)]))[0])
        if found < 0:
            near = difflib.get_close_matches(name, [self.name(i) for i in range(min(len(self), 20000))], 3, 0)
            raise GraphError(f"no task {name} in this graph; similar names: {', '.join(near) or 'none'}")
        return found

    def name(self, task: int) -> str:
        return task_name(self.keys[task])

    @column
    def preds(self) -> Rows:
        return derive_edges(self.reads, self.writes, len(self.buffer_bytes))

    @column
    def succs(self) -> Rows:
        return self.preds.transposed(len(self))

    @property
    def unfenced(self) -> TaskGraph:
        """The graph without tokens, in which tasks wait only for those whose results they need."""
        kept = np.array([spec.name != FENCE.name or spec.role != FENCE.role for spec in self.storages], bool)
        if kept.all():
            return self
        reads, writes = (Rows.from_pairs(rows.row_of_each()[own], rows.ids[own], len(self)) for rows, own in (
            (rows, kept[self.buffer_storage[rows.ids]]) for rows in (self.reads, self.writes)))
        return replace(self, reads=reads, writes=writes)

    @property
    def edges(self) -> int:
        return len(self.preds.ids)

    @column
    def storage_users(self) -> Rows:
        """For every storage, the tasks that read or write it, ascending."""
        storage = self.buffer_storage[np.concatenate([self.reads.ids, self.writes.ids])]
        task = np.concatenate([self.reads.row_of_each(), self.writes.row_of_each()])
        pairs = np.unique(storage.astype(np.int64) * max(len(self), 1) + task)
        return Rows.from_pairs(pairs // max(len(self), 1), pairs % max(len(self), 1), len(self.storages))

    @column
    def launch_counts(self) -> Ints:
        """How many launches each task has; 1 for a task that names none."""
        if not self.launches:
            return np.ones(len(self), np.int64)
        return np.maximum(np.fromiter(map(len, self.launches), np.int64, len(self)), 1)

    @column
    def storage_launches(self) -> tuple[Ints, Ints]:
        """For each id of `storage_users`: the first and the last launch of that task that touches the storage. If no
        launch names it, the task touches it from its first launch to its last."""
        users = self.storage_users
        first, last = np.zeros(len(users.ids), np.int64), self.launch_counts[users.ids] - 1
        named = np.array([(view.storage, task, i) for task, own in enumerate(self.launches)
                          for i, launch in enumerate(own) for view in launch.views], np.int64).reshape(-1, 3)
        user = users.row_of_each().astype(np.int64) * len(self) + users.ids
        wanted = named[:, 0] * len(self) + named[:, 1]
        at = np.searchsorted(user, wanted)
        known = at < len(user)
        known[known] = user[at[known]] == wanted[known]
        at, launch = at[known], named[known, 2]
        first[at], last[at] = self.launch_counts[users.ids[at]], -1
        np.minimum.at(first, at, launch)
        np.maximum.at(last, at, launch)
        return first, last

    def buffer(self, index: int) -> Buffer:
        return Buffer(self, index)

    # ------------------------------------------------------------------------------------------------------- algebra
    def take(self, tasks: Ints, keys: Ints | None = None) -> TaskGraph:
        """These tasks in this order, on the same buffers. If one is taken several times, `keys` tells them apart."""
        rows = np.asarray(tasks, np.int64)
        return replace(self, keys=self.keys[rows] if keys is None else keys, flops=self.flops[rows],
                       bytes=self.bytes[rows], reads=self.reads.take(rows), writes=self.writes.take(rows),
                       launches=tuple(self.launches[t] for t in rows.tolist()) if self.launches else ())

    def insert(self, after: Ints, keys: Ints, reads: Rows, writes: Rows, nbytes: Ints,
               launches: Sequence[tuple[Launch, ...]] = ()) -> TaskGraph:
        """The graph with more tasks, on its own buffers: new task i comes directly after task `after[i]`; new tasks
        after the same task keep their order."""
        n, new = len(self), len(keys)
        order = np.argsort(np.concatenate([np.arange(n), np.asarray(after, np.int64)]), kind="stable")
        own = list(self.launches or ((),) * n) + list(launches or ((),) * new)
        return replace(
            self, keys=np.append(self.keys, keys)[order], flops=np.append(self.flops, np.zeros(new))[order],
            bytes=np.append(self.bytes, nbytes)[order].astype(self.bytes.dtype),
            reads=self.reads.followed_by(reads).take(order), writes=self.writes.followed_by(writes).take(order),
            launches=tuple(own[i] for i in order.tolist()) if any(own) else ())

    def join(self, parts: Rows, keys: Ints) -> TaskGraph:
        """Merges tasks: one task for each row of `parts`, whose rows together have every task of this graph once. It
        has their launches in order, and reads what they read but do not make."""
        reads: list[list[int]] = []
        writes: list[list[int]] = []
        together, own_reads, own_writes = parts.lists(), self.reads.lists(), self.writes.lists()
        for tasks in together:
            made: set[int] = set()
            read: set[int] = set()
            for t in tasks:
                read.update([b for b in own_reads[t] if b not in made])
                made.update(own_writes[t])
            reads.append(sorted(read))
            writes.append(sorted(made))
        group, count = np.empty(len(self), np.int64), len(parts)
        group[parts.ids] = parts.row_of_each()
        launches = [tuple([launch for t in tasks for launch in self.launches[t]])
                    for tasks in together] if self.launches else []
        return replace(
            self, keys=keys, flops=np.bincount(group, self.flops, count).astype(np.float64),
            bytes=np.bincount(group, self.bytes, count).astype(np.int64), reads=Rows.of(reads), writes=Rows.of(writes),
            launches=tuple(launches))

    def with_live(self, live: Mapping[int, Any], samples: int = 0) -> TaskGraph:
        """The graph on the data of other objects, `live[id(object)]`; its part of the batch begins `samples` later."""
        own = self.launches if not samples else tuple(tuple(one.shifted(samples) for one in of) for of in self.launches)
        return replace(self, launches=own, made_of=None, storages=tuple(
            replace(spec, **{name: live.get(id(found), found) for name in ("live", "filled", "share_of")
                             if (found := getattr(spec, name)) is not None}) for spec in self.storages))

    def with_storages(self, specs: Sequence[StorageSpec]) -> TaskGraph:
        """The graph with more storages, and a buffer on each. No task touches them yet."""
        new = np.arange(len(specs))
        grown = self.with_buffers(0 * new, len(self.storages) + new, [spec.name for spec in specs], specs)
        return replace(grown, buffer_bytes=_longer(self.buffer_bytes, [spec.bytes for spec in specs]),
                       buffer_role=_longer(self.buffer_role, [spec.role.number for spec in specs]))

    def with_buffers(self, like: Ints, storage: Ints, names: Sequence[str] = (),
                     storages: Sequence[StorageSpec] = ()) -> TaskGraph:
        """The graph with more buffers and storages. New buffer i is like buffer `like[i]`, but on storage `storage[i]`.
        No task touches them yet."""
        like = np.asarray(like, np.int64)
        return replace(
            self, storages=self.storages + tuple(storages), buffer_storage=_longer(self.buffer_storage, storage),
            buffer_bytes=_longer(self.buffer_bytes, self.buffer_bytes[like]),
            buffer_role=_longer(self.buffer_role, self.buffer_role[like]),
            buffer_names=self.buffer_names + tuple(names) if self.buffer_names else ())

    def remap(self, reads: Ints, writes: Ints, moves: Sequence[Mapping[int, int]], move: Ints) -> TaskGraph:
        """The same tasks on other buffers: `reads` and `writes` replace the buffer ids, and the map `moves[move[t]]`
        replaces the storages in the launches of task t."""
        known: list[dict[int, View]] = [{} for _ in moves]
        launches = tuple([tuple([launch.moved(moves[m], known[m]) for launch in own]) if moves[m] else own
                          for own, m in zip(self.launches, move.tolist(), strict=True)]) if self.launches else ()
        return replace(self, reads=Rows(self.reads.ptr, reads.astype(np.int32)).sorted(),
                       writes=Rows(self.writes.ptr, writes.astype(np.int32)).sorted(), launches=launches)

    def compact(self) -> TaskGraph:
        """The graph without the buffers and storages that no task, input or output touches."""
        used = np.zeros(len(self.buffer_bytes), bool)
        used[self.reads.ids] = used[self.writes.ids] = True
        held = np.zeros(len(self.storages), bool)
        held[self.buffer_storage[used]] = True
        held[[view.storage for view in (*self.inputs, *self.outputs)]] = True
        held[[view.storage for own in self.launches for launch in own for view in launch.views]] = True
        number, place = np.cumsum(used) - 1, np.cumsum(held) - 1
        moves = {int(s): int(place[s]) for s in np.flatnonzero(held)}
        kept = np.flatnonzero(used)
        moved = self.remap(number[self.reads.ids], number[self.writes.ids], [moves], np.zeros(len(self), np.int64))
        return replace(
            moved, buffer_bytes=self.buffer_bytes[kept], buffer_role=self.buffer_role[kept],
            buffer_storage=place[self.buffer_storage[kept]].astype(self.buffer_storage.dtype),
            buffer_names=tuple(self.buffer_names[b] for b in kept.tolist()) if self.buffer_names else (),
            storages=tuple(self.storages[s] for s in np.flatnonzero(held).tolist()),
            inputs=moved_views(self.inputs, moves), outputs=moved_views(self.outputs, moves))

    def with_copies(self, copy: Ints, group: Ints) -> tuple[TaskGraph, list[dict[int, int]]]:
        """The graph in which the tasks of group g use copy `copy[b, g]` of buffer b; copy 0 is the buffer itself.
        `group`: the group of each task. Returns the graph and, for each group, a map from a storage to its copy. All
        buffers of a storage must have the same copies."""
        copies, buffers = int(copy.max(initial=0)) + 1, len(self.buffer_bytes)
        further = np.unique(np.arange(buffers)[:, None] * copies + copy)
        further = further[further % copies > 0]  # the further copies, each as one number of buffer and copy
        number = np.zeros(buffers * copies, np.int64)
        number[np.arange(buffers) * copies] = np.arange(buffers)
        number[further] = buffers + np.arange(len(further))
        like, which = further // copies, further % copies
        kept, storage = np.unique(self.buffer_storage[like].astype(np.int64) * copies + which, return_inverse=True)
        place = {int(k): len(self.storages) + i for i, k in enumerate(kept)}
        specs = [replace(self.storages[k // copies], name=f"{self.storages[k // copies].name}'{k % copies}", live=None)
                 for k in kept.tolist()]
        moves: list[dict[int, int]] = [
            {int(s): place[int(s) * copies + int(c)]
             for s, c in zip(self.buffer_storage[moved], copy[moved, g], strict=True)} for g in range(copy.shape[1])
            for moved in [np.flatnonzero(copy[:, g])]]

        def ids(rows: Rows) -> Ints:
            return number[rows.ids.astype(np.int64) * copies + copy[rows.ids, group[rows.row_of_each()]]]

        names = [f"{self.buffer_names[b]}'{c}" for b, c in zip(like, which, strict=True)] if self.buffer_names else ()
        graph = self.with_buffers(like, len(self.storages) + storage, names, storages=specs)
        return graph.remap(ids(self.reads), ids(self.writes), moves, group), moves


def _longer(column: Ints, more: Any) -> Ints:
    return np.append(column, np.asarray(more, column.dtype))


class GraphBuilder:
    """Collects buffers and tasks in order of emission; `build` freezes them into a `TaskGraph`."""

    def __init__(self) -> None:
        self._tasks: list[tuple[int, int, int, int, int, int, int, float, int]] = []
        self._reads: list[tuple[int, ...]] = []
        self._writes: list[tuple[int, ...]] = []
        self._launches: list[tuple[Launch, ...]] = []
        self._buffers: list[tuple[str, int, Role, int]] = []
        self._storages: list[StorageSpec] = []
        self.unit_names: dict[int, str] = {}

    def storage(self, spec: StorageSpec) -> int:
        self._storages.append(spec)
        return len(self._storages) - 1

    def buffer(self, name: str, nbytes: int, role: Role = Role.ACTIVATION, storage: int | None = None) -> int:
        """The id of a new buffer. Without `storage`, it gets a new storage."""
        if storage is None:
            storage = self.storage(StorageSpec(name, (nbytes,), "uint8", nbytes, role))
        self._buffers.append((name, nbytes, role, storage))
        return len(self._buffers) - 1

    def task(self, unit: int, kind: Kind, micro_batch: int = 0, *, part: int = 0, destination: int = 0, late: int = 0,
             iteration: int = 0, reads: Iterable[int] = (), writes: Iterable[int] = (),
             launches: tuple[Launch, ...] = (), flops: float = 0.0, nbytes: int = 0) -> int:
        """The id of a new task. Reads and writes are buffer ids, in any order."""
        self._tasks.append((unit, int(kind), micro_batch, part, destination, late, iteration, flops, nbytes))
        self._reads.append(tuple(sorted(set(reads))))
        self._writes.append(tuple(sorted(set(writes))))
        self._launches.append(launches)
        return len(self._tasks) - 1

    def build(self, inputs: tuple[View, ...] = (), outputs: tuple[View, ...] = (), name: str = "graph") -> TaskGraph:
        columns = zip(*self._tasks, strict=True) if self._tasks else ((),) * 9
        unit, kind, micro_batch, part, destination, late, iteration, flops, nbytes = columns
        graph = TaskGraph(
            keys=pack(unit, kind, micro_batch, part=part, destination=destination, late=late, iteration=iteration),
            flops=np.array(flops, np.float64), bytes=np.array(nbytes, np.int64),
            reads=Rows.of(self._reads), writes=Rows.of(self._writes),
            buffer_bytes=np.array([b[1] for b in self._buffers], np.int64),
            buffer_role=np.array([b[2].number for b in self._buffers], np.int8),
            buffer_storage=np.array([b[3] for b in self._buffers], np.int32),
            buffer_names=tuple(b[0] for b in self._buffers),
            unit_names=tuple(self.unit_names.get(u, "") for u in range(max(unit, default=-1) + 1)),
            storages=tuple(self._storages), launches=tuple(self._launches) if any(self._launches) else (),
            inputs=inputs, outputs=outputs, name_of_graph=name)
        graph._sorted_keys  # noqa: B018  (a task named twice is an error here, not later)
        return graph
