"""Contention: how much tasks on two streams slow each other down.

Tasks belong to groups, and a table says how much longer a task of one group takes while one of another runs beside it.
The table comes from pairs that were measured by themselves (`minidl.measuring.pairs`) or from flops and bytes, never
from the schedule that it then predicts. Groups without a measured pair slow each other by what they need together of
the device (`needs`). One number, fitted to another schedule's step (`minidl.pricing.fit`), scales all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core.columns import Floats, Ints
from ..core.graph import TaskGraph
from ..core.machine import is_number
from ..core.tasks import as_recorded, task_name

FLOPS_PER_US, BYTES_PER_US = 2e4, 1e4  #: assumed of one modest CPU core, also for copies; not measured


@dataclass(frozen=True)
class CoRun:
    """`groups`: task name -> group. `slowdown[a][b]`: how many times longer a task of group a takes while one of group
    b runs on another stream. `needs`: group -> the shares, from 0 to 1, of the memory's bandwidth and of the
    multiprocessors that its tasks need when they are alone: a pair that `slowdown` lacks takes as many times longer as
    both need together of what there is less of, max(1, sum of bandwidths, sum of multiprocessors), and 1 if one has no
    needs. `strength`: what is above 1 counts so many times. `source`: measured, estimated or given."""

    groups: Mapping[str, str] = field(default_factory=dict)
    slowdown: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    source: str = "given"
    needs: Mapping[str, Sequence[float]] = field(default_factory=dict)
    strength: float = 1.0

    def __post_init__(self) -> None:
        for what, table, kind, name in (("the groups of tasks that run beside others", self.groups, str, "names"),
                                        ("the slowdown of groups beside others", self.slowdown, Mapping, "tables"),
                                        ("what groups need of the device", self.needs, Sequence, "lists")):
            if not isinstance(table, Mapping) or not all(isinstance(value, kind) for value in table.values()):
                raise ValueError(f"{what} must be a table of {name}")
        for a, row in self.slowdown.items():
            for b, factor in row.items():
                if not is_number(factor) or not 1e-6 <= factor <= 1e6:
                    raise ValueError(f"the slowdown of {a[:40]} beside {b[:40]} is {repr(factor)[:40]}; it must "
                                     f"be a finite number above 0")
        for name, need in self.needs.items():
            if len(need) != 2 or not all(is_number(share) and 0 <= share <= 1 for share in need):
                raise ValueError(f"{name[:40]} needs {repr(need)[:40]} of the device; expected two numbers from 0 to 1")
        if not is_number(self.strength) or not 0 <= self.strength <= 1e6:
            raise ValueError(f"the strength of contention is {repr(self.strength)[:40]}; it must be a finite number "
                             f">= 0")

    def factor(self, a: str, b: str) -> float:
        """How many times longer a task of group a takes while one of group b runs on another stream."""
        known = self.slowdown.get(a, {}).get(b)
        if known is None:
            both = zip(self.needs.get(a, ()), self.needs.get(b, ()), strict=False)
            known = max([1.0, *(one + other for one, other in both)])
        return float(known if self.strength == 1 else max(1e-6, 1 + self.strength * (known - 1)))

    def gain(self, a: str, b: str) -> float:
        """How many times as much work two streams do as one in the same time: at best 2; 1 means no gain."""
        return 1 / self.factor(a, b) + 1 / self.factor(b, a)

    def table(self, graph: TaskGraph) -> tuple[Ints, Floats]:
        """The group number of each task of the graph, and a table [group, group] of slowdowns."""
        names = sorted({*self.slowdown, *(b for row in self.slowdown.values() for b in row), *self.needs})
        number = {name: i + 1 for i, name in enumerate(names)}  # 0: no group
        group = [number.get(self.groups.get(task_name(as_recorded(key)), ""), 0) for key in graph.keys.tolist()]
        factor = np.ones((len(names) + 1, len(names) + 1))
        factor[1:, 1:] = [[self.factor(a, b) for b in names] for a in names]
        return np.array(group, np.int64), factor

    @classmethod
    def estimated(cls, graph: TaskGraph, groups: Mapping[str, str], pairs: Iterable[tuple[str, str]]) -> CoRun:
        """An estimate from flops and bytes: streams share the memory bandwidth; groups that need more slow down."""
        arithmetic, traffic = dict[str, float](), dict[str, float]()
        for task, key in enumerate(graph.keys.tolist()):
            name = groups.get(task_name(as_recorded(key)), "")
            arithmetic[name] = arithmetic.get(name, 0.0) + float(graph.flops[task]) / FLOPS_PER_US
            traffic[name] = traffic.get(name, 0.0) + float(graph.bytes[task]) / BYTES_PER_US
        share = {g: min(1.0, traffic[g] / max(arithmetic[g], traffic[g], 1e-12)) for g in traffic}
        slowdown: dict[str, dict[str, float]] = {}
        for a, b in pairs:
            much = max(1.0, share.get(a, 0.0) + share.get(b, 0.0))
            slowdown.setdefault(a, {})[b] = slowdown.setdefault(b, {})[a] = much
        return cls(dict(groups), slowdown, "estimated")

