"""Values that a rank holds already do not travel again as parts of joined values.

A message carries a result to a rank once, however many of its stages read it. But a joined value, as of a network whose
layers read all earlier results, is a copy of values that the rank may have received for an earlier stage, or made. With
`only_new` two things happen where fewer bytes travel then: a join is made again on the rank that reads it, of values
that this holds and of some that it lacks, which are sent; and a gradient of a join is cut where it is made. Nothing is
computed but copies, so bits are equal. Gradients are summed in their order, so each partial sum is a new value, and
travels from stage to stage; torchtitan #3029 and #4312 sum on each rank first, in another order.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from ..core.columns import grouped
from ..core.graph import TaskGraph, View
from ..core.machine import PlanError, shorten
from ..core.placement import Refused
from ..core.tasks import Kind
from .boundary import Mask
from .draft import NONE, Copies, Draft
from .send_receive import crossing


def only_new_travels(draft: Draft, only_new: bool = False) -> Draft:
    """The step with these copies. Raises Refused for a pipeline that never drains, whose ranks may hold values of
    another step, and PlanError for anything but true and false."""
    if not isinstance(only_new, bool):
        raise PlanError(f"only_new is {shorten(only_new)}; it must be true or false")
    if draft.stale or draft.placement.apart:
        why = "never drains" if draft.stale else "runs forwards on other ranks"
        raise Refused("only_new", f"{draft.name} {why}", "leave only_new out")
    if not only_new:
        return draft
    before = sent(draft)
    made = _again_where_read(_cut_where_made(draft))
    return replace(made, remarks=(*made.remarks, f"only_new: {sent(made):,} bytes travel in place of {before:,}"))


def sent(draft: Draft) -> int:
    """The bytes that travel between ranks in a step."""
    reader, buffer, writer = crossing(draft.graph, draft.rank)
    ranks = draft.placement.ranks
    each = np.unique((writer * len(draft.graph.buffer_bytes) + buffer) * ranks + draft.rank[reader])
    return int(draft.graph.buffer_bytes[each // ranks % len(draft.graph.buffer_bytes)].sum())


def _copies(graph: TaskGraph, kind: Kind) -> list[int]:
    """The tasks of this kind that only copy."""
    return [t for t in np.flatnonzero(graph.kind == kind).tolist()
            if graph.launches[t] and all(launch.kernel == "copy" for launch in graph.launches[t])]


def _cut_where_made(draft: Draft) -> Draft:
    """Tasks that only copy parts of a gradient go to the stage where this is made."""
    graph, stage, rank = draft.graph, draft.stage.copy(), draft.rank.copy()
    reader, buffer, writer = crossing(graph, rank)
    read = grouped(zip(reader.tolist(), zip(buffer.tolist(), writer.tolist(), strict=True), strict=True))
    readers, once = graph.reads.transposed(len(graph.buffer_bytes)), _written_once(graph)
    for t in (t for t in _copies(graph, Kind.O) if t in read):
        here, there = int(rank[t]), {int(rank[w]) for _, w in read[t]}
        if len(there) > 1 or {*graph.reads[t].tolist()} != {b for b, _ in read[t]} or not once[graph.writes[t]].all():
            continue
        saved = sum(int(graph.buffer_bytes[b]) for b, w in read[t]
                    if not any(rank[r] == here and w < r != t for r in readers[b].tolist()))
        for b in graph.writes[t].tolist():
            users = {int(rank[r]) for r in readers[b].tolist() if r > t}
            saved += int(graph.buffer_bytes[b]) * (len(users - {here}) - len(users - there))
        if saved > 0:
            stage[t], rank[t] = stage[read[t][0][1]], there.pop()
    return replace(draft, stage=stage)


def _again_where_read(draft: Draft) -> Draft:
    """Joins are made again on ranks that read them, from values that these hold."""
    graph, rank, e = draft.graph, draft.rank, draft.edit()
    size = graph.buffer_bytes
    maker = dict(zip(graph.writes.ids.tolist(), graph.writes.row_of_each().tolist(), strict=True))
    reader, buffer, _ = crossing(graph, rank)
    held = {*zip(buffer.tolist(), rank[reader].tolist(), strict=True)}  # what travels, by buffer and rank
    readers, once = graph.reads.transposed(len(size)), _written_once(graph) & ~graph.persistent
    writers = grouped(zip(graph.buffer_storage.tolist(), map(maker.get, range(len(size))), strict=True))
    joins = {t: graph.launches[t] for t in _copies(graph, Kind.F) if once[graph.reads[t]].all() and all(
        once[b] and {*writers[int(graph.buffer_storage[b])]} == {t} for b in graph.writes[t].tolist())}
    join_of = {int(graph.buffer_storage[b]): t for t in joins for b in graph.writes[t].tolist()}
    again = dict[tuple[int, int], tuple[int, Copies]]()  # by storage and rank: the stage that makes it, what it makes

    def copy(view: View, r: int, stage: int) -> Copies:
        """The copy of a join that this rank makes in this stage or an earlier one."""
        made_in, copies = again.get((view.storage, r), (stage, NONE))
        return copies if made_in <= stage else NONE

    def needs(view: View, t: int) -> set[int]:
        return {b for b in graph.reads[t].tolist() if graph.buffer_storage[b] == view.storage}

    def here(b: int, r: int) -> bool:
        return b not in maker or rank[maker[b]] == r or (b, r) in held

    def parts(t: int, r: int, stage: int) -> list[tuple[View, View, set[int]]]:
        """The copies of a join from values that this rank holds, as far as they are known."""
        found = []
        for launch in joins[t]:
            source, target = launch.reads[0], launch.writes[0]
            needed, own = needs(source, t), join_of.get(source.storage)
            if own is None or copy(source, r, stage) is not NONE or all(here(b, r) for b in needed):
                found.append((source, target, needed))
                continue
            inner = [(a, inside(b, source, target), needed) for a, b, needed in parts(own, r, stage)]
            fits = [part for part in inner if part[1] is not None]
            whole = sum(prod(a.shape) for a, _, _ in fits) == prod(source.shape)
            found += fits if whole else [(source, target, needed)]  # type: ignore[arg-type]
        return found

    for t in joins:
        made = set(graph.writes[t].tolist())
        for r in sorted({int(r) for b, r in held if b in made} - {int(rank[t])}):
            users = sorted({u for b in made for u in readers[b].tolist() if rank[u] == r})
            copied = parts(t, r, stage := int(draft.stage[users[0]]))
            old = [copy(source, r, stage) for source, *_ in copied]
            lacks = {b for (*_, needed), copies in zip(copied, old, strict=True) for b in needed
                     if copies is NONE and not here(b, r)}
            if (sum(int(size[b]) for b in lacks) >= sum(int(size[b]) for b in made if (b, r) in held)
                    or graph.kind[users[0]] != Kind.F):
                continue
            held = (held - {(b, r) for b in made}) | {(b, r) for b in lacks}
            new = e.copies(made, f"again on rank {r}")
            e.again(t, t, new, f"again on rank {r}", stage=stage,
                    reads={b for (*_, needed), copies in zip(copied, old, strict=True) for b in copies.of(needed)},
                    launches=[replace(joins[t][0], reads=(source,), writes=(target,)).moved((new | copies).storages)
                              for (source, target, _), copies in zip(copied, old, strict=True)])
            e.use(new, *users)
            again |= {(s, r): (stage, new) for s in new.storages}
    return _without_unread(e.draft, set(graph.keys[[*joins]].tolist())) if again else draft


def _written_once(graph: TaskGraph) -> Mask:
    """Mask of the buffers that at most one task writes."""
    return np.asarray(np.bincount(graph.writes.ids, minlength=len(graph.buffer_bytes)) <= 1)


def inside(part: View, source: View, target: View) -> View | None:
    """Where these elements go in `target`, to which `source` is copied; None if they are no box of `source`."""
    if len(part.shape) != len(source.shape) or any(
            p != s for p, s, n in zip(part.strides, source.strides, part.shape, strict=True) if n > 1):
        return None
    left, at = part.offset - source.offset, target.offset
    for axis in sorted(range(len(source.shape)), key=lambda axis: -source.strides[axis]):
        if source.shape[axis] > 1 and source.strides[axis] > 0:
            begin, left = divmod(left, source.strides[axis])
            at += begin * target.strides[axis]
            if begin < 0 or begin + part.shape[axis] > source.shape[axis]:
                return None
        elif part.shape[axis] != source.shape[axis]:
            return None
    return None if left else View(target.storage, part.shape, target.strides, at, target.dtype)


def _without_unread(draft: Draft, keys: set[int]) -> Draft:
    """The draft without the tasks with these keys whose results nobody reads."""
    graph, returned = draft.graph, {view.storage for view in draft.graph.outputs}
    left = np.ones(len(graph), bool)
    read = np.bincount(graph.reads.ids, minlength=len(graph.buffer_bytes))
    for t in range(len(graph) - 1, -1, -1):
        made = graph.writes[t]
        if int(graph.keys[t]) in keys and not read[made].any() and not returned & {
                *graph.buffer_storage[made].tolist()}:
            left[t] = False
            np.subtract.at(read, graph.reads[t], 1)
    found = draft.take(np.flatnonzero(left))
    return replace(found, graph=found.graph.compact())
