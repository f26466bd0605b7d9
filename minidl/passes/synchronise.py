"""Data parallelism: turns a step into one rank's step, with gradient sums over ranks.

Communication A comes between the backward pass and the updates; where updates run one step late
(`minidl.passes.boundary`), it may take until then. The pass knows neither ranks nor networks; the runtime of an A task
divides the sum by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.columns import Ints, grouped, in_parts
from ..core.graph import Launch, Role, TaskGraph, View
from ..core.placement import Refused
from ..core.tasks import Kind, unpack
from .draft import Draft, Edit, Sums
from .rewrite import gradients, sums

SUMS = "sums over ranks"  #: for messages
PARTS = 1 << 10  #: the most parts of a sum
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


def norms_apart(draft: Draft) -> Draft:
    """The draft in which tasks that add up the gradients of several uses take no norms: ranks sum in between. The norms
    of `0U4` are `0U5` then, right after it; they take no time of their own."""
    graph = draft.graph
    adding = np.flatnonzero(sums(graph)).tolist() if graph.launches else []
    if not adding:
        return draft
    spent, e = {b for buffers in gradients(graph).values() for b in buffers.tolist()}, draft.edit()
    for t in adding:
        reads, writes, launches = e.reads[t], e.writes[t], e.launches[t]
        added = e.places(writes & spent)
        adds = tuple(launch for launch in launches if {view.storage for view in launch.writes} <= added)
        norms = tuple(launch for launch in launches if launch not in adds)
        if not adds or not norms:
            continue
        of_norms, of_adds = ({view.storage for launch in own for view in launch.views} for own in (norms, adds))
        own = unpack(int(graph.keys[t]))
        new = e.task(t, own.unit, Kind.U, own.micro_batch + 1, part=own.part, late=own.late, stage=e.stage[t],
                     reads={b for b in reads | writes if e.storage_of[b] in of_norms
                            and (b in reads or e.storage_of[b] in added)},
                     writes={b for b in writes if e.storage_of[b] not in added}, launches=norms)
        e.then(t, new)
        e.reads[t] = {b for b in reads if e.storage_of[b] in of_adds}
        e.writes[t] = {b for b in writes if e.storage_of[b] in added}
        e.launches[t] = adds
    return e.draft if e.follows else draft


def reverse_buckets(graph: TaskGraph, nbytes: int) -> list[list[int]]:
    """Groups of updates whose gradients fill `nbytes`, from the last layer on, as gradients become ready."""
    updates = sorted(gradients(graph).items(), key=lambda item: -int(graph.unit[item[0]]))
    return in_parts(((u, int(graph.buffer_bytes[buffers].sum())) for u, buffers in updates), nbytes)


def synchronise(graph: TaskGraph, groups: Sequence[Sequence[int]] | None = None, *,
                part_bytes: int | None = None) -> TaskGraph:
    """As `summed_by_all`, for a graph alone."""
    return summed_by_all(Draft.of(graph, sums=Sums(groups, part_bytes))).graph


def summed_by_all(draft: Draft) -> Draft:
    """Adds the communication that sums gradients over ranks, before the updates, as `draft.sums` asks for it.

    A group's communication is named after its lowest unit: `4A0`, and `4A0/1` is its second part. Its time follows from
    the machine's collectives. Raises Refused for a graph with an update that makes its own gradient, with other tasks
    than updates after its first update, with a task that reads a gradient before ranks have summed it, or with an
    output that updates or sums over ranks still change.
    """
    how = draft.sums
    assert how is not None
    if np.isin(draft.graph.kind, [*CALLS]).any():
        raise Refused(SUMS, "the graph is synchronised already", "leave the sums to the policy")
    draft = norms_apart(draft)
    graph, spent = draft.graph, gradients(draft.graph)
    if not spent:
        raise Refused(SUMS, "the step updates nothing, so there is nothing to synchronise", "record the update too")

    def roles(views: Sequence[View]) -> set[Role]:
        return {graph.storages[view.storage].role for view in views}

    if whole := [u for u in spent for n in graph[u].launches
                 if Role.PARAMETER in roles(n.writes) and roles(n.reads) & {Role.ACTIVATION, Role.INPUT}]:
        raise Refused(SUMS, f"{graph.name(whole[0])} makes the gradient that it uses, so ranks cannot sum it before",
                      "leave out the fusion rule weight_updates")
    updates = np.flatnonzero(graph.kind == Kind.U)
    first = int(updates[0])
    late = np.flatnonzero(graph.kind[first:] != Kind.U)
    if late.size:
        raise Refused(SUMS, f"task {graph.name(first + int(late[0]))} comes after the update {graph.name(first)}",
                      "a data-parallel step must end with its updates")
    changed = {int(graph.buffer_storage[b]): u for u in reversed(updates.tolist())
               for b in (*graph.writes[u].tolist(), *spent.get(u, []))}
    for view in graph.outputs:
        if view.storage in changed:
            raise Refused(SUMS, f"the step returns {graph.storages[view.storage].name}, which is not final yet, as "
                          f"ranks sum gradients and update ({graph.name(changed[view.storage])}) after it has returned",
                          "return something else, such as the loss")
    groups = [[u] for u in spent] if how.groups is None else how.groups
    if sorted(u for group in groups for u in group) != sorted(spent):
        raise Refused(SUMS, "an update is in no group, or in several", "groups must hold every update that uses "
                      "gradients exactly once")
    pieces = [p for g, group in enumerate(groups)
              for p in _cut(graph, g, [(u, b) for u in group for b in spent[u].tolist()], how.part_bytes)]
    found = _with_sums(draft, updates, groups, pieces, how.scatter)
    _check(found.graph)
    if draft.machine.collective is not None:
        times = times_of_sums(found.graph, draft.machine.collective)
        found.time[list(times)] = [*times.values()]
    return found


def times_of_sums(graph: TaskGraph, time: Callable[[Mapping[int, int]], float]) -> dict[int, float]:
    """The time of each collective of a synchronised graph. `time`: from {unit: bytes that travel} to the time of an
    all-reduce; AS, AG and X take half of it each. An exchange without bytes is on given times."""
    unit_of = {b: int(graph.unit[u]) for u in np.flatnonzero(graph.kind == Kind.U).tolist()
               for b in graph.reads[u].tolist()}
    found = {t: 0.5 * time({int(graph.unit[t]): int(graph.bytes[t])})
             for t in np.flatnonzero((graph.kind == Kind.X) & (graph.bytes > 0)).tolist()}
    for t in np.flatnonzero(np.isin(graph.kind, [*CALLS])).tolist():
        sizes = grouped((unit_of[b], int(graph.buffer_bytes[b])) for b in graph.writes[t].tolist())
        found[t] = time({unit: sum(own) for unit, own in sizes.items()}) * (1.0 if graph.kind[t] == Kind.A else 0.5)
    return found


def _cut(graph: TaskGraph, group: int, members: list[tuple[int, int]], part_bytes: int | None) -> list[_Piece]:
    """One group's gradients, laid end to end and cut into parts of equal size, up to whole elements."""
    views = {b: view_of(graph, u, b) for u, b in members}
    width = {b: np.dtype(v.dtype).itemsize if v else 1 for b, v in views.items()}
    size = [int(graph.buffer_bytes[b]) for _, b in members]
    total = sum(size)
    if part_bytes is not None and part_bytes < (least := max(1, -(-total // PARTS))):
        raise Refused(SUMS, f"part_bytes is {part_bytes}, but {total:,} bytes of gradients have at most {PARTS} parts",
                      f"give part_bytes={least} or more")
    parts = 1 if part_bytes is None else max(1, -(-total // part_bytes))
    bounds = [total * i // parts for i in range(parts + 1)]
    pieces, start = [], 0
    for (_, b), nbytes in zip(members, size, strict=True):
        for part in range(parts):
            begin, end = (min(max(x - start, 0), nbytes) // width[b] for x in bounds[part : part + 2])
            if end > begin:
                window = (view := views[b]) and replace(view, shape=(end - begin,), strides=(1,),
                                                        offset=view.offset + begin)
                pieces.append(_Piece(b, group, part, (end - begin) * width[b], window))
        start += nbytes
    return pieces


def view_of(graph: TaskGraph, update: int, buffer: int) -> View | None:
    """The gradient as the update reads it, contiguous as `backward` leaves it; None in a graph without kernels."""
    storage = int(graph.buffer_storage[buffer])
    return next((v for launch in graph[update].launches for v in launch.reads if v.storage == storage), None)


def _with_sums(draft: Draft, updates: Ints, groups: Sequence[Sequence[int]], pieces: list[_Piece],
               scatter: bool) -> Draft:
    graph, e, staged = draft.graph, draft.edit(), draft.staged
    # the gradients of a batch norm are sums that an output gradient reads: it must read this rank's own sums first
    touched = {b: t for t in range(int(updates[0])) for b in (*graph.reads[t].tolist(), *graph.writes[t].tolist())}
    for u in updates.tolist():  # which may add up the gradients of several uses
        touched |= dict.fromkeys([b for b in graph.writes[u].tolist() if b not in touched], u)
    unit = [min(int(graph.unit[u]) for u in group) for group in groups]
    last = grouped((p.group, touched[p.buffer]) for p in pieces)  # a group's communication follows the last of these
    parts = grouped(((p.group, p.part), i) for i, p in enumerate(pieces))
    transfers = sorted(((max(last[g]), unit[g], part, chosen) for (g, part), chosen in parts.items()),
                       key=lambda transfer: transfer[0])
    made = [(Kind.AS if scatter else Kind.A, *transfer) for transfer in transfers]
    if scatter:
        made += [(Kind.AG, int(updates[0]) - 1, *transfer[1:])
                 for transfer in sorted(transfers, key=lambda transfer: transfer[1:3])]
    buffer_of = _in_pieces(e, pieces)
    accessed = [([buffer_of[i] for i in chosen], tuple(v for i in chosen if (v := pieces[i].view) is not None),
                 sum(pieces[i].nbytes for i in chosen)) for *_, chosen in made]
    for (kind, after, lowest, part, _), (buffers, views, nbytes) in zip(made, accessed, strict=True):
        e.task(after, lowest, kind, part=part, stage=lowest if staged else 0, reads=buffers, writes=buffers,
               launches=[Launch(CALLS[kind], views, views)] if views else (), time=np.nan, nbytes=nbytes)
    return e.draft


def _in_pieces(e: Edit, pieces: Sequence[_Piece]) -> list[int]:
    """The buffer of each piece, which tasks access with the gradient's own; a gradient's first piece keeps that."""
    graph, buffer_of, further = e.old.graph, list[int](), dict[int, list[int]]()  # gradient -> buffers of other pieces
    for p in pieces:
        at = p.buffer
        if at in further:
            name = f"{graph.buffer_names[at]}+" if graph.buffer_names else ""
            at = e.buffer(at, int(graph.buffer_storage[at]), name)
            further[p.buffer].append(at)
        further.setdefault(p.buffer, [])
        e.buffer_bytes[at] = p.nbytes
        buffer_of.append(at)
    for sets, rows in ((e.reads, graph.reads), (e.writes, graph.writes)):
        tasks = rows.transposed(len(graph.buffer_bytes))
        for b, new in further.items():
            for t in tasks[b].tolist() if new else ():
                sets[t] = sets[t] | {*new}
    return buffer_of


def _check(graph: TaskGraph) -> None:
    """Raises Refused if a task other than an update waits for communication."""
    communication = np.isin(graph.kind, [*CALLS])
    bad = np.flatnonzero(communication[graph.preds.ids]
                         & ~(communication | (graph.kind == Kind.U))[graph.preds.row_of_each()])
    if bad.size:
        task = int(graph.preds.row_of_each()[bad[0]])
        raise Refused(SUMS, f"task {graph.name(task)} reads a gradient within the step, but ranks sum gradients at its "
                      f"end", "only updates may read them")
