"""The cost of moving data between the caches of cores. A task that reads a value that another core has written fetches
the bytes from that core's cache; a task that overwrites a value that another core has touched takes the bytes from it
first. If several tasks of a lane read the same value, only the first one pays. A value that was touched long
before is in no core's cache: the bytes that the tasks between have touched have taken its place. That is so on one lane
as well, so the measured time of a task has this already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..core.columns import Content, Floats, Ints, spread
from ..core.graph import TaskGraph
from .cost import Cross
from .memory import accesses, near_bytes


@dataclass(frozen=True)
class Crossing(Content):
    """Pairs of tasks that touch the same buffer one after the other, in columns: the task that pays if the other one is
    on another lane of its rank, that other task, the buffer, and the time that its bytes take.

    The first `reads` pairs join a task that reads and the task that wrote last before; the others join a task that
    writes and each task that touched the buffer before it, back to the one that wrote last. The first task of a step
    that touches a buffer follows the last one of the step before.
    """

    payer: Ints
    other: Ints
    buffer: Ints
    time: Floats
    reads: int

    @classmethod
    def of(cls, graph: TaskGraph, cross: Cross) -> Crossing:
        """The pairs of a graph whose tasks are in the order in which they were recorded."""
        n = max(len(graph), 1)
        written = np.sort(accesses(graph.writes, n))
        read = accesses(graph.reads, n)
        wrote = _near(written, read, n, "left")
        read, wrote = read[wrote >= 0], wrote[wrote >= 0]
        touched = np.unique(np.concatenate([read, written]))
        after = _near(written, touched, n, "right")
        touched, after = touched[after >= 0], after[after >= 0]
        both = np.concatenate([read, after])
        payer, other, buffer = both % n, np.concatenate([wrote, touched]) % n, both // n
        per_byte = np.repeat([cross.read, cross.write], [len(read), len(touched)])
        return cls(payer, other, buffer, near_bytes(graph, payer, other, buffer) * per_byte, len(read))

    def added(self, lane: Ints, rank: Ints, place: Ints) -> Floats:
        """The time that each task takes longer, where tasks have these lanes, ranks, and places in their lanes."""
        near = np.flatnonzero((lane[self.payer] != lane[self.other]) & (rank[self.payer] == rank[self.other]))
        reads, writes = np.split(near, [np.searchsorted(near, self.reads)])
        reads = reads[np.argsort(place[self.payer[reads]], kind="stable")]
        writes = writes[np.argsort(-self.time[writes], kind="stable")]
        value = self.buffer[reads] * len(lane) + self.other[reads]
        first = np.unique(value * (int(lane.max(initial=0)) + 1) + lane[self.payer[reads]], return_index=True)[1]
        most = np.unique(self.payer[writes] + len(lane) * self.buffer[writes], return_index=True)[1]
        paid = np.concatenate([reads[first], writes[most]])
        return spread(self.payer[paid], self.time[paid], len(lane), by=np.add)


def _near(written: Ints, access: Ints, n: int, side: Literal["left", "right"]) -> Ints:
    """The write of the same buffer before each access ("left") or after it ("right"), beyond the step's end if there is
    none; -1 without any. `written` is sorted."""
    first, last = (np.searchsorted(written, (access // n + i) * n) for i in (0, 1))
    place = np.searchsorted(written, access, side) - first - (side == "left")
    found: Ints = np.append(written, -1)[first + place % np.maximum(last - first, 1)]
    return np.where(last > first, found, -1)
