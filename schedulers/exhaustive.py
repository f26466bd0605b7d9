"""The shortest order of a few tasks on two streams, by branch and bound: for graphs so small that this is cheap.

It knows only predecessors, durations and the cost of a wait; no contention and no iteration boundary.
"""

from __future__ import annotations

from collections.abc import Sequence

Orders = list[list[int]]  #: the tasks of both streams in order


def shortest(preds: Sequence[Sequence[int]], duration: Sequence[float], sync: float, known: float,
             effort: int) -> tuple[float, Orders | None, int]:
    """(makespan, orders, effort left) of the best orders shorter than `known`; (`known`, None, ..) without any. If some
    effort is left, nothing shorter exists.

    `effort`: how many partial orders to try. `sync`: the time from the end of a task to the start of a task on the
    other stream that waits for it. Ids must be in a legal order.
    """
    search = _Search(preds, duration, sync, known, effort)
    search.extend(0, (0.0, 0.0), sum(duration))
    return search.best, search.found, search.effort


class _Search:
    def __init__(self, preds: Sequence[Sequence[int]], duration: Sequence[float], sync: float, known: float,
                 effort: int) -> None:
        self.preds, self.duration, self.sync, self.best, self.effort = preds, duration, sync, known, effort
        count = len(duration)
        self.succs: list[list[int]] = [[] for _ in range(count)]
        for task, before in enumerate(preds):
            for p in before:
                self.succs[p].append(task)
        self.tail = list(duration)  # the longest path from a task's start to the end
        for task in reversed(range(count)):
            self.tail[task] += max((self.tail[s] for s in self.succs[task]), default=0.0)
        self.by_tail = sorted(range(count), key=lambda t: (-self.tail[t], t))
        self.all = (1 << count) - 1
        self.order: Orders = [[], []]
        self.end: dict[int, float] = {}
        self.lane: dict[int, int] = {}
        self.seen: set[object] = set()
        self.found: Orders | None = None

    def extend(self, done: int, free: tuple[float, float], rest: float) -> None:
        """Tries all continuations of `order`. `done`: its tasks as bits; `free`: when each stream is free; `rest`: the
        remaining work."""
        if done == self.all:
            if max(free) < self.best * (1 - 1e-9):
                self.best, self.found = max(free), [list(lane) for lane in self.order]
            return
        limit = self.best * (1 - 1e-9)
        if self.effort <= 0 or (sum(free) + rest) / 2 >= limit or self._known(done, free):
            return
        self.effort -= 1
        ready = [t for t in self.by_tail if not done >> t & 1 and all(done >> p & 1 for p in self.preds[t])]
        starts = [[max(free[lane], *(self.end[p] + self.sync * (self.lane[p] != lane) for p in self.preds[t]), 0.0)
                   for lane in (0, 1)] for t in ready]
        if any(min(at) + self.tail[t] >= limit for t, at in zip(ready, starts, strict=True)):
            return
        for t, at in zip(ready, starts, strict=True):
            for lane in sorted((0, 1), key=lambda lane: at[lane]):
                if lane and not self.order[0] and not self.order[1]:
                    continue  # both streams are equal here
                end = at[lane] + self.duration[t]
                self.order[lane].append(t)
                self.end[t], self.lane[t] = end, lane
                self.extend(done | 1 << t, (free[0], end) if lane else (end, free[1]), rest - self.duration[t])
                self.order[lane].pop()
                del self.end[t], self.lane[t]

    def _known(self, done: int, free: tuple[float, float]) -> bool:
        """Whether an earlier partial order led to the same state."""
        open_ends = tuple((t, self.lane[t], end) for t, end in sorted(self.end.items())
                          if end + self.sync > min(free) and any(not done >> s & 1 for s in self.succs[t]))
        before = len(self.seen)
        self.seen.add((done, free, open_ends))
        return len(self.seen) == before
