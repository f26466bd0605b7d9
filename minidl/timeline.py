"""What ran when: one record per task, with waits and transfers as records of their own.

A predicted and a measured timeline are the same type, so they are reported, drawn and compared alike. Times are
microseconds (or whatever unit the costs had). It knows no graph: what it needs of one is copied in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from .graph import Floats, Ints, task_name
from .schedule import Lane


class What(IntEnum):
    """What a record tells of."""

    TASK = 0
    WAIT = 1  #: the lane stood still until a task of another lane or rank ended
    TRANSFER = 2  #: data on its way between ranks


@dataclass(frozen=True)
class Timeline:
    """Columns, one row per record, in no order: what, key (of the task), lane (index), issued, start, end, bytes.

    `edges` are pairs of records that depend on each other across lanes (producer, consumer), for drawing arrows.
    `labels` names units. `peak_bytes` is the memory plan's, where there is one.
    """

    lanes: tuple[Lane, ...]
    what: Ints
    key: Ints
    lane: Ints
    issued: Floats
    start: Floats
    end: Floats
    bytes: Ints
    edges: Ints = field(default_factory=lambda: np.empty((0, 2), np.int64))
    labels: tuple[str, ...] = ()
    peak_bytes: int | None = None
    predicted: bool = False
    unit: str = "us"
    meta: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.key)

    def name(self, record: int) -> str:
        return task_name(self.key[record])

    @property
    def tasks(self) -> Ints:
        """The records that are tasks."""
        return np.flatnonzero(self.what == What.TASK)

    @property
    def makespan(self) -> float:
        """From the first start to the last end of a task."""
        tasks = self.tasks
        return float(self.end[tasks].max() - self.start[tasks].min()) if len(tasks) else 0.0
