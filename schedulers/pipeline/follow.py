"""Copies of weights on ranks that read them but do not update them; the copies follow every update.

Such ranks are those of a tied weight's further uses, and, where LayerPipe puts the tasks of a layer on several ranks,
those of its F and O: the weights are on the rank of W, and are updated there. Every other rank that reads them has a
copy, in the memory that the parameters have on that rank anyway. A task of kind U with its own part number (`0U3/1`
after 0U3) receives the new weights, which are sent once per update. For `versions.py` such a copy is like the
parameters themselves.

Every task of a micro-batch reads the version of a weight that the first stage which uses it reads in its forward
(where no version is kept, a backward reads the newest one that its rank has). So both ends of a tied weight are equal
within a micro-batch, and `steady_state.py` can bring a version just before the first task that reads it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...graph import ROLES, Role, Rows, TaskGraph
from ...tasks import Kind, pack
from .models import Stages
from .placement import PipelineError, Placement
from .versions import copied, updates


def with_followers(stages: Stages, placement: Placement) -> tuple[Stages, Placement]:
    """The stages with tasks that read the copies of their ranks, and with the tasks that update the copies; and the
    placement of these.

    Raises PipelineError if another value that outlives a step, such as a dropout counter, is used on several ranks.
    """
    parts = placement.parts
    if parts is None:
        parts = np.broadcast_to(placement.table[0], (Kind.U + 1, 1, placement.stages))
    graph, stage_ranks = stages.graph, list[list[int]]()
    rank = parts[graph.kind, 0, graph.unit]
    _check_lasting(stages, rank.tolist())
    changing = updates(graph)
    reads, writes = ([set(rows[t].tolist()) for t in range(len(graph))] for rows in (graph.reads, graph.writes))
    launches = list(graph.launches)
    after, keys, taken, given, copies = [], [], [], [], []
    for stage in range(placement.stages):
        mine = changing[graph.unit[changing] == stage].tolist()
        own = {b for t in mine for b in writes[t] if graph.buffer_role[b] == ROLES.index(Role.PARAMETER)}
        users = [t for t in range(len(graph)) if reads[t] & own and rank[t] != parts[Kind.U, 0, stage]]
        stage_ranks.append(np.unique(rank[users]).tolist())
        if not users:
            continue
        held = sorted({int(graph.buffer_storage[b]) for t in users for b in reads[t] & own})
        shared = sorted(b for b in own if graph.buffer_storage[b] in held)
        sent = {}
        for t in mine:  # the update after the next may come before the copies' task runs
            graph, number, place = _alike(graph, shared, f"sent by {graph.name(t)}", Role.ACTIVATION)
            sent[t] = number, place
            writes[t] |= {*number.values()}
            launches[t] = (*launches[t], *copied(graph, place))
        for n, where in enumerate(stage_ranks[-1], 1):
            graph, number, place = _alike(graph, shared, f"rank {where}", Role.PARAMETER)
            for t in (t for t in users if rank[t] == where):
                reads[t] = {number.get(b, b) for b in reads[t]}
                launches[t] = tuple(launch.moved(place) for launch in launches[t])
            for t in mine:
                after.append(t)
                keys.append(int(pack(stage, Kind.U, graph.micro_batch[t], part=n)))
                taken.append(sorted(sent[t][0].values()))
                given.append(sorted(number.values()))
                copies.append(copied(graph, {source: place[s] for s, source in sent[t][1].items()}))
    if not keys:
        return stages, placement
    homes = np.zeros((parts.shape[0], max(parts.shape[1], 1 + max(map(len, stage_ranks))), placement.stages), np.int64)
    homes[:, : parts.shape[1]] = parts
    for stage, ranks in enumerate(stage_ranks):
        homes[Kind.U, 1 : 1 + len(ranks), stage] = ranks
    graph = replace(graph, reads=Rows.of([sorted(row) for row in reads]),
                    writes=Rows.of([sorted(row) for row in writes]), launches=tuple(launches))
    order = np.argsort(np.concatenate([np.arange(len(graph)), np.array(after, np.int64)]), kind="stable")
    return Stages(graph.insert(np.array(after, np.int64), np.array(keys, np.int64), Rows.of(taken), Rows.of(given),
                               np.zeros(len(keys), np.int64), copies),
                  np.concatenate([stages.time, np.zeros(len(keys))])[order]), replace(placement, parts=homes)


def _alike(graph: TaskGraph, buffers: list[int], whose: str,
           role: Role) -> tuple[TaskGraph, dict[int, int], dict[int, int]]:
    """The graph with copies of these buffers, and two maps: original -> copied buffer, original -> copied storage."""
    held = sorted({int(graph.buffer_storage[b]) for b in buffers})
    place = {s: len(graph.storages) + i for i, s in enumerate(held)}
    first = len(graph.buffer_bytes)
    specs = [replace(graph.storages[s], name=f"{graph.storages[s].name}, {whose}", role=role,
                     live=graph.storages[s].live if role == Role.PARAMETER else None) for s in held]
    graph = graph.with_buffers(np.array(buffers), np.array([place[int(graph.buffer_storage[b])] for b in buffers]),
                               [f"{graph.buffer_names[b]}, {whose}" for b in buffers] if graph.buffer_names else [],
                               storages=specs)
    roles = graph.buffer_role.copy()
    roles[first:] = ROLES.index(role)
    return replace(graph, buffer_role=roles), {b: first + i for i, b in enumerate(buffers)}, place


def _check_lasting(stages: Stages, rank: list[int]) -> None:
    graph = stages.graph
    lasting = np.isin(graph.buffer_role, [ROLES.index(role) for role in (Role.STATE, Role.SCALAR)])
    writer = {b: t for t in range(len(graph)) for b in graph.writes[t].tolist() if lasting[b]}
    for t in range(len(graph)):
        for b in (b for b in graph.reads[t].tolist() if b in writer and rank[writer[b]] != rank[t]):
            raise PipelineError(f"{graph.name(t)} and {graph.name(writer[b])} are on different ranks and both need "
                                f"{graph.buffer(b).name}, which outlives a step; only weights can be copied")
