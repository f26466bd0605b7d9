"""Reversible blocks: the backward pass computes their inputs from their outputs, and keeps nothing of their forwards.

Gomez, Ren, Urtasun, Grosse, "The reversible residual network" (2017). Blocks in a row are x[k+1] = x[k-1] + F_k(x[k]).
From the top, tasks R compute F_k(x[k]) again and x[k-1] = x[k+1] - F_k(x[k]); what the backward pass reads of a block
it reads of these. Sums are rounded, so x[k-1] differs in its last bits, and in a pipeline on newer weights (PETRA,
2406.02052) by what these change. There x[k] and x[k-1] go down with the gradients, and no stage keeps an activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.columns import grouped
from ..core.graph import TaskGraph
from ..core.placement import Refused
from ..core.tasks import Kind
from .draft import NONE, Copies, Draft, Edit


@dataclass(frozen=True)
class Block:
    """x[k+1] = x[k-1] + F(x[k]), by storages `out`, `before` and `inner`. `tasks`: of F, in order; `result`: F's
    storage; `add`: the task of the sum."""

    before: int
    inner: int
    out: int
    tasks: Sequence[int]
    result: int
    add: int


def reverse(draft: Draft) -> Draft:
    """The step with its rows of reversible blocks run backwards, each block on one stage. Raises Refused for a network
    without at least two in a row, or for too many stages."""
    rows = _rows(draft.graph)
    if not rows:
        raise Refused(draft.name, "this network has no two reversible blocks in a row, x[k+1] = x[k-1] + F(x[k]) with "
                      "a chain of layers F", "take a network such as revnet, or another scheduler")
    stage = draft.stage.copy()
    for block in (block for row in rows for block in row):  # a block is not cut
        stage[np.isin(draft.graph.unit, draft.graph.unit[[*block.tasks]])] = stage[block.add]
    if draft.staged and len(np.unique(stage)) < draft.placement.stages:
        raise Refused(draft.name, f"{draft.placement.stages} stages are too many for this network, whose reversible "
                      "blocks are not cut", "take fewer ranks")
    e, found = replace(draft, stage=stage).edit(), NONE
    for row in rows:
        found |= _backwards(e, row)
    e.use(found, *np.flatnonzero(draft.graph.kind != Kind.F).tolist())
    return e.draft


def _rows(graph: TaskGraph) -> list[list[Block]]:
    """Reversible blocks one above the other, at least two in a row."""
    place, forward = graph.buffer_storage, np.flatnonzero(graph.kind == Kind.F).tolist()
    maker = {s: t for t in forward for s in place[graph.writes[t]].tolist()}
    readers = grouped((s, t) for t in forward for s in {*place[graph.reads[t]].tolist()})

    def block(add: int, before: int, result: int) -> Block | None:
        """The block of this sum, if F is a chain of tasks that nothing else reads."""
        own, s = list[int](), result
        while len(readers[s]) == 1 and s in maker:
            t = maker[s]
            inputs = {*place[graph.reads[t]].tolist()} & maker.keys()
            if len(inputs) != 1 or graph.persistent[graph.writes[t]].any():
                return None
            own.append(t)
            s = inputs.pop()
        return Block(before, s, int(place[graph.writes[add]][0]), own[::-1], result, add) if own else None

    rows = list[list[Block]]()
    for t in forward:
        launch = graph.launches[t][0]
        if len(graph.launches[t]) > 1 or launch.kernel != "add" or len({v.shape for v in launch.views}) > 1:
            continue
        one, two = (v.storage for v in launch.reads)
        for made in (block(t, *pair) for pair in ((one, two), (two, one))):
            if made is not None:
                row = next((row for row in rows if (row[-1].inner, row[-1].out) == (made.before, made.inner)), None)
                if row is None:
                    rows.append(row := [])
                row.append(made)
    return [row for row in rows if len(row) > 1]


def _backwards(e: Edit, row: Sequence[Block]) -> Copies:
    """Adds the tasks of a row, from its top; returns the copies that its backward pass reads."""
    graph, found = e.old.graph, NONE
    read = {e.storage_of[b] for t in np.flatnonzero(graph.kind != Kind.F).tolist() for b in e.reads[t]}

    for i, block in reversed([*enumerate(row)]):
        found |= e.copies({b for t in block.tasks for b in e.writes[t]}, "again")
        used = {*(e.storage_of[b] for t in block.tasks for b in e.writes[t]), block.inner, block.before}
        at = next(t for t in range(block.add, len(graph)) if graph.kind[t] != Kind.F
                  and used & e.places(e.reads[t])) - 1
        for t in block.tasks if i or block.result in read else block.tasks[:-1]:
            e.again(at, t, found, kind=Kind.R)
        if i:  # what the first block adds to, nobody reads in the backward pass
            before = {b for b in e.reads[block.add] if e.storage_of[b] == block.before}
            (launch,), views = e.launches[block.add], {v.storage: v for v in e.launches[block.add][0].views}
            found |= e.copies(before, "reversed")
            sub = replace(launch, kernel="sub", reads=(views[block.out], views[block.result]),
                          writes=(views[block.before],))
            e.again(at, block.add, found, kind=Kind.R, launches=[sub.moved(found.storages)], writes=found.of(before),
                    reads=found.of((e.reads[block.add] - before) | e.writes[block.add]))
    return found
