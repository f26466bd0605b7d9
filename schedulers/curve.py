"""Peak against time: of the plans over kept activations, offloaded memory, policies and limits, those that no other one
beats in both its predicted step and its planned peak."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from ..core.graph import TaskGraph
from ..core.placement import Refused
from ..core.tasks import Kind
from ..passes.offload import EACH
from ..plans.memory import MemoryLimitError
from ..plans.plan import Plan
from ..pricing.cost import CostModel
from .away import planned
from .kept import chain, dropped, optimal

LEVELS = 8  #: limits for which the best kept activations are tried, besides none, all and sqrt
PARTLY = 1  #: plans between offloading nothing and all


@dataclass(frozen=True)
class Point:
    """A plan by `policy`; `recompute`, `offload` and `limit` are what `minidl.plan` makes it from. A limit: the policy
    traded time for memory itself, or only some memory is offloaded."""

    plan: Plan
    policy: str
    recompute: str
    offload: str = "none"
    limit: int | None = None

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs most."""
        return max(self.plan.peak_bytes)

    @property
    def choice(self) -> str:
        """The policy and its arguments, for people."""
        again = "" if self.recompute == "none" else f", recompute {self.recompute}"
        if again and self.recompute not in ("all", "sqrt"):
            again = f", recompute all but {sum(b - a + 1 for a, b in map(_ends, self.recompute.split(',')))} layers"
        away = "" if self.offload == "none" else f", offload {self.offload}"
        return f"{self.policy}{again}{away}{'' if self.limit is None else f', within {self.limit:,} bytes'}"


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


def _ends(word: str) -> tuple[int, int]:
    a, _, b = word.partition("-")
    return int(a), int(b or a)


def curve(graph: TaskGraph, cost: CostModel, policies: Sequence[str],
          make: Callable[[str, str, int | None], Plan], done: Callable[[float], None] | None = None) -> list[Point]:
    """The points from the smallest peak to the shortest step. `make`: the plan of a policy for `recompute` and a limit.
    A policy that trades time for memory itself is asked for each of its levels. From plans with all activations kept
    and with sqrt, each kind of memory is offloaded. `done` gets the share that has been tried. Raises Refused if no
    policy can plan this."""
    found, sets, refused = list[Point](), kept_sets(graph, cost), list[Refused]()
    for i, (policy, recompute) in enumerate((p, r) for p in policies for r in sets):
        limit = None
        try:
            while not limit or limit > 0:
                plan = make(policy, recompute, limit)
                found.append(Point(plan, policy, recompute, limit=limit))
                if limit is None and recompute in ("none", "sqrt"):
                    found += _offloaded(found[-1], cost)
                limit = max(plan.peak_bytes) - 1
        except MemoryLimitError:
            pass
        except Refused as error:
            refused.append(error)
        if done:
            done((i + 1) / len(policies) / len(sets))
    if not found:
        raise refused[0]
    return unbeaten(found)


def _offloaded(point: Point, cost: CostModel) -> Iterator[Point]:
    """The points of this plan if it offloads each kind of memory as a whole, or as much as limits between need."""
    for what in EACH[1:]:
        with suppress(Refused):
            every = planned(what, cost, None, lambda _: point.plan)
            yield replace(point, plan=every, offload=what)
            levels = np.linspace(max(every.peak_bytes), point.peak, PARTLY + 2)[1:-1].astype(int).tolist()
            for limit in levels if max(every.peak_bytes) < point.peak else ():
                yield replace(point, plan=planned(what, cost, limit, lambda _: point.plan), offload=what, limit=limit)


def unbeaten(points: Iterable[Point]) -> list[Point]:
    """The points that no other one beats, from the smallest peak to the shortest step; of equal ones the first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.peak, p.plan.step)):
        if not front or point.plan.step < front[-1].plan.step:
            front.append(point)
    return front
