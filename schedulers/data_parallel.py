"""Data-parallel schedules: in which order gradients are computed, summed over ranks, and spent.

All on a synchronised graph (`minidl.passes.synchronise`): one compute lane, one communication lane, and updates one step late
(`minidl.passes.boundary`), so that communication may go on into the next forward. What the schedules differ in:

- `no_overlap`: all communication after the backward pass, on the compute lane;
- `barrier`: each gradient is summed while the backward pass goes on, all of them before any update (Horovod, DDP
  without buckets); `buckets` the same with several layers' gradients together (DDP);
- `fifo`: an update waits for its own gradient only, just before the layer's next forward; `priority` the same with
  gradients cut in parts, those that are needed first going first (P3, ByteScheduler);
- `dear`: reduce-scatter during the backward pass, all-gather during the next forward (DeAR);
- `reverse_first_k`: `priority`, and the weight gradients of the first k layers wait for the end of the backward pass,
  where they run in ascending order (Oh, Lee, Kim, Seo, "Out-of-order backprop", EuroSys 2022, section 5). The order is
  the authors'; the search for k is reconstructed.

Every rank gets the same schedule, so communication is in one agreed order without asking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..graph import COMMUNICATION, Kind, TaskGraph
from ..passes.boundary import Loop, cross_boundary
from ..passes.synchronise import gradients, reverse_buckets, synchronise
from ..pricing.cost import CostModel
from ..schedule import Schedule
from .iterations import Iterations, Policy, delayable

BUCKET_BYTES = 25 * 2**20  #: as DDP
PART_BYTES = 2**20


POLICIES = {
    "no_overlap": Policy(crosses=False, overlaps=False),
    "barrier": Policy(crosses=False),
    "buckets": Policy(cut="bucket", crosses=False),
    "fifo": Policy(),
    "priority": Policy(cut="part", first="need"),
    "dear": Policy(scatter=True),
    "reverse_first_k": Policy(cut="part", first="need", delays=True),
}


def policy(name: str) -> Policy:
    """Raises ValueError for an unknown name."""
    if name not in POLICIES:
        raise ValueError(f"unknown data-parallel scheduler {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]


def prepare(name: str, graph: TaskGraph, *, buckets: int | None = None, bucket_bytes: int = BUCKET_BYTES,
            part_bytes: int = PART_BYTES) -> TaskGraph:
    """The synchronised graph that a schedule is for. `buckets`: this many with equal numbers of layers, in place of
    `bucket_bytes`."""
    of = policy(name)
    groups: list[list[int]] | None = None
    if of.cut == "bucket":
        groups = reverse_buckets(graph, bucket_bytes)
        if buckets is not None:
            layers = sorted(gradients(graph), key=lambda u: -int(graph.unit[u]))
            if not 1 <= buckets <= len(layers):
                raise ValueError(f"{len(layers)} layers cannot fill {buckets} buckets")
            groups = [part.tolist() for part in np.array_split(np.array(layers), buckets)]
    return synchronise(graph, groups, part_bytes=part_bytes if of.cut == "part" else None, scatter=of.scatter)


def late_updates(graph: TaskGraph) -> Loop:
    """The loop of a synchronised graph whose updates are one step late."""
    return cross_boundary(graph, np.flatnonzero(graph.kind == Kind.U).tolist())


@dataclass(frozen=True)
class Plan:
    """One iteration's schedule, as it repeats, and what the simulator says of it. Times in the costs' unit.

    `period`: of an iteration in the steady state; `compute` and `communication`: sums of one iteration; `bound`: no
    order of this graph has a shorter period. `k`: how many layers' weight gradients were delayed.
    """

    graph: TaskGraph
    schedule: Schedule
    period: float
    compute: float
    communication: float
    bound: float
    k: int = 0

    @property
    def hidden(self) -> float:
        """The share of the communication that computation covers; 1.0 where there is none."""
        if not self.communication:
            return 1.0
        return max(0.0, 1 - max(0.0, self.period - self.compute) / self.communication)  # waits cost time too


def plan(name: str, graph: TaskGraph, cost: CostModel, k: int | None = None, fits: Callable[[Schedule], bool] | None = None) -> Plan:
    """The named schedule of a synchronised graph.

    `k` is for `reverse_first_k`: None searches the k of the shortest period (without contention) among those whose
    schedule `fits` (for instance in memory). Raises ValueError for a k that is no number of layers, or where none fits.
    """
    of, body = policy(name), late_updates(graph).body[0]
    layers = len(delayable(body))
    if k is not None and not (of.delays and 0 <= k <= layers):
        raise ValueError(f"k = {k}: it must be from 0 to {layers}, the layers whose weight gradient may wait" if of.delays else
                         f"k is for reverse_first_k; scheduler {name} takes none")
    iterations = Iterations(body, cost, of)
    if of.delays and k is None:
        k = search(lambda n: iterations.run(n)[0], layers, None if fits is None else lambda n: fits(iterations.schedule(n)))
    return Plan(graph, iterations.schedule(k or 0), iterations.period(k or 0), float(iterations.clock.duration[iterations.compute].sum()),
                float(iterations.clock.duration[iterations.communication].sum()), lower_bound(body, cost), k or 0)


def search(period: Callable[[int], float], largest: int, fits: Callable[[int], bool] | None = None) -> int:
    """The k in 0..largest of the shortest period; of equals, the smallest.

    Throughput is roughly concave in k: 48 values over the whole range, then ever finer around the best. With up to 48
    layers that is all of them. Raises ValueError where no value fits. (reconstructed)
    """
    known: dict[int, float] = {}

    def value(n: int) -> tuple[float, int]:
        if n not in known:
            known[n] = np.inf if fits is not None and not fits(n) else period(n)
        return known[n], n

    low, high = 0, largest
    while True:
        step = -(-(high - low) // 48) or 1
        best = min(map(value, {*range(low, high + 1, step), high}))[1]
        if step == 1:
            break
        low, high = max(0, best - step), min(largest, best + step)
    if not np.isfinite(known[best]):
        raise ValueError("no k fits the memory limit, not even 0")
    return min(n for n, t in known.items() if t <= known[best] + 1e-9 * abs(known[best]))


def lower_bound(graph: TaskGraph, cost: CostModel) -> float:
    """No order of this loop body has a shorter period: one compute stream, one channel, and each layer's circuit from its forward over
    all that its weight gradient needs to the end of its communication."""
    duration = cost.durations(graph) + cost.launch
    talk = np.isin(graph.kind, [int(k) for k in COMMUNICATION])
    best = max(float(duration[talk].sum()), float(duration[~talk].sum()))
    preds = [graph.preds[t].tolist() for t in range(len(graph))]
    rate: dict[int, float] = {}  # time of communication per byte, by buffer
    makers: dict[int, list[int]] = {}
    for t in range(len(graph)):
        for b in graph.writes[t].tolist():
            if talk[t]:
                rate[b] = rate.get(b, 0.0) + float(duration[t]) / max(1, int(graph.buffer_bytes[graph.writes[t]].sum()))
            elif graph.kind[t] != Kind.U:
                makers.setdefault(b, []).append(t)
    for u in np.flatnonzero(graph.kind == Kind.U).tolist():
        mine = [b for b in graph.reads[u].tolist() if b in rate]
        first = next((t for t in graph.succs[u].tolist() if graph.kind[t] == Kind.F), None)
        if not mine or first is None:
            continue
        length = np.full(len(graph), -np.inf)  # the longest way from the layer's forward to the end of each task
        length[first] = duration[first]
        for task in range(first + 1, len(graph)):
            if preds[task] and not talk[task]:
                length[task] = max(length[task], duration[task] + max(length[p] for p in preds[task]))
        ready = max(length[t] for b in mine for t in makers[b])
        best = max(best, float(ready + duration[u] + sum(rate[b] * int(graph.buffer_bytes[b]) for b in mine)))
    return best
