"""The memory that the lanes of a rank share: a roofline (Williams, Waterman, Patterson, CACM 2009) whose bandwidth is
divided.

A task takes as long as its arithmetic or its bytes, whichever is longer. So alone it needs a share of one lane's
bandwidth: the time of its bytes over its own time, at most 1. Lanes that together need x > 1 times what one lane moves
get x / (1 + s (x - 1)) times as much: Amdahl's law through two measured bandwidths, s is the serial share. It is
divided max-min fairly: none gets more than another one that lacks some. A task that gets a part of what it needs takes
longer by as much.

Bytes count that are in no core's cache, since the tasks between have touched as many others: near ones are fetched from
the core's own cache, or cross (`minidl.pricing.crossing`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.columns import Floats, Ints, Rows
from ..core.graph import TaskGraph
from ..core.machine import is_number, is_whole
from ..core.tasks import COMMUNICATION

CACHE = 1 << 20  #: bytes of a core's own cache, of which the last ones are in it that tasks have touched


@dataclass(frozen=True)
class Memory:
    """`one`: the bytes per time unit that one lane reads and writes as it copies; `every`: that `lanes` lanes do at the
    same time, together. `cache`: bytes of a core's own cache."""

    one: float
    every: float
    lanes: int = 2
    cache: int = CACHE

    def __post_init__(self) -> None:
        for rate in (self.one, self.every):
            if not is_number(rate) or not 1e-9 <= rate <= 1e18:
                raise ValueError(f"the bandwidth of the memory is {rate!r:.40}; it must be a finite number >= 1e-09")
        if not is_whole(self.lanes, 2) or not is_whole(self.cache, 0):
            raise ValueError(f"{self.lanes!r:.40} lanes share the memory beside caches of {self.cache!r:.40} bytes; "
                             f"expected whole numbers, 2 or more lanes")

    @property
    def serial(self) -> float:
        """s of this module's docstring: 0 if lanes do not slow each other; 1 if all copy no more than one."""
        return min(1.0, max(0.0, (self.lanes * self.one / self.every - 1) / (self.lanes - 1)))

    def times(self, graph: TaskGraph) -> Floats:
        """How long each task would take to move its bytes at one lane's bandwidth; 0 for communication."""
        return np.where(np.isin(graph.kind, COMMUNICATION), 0.0, far_bytes(graph, self.cache) / self.one)


def far_bytes(graph: TaskGraph, cache: int = CACHE) -> Floats:
    """The bytes of each task that are in no core's cache, if tasks ran as they were recorded, step after step."""
    n = max(len(graph), 1)
    touched = np.unique(np.concatenate([accesses(graph.reads, n), accesses(graph.writes, n)]))
    task, buffer = touched % n, touched // n
    first = np.searchsorted(buffer, buffer)
    at = np.arange(len(touched))
    before = task[np.where(at > first, at - 1, np.searchsorted(buffer, buffer, "right") - 1)]
    size = graph.buffer_bytes[buffer]
    far, whole = (np.bincount(task, nbytes, len(graph))
                  for nbytes in (size - near_bytes(graph, task, before, buffer, cache), size))
    return graph.bytes * far / np.maximum(whole, 1)


def near_bytes(graph: TaskGraph, task: Ints, before: Ints, buffer: Ints, cache: int = CACHE) -> Floats:
    """The bytes of each buffer that are in a core's cache when a task touches it, if the task `before` touched it last:
    in the same step, or, if that comes later in the graph, in the step before."""
    end = np.cumsum(graph.bytes, dtype=np.float64)
    between = end[task] - graph.bytes[task] - end[before] + np.where(task <= before, end[-1:], 0.0)
    return np.minimum(graph.buffer_bytes[buffer], np.maximum(cache - between, 0.0))


def accesses(rows: Rows, n: int) -> Ints:
    """Each access as one number: buffer * n + task."""
    return rows.ids.astype(np.int64) * n + rows.row_of_each()
