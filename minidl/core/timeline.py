"""The times of a run: one record per task, and separate records for waits and transfers.

A predicted and a measured timeline are the same type, so they are reported, drawn and compared alike. Times are
microseconds, or in the unit of the costs. A timeline holds no graph, only copies of what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import report as reports
from . import trace as traces
from .columns import Content, Floats, Ints, offsets, spread
from .schedule import Lane
from .tasks import MESSAGES, RECEIVES, What, task_name, unpack
from .work import Work

COLUMNS = ("what", "key", "lane", "issued", "start", "end", "bytes")  #: of a timeline, one row for each record


@dataclass(frozen=True)
class Timeline(Content):
    """Columns, one row per record, in no order: what, key (of the task), lane (index), issued, start, end, bytes.

    `edges` are pairs of records that depend on each other across lanes (producer, consumer), and `arrived` is when
    the consumer could see the result: by default at the producer's end. Tasks of a lane with the same start and end
    (some time apart) are one action. `labels` names units. `peak_bytes` is the memory plan's, if there is one. `work`:
    of the tasks, if it is known.
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
    arrived: Floats | None = None
    labels: tuple[str, ...] = ()
    peak_bytes: int | None = None
    predicted: bool = False
    unit: str = "us"
    meta: dict[str, Any] = field(default_factory=dict)
    work: Work | None = None

    @classmethod
    def of_tasks(cls, lanes: Sequence[Lane], key: Any, lane: Any, start: Any, end: Any, *, bytes: Any = None,
                 edges: Any = (), arrived: Any = None, **rest: Any) -> Timeline:
        """The timeline of these tasks, issued as they start, with the waits and transfers that follow from them and
        from `edges`: a lane that has ended a task waits until the last producer of its next task has ended; the time
        from there to the arrival is a transfer if that producer is on another rank."""
        start, end = np.asarray(start, np.float64), np.asarray(end, np.float64)
        count = np.zeros(len(start), np.int64) if bytes is None else np.asarray(bytes, np.int64)
        tasks = cls(tuple(lanes), np.zeros(len(start), np.int8), np.asarray(key, np.int64), np.asarray(lane, np.int32),
                    start, start, end, count, np.asarray(edges, np.int64).reshape(-1, 2),
                    None if arrived is None else np.asarray(arrived, np.float64), **rest)
        first, free, _ = tasks.actions
        producer, arrivals = tasks.last_arrival
        at = tasks.tasks[first]
        producer, arrivals = producer[at], arrivals[at]
        known = producer >= 0
        rank = tasks.rank_of_each
        sent = np.where(known & (rank[producer] != rank[at]), end[producer], arrivals) if len(at) else arrivals
        sent = np.clip(sent, free, np.maximum(free, start[at]))
        arrivals = np.clip(arrivals, sent, np.maximum(sent, start[at]))
        least = 1e-9 * tasks.makespan  # shorter gaps are rounding errors
        waits, moves = np.flatnonzero(known & (sent - free > least)), np.flatnonzero(known & (arrivals - sent > least))
        extra = np.concatenate([at[waits], at[moves]])
        begin = np.concatenate([free[waits], sent[moves]])
        what = np.repeat([What.TASK, What.WAIT, What.TRANSFER], [len(start), len(waits), len(moves)])
        return replace(
            tasks, what=what.astype(np.int8), key=np.concatenate([tasks.key, tasks.key[extra]]),
            lane=np.concatenate([tasks.lane, tasks.lane[extra]]), issued=np.concatenate([tasks.issued, begin]),
            start=np.concatenate([start, begin]), end=np.concatenate([end, sent[waits], arrivals[moves]]),
            bytes=np.concatenate([count, np.zeros(len(waits), np.int64), count[at[moves]]]))

    @classmethod
    def of_ranks(cls, own: Sequence[Timeline], ahead: Sequence[float],
                 messages: Sequence[Mapping[int, int]]) -> Timeline:
        """The timeline of all ranks, on rank 0's clock, from the timelines that they have measured.

        `ahead[r]`: by how many seconds the clock of rank r is ahead of rank 0's. `messages[r]`: key of a send or
        receive of rank r -> number of its message. A receive begins when its send does, since nothing was on its way
        before. So the time in which a lane stood still is a wait until then, and a transfer from then on.
        """
        begin, count = [(t.meta["begin_s"] - a) * 1e6 for t, a in zip(own, ahead, strict=True)], [*map(len, own)]
        what, key, lane, issued, start, end, size = (np.concatenate([getattr(t, name) for t in own])
                                                     for name in COLUMNS)
        rank, shift = np.repeat(np.arange(len(own)), count), np.array(begin) - min(begin)
        issued, start, end = (times + shift[rank] for times in (issued, start, end))
        lane = lane + offsets([len(t.lanes) for t in own])[rank]
        tasks = np.flatnonzero(what == What.TASK)
        # for each message, the records of its send and of its receive
        ends: tuple[dict[int, int], dict[int, int]] = {}, {}
        for i, r, k in zip(tasks.tolist(), rank[tasks].tolist(), key[tasks].tolist(), strict=True):
            if k in messages[r]:
                ends[int(unpack(k).kind in RECEIVES)][messages[r][k]] = i
        met = np.array([(ends[0][n], ends[1][n]) for n in ends[0] if n in ends[1]], np.int64).reshape(-1, 2)
        late = unpack(key).late
        met = met[late[met[:, 0]] == late[met[:, 1]]]  # others were sent in the step before
        sent, got = met.T
        start[got] = np.clip(start[sent], start[got], end[got])
        inside = np.concatenate([t.edges + base for t, base in zip(own, offsets(count), strict=False)])
        on_way = np.full(len(key), -np.inf)  # for each record, when the last message that it needs was sent
        needs = inside[spread(got, True, len(key))[inside[:, 0]]]
        np.maximum.at(on_way, needs[:, 1], start[needs[:, 0]])
        waits = np.flatnonzero(what == What.WAIT)
        task_of = dict(zip(zip(key[tasks], lane[tasks], strict=True), tasks.tolist(), strict=True))
        waiter = np.array([task_of[pair] for pair in zip(key[waits], lane[waits], strict=True)], np.int64)
        since = np.clip(on_way[waiter], start[waits], end[waits])
        moves = np.flatnonzero((on_way[waiter] > -np.inf) & (since < end[waits]))
        extra = waits[moves]
        until = end[extra]
        end[extra] = since[moves]
        again = np.append(np.arange(len(key)), extra)
        return cls(tuple(x for t in own for x in t.lanes),
                   np.append(what, np.full(len(extra), What.TRANSFER)).astype(np.int8), key[again], lane[again],
                   np.append(issued, since[moves]), np.append(start, since[moves]), np.append(end, until),
                   np.append(size, np.zeros(len(extra), np.int64)), edges=np.concatenate([inside, met]),
                   arrived=np.append(end[inside[:, 0]], start[got]), labels=own[0].labels,
                   peak_bytes=max((t.peak_bytes or 0 for t in own), default=0) or None, unit="us")

    def without_free_messages(self) -> Timeline:
        """Without the lanes of messages that take no time, such as those on a link that costs latency alone."""
        tasks = self.what == What.TASK
        busy = np.zeros(len(self.lanes), bool)
        busy[self.lane[tasks & ((self.end > self.start) | ~np.isin(unpack(self.key).kind, MESSAGES))]] = True
        found = self._keep(busy[self.lane])
        return replace(found, lane=(np.cumsum(busy) - 1)[found.lane].astype(self.lane.dtype),
                       lanes=tuple(lane for lane, has in zip(self.lanes, busy.tolist(), strict=True) if has))

    def __len__(self) -> int:
        return len(self.key)

    def __repr__(self) -> str:
        """`<Timeline predicted: makespan 339.8 us, 17 tasks on 1 lane>`; `print(timeline.report())` says more."""
        return f"<Timeline {reports.title(self)}>"

    def _repr_svg_(self) -> str:
        """The timeline as a picture, for notebooks."""
        from .draw import timeline_svg

        return timeline_svg(self)

    def name(self, record: int) -> str:
        return task_name(self.key[record])

    def label(self, record: int) -> str:
        """The task's name, and the name of its unit if it has one: `4W0 layers.2`."""
        return reports.labelled(self.labels, self.name(record), int(unpack(self.key[record]).unit))

    @cached_property
    def tasks(self) -> Ints:
        """The records that are tasks, lane by lane in the order they ran."""
        tasks = np.flatnonzero(self.what == What.TASK)
        return tasks[np.lexsort((self.end[tasks], self.start[tasks], self.lane[tasks]))]

    @property
    def makespan(self) -> float:
        """From the first start to the last end of a task."""
        return float(self.end[self.tasks].max() - self.begin) if len(self.tasks) else 0.0

    @property
    def begin(self) -> float:
        """The first start of a task."""
        return float(self.start[self.tasks].min()) if len(self.tasks) else 0.0

    def of_rank(self, rank: int) -> Timeline:
        """The records of one rank, and the edges within it."""
        return self._keep(self.rank_of_each == rank)

    def _keep(self, keep: NDArray[np.bool_]) -> Timeline:
        """The records of the mask, and the edges between them."""
        inside = keep[self.edges].all(axis=1)
        return replace(self, edges=(np.cumsum(keep) - 1)[self.edges[inside]],
                       arrived=None if self.arrived is None else self.arrived[inside],
                       **{name: getattr(self, name)[keep] for name in COLUMNS})

    def in_unit(self, unit: str) -> Timeline:
        """The same times in another unit. Raises ValueError if the length of either unit is not known."""
        if unit == self.unit:
            return self
        if unit not in reports.UNITS or self.unit not in reports.UNITS:
            raise ValueError(f"cannot compare times in {self.unit or 'an unknown unit'} with times in "
                             f"{unit or 'an unknown unit'}; give the costs in {', '.join(reports.UNITS)}")
        scale = reports.UNITS[self.unit] / reports.UNITS[unit]
        return replace(self, issued=self.issued * scale, start=self.start * scale, end=self.end * scale, unit=unit,
                       arrived=None if self.arrived is None else self.arrived * scale)

    @cached_property
    def actions(self) -> tuple[Ints, Floats, Ints]:
        """For each action (tasks of a lane that start and end together): the index of its first task in `tasks`, when
        its lane was free for it, and its number of tasks."""
        tasks = self.tasks
        if not len(tasks):
            return np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64)
        lane, start, end = self.lane[tasks], self.start[tasks], self.end[tasks]
        new_lane = np.append(True, lane[1:] != lane[:-1])
        same = ~new_lane & (start == np.roll(start, 1)) & (end == np.roll(end, 1)) & (end > start)
        first = np.flatnonzero(~same)
        # the latest end before each action on its lane: a running maximum that restarts on every lane
        latest = np.full(len(first), self.begin)
        for piece in np.split(np.arange(len(first)), np.flatnonzero(new_lane[first])[1:]):
            latest[piece[1:]] = np.maximum.accumulate(end[first[piece]])[:-1]
        return first, latest, np.diff(np.append(first, len(tasks)))

    @cached_property
    def last_arrival(self) -> tuple[Ints, Floats]:
        """For every record, the producer whose result arrived last at its action (-1: no producer), and when."""
        arrived = self.end[self.edges[:, 0]] if self.arrived is None else self.arrived
        producer, arrivals = np.full(len(self), -1, np.int64), np.full(len(self), -np.inf)
        order = np.argsort(arrived, kind="stable")
        producer[self.edges[order, 1]], arrivals[self.edges[order, 1]] = self.edges[order, 0], arrived[order]
        tasks = self.tasks
        first, _, size = self.actions
        for a in np.flatnonzero(size > 1):
            members = tasks[first[a] : first[a] + size[a]]
            last = members[np.argmax(arrivals[members])]
            producer[members], arrivals[members] = producer[last], arrivals[last]
        return producer, arrivals

    @property
    def rank_of_each(self) -> Ints:
        """The rank of each record."""
        return np.array([lane.rank for lane in self.lanes], np.int64)[self.lane]

    @cached_property
    def durations(self) -> Floats:
        """How long each record took; the tasks of one action share its time equally."""
        took = self.end - self.start
        tasks = self.tasks
        _, _, size = self.actions
        took[tasks] /= np.repeat(size, size)
        return took

    # ------------------------------------------------------------------------------------------------- text and files
    summary = reports.summary
    report = reports.report
    save = traces.save

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Reads what `save` wrote, exact to the nanosecond. Raises ValueError for any other file."""
        return traces.load(path, cls)
