"""What reading costs that another core has written: the bytes come from its cache, some ten times more slowly than from
the reader's own. A task pays for what it is the first on its lane to read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..graph import Floats, Ints, TaskGraph

CACHE = 1 << 20  #: bytes of a core's own cache: what is beyond them is far from both


@dataclass(frozen=True)
class Crossing:
    """Reads of values that tasks wrote, in columns: the task that reads, the task that wrote last before (for what
    outlives a step, perhaps in the step before), the buffer, and the time that its bytes take from another core."""

    reader: Ints
    writer: Ints
    buffer: Ints
    time: Floats

    @classmethod
    def of(cls, graph: TaskGraph, per_byte: float) -> Crossing:
        """The reads of a graph whose tasks are in the order in which they were recorded."""
        n = max(len(graph), 1)
        reader, buffer = graph.reads.row_of_each().astype(np.int64), graph.reads.ids.astype(np.int64)
        written = np.sort(graph.writes.ids.astype(np.int64) * n + graph.writes.row_of_each())
        if not len(written):
            none = np.zeros(0, np.int64)
            return cls(none, none, none, none.astype(np.float64))
        before = np.searchsorted(written, buffer * n + reader) - 1
        last = np.searchsorted(written, (buffer + 1) * n) - 1
        found = np.where((before >= 0) & (written[before] // n == buffer), before, last)
        writer, known = written[found] % n, (found >= 0) & (written[found] // n == buffer)
        size = np.minimum(graph.buffer_bytes[buffer], CACHE)
        return cls(reader[known], writer[known], buffer[known], size[known] * per_byte)

    def added(self, lane: Ints, rank: Ints, place: Ints) -> Floats:
        """The time that each task takes longer, where tasks have these lanes, ranks, and places in their lanes."""
        near = np.flatnonzero((lane[self.reader] != lane[self.writer]) & (rank[self.reader] == rank[self.writer]))
        reader, writer, buffer = self.reader[near], self.writer[near], self.buffer[near]
        order = np.lexsort((place[reader], lane[reader], writer, buffer))
        same = [column[order] for column in (lane[reader], writer, buffer)]
        first = np.ones(len(order), bool)
        first[1:] = np.any([column[1:] != column[:-1] for column in same], axis=0)
        paid = order[first]
        added = np.zeros(len(lane))
        np.add.at(added, reader[paid], self.time[near[paid]])
        return added
