"""Contention: how much tasks on two streams slow each other down.

Tasks belong to groups, and a table says how much longer a task of one group takes while one of another runs beside it.
The table comes from pairs that were measured by themselves (`minidl.measuring.pairs`) or from flops and bytes;
never from the schedule that it then predicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..core.columns import Floats, Ints
from ..core.graph import TaskGraph
from ..core.machine import is_number
from ..core.tasks import as_recorded, task_name

FLOPS_PER_US, BYTES_PER_US = 2e4, 1e4  #: assumed of one modest CPU core, as in `CostModel.analytic`


@dataclass(frozen=True)
class CoRun:
    """`groups`: task name -> group. `slowdown[a][b]`: how many times longer a task of group a takes while one of group
    b runs on another stream; 1 if a group is not named. `source`: measured, estimated or given."""

    groups: Mapping[str, str] = field(default_factory=dict)
    slowdown: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    source: str = "given"

    def __post_init__(self) -> None:
        for what, table, kind, name in (("the groups of tasks that run beside others", self.groups, str, "names"),
                                        ("the slowdown of groups beside others", self.slowdown, Mapping, "tables")):
            if not isinstance(table, Mapping) or not all(isinstance(value, kind) for value in table.values()):
                raise ValueError(f"{what} must be a table of {name}")
        for a, row in self.slowdown.items():
            for b, factor in row.items():
                if not is_number(factor) or not 1e-6 <= factor <= 1e6:
                    raise ValueError(f"the slowdown of {a[:40]} beside {b[:40]} is {repr(factor)[:40]}; it must "
                                     f"be a finite number above 0")

    def factor(self, a: str, b: str) -> float:
        return float(self.slowdown.get(a, {}).get(b, 1.0))

    def gain(self, a: str, b: str) -> float:
        """How many times as much work two streams do as one in the same time: at best 2; 1 means no gain."""
        return 1 / self.factor(a, b) + 1 / self.factor(b, a)

    def table(self, graph: TaskGraph) -> tuple[Ints, Floats]:
        """The group number of each task of the graph, and a table [group, group] of slowdowns."""
        names = sorted({*self.slowdown, *(b for row in self.slowdown.values() for b in row)})
        number = {name: i + 1 for i, name in enumerate(names)}  # 0: no group
        group = [number.get(self.groups.get(task_name(as_recorded(key)), ""), 0) for key in graph.keys.tolist()]
        factor = np.ones((len(names) + 1, len(names) + 1))
        factor[1:, 1:] = [[self.factor(a, b) for b in names] for a in names]
        return np.array(group, np.int64), factor

    @classmethod
    def estimated(cls, graph: TaskGraph, groups: Mapping[str, str], pairs: Iterable[tuple[str, str]]) -> CoRun:
        """An estimate from flops and bytes: streams share the memory bandwidth, so two groups that together need more
        than there is slow down alike."""
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

