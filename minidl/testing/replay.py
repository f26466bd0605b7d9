"""A replay of a version log: one process repeats what a pipeline on stale weights did.

`Replay` runs the recorded step's tasks in the order of emission, each on the weights that a log names, bit-identically.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ..core.columns import Ints
from ..core.graph import Role, TaskGraph
from ..core.tasks import Kind, unpack
from ..kernels import KERNELS
from ..passes.rewrite import gradients
from ..runtime.bound import Bound
from ..runtime.version_log import VersionRead


class Replay:
    """A replay in one process: call it with each step's inputs and its entries of all ranks, in the order of steps.
    `graph`: the recorded step, whose tasks run in the order of emission; `stage_of_unit`: the plan's. Parameters and
    states change as in the run."""

    def __init__(self, graph: TaskGraph, stage_of_unit: Ints) -> None:
        self.graph, self._stage = graph, np.asarray(stage_of_unit)[graph.unit].tolist()
        self._bound = Bound(graph, None)
        own: dict[int, set[int]] = {}
        first: dict[int, int] = {}  # storage -> the first stage that uses it, which updates it
        for t in np.flatnonzero(graph.kind == Kind.F).tolist():
            for b in graph.reads[t].tolist():
                storage = int(graph.buffer_storage[b])
                first[storage] = min(self._stage[t], first.get(storage, self._stage[t]))
        self._changes: set[int] = set()
        for t in np.flatnonzero(graph.kind == Kind.U).tolist():
            found = {v.storage for launch in graph.launches[t]
                     for v in launch.writes if graph.storages[v.storage].role == Role.PARAMETER}
            self._stage[t] = min((first[s] for s in found if s in first), default=self._stage[t])
            own.setdefault(self._stage[t], set()).update(found)
            self._changes.update([t] if found else [])
        updates, self._spent = graph.kind == Kind.U, dict[int, list[Any]]()
        for buffers in gradients(graph).values():  # before their norm, which is of what all have summed
            before = next(t for t in np.flatnonzero(updates).tolist() if np.isin(graph.reads[t], buffers).any())
            self._spent.setdefault(before, []).extend(map(self._bound.flat, graph.buffer_storage[buffers].tolist()))
        self._own = {stage: [self._bound.flat(s) for s in sorted(storages)] for stage, storages in own.items()}
        # by stage and version
        self._kept = {stage: {0: [np.array(a) for a in arrays]} for stage, arrays in self._own.items()}
        # (stage that reads, stage of the weights) -> the version of the loop's begin, the average, and its last version
        self._averages: dict[tuple[int, int], tuple[int, list[Any], int]] = {}
        self._newest = dict.fromkeys(self._own, 0)
        self.results = self._bound.results

    def __call__(self, inputs: tuple[Any, ...], entries: Iterable[VersionRead]) -> Any:
        for _ in self.steps(inputs, entries):
            pass
        return self.results()

    def steps(self, inputs: tuple[Any, ...], entries: Iterable[VersionRead]) -> Iterator[list[Any]]:
        """The same, which stops before the first task that uses the gradients of an update."""
        read: dict[tuple[int, bool, int], dict[int, VersionRead]] = {}  # by the stage of the weights
        made: dict[tuple[int, int], int] = {}
        for e in entries:
            task = unpack(e.key)
            if task.kind == Kind.U:
                made[task.unit, task.micro_batch] = e.version
            else:
                read.setdefault((task.unit, task.kind == Kind.F, task.micro_batch), {})[e.stage] = e
        before = dict(self._newest)
        for (reader, is_forward, micro_batch), mine in read.items():
            for stage, e in mine.items():  # a loop begins, and its average with the weights
                if is_forward and micro_batch == 0 and e.version == before[stage] and not e.average:
                    self._averages[reader, stage] = e.version, self._kept[stage][e.version], e.version
        self._bound.load(inputs)
        for t in range(len(self.graph)):
            stage, micro_batch = self._stage[t], int(self.graph.micro_batch[t])
            if t in self._changes:
                self._take(stage, self._kept[stage][self._newest[stage]])
            else:
                for home, e in read.get((stage, bool(self.graph.kind[t] == Kind.F), micro_batch), {}).items():
                    self._take(home, self._average(stage, e) if e.average else self._kept.get(home, {}).get(e.version))
            if t in self._spent:
                yield self._spent[t]
            for call in self._bound.thunks(t):
                call()
            if t in self._changes:
                self._newest[stage] = made[stage, micro_batch]
                self._kept[stage][made[stage, micro_batch]] = [np.array(a) for a in self._own[stage]]
        for stage, newest in self._newest.items():
            self._take(stage, self._kept[stage][newest])
            for old in [v for v in self._kept[stage] if v < before[stage]]:
                del self._kept[stage][old]  # the next step reads none from before this one

    def _take(self, stage: int, weights: list[Any] | None) -> None:
        for array, kept in zip(self._own.get(stage, []), weights or [], strict=True):
            np.copyto(array, kept)

    def _average(self, reader: int, e: VersionRead) -> list[Any]:
        """The moving average that a stage reads."""
        begin, found, until = self._averages[reader, e.stage]
        for version in range(until, e.until):
            for done in (0, 1):
                found = [KERNELS["past"].reference(np, w, a, np.array([version + done - begin]), age=e.average,
                                                   decay=e.decay, done=done)
                         for a, w in zip(found, self._kept[e.stage][version + done], strict=True)]
        self._averages[reader, e.stage] = begin, found, max(until, e.until)
        return found
