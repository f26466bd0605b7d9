"""A step of several batches, each with an update of its own: asynchronous policies order it batch by batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.columns import Ints, grouped
from ..core.graph import Role, TaskGraph
from ..core.placement import Refused
from ..core.tasks import Kind, unpack


@dataclass(frozen=True)
class Batches:
    """The tasks of a step by batch: forwards, the tasks after them in the order of a backward thread, which updates a
    layer as soon as it has used its weights, and what is left: the sums of losses."""

    forward: list[list[int]]
    backward: list[list[int]]
    rest: list[int]

    @classmethod
    def of(cls, graph: TaskGraph, name: str) -> Batches:
        """Raises Refused unless each micro-batch has its own update, and needs only weights of another one."""
        lasting, batch = graph.persistent, graph.micro_batch.tolist()
        changing = graph.changed_by(graph.role_is(Role.PARAMETER)) & (graph.kind == Kind.U)
        forward, work = ([list[int]() for _ in range(max(batch, default=-1) + 1)] for _ in range(2))
        writer, apart = dict[int, int](), set[int]()
        for t in range(len(graph)):
            makers = {writer[b] for b in graph.reads[t].tolist() if b in writer and not lasting[b]}
            if any(p in apart or batch[p] != batch[t] for p in makers):
                apart.add(t)
            else:
                (work if work[batch[t]] or graph.kind[t] != Kind.F else forward)[batch[t]].append(t)
            writer |= dict.fromkeys(graph.writes[t].tolist(), t)
        counts = graph.writes.ids[((graph.kind == Kind.U) & ~changing)[graph.writes.row_of_each()]]
        draws = (graph.kind == Kind.F) | ((graph.kind == Kind.Q) & (graph.micro_batch > 0))
        used = graph.reads.ids[draws[graph.reads.row_of_each()]]  # a counter of dropout or dither
        if (any(graph.kind[t] != Kind.F for t in apart) or {*graph.micro_batch[changing].tolist()} != {*batch}
                or np.isin(used, counts).any() or unpack(graph.keys).part[changing].any()):
            raise Refused(name, "each micro-batch needs an update of its own, in one part, and nothing else of others",
                          "record it so, of a network without time steps and dropout, without split, dither and lag")
        return cls(forward, [_updated_at_once(graph, tasks) for tasks in work], sorted(apart))


def _updated_at_once(graph: TaskGraph, tasks: list[int]) -> list[int]:
    """The tasks of a batch with each update right after the last that makes what it reads or reads what it changes."""
    reads, writes = ({t: {*rows[t].tolist()} for t in tasks} for rows in (graph.reads, graph.writes))
    place: dict[int, int] = {}
    for i, t in enumerate(tasks):
        place[t] = i if graph.kind[t] != Kind.U else max(
            (place[s] for s in tasks[:i] if writes[s] & reads[t] or reads[s] & writes[t]), default=-1)
    return sorted(tasks, key=place.__getitem__)


def staleness(graph: TaskGraph) -> dict[int, Ints]:
    """Layer -> for the forward of each batch, how many updates the layer has between it and the batch's own."""
    changing = graph.changed_by(graph.role_is(Role.PARAMETER)) & (graph.kind == Kind.U)
    found = dict[int, Ints]()
    for weights, mine in grouped((graph.writes[t].min(), t) for t in np.flatnonzero(changing).tolist()).items():
        first = {int(graph.micro_batch[t]): t for t in np.flatnonzero(graph.kind == Kind.F)[::-1]
                 if weights in graph.reads[t]}
        found[int(graph.unit[mine[0]])] = np.array([i - np.searchsorted(mine, first[int(graph.micro_batch[u])])
                                                    for i, u in enumerate(mine)])
    return found
