"""Recompute: activations are freed after their forward, and computed again just before the backward pass reads them.

Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost", 2016. A task R of a dropped unit has the
launches of its F on memory of its own: with the same counters, so that dropout masks repeat. R does not repeat F's
lasting changes, such as the running statistics of a batch norm. So a step is bit-identical to the plain one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from ..core.columns import Ints, grouped
from ..core.graph import Role, TaskGraph, moved_views
from ..core.tasks import Cuts, Kind
from .draft import Copies, Draft, Edit, fill

ANYWHERE = Cuts("...->...", lambda reads, writes, **constants: ())  #: how zeros are cut, as what reads them may be


def runs_again(graph: TaskGraph, dropped: Collection[int], stage: Ints | None = None) -> set[int]:
    """The forward tasks of these units that can run again. A task cannot if the step returns its result, if another
    stage reads this, if a task before the second run changes its arguments, or if a task that shares its memory cannot;
    then its activations are kept."""
    stage = np.zeros(len(graph), np.int64) if stage is None else stage
    place, activation = graph.buffer_storage.tolist(), graph.role_is(Role.ACTIVATION).tolist()
    writers, readers = graph.writes.transposed(len(place)), graph.reads.transposed(len(place))
    returned = {view.storage for view in graph.outputs}
    made = {t: [b for b in graph.writes[t].tolist() if activation[b]]
            for t in np.flatnonzero((graph.kind == Kind.F) & np.isin(graph.unit, [*dropped])).tolist()}
    until = dict[int, int]()  # the last task that may need this one to run again
    for t, own in reversed(made.items()):
        until[t] = max((until.get(r, t) if graph.kind[r] == Kind.F else r for b in own for r in readers[b].tolist()),
                       default=t)
    again = {t for t, own in made.items() if own and not returned.intersection(place[b] for b in own)
             and all(len(writers[b]) == 1 and (stage[readers[b]] == stage[t]).all() for b in own)
             and not any(((t + graph.persistent[b] <= writers[b]) & (writers[b] < until[t])).any()
                         for b in graph.reads[t].tolist())}
    users = {place[b]: {*map(int, writers[b])} for t in again for b in made[t]}
    for b, s in enumerate(place):
        if s in users:
            users[s].update(writers[b].tolist())
    while kept := {t for t in again for b in made[t] if not users[place[b]] <= again}:
        again -= kept
    return again


def recompute(draft: Draft, dropped: Collection[int] = ()) -> Draft:
    """The activations of these units are computed again, each just before its first reader. In a pipeline that never
    drains, a stage computes them again with the weights of its output gradient (`versions.py`)."""
    graph = draft.graph
    maker = {b: t for t in runs_again(graph, dropped, draft.stage) for b in graph.writes[t].tolist()
             if graph.buffer_role[b] == Role.ACTIVATION.number}
    together = grouped((int(graph.buffer_storage[b]), b) for b in maker)
    runs, done = list[tuple[int, list[int]]](), set[int]()
    others = np.flatnonzero(~np.isin(graph.kind, (Kind.F, Kind.X))).tolist()
    for t in others:
        todo = [maker[b] for b in graph.reads[t].tolist() if b in maker]
        needed = set[int]()
        while todo:
            if (f := todo.pop()) not in done | needed:
                needed.add(f)
                todo += [maker[b] for b in graph.reads[f].tolist() if b in maker]
        runs += [(t, sorted(needed))] * bool(needed)
        done |= needed
    if not runs:
        return draft
    e, buffers, storages = draft.edit(), dict[int, int](), dict[int, int]()
    found = Copies(buffers, storages)  # which grow
    for t, needed_by in runs:
        for f in needed_by:
            for s in {int(graph.buffer_storage[b]) for b in e.writes[f] if b in maker} - {*storages}:
                copies = e.copies(together[s], "again")
                buffers.update(copies.buffers)
                storages.update(copies.storages)
            _again(e, f, t - 1, found)
    e.use(found, *others)
    return e.draft


def _again(e: Edit, forward: int, after: int, found: Copies) -> None:
    """A task R for this F. It reads recomputed values; results that nobody reads go to memory of its own."""
    scratch = e.copies(e.writes[forward] - found.buffers.keys(), "scratch", role=Role.WORKSPACE, live=None)
    written = {**found.storages, **scratch.storages}
    states = {s: scratch.storages[s] for s in e.places(e.reads[forward] & scratch.buffers.keys())}
    reads = {**found.storages, **states}  # not the states: a later forward, which changes them, may come first
    launches = [fill(view, 0.0, cuts=ANYWHERE) for view in map(e.whole, states.values())]
    for launch in e.launches[forward]:
        launches.append(replace(launch, reads=moved_views(launch.reads, reads),
                                writes=moved_views(launch.writes, written), work=moved_views(launch.work, written)))
        reads.update({v.storage: scratch.storages[v.storage] for v in launch.writes if v.storage in scratch.storages})
    e.again(after, forward, found | scratch, kind=Kind.R, reads=found.of(e.reads[forward] - scratch.buffers.keys()),
            launches=launches)
