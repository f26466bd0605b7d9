"""Costs measured on the device, one task at a time, in random legal orders: never in the order to be predicted."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np

from . import tape
from .cost import CostModel
from .executors.bound import Bound
from .executors.checking import random_schedule
from .graph import TaskGraph
from .memory import plan_memory
from .streams import Event, Stream

RUNS = 8  #: of one random order; the first only warms up


def measure(graph: TaskGraph, *, device: Any = None, seconds: float = 1.0, seed: int = 0,
            progress: Callable[[float], None] | None = None) -> CostModel:
    """Mean time of each task in microseconds, since means are what adds up; works on copies, so no parameter changes.

    Runs for about `seconds`, but at least 7 and at most 104 times, in random legal orders, each with its own plan of the
    memory, so that caches are as full of other things as in a real step, and no fuller: with memory for every buffer a
    task of a large network takes a tenth longer. On a device that captures, each task is timed by itself inside a
    replayed graph. `progress(share done)` is called after every run.
    """
    random = np.random.Generator(np.random.Philox(seed))
    device = device or tape.current().device
    if device.captures:
        return _measure_captured(graph, device, random, progress)
    tick = _timer_overhead()
    samples: list[list[int]] = [[] for _ in range(len(graph))]
    started = perf_counter()
    for n in range(13 * RUNS):
        done = (perf_counter() - started) / seconds
        if n >= 7 and done >= 1:
            break
        if n % RUNS == 0:
            schedule = random_schedule(graph, 1, random)
            order = schedule.ids(graph).tolist()
            bound = Bound(graph, plan_memory(graph, schedule), device, private=True)
            inputs = bound.load_random(random)
            programs = [bound.thunks(t) for t in range(len(graph))]
        bound.load(inputs)
        with np.errstate(all="ignore"):
            for task in order:
                calls = programs[task]
                begin = perf_counter_ns()
                for call in calls:
                    call()
                if n % RUNS:
                    samples[task].append(perf_counter_ns() - begin)
        if progress:
            progress(min(1.0, done))
    times = {graph.name(t): max(_mean(s) - tick, 0.0) / 1000 for t, s in enumerate(samples) if graph[t].iteration == 0}
    sync, wake = measure_sync()
    return CostModel(tasks=times, sync=sync, wake=wake, step=_measure_step(bound, inputs), source="measured", device=device.name)


def _measure_captured(graph: TaskGraph, device: Any, random: np.random.Generator, progress: Callable[[float], None] | None) -> CostModel:
    """Tasks are replayed each by itself, so every buffer has memory of its own."""
    bound = Bound(graph, None, device, private=True)
    inputs = bound.load_random(random)
    found = device.task_times([bound.thunks(t) for t in range(len(graph))], progress)
    times = {graph.name(t): found[t] for t in range(len(graph)) if graph[t].iteration == 0}
    return CostModel(tasks=times, sync=device.hop(), step=_measure_step(bound, inputs), source="measured", device=device.name)


def _measure_step(bound: Bound, inputs: tuple[Any, ...]) -> float:
    """Microseconds that a step takes beside its tasks: inputs in, outputs out."""
    samples = []
    for _ in range(50):
        begin = perf_counter_ns()
        bound.load(inputs)
        bound.results()
        bound.device.synchronize()
        samples.append((perf_counter_ns() - begin) / 1000)
    return statistics.median(samples)


def _mean(samples: list[int]) -> float:
    """Without those above four times the median, when the machine did something else."""
    bound = 4 * statistics.median(samples)
    return statistics.fmean([s for s in samples if s <= bound])


def _timer_overhead() -> float:
    """Nanoseconds that an empty measurement shows."""
    found, nothing = [], tuple[Callable[[], Any]]()
    for _ in range(1000):
        begin = perf_counter_ns()
        for _call in nothing:
            pass
        found.append(perf_counter_ns() - begin)
    return statistics.median(found)


def measure_sync(rounds: int = 400) -> tuple[float, float]:
    """`sync` and `wake` of a CostModel, in microseconds: from the record of an event on one stream to the end of the wait on
    another that sleeps; and what recording takes the first, which has to wake the other."""
    stream = Stream("sync probe")
    to, back = Event(), Event()
    try:
        stream.start([to.wait, back.record] * rounds)
        there, waking = [], []
        for _ in range(rounds):
            begin = perf_counter_ns()
            to.record()
            recorded = perf_counter_ns()
            back.wait()
            there.append((perf_counter_ns() - begin) / 2000)
            waking.append((recorded - begin) / 1000)
        stream.join()
    finally:
        stream.close()
    return statistics.median(there), statistics.median(waking)
