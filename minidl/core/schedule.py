"""A schedule: for every rank and lane the order of its tasks. Pure data; it can be proved, drawn, compared and saved.

It names tasks by key and holds no graph, so it can be read from a file without one; `validate` checks it against a
graph. It knows no durations and no devices.
"""

from __future__ import annotations

import csv
import difflib
import io
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .columns import Columns, Ints, Rows, ends_of_actions, offsets, prepared, run_lanes, spread
from .graph import TaskGraph, check_kinds
from .tasks import GraphError, parse_task, repack, task_name, unpack

HEADER = ["rank", "lane", "task"]
SIDE = "side SMs"  #: a note of a schedule: the multiprocessors of a GPU that all lanes but the first have
MOST_LANES = 1 << 16  #: the most lanes of a schedule that is read


class ScheduleError(ValueError):
    """A schedule does not fit its graph. `tasks`: the names of the culprits; `grid`: the grid with them marked."""

    def __init__(self, message: str, tasks: Sequence[str] = (), grid: str = "") -> None:
        super().__init__(message + ("\n" + grid if grid else ""))
        self.message, self.tasks, self.grid = message, tuple(tasks), grid


@dataclass(frozen=True, order=True, slots=True)
class Lane:
    """One in-order queue of a rank: a stream on a device. `main` has a higher priority than all other lanes."""

    rank: int
    name: str = "main"

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int | np.integer) or self.rank < 0 or not isinstance(self.name, str):
            raise ScheduleError(f"a lane is Lane(RANK, NAME), as in Lane(0, 'main'), not Lane({self.rank!r:.40}, "
                                f"{self.name!r:.40})")

    @property
    def priority(self) -> int:
        """The stream's priority as CUDA counts: the lower number goes first."""
        return 0 if self.name == "main" else 1

    def __str__(self) -> str:
        return f"{self.rank}/{self.name}"


@dataclass(frozen=True)
class Schedule(Columns):
    """Lanes and, lane by lane, the keys of their tasks in order.

    `keys[ptr[i]:ptr[i + 1]]` run on `lanes[i]`. Where `joined` is given and true, an entry runs as one action with the
    entry before it. `slots` is filled by `validate`: the unit time at which each entry can run. All arrays are
    read-only. `notes`: facts that a pipeline's order needs beside it, as text by name; lines `# name: text` of its CSV.
    """

    lanes: tuple[Lane, ...]
    ptr: Ints
    keys: Ints
    joined: Any = None
    slots: Any = field(default=None, compare=False)
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for lane in self.lanes:
            if not isinstance(lane, Lane):
                raise ScheduleError(f"a lane is Lane(RANK, NAME), as in Lane(0, 'main'), not {lane!r:.40}")
        for name in ("ptr", "keys", "joined", "slots"):
            column = getattr(self, name)
            if column is not None and not isinstance(column, np.ndarray):
                object.__setattr__(self, name, np.asarray(column))
        super().__post_init__()

    # ------------------------------------------------------------------------------------------------------ building
    @classmethod
    def of(cls, graph: TaskGraph, lanes: Mapping[Lane, Iterable[int]]) -> Schedule:
        """From task ids (of `graph`) in order, per lane."""
        return cls.of_keys(lanes, [graph.keys[np.fromiter(ids, np.int64)] for ids in lanes.values()])

    @classmethod
    def of_keys(cls, lanes: Iterable[Lane], keys: Sequence[Ints], joined: Any = None,
                notes: Mapping[str, str] | None = None) -> Schedule:
        """From the keys of each lane, in order."""
        return cls(tuple(lanes), offsets([*map(len, keys)]), np.concatenate([*keys, np.empty(0, np.int64)]), joined,
                   notes=notes or {})

    @classmethod
    def from_names(cls, lanes: Mapping[Lane, Iterable[str]]) -> Schedule:
        """From lists of task names, per lane; `(2F3;5B1)` is a pair that runs as one action. Raises ScheduleError."""
        if not isinstance(lanes, Mapping):
            raise ScheduleError(f"lanes are {lanes!r:.40}; give the names by lane, as in {{Lane(0, 'main'): ['0F0']}}")
        read = _Actions()
        for lane, names in lanes.items():
            if isinstance(names, str):
                raise ScheduleError(f"the tasks of lane {lane} are one text; give a list of names: {names.split()}")
            read.add(lane, names)
        return read.schedule()

    # ------------------------------------------------------------------------------------------------------- reading
    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        """`<Schedule of 17 tasks on 2 lanes>`; `print(schedule.grid())` shows the order."""
        ranks = f" of {self.ranks} ranks" if self.ranks > 1 else ""
        return f"<Schedule of {len(self)} tasks on {len(self.lanes)} lane{'s' * (len(self.lanes) != 1)}{ranks}>"

    def _repr_svg_(self) -> str:
        """The grid as a picture, for notebooks."""
        from .draw import schedule_svg

        return schedule_svg(self)

    @property
    def ranks(self) -> int:
        return max((lane.rank for lane in self.lanes), default=-1) + 1

    @property
    def side_sms(self) -> int:
        """The SMs of a GPU that all lanes but the first have, while the first has the others; 0: all lanes use all.
        Raises ScheduleError for a note that says something else."""
        text = self.notes.get(SIDE, "0")
        if not text.isdecimal():
            raise ScheduleError(f"the note {SIDE!r} of a schedule is {text!r:.40}; it must be a number of SMs")
        return int(text)

    def lane_of_each(self) -> Ints:
        """For every entry the index of its lane."""
        return np.repeat(np.arange(len(self.lanes), dtype=np.int32), np.diff(self.ptr))

    @property
    def rank_of_lane(self) -> Ints:
        return np.array([lane.rank for lane in self.lanes], np.int64)

    @property
    def rank_of_each(self) -> Ints:
        """For every entry the rank of its lane."""
        return self.rank_of_lane[self.lane_of_each()]

    @property
    def turns(self) -> tuple[Ints, Ints]:
        """Pairs of entries of a rank, if the schedule repeats: the last one of a lane, and the first one of the same or
        another lane in the next step."""
        busy = np.flatnonzero(np.diff(self.ptr))
        rank = self.rank_of_lane[busy]
        last, first = np.nonzero(rank[:, None] == rank)
        return (self.ptr[1:] - 1)[busy][last], self.ptr[:-1][busy][first]

    @property
    def second(self) -> NDArray[np.bool_]:
        """For every entry whether it runs as one action with the entry before it."""
        return np.zeros(len(self), bool) if self.joined is None else np.asarray(self.joined, bool)

    @property
    def first(self) -> Ints:
        """For every entry the first entry of its action."""
        return np.maximum.accumulate(np.where(self.second, 0, np.arange(len(self))))

    @property
    def place(self) -> Ints:
        """For every entry its place on its lane."""
        return np.arange(len(self)) - np.repeat(self.ptr[:-1], np.diff(self.ptr))

    def rank_of_tasks(self, graph: TaskGraph) -> Ints:
        """The rank of each task. Raises ScheduleError for a task that the graph does not have."""
        return spread(self.ids(graph), self.rank_of_each, len(graph))

    def order(self, lane: int) -> Ints:
        """The keys on one lane, in order."""
        return self.keys[self.ptr[lane] : self.ptr[lane + 1]]

    def names(self, lane: int) -> list[str]:
        """The actions on one lane as text; a pair is one action."""
        names: list[str] = []
        for entry in range(int(self.ptr[lane]), int(self.ptr[lane + 1])):
            name = task_name(self.keys[entry])
            if self.joined is not None and self.joined[entry]:
                names[-1] = f"({names[-1].strip('()')};{name})"
            else:
                names.append(name)
        return names

    def ids(self, graph: TaskGraph) -> Ints:
        """The task id of every entry. Raises ScheduleError for a task that the graph does not have."""
        check_kinds(graph=(graph, TaskGraph))
        ids = graph.find(self.keys)
        missing = np.flatnonzero(ids < 0)
        if missing.size:
            name = task_name(self.keys[missing[0]])
            lane = self.lanes[int(self.lane_of_each()[missing[0]])]
            raise self.error(f"unknown task {name} on lane {lane}: the graph ({len(graph)} tasks) has no such task; is "
                             f"it the plan of another network, or of another number of micro-batches?",
                             [int(self.keys[missing[0]])])
        return ids

    def once(self, graph: TaskGraph) -> Ints:
        """As `ids`, after the proof that every task of the graph appears exactly once. Raises ScheduleError."""
        ids = self.ids(graph)
        count = np.bincount(ids, minlength=len(graph))
        for what, bad in (("appears twice", count > 1), ("is missing", count < 1)):
            if bad.any():
                task = graph[int(np.argmax(bad))]
                on = np.flatnonzero(self.keys == graph.keys[task.index])
                where = ", ".join(sorted({str(self.lanes[i]) for i in self.lane_of_each()[on]}))
                raise self.error(f"task {task} {what}{f' on {where}' if where else ''}, {task.in_words}; every task "
                                 f"must appear exactly once", [int(graph.keys[task.index])])
        return ids

    def only(self, graph: TaskGraph) -> Schedule:
        """The schedule without the tasks that `graph` does not have, and without the lanes that are empty then."""
        return self.keep(graph.find(self.keys) >= 0)

    def keep(self, keep: NDArray[np.bool_]) -> Schedule:
        """The entries of the mask, without lanes that are empty then. One of a pair alone is no pair."""
        count = np.add.reduceat(np.append(keep, False), self.ptr[:-1]) * (np.diff(self.ptr) > 0)
        used = np.flatnonzero(count)
        joined = None if self.joined is None else (self.second & np.append(False, keep[:-1]))[keep]
        return Schedule(tuple(self.lanes[i] for i in used), offsets(count[used]), self.keys[keep], joined)

    def with_lanes(self, lanes: Mapping[Lane, Ints]) -> Schedule:
        """The schedule with more lanes, each after the other lanes of its rank. `lanes`: the keys of each, in order."""
        every = sorted([*self.lanes, *lanes], key=lambda lane: lane.rank)  # stable: a rank's own lanes stay first
        return self.followed_by({lane: lanes.get(lane, np.empty(0, np.int64)) for lane in every})

    def followed_by(self, more: Mapping[Lane, Ints]) -> Schedule:
        """The schedule with more entries at the end of lanes, or on lanes of their own. `more` has all
        lanes, in their order."""
        own = {lane: (self.order(i), self.second[self.ptr[i] : self.ptr[i + 1]]) for i, lane in enumerate(self.lanes)}
        none = np.empty(0, np.int64), np.empty(0, bool)
        keys = [np.concatenate([own.get(lane, none)[0], keys]) for lane, keys in more.items()]
        second = [np.concatenate([own.get(lane, none)[1], np.zeros(len(keys), bool)]) for lane, keys in more.items()]
        return Schedule.of_keys(more, keys, None if self.joined is None else np.concatenate(second))

    def actions(self) -> tuple[Ints, Ints]:
        """(each entry's action, where each lane begins among the actions). A pair is one action, else each entry."""
        if self.joined is None:
            return np.arange(len(self)), self.ptr
        first = ~self.second
        action = np.cumsum(first) - 1
        return action, np.append(action, first.sum())[self.ptr]

    def error(self, message: str, keys: Iterable[int] = ()) -> ScheduleError:
        keys = list(keys)
        return ScheduleError(message, [task_name(k) for k in keys], self.grid(mark=keys, near=True))

    # ------------------------------------------------------------------------------------------------------- proving
    def validate(self, graph: TaskGraph, waits: Ints | None = None) -> Schedule:
        """Proves that this schedule runs `graph` correctly; returns it with its slots.

        Checked, in this order: every task of the graph appears exactly once, and no task is unknown; no dependency
        contradicts the order of its lane or lies within a pair, whose results are visible at its end; no deadlock; no
        race: lane order and `waits` together order every edge within a rank. Edges between ranks are messages, and
        their readers wait for them. `waits`: pairs (waiting task, awaited task) of task ids; by default `self.waits`,
        which always suffice, so a race is possible only with waits from elsewhere.

        Raises ScheduleError that names the task.
        """
        ids = self.once(graph)
        place = spread(ids, np.arange(len(ids)), len(graph))  # entry of each task
        lane, first = self.lane_of_each(), self.first
        source, target = graph.preds.ids, graph.preds.row_of_each()
        before, after = place[source], place[target]
        against = (lane[before] == lane[after]) & (before > after)
        within = self.joined is not None and first[before] == first[after]
        for wrong, what in ((against, "{1} comes before {0} on lane {2} but needs it"),
                            (within, "{1} needs {0}, but they run as one action, and its results show at its end")):
            if np.any(wrong):
                edge = int(np.argmax(wrong))
                p, t = int(source[edge]), int(target[edge])
                said = what.format(graph.name(p), graph.name(t), self.lanes[lane[after[edge]]])
                raise self.error(said + _shared(graph, p, t), [int(graph.keys[p]), int(graph.keys[t])])
        held = self._held(graph, waits)
        done, slots, _ = self._run(graph, ids, held)
        if not done:
            raise self._deadlock(graph, ids, slots, held)
        if waits is not None:
            bad = np.flatnonzero(~self.clocks(graph, waits).ordered(source, target))
            if bad.size:
                p, t = int(source[bad[0]]), int(target[bad[0]])
                raise self.error(f"race: nothing orders {graph.name(t)} after {graph.name(p)}{_shared(graph, p, t)}; "
                                 f"add a wait", [int(graph.keys[p]), int(graph.keys[t])])
        return replace(self, slots=slots[ids])

    def _held(self, graph: TaskGraph, waits: Ints | None) -> Rows:
        """The tasks that each task awaits: by `waits` and by messages from other ranks. Without `waits`, every edge."""
        if waits is None:
            return graph.preds
        waits = np.asarray(waits, np.int64).reshape(-1, 2)
        rank = self.rank_of_tasks(graph)
        source, target = graph.preds.ids, graph.preds.row_of_each()
        across = rank[source] != rank[target]
        return Rows.from_pairs(np.append(waits[:, 0], target[across]),
                               np.append(waits[:, 1], source[across]), len(graph))

    def _run(self, graph: TaskGraph, ids: Ints, preds: Rows) -> tuple[bool, Ints, Ints]:
        """Runs the actions of all lanes in unit time. Returns whether all could run, the slot of each task (-1: never
        ran), and the tasks in an order in which they ran."""
        n, duration = len(ids), np.ones(len(ids))
        first: Ints = np.arange(n)
        if self.joined is not None:  # an action waits for all that it needs, and its results are visible at its end
            first, last = ends_of_actions(ids, self.second)
            preds, _ = preds.between(first, last)
            duration = (first == np.arange(n)).astype(np.float64)
        rank, nowhere, none = np.zeros(len(self.lanes), np.int64), np.zeros(0, np.int32), np.zeros(0)
        done, begin, _, _ = run_lanes(*prepared(n, self.ptr, ids, rank, nowhere, preds.ptr, preds.ids, duration, none,
                                                none, np.zeros(len(self.lanes))))
        slots = begin.astype(np.int64)[first]
        return done == n, slots, ids[np.argsort(slots[ids], kind="stable")]

    def _deadlock(self, graph: TaskGraph, ids: Ints, slots: Ints, preds: Rows) -> ScheduleError:
        """The error that names a circle: starts at an action that never ran and follows what it waits for."""
        action, ptr = self.actions()
        of_task = spread(ids, action, len(graph))
        members = Rows.from_pairs(action, ids, int(ptr[-1]))
        lane_starts = set(ptr.tolist())
        at, way = int(of_task[int(np.argmax(slots < 0))]), dict[int, int]()
        while at not in way:
            needs = [(int(t), int(p)) for t in members[at] for p in preds[int(t)] if slots[p] < 0 and of_task[p] != at]
            if not needs:  # it waits only for its lane
                assert at not in lane_starts
                needs = [(int(members[at][0]), int(members[at - 1][-1]))]
            way[at] = needs[0][0]
            at = int(of_task[needs[0][1]])
        cycle = list(way.values())[list(way).index(at) :]
        names = [graph.name(t) for t in cycle]
        return self.error(f"deadlock: {' waits for '.join([*names, names[0]])}", [int(graph.keys[t]) for t in cycle])

    def clocks(self, graph: TaskGraph, waits: Ints | None = None) -> Clocks:
        """The vector clocks: the tasks that have surely ended when each task starts, given lane order and `waits`
        (default: every edge of the graph)."""
        ids = self.ids(graph)
        preds = self._held(graph, waits)
        rank = self.rank_of_lane.astype(np.int32)
        local = np.array([sum(o.rank == lane.rank for o in self.lanes[:i]) for i, lane in enumerate(self.lanes)],
                         np.int32)
        lane_of, place, begin = (spread(ids, own, len(graph))
                                 for own in (self.lane_of_each(), self.place, self.place[self.first]))
        done, _, order = self._run(graph, ids, preds)
        if not done:
            raise self.error("deadlock: the lanes and waits cannot all run")
        clock = np.zeros((len(graph), int(local.max(initial=0)) + 1), np.int64)
        last: list[int] = [-1] * len(self.lanes)
        column = local[lane_of]
        for task in order.tolist():
            here = clock[task]
            before = last[lane_of[task]]
            if before >= 0:
                np.maximum(here, clock[before], out=here)
                here[column[task]] = begin[task]  # the other task of a pair has not surely ended
            for p in preds[task].tolist():
                if rank[lane_of[p]] == rank[lane_of[task]]:
                    np.maximum(here, clock[p], out=here)
                    here[column[p]] = max(here[column[p]], place[p] + 1)
            last[lane_of[task]] = task
        return Clocks(clock, column, place, rank[lane_of])

    def waits(self, graph: TaskGraph) -> Ints:
        """The fewest event waits that keep every edge, as pairs (waiting task, awaited task), in order of the waiter.

        A wait is left out where lane order and other waits already imply it (vector clocks within a rank). Edges
        between ranks need no wait: messages carry them.
        """
        ids = self.ids(graph)
        clocks = self.clocks(graph)
        lanes = spread(ids, self.lane_of_each(), len(graph)).tolist()
        ranks, column = clocks.rank.tolist(), clocks.column.tolist()
        place, clock, preds = clocks.place.tolist(), clocks.clock, graph.preds
        known: dict[int, Any] = {}  # per lane: the clock of its last task, its waits included
        found: list[tuple[int, int]] = []
        for task in ids[np.argsort(clocks.clock[ids].sum(axis=1), kind="stable")].tolist():
            lane = lanes[task]
            have = known.get(lane)
            if have is None:
                have = known[lane] = np.zeros(clock.shape[1], np.int64)
            latest: dict[int, int] = {}
            for p in preds[task].tolist():
                if lanes[p] != lane and ranks[p] == ranks[task] and have[column[p]] <= place[p]:
                    latest[lanes[p]] = max(latest.get(lanes[p], p), p, key=place.__getitem__)
            found += [(task, p) for p in latest.values()
                      if all(q == p or clock[q][column[p]] <= place[p] for q in latest.values())]
            np.maximum(have, clock[task], out=have)
            have[column[task]] = place[task] + 1
        return np.array(found, np.int64).reshape(-1, 2)

    def repeated(self, iterations: int) -> Schedule:
        """The same order in each of `iterations` iterations, one after the other on every lane; for an unrolled graph.

        Late tasks (`4W0@1`) run in the iteration after their own; the last iteration's run after it.
        """
        late, runs = unpack(self.keys).late, []
        for lane in range(len(self.lanes)):
            at = np.arange(self.ptr[lane], self.ptr[lane + 1])
            runs.append([(t, at[late[at] == 1 if t == iterations else late[at] <= t]) for t in range(iterations + 1)])
        keys = [np.concatenate([repack(self.keys[now], late=0, iteration=t - late[now]) for t, now in r]) for r in runs]
        joined = None if self.joined is None else self.joined[np.concatenate([now for r in runs for _, now in r])]
        return Schedule.of_keys(self.lanes, keys, joined)

    # ------------------------------------------------------------------------------------------------ text and files
    def grid(self, width: int = 110, mark: Iterable[int] = (), near: bool = False) -> str:
        """Lanes as rows, time as columns: unit times with gaps after `validate`, plain order before.

        `mark`: keys shown in [brackets]. `near`: only the part around the first of them. Wrapped at `width` columns.
        """
        marked = np.isin(self.keys, list(mark))
        title = max((len(str(lane)) for lane in self.lanes), default=0) + 2
        entries, first = np.arange(len(self)), self.first
        slots = (self.place if self.slots is None else np.asarray(self.slots, np.int64))[first]
        focus = int(slots[np.argmax(marked)]) if marked.any() else None
        if near and focus is not None:  # more does not fit
            entries = entries[np.abs(slots - focus) <= width]
        lane_of = self.lane_of_each()
        rows: list[dict[int, str]] = [{} for _ in self.lanes]
        for entry in entries.tolist():
            row, slot, name = rows[lane_of[entry]], int(slots[entry]), task_name(self.keys[entry])
            name = f"[{name}]" if marked[entry] else name
            row[slot] = f"{row[slot]}&{name}" if first[entry] != entry and slot in row else name
        cell = max((len(name) for row in rows for name in row.values()), default=1) + 1
        columns = max(1, (width - title) // cell)
        end = int(slots.max(initial=-1)) + 1
        starts = list(range(0, end, columns))
        if near and focus is not None and end > columns:
            starts = [max(0, min(focus - columns // 2, end - columns))]
        blocks = []
        for start in starts:
            lines = [str(lane).ljust(title) + "".join(row.get(s, "·" if self.slots is not None else "").ljust(cell)
                                                     for s in range(start, min(start + columns, end)))
                     for lane, row in zip(self.lanes, rows, strict=True)]
            blocks.append("\n".join(line.rstrip() for line in lines))
        return "\n\n".join(blocks)

    def to_csv(self) -> str:
        """`rank,lane,task`, rows in lane order, after a line `# name: text` for each of the notes."""
        out = io.StringIO()
        out.writelines(f"# {name}: {text}\n" for name, text in self.notes.items())
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(HEADER)
        for i, lane in enumerate(self.lanes):
            writer.writerows([lane.rank, lane.name, name] for name in self.names(i))
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str, where: str = "the plan") -> Schedule:
        """The inverse of `to_csv`. Raises ScheduleError that names the line."""
        notes, text, begin = split_notes(text, where)
        lines = cells_by_line(text, where, begin)
        if [*islice(next(lines, (1, iter(())))[1], 4)] != HEADER:
            raise ScheduleError(f"{where}, line {begin + 1}: expected the header {','.join(HEADER)}")
        read = _Actions()
        for number, line in lines:
            try:
                match [*islice(line, 4)]:
                    case [rank, lane, name]:
                        read.add(_lane(rank, lane), [name])
                    case [] | [""]:
                        continue
                    case cells:
                        raise GraphError(f"expected 3 cells, found {len(cells) if len(cells) < 4 else '4 or more'}")
            except GraphError as error:
                raise ScheduleError(f"{where}, line {number}: {error}") from None
        return replace(read.schedule(), notes=notes)

    def save(self, path: str | Path) -> None:
        """Writes the CSV whole or not at all."""
        from ..system.files import write_atomic

        write_atomic(path, self.to_csv())

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Raises ScheduleError for a file that is not a plan, OSError for one that cannot be read."""
        return cls.from_csv(text_of(path), str(path))

    def diff(self, other: Schedule) -> str:
        """The changes from this schedule to the other, as a unified diff of their rows; empty if they are equal."""
        return "".join(difflib.unified_diff(self.to_csv().splitlines(True), other.to_csv().splitlines(True),
                                            "this", "other", n=1))


@dataclass(frozen=True)
class Clocks(Columns):
    """Vector clocks: `clock[t, c]` tasks of the c-th lane of t's rank have surely ended when t starts.

    `column[t]` is t's own lane within its rank, `place[t]` its position there, `rank[t]` its rank.
    """

    clock: Ints
    column: Ints
    place: Ints
    rank: Ints

    def ordered(self, before: Any, after: Any) -> Any:
        """Whether task(s) `before` have surely ended when task(s) `after` start; true for edges between ranks."""
        return (self.clock[after, self.column[before]] > self.place[before]) | (self.rank[before] != self.rank[after])


class _Actions:
    """The part of a schedule read so far: eight bytes per task, however long its name."""

    def __init__(self) -> None:
        self.lanes: dict[Lane, tuple[array[int], bytearray]] = {}

    def add(self, lane: Lane, names: Iterable[str]) -> None:
        """Adds actions at the end of a lane. Raises GraphError for an unreadable name, and for too many lanes."""
        if lane not in self.lanes and len(self.lanes) == MOST_LANES:
            raise GraphError(f"more than {MOST_LANES} lanes")
        keys, joined = self.lanes.setdefault(lane, (array("q"), bytearray()))
        for name in names:
            action = parse_action(name)
            keys.extend(action)
            joined.extend([0] + [1] * (len(action) - 1))

    def schedule(self) -> Schedule:
        orders = [np.frombuffer(keys, np.int64) for keys, _ in self.lanes.values()]
        joined = np.concatenate([np.frombuffer(joined, bool) for _, joined in self.lanes.values()]
                                or [np.empty(0, bool)])
        return Schedule.of_keys(self.lanes, orders, joined if joined.any() else None)


def _lane(rank: str, name: str) -> Lane:
    """The lane of these two cells. Raises GraphError if the rank is not a number or the name is unreadable."""
    if not (rank.isascii() and rank.isdecimal() and name):
        raise GraphError(f"rank {rank[:40]!r} and lane {name[:40]!r} must be a number and a name")
    if len(rank) > 9 or int(rank) >= MOST_LANES:
        raise GraphError(f"rank {rank[:40]} is too large (at most {MOST_LANES - 1})")
    if len(name) > 100 or not name.isprintable():
        raise GraphError(f"lane {name[:40]!r} must be a name of at most 100 printable characters")
    return Lane(int(rank), name)


def text_of(path: str | Path) -> str:
    """The text of a plan's file. Raises ScheduleError if it is not text, OSError if it cannot be read."""
    from ..system.files import read_text

    try:
        return read_text(path, "plan")
    except ValueError as error:
        raise ScheduleError(str(error)) from None


def split_notes(text: str, where: str) -> tuple[dict[str, str], str, int]:
    """A plan's notes, the rest of its text, and the number of lines before that. Raises ScheduleError."""
    notes: dict[str, str] = {}
    number = begin = 0
    while text.startswith("#", begin):
        end = text.find("\n", begin)
        end = len(text) if end < 0 else end
        number += 1
        name, colon, value = (part.strip() for part in text[begin + 1 : end].partition(":"))
        if colon and name in notes:
            raise ScheduleError(f"{where}, line {number}: {name[:40]!r} is there twice")
        if colon:
            notes[name] = value
        begin = end + 1
    return notes, text[begin:], number


def cells_by_line(text: str, where: str, before: int = 0) -> Iterator[tuple[int, Iterator[str]]]:
    """The number of each line of a CSV, and its cells without the blanks around them. A cell cannot span lines.
    `before`: the number of lines before this text.

    Needs little memory, however many cells a line has. Raises ScheduleError.
    """
    begin, number = 0, before
    while begin < len(text):
        number += 1
        end = text.find("\n", begin)
        end = len(text) if end < 0 else end
        if text.find('"', begin, end) < 0:
            yield number, _cells(text, begin, end)
        else:
            if end - begin > 1 << 20:
                raise ScheduleError(f"{where}, line {number}: a line with quotes is longer than 1 MiB")
            try:
                cells = next(csv.reader([text[begin:end]], strict=True), [])
            except csv.Error as error:
                raise ScheduleError(f"{where}, line {number}: {error}") from None
            yield number, (cell.strip() for cell in cells)
        begin = end + 1


def _cells(text: str, begin: int, end: int) -> Iterator[str]:
    while begin <= end:
        comma = text.find(",", begin, end)
        comma = end if comma < 0 else comma
        yield text[begin:comma].strip()
        begin = comma + 1


def parse_action(name: str) -> list[int]:
    """The keys of one action: `4W0` alone, or `(2F3;5B1)` together. Raises GraphError."""
    if len(name) > 1000:  # a pair has two
        raise GraphError(f"{name[:40]!r} is neither a task name nor a pair such as (2F3;5B1)")
    name = name.strip()
    parts = name[1:-1].split(";") if name.startswith("(") and name.endswith(")") else [name]
    return [parse_task(part) for part in parts]


def _shared(graph: TaskGraph, source: int, target: int) -> str:
    """Text that names a buffer because of which one task must follow the other."""
    wrote, read = {*graph.writes[source].tolist()}, {*graph.reads[source].tolist()}
    for own, theirs, verb, more in (
            (graph.reads[target], wrote, "reads", ""), (graph.writes[target], wrote, "writes", ""),
            (graph.writes[target], read, "overwrites", f", which {graph.name(source)} reads")):
        if shared := [b for b in own.tolist() if b in theirs]:
            return f": it {verb} {graph.buffer(shared[0]).name}{more}"
    return ""


@dataclass(frozen=True)
class RankGrid:
    """The grid of a job's ranks: `replicas` of a schedule for `ranks` ranks. Data parallelism alone is a schedule for
    one rank with one replica per rank; a pipeline alone is one replica. A job's ranks are numbered replica by replica:
    rank r of the job is rank `r % ranks` of replica `r // ranks`."""

    ranks: int
    replicas: int = 1

    @property
    def size(self) -> int:
        """The number of ranks of the job."""
        return self.ranks * self.replicas

    def place(self, rank: int) -> tuple[int, int]:
        """(replica, rank within the replica) of a rank of the job."""
        return divmod(rank, self.ranks)

    def group(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same place in every replica: they hold the same stages, and sum their gradients."""
        return tuple(range(rank % self.ranks, self.size, self.ranks))
