"""Runs without a common order, replayed in one process from the log of the versions that their tasks read.

A replica is a rank's own weights and its part of a step. Tasks run in any order that gives each of them the versions
that the log names, so the log alone says the bits: of several batches on one device, and of ranks that mix layers which
other ranks send (`gossip.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..autograd import tape as tapes
from ..core.columns import Rows, grouped
from ..core.graph import Role, TaskGraph, derive_edges
from ..core.tasks import Kind, task_name, unpack
from ..plans.memory import MemoryPlan
from .bound import Bound, with_far
from .version_log import VersionRead


class Replica:
    """One rank's weights, bound to a step with several batches. `share`: by layer, its share of the ranks' weights,
    which are 1 at first. `layer`: of each update of parameters."""

    def __init__(self, graph: TaskGraph, memory: MemoryPlan | None = None, device: Any = None, rank: int = 0) -> None:
        graph = replace(graph, storages=with_far(graph.storages, tapes.device_of(device), rank))
        self.graph, self.bound = graph, Bound(graph, memory, device)
        changing = graph.changed_by(graph.role_is(Role.PARAMETER)) & (graph.kind == Kind.U)
        self.layer, own, home = dict[int, int](), dict[int, set[int]](), dict[int, int]()
        for t in np.flatnonzero(changing).tolist():
            mine = {int(graph.buffer_storage[b]) for b in graph.writes[t].tolist()
                    if graph.buffer(b).role == Role.PARAMETER}
            self.layer[t] = home.get(min(mine), int(graph.unit[t]))
            home |= dict.fromkeys(mine, self.layer[t])
            own.setdefault(self.layer[t], set()).update(mine)
        self.weights = {layer: [self.bound.flat(s) for s in sorted(storages)] for layer, storages in own.items()}
        self.reads = [sorted({home[s] for s in graph.buffer_storage[graph.reads[t]].tolist() if s in home})
                      if t not in self.layer else [] for t in range(len(graph))]
        self.share = dict.fromkeys(self.weights, 1.0)
        self.calls = [self.bound.thunks(t) for t in range(len(graph))]

    def run(self, task: int) -> None:
        for call in self.calls[task]:
            call()

    def payload(self, layer: int) -> Any:
        """Room for a message with a layer: the share, then its weights."""
        return np.empty(8 + sum(a.nbytes for a in self.weights[layer]), np.uint8)

    def give(self, layer: int, payload: Any) -> None:
        """Fills a message with the layer; half of this rank's share goes with it."""
        self.share[layer] /= 2
        payload[:8].view(np.float64)[0] = self.share[layer]
        np.concatenate([a.view(np.uint8) for a in self.weights[layer]], out=payload[8:])

    def mix(self, layer: int, payload: Any) -> None:
        """Mixes the layer of a message into this rank's: the mean, weighted by their shares, which add up."""
        other, at = float(payload[:8].view(np.float64)[0]), 8
        self.share[layer] += other
        weight = other / self.share[layer]
        for array in self.weights[layer]:
            array *= 1 - weight
            array += weight * payload[at : at + array.nbytes].view(array.dtype)
            at += array.nbytes


def replay(replicas: Sequence[Replica], inputs: Sequence[tuple[Any, ...]], entries: Iterable[VersionRead],
           versions: Counter[tuple[int, int]]) -> list[Any]:
    """The results of each replica after a step on its inputs. `entries`: of the step, of all ranks, in any order.
    `versions`: the newest version by (rank, layer), which is counted on. A rank runs the batches that the log has of
    it. Raises ValueError if no order gives the versions of the log."""
    entries = [*entries]
    said = grouped(((e.rank, e.key, e.source), e) for e in entries)  # the source: the rank that sent a layer, or -1
    awaited = Counter((e.rank, e.stage, e.version) for e in entries)  # readers that have not run
    batches = {(e.rank, int(unpack(e.key).micro_batch)) for e in entries if e.source < 0}
    place = {int(key): t for t, key in enumerate(replicas[0].graph.keys)}
    try:
        todo = [(rank, place[key], source) for rank, key, source in said if source >= 0]
    except KeyError as error:
        raise ValueError(f"the log has a task that the step does not have: {task_name(error.args[0])}") from None
    done, sent, needed = [set[int]() for _ in replicas], dict[tuple[int, int, int], Any](), []
    for rank, (replica, values) in enumerate(zip(replicas, inputs, strict=True)):
        graph = replica.graph
        replica.bound.load(values)
        own = ~graph.role_is(Role.PARAMETER, Role.STATE)
        reads, writes = (Rows.from_pairs(each.row_of_each()[own[each.ids]], each.ids[own[each.ids]], len(each))
                         for each in (graph.reads, graph.writes))
        needed.append(derive_edges(reads, writes, len(graph.buffer_bytes)))
        todo += [(rank, t, -1) for t, batch in enumerate(graph.micro_batch.tolist()) if (rank, batch) in batches]
    while todo:
        left = []
        for rank, t, source in todo:
            replica = replicas[rank]
            mine = said.get((rank, int(replica.graph.keys[t]), source), [])
            changes = t in replica.layer
            comes = (rank, t, source) in sent if source >= 0 else {*needed[rank][t].tolist()} <= done[rank]
            if not comes or any(versions[rank, e.stage] != e.version - changes
                                or (changes and awaited[rank, e.stage, e.version - 1]) for e in mine):
                left.append((rank, t, source))
                continue
            if source >= 0:
                replica.mix(mine[0].stage, sent[rank, t, source])
            else:
                replica.run(t)
                done[rank].add(t)
            for e in mine:
                awaited[rank, e.stage, e.version] -= 1
                versions[rank, e.stage] = e.version
                if e.to >= 0:
                    sent[e.to, t, rank] = replica.payload(e.stage)
                    replica.give(e.stage, sent[e.to, t, rank])
        if len(left) == len(todo):
            rank, t, _ = left[0]
            raise ValueError(f"no order gives the versions of the log: {replicas[rank].graph.name(t)} of rank {rank} "
                             f"cannot run")
        todo = left
    return [replica.bound.results() for replica in replicas]


class Replayed:
    """Stands for the runtime of one device: each call is a step, replayed from its part of a log of this name."""

    timeline = log = None

    def __init__(self, graph: TaskGraph, entries: Iterable[VersionRead], name: str) -> None:
        self._replica, self._name, self._step = Replica(graph), name, 0
        self._versions, self._steps = Counter[tuple[int, int]](), grouped((e.step, e) for e in entries)

    def __call__(self, *inputs: Any) -> Any:
        """The results of the next step. Raises ValueError if the log does not have it, or is of another step."""
        if self._step not in self._steps:
            raise ValueError(f"{self._name} has {len(self._steps)} steps, and this is step {self._step + 1}")
        self._step += 1
        return replay([self._replica], [inputs], self._steps[self._step - 1], self._versions)[0]
