"""The graph of a pipeline at the level of stages: F, O and W, or F and B, for every stage and micro-batch.

Edges come from what tasks read and write, as in every graph. Within a step parameters are only read, so they order
nothing and are left out. The graph knows no ranks: a placement says where stages live.
"""

from __future__ import annotations

import numpy as np

from ...core.columns import Ints, Rows
from ...core.graph import Role, TaskGraph
from ...core.tasks import Kind, pack

NAMED = 100_000  #: up to this many buffers, each has a name for messages


def stage_graph(stages: int, micro_batches: int, fused: bool | np.ndarray = False, directions: int = 1,
                message_bytes: int | list[int] = 0, in_turn: bool = True) -> TaskGraph:
    """Tasks in sequential order: micro-batch after micro-batch, forward up, backward down.

    `fused`: whether the backward of (stage, micro-batch) is one task B; a bool, or bools (stages, micro_batches).
    Weight gradients are added up in ascending order of micro-batches; with two directions each half has its own sum,
    and the two are added once, first half first; if not `in_turn`, the order is free. `message_bytes`: of the
    activation that a stage sends, and of the gradient that comes back; one number, or one for each stage.
    """
    s, m = stages, micro_batches
    joint = np.broadcast_to(np.asarray(fused, bool), (s, m)).T  # (m, s)
    down = np.arange(s)[::-1]
    unit = np.concatenate([np.arange(s), np.repeat(down, 2)]).astype(np.int32)
    kind = np.concatenate([np.full(s, Kind.F), np.tile([Kind.O, Kind.W], s)]).astype(np.int8)
    keep = np.ones((m, 3 * s), bool)
    kinds = np.tile(kind, (m, 1))
    keep[:, s + 1 :: 2] = ~joint[:, down]
    kinds[:, s::2][joint[:, down]] = Kind.B
    unit = np.tile(unit, (m, 1))[keep]
    micro = np.broadcast_to(np.arange(m, dtype=np.int32)[:, None], keep.shape)[keep]
    kind = kinds[keep]
    del keep, kinds
    direction = (micro.astype(np.int64) * directions >= m) * (directions - 1)
    activation = (micro * np.int32(s) + unit).astype(np.int32)  # by (stage, micro-batch); gradients follow, then sums
    gradient = activation + np.int32(s * m)
    total = (2 * s * m + direction * s + unit).astype(np.int32)
    del direction
    f, o, w, b = (kind == k for k in (Kind.F, Kind.O, Kind.W, Kind.B))
    before, after = unit > 0, unit < s - 1
    reads = _rows([(f & before, activation - 1), (~f, activation), ((o | b) & after, gradient + 1),
                   (w, gradient), ((w | b) & in_turn, total)])
    writes = _rows([(f, activation), (o | b, gradient), ((w | b) & in_turn, total)])
    del f, o, w, b, before, after, activation, gradient, total
    n, sums = len(unit), directions * s
    buffers = 2 * s * m + sums
    role = np.repeat(np.array([Role.ACTIVATION.number, Role.GRADIENT.number], np.int8), [s * m, s * m + sums])
    sent = np.broadcast_to(np.asarray(message_bytes, np.int64), s)
    size = np.concatenate([np.tile(sent, m), np.tile(np.roll(sent, 1), m), np.zeros(sums, np.int64)])
    names: tuple[str, ...] = ()
    if buffers <= NAMED:
        names = tuple(f"the {what} of stage {i}, micro-batch {j}" for what in ("activation", "gradient")
                      for j in range(m) for i in range(s))
        names += tuple(f"the weight gradient of stage {i}" + (f", direction {d}" if directions > 1 else "")
                       for d in range(directions) for i in range(s))
    return TaskGraph(
        keys=pack(unit, kind, micro), flops=np.zeros(n), bytes=np.zeros(n, np.int64), reads=reads, writes=writes,
        buffer_bytes=size, buffer_role=role, buffer_storage=np.arange(buffers, dtype=np.int32), buffer_names=names,
        name_of_graph=f"{s} stages, {m} micro-batches")


def _rows(columns: list[tuple[np.ndarray, Ints]]) -> Rows:
    """Rows from columns of at most one id per row: `(present, id)`."""
    ptr = np.zeros(len(columns[0][0]) + 1, np.int64)
    for present, _ in columns:
        ptr[1:] += present
    np.cumsum(ptr, out=ptr)
    ids = np.empty(ptr[-1], np.int32)
    at = ptr[:-1].copy()
    for present, column in columns:
        ids[at[present]] = column[present]
        at += present
    return Rows(ptr, ids)
