"""Data parallelism times a pipeline: the all-reduces between the replicas of each stage, beside the messages between
stages.

All replicas run the same schedule, each on its own share of every micro-batch. So one replica's ranks are written down,
and rank r of them stands for the rank r of every replica; an all-reduce such as `1A0` is between those. It stands on
the lane `comm` of its stage's rank, in the order in which the gradients get ready.
"""

from __future__ import annotations

import numpy as np

from ...graph import TaskGraph
from ...passes.send_receive import ranks_of
from ...passes.synchronise import synchronise
from ...schedule import Lane, Schedule
from ...tasks import COLLECTIVE


def add_all_reduces(graph: TaskGraph, schedule: Schedule, part_bytes: int | None = None) -> tuple[TaskGraph, Schedule]:
    """The graph and schedule with the all-reduce of each stage's gradients before its update: after them
    `add_communication` adds the messages.

    `part_bytes`: the largest part of an all-reduce. Raises GraphError as `synchronise` does.
    """
    summed = synchronise(graph, part_bytes=part_bytes)
    ids = summed.find(schedule.keys)
    place, rank = np.full(len(summed), -1, np.int64), np.zeros(len(summed), np.int64)
    place[ids], rank[ids] = np.arange(len(ids)), ranks_of(graph, schedule)[schedule.ids(graph)]
    sums = sorted(np.flatnonzero(np.isin(summed.kind, COLLECTIVE)).tolist(), key=lambda t: place[summed.preds[t]].max())
    lanes: dict[Lane, list[int]] = {}
    for t in sums:
        lanes.setdefault(Lane(int(rank[summed.preds[t][0]]), "comm"), []).append(int(summed.keys[t]))
    return summed, schedule.with_lanes({lane: np.array(keys, np.int64) for lane, keys in lanes.items()})
