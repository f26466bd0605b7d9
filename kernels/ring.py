"""The launches on CUDA around a step that is one of several in a launch: its inputs come from the rows of arrays, its
outputs go to rows, and the loop goes on or ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .cuda import FLAG, THREADS, WAVES, Call, Grid, Struct, pointer

MOST = 8  #: `MOVES` of ring.cu
#: `Moves` of ring.cu
TABLE = np.dtype([("count", np.int32), *((name, np.int64, MOST) for name in ("from", "to", "bytes"))], align=True)


def take(head: Any, pairs: Sequence[tuple[Any, Any]]) -> list[Call]:
    """Copies row `head[0]` of each array (steps, ..) to its place. head (2,) int32: the step, and their number."""
    return _moves("ring_take", head, [(rows, place, place.nbytes) for rows, place in pairs])


def give(head: Any, pairs: Sequence[tuple[Any, Any]], done: Any, handle: int) -> list[Call]:
    """Copies each place to row `head[0]` of its array, and goes on to the next step of the loop with this handle (0:
    none), unless an update has used a gradient that is not finite. done (1,) int32: how many steps have run."""
    return [*_moves("ring_give", head, [(place, rows, place.nbytes) for rows, place in pairs]),
            Grid("ring.cu", "ring_next", (1,), (32,), (head, done, FLAG, handle))]


def leave(pairs: Sequence[tuple[Any, Any]]) -> list[Call]:
    """Copies each array to its place, which may be in pinned memory of the host. The last array, of at most MOST, is
    what FLAG stands for, and becomes 0."""
    blocks, table = _table([(source, to, source.nbytes) for source, to in pairs])
    return [Grid("ring.cu", "ring_leave", (blocks,), (THREADS,), (table, FLAG))]


def _moves(kernel: str, head: Any, moves: Sequence[tuple[Any, Any, int]]) -> list[Call]:
    found: list[Call] = []
    for blocks, table in (_table(moves[i : i + MOST]) for i in range(0, len(moves), MOST)):
        found.append(Grid("ring.cu", kernel, (blocks,), (THREADS,), (head, table)))
    return found


def _table(moves: Sequence[tuple[Any, Any, int]]) -> tuple[int, Struct]:
    """The blocks of a launch that makes at most MOST moves, and its argument."""
    table = np.zeros((), TABLE)
    table["count"] = len(moves)
    for k, (source, to, nbytes) in enumerate(moves):
        table["from"][k], table["to"][k], table["bytes"][k] = pointer(source), pointer(to), nbytes
    blocks = max(1, min(-(-max(nbytes for *_, nbytes in moves) // (16 * THREADS)), 132 * WAVES))
    return blocks, Struct("Moves", table.tobytes())
