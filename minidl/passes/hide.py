"""Exchanges are hidden: while the rows of experts travel, a rank computes what does not wait for them.

Dispatch and combine are on the chain of forwards and output gradients, so a rank that runs its tasks as they were
recorded stands still at each of them, forward and backward. With `hide`, by the known times of tasks (list scheduling):

- `weights`: in each wait runs the first task of the chain that is ready, such as a shared expert, or else weight
  gradients that are ready: the latest ones that fit into what is left of the wait. The others stay where they are,
  so sums of gradients start as early as before;
- `two_batches`: besides, two micro-batches take turns: one computes while the rows of the other travel.

The order is the best of a few, and the given one is among them: no choice is predicted to be slower. Seen in
Megatron-LM #3795, DualPipe and DisagMoE (2605.11005); the rules are ours. `lag` bounds how long weight gradients wait.
All orders within the graph's edges are bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from ..core.columns import Floats
from ..core.graph import TaskGraph
from ..core.machine import PlanError, shorten
from ..core.placement import Refused
from ..core.schedule import Schedule, ScheduleError
from ..core.tasks import COMMUNICATION, SUMS, Kind, unpack
from ..pricing.simulation import SAME, Carried, Clock, Lanes
from .boundary import loop
from .draft import Draft
from .one_lane import with_exchanges

TURNS = {"none": 0, "weights": 1, "two_batches": 2}  #: how many micro-batches take turns
CHAIN = (Kind.F, Kind.O, Kind.B, Kind.R, Kind.Q, Kind.W)  #: the kinds that may overtake others of the chain
Orders = tuple[list[int], list[int]]  #: of the tasks that compute, without late updates, and of exchanges


def exchanges_hidden(draft: Draft, hide: str = "none") -> Draft:
    """The order in which tasks that do not wait for an exchange run beside it; or the given one, with a remark, if no
    other is faster. Raises PlanError for another choice, and Refused for a step without exchanges, one that computes on
    several lanes or communicates on them, or two_batches with a single micro-batch."""
    if hide not in TURNS:
        raise PlanError(f"hide is {shorten(hide)}; it must be {', '.join(TURNS)}")
    if not (draft.graph.kind == Kind.X).any():
        raise Refused("hide", "the step exchanges nothing", "leave hide out, or let ranks share experts")
    if hide == "two_batches" and draft.micro_batches < 2:
        raise Refused("hide", "a single micro-batch has none to take turns with", "give --micro-batches 2")
    order = draft.order
    if hide == "none":
        return draft
    talks = [np.isin(unpack(order.order(i)).kind, COMMUNICATION) for i in range(len(order.lanes))]
    if [lane.all() for lane in talks] != [False, True] or talks[0].any():
        raise Refused("hide", f"{draft.name} does not compute on one lane and communicate on another",
                      "take another policy, or leave hide out")
    step = _Step.of(draft)
    found = [order, *{made.keys.tobytes(): made for made in step.orders(TURNS[hide])}.values()]
    periods = [step.clock.period(Lanes.of(step.body, each)) for each in found]
    if min(periods) < periods[0] * (1 - SAME):
        return replace(draft, schedule=found[int(np.argmin(periods))])
    return replace(draft, remarks=(*draft.remarks, f"hide={hide}: nothing is left that hides an exchange, so the order "
                                   "is the policy's"))


@dataclass(frozen=True)
class _Step:
    """A step in its policy's order, and its clock. `body`: its graph as it repeats; `main`: the tasks that compute;
    `sums`: of gradients; `riders`: late updates, each with the task before which it runs; `fillers`: weight gradients
    that no task of the chain awaits."""

    order: Schedule
    body: TaskGraph
    clock: Clock
    main: list[int]
    sums: list[int]
    riders: dict[int, list[int]]
    fillers: set[int]

    @classmethod
    def of(cls, draft: Draft) -> _Step:
        body, order = loop(draft.graph, draft.order).body[0], draft.order
        main, riders, before = list[int](), dict[int, list[int]](), list[int]()
        for t in body.find(order.order(0)).tolist():
            if body.late[t]:
                before.append(t)
            else:
                main.append(t)
                riders[t], before = before, []
        riders |= {t: [] for t in before}  # late tasks that come last
        awaited, succs = ~np.isin(body.kind, (Kind.W, Kind.U, *SUMS)), body.unfenced.succs
        for t in np.flatnonzero(body.kind == Kind.W)[::-1].tolist():
            awaited[t] = awaited[succs[t]].any()
        fillers = {t for t in main if body.kind[t] == Kind.W and not awaited[t]}
        sums = [t for t in body.find(order.order(1)).tolist() if body.kind[t] != Kind.X]
        return cls(order, body, Clock.of(body, draft.priced, Lanes.of(body, order), Carried.of(body)), main + before,
                   sums, riders, fillers)

    def orders(self, turns: int) -> Iterator[Schedule]:
        """Other orders to choose from."""
        ways = [(1, False), (turns, False), (turns, True)][: 2 * turns - 1]
        for way, *rules in product(ways, (False, True), (True, False), (True, False)):
            walked, exchanges = _Walk(self, *way, *rules).orders()
            main = [t for task in walked for t in (*self.riders[task], task)]
            try:
                talks = with_exchanges(self.body, self.clock, main, exchanges, self.sums)
            except ScheduleError:
                continue
            yield Schedule.of_keys(self.order.lanes, [self.body.keys[main], self.body.keys[talks]],
                                   notes=self.order.notes)

    @cached_property
    def tails(self) -> Floats:
        """The longest way from the beginning of each task to the end of the step."""
        found = self.clock.duration.copy()
        for t in range(len(self.body) - 1, -1, -1):
            found[t] += found[self.body.succs[t]].max(initial=0.0)
        return found


class _Walk:
    """One pass over the chain by known times. `turns`: how many micro-batches may overtake each other; `in_turn`: they
    go task by task, not one before the other; `critical`: of the tasks that are ready, the one with the longest way to
    the end goes first; `nearest`: the latest weight gradients fill a wait, not the longest; `overflow`: one that is
    longer than the wait may begin."""

    def __init__(self, step: _Step, turns: int, in_turn: bool, critical: bool, nearest: bool, overflow: bool) -> None:
        self.step, self.time, self.sync = step, step.clock.duration.tolist(), step.clock.sync
        self.turns, self.nearest, self.overflow = turns, nearest, overflow
        self.preds, self.succs = step.body.preds.lists(), step.body.succs.lists()
        self.kind, self.micro = step.body.kind.tolist(), step.body.micro_batch.tolist()
        chain = [t for t in step.main if t not in step.fillers]
        self.left = self._in_turn(chain) if in_turn else chain
        self.rank = {t: (-tail if critical else 0.0, i) for i, (t, tail) in enumerate(
            zip(self.left, step.tails[self.left].tolist(), strict=True))}
        self.held = [t for t in step.main if t in step.fillers]
        self.chain, self.exchanges = list[int](), list[int]()  # as they ran
        self.placed = dict[int, int]()  # filler -> how many of the chain came before it
        self.end, self.now, self.free = dict[int, float](), 0.0, 0.0
        self.missing = [len(preds) for preds in self.preds]
        self.open = {t for t in self.rank if not self.missing[t]}  # tasks of the chain of which nothing is missing

    def _in_turn(self, chain: list[int]) -> list[int]:
        """The chain with the tasks of micro-batches that take turns merged, each by how much of its own came before."""
        place, count = dict[int, tuple[int, int]](), dict[int, int]()
        for t in chain:
            m = self.micro[t] if self.kind[t] in CHAIN else max(self.micro)
            place[t] = m // self.turns, count.get(m, 0)
            count[m] = place[t][1] + 1
        return sorted(chain, key=place.__getitem__)

    def orders(self) -> Orders:
        """The order of the tasks that compute, and of exchanges."""
        for t in [t for t, kind in enumerate(self.kind) if kind in COMMUNICATION and not self.missing[t]]:
            self._begin(t)
        for t in [t for riders in self.step.riders.values() for t in riders]:
            self._ended(t, 0.0)
        self.left.reverse()
        while self.left or self._last():
            if self.left[-1] in self.end:
                self.left.pop()
                continue
            task = self._next()
            self.open.discard(task)
            self._run(task)
            self.chain.append(task)
        return self._merged(), self.exchanges

    def _last(self) -> bool:
        """Whether weight gradients wait for an exchange when the chain has ended; they are the chain then."""
        self.left = [t for t in reversed(self.held) if self._ready(t) > self.now]
        self.held = [t for t in self.held if t not in self.left]
        self.open = {t for t in self.left if not self.missing[t]}
        self.rank = {t: (0.0, -i) for i, t in enumerate(self.left)}
        return bool(self.left)

    def _next(self) -> int:
        """The next task of the chain, after the wait for it has been filled."""
        head = self.left[-1]
        self._need(head)
        while True:
            ready = {t: self._ready(t) for t in self.open if t == head or (
                self.kind[t] in CHAIN and self.micro[t] // self.turns == self.micro[head] // self.turns)}
            at = max(self.now, min(ready.values(), default=np.inf))
            if at == np.inf or at == self.now or not self._filled(at - self.now):
                return min((t for t in ready if ready[t] <= at), key=self.rank.__getitem__, default=head)

    def _filled(self, wait: float) -> bool:
        """Whether a weight gradient runs now, in this wait."""
        can = [t for t in self.held if not self.missing[t] and self._ready(t) <= self.now]
        if fit := [t for t in can if self.time[t] <= wait * (1 + SAME)]:
            self._fill(fit[-1] if self.nearest else max(fit, key=self.time.__getitem__))
        elif can and self.overflow:
            self._fill(min(can, key=self.time.__getitem__))
        return bool(fit or (can and self.overflow))

    def _fill(self, task: int) -> None:
        self.held.remove(task)
        self.placed[task] = len(self.chain)
        self._run(task)

    def _need(self, task: int) -> None:
        """Runs the weight gradients that a task awaits."""
        for p in self.preds[task] if self.missing[task] else ():
            if p not in self.end:
                self._need(p)
                if p in self.step.fillers:
                    self._fill(p)

    def _ready(self, task: int) -> float:
        """When it could run; infinite if something that it needs has not."""
        return max((self.end.get(p, np.inf) + self.sync * (self.kind[p] in COMMUNICATION) for p in self.preds[task]),
                   default=0.0)

    def _run(self, task: int) -> None:
        self.now = max(self.now, self._ready(task)) + sum(self.time[t] for t in (*self.step.riders[task], task))
        self._ended(task, self.now)

    def _ended(self, task: int, now: float) -> None:
        """Lets exchanges and sums begin whose data is there."""
        self.end[task] = now
        for s in self.succs[task]:
            self.missing[s] -= 1
            if not self.missing[s]:
                if self.kind[s] in COMMUNICATION:
                    self._begin(s)
                elif s in self.rank:
                    self.open.add(s)

    def _begin(self, task: int) -> None:
        """Sums do not queue here."""
        begin = max((self.end[p] for p in self.preds[task]), default=0.0) + self.sync
        if self.kind[task] == Kind.X:
            begin = max(begin, self.free)
            self.free = begin + self.time[task]
            self.exchanges.append(task)
        self._ended(task, begin + self.time[task])

    def _merged(self) -> list[int]:
        """Chain and weight gradients. Those that have filled no wait stay behind the task that they have followed."""
        place = {t: (i, 2, 0) for i, t in enumerate(self.chain)}  # how many of the chain come before it, and so on
        ran, behind = {t: i for i, t in enumerate(self.placed)}, 0
        for i, t in enumerate(self.step.main):
            if t in self.placed:
                place[t] = self.placed[t], 0, ran[t]
            elif t in place:
                behind = place[t][0] + 1
            else:
                after = [place[p] for p in self.preds[t] if p in place]
                place[t] = max([behind, *(before + (which == 2) for before, which, _ in after)]), 1, i
        return sorted(place, key=place.__getitem__)
