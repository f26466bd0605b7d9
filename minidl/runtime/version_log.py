"""A log of the weight version that each task of a run has read, and a replay of the log in one process.

The log does not use the plan: it follows the content of the parameters' memory and of their copies, which updates copy
and change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.columns import Ints, grouped
from ..core.graph import Launch, Role, TaskGraph
from ..core.tasks import Kind, as_recorded, parse_task, task_name, unpack
from ..kernels import Thunk

Calls = Callable[[int, Any], list[Thunk]]


@dataclass(frozen=True)
class VersionRead:
    """In step `step` (from 0), the task with this key read this version of the weights of stage `stage`; an update made
    it. The stage is the task's own, or another one whose weights it also uses. `average`: how many updates
    ago the version was that a moving average of updates up to version `until` replaced, with this decay; or 0. If ranks
    keep weights of their own (`gossip.py`): the task's `rank`; for an update, the rank `to` which it sent the layer;
    and for a layer that this rank mixed into its own, which makes a version too, the rank `source` that sent it."""

    step: int
    key: int
    version: int
    stage: int
    average: int = 0
    until: int = 0
    decay: float = 0.0
    rank: int = 0
    to: int = -1
    source: int = -1


class VersionLog:
    """The versions that one rank's tasks read. `graph`: the graph of a body. Versions count a stage's updates since the
    start of the run. A late task belongs to the step before the one in which it runs."""

    def __init__(self, graph: TaskGraph) -> None:
        self.entries: list[VersionRead] = []
        self._step = -1
        self._late = -1  #: the step of late tasks
        # the version in each storage; the age and the last version of the average that replaces it, and its decay
        self._tag: dict[int, tuple[int, int, int, float]] = {
            s: (0, 0, 0, 0.0) for s, spec in enumerate(graph.storages) if spec.role == Role.PARAMETER}
        self._stage: dict[int, int] = {}  # of the weights in each storage
        source = {id(graph.storages[s].live): s for s in self._tag}
        self._filled = {s: source[id(spec.filled)] for s, spec in enumerate(graph.storages)
                        if id(spec.filled) in source}
        self._tag |= dict.fromkeys(self._filled, (-1, 0, 0, 0.0))
        for t in np.flatnonzero(graph.kind == Kind.U)[::-1].tolist():  # the first update's, if numbers differ
            self._stage |= dict.fromkeys([v.storage for launch in graph.launches[t] for v in launch.writes],
                                         int(graph.unit[t]))
            self._tag |= {launch.writes[0].storage: (-1, 0, 0, 0.0) for launch in graph.launches[t]
                          if launch.kernel == "copy" and launch.reads[0].storage in self._tag}

    def begin(self, fills: bool) -> None:
        """A step begins; `fills`: a loop does, whose kept versions are filled with the parameters."""
        self._late, self._step = self._step, self._step + 1
        if fills:
            self._tag |= {s: self._tag[source] for s, source in self._filled.items()}

    def settle(self) -> None:
        """The late tasks of the last step are next, without another step."""
        self._late = self._step

    def around(self, calls: Calls, graph: TaskGraph) -> Calls:
        """The calls of the tasks of a part, each with its log entry."""
        def logged(task: int, stream: Any) -> list[Thunk]:
            launches = graph.launches[task]
            reads = {v.storage for launch in launches for v in launch.reads} & self._tag.keys()
            changing = [launch for launch in launches if {v.storage for v in launch.writes} & self._tag.keys()]
            if not reads and not changing:
                return calls(task, stream)
            key = int(graph.keys[task])
            return [lambda: self._update(key, changing) if changing else self._read(key, reads), *calls(task, stream)]

        return logged

    def _append(self, key: int, version: int, stage: int, *average: Any) -> None:
        self.entries.append(VersionRead(self._late if unpack(key).late else self._step, int(as_recorded(key)), version,
                                        stage, *average))

    def _read(self, key: int, storages: set[int]) -> None:
        unit = int(unpack(key).unit)
        for stage, found in sorted(grouped((self._stage.get(s, unit), self._tag[s]) for s in storages).items()):
            tags = {*found}
            if len(tags) > 1:
                raise RuntimeError(f"{task_name(key)} reads versions {sorted(v for v, *_ in tags)} of stage {stage}'s "
                                   f"weights at once")
            version, *average = tags.pop()
            self._append(key, version, stage, *average)

    def _update(self, key: int, launches: list[Launch]) -> None:
        """A copy gets its source's version. An average stands for the version of its age or, before so many
        updates, for the first one. Other writes make the next version."""
        changed = set()
        for launch in launches:
            target = launch.writes[0].storage
            if launch.kernel == "copy" and launch.reads[0].storage in self._tag:  # not a copy of another rank's weights
                self._tag[target] = self._tag[launch.reads[0].storage]
            elif launch.kernel == "past":
                told, newest = dict(launch.constants), self._tag[launch.reads[0].storage][0] + 1
                age = told["age"]
                self._tag[target] = max(self._tag[target][0], newest - age), age, newest, told["decay"]
            else:
                changed |= {v.storage for v in launch.writes} & self._tag.keys()
        if not changed:  # a copy alone
            return
        version = max(self._tag[s][0] for s in changed) + 1
        self._tag.update(dict.fromkeys(changed, (version, 0, 0, 0.0)))
        self._append(key, version, self._stage[min(changed)])


def staleness(entries: Iterable[VersionRead]) -> dict[int, Ints]:
    """Stage -> for every forward, the number of updates between reading the weights and changing them; also of weights
    of other stages that it uses."""
    tasks = [(unpack(e.key), e) for e in entries]
    made = grouped(((e.step, task.unit), e.version - 1) for task, e in tasks if task.kind == Kind.U)
    read = grouped(((e.step, task.unit, e.stage), (task.micro_batch, e.version))
                   for task, e in tasks if task.kind == Kind.F)
    found: dict[int, list[int]] = {}
    for (step, unit, stage), forwards in sorted(read.items()):
        before = sorted({*made[step, stage]})  # the version that each update of the step changes
        found.setdefault(unit, []).extend(before[i * len(before) // len(forwards)] - version for i, version in forwards)
    return {unit: np.array(late) for unit, late in found.items()}


def drift(entries: Iterable[VersionRead]) -> dict[int, Ints]:
    """Stage -> for every task of a backward that reads weights, how many updates newer they are than its forward's."""
    tasks = [(task, (e.step, task.unit, task.micro_batch, e.stage), e.version)
             for e in entries for task in [unpack(e.key)] if task.kind != Kind.U]
    forward = {mine: version for task, mine, version in tasks if task.kind == Kind.F}
    found = grouped((task.unit, version - forward[mine]) for task, mine, version in tasks if task.kind != Kind.F)
    return {unit: np.array(found.get(unit, [0])) for _, unit, *_ in forward}


def as_lines(entries: Iterable[VersionRead]) -> list[str]:
    """The lines of a log file, one JSON object per task: the version that it read or, for an update, made; and the
    other fields of an entry that say more than the usual."""
    return [json.dumps({"step": e.step + 1, "task": task_name(e.key), "version": e.version}
                       | ({"stage": e.stage} if e.stage != unpack(e.key).unit else {})
                       | ({"average": e.average, "until": e.until, "decay": e.decay} if e.average else {})
                       | {name: value for name, value, usual in (("rank", e.rank, 0), ("to", e.to, -1),
                                                                 ("source", e.source, -1)) if value != usual})
            for e in entries]


def from_lines(lines: Iterable[str], name: str) -> list[VersionRead]:
    """The entries of a log file of this name. Raises ValueError for a line that is none."""
    found = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            key = parse_task(row.pop("task"))
            found.append(VersionRead(**{"stage": unpack(key).unit, **row, "step": row["step"] - 1, "key": key}))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{name}, line {number}: no entry of a version log ({error})") from None
    return found
