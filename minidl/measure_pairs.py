"""How much two tasks on two streams slow each other down, measured pair by pair on the device.

Never in the schedule that is to be predicted: one stream runs a piece of the chain over and over, the other one weight
gradient, and both are timed alone and together. A piece that is repeated finds its data in the cache; what another stream
adds to its time is therefore held against the time that its tasks take in a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np

from .corun import CoRun
from .cost import CostModel
from .executors.bound import Bound
from .graph import TaskGraph
from .streams import Program, Stream, run_program

PIECE = 2000.0  #: microseconds of a group's tasks that stand for all of them


def measure_pairs(graph: TaskGraph, cost: CostModel, groups: Mapping[str, str], pairs: Iterable[tuple[str, str]], *,
                  device: Any = None, rounds: int = 3, seed: int = 0, progress: Callable[[float], None] | None = None) -> CoRun:
    """The slowdown of each pair (a, b) of groups, both ways; `groups`: task name -> group, `cost`: of the tasks alone.

    Works on copies, so no parameter changes. `progress(share done)` is called after each pair.
    """
    pairs = list(pairs)
    bound = Bound(graph, None, device, private=True)
    bound.load_random(np.random.Generator(np.random.Philox(seed)))
    with np.errstate(all="ignore"):
        for task in range(len(graph)):  # in order, so that everything holds a value
            for call in bound.thunks(task):
                call()
    duration = cost.durations(graph)
    members: dict[str, list[int]] = {}
    for task in range(len(graph)):
        members.setdefault(groups.get(graph.name(task), ""), []).append(task)
    pieces = {name: _piece(members[name], duration) for name in {g for pair in pairs for g in pair}}
    alone = {name: max(float(duration[piece].sum()), 1.0) for name, piece in pieces.items()}

    def program(name: str, stream: Any = None) -> Program:
        return [c for t in pieces[name] for c in bound.thunks(t, stream)]

    slowdown: dict[str, dict[str, float]] = {}
    with _Pairs(bound.device, program, alone, rounds) as measured:
        for n, (a, b) in enumerate(pairs):
            found = measured(a, b)
            for one, other, slow in ((a, b, found[0]), (b, a, found[1])):
                slowdown.setdefault(one, {})[other] = max(1.0, slow)
            if progress:
                progress((n + 1) / len(pairs))
    return CoRun(dict(groups), slowdown, "measured")


class _Pairs:
    """Two programs beside each other on two streams of a device: how many times longer each takes."""

    def __init__(self, device: Any, program: Callable[..., Program], alone: Mapping[str, float], rounds: int) -> None:
        self.device, self.program, self.alone, self.rounds = device, cache(program), alone, rounds

    def __enter__(self) -> _Pairs:
        self.stream = None if self.device.captures else Stream("pairs", 1)
        return self

    def __exit__(self, *_: Any) -> None:
        if self.stream is not None:
            self.stream.close()

    def __call__(self, a: str, b: str) -> tuple[float, float]:
        alone = self.alone[a], self.alone[b]
        if self.stream is None:
            found: tuple[float, float] = self.device.together(lambda one, other: (self.program(a, one), self.program(b, other)), alone)
            return found
        rounds = [_together(self.stream, self.program(a), self.program(b), *alone) for _ in range(self.rounds)]
        return statistics.median(r[0] for r in rounds), statistics.median(r[1] for r in rounds)


def _piece(tasks: Sequence[int], duration: Any) -> list[int]:
    """Tasks evenly over a group, about PIECE long; at least one, of median length."""
    total = float(duration[list(tasks)].sum())
    if total <= PIECE:
        return list(tasks)
    count = max(1, int(len(tasks) * PIECE / total))
    if count == 1:
        return [sorted(tasks, key=lambda t: duration[t])[len(tasks) // 2]]
    return [tasks[i * len(tasks) // count] for i in range(count)]


def _together(stream: Stream, one: Program, other: Program, one_alone: float, other_alone: float) -> tuple[float, float]:
    """How many times longer each program takes beside the other: what that adds to its time, over the time `alone` that its
    tasks take in a step. The second runs for as long as the first, and longer."""
    times = max(1, round(PIECE / one_alone))
    repeats = max(2, round(2.5 * times * one_alone / other_alone))
    base_one, base_other = _seconds(one, times), _seconds(other, max(1, repeats // 2)) / max(1, repeats // 2)
    stamps: list[float] = []
    program: Program = []
    for _ in range(repeats):
        program += [*other, lambda: stamps.append(perf_counter())]
    stream.start([lambda: stamps.append(perf_counter()), *program])
    while not stamps:
        pass
    begin = perf_counter()
    run_program(one * times)
    end = perf_counter()
    stream.join()
    inside = [s for s in stamps if begin <= s <= end]
    beside = (inside[-1] - inside[0]) / (len(inside) - 1) if len(inside) >= 3 else stamps[1] - stamps[0]
    return 1 + (end - begin - base_one) * 1e6 / (times * one_alone), 1 + (beside - base_other) * 1e6 / other_alone


def _seconds(program: Program, times: int) -> float:
    begin = perf_counter()
    run_program(program * times)
    return perf_counter() - begin
