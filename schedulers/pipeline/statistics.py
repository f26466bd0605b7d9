"""Running statistics in pipelines that hold every stage twice: the second direction's batches move them last.

A batch norm in training moves its running mean and variance by those of each micro-batch, in their order. They live on
the rank of the first direction; the other rank has no copy. There the forward leaves the micro-batch's own mean and
variance: a batch norm that starts at zero and takes all of the new. At the step's end they travel with the gradients to
the rank of the first direction, which moves the running ones by them, micro-batch by micro-batch. So the bits are those
of one process, whose micro-batches of the second direction come last too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...graph import Ints, Launch, Role, Rows, StorageSpec, TaskGraph, View
from ...passes.boundary import Mask
from ...tasks import Kind, pack

NORMS = ("batch_norm", "batch_norm_act")  #: kernels whose reads 3 to 5 and last three writes are running statistics


def moved_last(graph: TaskGraph, stage_of_unit: Ints, stages: int, second: Mask) -> tuple[TaskGraph, Ints]:
    """The graph in which the forward tasks `second` do not touch running statistics, with tasks at its end that move
    them; also the stage of each unit.

    `stage_of_unit`: a stage of the second direction has the number of the first direction's plus `stages`. The new
    tasks are of kind U, two for each batch norm and micro-batch: one marks the micro-batch's statistics as complete, so
    that they may be sent, and launches nothing; one moves the running ones.
    """
    found = [(t, i) for t in np.flatnonzero(second & (graph.kind == Kind.F)).tolist() if graph.launches
             for i, launch in enumerate(graph.launches[t]) if launch.kernel in NORMS]
    if not found:
        return graph, stage_of_unit
    specs: list[StorageSpec] = []
    first, storages = len(graph.buffer_bytes), len(graph.storages)
    reads, writes = ([rows[t].tolist() for t in range(len(graph))] for rows in (graph.reads, graph.writes))
    launches = [list(own) for own in graph.launches]
    moves: list[tuple[list[int], list[int], Launch]] = []  # a batch's statistics, the running ones, what moves these
    for t, i in found:
        norm = graph.launches[t][i]
        running, old = norm.writes[-3:], norm.reads[3:6]
        held = {view.storage for view in running}
        buffers = [b for b in writes[t] if int(graph.buffer_storage[b]) in held]
        own = [replace(view, storage=storages + len(specs) + k) for k, view in enumerate(running)]
        for view, role in zip(running, (Role.ACTIVATION, Role.ACTIVATION, Role.WORKSPACE), strict=True):
            spec = graph.storages[view.storage]
            specs.append(replace(spec, name=f"{spec.name} of micro-batch {graph.micro_batch[t]}", role=role, live=None))
        words = max(-(-specs[-3].bytes // 8), 1)
        zero = View(storages + len(specs), (words,), (1,), 0, "float64")
        specs.append(StorageSpec("zeros", (words,), "float64", 8 * words, Role.WORKSPACE))
        alone = replace(
            norm, reads=(*norm.reads[:3], *(replace(v, storage=zero.storage) for v in old), *norm.reads[6:]),
            writes=(*norm.writes[:-3], *own), constants=tuple({**dict(norm.constants), "momentum": 1.0}.items()))
        at = launches[t].index(norm)
        launches[t][at : at + 1] = [Launch("fill", (zero,), (zero,), (), (("value", 0.0),)), alone]
        made = [first + view.storage - storages for view in (*own, zero)]
        reads[t] = [b for b in reads[t] if b not in buffers]
        writes[t] = sorted([*(b for b in writes[t] if b not in buffers), *made])
        moves.append((made[:2], buffers, Launch("batch_norm_move", (*own[:2], *old), running, (),
                                                (("momentum", dict(norm.constants)["momentum"]),))))
    graph = replace(graph.with_storages(specs), reads=Rows.of(reads), writes=Rows.of(writes),
                    launches=tuple(map(tuple, launches)))
    sent, given = [b for own, _, _ in moves for b in own], len(graph.buffer_bytes)
    graph = graph.with_buffers(np.array(sent), graph.buffer_storage[sent],
                               [f"{graph.buffer_names[b]}, complete" for b in sent] if graph.buffer_names else ())
    home = stage_of_unit[graph.unit[[t for t, _ in found]]] - stages
    rows: list[tuple[list[int], list[int], tuple[Launch, ...]]] = []
    for k, (own_buffers, buffers, move) in enumerate(moves):
        complete = [given + 2 * k, given + 2 * k + 1]
        rows += [(own_buffers, complete, ()), ([*sorted(buffers), *complete], sorted(buffers), (move,))]
    units, count = len(stage_of_unit), len(rows)
    grown = graph.insert(np.full(count, len(graph) - 1), pack(units + np.arange(count), np.full(count, Kind.U)),
                         Rows.of([read for read, _, _ in rows]), Rows.of([written for _, written, _ in rows]),
                         np.zeros(count, np.int64), [own for _, _, own in rows])
    return (replace(grown, unit_names=graph.unit_names + ("",) * (units + count - len(graph.unit_names))),
            np.append(stage_of_unit, (home[:, None] + (stages, 0)).ravel()))
