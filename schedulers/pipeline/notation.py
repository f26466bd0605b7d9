"""The per-rank grid of torch.distributed.pipelining: one row per rank, cells such as `2F0`, `1I0` (our O), `3W1`, `0B2`.

An empty cell is a bubble. A pair is `(2F3;5B1)OVERLAP_F_B`; its suffix may be missing. Sends and receives are
`SEND_F`, `RECV_F`, `SEND_B`, `RECV_B`. The format has no lanes: everything of a rank is on its `main` lane.
"""

from __future__ import annotations

import csv
import io
import re

from ...graph import GraphError, Kind, parse_task, task_name, unpack
from ...schedule import HEADER, Lane, Schedule, ScheduleError

THEIRS = {Kind.F: "F", Kind.O: "I", Kind.W: "W", Kind.B: "B", Kind.SF: "SEND_F", Kind.RF: "RECV_F", Kind.SO: "SEND_B",
          Kind.RO: "RECV_B"}
OURS = {theirs: kind.name for kind, theirs in THEIRS.items()}
PAIR = "OVERLAP_F_B"
_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|[FIWB])(\d+)")


def read_schedule(text: str, where: str = "the plan") -> Schedule:
    """A schedule in either notation: `rank,lane,task` with its header, or torch's grid. Raises ScheduleError."""
    first = next(csv.reader(io.StringIO(text)), [])
    ours = [cell.strip() for cell in first] == HEADER
    return Schedule.from_csv(text, where) if ours or not any(first) else from_torch(text, where)


def from_torch(text: str, where: str = "the plan") -> Schedule:
    """Raises ScheduleError that names row and cell."""
    lanes: dict[Lane, list[str]] = {}
    for rank, row in enumerate(csv.reader(io.StringIO(text))):
        names = lanes.setdefault(Lane(rank), [])
        for column, cell in enumerate(row):
            cell = cell.strip()
            if cell:
                try:
                    names.append(_ours(cell))
                except GraphError as error:
                    raise ScheduleError(f"{where}, row {rank + 1}, cell {column + 1}: {error}") from None
    if not any(lanes.values()):
        raise ScheduleError(f"{where} is empty; expected one row of tasks per rank")
    return Schedule.from_names(lanes)


def to_torch(schedule: Schedule) -> str:
    """Compute tasks rank by rank, at their slots with bubbles in between after `validate`, else in plain order.

    Raises ScheduleError for more than one lane per rank, or for a task that the notation has no name for.
    """
    ranks = [lane.rank for lane in schedule.lanes]
    if len(set(ranks)) < len(ranks):
        raise ScheduleError("the grid notation has one lane per rank; take the schedule without its communication")
    rows: list[list[str]] = [[] for _ in range(schedule.ranks)]
    for i, rank in enumerate(ranks):
        row = rows[rank]
        for entry in range(int(schedule.ptr[i]), int(schedule.ptr[i + 1])):
            if schedule.joined is not None and schedule.joined[entry]:
                row[-1] = f"({row[-1].removesuffix(PAIR).strip('()')};{_theirs(int(schedule.keys[entry]))}){PAIR}"
                continue
            if schedule.slots is not None:
                row.extend([""] * (int(schedule.slots[entry]) - len(row)))
            row.append(_theirs(int(schedule.keys[entry])))
    width = max(map(len, rows), default=0)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(row + [""] * (width - len(row)) for row in rows)
    return out.getvalue()


def _ours(cell: str) -> str:
    if cell.startswith("("):
        inner = cell.removesuffix(PAIR).strip()
        if not inner.endswith(")"):
            raise GraphError(f"{cell!r} is no pair; expected (2F3;5B1)")
        return f"({';'.join(_ours(part.strip()) for part in inner[1:-1].split(';'))})"
    match = _ACTION.fullmatch(cell)
    if match is None:
        raise GraphError(f"{cell!r} is no action; expected stage, F, I, W or B, micro-batch, as in 2F0")
    name = match[1] + OURS[match[2]] + match[3]
    parse_task(name)
    return name


def _theirs(key: int) -> str:
    unit, kind, micro_batch, iteration = unpack(key)
    if Kind(kind) not in THEIRS or iteration:
        raise ScheduleError(f"the grid notation has no name for task {task_name(key)}")
    return f"{unit}{THEIRS[Kind(kind)]}{micro_batch}"
