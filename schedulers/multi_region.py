"""Multi-region joint scheduling: every weight gradient runs beside the region of the chain where it gains most.

Oh, Lee, Kim, Seo, "Out-of-order backprop", EuroSys 2022, section 4; reconstructed, since only the idea is published:
cut the chain into regions, find the gain of running a weight gradient beside each region, and assign the largest gains
first, as far as time, order and memory allow. The others stay where they were recorded. Then single items are moved as
long as the simulator shows an improvement. If the simulator shows that one stream is best, there is only one
(`one_stream`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, combinations, islice

from ..core.graph import TaskGraph, check_kinds
from ..core.machine import Machine, PlanError
from ..core.schedule import SIDE, Schedule
from ..plans.memory import MemoryLimitError
from ..plans.program import Program, lower
from ..pricing.corun import CoRun
from ..pricing.cost import CostModel
from .exhaustive import shortest
from .give_back import given_back, partly_beside
from .movable import MAIN, SUB, Order, Place, Places, Step
from .ordered import Ordered
from .regions import Region, regions
from .single import MARGIN, in_order, on_streams, why_one

EFFORT = 30_000  #: how many tasks the search may simulate
SMALL = 64  #: up to this many tasks, updates move apart from their weight gradients, and branch and bound helps
LATE_SETS = 64  #: how many late sets of either kind branch and bound tries
LEAST = 0.001  #: a gain below this share of a step is not worth more memory


def multi_region(graph: TaskGraph, cost: CostModel | None = None, machine: Machine | None = None, *,
                 crossing: bool = True, streams: int = 2) -> Schedule:
    """Weight gradients beside the regions where they gain most, on `main` and `sub`; `4W0@1` runs one step late.

    `cost`: of tasks and of pairs (default: from flops and bytes, and none). `crossing`: whether they may cross the
    boundary. Raises MemoryLimitError if no plan fits the machine's limit, and PlanError unless `streams` is 2.
    """
    return planned(graph, cost or CostModel.analytic(), machine or Machine(), crossing=crossing,
                   streams=streams).schedule


def planned(graph: TaskGraph, cost: CostModel, machine: Machine, *, crossing: bool = True, streams: int = 2,
            side_sms: int | str | None = None) -> Ordered:
    """Every weight gradient beside the region of the chain where it gains most, and updates as late as the next forward
    pass allows (Oh, Lee, Kim, Seo, EuroSys 2022, section 4; reconstructed). Everything on one stream if the simulator
    shows that this is best.

    `crossing`: whether they may cross the iteration boundary. `streams`: the main one included. `side_sms`: so many SMs
    of a GPU for the second stream, and the others for the first; "auto": the fastest share, or none.
    """
    check_kinds(graph=(graph, TaskGraph), cost=(cost, CostModel), machine=(machine, Machine))
    if streams != 2:
        raise PlanError(f"multi_region needs 2 streams, not {streams}")
    picks = [_picker(graph, own, crossing) for own in ([cost] if side_sms is None else _divided(cost, side_sms))]

    def within(limit: int | None) -> Ordered:
        found, failed = list[tuple[Trial, list[str]]](), list[MemoryLimitError]()
        for pick in picks:
            try:
                found.append(pick(limit))
            except MemoryLimitError as error:
                failed.append(error)
        if not found:
            raise min(failed, key=lambda error: error.least or 0)
        chosen, said = min(found, key=lambda one: one[0].rated)
        schedule, own = chosen.schedule, chosen.step.cost
        if side_sms is None:
            return Ordered(schedule, remarks=tuple(said), within=within)
        if len(schedule.lanes) < 2:
            own = own.divided(0)
        if own.sms and own.sms.side:
            schedule = replace(schedule, notes={**schedule.notes, SIDE: str(own.sms.side)})
        else:
            said = [*said, "the SMs are not divided: no share for the second stream is predicted to be faster"]
        return Ordered(schedule, remarks=tuple(said), within=within, cost=own)

    return within(machine.memory_limit)


def _divided(cost: CostModel, side_sms: int | str) -> list[CostModel]:
    """The costs with this share of the second stream; of "auto", with none, and with about an eighth, a quarter, three
    eighths and a half of all SMs. Raises PlanError for a share that the device cannot give."""
    sms = cost.sms
    if sms is None:
        raise PlanError(f"side_sms={side_sms} needs times with a part of a GPU's SMs; measure the costs on CUDA, with "
                        f"--side-sms")
    if side_sms == "auto":
        near = {min(sms.choices, key=lambda n: abs(n - sms.total * part / 8)) for part in (1, 2, 3, 4)}
        return [cost.divided(side) for side in (0, *sorted(near))]
    if not isinstance(side_sms, int) or isinstance(side_sms, bool):
        raise PlanError(f"side_sms is {side_sms!r:.40}; it must be a number of SMs or auto")
    sms.check(side_sms)
    return [cost.divided(side_sms)]


def _picker(graph: TaskGraph, cost: CostModel, crossing: bool) -> Callable[[int | None], tuple[Trial, list[str]]]:
    """Finds the best plan within a limit, by these costs, and what to say of it, or raises MemoryLimitError."""
    step = Step.of(replace(graph, launches=()), cost)
    cut = regions(graph, step.chain, step.duration)
    notes: list[str] = []
    if crossing and step.global_update:
        crossing = False
        notes.append("nothing crosses the iteration boundary: an update waits for the weight gradients of several "
                     "layers, as clipping by global norm does")
    crossing = crossing and not graph.iteration.any()
    prompt = None
    if crossing and cost.source == "measured":  # late tasks must then save more than a margin
        whole, now = found_places(step, cut, crossing=False)
        prompt = whole.order(now)
    step, places = found_places(step, cut, crossing)
    trials = _trials(step, places, prompt, crossing)
    fastest = _best(trials)

    def pick(limit: int | None) -> tuple[Trial, list[str]]:
        chosen, said = _best(trials, limit), list(notes)
        if chosen is None:
            least = min(trials, key=lambda trial: trial.program.peak_bytes)
            raise MemoryLimitError(f"no plan fits {limit:,} bytes; the smallest limit that can work is "
                                   f"{least.program.peak_bytes:,} ({least.name})", least.program.peak_bytes)
        if chosen is not fastest:
            said.append(f"overlap is given back to fit {limit:,} bytes: the plan is {chosen.name}")
        # one stream against the chosen plan or, if that has one stream, against the best plan with two
        one = next(t for t in trials if t.name == "in_order")
        two = chosen if chosen.streams > 1 else min((t for t in trials if t.streams > 1), key=lambda t: t.makespan,
                                                    default=one)
        why = why_one(two.program.graph, two.program.schedule, cost)
        if why and one.fits(limit):
            chosen = one
            said.append(why)
        elif chosen is fastest and chosen.name in OTHERS:
            said.append(f"the plan is {chosen.name}, which is as fast")
        return chosen, said

    return pick


def found_places(step: Step, cut: list[Region], crossing: bool) -> tuple[Step, Places]:
    """The best places, and the step with the items that these place."""
    longest_first = sorted(range(len(step.items)), key=lambda i: (-step.items[i].work, i))
    early = min(partly_beside(step, longest_first), key=step.makespan)  # as much on the second stream as pays
    late = min(assign(step, cut, crossing), early_filled(step, crossing), key=step.makespan)
    better = late if step.makespan(late) < step.makespan(early) * (1 - LEAST) else early  # late items need memory
    places = improve(step, cut, better, crossing)
    if len(step.graph) <= SMALL:  # cheap enough to try more
        starts = [assign(step, cut, crossing), early_filled(step, crossing), places, {},
                  {i: step.place(SUB, step.bounds({}, i, crossing)[1]) for i in range(len(step.items))}]
        places = min((improve(step, cut, start, crossing) for start in starts), key=step.makespan)
        step, places = step.with_separate_updates(places)
        places = improve(step, cut, places, crossing)
    return step, places


# --------------------------------------------------------------------------------------------------------------- choice
OTHERS = ("multi_stream", "in_order")  #: the chosen plan is never slower than these, if they fit


@dataclass(eq=False)
class Trial:
    """A plan that may be chosen, with the time of a repeated step and, which takes far longer, its memory."""

    step: Step
    name: str
    order: Order

    @cached_property
    def makespan(self) -> float:
        return self.step.makespan_of(self.order)

    @cached_property
    def schedule(self) -> Schedule:
        return self.step.schedule_of(self.order)

    @cached_property
    def program(self) -> Program:
        return lower(self.step.graph, self.schedule)

    @property
    def rated(self) -> float:
        """The makespan, by which plans are compared. Tasks that run one step late find nothing of theirs in a cache any
        more, which measured costs do not show: a plan that has some must be better by MARGIN."""
        return self.makespan * (1 + MARGIN if self.step.cost.source == "measured" and self.order.delayed else 1)

    @property
    def streams(self) -> int:
        return sum(map(bool, self.order.lanes.values()))

    def fits(self, limit: int | None) -> bool:
        return limit is None or self.program.peak_bytes <= limit


def _trials(step: Step, places: Places, prompt: Order | None, crossing: bool) -> list[Trial]:
    """`prompt`: another order, in which nothing is late."""
    graph = step.graph
    orders = {"multi_region": step.order(places)}
    if prompt is not None and prompt not in orders.values():
        orders["multi_region, nothing late"] = prompt
    if len(graph) <= SMALL and (found := searched(step, places, crossing)):
        orders["multi_region, by branch and bound"] = found
    for name, less in given_back(step, places):
        if (order := step.order(less)) not in orders.values():
            orders[f"multi_region, {name}"] = order
    for name, schedule in zip(OTHERS, (on_streams(graph, step.cost)[1], in_order(graph)), strict=True):
        ids = schedule.ids(graph).tolist()
        orders[name] = Order({lane.name: ids[schedule.ptr[i] : schedule.ptr[i + 1]]
                              for i, lane in enumerate(schedule.lanes)})
    return [t for t in (Trial(step, name, order) for name, order in orders.items()) if t.makespan < math.inf]


def _best(trials: Iterable[Trial], limit: int | None = None) -> Trial | None:
    """The fastest plan that fits, as plans are rated; or one that needs less memory and is at most LEAST slower, but
    not slower than any of the OTHERS."""
    left = sorted(trials, key=lambda t: t.rated)
    while left:
        bar = min(left[0].rated * (1 + LEAST), *(t.rated for t in left if t.name in OTHERS), float("inf"))
        pick = min((t for t in left if t.rated <= bar), key=lambda t: t.program.peak_bytes)
        if pick.fits(limit):
            return pick
        left.remove(pick)
    return None


# ----------------------------------------------------------------------------------------------------------- assignment
def assign(step: Step, cut: list[Region], crossing: bool = True) -> Places:
    """Greedy: the pair of item and region with the largest gain above 1 first (of equal ones, the earlier region), if
    the item fits into the room left from there on. The regions of the next iteration follow this one's."""
    corun, names = step.cost.corun or CoRun(), step.graph.name
    theirs = [corun.groups.get(names(step.chain[r.begin]), "") for r in cut] * 2
    own = [corun.groups.get(names(item.tasks[0]), "") for item in step.items]
    spans = [(r.begin + shift, r.end + shift) for shift in (0, step.round) for r in cut]
    room = [r.time for r in cut]
    ends = [step.latest(i, crossing) for i in range(len(step.items))]
    pairs = [(-round(corun.gain(theirs[r], own[i]), 2), r, -item.release, i) for i, item in enumerate(step.items)
             for r, (begin, end) in enumerate(spans) if end > item.release and begin < ends[i]]
    places: dict[int, Place] = {}
    ranked = sorted(pair for pair in pairs if pair[0] < -1)
    for _, r, _, i in [*ranked, *ranked]:  # twice, for items that had to wait until another had its place
        if i in places:
            continue
        first, last = step.bounds(places, i, crossing)
        at = max(spans[r][0], first)
        if at > last or at >= spans[r][1]:
            continue
        need, uses = step.items[i].work, []  # from this region on, until the iteration boundary or the deadline
        for q in range(r, len(spans) if r >= len(cut) else len(cut)):
            if need <= 0 or spans[q][0] >= ends[i]:
                break
            rate = corun.factor(own[i], theirs[q]) / corun.factor(theirs[q], own[i])  # main's time for sub's
            uses.append((q % len(cut), min(room[q % len(cut)], need * rate)))
            need -= uses[-1][1] / rate
        if need <= 1e-9 * step.items[i].work:
            places[i] = step.place(SUB, at)
            for q, used in uses:
                room[q] -= used
    return places


def early_filled(step: Step, crossing: bool = True) -> Places:
    """Keeps the second stream busy from the start: with late items, those needed next first, until the step's own
    weight gradients are ready; then with these as they become ready."""
    time, reached = 0.0, [0.0, *accumulate(step.duration[t] for t in step.chain)]
    first = min((reached[item.release] for item in step.items), default=0.0)
    places = {i: Place(SUB, item.release) for i, item in enumerate(step.items)}
    for i in sorted(range(len(step.items)), key=lambda i: (step.items[i].deadline, i)):
        item = step.items[i]
        late = crossing and not item.succs and item.fence is None
        if late and time < first and time + item.work <= reached[item.deadline]:
            places[i], time = Place(SUB, item.deadline, late=True), time + item.work
    return places


# ---------------------------------------------------------------------------------------------------------- improvement
def improve(step: Step, cut: list[Region], places: Places, crossing: bool = True) -> Places:
    """Moves single items, the longest first, to wherever the simulated step becomes shorter, until nothing helps or
    EFFORT is used up."""
    starts, left = sorted({r.begin for r in cut} | {len(step.chain)}), EFFORT // max(len(step.graph), 1)
    bound = sum(step.duration[t] for t in step.chain) * (1 + 1e-9)  # no plan is shorter than the chain
    best, order = step.makespan(places), sorted(range(len(step.items)), key=lambda i: (-step.items[i].work, i))
    improved = True
    while improved:
        improved = False
        for i in order:
            for choice in _choices(step, starts, places, i, crossing):
                if left <= 0 or best <= bound:
                    return places
                left -= 1
                changed = {k: p for k, p in places.items() if k != i} | ({i: choice} if choice else {})
                if (time := step.makespan(changed)) < best * (1 - 1e-9):
                    places, best, improved = changed, time, True
    return places


def _choices(step: Step, starts: Sequence[int], places: Places, i: int, crossing: bool) -> Iterator[Place | None]:
    first, last = step.bounds(places, i, crossing)
    if first <= step.items[i].home <= last:
        yield None
    for at in sorted({first, last, *(s + k for k in (0, step.round) for s in starts if first < s + k < last)}):
        for lane in (SUB, MAIN) if first <= last else ():
            yield step.place(lane, at)


def searched(step: Step, places: Places, crossing: bool = True) -> Order | None:
    """An order found by branch and bound, in which the chain may use both streams, if it is shorter than these places
    without contention. It tries the late items of `places`, and other sets of late items as far as EFFORT goes. The
    step must have separate updates."""
    now = frozenset(step.delayed(places))
    others = (chain(islice(_whole_sets(step), LATE_SETS), islice(_late_sets(step), LATE_SETS)) if crossing
              else [frozenset[int]()])
    quiet = replace(step, cost=replace(step.cost, corun=None, memory=None, wake=0.0))
    best, found, effort = quiet.makespan(places), None, 5 * EFFORT // max(len(step.graph), 1)
    for delayed in dict.fromkeys(chain([now], others)):
        preds = step.preds(delayed)
        # late tasks wait only for late tasks
        order = sorted(range(len(preds)), key=lambda t: (t not in delayed, t))
        number = {t: i for i, t in enumerate(order)}
        best, lanes, effort = shortest([[number[p] for p in preds[t]] for t in order],
                                       [step.duration[t] for t in order], step.cost.sync, best, effort)
        if lanes:
            found = Order({name: [order[t] for t in lane] for name, lane in zip((MAIN, SUB), lanes, strict=True)},
                          delayed)
        if effort <= 0:
            break
    return found


def _whole_sets(step: Step) -> Iterator[frozenset[int]]:
    """Sets of tasks that may be late together, small ones first: updates and all for which only these wait."""
    last = [i for i, item in enumerate(step.items) if not item.succs and item.fence is None]
    for late in (set(some) for n in range(len(last) + 1) for some in combinations(last, n)):
        for i in reversed(range(len(step.items))):  # waiting items have higher numbers
            if step.items[i].succs and step.items[i].fence is None and late.issuperset(step.items[i].succs):
                late.add(i)
        yield frozenset(t for i in late for t in step.items[i].tasks)


def _late_sets(step: Step) -> Iterator[frozenset[int]]:
    """All sets of tasks that may be late together: with a task, all tasks that wait for it; small sets first."""
    sets = {frozenset[int]()}
    while sets:
        yield from (frozenset(t for i in late for t in step.items[i].tasks) for late in sorted(sets, key=sorted))
        sets = {late | {i} for late in sets for i, item in enumerate(step.items)
                if i not in late and item.fence is None and late.issuperset(item.succs)}


# ----------------------------------------------------------------------------------------------------- pairs to profile
def profile_groups(graph: TaskGraph, cost: CostModel) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """(task name -> group, pairs of groups that can run side by side: every region with every kind of weight gradient).

    Weight gradients are one group if they call the same kernels and take about as long, within a factor of four.
    """
    step = Step.of(graph, cost)
    groups: dict[str, str] = {}
    for number, region in enumerate(regions(graph, step.chain, step.duration)):
        groups |= {graph.name(t): f"{number} {region.name}" for t in step.chain[region.begin : region.end]}
    theirs = list(dict.fromkeys(groups.values()))
    for item in step.items:
        first = graph[item.tasks[0]]
        kernels = "+".join(sorted({launch.kernel for launch in first.launches}))
        size = int(math.log(max(step.duration[item.tasks[0]], 1.0), 4))
        for t in item.tasks:  # tasks that move with it are in its group
            groups[graph.name(t)] = f"{first.kind.name} {kernels} {4**size}".replace("  ", " ")
    mine = [g for g in dict.fromkeys(groups.values()) if g not in set(theirs)]
    return groups, [(a, b) for a in theirs for b in mine]
