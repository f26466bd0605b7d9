"""Multi-region joint scheduling: every weight gradient beside the region of the chain that it goes best with.

Oh, Lee, Kim, Seo, "Out-of-order backprop", EuroSys 2022, section 4; reconstructed, since only the idea is published: cut
the chain into regions, know the gain of running a weight gradient beside each region, and give out the largest gains
first, as far as time, order and memory allow. What is left over stays where it was recorded. Then single items are moved
as long as the simulator says that it helps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, combinations, islice, permutations

from ..cost import CostModel
from ..crossing import steady
from ..graph import TaskGraph
from ..memory import MemoryLimitError
from ..schedule import Schedule
from ..simulation import simulate
from .exhaustive import shortest
from .movable import MAIN, SUB, Place, Places, Step
from .regions import Region, regions
from .single import in_order, multi_stream

EFFORT = 30_000  #: tasks that the search may simulate
SMALL = 64  #: tasks of a graph up to which updates are moved apart from their weight gradients, and items in pairs
LATE_SETS = 64  #: of late items that branch and bound tries
LEAST = 0.001  #: share of a step that is worth memory
LEVELS = 8  #: how finely overlap is given back for memory


@dataclass(frozen=True)
class Candidate:
    """A plan with its price: the time of a step as it repeats, in the costs' unit, and the bytes at its peak."""

    name: str
    schedule: Schedule
    makespan: float
    peak_bytes: int


@dataclass(frozen=True)
class RegionPlan:
    """The best candidate that fits. `places`: what the scheduler assigned before anything was given back; `notes`: what
    a person should know; `smallest_limit`: below this no candidate fits."""

    step: Step
    regions: list[Region]
    places: Places
    chosen: Candidate
    notes: tuple[str, ...]
    candidates: tuple[Candidate, ...]

    @property
    def schedule(self) -> Schedule:
        return self.chosen.schedule

    @cached_property
    def smallest_limit(self) -> int:
        return min(c.peak_bytes for c in self.candidates)

    @property
    def curve(self) -> list[Candidate]:
        """The candidates that no other beats in both, from the smallest peak to the shortest step."""
        found: list[Candidate] = []
        for c in sorted(self.candidates, key=lambda c: (c.peak_bytes, c.makespan)):
            if not found or c.makespan < found[-1].makespan:
                found.append(c)
        return found


def multi_region(graph: TaskGraph, cost: CostModel | None = None, memory_limit: int | None = None,
                 crossing: bool = True) -> Schedule:
    """Weight gradients beside the regions that they go best with, on `main` and `sub`; `4W0@1` runs one step late.

    `cost` says how long tasks take and how much pairs slow each other down (default: from flops and bytes, not at all);
    `crossing=False` keeps the border of the iteration. Raises MemoryLimitError, with the smallest limit that can work, where nothing fits.
    """
    return plan(graph, cost, memory_limit, crossing).schedule


def plan(graph: TaskGraph, cost: CostModel | None = None, memory_limit: int | None = None, crossing: bool = True,
         curve: bool = False) -> RegionPlan:
    """As `multi_region`, with all that led there. `curve`: price every level of giving back, also without a limit."""
    step = Step.of(graph, cost or CostModel.analytic())
    cut = regions(graph, step.chain, step.duration)
    notes: list[str] = []
    if crossing and step.global_update:
        crossing = False
        notes.append("nothing crosses the border of the iteration: an update waits for the weight gradients of several "
                     "layers, as clipping by global norm does")
    starts = [assign(step, cut, crossing), early_filled(step, crossing)]
    gains, fills = map(step.makespan, starts)
    places = improve(step, cut, starts[fills < gains * (1 - LEAST)], crossing)  # late items take memory
    if len(graph) <= SMALL:  # where it costs nothing, more is tried
        starts += [places, {}, {i: step.place(SUB, step.bounds({}, i, crossing)[1]) for i in range(len(step.items))}]
        places = min((improve(step, cut, start, crossing, pairs=True) for start in starts), key=step.makespan)
        step, places = step.taken_apart(places)
        places = improve(step, cut, places, crossing, pairs=True)

    def candidates() -> Iterator[Candidate]:
        yield _priced(step, "multi_region", step.schedule(places))
        if len(graph) <= SMALL and (found := searched(step, places, crossing)):
            yield _priced(step, "branch and bound", found)
        if memory_limit is not None or curve:
            # late items hold memory longest, then those that stand furthest from their release
            order = sorted(places, key=lambda i: (places[i].late, places[i].before - step.items[i].release, i))
            for level in reversed(range(1, LEVELS)):
                kept = _consistent(step, {i: places[i] for i in order[: len(order) * level // LEVELS]})
                yield _priced(step, f"multi_region, {level}/{LEVELS} moved", step.schedule(kept))
        yield _priced(step, "multi_stream", multi_stream(graph, cost=step.cost))
        yield _priced(step, "in_order", in_order(graph))

    found = tuple(candidates())
    fitting = [c for c in found if memory_limit is None or c.peak_bytes <= memory_limit]
    if not fitting:
        least = min(found, key=lambda c: c.peak_bytes)
        raise MemoryLimitError(f"no plan fits {memory_limit:,} bytes; the smallest limit that can work is "
                               f"{least.peak_bytes:,} ({least.name})")
    chosen = min(fitting, key=lambda c: (c.makespan, c.peak_bytes))
    if chosen is not found[0]:
        why = f"to fit {memory_limit:,} bytes" if found[0] not in fitting else "which is no slower"
        notes.append(f"the plan is that of {chosen.name}, {why}")
    return RegionPlan(step, cut, places, chosen, tuple(notes), found)


def _priced(step: Step, name: str, schedule: Schedule) -> Candidate:
    run = steady(step.graph, schedule)
    return Candidate(name, schedule, simulate(run.graph, run.schedule, step.cost).makespan, run.peak_bytes())


def _consistent(step: Step, places: Places) -> Places:
    """Without the items that stand after others, now back in their place, that wait for them."""
    kept = dict(places)
    while True:
        bad = [i for i in kept if step.number(kept, i) > step.bounds(kept, i, True)[1]]
        if not bad:
            return kept
        for i in bad:
            del kept[i]


# ----------------------------------------------------------------------------------------------------------- assignment
def assign(step: Step, cut: list[Region], crossing: bool = True) -> Places:
    """Greedy: the pair of item and region with the largest gain above 1 first, the earlier region where gains are equal,
    as long as the item fits the room that is left from there on. Regions after the border follow those before it."""
    corun, names = step.corun, step.graph.name
    theirs = [corun.groups.get(names(step.chain[r.begin]), "") for r in cut] * 2
    own = [corun.groups.get(names(item.tasks[0]), "") for item in step.items]
    spans = [(r.begin + shift, r.end + shift) for shift in (0, step.round) for r in cut]
    room = [r.time for r in cut]
    ends = [step.round + item.deadline if crossing else len(step.chain) for item in step.items]
    pairs = [(-round(corun.gain(theirs[r], own[i]), 2), r, -item.release, i) for i, item in enumerate(step.items)
             for r, (begin, end) in enumerate(spans) if end > item.release and begin < ends[i]]
    places: dict[int, Place] = {}
    ranked = sorted(pair for pair in pairs if pair[0] < -1)
    for _, r, _, i in [*ranked, *ranked]:  # twice, for what had to wait until another had its place
        if i in places:
            continue
        first, last = step.bounds(places, i, crossing)
        at = max(spans[r][0], first)
        if at > last or at >= spans[r][1]:
            continue
        need, taken = step.items[i].work, []  # from this region on, until the border or the deadline
        for q in range(r, len(spans) if r >= len(cut) else len(cut)):
            if need <= 0 or spans[q][0] >= ends[i]:
                break
            rate = corun.factor(own[i], theirs[q]) / corun.factor(theirs[q], own[i])  # main's time for sub's
            taken.append((q % len(cut), min(room[q % len(cut)], need * rate)))
            need -= taken[-1][1] / rate
        if need <= 1e-9 * step.items[i].work:
            places[i] = step.place(SUB, at)
            for q, used in taken:
                room[q] -= used
    return places


def early_filled(step: Step, crossing: bool = True) -> Places:
    """The second stream busy from the start: late items, the next to be needed first, until weight gradients of the step
    itself are there; these as they come."""
    time, reached = 0.0, [0.0, *accumulate(step.duration[t] for t in step.chain)]
    first = min((reached[item.release] for item in step.items), default=0.0)
    places = {i: Place(SUB, item.release) for i, item in enumerate(step.items)}
    for i in sorted(range(len(step.items)), key=lambda i: (step.items[i].deadline, i)):
        item = step.items[i]
        if crossing and not item.succs and time < first and time + item.work <= reached[item.deadline]:
            places[i], time = Place(SUB, item.deadline, late=True), time + item.work
    return places


# ---------------------------------------------------------------------------------------------------------- improvement
def improve(step: Step, cut: list[Region], places: Places, crossing: bool = True, pairs: bool = False) -> Places:
    """Moves single items, the longest first, wherever the simulated step becomes shorter, and with `pairs` then two at
    a time; until nothing helps, or EFFORT is spent."""
    search = _Search(step, sorted({r.begin for r in cut} | {len(step.chain)}), crossing, dict(places))
    order = sorted(range(len(step.items)), key=lambda i: (-step.items[i].work, i))
    while sum(search.move([i]) for i in order) or (pairs and any(search.move([i, j]) for i, j in permutations(order, 2))):
        pass
    return search.places


class _Search:
    """The best places so far, and how much effort is left."""

    def __init__(self, step: Step, starts: list[int], crossing: bool, places: dict[int, Place]) -> None:
        self.step, self.starts, self.crossing, self.places = step, starts, crossing, places
        self.best = step.makespan(places)
        self.bound = sum(step.duration[t] for t in step.chain) * (1 + 1e-9)  # no plan is shorter than the chain
        self.left = EFFORT // max(len(step.graph), 1)

    def move(self, items: list[int], trial: dict[int, Place] | None = None) -> bool:
        """Tries every choice of places for these items; keeps what is shorter."""
        improved = False
        trial = self.places if trial is None else trial
        for choice in self._choices(trial, items[0]):
            if self.left <= 0 or self.best <= self.bound:
                return improved
            changed = {k: p for k, p in trial.items() if k != items[0]} | ({items[0]: choice} if choice else {})
            if len(items) > 1:
                improved = self.move(items[1:], changed) or improved
                continue
            self.left -= 1
            if (time := self.step.makespan(changed)) < self.best * (1 - 1e-9):
                self.places, self.best, improved = changed, time, True
        return improved

    def _choices(self, places: dict[int, Place], i: int) -> Iterator[Place | None]:
        step = self.step
        first, last = step.bounds(places, i, self.crossing)
        if first <= step.items[i].home <= last:
            yield None
        for at in sorted({first, last, *(s + k for k in (0, step.round) for s in self.starts if first < s + k < last)}):
            for lane in (SUB, MAIN) if first <= last else ():
                yield step.place(lane, at)


def searched(step: Step, places: Places, crossing: bool = True) -> Schedule | None:
    """By branch and bound, also with the chain on both streams, where that is shorter than these places without
    contention: for late items as they are here, and for others as far as EFFORT goes."""
    last = [i for i, item in enumerate(step.items) if not item.succs] if crossing else []
    tasks = {i: {*step.items[i].tasks, *(t for p in step.items[i].preds for t in step.items[p].tasks)} for i in last}
    now = frozenset(step.delayed(places))
    others = (frozenset[int]().union(*(tasks[i] for i in some)) for n in range(len(last) + 1) for some in combinations(last, n))
    best, found, effort = replace(step, cost=replace(step.cost, corun=None, wake=0.0)).makespan(places), None, 5 * EFFORT // len(step.graph)
    for delayed in dict.fromkeys(chain([now], islice(others, LATE_SETS))):
        preds = step.preds(delayed)
        order = sorted(range(len(preds)), key=lambda t: (t not in delayed, t))  # what is late waits for nothing but its like
        number = {t: i for i, t in enumerate(order)}
        best, lanes, effort = shortest([[number[p] for p in preds[t]] for t in order], [step.duration[t] for t in order],
                                       step.cost.sync, best, effort)
        if lanes:
            found = step.ordered({name: [order[t] for t in lane] for name, lane in zip((MAIN, SUB), lanes, strict=True)}, delayed)
        if effort <= 0:
            break
    return found


# ------------------------------------------------------------------------------------------------------ pairs to profile
def profile_groups(graph: TaskGraph, cost: CostModel) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Which tasks are alike, and which pairs of groups can meet: every region with every kind of weight gradient.

    Weight gradients are alike where they call the same kernels and take about as long, within a factor of four.
    """
    step = Step.of(graph, cost)
    groups: dict[str, str] = {}
    cut = regions(graph, step.chain, step.duration)
    for number, region in enumerate(cut):
        groups |= {graph.name(t): f"{number} {region.name}" for t in step.chain[region.begin : region.end]}
    theirs = list(dict.fromkeys(groups.values()))
    for item in step.items:
        first = graph[item.tasks[0]]
        kernels = "+".join(sorted({launch.kernel for launch in first.launches}))
        size = int(math.log(max(step.duration[item.tasks[0]], 1.0), 4))
        for t in item.tasks:  # what moves with it counts as it does
            groups[graph.name(t)] = f"{first.kind.name} {kernels} {4**size}".replace("  ", " ")
    mine = [g for g in dict.fromkeys(groups.values()) if g not in set(theirs)]
    return groups, [(a, b) for a in theirs for b in mine]
