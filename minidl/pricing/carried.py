"""Loop-carried edges: which tasks of an iteration wait for tasks of earlier iterations.

They follow from what tasks read and write, as the graph's own edges within an iteration do. This module knows no
schedule and no times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.graph import Ints, Role, Rows, TaskGraph, derive_edges


def _none() -> Ints:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Carried:
    """`target` of iteration i waits for `source` of iteration i - `distance`, which is 1 or more."""

    source: Ints = field(default_factory=_none)
    target: Ints = field(default_factory=_none)
    distance: Ints = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.source)

    @classmethod
    def of(cls, *bodies: TaskGraph, own: Any = None) -> Carried:
        """The loop-carried edges of a loop whose iterations are these graphs in turn: the same tasks, on other copies
        of some buffers.

        `own`: a mask of the buffers of which every iteration has its own; by default those that `unroll` separates. All
        other buffers are shared by the iterations.
        """
        n, turns = len(bodies[0]), len(bodies)
        buffers = max(len(body.buffer_bytes) for body in bodies)
        own = own_buffers(bodies[0]) if own is None else own

        def rows(column: str) -> Rows:
            each: list[Rows] = [getattr(bodies[i % turns], column) for i in range(2 * turns)]
            ids = [np.where(own[r.ids], r.ids + buffers * (i + 1), r.ids) for i, r in enumerate(each)]
            counts = np.concatenate([np.diff(r.ptr) for r in each])
            return Rows(np.append(0, np.cumsum(counts)), np.concatenate(ids).astype(np.int32))

        edges = derive_edges(rows("reads"), rows("writes"), buffers * (2 * turns + 1))
        source, target = edges.ids.astype(np.int64), edges.row_of_each().astype(np.int64)
        distance = target // n - source // n
        last = (target >= n * (2 * turns - 1)) & (distance > 0)
        return cls(source[last] % n, target[last] % n, distance[last])


def own_buffers(graph: TaskGraph) -> Any:
    """Mask of the buffers of which every iteration has its own: inputs, and outputs unless they outlive a step."""
    own = graph.role_is(Role.INPUT)
    outputs = {view.storage for view in graph.outputs}
    if outputs:
        own |= np.isin(graph.buffer_storage, list(outputs)) & ~graph.persistent
    return own
