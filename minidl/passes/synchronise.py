"""Data parallelism as a pass: a step's graph becomes that of one rank among several, which sum their gradients.

Communication A comes between the backward pass and the updates. Where updates run one step late (`minidl.passes.boundary`) it
has until then to end. The pass knows neither ranks nor networks; who runs an A task divides by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..graph import ROLES, GraphError, Ints, Kind, Launch, Role, Rows, TaskGraph, View

COLLECTIVE = {Kind.A: "all_reduce", Kind.AS: "reduce_scatter", Kind.AG: "all_gather"}  #: what a launch of each is called


@dataclass(frozen=True)
class _Piece:
    """Elements begin..end of one gradient buffer, in part `part` of its group; `view` is None in a graph without kernels."""

    buffer: int
    group: int
    part: int
    nbytes: int
    view: View | None


def gradients(graph: TaskGraph) -> dict[int, Ints]:
    """For each task that updates parameters the buffers with their gradients, in the order of the tasks."""
    updates = np.flatnonzero(graph.kind == Kind.U).tolist()
    made = np.zeros(len(graph.buffer_bytes), bool)  # by the backward pass, not by an update (as norms are)
    made[graph.writes.ids[graph.kind[graph.writes.row_of_each()] != Kind.U]] = True
    gradient = made & ~np.array([ROLES[r].persistent for r in graph.buffer_role], bool)
    parameter = graph.buffer_role == ROLES.index(Role.PARAMETER)
    found = {u: graph.reads[u][gradient[graph.reads[u]]] for u in updates if parameter[graph.writes[u]].any()}
    return {u: buffers for u, buffers in found.items() if len(buffers)}


def reverse_buckets(graph: TaskGraph, nbytes: int) -> list[list[int]]:
    """Updates in groups whose gradients fill `nbytes`, the last layer's first, as gradients become ready."""
    groups: list[list[int]] = []
    room = 0
    for u, buffers in sorted(gradients(graph).items(), key=lambda item: -int(graph.unit[item[0]])):
        need = int(graph.buffer_bytes[buffers].sum())
        if not groups or need > room:
            groups.append([])
            room = nbytes
        groups[-1].append(u)
        room -= need
    return groups


def synchronise(graph: TaskGraph, groups: Sequence[Sequence[int]] | None = None, *, part_bytes: int | None = None,
                scatter: bool = False) -> TaskGraph:
    """Adds what sums gradients over ranks, before the updates.

    `groups`: update tasks whose gradients travel together (default: each alone); a group's communication is named by
    its lowest unit, and its parts by the micro-batch. `part_bytes`: the largest part of a group. `scatter`: AS and AG
    in place of A. Raises GraphError for a graph that does anything but updates after its first update, that reads a
    gradient which ranks have not summed, or that returns what updates or sums over ranks still change.
    """
    if np.isin(graph.kind, [int(k) for k in COLLECTIVE]).any():
        raise GraphError("the graph is synchronised already")
    spent = gradients(graph)
    if not spent:
        raise GraphError("the step updates nothing, so there is nothing to synchronise")
    updates = np.flatnonzero(graph.kind == Kind.U)
    first = int(updates[0])
    late = np.flatnonzero(graph.kind[first:] != Kind.U)
    if late.size:
        raise GraphError(f"task {graph.name(first + int(late[0]))} comes after the update {graph.name(first)}; "
                         f"a data-parallel step must end with its updates")
    changed = {int(graph.buffer_storage[b]): u for u in reversed(updates.tolist()) for b in (*graph.writes[u].tolist(), *spent.get(u, []))}
    for view in graph.outputs:
        if view.storage in changed:
            raise GraphError(f"the step returns {graph.storages[view.storage].name}, which is not final yet: ranks sum gradients and update "
                             f"({graph.name(changed[view.storage])}) after a step has returned")
    groups = [[u] for u in spent] if groups is None else groups
    if sorted(u for group in groups for u in group) != sorted(spent):
        raise GraphError("the groups must hold every update that spends gradients exactly once")
    pieces = [p for g, group in enumerate(groups) for p in _cut(graph, g, [(u, b) for u in group for b in spent[u].tolist()], part_bytes)]
    return _assemble(graph, updates, groups, pieces, scatter)


def _cut(graph: TaskGraph, group: int, members: list[tuple[int, int]], part_bytes: int | None) -> list[_Piece]:
    """One group's gradients, laid end to end and cut into parts of equal size as far as elements allow."""
    views = {b: _view_of(graph, u, b) for u, b in members}
    width = {b: np.dtype(v.dtype).itemsize if v else 1 for b, v in views.items()}
    size = [int(graph.buffer_bytes[b]) for _, b in members]
    total = sum(size)
    parts = max(1, -(-total // part_bytes)) if part_bytes else 1
    bounds = [total * i // parts for i in range(parts + 1)]
    pieces, start = [], 0
    for (_, b), nbytes in zip(members, size, strict=True):
        for part in range(parts):
            begin, end = (min(max(x - start, 0), nbytes) // width[b] for x in bounds[part : part + 2])
            if end > begin:
                view = views[b]
                window = replace(view, shape=(end - begin,), strides=(1,), offset=view.offset + begin) if view else None
                pieces.append(_Piece(b, group, part, (end - begin) * width[b], window))
        start += nbytes
    return pieces


def _view_of(graph: TaskGraph, update: int, buffer: int) -> View | None:
    """The gradient as the update reads it, contiguous as `backward` leaves it; None in a graph without kernels."""
    storage = int(graph.buffer_storage[buffer])
    return next((v for launch in graph[update].launches for v in launch.reads if v.storage == storage), None)


def _assemble(graph: TaskGraph, updates: Ints, groups: Sequence[Sequence[int]], pieces: list[_Piece], scatter: bool) -> TaskGraph:
    of_buffer: dict[int, list[int]] = {}  # gradient buffer -> buffers of its pieces, the first being itself
    extra: list[tuple[int, int]] = []  # (gradient buffer, bytes) of every further piece
    piece_buffer: list[int] = []
    nbytes = graph.buffer_bytes.copy()
    for p in pieces:
        known = of_buffer.setdefault(p.buffer, [])
        if known:
            piece_buffer.append(len(nbytes) + len(extra))
            extra.append((p.buffer, p.nbytes))
        else:
            piece_buffer.append(p.buffer)
            nbytes[p.buffer] = p.nbytes
        known.append(piece_buffer[-1])

    def spread(rows: Rows, task: int) -> list[int]:
        return sorted(c for b in rows[task].tolist() for c in of_buffer.get(b, [b]))

    # where the sums of a batch norm are its gradients, an output gradient still needs this rank's own: it goes first
    touched = {b: t for t in range(int(updates[0])) for b in (*graph.reads[t].tolist(), *graph.writes[t].tolist())}
    after: dict[int, list[tuple[int, int, list[int]]]] = {}  # task -> communication that follows: (unit, part, pieces)
    for g, group in enumerate(groups):
        unit = min(int(graph.unit[u]) for u in group)
        mine = [i for i, p in enumerate(pieces) if p.group == g]
        for part in sorted({pieces[i].part for i in mine}):
            chosen = [i for i in mine if pieces[i].part == part]
            last = max(touched[pieces[i].buffer] for i in mine)
            after.setdefault(last, []).append((unit, part, chosen))

    columns: list[tuple[int, int, int, float, int]] = []
    reads, writes, launches = [], [], []

    def keep(task: int) -> None:
        columns.append((int(graph.unit[task]), int(graph.kind[task]), int(graph.micro_batch[task]), float(graph.flops[task]), int(graph.bytes[task])))
        reads.append(spread(graph.reads, task))
        writes.append(spread(graph.writes, task))
        launches.append(graph.launches[task] if graph.launches else ())

    def communicate(kind: Kind, unit: int, part: int, chosen: list[int]) -> None:
        columns.append((unit, int(kind), part, 0.0, sum(pieces[i].nbytes for i in chosen)))
        buffers = sorted(piece_buffer[i] for i in chosen)
        reads.append(buffers)
        writes.append(buffers)
        views = tuple(v for i in chosen if (v := pieces[i].view) is not None)
        launches.append((Launch(COLLECTIVE[kind], views, views),) if views else ())

    gathers = []
    for task in range(int(updates[0])):
        keep(task)
        for unit, part, chosen in after.get(task, []):
            communicate(Kind.AS if scatter else Kind.A, unit, part, chosen)
            gathers.append((unit, part, chosen))
    for unit, part, chosen in sorted(gathers) if scatter else []:
        communicate(Kind.AG, unit, part, chosen)
    for u in updates.tolist():
        keep(u)

    units, kinds, part_of, flops, moved = (np.array(c) for c in zip(*columns, strict=True))
    old = np.array([b for b, _ in extra], np.int64)
    grown = graph.with_buffers(old, graph.buffer_storage[old], [f"{graph.buffer_names[b]}+" for b in old] if graph.buffer_names else (),
                               np.array([n for _, n in extra], np.int64))
    result = replace(
        grown, unit=units.astype(np.int32), kind=kinds.astype(np.int8), micro_batch=part_of.astype(np.int32),
        iteration=np.zeros(len(columns), np.int32), flops=flops.astype(np.float64), bytes=moved.astype(np.int64),
        reads=Rows.of(reads), writes=Rows.of(writes), buffer_bytes=np.concatenate([nbytes, grown.buffer_bytes[len(nbytes):]]),
        launches=tuple(launches) if any(launches) else ())
    _check(result)
    return result


def _check(graph: TaskGraph) -> None:
    """Only updates may wait for communication."""
    communication = np.isin(graph.kind, [int(k) for k in COLLECTIVE])
    bad = np.flatnonzero(communication[graph.preds.ids] & ~(communication | (graph.kind == Kind.U))[graph.preds.row_of_each()])
    if bad.size:
        task = int(graph.preds.row_of_each()[bad[0]])
        raise GraphError(f"task {graph.name(task)} reads a gradient within the step; only updates may, since ranks sum gradients at its end")
