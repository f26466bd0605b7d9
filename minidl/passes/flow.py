"""The flow of gradients through a recorded step, from the losses to the earliest layer; and tasks of it that run again,
on gradients that are not final. `jacobi`, `highway`, `deeppcr` and `newton` build on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core.graph import Launch, TaskGraph
from ..core.placement import Refused
from ..core.tasks import Kind, unpack
from .draft import Copies, Draft, Edit, fill


@dataclass(frozen=True)
class Flow:
    """One backward pass: the output gradients, and what they need of other backward tasks. Each of the `atoms` is a
    list of tasks; tasks that write the same memory are in one. `run[a]`: the layer of atom a, from a layer with a
    weight down to the next one (the first one has the loss as well); or, if gradients flow through time, its time
    step. `place`: storage -> the atom that writes it. `needs`: task -> the storages of these that it reads."""

    atoms: Sequence[Sequence[int]]
    run: Sequence[int]
    place: Mapping[int, int]
    needs: Mapping[int, frozenset[int]]

    @property
    def runs(self) -> list[list[int]]:
        """The tasks of each run."""
        return [[t for a, atom in enumerate(self.atoms) if self.run[a] == r for t in atom]
                for r in range(self.run[-1] + 1)]

    @classmethod
    def all_of(cls, graph: TaskGraph, block: int = 1) -> list[Flow]:
        """The backward passes of a step, with `block` layers or time steps in each run."""
        backward, flowing = np.isin(graph.kind, (Kind.O, Kind.W, Kind.Q)), graph.kind == Kind.O
        maker, needs = dict[int, int](), list[set[int]]()
        for t in range(len(graph)):
            needs.append({maker[b] for b in graph.reads[t].tolist() if b in maker} if backward[t] else set())
            maker.update(dict.fromkeys(graph.writes[t].tolist() if backward[t] else (), t))
        for t in np.flatnonzero(backward)[::-1].tolist():
            flowing[[*needs[t]]] |= flowing[t]
        of = dict[int, list[int]]()
        for t in np.flatnonzero(flowing).tolist():
            groups = {id(of[p]): of[p] for p in needs[t]}
            own = max(groups.values(), key=len, default=[])
            for other in groups.values():
                if other is not own:
                    own += other
            own.append(t)
            of.update(dict.fromkeys(own if len(groups) > 1 else (t,), own))
        plain = np.flatnonzero((graph.kind == Kind.W) & ~flowing)
        weighted = {*zip(graph.unit[plain].tolist(), graph.micro_batch[plain].tolist(), strict=True)}
        return [cls._of(graph, sorted(own), weighted, block) for own in {id(own): own for own in of.values()}.values()]

    @classmethod
    def _of(cls, graph: TaskGraph, tasks: list[int], weighted: set[tuple[int, int]], block: int) -> Flow:
        micro_batch = graph.micro_batch[tasks].tolist()
        cuts = ([i for i in range(1, len(tasks)) if micro_batch[i] != micro_batch[i - 1]] if len({*micro_batch}) > 1
                else [i for i, t in enumerate(tasks) if graph.kind[t] == Kind.O
                      and (int(graph.unit[t]), micro_batch[i]) in weighted][1:])
        written = [{int(graph.buffer_storage[b]) for b in graph.writes[t].tolist()} for t in tasks]
        last = {s: i for i, own in enumerate(written) for s in own}
        until = np.maximum.accumulate([max(last[s] for s in own) for own in written])
        ends = (np.flatnonzero(until == np.arange(len(tasks))) + 1).tolist()
        bounds = [0, *ends]
        atoms = [tasks[a:b] for a, b in zip(bounds, ends, strict=False)]
        run = np.searchsorted(cuts[block - 1 :: block], bounds[:-1], "right").tolist()
        place = {s: int(np.searchsorted(ends, i, "right")) for s, i in last.items()}
        return cls(atoms, run, place, {t: frozenset(place.keys() & graph.buffer_storage[graph.reads[t]].tolist())
                                       for t in tasks})


def between(e: Edit, flow: Flow, makers: Mapping[int, Sequence[int]], goals: Iterable[int], source: int
             ) -> list[int] | None:
    """The tasks from a storage to these goals, in their order; None if they need other gradients from above."""
    found, todo = set[int](), [*goals]
    while todo:
        if (t := todo.pop()) not in found:
            if t <= max(makers.get(source, (len(e.keys),))) or not flow.needs[t]:
                return None
            found.add(t)
            todo += [p for s in flow.needs[t] - {source} for p in makers[s]]
            todo += [p for b in e.writes[t] for p in makers[e.storage_of[b]]]
    return sorted(found)


@dataclass
class Again:
    """Tasks of a draft that run again, in an order of their own. `order[t]`: what takes the place of task t."""

    edit: Edit
    order: dict[int, Sequence[int]] = field(default_factory=dict)
    nothing: dict[int, Copies] = field(default_factory=dict)
    fills: list[int] = field(default_factory=list)

    def memory(self, tasks: Iterable[int], whose: str) -> Copies:
        """Memory for other results of these tasks."""
        return self.edit.copies({b for t in tasks for b in self.edit.writes[t]}, whose)

    def zeros(self, storage: int, tasks: Sequence[int]) -> Copies:
        """Zeros in the place of a storage that these tasks write: a task fills them."""
        if storage not in self.nothing:
            e, first = self.edit, tasks[0]
            own = {b for t in tasks for b in e.writes[t] if e.storage_of[b] == storage}
            found = self.nothing[storage] = e.copies(own, "zero")
            self.fills.append(e.task(
                -1, e.unit(f"zeros for {e.specs[storage].name}"), Kind.O, unpack(e.keys[first]).micro_batch,
                stage=e.stage[first], reads=(), writes=found.buffers.values(), nbytes=e.specs[storage].bytes,
                launches=[fill(e.whole(found.storages[storage]), 0.0)]))
        return self.nothing[storage]

    def task(self, task: int, whose: str, copies: Copies, launches: Sequence[Launch] | None = None) -> int:
        """The task again, on copies; or with some of its launches."""
        return self.edit.again(-1, task, copies, whose, launches=[
            launch.moved(copies.storages) for launch in launches or self.edit.launches[task]])

    def replace(self, flow: Flow, order: Sequence[int]) -> None:
        """The tasks of a backward pass become these, in this order. Raises Refused if forwards come between them."""
        tasks, kind = [t for atom in flow.atoms for t in atom], self.edit.old.graph.kind
        if (kind[min(tasks) : max(tasks)] == Kind.F).any():
            raise Refused("sweeps", "gradients of a micro-batch read sums that hold another one's",
                          "take one micro-batch, or --backward exact")
        self.order |= dict.fromkeys(tasks, ()) | {min(tasks): [*self.fills, *order]}
        self.fills = []

    @property
    def draft(self) -> Draft:
        """The draft, with all tasks in their places."""
        count, made = len(self.edit.old.graph), self.edit.draft
        new = len(made.graph) - count  # they come first there
        order = [t for task in range(count) for t in self.order.get(task, (task,))]
        return made.take(np.array([t - count if t >= count else t + new for t in order], np.int64))
