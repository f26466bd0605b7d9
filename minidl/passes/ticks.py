"""Stages that all work at once, on what their neighbours made in the step before: a step becomes a tick.

PARTIME (Meloni, Faggi, Marullo, Betti, Tiezzi, Gori, Melacci, 2210.09147). Stage s reads the activations that stage s-1
made one tick before, and the gradient that stage s+1 made then, which belongs to a sample that is 2 (S-1-s) ticks older
than its own activations. The last stage compares with the target of S-1 ticks before. No task of a stage needs another
stage's task of the same tick. Every buffer that crosses d stages is delayed by d ticks, in d states; the tick ends with
the copies. They begin with zeros.
"""

from __future__ import annotations

import numpy as np

from ..core.columns import Ints
from ..core.graph import Role
from ..core.placement import Refused
from ..core.tasks import Kind
from ..pricing.corun import BYTES_PER_US
from .draft import Draft
from .rewrite import sums


def in_ticks(draft: Draft, stage: Ints) -> Draft:
    """The step as a tick. `stage`: of each task. Raises Refused for a step of several micro-batches, and if a value of
    several stages is summed or updated."""
    graph, name = draft.graph, draft.name
    if len(np.unique(stage)) < 2:
        return draft
    if draft.micro_batches > 1:
        raise Refused(name, f"a tick has one forward of one batch, not {draft.micro_batches}",
                      "take --micro-batches 1, and a network without time steps")
    if sums(graph).any():
        raise Refused(name, "stages update at once, but clipping or loss scaling needs the gradients of all of them",
                      "leave it out")
    e = draft.edit()
    maker = {b: t for t in reversed(range(len(graph))) for b in graph.writes[t].tolist()}  # the first one
    given = {view.storage for view in graph.inputs}
    delayed: dict[tuple[int, int], list[int]] = {}  # (storage, ticks) -> tasks that read it so late
    buffers: dict[int, set[int]] = {}  # storage -> its buffers that cross
    for t in range(len(graph)):
        for b in graph.reads[t].tolist():
            storage, own, role = int(graph.buffer_storage[b]), int(stage[t]), graph.buffer(b).role
            source = 0 if storage in given else int(stage[maker.get(b, t)])
            if source == own or (role.persistent and role != Role.PARAMETER):
                continue
            if role == Role.PARAMETER or graph.kind[t] == Kind.U or b in graph.writes[t]:
                raise Refused(name, f"stages {source} and {own} both use or add up {graph.buffer(b).name}",
                              "take a network whose stages share nothing, fewer stages, or no --fusion")
            delayed.setdefault((storage, abs(own - source)), []).append(t)
            buffers.setdefault(storage, set()).add(b)
    for (storage, ticks), tasks in delayed.items():  # a launch has one place for a storage, such as joined channels
        for t in tasks:
            used = [b for b in (*graph.reads[t].tolist(), *graph.writes[t].tolist())
                    if graph.buffer_storage[b] == storage]
            if {abs(int(stage[t]) - int(stage[maker[b]])) if storage not in given else ticks for b in used} != {ticks}:
                raise Refused(name, f"{graph.name(t)} uses parts of {graph.buffer(used[0]).name} of several stages",
                              "take a network that joins nothing across stages, or fewer stages")
    end = len(graph) - 1
    for storage, crossing in sorted(buffers.items()):
        most = max(ticks for s, ticks in delayed if s == storage)
        held = [e.copies(crossing, f"{k} ticks ago" if k > 1 else "a tick ago", role=Role.STATE, live=None)
                for k in range(1, most + 1)]
        for ticks in range(1, most + 1):
            e.use(held[ticks - 1], *delayed.get((storage, ticks), ()))
        source = min(maker[b] for b in crossing) if storage not in given else 0
        chain = [storage, *(copies.storages[storage] for copies in held)]
        all_of = [b for copies in held for b in copies.buffers.values()]
        launches = [launch for to in range(most, 0, -1) for launch in e.copy({chain[to - 1]: chain[to]})]
        nbytes = most * e.specs[storage].bytes
        e.task(end, e.unit(f"delay {e.specs[storage].name}"), Kind.U, stage=int(stage[source]),
               reads={*crossing, *all_of}, writes=all_of, launches=launches, nbytes=nbytes,
               time=draft.cost.launch + nbytes / BYTES_PER_US)
    return e.draft
