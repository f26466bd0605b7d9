"""Passes that rewrite a graph: several iterations in one graph; double buffers, which remove write-after-read edges;
more edges; merged tasks: layers to stages, O and W to B.

Passes work on columns; they know no schedule and run nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.columns import Ints, Rows, spread
from ..core.graph import Role, StorageSpec, TaskGraph, check_kinds, moved_views
from ..core.tasks import COPIES, GraphError, Kind, repack, task_name, unpack


def unroll(graph: TaskGraph, iterations: int) -> TaskGraph:
    """`iterations` steps in a row as one graph; task `4W0` of step t is `4W0#t`.

    Parameters and states carry over, which yields `U -> F`; activations are the same memory in every step, which
    yields the write-after-read edge `W(t) -> F(t+1)`. Every step has its own inputs and outputs; only a parameter or
    state that a step returns is shared, and all steps change it. Raises GraphError for fewer than one iteration, or a
    graph that is unrolled already.
    """
    check_kinds(graph=(graph, TaskGraph))
    if iterations < 1:
        raise GraphError(f"cannot unroll over {iterations} iterations; at least 1 is needed")
    if graph.iteration.any():
        raise GraphError("the graph is unrolled already")
    separate = graph.own_buffers
    iteration = np.repeat(np.arange(iterations), len(graph))
    tiled = graph.take(np.tile(np.arange(len(graph)), iterations),
                       repack(np.tile(graph.keys, iterations), iteration=iteration))
    unrolled, moves = tiled.with_copies(np.where(separate[:, None], np.arange(iterations), 0), iteration)
    return replace(unrolled, inputs=tuple(v for m in moves for v in moved_views(graph.inputs, m)),
                   outputs=tuple(v for m in moves for v in moved_views(graph.outputs, m)))


def rename(graph: TaskGraph, copies: int = 2) -> TaskGraph:
    """Gives every activation, gradient and workspace of an unrolled graph `copies` buffers, which take turns.

    Iteration t uses copy t mod `copies`. The edges `W(t) -> F(t+1)` disappear, and the memory grows.
    """
    check_kinds(graph=(graph, TaskGraph))
    if copies < 1:
        raise GraphError(f"cannot rename to {copies} copies; at least 1 is needed")
    iterations = int(graph.iteration.max(initial=0)) + 1
    renamed = graph.role_is(Role.ACTIVATION, Role.GRADIENT, Role.WORKSPACE) & ~np.isin(
        graph.buffer_storage, [view.storage for view in graph.outputs])
    return graph.with_copies(np.where(renamed[:, None], np.arange(iterations) % copies, 0), graph.iteration)[0]


def with_edges(graph: TaskGraph, pairs: Iterable[tuple[int, int]], token: StorageSpec) -> TaskGraph:
    """The graph in which the second task of each pair waits for the first: it reads a token, a buffer that no launch
    touches, which the first one writes. `token`: the storage of all of them. Raises GraphError for a wait against the
    order of the graph."""
    pairs = np.array(sorted(set(pairs)), np.int64).reshape(-1, 2)
    if not len(pairs):
        return graph
    if (back := np.flatnonzero(pairs[:, 0] >= pairs[:, 1])).size:
        first, then = (graph.name(int(t)) for t in pairs[back[0]])
        raise GraphError(f"{then} cannot wait for {first}, which comes after it in the order of the graph")
    source, of = np.unique(pairs[:, 0], return_inverse=True)
    new, none = len(graph.buffer_bytes) + np.arange(len(source)), np.zeros(len(source), np.int64)
    grown = graph.with_buffers(none, none + len(graph.storages) if graph.storages else new, [token.name] * len(source),
                               [token] if graph.storages else [])
    nbytes, role = grown.buffer_bytes.copy(), grown.buffer_role.copy()
    nbytes[new], role[new] = token.bytes, token.role.number

    def more(rows: Rows, tasks: Ints, buffers: Ints) -> Rows:
        return Rows.from_pairs(np.append(rows.row_of_each(), tasks), np.append(rows.ids, buffers), len(graph))

    return replace(grown, buffer_bytes=nbytes, buffer_role=role, reads=more(grown.reads, pairs[:, 1], new[of]),
                   writes=more(grown.writes, source, new))


def coarsen(graph: TaskGraph, stage: Ints, lower: NDArray[np.bool_] | None = None, again: bool = False
            ) -> tuple[TaskGraph, Ints]:
    """(the graph whose units are stages, the coarse task of each task of `graph`).

    `stage`: of each task. `lower`: mask of the tasks that go to a second part of their stage's O, if they go to an O. A
    stage's O holds every backward task of a micro-batch that one of its output gradients needs, the sums of a batch
    norm included, and every R; its W holds the other backward tasks, its U all updates (where a step updates after
    several micro-batches, one U for each). A stage of one layer that passes no gradient on has no O. An R goes to the O
    of the last slice that reads it, whose backward comes first. Raises GraphError if stages would wait for each other
    in a circle.
    """
    kind = graph.kind.astype(np.int64)
    kind[(kind == Kind.R) & (not again)] = Kind.O
    kind[kind == Kind.Q] = Kind.W  # or O, if that needs it
    backward = np.isin(kind, (Kind.O, Kind.W, Kind.R))
    needed, needs = graph.preds.ids, graph.preds.row_of_each()
    inside = ((kind[needed] == Kind.W) & (stage[needed] == stage[needs])
              & (graph.micro_batch[needed] == graph.micro_batch[needs]))
    needed_by_o = kind == Kind.O  # and all that those need in their own stage: from the last task to the first
    for q, t in zip(needed[inside][::-1].tolist(), needs[inside][::-1].tolist(), strict=True):
        if needed_by_o[t]:
            needed_by_o[q] = True
    kind[needed_by_o] = Kind.O
    own = graph.micro_batch.copy()
    for t in np.flatnonzero(graph.kind == Kind.R)[::-1].tolist():
        own[t] = own[graph.succs[t][backward[graph.succs[t]]]].max(initial=own[t])
    micro_batch = np.where(backward | (kind == Kind.F), own, _updates_of(graph))
    names = tuple(_stage_name(graph, np.unique(graph.unit[stage == s])) for s in range(int(stage.max(initial=-1)) + 1))
    part = unpack(graph.keys).part if lower is None else np.where(lower & (kind == Kind.O), 1, unpack(graph.keys).part)
    return merge(replace(graph, unit_names=names),
                 repack(graph.keys, unit=stage, kind=kind, micro_batch=micro_batch, part=part))


def _updates_of(graph: TaskGraph) -> Ints:
    """The micro-batch of each update, if a step has several updates; a task after an update belongs to the same
    micro-batch. Sums over gradients, which the updates of all stages wait for, get numbers after the last micro-batch:
    4 of the first update of four micro-batches, 5 of the second."""
    update, among = graph.kind == Kind.U, sums(graph)
    count = int(graph.micro_batch[graph.kind == Kind.F].max(initial=-1)) + 1
    further = graph.micro_batch >= count  # numbered after the last micro-batch already
    several = len(np.unique(graph.micro_batch[update & graph.changed_by(graph.role_is(Role.PARAMETER))])) > 1
    found = np.maximum.accumulate(np.where(update & ~further, graph.micro_batch, 0)) if several else 0
    return np.where(further & several, graph.micro_batch, found + count * among)


def sums(graph: TaskGraph) -> NDArray[np.bool_]:
    """Mask of the U tasks that change no parameter or state: the sums of squares of gradients, for clipping."""
    return (graph.kind == Kind.U) & ~graph.changed_by(graph.persistent)


def gradients(graph: TaskGraph) -> dict[int, Ints]:
    """Task that updates parameters -> the buffers with their gradients, in the order of the tasks."""
    updates = np.flatnonzero(graph.kind == Kind.U).tolist()
    maker = graph.kind[graph.writes.row_of_each()]  # the backward pass, not an update (of norms) or a copy
    made = spread(graph.writes.ids[~np.isin(maker, (Kind.U, *COPIES))], True, len(graph.buffer_bytes))
    gradient = made & ~graph.persistent
    gradient[graph.writes.ids[np.isin(maker, (Kind.O, Kind.W, Kind.B))]] = True  # late tasks may make it outlive a step
    gradient &= ~graph.role_is(Role.FAR)  # for which copies only wait
    parameter = graph.role_is(Role.PARAMETER)
    found = {u: graph.reads[u][gradient[graph.reads[u]] | _sums_of_uses(graph, u)]
             for u in updates if parameter[graph.writes[u]].any()}
    return {u: buffers for u, buffers in found.items() if len(buffers)}


def _sums_of_uses(graph: TaskGraph, update: int) -> Any:
    """Mask of what an update reads: gradients that other updates have added up, of a parameter that stages on several
    ranks use. They are shaped as parameters that it updates."""
    def spec(buffer: int) -> tuple[Any, str]:
        storage = graph.storages[int(graph.buffer_storage[buffer])]
        return storage.shape, storage.dtype

    own = {spec(b) for b in graph.writes[update].tolist() if graph.storages and graph.buffer(b).role == Role.PARAMETER}
    return np.array([graph.buffer(b).role == Role.GRADIENT and bool(own) and spec(b) in own
                     for b in graph.reads[update].tolist()], bool)


def _stage_name(graph: TaskGraph, units: Ints) -> str:
    names = [graph.unit_names[u] for u in units if u < len(graph.unit_names) and graph.unit_names[u]]
    return " .. ".join(dict.fromkeys([names[0], names[-1]])) if names else ""


def fuse(graph: TaskGraph, which: np.ndarray | None = None) -> tuple[TaskGraph, Ints]:
    """(the graph in which O and W of a unit and micro-batch are one task B, whose results are all visible at its end;
    the new id of each task). `which[unit, micro_batch]`: where to fuse, by default everywhere. Raises GraphError if
    another task needs one of the two and the other needs that task."""
    backward = (graph.kind == Kind.O) | (graph.kind == Kind.W)
    if which is not None:
        backward[backward] = np.asarray(which, bool)[graph.unit[backward], graph.micro_batch[backward]]
    return merge(graph, repack(graph.keys, kind=np.where(backward, int(Kind.B), graph.kind)))


def merge(graph: TaskGraph, keys: Ints) -> tuple[TaskGraph, Ints]:
    """(the graph with one task for all tasks of the same key, the new id of each task). `keys`: one for each task.
    Raises GraphError if merged tasks would wait for each other in a circle."""
    distinct, first, group = np.unique(keys, return_index=True, return_inverse=True)
    count = len(distinct)
    edges = np.unique(np.stack([group[graph.preds.ids], group[graph.preds.row_of_each()]], axis=1), axis=0)
    edges = edges[edges[:, 0] != edges[:, 1]]
    succs = Rows.from_pairs(edges[:, 0], edges[:, 1], count)
    missing = np.bincount(edges[:, 1], minlength=count)
    ready = [(int(first[g]), g) for g in np.flatnonzero(missing == 0).tolist()]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:  # the sequential order, as far as edges allow
        g = heapq.heappop(ready)[1]
        order.append(g)
        for h in succs[g].tolist():
            missing[h] -= 1
            if missing[h] == 0:
                heapq.heappush(ready, (int(first[h]), h))
    if len(order) < count:
        raise GraphError(f"{task_name(distinct[np.argmax(missing > 0)])} would have to run both before and after "
                         f"another merged task; cut the graph elsewhere")
    group = spread(order, np.arange(count), count)[group]
    return graph.join(Rows.from_pairs(group, np.arange(len(graph)), count), distinct[order]), group
