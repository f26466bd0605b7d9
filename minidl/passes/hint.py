"""An order as a hint: each rank runs the first ready task of the order, whatever came before it there (RRFP, 2026).

A part of the order remains. On each rank:

- the tasks of one kind and stage keep their order, so gradients are added up in the order of micro-batches;
- a stage keeps at most `caps` micro-batches: a forward waits for the tasks that free the one so many forwards before;
- `gaps`: a task that the order keeps a rank waiting for still goes first.

All these waits go forward in one fixed order, and so do data and messages. A fixed order that all ranks can run has no
circle of waits; a part of it has none either. Receives are posted from the beginning, and no task waits for a send. So
whatever the times, some task of the step that has not run can run, and no rank waits for ever.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ..core.graph import Role, StorageSpec, TaskGraph
from ..core.schedule import Lane, Schedule
from ..core.tasks import COLLECTIVE, COMMUNICATION, Kind, unpack
from .rewrite import with_edges

TURN = StorageSpec("its turn under the hint", (0,), "uint8", 0, Role.WORKSPACE)  #: of the tokens of its waits
CHAINED = (Kind.F, Kind.O, Kind.W, Kind.B, Kind.R)  #: the kinds whose tasks may overtake each other
Window = Mapping[tuple[int, int], int]  #: (rank, stage) -> a number of micro-batches


@dataclass(frozen=True)
class Hint:
    """`caps`: the most micro-batches that a rank keeps of a stage. `gaps`: pairs (key, key that waits for it)."""

    caps: Window
    gaps: tuple[tuple[int, int], ...] = ()

    def applied(self, graph: TaskGraph, schedule: Schedule) -> tuple[TaskGraph, Schedule]:
        """A valid fixed order as a hint: its waits become edges of the graph, and each kind and stage has a lane of its
        own. The lanes that compute on a rank are still run by one thread."""
        slots = schedule.validate(graph).slots if schedule.slots is None else schedule.slots
        graph = graph.take(schedule.ids(graph)[np.argsort(slots, kind="stable")])  # edges go forward among tasks
        ends = graph.find(np.array(self.gaps, np.int64).reshape(-1, 2).ravel()).reshape(-1, 2)
        pairs = [*admissions(graph, schedule, self.caps), *((first, then) for first, then in ends.tolist())]
        return with_edges(graph, pairs, TURN), chains(schedule)


def _forwards(graph: TaskGraph, schedule: Schedule) -> dict[tuple[int, int], list[tuple[int, list[int]]]]:
    """(rank, stage) -> its forwards in order, each with the tasks that use what it keeps."""
    ids, rank = schedule.ids(graph), schedule.rank_of_each.tolist()
    kind, unit, micro = graph.kind.tolist(), graph.unit.tolist(), graph.micro_batch.tolist()
    made, users = defaultdict[tuple[int, int], list[int]](list), defaultdict[tuple[int, int, int], list[int]](list)
    for task, r in zip(ids.tolist(), rank, strict=True):
        if kind[task] == Kind.F:
            made[r, unit[task]].append(task)
        elif kind[task] in CHAINED:
            users[r, unit[task], micro[task]].append(task)
    return {(r, s): [(t, users[r, s, micro[t]]) for t in own] for (r, s), own in made.items()}


def windows(graph: TaskGraph, schedule: Schedule) -> dict[tuple[int, int], int]:
    """(rank, stage) -> the most micro-batches that a fixed order keeps of it: the smallest cap that the order obeys."""
    place = dict(zip(schedule.ids(graph).tolist(), schedule.place.tolist(), strict=True))
    found = dict[tuple[int, int], int]()
    for where, forwards in _forwards(graph, schedule).items():
        free = [max((place[t] for t in users), default=-1) for _, users in forwards]
        oldest, most = 0, 1
        for j, (task, _) in enumerate(forwards):
            while oldest < j and free[oldest] < place[task]:
                oldest += 1
            most = max(most, j - oldest + 1)
        found[where] = most
    return found


def admissions(graph: TaskGraph, schedule: Schedule, caps: Window) -> Iterable[tuple[int, int]]:
    """Pairs of tasks: the second is the forward that waits until the first has freed what a forward before it keeps."""
    for where, forwards in _forwards(graph, schedule).items():
        for (_, users), (task, _) in zip(forwards, forwards[caps[where] :], strict=False):
            yield from ((user, task) for user in users)


def joined(schedule: Schedule) -> list[Lane]:
    """For each lane, of which some have messages and sums alone, the lane of its tasks in a fixed order."""
    found = []
    for i, lane in enumerate(schedule.lanes):
        talks, link = np.isin(unpack(schedule.order(i)).kind, COMMUNICATION), re.search(r"(->|<-)\d+$", lane.name)
        found.append(Lane(lane.rank, "main" if not (len(talks) and talks.all()) else lane.name if link is None
                          else ("send" if link[1] == "->" else "recv") + link[0]))
    return found


def sums_apart(schedule: Schedule) -> Schedule:
    """The schedule in which each sum over ranks has a lane of its own, such as `0/sum 3`: of those that are ready on
    all ranks, the first one of the order is next."""
    kind, lanes = unpack(schedule.keys).kind, list[tuple[Lane, np.ndarray]]()
    for i, lane in enumerate(schedule.lanes):
        keys, sums = schedule.order(i), np.isin(kind[schedule.ptr[i] : schedule.ptr[i + 1]], COLLECTIVE)
        lanes += ([(Lane(lane.rank, f"sum {n}"), keys[n : n + 1]) for n in range(len(keys))]
                  if len(keys) and sums.all() else [(lane, keys)])
    return Schedule.of_keys([lane for lane, _ in lanes], [keys for _, keys in lanes], notes=schedule.notes)


def chains(schedule: Schedule) -> Schedule:
    """The schedule with a lane for each kind and stage of a rank, such as `0/F3`; other tasks stay on their lanes."""
    lanes = list[tuple[Lane, np.ndarray]]()
    for i, lane in enumerate(schedule.lanes):
        keys = schedule.order(i)
        own = unpack(keys)
        chain = np.where(np.isin(own.kind, CHAINED), own.unit * (max(Kind) + 1) + own.kind, -1)
        for c in np.unique(chain).tolist():
            unit, kind = divmod(c, max(Kind) + 1)
            lanes.append((lane if c < 0 else Lane(lane.rank, f"{Kind(kind).name}{unit}"), keys[chain == c]))
    return Schedule.of_keys([lane for lane, _ in lanes], [keys for _, keys in lanes], notes=schedule.notes)
