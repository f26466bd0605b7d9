"""Peak against time, over kept activations, how late weight gradients may run, offloaded memory, shards on ranks that
are alike, and what a policy gives up by itself: the fastest plan within a memory limit, and the curve of the plans that
no other one beats in both its predicted step and its planned peak. Both search the same plans: within the peak of a
point of the curve there is a plan that is as fast, and the least limit that can be met is the smallest peak of the
curve.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from ...core.graph import TaskGraph
from ...core.machine import PlanError
from ...core.placement import Refused
from ...core.tasks import Kind
from ...passes.offload import EACH
from ...passes.shard import Shards
from ...plans.memory import MemoryLimitError
from ...plans.plan import Plan
from ...pricing.cost import CostModel
from .away import offloading
from .kept import chain, dropped, optimal

Level = Shards | int | str  #: what is shared out, as `minidl.plan` takes it
#: from `recompute`, a limit, shards and the `lag` of weight gradients to a policy's plan
Make = Callable[[str, int | None, Level, int | None], Plan]
NAMED = "none", "all", "sqrt"  #: choices of `recompute`
LAGS = 0, 1, 4, 16, 64, 256, 1024  #: that are tried, until one changes nothing
LEVELS = 8  #: limits for which the best kept activations are tried, besides none, all and sqrt


@dataclass(frozen=True)
class Point:
    """A plan; `recompute`, `offload`, `shard`, `limit` and `lag` are what `minidl.plan` makes it from. A limit, which
    is its peak: the policy traded time for memory itself, or only some memory is offloaded."""

    plan: Plan
    recompute: str = "none"
    offload: str = "none"
    shard: Level = 0
    limit: int | None = None
    lag: int | None = None

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs most."""
        return max(self.plan.peak_bytes)

    @property
    def choice(self) -> str:
        """The policy and its arguments, for people."""
        again = "" if self.recompute == "none" else f", recompute {self.recompute}"
        if again and self.recompute not in NAMED:
            again = f", recompute {len({*self.plan.graph.unit[self.plan.graph.kind == Kind.R].tolist()})} layers"
        away = "" if self.offload == "none" else f", offload {self.offload}"
        shared = f", shard {self.shard}" if self.shard else ""
        late = "" if self.lag is None else f", lag {self.lag}"
        return (f"{self.plan.scheduler}{late}{again}{away}{shared}"
                f"{'' if self.limit is None else f', within {self.limit:,} bytes'}")


def kept_sets(graph: TaskGraph, cost: CostModel) -> list[str]:
    """Choices of `recompute` that differ: none, all, sqrt, and the optimum of LEVELS memory limits."""
    of, found = chain(graph, cost), dict[tuple[int, ...], str]({(): "none"})
    for name in ("sqrt", "all"):
        found.setdefault(dropped(graph, cost, name), name)
    most = int(of.whole.sum() + of.backward.max())
    least = bisect_left(range(most), True, key=lambda n: optimal(of, n) is not None)
    layers = {*graph.unit[graph.kind == Kind.F].tolist()}
    for limit in np.linspace(least, most, LEVELS).astype(int).tolist():
        again = of.dropped(optimal(of, limit) or ())
        if layers - {*again}:
            found.setdefault(again, in_ranges(layers - {*again}))
    return [*found.values()]


def in_ranges(numbers: Iterable[int]) -> str:
    """`0-3,7`."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(pairs) for _, pairs in runs)]
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in ends)


def _whole(graph: TaskGraph, cost: CostModel, shards: Sequence[Level], make: Make, lags: bool) -> Iterator[Point]:
    """The policy's plans without a limit and without copies: the plain one, and those with shards, recomputation or, if
    they are asked for, `lags`. Raises Refused if the plain one cannot be."""
    yield (plain := Point(make("none", None, shards[0], None), shard=shards[0]))
    for lag in LAGS if lags else ():
        with suppress(Refused):
            yield (late := Point(make("none", None, shards[0], lag), shard=shards[0], lag=lag))
            if late.plan.graph.edges == plain.plan.graph.edges and np.array_equal(
                    late.plan.schedule.keys, plain.plan.schedule.keys):
                break
    for level in shards:
        for how in kept_sets(graph, cost)[1:] if level == shards[0] else NAMED:
            with suppress(Refused):
                yield Point(make(how, None, level, None), how, shard=level)


def _tried(points: Sequence[Point]) -> list[Point]:
    """Those to look at further, from the shortest step on: those that no other one beats, and all that a user can name.
    Once memory is offloaded these may need the least, since shards need places for parts of other ranks."""
    front = {*map(id, unbeaten(points))}
    return sorted((p for p in points if id(p) in front or (p.recompute in NAMED and p.lag is None)),
                  key=lambda point: point.plan.step)


def _within(point: Point, limit: int, make: Make) -> Point:
    """The plan of the same policy within a smaller limit, if it trades time for memory. Raises MemoryLimitError."""
    plan = (point.plan.within or (lambda limit: make(point.recompute, limit, point.shard, point.lag)))(limit)
    return replace(point, plan=plan, limit=max(plan.peak_bytes))


def _away(point: Point, away: Callable[[str, int | None], Plan], what: str, limit: int | None = None) -> Point:
    """The point's plan with this memory offloaded, or within a limit as much as this needs."""
    return replace(point, plan=(plan := away(what, limit)), offload=what, limit=limit and max(plan.peak_bytes))


def curve(graph: TaskGraph, cost: CostModel, make: Make, shards: Sequence[Level] = (0,), found: Sequence[Point] = (),
          done: Callable[[float], object] = lambda share: None, lags: bool = False) -> list[Point]:
    """The points of a policy from the smallest peak to the shortest step, with those that have been `found`. None needs
    more than the plain plan, to which any limit above its peak leads. `shards`: those that the user wants, or all to
    try, 0 first; `lags`: whether weight gradients are given bounds. `done` gets the share that has been tried. Raises
    Refused if the policy cannot plan this."""
    points = [*_whole(graph, cost, shards, make, lags)]
    found, tried = [*found, points[0]], _tried(points)
    for i, point in enumerate(tried):
        found += (one for one in (point, *_less(point, cost, make, found)) if one.peak < points[0].peak)
        done((i + 1) / len(tried))
    return unbeaten(found)


def _less(point: Point, cost: CostModel, make: Make, found: Sequence[Point]) -> Iterator[Point]:
    """The plan within less and less memory by its policy; with each kind of memory offloaded; with as much as half
    of this memory needs, unless something that is `found` takes less of both; and with less if this needs less."""
    with suppress(MemoryLimitError, Refused):
        less = point
        while less.peak > 1:
            yield (less := _within(point, less.peak - 1, make))
    away = offloading(point.plan, cost)
    beaten = any(p.peak <= point.peak and p.plan.step <= point.plan.step for p in found if p.plan is not point.plan)
    for what in EACH[1:]:
        with suppress(MemoryLimitError, Refused):
            yield (every := _away(point, away, what))
            if what != "states" and not (beaten or any(p.peak <= every.peak and p.plan.step <= point.plan.step
                                                       for p in found)):
                limit = (every.peak + point.peak) // 2  # if it is all, states leave first
                while (some := _away(point, away, what, limit)).peak < limit:
                    limit = some.peak  # until its own peak, as a limit, leads to it
                yield some
            while what != "all":  # until nothing needs less
                yield (every := _away(point, away, what, every.peak - 1))


def fastest(graph: Any, cost: Any, limit: int | None, shards: Sequence[Level], make: Make, lags: bool = False) -> Plan:
    """The policy's fastest plan within a limit; the plain one if it fits. Plans without copies come in the order of
    their steps, and the search ends at one whose step is not shorter than the best that fits. `shards`, `lags`: as for
    `curve`. Raises MemoryLimitError with the least that can be had if nothing fits."""
    if limit is None or not isinstance(graph, TaskGraph):
        raise PlanError("offload auto finds the fastest plan of a recorded step within a memory limit; give both")
    points = _whole(graph, cost, shards, make, lags)
    whole = next(points)
    if whole.peak <= limit:
        return whole.plan.with_known(limit=limit)
    found, least = list[Point](), list[int]()
    with suppress(MemoryLimitError, Refused):
        found.append(Point(make("auto", limit, shards[0], None), "auto", shard=shards[0]))
    for point in _tried([whole, *points]):
        if found and point.plan.step >= min(one.plan.step for one in found):
            break
        least.append(point.peak)
        found += [point] * (point.peak <= limit)
        away = [partial(_away, point, offloading(point.plan, cost), what, limit) for what in EACH[1:]]
        for one in (partial(_within, point, limit, make), *away) if point.peak > limit else ():
            with suppress(Refused):
                try:
                    found.append(one())
                except MemoryLimitError as error:
                    least.append(error.least or whole.peak)
    if not found:
        raise MemoryLimitError(f"no plan by {whole.plan.scheduler} fits the limit of {limit:,} bytes: with all "
                               f"activations kept it needs {whole.peak:,}, and the least that can be had is "
                               f"{min(least):,}", min(least))
    shortest = dict[str, Plan]()
    for point in sorted(found, key=lambda point: point.plan.step):
        words = {f"lag {point.lag}": point.lag is not None, f"shard {point.shard}": point.shard != shards[0],
                 "recompute": point.recompute != "none", "offload": point.offload != "none"}
        shortest.setdefault(" and ".join(word for word, is_so in words.items() if is_so) or "less overlap", point.plan)
    best, chosen = next(iter(shortest.items()))
    each = ", ".join(f"{name} {plan.step / whole.plan.step - 1:+.1%}" for name, plan in shortest.items())
    return chosen.with_known(limit=limit, remarks=(
        *chosen.remarks, f"of what fits {limit:,} bytes in place of {whole.peak:,}, {best} is the fastest predicted: "
        f"{each} time a step"))


def unbeaten(points: Iterable[Point]) -> list[Point]:
    """The points that no other one beats, from the smallest peak to the shortest step; of equal ones the first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.peak, p.plan.step)):
        if not front or point.plan.step < front[-1].plan.step:
            front.append(point)
    return front
