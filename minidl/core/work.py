"""The work of tasks, for reports: how much of each is work of which kernel family, and the least time for it.

A family is a file in `kernels/`. The time of a task with several launches is shared out among their families as the
floors of the launches are to each other, since launches are not timed one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .columns import Content, Floats, Ints
from .tasks import as_recorded, parse_task, task_name


@dataclass(frozen=True)
class Work(Content):
    """Columns, one row per task of a step (as it was recorded) and family: key (ascending), family (index in
    `families`), share of the task's time, flops, bytes. `floor`: the least microseconds for these on the device of the
    run, or None if its rates are not known."""

    families: tuple[str, ...]
    key: Ints
    family: Ints
    share: Floats
    flops: Floats
    bytes: Floats
    floor: Floats | None = None

    def rows_of(self, keys: Ints) -> tuple[Ints, Ints]:
        """Pairs (index in `keys`, row) of all tasks here, of whatever iteration; a task may have several rows."""
        keys = as_recorded(keys)
        first, last = (np.searchsorted(self.key, keys, side) for side in ("left", "right"))
        count = last - first
        at = np.repeat(np.arange(len(keys)), count)
        return at, np.arange(len(at)) - np.repeat(np.cumsum(count) - last, count)

    def as_json(self) -> dict[str, Any]:
        return {"families": [*self.families], "tasks": [task_name(k) for k in self.key], **{
            name: None if (column := getattr(self, name)) is None else column.tolist()
            for name in ("family", "share", "flops", "bytes", "floor")}}

    @classmethod
    def from_json(cls, found: Any) -> Work:
        """Reads what `as_json` gave. Raises ValueError, KeyError or TypeError for anything else."""
        families, key = tuple(found["families"]), np.array([parse_task(name) for name in found["tasks"]], np.int64)
        family = np.array(found["family"], np.int64)
        numbers = [np.array(found[name], np.float64) for name in ("share", "flops", "bytes", "floor")
                   if name != "floor" or found[name] is not None]
        if not (all(isinstance(name, str) for name in families) and (np.diff(key) >= 0).all()
                and ((family >= 0) & (family < len(families))).all()
                and all(x.shape == key.shape and (np.isfinite(x) & (x >= 0)).all() for x in (family, *numbers))):
            raise ValueError("the work of a task is not valid")
        return cls(families, key, family, *numbers)
