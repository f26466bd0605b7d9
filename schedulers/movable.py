"""The tasks of a recorded step that can move: weight gradients, each with the updates that wait only for it.

All other tasks form the chain, which runs on the main stream in its recorded order. A schedule follows from a place for
each item: its stream, the task of the chain before which it runs, and whether it runs one step late, beside the forward
of the next iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ..core.columns import Rows
from ..core.graph import TaskGraph
from ..core.schedule import Lane, Schedule, ScheduleError
from ..core.tasks import Kind
from ..passes.boundary import must_stay, with_late
from ..pricing.cost import CostModel
from ..pricing.simulation import Carried, Clock, Lanes, Times

MAIN, SUB = "main", "sub"


@dataclass(frozen=True, slots=True)
class Item:
    """Tasks that move together, in recorded order. An item may start when the chain has done its first `release` tasks;
    one step late, it must end before the next iteration's chain reaches task number `deadline`. It was recorded before
    task number `home` of the chain. `fence`: the task of the chain before which it must end, None if it may be late."""

    tasks: tuple[int, ...]
    home: int
    release: int
    deadline: int
    preds: tuple[int, ...]  # items of the same step that must come before
    succs: tuple[int, ...]
    work: float
    fence: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an item: on `lane`, before task number `before` of the chain, or after the chain if that is its
    length. `late`: one step late."""

    lane: str
    before: int
    late: bool = False


Places = Mapping[int, Place]  #: item -> place; an item without a place runs where it was recorded, on the main stream


@dataclass(frozen=True)
class Order:
    """The tasks of each stream in order. `delayed`: the tasks that run one step late."""

    lanes: Mapping[str, Sequence[int]]
    delayed: Set[int] = frozenset()


@dataclass(frozen=True)
class Step:
    """A recorded step, its costs, its chain (task ids) and its items."""

    graph: TaskGraph
    cost: CostModel
    chain: tuple[int, ...]
    items: tuple[Item, ...]
    _known: dict[object, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _clocks: dict[frozenset[int], Clock] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, graph: TaskGraph, cost: CostModel, apart: bool = False) -> Step:
        """The step of a recorded graph. `apart`: all updates are items of their own, even if they wait for only one
        weight gradient."""
        duration = (cost.durations(graph) + cost.launch).tolist()
        stays = must_stay(graph.unfenced)
        chain = tuple(np.flatnonzero(stays).tolist())
        place = {task: i for i, task in enumerate(chain)}
        after, until = ([[place[t] for t in own if t in place] for own in rows.lists()]
                        for rows in (graph.preds, graph.succs))  # the tasks of the chain around each task
        members, item_of = list[list[int]](), dict[int, int]()
        origin: list[set[int]] = []  # the weight gradients that an item waits for
        for task in np.flatnonzero(~stays).tolist():
            before = {item_of[p] for p in graph.preds[task].tolist() if p in item_of}
            awaited = set().union(*(origin[b] for b in before))
            alone = graph.kind[task] == Kind.U and len(awaited) == 1 and awaited <= before and not apart
            if alone and max(after[task], default=-1) < min(until[members[min(awaited)][0]], default=len(chain)):
                (item_of[task],) = awaited  # an update moves with the W for which it waits, unless O is between them
                members[item_of[task]].append(task)
            else:
                item_of[task] = len(members)
                members.append([task])
                origin.append({item_of[task]} if graph.kind[task] == Kind.W else awaited)
        preds = [sorted({item_of[p] for t in tasks for p in graph.preds[t].tolist() if p in item_of} - {i})
                 for i, tasks in enumerate(members)]
        succs = Rows.of(preds).transposed(len(members)).lists()
        release = [0] * len(members)
        for i, tasks in enumerate(members):
            release[i] = max([*(n + 1 for t in tasks for n in after[t]), *(release[p] for p in preds[i])], default=0)
        for i in reversed(range(len(members))):  # an item that waits for nothing, such as a counter, comes just in time
            if not release[i] and succs[i]:
                release[i] = min(release[s] for s in succs[i])
        # buffers that outlive a step -> the first task of the chain that reads or writes them
        needed = {b: i for i, t in reversed([*enumerate(chain)])
                  for b in (*graph.reads[t].tolist(), *graph.writes[t].tolist()) if graph.persistent[b]}
        items = tuple(Item(tuple(tasks), int(np.searchsorted(chain, tasks[0])), release[i], min(
            (needed.get(b, len(chain)) for t in tasks for b in graph.writes[t].tolist()), default=len(chain)),
                           tuple(preds[i]), tuple(succs[i]), sum(duration[t] for t in tasks),
                           min((n for t in tasks for n in until[t]), default=None))
                      for i, tasks in enumerate(members))
        return cls(graph, cost, chain, items)

    def with_separate_updates(self, places: Places) -> tuple[Step, Places]:
        """The same step with all updates as items of their own, at the same places."""
        fine = Step.of(self.graph, self.cost, apart=True)
        of_task = {t: places[i] for i, item in enumerate(self.items) if i in places for t in item.tasks}
        return fine, {i: of_task[item.tasks[0]] for i, item in enumerate(fine.items) if item.tasks[0] in of_task}

    @cached_property
    def duration(self) -> list[float]:
        return (self.cost.durations(self.graph) + self.cost.launch).tolist()

    @cached_property
    def global_update(self) -> bool:
        """Whether some update waits for the weight gradients of several layers, as clipping by global norm does."""
        graph, units = self.graph, list[set[int]]()
        for item in self.items:
            own = {int(graph.unit[t]) for t in item.tasks if graph.kind[t] == Kind.W}
            units.append(own or set().union(*(units[p] for p in item.preds)))
            if not own and len(units[-1]) > 1:
                return True
        return False

    @cached_property
    def _edges(self) -> tuple[list[list[int]], list[list[int]]]:
        """The predecessors of each task: within its step, and in the step before."""
        carried = Carried.of(self.graph, own=~self.graph.persistent)
        return self.graph.preds.lists(), Rows.from_pairs(carried.target, carried.source, len(self.graph)).lists()

    def order(self, places: Places) -> Order:
        """The tasks of both streams in order; late tasks go first."""
        keyed: dict[str, list[tuple[float, int, int, int]]] = {MAIN: [(i, 1, 0, t) for i, t in enumerate(self.chain)],
                                                               SUB: []}
        for i, item in enumerate(self.items):
            place = places.get(i)
            for t in item.tasks:
                lane, before, now = ((MAIN, self._recorded[t], 1) if place is None
                                     else (place.lane, place.before, int(not place.late)))
                keyed[lane].append((before, 0, t + now * len(self.graph), t))
        return Order({lane: [t for *_, t in sorted(tasks)] for lane, tasks in keyed.items()}, self.delayed(places))

    @cached_property
    def _recorded(self) -> list[int]:
        """For each task, how many tasks of the chain were recorded before it."""
        return np.searchsorted(self.chain, np.arange(len(self.graph))).tolist()

    def makespan(self, places: Places) -> float:
        """The makespan of a repeated step; infinite where the streams would wait for each other for ever."""
        return self.makespan_of(self.order(places))

    def makespan_of(self, order: Order) -> float:
        """As `makespan`; keeps the result, since a search asks for the same order again and again."""
        key = (frozenset(order.delayed), *map(tuple, order.lanes.values()))
        if key not in self._known:
            try:
                self._known[key] = float(self.times(order).end.max(initial=0.0))
            except ScheduleError:
                self._known[key] = float("inf")
        return self._known[key]

    def times(self, order: Order) -> Times:
        """The times of each task in a repeated step. Raises ScheduleError if streams wait for each other for ever."""
        delayed, lanes = frozenset(order.delayed), Lanes.of_tasks(list(order.lanes.values()))
        if delayed not in self._clocks:
            clock = replace(Clock.of(self.graph, self.cost, lanes), far=np.zeros(1))  # one rank, so no edge has a link
            self._clocks[delayed] = replace(clock, preds=Rows.of(self.preds(delayed))) if delayed else clock
        return self._clocks[delayed].run(lanes)

    def delayed(self, places: Places) -> set[int]:
        """The tasks that run one step late."""
        return {t for i, p in places.items() if p.late for t in self.items[i].tasks}

    def preds(self, delayed: Set[int]) -> list[list[int]]:
        """The predecessors of each task in a repeated step in which the tasks `delayed` run one step late."""
        here, across = self._edges
        return [[p for p in here[t] if p in delayed] if t in delayed
                else here[t] + [p for p in across[t] if p in delayed] for t in range(len(here))]

    def schedule(self, places: Places) -> Schedule:
        return self.schedule_of(self.order(places))

    def schedule_of(self, order: Order) -> Schedule:
        schedule = Schedule.of(self.graph, {Lane(0, name): tasks for name, tasks in order.lanes.items() if tasks})
        return with_late(schedule, self.graph, np.array(sorted(order.delayed), np.int64)) if order.delayed else schedule

    def bounds(self, places: Places, i: int, crossing: bool) -> tuple[int, int]:
        """The numbers of the first and last possible place of item i, given the places of the others."""
        item = self.items[i]
        return (max([item.release, *(self.number(places, p) for p in item.preds)]),
                min([self.latest(i, crossing), *(self.number(places, s) for s in item.succs)]))

    def latest(self, i: int, crossing: bool) -> int:
        """The number of the last possible place of item i, wherever the others are."""
        item = self.items[i]
        if item.fence is not None:
            return item.fence
        return self.round + item.deadline if crossing else len(self.chain)

    def number(self, places: Places, i: int) -> int:
        """The number of the place of item i."""
        place = places.get(i)
        return self.items[i].home if place is None else place.before + self.round * place.late

    @property
    def round(self) -> int:
        """How many places a step has. The numbers of places count on into the next step."""
        return len(self.chain) + 1

    def place(self, lane: str, number: int) -> Place:
        return Place(lane, number % self.round, number >= self.round)
