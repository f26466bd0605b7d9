"""Data parallelism as a pass: a step's graph becomes that of one rank among several, which sum their gradients.

Communication A comes between the backward pass and the updates; where updates run one step late
(`minidl.passes.boundary`), it may take until then. The pass knows neither ranks nor networks; the runtime of an A task
divides the sum by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..graph import ROLES, Ints, Launch, Role, Rows, TaskGraph, View
from ..tasks import COLLECTIVE, GraphError, Kind, pack, repack
from .rewrite import sums

CALLS = {Kind.A: "all_reduce", Kind.AS: "reduce_scatter", Kind.AG: "all_gather"}  #: the launch of each kind


@dataclass(frozen=True)
class _Piece:
    """Elements begin..end of one gradient buffer, in part `part` of its group; `view` is None in a graph without
    kernels."""

    buffer: int
    group: int
    part: int
    nbytes: int
    view: View | None


def gradients(graph: TaskGraph) -> dict[int, Ints]:
    """Task that updates parameters -> the buffers with their gradients, in the order of the tasks."""
    updates = np.flatnonzero(graph.kind == Kind.U).tolist()
    made = np.zeros(len(graph.buffer_bytes), bool)  # by the backward pass, not by an update (as norms are)
    maker = graph.kind[graph.writes.row_of_each()]
    made[graph.writes.ids[maker != Kind.U]] = True
    gradient = made & ~np.array([ROLES[r].persistent for r in graph.buffer_role], bool)
    gradient[graph.writes.ids[np.isin(maker, (Kind.O, Kind.W, Kind.B))]] = True  # late tasks may make it outlive a step
    parameter = graph.buffer_role == ROLES.index(Role.PARAMETER)
    found = {u: graph.reads[u][gradient[graph.reads[u]] | _sums_of_uses(graph, u)]
             for u in updates if parameter[graph.writes[u]].any()}
    return {u: buffers for u, buffers in found.items() if len(buffers)}


def _sums_of_uses(graph: TaskGraph, update: int) -> Any:
    """Mask of what an update reads: gradients that other updates have added up, of a parameter that stages on several
    ranks use. They are shaped as parameters that it updates."""
    def spec(buffer: int) -> tuple[Any, str]:
        storage = graph.storages[int(graph.buffer_storage[buffer])]
        return storage.shape, storage.dtype

    own = {spec(b) for b in graph.writes[update].tolist()
           if graph.storages and graph.buffer_role[b] == ROLES.index(Role.PARAMETER)}
    return np.array([graph.buffer_role[b] == ROLES.index(Role.GRADIENT) and bool(own) and spec(b) in own
                     for b in graph.reads[update].tolist()], bool)


def norms_apart(graph: TaskGraph) -> TaskGraph:
    """The graph in which tasks that add up the gradients of several uses take no norms: ranks sum in between. The norms
    of `0U4` are `0U5` then."""
    spent = {b for buffers in gradients(graph).values() for b in buffers.tolist()}
    reads, writes = ([rows[t].tolist() for t in range(len(graph))] for rows in (graph.reads, graph.writes))
    launches = list(graph.launches)
    after, keys, taken, given, later = [], [], [], [], []
    for t in np.flatnonzero(sums(graph)).tolist() if launches else []:
        added = {int(graph.buffer_storage[b]) for b in writes[t] if b in spent}
        adds = tuple(launch for launch in launches[t] if {view.storage for view in launch.writes} <= added)
        norms = tuple(launch for launch in launches[t] if launch not in adds)
        if not added or not norms:
            continue
        after.append(t)
        keys.append(int(repack(graph.keys[t : t + 1], micro_batch=graph.micro_batch[t] + 1)[0]))
        own = {view.storage for launch in norms for view in launch.views}
        taken.append(sorted({b for b in (*reads[t], *writes[t]) if graph.buffer_storage[b] in own
                             and (b in reads[t] or graph.buffer_storage[b] in added)}))
        given.append([b for b in writes[t] if graph.buffer_storage[b] not in added])
        later.append(norms)
        own = {view.storage for launch in adds for view in launch.views}
        reads[t] = [b for b in reads[t] if graph.buffer_storage[b] in own]
        writes[t] = [b for b in writes[t] if graph.buffer_storage[b] in added]
        launches[t] = adds
    if not keys:
        return graph
    found = replace(graph, reads=Rows.of(reads), writes=Rows.of(writes), launches=tuple(launches))
    return found.insert(np.array(after), np.array(keys), Rows.of(taken), Rows.of(given),
                        np.zeros(len(keys), np.int64), later)


def reverse_buckets(graph: TaskGraph, nbytes: int) -> list[list[int]]:
    """Groups of updates whose gradients fill `nbytes`, from the last layer on, as gradients become ready."""
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
    """Adds the communication that sums gradients over ranks, before the updates.

    `groups`: update tasks whose gradients travel together (default: each alone). A group's communication is named after
    its lowest unit: `4A0`, and `4A0/1` is its second part. `part_bytes`: the most bytes of a part. `scatter`: AS and AG
    in place of A. Raises GraphError for a graph with other tasks than updates after its first update, with a task that
    reads a gradient before ranks have summed it, or with an output that updates or sums over ranks still change.
    """
    if np.isin(graph.kind, COLLECTIVE).any():
        raise GraphError("the graph is synchronised already")
    graph = norms_apart(graph)
    spent = gradients(graph)
    if not spent:
        raise GraphError("the step updates nothing, so there is nothing to synchronise")
    updates = np.flatnonzero(graph.kind == Kind.U)
    first = int(updates[0])
    late = np.flatnonzero(graph.kind[first:] != Kind.U)
    if late.size:
        raise GraphError(f"task {graph.name(first + int(late[0]))} comes after the update {graph.name(first)}; "
                         f"a data-parallel step must end with its updates")
    changed = {int(graph.buffer_storage[b]): u for u in reversed(updates.tolist())
               for b in (*graph.writes[u].tolist(), *spent.get(u, []))}
    for view in graph.outputs:
        if view.storage in changed:
            raise GraphError(f"the step returns {graph.storages[view.storage].name}, which is not final yet: ranks sum "
                             f"gradients and update ({graph.name(changed[view.storage])}) after a step has returned")
    groups = [[u] for u in spent] if groups is None else groups
    if sorted(u for group in groups for u in group) != sorted(spent):
        raise GraphError("the groups must hold every update that uses gradients exactly once")
    pieces = [p for g, group in enumerate(groups)
              for p in _cut(graph, g, [(u, b) for u in group for b in spent[u].tolist()], part_bytes)]
    return _assemble(graph, updates, groups, pieces, scatter)


def _cut(graph: TaskGraph, group: int, members: list[tuple[int, int]], part_bytes: int | None) -> list[_Piece]:
    """One group's gradients, laid end to end and cut into parts of equal size, up to whole elements."""
    views = {b: view_of(graph, u, b) for u, b in members}
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


def view_of(graph: TaskGraph, update: int, buffer: int) -> View | None:
    """The gradient as the update reads it, contiguous as `backward` leaves it; None in a graph without kernels."""
    storage = int(graph.buffer_storage[buffer])
    return next((v for launch in graph[update].launches for v in launch.reads if v.storage == storage), None)


def _assemble(graph: TaskGraph, updates: Ints, groups: Sequence[Sequence[int]], pieces: list[_Piece],
              scatter: bool) -> TaskGraph:
    cut, buffer_of = _in_pieces(graph, pieces)
    # the gradients of a batch norm are sums that an output gradient reads: it must read this rank's own sums first
    touched = {b: t for t in range(int(updates[0])) for b in (*graph.reads[t].tolist(), *graph.writes[t].tolist())}
    for u in updates.tolist():  # which may add up the gradients of several uses
        touched |= dict.fromkeys([b for b in graph.writes[u].tolist() if b not in touched], u)
    transfers: list[tuple[int, int, int, list[int]]] = []  # (the task that it follows, unit, part, pieces)
    for g, group in enumerate(groups):
        lowest = min(int(graph.unit[u]) for u in group)
        mine = [i for i, p in enumerate(pieces) if p.group == g]
        last = max(touched[pieces[i].buffer] for i in mine)
        transfers += [(last, lowest, part, [i for i in mine if pieces[i].part == part])
                      for part in sorted({pieces[i].part for i in mine})]
    transfers.sort(key=lambda transfer: transfer[0])
    kinds = [Kind.AS if scatter else Kind.A] * len(transfers)
    if scatter:
        kinds += [Kind.AG] * len(transfers)
        transfers += [(int(updates[0]) - 1, unit, part, indices)
                      for _, unit, part, indices in sorted(transfers, key=lambda transfer: transfer[1:3])]
    after, unit, part, chosen = zip(*transfers, strict=True)
    views = [tuple(v for i in indices if (v := pieces[i].view) is not None) for indices in chosen]
    buffers = Rows.of([sorted(buffer_of[i] for i in indices) for indices in chosen])
    result = cut.insert(
        np.array(after), pack(unit, kinds, part=part), buffers, buffers,
        np.array([sum(pieces[i].nbytes for i in indices) for indices in chosen]),
        [(Launch(CALLS[k], own, own),) if own else () for k, own in zip(kinds, views, strict=True)])
    _check(result)
    return result


def _in_pieces(graph: TaskGraph, pieces: Sequence[_Piece]) -> tuple[TaskGraph, list[int]]:
    """The graph with a buffer for each piece, and the buffer of each piece. The first piece of a gradient keeps the
    gradient's own buffer."""
    first = dict[int, int]()  # gradient buffer -> its first piece
    for i, p in enumerate(pieces):
        first.setdefault(p.buffer, i)
    further = [i for i, p in enumerate(pieces) if first[p.buffer] != i]
    old = np.array([pieces[i].buffer for i in further], np.int64)
    names = [f"{graph.buffer_names[b]}+" for b in old] if graph.buffer_names else ()
    grown = graph.with_buffers(old, graph.buffer_storage[old], names,
                               np.array([pieces[i].nbytes for i in further], np.int64))
    nbytes = grown.buffer_bytes.copy()
    nbytes[list(first)] = [pieces[i].nbytes for i in first.values()]
    buffer_of = [p.buffer for p in pieces]
    of_buffer: dict[int, list[int]] = {}
    for number, i in enumerate(further, len(graph.buffer_bytes)):
        buffer_of[i] = number
        of_buffer.setdefault(pieces[i].buffer, []).append(number)

    def spread(rows: Rows) -> Rows:
        return Rows.of([sorted(c for b in rows[t].tolist() for c in (b, *of_buffer.get(b, ())))
                        for t in range(len(rows))])

    return replace(grown, buffer_bytes=nbytes, reads=spread(graph.reads), writes=spread(graph.writes)), buffer_of


def _check(graph: TaskGraph) -> None:
    """Raises GraphError where a task other than an update waits for communication."""
    communication = np.isin(graph.kind, COLLECTIVE)
    bad = np.flatnonzero(communication[graph.preds.ids]
                         & ~(communication | (graph.kind == Kind.U))[graph.preds.row_of_each()])
    if bad.size:
        task = int(graph.preds.row_of_each()[bad[0]])
        raise GraphError(f"task {graph.name(task)} reads a gradient within the step; only updates may do so, because "
                         f"ranks sum gradients at its end")
