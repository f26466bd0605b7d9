"""The input of the simulator: one iteration of a plan's programs, all ranks together.

The tasks, lanes and waits are those of the programs' loop bodies, so the simulator prices exactly what runs. A message
is an edge from its send on one rank to its receive on another. This module has no times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..graph import Ints, Rows, TaskGraph
from ..program import Program
from ..schedule import Lane, Schedule
from ..tasks import SENDS, unpack
from .carried import Carried


class Iteration(NamedTuple):
    """Tasks and their lanes, and the waits of the next iteration."""

    graph: TaskGraph
    schedule: Schedule
    carried: Carried


def iteration(programs: Sequence[Program]) -> Iteration:
    """The iteration of these programs, one per rank: the loop's body of one rank, or the joined bodies of several."""
    if len(programs) == 1:
        body = programs[0].body
        return Iteration(body[0].graph, body[0].schedule, Carried.of(*(part.graph for part in body)))
    graph, overlapping = _joined(programs)
    schedule = _side_by_side(programs)
    return Iteration(graph, schedule, _carried(graph, schedule, *overlapping))


def _joined(programs: Sequence[Program]) -> tuple[TaskGraph, tuple[Ints, Ints]]:
    """The tasks of all bodies, with separate buffers for each rank. A send writes, and its receive reads, a buffer that
    represents the message. Also the keys of the sends whose messages are received in the next iteration, and of their
    receives."""
    graphs = [program.graph for program in programs]
    first = np.cumsum([0, *(len(graph) for graph in graphs)])
    buffers = np.cumsum([0, *(len(graph.buffer_bytes) for graph in graphs)])
    sends, receives = _messages(graphs, first)
    keys = np.concatenate([graph.keys for graph in graphs])
    later = unpack(keys[receives]).late > unpack(keys[sends]).late
    overlapping = keys[sends[later]], keys[receives[later]]
    sends, receives = sends[~later], receives[~later]
    message = buffers[-1] + np.arange(len(sends))
    order = _order(graphs, first, dict(zip(receives.tolist(), sends.tolist(), strict=True)))

    def rows(each: Iterable[Rows], tasks: Ints) -> Rows:
        offset = [rows.ids + before for rows, before in zip(each, buffers[:-1], strict=True)]
        task = [rows.row_of_each() + before for rows, before in zip(each, first[:-1], strict=True)]
        return Rows.from_pairs(np.concatenate([*task, tasks]), np.concatenate([*offset, message]),
                               int(first[-1])).take(order)

    def column(name: str) -> Any:
        return np.concatenate([getattr(graph, name) for graph in graphs])

    def buffer(name: str) -> Any:
        return np.append(column(name), np.zeros(len(sends), column(name).dtype))

    return TaskGraph(column("keys")[order], column("flops")[order], column("bytes")[order],
                     rows([graph.reads for graph in graphs], receives), rows([graph.writes for graph in graphs], sends),
                     buffer("buffer_bytes"), buffer("buffer_role"), buffer("buffer_storage"),
                     unit_names=graphs[0].unit_names), overlapping


def _messages(graphs: Sequence[TaskGraph], first: Ints) -> tuple[Ints, Ints]:
    """The send and the receive of each message, as indices among the tasks of all ranks."""
    ends: tuple[dict[int, int], dict[int, int]] = {}, {}
    for graph, before in zip(graphs, first.tolist(), strict=False):
        for t, launches in enumerate(graph.launches):
            number = dict(launches[0].constants).get("message") if launches else None
            if number is not None:
                ends[graph.kind[t] not in SENDS][number] = before + t
    sends, receives = ends
    return (np.array([sends[number] for number in sends], np.int64),
            np.array([receives[number] for number in sends], np.int64))


def _order(graphs: Sequence[TaskGraph], first: Ints, send_of: dict[int, int]) -> Ints:
    """An order of all tasks that keeps each rank's order, with each send before its receive."""
    place, end = first[:-1].tolist(), first[1:].tolist()
    order: list[int] = []
    done: set[int] = set()
    while len(order) < first[-1]:
        for rank in range(len(graphs)):
            while place[rank] < end[rank] and send_of.get(place[rank], -1) in {-1, *done}:
                order.append(place[rank])
                done.add(place[rank])
                place[rank] += 1
    return np.array(order, np.int64)


def _side_by_side(programs: Sequence[Program]) -> Schedule:
    schedules = [program.schedule for program in programs]
    joined = [np.zeros(len(s), bool) if s.joined is None else np.asarray(s.joined, bool) for s in schedules]
    counts = np.concatenate([np.diff(s.ptr) for s in schedules])
    return Schedule(tuple(Lane(rank, lane.name) for rank, s in enumerate(schedules) for lane in s.lanes),
                    np.append(0, np.cumsum(counts)), np.concatenate([s.keys for s in schedules]),
                    np.concatenate(joined) if any(s.joined is not None for s in schedules) else None)


def _carried(graph: TaskGraph, schedule: Schedule, sends: Ints, receives: Ints) -> Carried:
    """A rank ends its step before it begins the next one: each of its lanes waits for the last task of all others. The
    messages of these sends are received in the next iteration."""
    ids, busy = schedule.ids(graph), np.flatnonzero(np.diff(schedule.ptr))
    rank = np.array([lane.rank for lane in schedule.lanes], np.int64)[busy]
    last, first = np.nonzero((rank[:, None] == rank) & ~np.eye(len(busy), dtype=bool))
    source = np.append(ids[schedule.ptr[1:][busy] - 1][last], graph.find(sends))
    target = np.append(ids[schedule.ptr[:-1][busy]][first], graph.find(receives))
    return Carried(source, target, np.ones(len(source), np.int64))
