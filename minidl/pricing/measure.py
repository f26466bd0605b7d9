"""Costs measured on the device, one task at a time, in random legal orders: never in the order to be predicted."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np

from ..autograd import tape
from ..graph import TaskGraph
from ..runtime.bound import Bound
from ..runtime.checking import random_schedule
from ..runtime.lanes import Work
from ..runtime.memory import plan_memory
from .cost import CostModel
from .measure_lanes import measure_lanes, probe, stamp_overhead

RUNS = 8  #: runs of one random order; the first is a warm-up


def measure(graph: TaskGraph, *, device: Any = None, seconds: float = 1.0, seed: int = 0,
            progress: Callable[[float], None] | None = None) -> CostModel:
    """A cost model with the mean time of each task in microseconds. It works on copies, so no parameter changes.

    Runs for about `seconds`, but at least 7 and at most 104 times, see `Profile`. On a device that captures graphs,
    each task is timed by itself inside a replayed graph. Calls `progress(share done)` after every run.
    """
    device = device or tape.current().device
    if device.captures:
        return _measure_captured(graph, device, np.random.Generator(np.random.Philox(seed)), progress)
    profile = Profile(graph, device, seed)
    started = perf_counter()
    for n in range(13 * RUNS):
        done = (perf_counter() - started) / seconds
        if n >= 7 and done >= 1:
            break
        profile.run()
        if progress:
            progress(min(1.0, done))
    return profile.costs()


class Profile:
    """Times every task of a graph in random legal orders, each with its own memory plan, so that caches are as warm as
    in a real step. (With separate memory for every buffer, a task of a large network takes a tenth longer.) The tasks
    run on a lane of the device's kind, which stamps them. For devices that do not capture graphs."""

    def __init__(self, graph: TaskGraph, device: Any = None, seed: int = 0) -> None:
        self.graph, self.device = graph, device or tape.current().device
        self._random = np.random.Generator(np.random.Philox(seed))
        self._samples: list[list[Any]] = []  # for each order, of each run the times of all tasks
        self._tick, self._runs = stamp_overhead(self.device), 0

    def run(self) -> None:
        """Runs and times all tasks once."""
        if self._runs % RUNS == 0:
            self._draw()
        self._bound.load(self._inputs)
        self._lanes.run()
        if self._runs % RUNS != 0:
            _, start, end = self._lanes.stamps()[0].T
            times = np.empty(len(self._order))
            times[self._order] = (end - start) * 1e6
            self._samples[-1].append(times)
        self._runs += 1

    def _draw(self) -> None:
        """Draws another order and plans its memory."""
        schedule = random_schedule(self.graph, 1, self._random)
        self._order = schedule.ids(self.graph)
        self._samples.append([])
        self._bound = Bound(self.graph, plan_memory(self.graph, schedule), self.device, private=True)
        self._inputs = self._bound.load_random(self._random)
        self._lanes = self.device.lanes(probe([self._order.tolist()], [], self._bound.thunks), trace=True)

    def costs(self) -> CostModel:
        """The means over the runs so far, at least two; means, because the times of a step are added up. Of each order
        only the faster half of the runs counts: the machine did something else during the others."""
        faster = [sorted(runs, key=np.sum)[: (len(runs) + 1) // 2] for runs in self._samples]
        mean = np.maximum(np.mean([times for runs in faster for times in runs], axis=0) - self._tick, 0.0).tolist()
        times = {self.graph.name(t): mean[t] for t in range(len(self.graph)) if self.graph[t].iteration == 0}
        return CostModel(tasks=times, **measure_lanes(self.device), step=_measure_step(self._bound, self._inputs),
                         source="measured", device=self.device.name)


def _measure_captured(graph: TaskGraph, device: Any, random: np.random.Generator,
                      progress: Callable[[float], None] | None) -> CostModel:
    """Costs on a device that captures graphs. Each task is replayed by itself, so every buffer has its own memory."""
    bound = Bound(graph, None, device, private=True)
    inputs = bound.load_random(random)
    found = device.task_times([bound.thunks(t) for t in range(len(graph))], progress)
    times = {graph.name(t): found[t] for t in range(len(graph)) if graph[t].iteration == 0}
    return CostModel(tasks=times, sync=device.hop(), step=_measure_step(bound, inputs),
                     source="measured", device=device.name)


def _measure_step(bound: Bound, inputs: tuple[Any, ...]) -> float:
    """Microseconds that a step takes besides its tasks, to copy inputs and outputs. Where the host runs ahead of the
    device, only the device's time between two steps."""

    def around() -> None:
        bound.load(inputs)
        bound.results()

    if bound.device.captures:
        return float(bound.device.step_time(around))
    lanes = bound.device.lanes(Work(["probe"], [0], [[]], [], bound.thunks, str, ends=bound.ends()))
    if getattr(lanes, "whole", False):
        def around() -> None:  # with the inputs and outputs, and without tasks
            lanes.run(inputs, memory := bound.blank())
            bound.tensors(memory)
    samples = []
    for _ in range(50):
        begin = perf_counter_ns()
        around()
        bound.device.synchronize()
        samples.append((perf_counter_ns() - begin) / 1000)
    return statistics.median(samples)
