"""The realised order of a run under a hint: of each step the tasks of each rank, as a file of lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from ..core.tasks import parse_task, task_name

Orders = Sequence[Sequence[Sequence[int]]]  #: of each step, of each rank: keys


def as_lines(orders: Orders) -> list[str]:
    """A line for each step and rank: `{"step": 1, "rank": 0, "order": "0F0 0F1 .."}`."""
    return [json.dumps({"step": step, "rank": rank, "order": " ".join(map(task_name, keys))})
            for step, ranks in enumerate(orders, 1) for rank, keys in enumerate(ranks)]


def from_lines(lines: Iterable[str], name: str) -> list[list[list[int]]]:
    """The inverse, for a file of this name. Raises ValueError for a line that is none, or comes out of turn."""
    found: list[list[list[int]]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            keys = [parse_task(task) for task in row["order"].split()]
            if (row["step"], row["rank"]) == (len(found) + 1, 0):
                found.append([])
            elif (row["step"], row["rank"]) != (len(found), len(found[-1]) if found else -1):
                raise ValueError(f"step {row['step']} of rank {row['rank']} comes out of turn")
            found[-1].append(keys)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{name}, line {number}: no line of --log-order ({error})") from None
    return found
