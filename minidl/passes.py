"""Graph to graph: several iterations in one graph, and second buffers that take write-after-read edges away.

Passes work on columns; they know no schedule and run nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .graph import ROLES, GraphError, Ints, Launch, Role, Rows, StorageSpec, TaskGraph, View

_PER_ITERATION = (Role.INPUT,)
_RENAMED = (Role.ACTIVATION, Role.GRADIENT, Role.WORKSPACE)


def unroll(graph: TaskGraph, iterations: int) -> TaskGraph:
    """`iterations` steps in a row as one graph; task `4W0` of step t is `4W0@t`.

    Parameters and states carry over, which yields `U -> F`; activations are the same memory in every step, which
    yields the write-after-read edge `W(t) -> F(t+1)`. Inputs and outputs are separate in each step. Raises GraphError
    for fewer than one iteration or a graph that is unrolled already.
    """
    if iterations < 1:
        raise GraphError(f"cannot unroll over {iterations} iterations; at least 1 is needed")
    if graph.iteration.any():
        raise GraphError("the graph is unrolled already")
    outputs = {view.storage for view in graph.outputs}
    separate = np.array([ROLES[r] in _PER_ITERATION for r in graph.buffer_role], bool)
    if outputs:
        carried = np.array([ROLES[r].persistent for r in graph.buffer_role], bool)
        separate |= np.isin(graph.buffer_storage, list(outputs)) & ~carried
    copies = np.tile(np.where(separate[:, None], np.arange(iterations), 0), 1)
    tiled = _tiled(graph, iterations)
    return _with_copies(tiled, copies, np.repeat(np.arange(iterations), len(graph)), iterations)


def rename(graph: TaskGraph, copies: int = 2) -> TaskGraph:
    """`copies` buffers in turn for every activation, gradient and workspace of an unrolled graph.

    Iteration t uses copy t mod `copies`: the edges `W(t) -> F(t+1)` go, for the price of the memory.
    """
    if copies < 1:
        raise GraphError(f"cannot rename to {copies} copies; at least 1 is needed")
    iterations = int(graph.iteration.max(initial=0)) + 1
    outputs = {view.storage for view in graph.outputs}
    renamed = np.array([ROLES[r] in _RENAMED for r in graph.buffer_role], bool)
    if outputs:
        renamed &= ~np.isin(graph.buffer_storage, list(outputs))
    which = np.where(renamed[:, None], np.arange(iterations) % copies, 0)
    return _with_copies(graph, which, graph.iteration, iterations)


def _tiled(graph: TaskGraph, times: int) -> TaskGraph:
    """All tasks `times` times over, on the same buffers, numbered by iteration."""

    def rows(r: Rows) -> Rows:
        steps = np.arange(times, dtype=np.int64)[:, None] * len(r.ids)
        return Rows(np.append((r.ptr[:-1] + steps).ravel(), len(r.ids) * times), np.tile(r.ids, times))

    return replace(
        graph, unit=np.tile(graph.unit, times), kind=np.tile(graph.kind, times),
        micro_batch=np.tile(graph.micro_batch, times),
        iteration=np.repeat(np.arange(times, dtype=np.int32), len(graph)), flops=np.tile(graph.flops, times),
        bytes=np.tile(graph.bytes, times), reads=rows(graph.reads), writes=rows(graph.writes),
        launches=graph.launches * times, inputs=graph.inputs, outputs=graph.outputs)


def _with_copies(graph: TaskGraph, which: Ints, iteration: Ints, iterations: int) -> TaskGraph:
    """Gives buffer b in iteration t its copy `which[b, t]`; copy 0 is the buffer itself."""
    buffers, storages = len(graph.buffer_bytes), len(graph.storages)
    pairs = np.unique(which + np.arange(buffers)[:, None] * (which.max(initial=0) + 1))
    span = int(which.max(initial=0)) + 1
    extra = pairs[pairs % span > 0]
    new_buffer = np.full(buffers * span, -1, np.int64)
    new_buffer[np.arange(buffers) * span] = np.arange(buffers)
    new_buffer[extra] = buffers + np.arange(len(extra))
    old, copy = extra // span, extra % span
    storage_pairs = np.unique(graph.buffer_storage[old].astype(np.int64) * span + copy)
    new_storage = {(int(s // span), int(s % span)): storages + i for i, s in enumerate(storage_pairs)}

    def spec(storage: int, number: int) -> StorageSpec:
        base = graph.storages[storage]
        return replace(base, name=f"{base.name}'{number}")

    def rows(r: Rows) -> Rows:
        step = iteration[r.row_of_each()]
        return Rows(r.ptr, new_buffer[r.ids * span + which[r.ids, step]].astype(np.int32))

    moves: list[dict[int, int]] = []
    for t in range(iterations):
        move = {}
        for b in np.flatnonzero(which[:, t]):
            s = int(graph.buffer_storage[b])
            move[s] = new_storage[s, int(which[b, t])]
        moves.append(move)

    def views(recorded: tuple[View, ...]) -> tuple[View, ...]:
        if len(moves) == 1 or not recorded or graph.iteration is not iteration:
            return tuple(replace(v, storage=m.get(v.storage, v.storage)) for m in moves for v in recorded)
        return recorded

    launches: tuple[tuple[Launch, ...], ...] = tuple(
        tuple(launch.moved(moves[t]) for launch in task)
        for task, t in zip(graph.launches, iteration.tolist(), strict=True)) if graph.launches else ()
    return replace(
        graph, reads=rows(graph.reads), writes=rows(graph.writes),
        buffer_bytes=np.concatenate([graph.buffer_bytes, graph.buffer_bytes[old]]),
        buffer_role=np.concatenate([graph.buffer_role, graph.buffer_role[old]]),
        buffer_storage=np.concatenate([graph.buffer_storage, np.array(
            [new_storage[int(graph.buffer_storage[b]), int(c)] for b, c in zip(old, copy, strict=True)], np.int32)]),
        buffer_names=graph.buffer_names + tuple(f"{graph.buffer_names[b]}'{c}" for b, c in zip(old, copy, strict=True))
        if graph.buffer_names else (),
        storages=graph.storages + tuple(spec(int(s // span), int(s % span)) for s in storage_pairs),
        launches=launches, inputs=views(graph.inputs), outputs=views(graph.outputs))
