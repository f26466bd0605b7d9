"""Copies of weights on ranks that read them but do not update them; the copies follow every update.

If LayerPipe puts the tasks of a layer on several ranks, the weights are on the rank of W, and are updated there. Every
other rank whose F or O reads them has a copy, in the memory that the parameters have on that rank anyway. A task of
kind U with its own part number (`0U3/1` after 0U3) receives the new weights, which are sent once per update. For
`versions.py` such a copy is like the parameters themselves.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...graph import ROLES, Role, Rows
from ...tasks import Kind, pack
from .models import Stages
from .placement import PipelineError, Placement
from .versions import copied, updates


def with_followers(stages: Stages, placement: Placement) -> Stages:
    """The stages with F and O that read the copies of their ranks, and with the tasks that update the copies.

    Raises PipelineError if another value that outlives a step, such as a dropout counter, is used on several ranks.
    """
    assert placement.parts is not None
    graph, parts = stages.graph, placement.parts
    rank = parts[np.minimum(graph.kind, Kind.U), 0, graph.unit]
    _check_lasting(stages, rank.tolist())
    changing = updates(graph)
    reads, launches = [set(graph.reads[t].tolist()) for t in range(len(graph))], list(graph.launches)
    after, keys, taken, given, copies = [], [], [], [], []
    for stage in np.unique(graph.unit[changing]).tolist():
        mine = changing[graph.unit[changing] == stage].tolist()
        own = sorted({b for t in mine for b in graph.writes[t].tolist()
                      if graph.buffer_role[b] == ROLES.index(Role.PARAMETER)})
        held = sorted({int(graph.buffer_storage[b]) for b in own})
        for n in range(1, parts.shape[1]):
            where = int(parts[Kind.U, n, stage])
            users = [t for t in range(len(graph)) if rank[t] == where and reads[t] & set(own)]
            if where == parts[Kind.U, 0, stage] or not users:
                continue
            place = {s: len(graph.storages) + i for i, s in enumerate(held)}
            number = {b: len(graph.buffer_bytes) + i for i, b in enumerate(own)}
            graph = graph.with_buffers(
                np.array(own), np.array([place[int(graph.buffer_storage[b])] for b in own]),
                [f"{graph.buffer_names[b]}, rank {where}" for b in own] if graph.buffer_names else [],
                storages=[replace(graph.storages[s], name=f"{graph.storages[s].name}, rank {where}") for s in held])
            for t in users:
                reads[t] = {number.get(b, b) for b in reads[t]}
                launches[t] = tuple(launch.moved(place) for launch in launches[t])
            after += mine
            keys += [int(pack(stage, Kind.U, graph.micro_batch[t], part=n)) for t in mine]
            taken += [own] * len(mine)
            given += [sorted(number.values())] * len(mine)
            copies += [copied(graph, place)] * len(mine)
    graph = replace(graph, reads=Rows.of([sorted(row) for row in reads]), launches=tuple(launches))
    order = np.argsort(np.concatenate([np.arange(len(graph)), np.array(after, np.int64)]), kind="stable")
    return Stages(graph.insert(np.array(after, np.int64), np.array(keys, np.int64), Rows.of(taken), Rows.of(given),
                               np.zeros(len(keys), np.int64), copies),
                  np.concatenate([stages.time, np.zeros(len(keys))])[order])


def _check_lasting(stages: Stages, rank: list[int]) -> None:
    graph = stages.graph
    lasting = np.isin(graph.buffer_role, [ROLES.index(role) for role in (Role.STATE, Role.SCALAR)])
    writer = {b: t for t in range(len(graph)) for b in graph.writes[t].tolist() if lasting[b]}
    for t in range(len(graph)):
        for b in (b for b in graph.reads[t].tolist() if b in writer and rank[writer[b]] != rank[t]):
            raise PipelineError(f"{graph.name(t)} and {graph.name(writer[b])} are on different ranks and both need "
                                f"{graph.buffer(b).name}, which outlives a step; only weights can be copied")
