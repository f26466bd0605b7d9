"""Which version of its weights each task of a run has read, as the run saw it; and one process that
does the same again.

The log knows nothing of the plan: it follows what lies in the memory of the parameters and of their copies, which
updates copy and change. `Replay` runs the tasks of the recorded step in the order of emission, each on the weights that
a log names, and leaves the bits of the run. So whatever a stale pipeline did, one can see on what, and do it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..graph import Ints, Role, TaskGraph, View
from ..kernels import Thunk
from ..tasks import Kind, task_name, unpack
from .bound import Bound

Calls = Callable[[int, Any], list[Thunk]]


@dataclass(frozen=True)
class VersionRead:
    """In a step (from 0), the task of that key read this version of its weights; an update made it."""

    step: int
    key: int
    version: int


class VersionLog:
    """What one rank's tasks read. Versions count a stage's updates since the run began."""

    def __init__(self, graph: TaskGraph) -> None:
        self.entries: list[VersionRead] = []
        self.step = -1
        self._graph = graph
        # the version in each storage
        self._tag = {s: 0 for s, spec in enumerate(graph.storages) if spec.role == Role.PARAMETER}
        grown = True
        while grown:  # what parameters are copied to
            grown = False
            for launch in (launch for t in np.flatnonzero(graph.kind == Kind.U).tolist()
                           for launch in graph.launches[t]):
                if (launch.kernel == "copy" and launch.reads[0].storage in self._tag
                    and launch.writes[0].storage not in self._tag):
                    self._tag[launch.writes[0].storage] = -1
                    grown = True

    def around(self, calls: Calls) -> Calls:
        """The calls of tasks, with what keeps the log."""
        def logged(task: int, stream: Any) -> list[Thunk]:
            launches = self._graph.launches[task]
            reads = {v.storage for launch in launches for v in launch.reads} & self._tag.keys()
            writes = {v.storage for launch in launches for v in launch.writes} & self._tag.keys()
            key = int(self._graph.keys[task])
            if not reads:
                return calls(task, stream)
            return [lambda: self._enter(key, reads, writes), *calls(task, stream)]

        return logged

    def _enter(self, key: int, reads: set[int], writes: set[int]) -> None:
        found = {self._tag[s] for s in reads}
        version = max(found)
        if writes:  # an update reads the newest, and what it overwrites
            version += 1
            self._tag.update(dict.fromkeys(writes, version))
        elif len(found) > 1:
            raise RuntimeError(f"{task_name(key)} reads versions {sorted(found)} of its weights at once")
        self.entries.append(VersionRead(self.step, key, version))


def staleness(entries: Iterable[VersionRead]) -> dict[int, Ints]:
    """Of each stage, for every forward: how many updates were made between reading the weights and changing them."""
    made: dict[tuple[int, int], list[tuple[int, int]]] = {}
    read: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for e in entries:
        task = unpack(e.key)
        if task.kind == Kind.U:
            made.setdefault((e.step, task.unit), []).append((task.micro_batch, e.version - 1))
        elif task.kind == Kind.F:
            read.setdefault((e.step, task.unit), []).append((task.micro_batch, e.version))
    found: dict[int, list[int]] = {}
    for (step, unit), pairs in sorted(read.items()):
        updates = sorted(made[step, unit])
        found.setdefault(unit, []).extend(next(before for after, before in updates if after >= i) - version
                                          for i, version in pairs)
    return {unit: np.array(late) for unit, late in found.items()}


class Replay:
    """One process: call it with a step's inputs and the step's entries, of all ranks. `graph`: the recorded step, whose
    tasks run in the order of emission; `stage_of_unit`: as the plan has it. Parameters and states are changed as the
    run changed its own."""

    def __init__(self, graph: TaskGraph, stage_of_unit: Ints, device: Any = None) -> None:
        self.graph, self._stage = graph, np.asarray(stage_of_unit)[graph.unit].tolist()
        self._bound = Bound(graph, None, device)
        own: dict[int, set[int]] = {}
        self._changes: set[int] = set()
        for t in np.flatnonzero(graph.kind == Kind.U).tolist():
            found = {v.storage for launch in graph.launches[t]
                     for v in launch.writes if graph.storages[v.storage].role == Role.PARAMETER}
            own.setdefault(self._stage[t], set()).update(found)
            self._changes.update([t] if found else [])
        self._own = {stage: [self._array(s) for s in sorted(storages)] for stage, storages in own.items()}
        # by stage and version
        self._kept = {stage: {0: [np.array(a) for a in arrays]} for stage, arrays in self._own.items()}
        self._newest = dict.fromkeys(self._own, 0)

    def _array(self, storage: int) -> Any:
        spec = self.graph.storages[storage]
        return self._bound.array(View(storage, (spec.bytes // np.dtype(spec.dtype).itemsize,), (1,), 0, spec.dtype))

    def __call__(self, inputs: tuple[Any, ...], entries: Iterable[VersionRead]) -> Any:
        read: dict[tuple[int, bool, int], int] = {}
        made: dict[tuple[int, int], int] = {}
        for e in entries:
            task = unpack(e.key)
            if task.kind == Kind.U:
                made[task.unit, task.micro_batch] = e.version
            else:
                read[task.unit, task.kind == Kind.F, task.micro_batch] = e.version
        self._bound.load(inputs)
        for t in range(len(self.graph)):
            stage, micro_batch = self._stage[t], int(self.graph.micro_batch[t])
            if t in self._changes:
                self._take(stage, self._newest[stage])
            elif (version := read.get((stage, bool(self.graph.kind[t] == Kind.F), micro_batch))) is not None:
                self._take(stage, version)
            for call in self._bound.thunks(t):
                call()
            if t in self._changes:
                self._newest[stage] = made[stage, micro_batch]
                self._kept[stage][made[stage, micro_batch]] = [np.array(a) for a in self._own[stage]]
        for stage, newest in self._newest.items():
            self._take(stage, newest)
            self._kept[stage] = {newest: self._kept[stage][newest]}
        return self._bound.results()

    def _take(self, stage: int, version: int) -> None:
        for array, kept in zip(self._own.get(stage, []), self._kept.get(stage, {}).get(version, []), strict=True):
            np.copyto(array, kept)


def as_lines(entries: Iterable[VersionRead]) -> list[str]:
    """For a file: which version each task read or, an update, made; in JSON, a task a line."""
    return [json.dumps({"step": e.step + 1, "task": task_name(e.key), "version": e.version}) for e in entries]
