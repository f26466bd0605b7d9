"""The per-rank grid of torch.distributed.pipelining: one row per rank, cells such as `2F0`, `1I0` (our O), `3W1`,
`0B2`.

An empty cell is a bubble. A pair is `(2F3;5B1)OVERLAP_F_B`; its suffix may be missing. Sends and receives are
`SEND_F`, `RECV_F`, `SEND_B`, `RECV_B`, each with the stage that does it; the message goes to the next stage, or to the
one before: `2SEND_F0` and `3RECV_F0` are our `2SF0>r` and `2RF0>r` where rank r has stage 3. `1UNSHARD`, `1RESHARD` and
`1REDUCE_GRAD` say when FSDP gathers, frees and sums stage 1's weights among its replicas: the all-gathers, their last
users and the reduce-scatters of a plan whose replicas share out. If they are read, a note of the order has their
places, which such a plan keeps (`minidl.passes.placed`). The format has no lanes: all tasks of a rank are on its
`main` lane; another note says that its messages are posted as in torch's runtime (`as_torch_does` in proof.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

import numpy as np

from ...core.columns import Ints, spread
from ...core.graph import TaskGraph
from ...core.placement import Refused
from ...core.schedule import MOST_LANES, Lane, Schedule, ScheduleError, cells_by_line, split_notes, text_of
from ...core.tasks import COLLECTIVE, RECEIVES, SENDS, GraphError, Kind, pack, parse_task, repack, task_name, unpack
from ...passes.boundary import Mask
from ...passes.placed import PLACED
from ...passes.shares import WHAT
from ...plans.plan import PipelinePlan
from ..saved import AS_TORCH
from .proof import descending

THEIRS = {Kind.F: "F", Kind.O: "I", Kind.W: "W", Kind.B: "B", Kind.SF: "SEND_F", Kind.RF: "RECV_F", Kind.SO: "SEND_B",
          Kind.RO: "RECV_B"}
OURS = {theirs: kind for kind, theirs in THEIRS.items()}
_SHIFT = {Kind.RF: 1, Kind.RO: -1}  # torch names the stage that receives, we name the stage whose result it is
PAIR = "OVERLAP_F_B"
_SHARDING = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)")
_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|[FIWB])(\d+)")


def read_schedule(text: str, where: str = "the plan") -> Schedule:
    """Reads `rank,lane,task` with its header, or torch's grid, which begins with an action. Raises ScheduleError."""
    _, first = next(cells_by_line(split_notes(text, where)[1], where), (1, iter(())))
    return (from_torch if re.match(r"\(?\d+[A-Z]", next(filter(None, first), "")) else Schedule.from_csv)(text, where)


def read_file(path: str) -> Schedule:
    """The schedule in a file, in either notation. Raises ScheduleError, OSError for a file that cannot be read."""
    return read_schedule(text_of(path), path)


def from_torch(text: str, where: str = "the plan") -> Schedule:
    """Reads torch's grid. Raises ScheduleError that names row and cell."""
    placed = list[str]()  # the actions of FSDP, each with the task before it

    def names(row: int, cells: Iterator[str]) -> Iterator[str]:
        before = ""
        for column, cell in enumerate(cells, 1):
            if _SHARDING.fullmatch(cell):
                placed.append(cell + before)
            elif cell:
                try:
                    name = _ours(cell)
                except GraphError as error:
                    raise ScheduleError(f"{where}, row {row}, cell {column}: {error}") from None
                before = before if ">" in name else f"@{name.strip('()').rpartition(';')[2]}"
                yield name

    rows = [*islice(cells_by_line(text, where), MOST_LANES + 1)]
    if len(rows) > MOST_LANES:
        raise ScheduleError(f"{where}: more than {MOST_LANES} rows")
    schedule = Schedule.from_names({Lane(row - 1): names(row, cells) for row, cells in rows})
    if not len(schedule):
        raise ScheduleError(f"{where} is empty; expected one row of tasks per rank")
    keys = schedule.keys
    message = _is_message(keys)
    notes = dict([AS_TORCH]) if message.any() or descending(schedule).size else {}
    if any("UNSHARD" in action for action in placed):  # without one, sums follow from the order
        notes[PLACED] = "+".join(placed)
    schedule = replace(schedule, notes=notes)
    if not message.any():  # long grids need no more memory then
        return schedule
    rank = _rank_of_reader(schedule)
    lost = np.flatnonzero(rank < 0)
    if lost.size:
        own = unpack(int(keys[lost[0]]))
        raise ScheduleError(f"{where}: {_theirs(int(keys[lost[0]]))} goes to a stage without a forward of micro-batch "
                            f"{own.micro_batch}")
    return replace(schedule, keys=np.where(message, repack(keys, destination=rank), keys))


def _is_message(keys: Ints) -> Mask:
    """Mask of messages."""
    return np.isin(unpack(keys).kind, SENDS + RECEIVES)


def _rank_of_reader(schedule: Schedule) -> Ints:
    """For each message, the rank with the forward of its target stage in this notation, -1 without one; else 0."""
    keys, message = schedule.keys, _is_message(schedule.keys)
    if not message.any():
        return np.zeros(len(keys), np.int64)
    forward = unpack(keys).kind == Kind.F
    rank_of = dict(zip(keys[forward].tolist(), schedule.rank_of_each[forward].tolist(), strict=True))
    own = unpack(keys[message])
    stage = own.unit + np.where(np.isin(own.kind, (Kind.SF, Kind.RF)), 1, -1)
    wanted = np.where(stage < 0, -1, pack(np.maximum(stage, 0), Kind.F, own.micro_batch))
    return spread(np.flatnonzero(message), np.array([rank_of.get(key, -1) for key in wanted.tolist()]), len(keys))


def to_torch(schedule: Schedule) -> str:
    """Torch's grid of a schedule: tasks rank by rank, at their slots with bubbles in between after `validate`, else in
    plain order. Raises ScheduleError for more than one lane per rank, or for a task that the notation cannot name."""
    ranks = [lane.rank for lane in schedule.lanes]
    if len(set(ranks)) < len(ranks):
        raise ScheduleError("the grid notation has one lane per rank; use the schedule without its communication")
    _check_reach(schedule, _is_message(schedule.keys))
    rows: list[list[str]] = [[] for _ in range(schedule.ranks)]
    slots = np.zeros(len(schedule), np.int64) if schedule.slots is None else schedule.slots
    columns = schedule.rank_of_each, schedule.keys, schedule.second, slots
    for rank, key, joins, slot in zip(*(column.tolist() for column in columns), strict=True):
        row = rows[rank]
        if joins:
            row[-1] = _paired(row[-1], _theirs(key))
        else:
            row += [*[""] * (slot - len(row)), _theirs(key)]
    width = max(map(len, rows), default=0)
    return "".join(",".join(row + [""] * (width - len(row))) + "\n" for row in rows)


def _check_reach(schedule: Schedule, message: Mask) -> None:
    """Raises ScheduleError if one of these messages has no name in the notation."""
    past = np.flatnonzero(message & (_rank_of_reader(schedule) != unpack(schedule.keys).destination))
    if past.size:
        raise ScheduleError(f"the grid notation has no name for {task_name(schedule.keys[past[0]])}: there a message "
                            f"goes to the next stage or the one before")


def _paired(first: str, second: str) -> str:
    return f"({first.removesuffix(PAIR).strip('()')};{second}){PAIR}"


def for_torch(plan: PipelinePlan) -> str:
    """The grid of a plan that torch's pipeline runtime loads as `compute_only`: forwards and backwards, rank by rank.

    Torch adds messages and sums over replicas itself, and its user steps the optimizer, so these are left out. If
    replicas share out, the grid has messages and the actions of FSDP, and torch loads it as `compute_comms`. A backward
    of one part alone, of a stage without parameters or before which nothing has any, is a full one there. Raises
    Refused for an order that this runtime cannot hold, ScheduleError as `to_torch`.
    """
    schedule = plan.schedule.keep(np.isin(unpack(plan.schedule.keys).kind, (Kind.F, Kind.O, Kind.W, Kind.B)))
    own = unpack(schedule.keys)
    last = own.micro_batch[(own.kind == Kind.F) & (own.unit == plan.placement.stages - 1)]
    for wrong, why, cure in (
            (plan.stale, "it trains on older weights, and torch's runtime updates once, after a step",
             "use a policy without stale weights"),
            (plan.placement.directions > 1, "two ranks hold each stage, and in torch's runtime one does",
             "use a policy of one direction, such as dualpipe_v"),
            (plan.placement.apart, "forwards and backwards of a stage are on two ranks, and in torch's runtime on one",
             "use a policy that has both on one, such as interleaved"),
            (plan.slices > 1, "it orders slices of micro-batches, and torch's runtime has whole ones",
             "use a policy of whole micro-batches"),
            ((np.diff(last) < 0).any(), "the last stage runs micro-batches in another order than 0, 1, 2, and torch's "
             "runtime numbers losses as they are made", "let that stage run them in ascending order")):
        if wrong:
            raise Refused(plan.scheduler, why, cure)
    backward = pack(own.unit, Kind.B, own.micro_batch)
    split = (own.kind == Kind.O) | (own.kind == Kind.W)
    found, count = np.unique(backward[split], return_counts=True)
    alone = split & np.isin(backward, found[count == 1])
    if WHAT in plan.schedule.notes:
        return _lowered(plan, dict(zip(schedule.keys[alone].tolist(), backward[alone].tolist(), strict=True)))
    return to_torch(replace(schedule, keys=np.where(alone, backward, schedule.keys)))


def _lowered(plan: PipelinePlan, backward: Mapping[int, int]) -> str:
    """The grid of a plan whose replicas share out, with its messages, UNSHARD, RESHARD and REDUCE_GRAD. Below level 3
    stages are whole for the whole step. `backward`: tasks that are full backwards there. Raises ScheduleError as
    `to_torch`."""
    graph, order = plan.with_messages
    ids, own, rows = order.ids(graph), unpack(order.keys), list[list[str]]()
    talks, computes = np.isin(own.kind, COLLECTIVE), np.isin(graph.kind, (Kind.F, Kind.O, Kind.W, Kind.B))
    slot = _slots(graph, order, talks)
    travels = _is_message(order.keys) & (own.micro_batch < plan.micro_batches)  # others are of updates
    _check_reach(order, travels)
    users = {t: [u for u in graph.succs[t].tolist() if computes[u]] for t in ids[own.kind == Kind.AG].tolist()}
    place = spread(ids, np.arange(len(ids)), len(graph))
    frees: dict[int, list[int]] = {}  # task -> the stages of the gathers whose last user it is
    for t, found in users.items():
        frees.setdefault(max(found, key=place.__getitem__, default=-1), []).append(int(graph.unit[t]))
    gathered = {int(graph.unit[t]) for t, found in users.items() if found}  # others are whole for the whole step
    summed = {*own.unit[own.kind == Kind.AS].tolist()}
    first = np.select([own.kind == Kind.AS, talks, _is_message(order.keys)], [1, 2, 3])  # at one slot, after tasks
    sequence = np.lexsort((np.arange(len(ids)), first, slot))
    for rank in range(order.ranks):
        kept = [s for s in sorted(plan.placement.held(rank).tolist(), key=summed.__contains__) if s not in gathered]
        frees.setdefault(int(ids[computes[ids] & (order.rank_of_each == rank)][-1]), []).extend(kept)
        row, whole, over = [f"{stage}UNSHARD" for stage in kept], Counter(kept), list[int]()
        for i in sequence[order.rank_of_each[sequence] == rank].tolist():
            t, stage, joins = int(ids[i]), int(own.unit[i]), bool(order.second[i])
            if not joins and own.kind[i] != Kind.AS:  # which needs what its stage has left
                row += [f"{s}RESHARD" for s in sorted({*over}) if not whole[s]]
                over.clear()
            if own.kind[i] == Kind.AS:
                row.append(f"{stage}REDUCE_GRAD")
            elif users.get(t):
                row += [f"{stage}UNSHARD"] * (not whole[stage])
                whole[stage] += 1
            elif computes[t] or travels[i]:
                cell = _theirs(backward.get(int(order.keys[i]), int(order.keys[i])))
                if computes[t] and not whole[stage]:  # torch's W needs weights as well
                    at, freed = len(row) - joins, f"{stage}RESHARD"
                    while at and re.search("SEND|RECV", row[at - 1]):
                        at -= 1
                    row[at - 1 : at] = [] if row[at - 1 : at] == [freed] else [*row[at - 1 : at], f"{stage}UNSHARD"]
                    over.append(stage)
                row.append(_paired(row.pop(), cell) if joins else cell)
                over += frees.get(t, [])
                whole.subtract(frees.get(t, []))
        rows.append([*row, *(f"{s}RESHARD" for s in sorted({*over}))])
    return "".join(",".join(row) + "\n" for row in rows)


def _slots(graph: TaskGraph, order: Schedule, talks: Mask) -> Ints:
    """The slot of each entry of an order: of a collective the last one of the tasks of its rank that it waits for."""
    ids, rank = order.ids(graph), order.rank_of_tasks(graph)
    computed = graph.take(np.sort(ids[~talks]))
    slots, at = np.zeros(len(ids), np.int64), np.full(len(graph), -1)
    slots[~talks] = order.keep(~talks).validate(computed).slots
    at[ids[~talks]] = slots[~talks]
    for i in np.flatnonzero(talks).tolist():
        before = graph.preds[int(ids[i])]
        slots[i] = at[before[rank[before] == rank[ids[i]]]].max(initial=-1)
    return slots


def _ours(cell: str) -> str:
    if not cell.startswith("("):
        return _single(cell)
    inner = cell.removesuffix(PAIR).strip()
    if not inner.endswith(")") or len(inner) > 1000:
        raise GraphError(f"{cell[:40]!r} is not a pair; expected (2F3;5B1)")
    return f"({';'.join(_single(part.strip()) for part in inner[1:-1].split(';'))})"


def _single(cell: str) -> str:
    match = _ACTION.fullmatch(cell)
    if match is None:
        raise GraphError(f"{cell[:40]!r} is not an action; expected stage, F, I, W or B, micro-batch, as in 2F0")
    kind = OURS[match[2]]
    name = f"{match[1]}{kind.name}{match[3]}"
    if kind not in SENDS + RECEIVES:
        parse_task(name)
        return name
    own = unpack(parse_task(name + ">0"))  # the rank is filled in when all forwards are known
    return task_name(pack(own.unit - _SHIFT.get(kind, 0), kind, own.micro_batch))


def _theirs(key: int) -> str:
    own = unpack(key)
    kind = Kind(own.kind)
    if kind not in THEIRS or own.iteration or own.late or own.part:
        raise ScheduleError(f"the grid notation has no name for task {task_name(key)}")
    return f"{own.unit + _SHIFT.get(kind, 0)}{THEIRS[kind]}{own.micro_batch}"
