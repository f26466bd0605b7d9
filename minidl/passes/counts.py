"""Every rank that needs a step's scalars computes them itself, so that no rank waits for another's count.

The scalars: the number of dropouts, Adam's powers, the clip factor (from the sums of squares of all stages), and the
loss scale (from their flags). Copies of a count have buffers of their own, but the same storage: each rank has its own
memory for it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import or_

import numpy as np

from ..core.graph import Role, TaskGraph
from ..core.tasks import Kind
from .draft import NONE, Copies, Draft
from .rewrite import sums


def counts(graph: TaskGraph) -> list[int]:
    """The updates that compute only scalars, from scalars and sums over gradients."""
    scalar, known = graph.role_is(Role.SCALAR), graph.role_is(Role.SCALAR)
    known[graph.writes.take(np.flatnonzero(sums(graph))).ids] = True
    lasting, found = graph.persistent & ~scalar, []
    for t in np.flatnonzero(graph.kind == Kind.U).tolist():
        made = graph.writes[t]
        if scalar[made].any() and not lasting[made].any() and known[graph.reads[t]].all():
            found.append(t)
            known[made] = True
    return found


def counted_by_each(draft: Draft) -> Draft:
    """Each rank counts on the first of its stages that needs it. In a pipeline that never drains, the last stage that
    needs it does, since its updates come first; but what only updates read, such as Adam's powers, each stage computes
    in memory of its own, since stages of one rank do not update at the same time."""
    graph, stale, counting = draft.graph, draft.stale, counts(draft.graph)
    if not counting:
        return draft
    stage, readers = draft.stage.copy(), graph.reads.transposed(len(graph.buffer_bytes))
    for t in reversed(counting):  # on the first stage that needs it: updates may wait only for stages in one direction
        needing = [u for b in graph.writes[t].tolist() for u in readers[b].tolist() if u != t]
        if needing and np.count_nonzero(graph.unit == graph.unit[t]) == 1:
            stage[t] = (max if stale else min)(stage[needing])
    draft = replace(draft, stage=stage)
    counted = {b for t in counting for b in graph.writes[t].tolist()}
    users = {b: {int(stage[t]) for t in readers[b].tolist()} for b in counted}
    rank_of = dict(zip(stage.tolist(), draft.rank.tolist(), strict=True))
    forward = {int(b) for b in graph.reads.take(np.flatnonzero(graph.kind == Kind.F)).ids}
    e, mine = draft.edit(), dict[tuple[int, int], Copies]()  # (task, a stage that counts for itself) -> its buffers
    home: dict[tuple[int, int], int] = {}  # (task, a stage that needs its count) -> the stage that counts for it
    for t in counting:
        needing = sorted(set[int]().union(*(users[b] for b in graph.writes[t].tolist())))
        first = {rank_of[s]: s for s in needing[:: 1 if stale else -1]} | {rank_of[int(stage[t])]: int(stage[t])}
        lone = stale and not forward & set(graph.writes[t].tolist())
        home |= {(t, s): s if lone else first[rank_of[s]] for s in needing}
        for s in sorted({home[t, s] for s in needing} - {int(stage[t])}):
            if lone and s != first[rank_of[s]]:
                mine[t, s] = e.copies(graph.writes[t].tolist(), f"of stage {s}", role=Role.STATE, live=None,
                                      filled=True)
            else:
                mine[t, s] = Copies({b: e.buffer(b, e.storage_of[b], f"{e.names[b]} of stage {s}")
                                     for b in graph.writes[t].tolist()}, {})
    if not mine:
        return draft
    used = {s: reduce(or_, (mine[t, at] for (t, needs), at in home.items() if needs == s and (t, at) in mine), NONE)
            for s in sorted({s for _, s in home})}
    for s, own in used.items():
        for t in (t for t in counting if (t, s) in mine):
            e.again(t - 1 if s < stage[t] else t, t, own, unit=e.unit(graph.unit_names[graph.unit[t]]), part=0, stage=s)
    for s, own in used.items():
        touching = {*counting, *(t for b in own.buffers for t in readers[b].tolist())}
        e.move(own, *(t for t in touching if stage[t] == s))
    return e.draft
