"""The per-rank grid of torch.distributed.pipelining: one row per rank, cells such as `2F0`, `1I0` (our O), `3W1`, `0B2`.

An empty cell is a bubble. A pair is `(2F3;5B1)OVERLAP_F_B`; its suffix may be missing. Sends and receives are
`SEND_F`, `RECV_F`, `SEND_B`, `RECV_B`. The format has no lanes: everything of a rank is on its `main` lane.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from itertools import islice

from ...graph import GraphError, Kind, parse_task, task_name, unpack
from ...schedule import HEADER, MOST_LANES, Lane, Schedule, ScheduleError, cells_by_line

THEIRS = {Kind.F: "F", Kind.O: "I", Kind.W: "W", Kind.B: "B", Kind.SF: "SEND_F", Kind.RF: "RECV_F", Kind.SO: "SEND_B",
          Kind.RO: "RECV_B"}
OURS = {theirs: kind.name for kind, theirs in THEIRS.items()}
PAIR = "OVERLAP_F_B"
_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|[FIWB])(\d+)")


def read_schedule(text: str, where: str = "the plan") -> Schedule:
    """A schedule in either notation: `rank,lane,task` with its header, or torch's grid. Raises ScheduleError."""
    _, first = next(cells_by_line(text, where), (1, iter(())))
    header = [*islice(first, 4)]
    return Schedule.from_csv(text, where) if header == HEADER or not any(header) else from_torch(text, where)


def from_torch(text: str, where: str = "the plan") -> Schedule:
    """Raises ScheduleError that names row and cell."""
    def names(row: int, cells: Iterator[str]) -> Iterator[str]:
        for column, cell in enumerate(cells, 1):
            if cell:
                try:
                    yield _ours(cell)
                except GraphError as error:
                    raise ScheduleError(f"{where}, row {row}, cell {column}: {error}") from None

    rows = [*islice(cells_by_line(text, where), MOST_LANES + 1)]
    if len(rows) > MOST_LANES:
        raise ScheduleError(f"{where}: more than {MOST_LANES} rows")
    schedule = Schedule.from_names({Lane(row - 1): names(row, cells) for row, cells in rows})
    if not len(schedule):
        raise ScheduleError(f"{where} is empty; expected one row of tasks per rank")
    return schedule


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
    if not cell.startswith("("):
        return _single(cell)
    inner = cell.removesuffix(PAIR).strip()
    if not inner.endswith(")") or len(inner) > 1000:
        raise GraphError(f"{cell[:40]!r} is no pair; expected (2F3;5B1)")
    return f"({';'.join(_single(part.strip()) for part in inner[1:-1].split(';'))})"


def _single(cell: str) -> str:
    match = _ACTION.fullmatch(cell)
    if match is None:
        raise GraphError(f"{cell[:40]!r} is no action; expected stage, F, I, W or B, micro-batch, as in 2F0")
    name = match[1] + OURS[match[2]] + match[3]
    parse_task(name)
    return name


def _theirs(key: int) -> str:
    unit, kind, micro_batch, iteration = unpack(key)
    if Kind(kind) not in THEIRS or iteration:
        raise ScheduleError(f"the grid notation has no name for task {task_name(key)}")
    return f"{unit}{THEIRS[Kind(kind)]}{micro_batch}"
