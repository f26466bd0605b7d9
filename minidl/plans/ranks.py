"""The input of the simulator: one iteration of a plan, all ranks together.

The tasks, lanes and waits come from the programs' loop bodies, so the simulator prices exactly what runs. A message
is an edge from its send on one rank to its receive on another. This module has no times.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..core.columns import Ints, Rows, spread
from ..core.graph import TaskGraph
from ..core.schedule import Schedule
from ..pricing.simulation import Carried
from .program import Division, Program


class Iteration(NamedTuple):
    """Tasks and their lanes, and the waits of the next iteration."""

    graph: TaskGraph
    schedule: Schedule
    carried: Carried


def alone(program: Program) -> Iteration:
    """The iteration of one device, or of data-parallel ranks: the loop's body."""
    body = program.body
    return Iteration(body[0].graph, body[0].schedule, Carried.of(*(part.graph for part in body)))


def iteration(division: Division) -> Iteration:
    """The iteration of several ranks: the tasks of all, with separate buffers for each rank. A send writes, and its
    receive reads, a buffer that represents the message, unless it is received in the next iteration."""
    graph, schedule = division.graph, division.schedule
    later = division.overlapping
    sends, receives = division.sent[~later], division.received[~later]
    rank = division.rank
    size, of_message = len(graph.buffer_bytes), np.arange(len(sends))

    def rows(own: Rows, messages: Ints) -> tuple[Ints, Ints]:
        task = own.row_of_each()
        return np.append(task, messages), np.append(rank[task] * size + own.ids, -1 - of_message)

    receiving, sending = (spread(own, True, len(graph)) for own in (division.received, division.sent))
    reader, read = rows(graph.reads.where(~receiving), receives)
    writer, written = rows(graph.writes.where(~sending), sends)
    buffers, number = np.unique(np.concatenate([read, written]), return_inverse=True)
    kept = buffers >= 0
    source = buffers[kept] % size
    storage = np.unique(buffers[kept] // size * len(graph.storages) + graph.buffer_storage[source],
                        return_inverse=True)[1]

    nbytes, role, place = (spread(kept, values, len(buffers)) for values in (graph.buffer_bytes[source],
                                                                             graph.buffer_role[source], storage))
    apart = TaskGraph(graph.keys, graph.flops, graph.bytes, Rows.from_pairs(reader, number[: len(read)], len(graph)),
                      Rows.from_pairs(writer, number[len(read) :], len(graph)), nbytes, role, place,
                      unit_names=graph.unit_names)
    # a rank ends its step before it begins the next one: each of its lanes waits for the last task of all others
    (last, first), lane, ids = schedule.turns, schedule.lane_of_each(), schedule.ids(graph)
    others = lane[last] != lane[first]
    source = np.append(ids[last[others]], division.sent[later])
    target = np.append(ids[first[others]], division.received[later])
    return Iteration(apart, schedule, Carried(source, target, np.ones(len(source), np.int64)))
