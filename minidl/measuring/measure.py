"""Costs measured on the device, one task at a time, in random legal orders: never in the order to be predicted.

A cost is the time of a task on a free core: repeats that other work on the machine has disturbed do not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from graphlib import TopologicalSorter
from time import perf_counter
from typing import Any

import numpy as np

from ..autograd import tape
from ..core.columns import Floats, spread
from ..core.graph import TaskGraph, check_kinds
from ..core.placement import Refused
from ..core.schedule import Lane, Schedule
from ..core.tasks import Kind
from ..passes.draft import Draft
from ..passes.split import split
from ..plans.memory import plan_memory
from ..pricing.cost import CostModel
from ..runtime.bound import Bound
from .lanes import measure_lanes, measure_memory, probe, stamp_overhead

RUNS = 8  #: the least runs of one random order; the first is a warm-up
MOST_RUNS = 104  #: of all orders
GOES_ON = 0.99  #: how often a random order goes on with what the last tasks have made ready
ORDERS = 3  #: whole orders that are replayed, on a device that captures graphs
DISTURBED = 1.25  #: a repeat that takes so many times as long as the faster ones was disturbed


def measure(graph: TaskGraph, *, device: Any = None, seconds: float = 1.0, parts: int | Sequence[int] = 1,
            progress: Callable[[float], None] | None = None) -> CostModel:
    """A cost model with the mean time of each task in microseconds. It works on copies, so no parameter changes.

    Runs for about `seconds`, without the time that it takes to draw orders, but at least RUNS and at most MOST_RUNS
    times, see `Profile`. `parts`: also the times of tasks in so many parts, or in each of several numbers, for as long
    again each. On a device that captures graphs, each task is timed by itself inside a replayed graph. Calls
    `progress(share done)` after every run.
    """
    check_kinds(graph=(graph, TaskGraph))
    device = tape.device_of(device)
    if device.captures:
        return _measure_captured(graph, device, np.random.Generator(np.random.Philox(0)), progress)
    profile = Profile(graph, device)
    for n in range(MOST_RUNS):
        if n >= RUNS and profile.seconds >= seconds:
            break
        profile.run()
        if progress:
            progress(min(1.0, profile.seconds / seconds))
    cost = profile.costs()
    tasks = dict(cost.tasks)
    for count in sorted({1, *([parts] if isinstance(parts, int) else parts)})[1:]:
        with suppress(Refused):  # no task can be cut in so many
            cut = measure(split(Draft.of(graph), count).graph, device=device, seconds=seconds, progress=progress).tasks
            tasks |= {f"{name}/{count}": time for name, time in cut.items() if name not in tasks}
    return replace(cost, tasks=tasks)


class Profile:
    """Times every task of a graph in random legal orders, see `warm_order`, each with its own memory plan, so that
    caches are as warm as in a real step. (With separate memory for every buffer, a task of a large network takes a
    tenth longer; in uniformly random orders, which jump between micro-batches, a third.) The tasks run on a lane of the
    device's kind, which stamps them. For devices that do not capture graphs.

    Another order is drawn when the last one has run for as long as it took to draw. `seconds`: the time of all runs.
    """

    def __init__(self, graph: TaskGraph, device: Any = None, seed: int = 0) -> None:
        self.graph, self.device = graph, tape.device_of(device)
        self._random = np.random.Generator(np.random.Philox(seed))
        self._samples: list[list[Any]] = []  # for each order, of each run the times of all tasks
        self._around: list[float] = []  # of each run what it takes besides its tasks, when these have filled the caches
        self._tick, self.seconds = stamp_overhead(self.device), 0.0
        self._redraw = 0.0  # when `seconds` is so much, another order may be drawn

    def run(self) -> None:
        """Runs and times all tasks once."""
        if not self._samples or (len(self._samples[-1]) >= RUNS - 1 and self.seconds >= self._redraw):
            self._draw()
        begin = perf_counter()
        self._once()
        self.seconds += (took := perf_counter() - begin)
        _, start, end = self._lanes.stamps()[0].T
        self._around.append((took - (end[-1] - start[0])) * 1e6)
        self._samples[-1].append(spread(self._order, (end - start) * 1e6, len(self._order)))

    def _once(self) -> None:
        self._bound.load(self._inputs)
        self._lanes.run()
        self._bound.results()

    def _draw(self) -> None:
        """Draws another order, plans its memory, and runs it once, to warm up."""
        begin = perf_counter()
        order = warm_order(self.graph, self._random)
        self._order, plan = np.array(order), plan_memory(self.graph, Schedule.of(self.graph, {Lane(0): order}))
        self._samples.append([])
        self._bytes = plan.peak_bytes
        self._bound = Bound(self.graph, plan, self.device, private=True)
        self._inputs = self._bound.load_random(self._random)
        self._lanes = self.device.lanes(probe([order], [], self._bound.thunks), trace=True)
        self._once()
        self._redraw = self.seconds + perf_counter() - begin

    def costs(self) -> CostModel:
        """The mean times of the tasks over the undisturbed runs so far, at least one."""
        time = np.maximum(undisturbed([np.array(runs) for runs in self._samples if runs]) - self._tick, 0.0).tolist()
        times = {self.graph.name(t): time[t] for t in range(len(self.graph)) if self.graph[t].iteration == 0}
        return CostModel(tasks=times, **measure_lanes(self.device), step=statistics.median(self._around),
                         memory=measure_memory(self.device, self._bytes), source="measured",
                         device=self.device.name)


def warm_order(graph: TaskGraph, random: np.random.Generator) -> list[int]:
    """A random legal order of all tasks. Mostly it goes on with what the last tasks have made ready, in random order,
    as every schedule does, so that a task finds its inputs in the cache; sometimes any other ready task comes next.
    Updates come when nothing else is ready, or at random."""
    update = (graph.kind == Kind.U).tolist()
    left, found, ready = TopologicalSorter(dict(enumerate(graph.preds.lists()))), list[int](), list[int]()
    left.prepare()
    while left.is_active():
        made = [*left.get_ready()]
        random.shuffle(made)
        ready = [t for t in made if update[t]] + ready + [t for t in made if not update[t]]
        task = ready.pop(-1 if random.random() < GOES_ON else int(random.integers(len(ready))))
        found.append(task)
        left.done(task)
    return found


def undisturbed(samples: Sequence[Floats], disturbed: float = DISTURBED) -> Floats:
    """The mean time of each task on a free core, from arrays (runs, tasks), one for each order.

    Means, because the times of a step are added up. Other work on the machine only adds time, and hits tasks one by
    one: a repeat counts if it takes less than `disturbed` times the lower quartile of its task in this order, and an
    order if it takes less than that times the fastest one.
    """
    means = []
    for runs in samples:
        counts = runs <= disturbed * np.quantile(runs, 0.25, axis=0)
        means.append(np.where(counts, runs, 0.0).sum(axis=0) / counts.sum(axis=0))
    total = np.sum(means, axis=1)
    return np.mean([mean for mean, sum_ in zip(means, total, strict=True) if sum_ <= disturbed * total.min()], axis=0)


def of_ranks(every: Sequence[CostModel]) -> CostModel:
    """The costs of several ranks that measured the same graph at the same time, so that all cores were at work as they
    are in a step: the mean of those ranks that nothing disturbed, as of orders in `undisturbed`; all else as rank 0 has
    it. Costs that were not measured are rank 0's."""
    first = every[0]
    if first.source != "measured" or any(cost.tasks.keys() != first.tasks.keys() for cost in every):
        return first
    times = undisturbed([np.array([[*(cost.tasks[name] for name in first.tasks)]]) for cost in every]).tolist()
    return replace(first, tasks=dict(zip(first.tasks, times, strict=True)))


def transfer_time(microseconds: Sequence[float]) -> float:
    """The mean time of a transfer between ranks that nothing disturbed; naps make it vary more than a task's."""
    return float(undisturbed([np.array([microseconds]).T], 2.0)[0])


def _measure_captured(graph: TaskGraph, device: Any, random: np.random.Generator,
                      progress: Callable[[float], None] | None) -> CostModel:
    """Costs on a device that captures graphs. Each task is replayed by itself, so every buffer has its own memory.
    `launch` is what a task takes longer between other tasks, see `_between`.

    A task whose data fill more than half of the device's cache is replayed on two sets of buffers in turn: otherwise
    its repeats would find data in the cache that a step has to fetch from memory.
    """
    bound = Bound(graph, None, device, private=True)
    inputs = bound.load_random(random)
    programs = [[bound.thunks(t)] for t in range(len(graph))]
    device.once([call for (program,) in programs for call in program])  # so that every buffer holds a value
    for t, sets in enumerate(programs):
        touched = {view.storage for launch in graph.launches[t] for view in launch.views}
        if 2 * sum(graph.storages[s].bytes for s in touched) > device.cache_bytes:
            sets.append(bound.thunks_elsewhere(t))
    found = device.task_times(programs, progress)
    times = {graph.name(t): found[t] for t in range(len(graph)) if graph[t].iteration == 0}
    launch = _between(graph, device, random, sum(found), sum(bool(sets[0]) for sets in programs))
    return CostModel(tasks=times, launch=launch, node=device.node(), sync=device.hop(),
                     step=_measure_step(bound, inputs), source="measured", device=device.name)


def _between(graph: TaskGraph, device: Any, random: np.random.Generator, alone: float, tasks: int) -> float:
    """Microseconds that a task takes longer between other tasks than repeated, when it finds its instructions and
    often its data in the caches: from ORDERS random legal orders as a whole, with the memory that a step has. `alone`:
    the sum of all tasks when repeated; `tasks`: those with launches."""
    whole = []
    for _ in range(ORDERS):
        order = warm_order(graph, random)
        bound = Bound(graph, plan_memory(graph, Schedule.of(graph, {Lane(0): order})), device, private=True)
        bound.load_random(random)
        calls = [*bound.refills(), *(call for t in order for call in bound.thunks(t))]
        device.once(calls)
        whole += device.task_times([[calls]], repeats=1)
    return max(0.0, statistics.median(whole) - alone) / max(tasks, 1)


def _measure_step(bound: Bound, inputs: tuple[Any, ...]) -> float:
    """Microseconds of the device between two steps, to copy inputs and outputs; the host runs ahead."""
    slots = bound.feed.slots()

    def around() -> None:
        bound.load(inputs)
        if slots:  # as the graph of a step does
            slot = slots[bound.feed.turn]
            for call in (*slot.upload, *slot.leave, slot.done):
                call()
        bound.results()

    return float(bound.device.step_time(around))
