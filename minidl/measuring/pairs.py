"""How much two tasks on two streams slow each other down, measured pair by pair on the device.

It never measures the schedule that is to be predicted: one stream repeats a piece of the chain, the other a weight
gradient, and both are timed alone and together; on the CPU each is held to a core of its own. A repeated piece finds
its data in the cache; so the time that the other stream adds is compared with the time of its tasks in a step.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from time import perf_counter
from typing import Any

import numpy as np

from ..core.columns import grouped
from ..core.graph import TaskGraph
from ..devices.device import cpu
from ..devices.lanes import Program, Stop, Stream
from ..pricing.corun import CoRun
from ..pricing.cost import CostModel
from ..runtime.bound import Bound
from .lanes import lane_cores
from .sms import needs

PIECE = 1000.0  #: microseconds: the length of the sample that stands for a group


def measure_pairs(graph: TaskGraph, cost: CostModel, groups: Mapping[str, str], pairs: Iterable[tuple[str, str]], *,
                  device: Any = None, rounds: int = 3, progress: Callable[[float], None] | None = None) -> CoRun:
    """The slowdown of each pair (a, b) of groups, both ways. `groups`: task name -> group; `cost`: the times of the
    tasks alone.

    Takes the median of `rounds`. Works on copies, so no parameter changes. Calls `progress(share done)` after each
    pair.
    """
    pairs = list(pairs)
    bound = Bound(graph, None, device, private=True)
    bound.load_random(np.random.Generator(np.random.Philox(0)))
    bound.device.once([call for task in range(len(graph)) for call in bound.thunks(task)])  # every buffer has a value
    duration = cost.durations(graph)
    members = grouped((groups.get(graph.name(task), ""), task) for task in range(len(graph)))
    pieces = {name: _piece(members[name], duration) for name in {g for pair in pairs for g in pair}}
    alone = {name: max(float(duration[piece].sum()), 1.0) for name, piece in pieces.items()}

    @cache
    def program(name: str, stream: Any = None) -> Program:
        calls = [c for t in pieces[name] for c in bound.thunks(t, stream)]
        return calls if bound.device.captures else bound.device.program(calls)

    def beside(stream: Stream, a: str, b: str) -> tuple[float, float]:
        """How many times longer each of two programs takes while the other runs."""
        before = by_itself(a), by_itself(b)
        times = max(1, round(max(PIECE, 3 * alone[b]) / alone[a]))
        repeats = 2 + round(2.5 * times * alone[a] / alone[b])  # longer than the other
        both = _together(stream, program(a), times, program(b), repeats)
        return 1 + (both[0] - before[0]) / alone[a], 1 + (both[1] - before[1]) / alone[b]

    found: dict[tuple[str, str], list[tuple[float, float]]] = {pair: [] for pair in pairs}
    with nullcontext() if bound.device.captures else _lane_beside() as stream:
        for n in range(rounds):
            # anew in each round, since the machine's speed drifts
            by_itself = cache(lambda name: _microseconds(program(name), max(1, round(PIECE / alone[name]))))
            for i, (a, b) in enumerate(pairs):
                found[a, b].append(beside(stream, a, b) if stream is not None else bound.device.together(
                    lambda one, other, a=a, b=b: (program(a, one), program(b, other)), (alone[a], alone[b])))
                if progress:
                    progress((n * len(pairs) + i + 1) / (rounds * len(pairs)))
    slowdown: dict[str, dict[str, float]] = {}
    for (a, b), both in found.items():
        for one, other, side in ((a, b, 0), (b, a, 1)):
            slowdown.setdefault(one, {})[other] = max(1.0, statistics.median(slow[side] for slow in both))
    return CoRun(dict(groups), slowdown, "measured",
                 needs(graph, cost, groups, bound.device) if bound.device.captures else {})


@contextmanager
def _lane_beside() -> Iterator[Stream]:
    """A stream beside this thread, each held to a core of its own if the system allows it."""
    stream, cores, held = Stream("pairs", 1), os.sched_getaffinity(0), lane_cores()
    try:
        if len(held) == 2:
            os.sched_setaffinity(0, held[:1])
            stream.start([partial(os.sched_setaffinity, 0, held[1:])])
            stream.join()
        yield stream
    finally:
        stream.close()
        if held:
            os.sched_setaffinity(0, cores)


def _piece(tasks: Sequence[int], duration: Any) -> list[int]:
    """A sample of tasks, spread evenly over the group, about PIECE long; at least one task, of median length."""
    total = float(duration[list(tasks)].sum())
    if total <= PIECE:
        return list(tasks)
    count = max(1, int(len(tasks) * PIECE / total))
    if count == 1:
        return [sorted(tasks, key=lambda t: duration[t])[len(tasks) // 2]]
    return [tasks[i * len(tasks) // count] for i in range(count)]


def _together(stream: Stream, one: Program, times: int, other: Program, repeats: int) -> tuple[float, float]:
    """Microseconds per run of each program while the other runs beside it, `repeats` times on the stream."""
    stamps, failed = list[float](), list[Stop]()
    stamp: Program = [lambda: stamps.append(perf_counter())]
    stream.start([*stamp, *[*other, *stamp] * repeats], failed.append)
    while len(stamps) < 2 and not failed:  # until both run and their data are in the cache
        cpu().once(one)
    begin = perf_counter()
    cpu().once(one * times)
    end = perf_counter()
    if (error := stream.join().error) is not None:
        raise error
    inside = [s for s in stamps if begin <= s <= end]
    inside = inside if len(inside) > 1 else stamps[1:]
    return (end - begin) * 1e6 / times, (inside[-1] - inside[0]) * 1e6 / (len(inside) - 1)


def _microseconds(program: Program, times: int) -> float:
    cpu().once(program)
    begin = perf_counter()
    cpu().once(program * times)
    return (perf_counter() - begin) * 1e6 / times
