"""Lanes that one thread runs: when it is free, it takes the first task that is ready, in the order of a hint."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from ..core.columns import grouped
from ..kernels import Thunk
from .lanes import CLOSED, LaneError, Stop, Work


class Picking:
    """`place`: of each task in the hint. `order`: an order that replaces the hint; each of its tasks waits until it can
    run. `realised`: the tasks of the last run in the order in which they ran. Other parts are as in `Threads`."""

    def __init__(self, work: Work, place: Mapping[int, int], trace: bool = False) -> None:
        self.work, self.trace, self._place = work, trace, place
        self.order: Sequence[int] = ()
        self.realised: list[int] = []
        self._at = -1  # the task that runs
        self._lane = {t: lane for lane, tasks in enumerate(work.tasks) for t in tasks}
        self._stamps: list[list[float]] = [[] for _ in work.tasks]
        self._calls = {t: self._of(t) for t in self._lane}
        self._polls = {t: work.polls(t) for t in self._lane}
        waits = {*work.waits, *((after, before) for tasks in work.tasks for before, after in pairwise(tasks))}
        self._next = grouped((source, waiter) for waiter, source in waits)
        self._missing = dict.fromkeys(self._lane, 0) | Counter(waiter for waiter, _ in waits)
        self.given_up: list[Stop] = []  #: why the run must end, if it must: a call that waits returns then
        self.close = weakref.finalize(self, self.given_up.append, Stop(RuntimeError(CLOSED)))

    def _of(self, task: int) -> list[Thunk]:
        append, stamp = self._stamps[self._lane[task]].append, list[Thunk]()
        if self.trace:
            stamp = [lambda: append(perf_counter())]
        work = self.work
        return [*stamp, *work.before(task, None), *stamp, *work.calls(task, None), *stamp, *work.after(task, None)]

    def run(self) -> None:
        """Runs all tasks once. Raises LaneError for a task that failed."""
        for stamps in self._stamps:
            stamps.clear()
        place = {t: i for i, t in enumerate(self.order)} or self._place
        missing, ran = dict(self._missing), list[int]()
        ready, coming = list[tuple[int, int]](), dict[int, list[Any]]()
        self.realised = ran

        def comes(task: int) -> None:
            if self._polls[task]:
                coming[task] = [*self._polls[task]]
            else:
                heappush(ready, (place[task], task))

        def any_ready() -> bool:
            for task, polls in [*coming.items()]:
                while polls and polls[-1]():
                    polls.pop()
                if not polls:
                    del coming[task]
                    heappush(ready, (place[task], task))
            return bool(ready) and (not self.order or ready[0][0] == len(ran))

        for task, count in missing.items():
            if not count:
                comes(task)
        while len(ran) < len(missing):
            if not any_ready():
                assert self.work.idle is not None
                self.work.idle(any_ready, min(coming, key=place.__getitem__))
                if self.given_up:
                    raise self.given_up[0].error or RuntimeError(CLOSED)
                continue
            _, task = heappop(ready)
            self._at = task
            self._run(task)
            ran.append(task)
            self._at = -1
            for waiter in self._next.get(task, ()):
                missing[waiter] -= 1
                if not missing[waiter]:
                    comes(waiter)

    def where(self) -> list[tuple[int, Any]]:
        """As of `Threads`; a lane is between two tasks while none of its tasks is chosen."""
        ran, at = [*self.realised], self._lane.get(self._at, -1)
        done = [sum(self._lane[t] == lane for t in ran) for lane in range(len(self._stamps))]
        return [(3 * count + 2 * (lane == at and self._at not in ran), np.array(self._stamps[lane]))
                for lane, count in enumerate(done)]

    def _run(self, task: int) -> None:
        try:
            with np.errstate(all="ignore"):
                for call in self._calls[task]:
                    call()
        except Exception as error:
            raise LaneError(error, task, self._lane[task]) from error

    def give_up(self, stop: Stop) -> None:
        """Ends a run, from any thread, as soon as it waits."""
        self.given_up.append(stop)

    def stamps(self) -> list[Any]:
        """As `Threads.stamps`."""
        return [np.array(s).reshape(-1, 3) for s in self._stamps]
