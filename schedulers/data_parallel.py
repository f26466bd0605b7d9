"""Data-parallel schedules: in which order gradients are computed, summed over ranks, and used.

Each policy takes a recorded step and plans its synchronised graph (`minidl.passes.synchronise`): one compute lane, one
communication lane, and updates one step late (`minidl.passes.boundary`), so that communication may go on into the next
forward. The policies:

- `no_overlap`: all communication after the backward pass, on the compute lane;
- `barrier`: each gradient is summed while the backward pass goes on, and all of them before any update (Horovod, DDP
  without buckets); `buckets`: the same with the gradients of several layers together (DDP);
- `fifo`: an update waits only for its own gradient, just before the layer's next forward; `priority`: the same with
  gradients cut in parts, and the part that is needed first goes first (P3, ByteScheduler);
- `dear`: reduce-scatter during the backward pass, all-gather during the next forward (DeAR);
- `reverse_first_k`: `priority`, and the weight gradients of the first k layers wait for the end of the backward pass,
  where they run in ascending order (Oh, Lee, Kim, Seo, "Out-of-order backprop", EuroSys 2022, section 5). The order is
  the authors'; the search for k is reconstructed.

Every rank gets the same schedule, so all start their communication in the same order without negotiation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..graph import TaskGraph
from ..passes.boundary import Loop, cross_boundary
from ..passes.synchronise import gradients, reverse_buckets, synchronise
from ..plans import Machine, Plan
from ..pricing.cost import CostModel
from ..program import lower
from ..tasks import COMMUNICATION, Kind
from .iterations import Iterations, Rules
from .layer_times import with_communication

BUCKET_BYTES = 25 * 2**20  #: as in DDP
PART_BYTES = 2**20


def no_overlap(graph: TaskGraph, cost: CostModel, machine: Machine) -> Plan:
    """All communication after the backward pass, on the compute lane: nothing overlaps."""
    return _plan("no_overlap", synchronise(graph), cost, machine, Rules(crosses=False, overlaps=False))


def barrier(graph: TaskGraph, cost: CostModel, machine: Machine) -> Plan:
    """Each layer's gradients are summed while the backward pass goes on, all before any update (as DDP and Horovod do,
    a layer at a time)."""
    return _plan("barrier", synchronise(graph), cost, machine, Rules(crosses=False))


def buckets(graph: TaskGraph, cost: CostModel, machine: Machine, *, buckets: int | None = None,
            bucket_bytes: int = BUCKET_BYTES) -> Plan:
    """As `barrier`, but gradients are summed in buckets of about `bucket_bytes` (PyTorch DDP, 2020).

    `buckets`: this many with equal numbers of layers instead. Raises ValueError for more buckets than layers.
    """
    groups = reverse_buckets(graph, bucket_bytes)
    if buckets is not None:
        layers = sorted(gradients(graph), key=lambda u: -int(graph.unit[u]))
        if not 1 <= buckets <= len(layers):
            raise ValueError(f"{len(layers)} layers are too few for {buckets} buckets")
        groups = [part.tolist() for part in np.array_split(np.array(layers), buckets)]
    return _plan("buckets", synchronise(graph, groups), cost, machine, Rules(crosses=False))


def fifo(graph: TaskGraph, cost: CostModel, machine: Machine) -> Plan:
    """An update waits only for its own gradient, across the iteration boundary; gradients are sent in the order in
    which they become ready."""
    return _plan("fifo", synchronise(graph), cost, machine, Rules())


def priority(graph: TaskGraph, cost: CostModel, machine: Machine, *, part_bytes: int = PART_BYTES) -> Plan:
    """As `fifo`, but gradients are sent in parts of at most `part_bytes`, and the part that the next forward pass needs
    first goes first (P3, TicTac, ByteScheduler, 2019)."""
    return _plan("priority", synchronise(graph, part_bytes=part_bytes), cost, machine, Rules(first="need"))


def dear(graph: TaskGraph, cost: CostModel, machine: Machine) -> Plan:
    """Gradients are reduce-scattered in the backward pass and all-gathered in the next forward pass (DeAR, 2023)."""
    return _plan("dear", synchronise(graph, scatter=True), cost, machine, Rules())


def reverse_first_k(graph: TaskGraph, cost: CostModel, machine: Machine, *, k: int | None = None,
                    part_bytes: int = PART_BYTES) -> Plan:
    """As `priority`, but the weight gradients of the first k layers run after the rest of the backward pass, the first
    layer's first, so that the transfer that is needed first starts as early as possible (Oh, Lee, Kim, Seo, EuroSys
    2022, section 5).

    `k`: None searches the k of the shortest period (without contention) among those that fit the machine's memory.
    Raises ValueError for more layers than can wait, or where no k fits.
    """
    graph = synchronise(graph, part_bytes=part_bytes)
    iterations = Iterations(late_updates(graph).body[0], _with_communication(graph, cost, machine), Rules(first="need"))
    layers, limit = len(iterations.delayable), machine.memory_limit
    if k is None:
        fits = None if limit is None else lambda n: lower(graph, iterations.schedule(n)).peak_bytes <= limit
        k = search(lambda n: iterations.run(n)[0], layers, fits)
    elif not 0 <= k <= layers:
        raise ValueError(f"k is {k}; it must be from 0 to {layers}, the number of layers whose weight gradient may "
                         f"wait")
    return _of("reverse_first_k", graph, cost, machine, iterations, k)


#: a policy by its name
POLICIES: dict[str, Callable[..., Plan]] = {
    f.__name__: f for f in (no_overlap, barrier, buckets, fifo, priority, dear, reverse_first_k)}


def _plan(name: str, graph: TaskGraph, cost: CostModel, machine: Machine, order: Rules) -> Plan:
    """The plan with the order to which the lanes of a synchronised graph settle."""
    return _of(name, graph, cost, machine,
               Iterations(late_updates(graph).body[0], _with_communication(graph, cost, machine), order))


def _of(name: str, graph: TaskGraph, cost: CostModel, machine: Machine, iterations: Iterations,
        k: int | None = None) -> Plan:
    """The plan of these iterations. Its `notes`: sums of one iteration's times; `lower_bound`: no order of this graph
    has a shorter period; `k` and the largest possible k."""
    duration = iterations.clock.duration
    cost = _with_communication(graph, cost, machine)
    notes: dict[str, Any] = {"compute": float(duration[iterations.compute].sum()),
                             "communication": float(duration[iterations.communication].sum()),
                             "lower_bound": lower_bound(iterations.graph, cost)}
    if k is not None:
        notes |= {"k": k, "largest_k": len(iterations.delayable)}
    return Plan(name, graph, iterations.schedule(k or 0), cost, machine.ranks, machine.memory_limit, notes)


def _with_communication(graph: TaskGraph, cost: CostModel, machine: Machine) -> CostModel:
    return cost if machine.collective is None else with_communication(graph, cost, machine.collective)


def late_updates(graph: TaskGraph) -> Loop:
    """The loop of a synchronised graph whose updates are one step late."""
    return cross_boundary(graph, np.flatnonzero(graph.kind == Kind.U).tolist())


def hidden(plan: Plan) -> float:
    """The share of the communication that overlaps with computation; 1.0 where there is no communication."""
    communication = plan.notes["communication"]
    if not communication:
        return 1.0
    return float(max(0.0, 1 - max(0.0, plan.period - plan.notes["compute"]) / communication))  # it includes waits


def search(period: Callable[[int], float], largest: int, fits: Callable[[int], bool] | None = None) -> int:
    """The k in 0..largest with the shortest period; of equal ones, the smallest.

    Throughput is roughly concave in k, so 48 values over the whole range are tried, then ever finer ones around the
    best. Up to 48 layers, every k is tried. Raises ValueError where no k `fits`. Reconstructed.
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
        raise ValueError("no k fits the memory limit, not even k = 0")
    return min(n for n, t in known.items() if t <= known[best] + 1e-9 * abs(known[best]))


def lower_bound(graph: TaskGraph, cost: CostModel) -> float:
    """A bound: no order of this loop body has a shorter period. It is the largest of the work of the compute stream,
    the work of the channel, and each layer's circuit from its forward through its weight gradient to the end of its
    communication."""
    duration = cost.durations(graph) + cost.launch
    talk = np.isin(graph.kind, COMMUNICATION)
    best = max(float(duration[talk].sum()), float(duration[~talk].sum()))
    preds = [graph.preds[t].tolist() for t in range(len(graph))]
    rate: dict[int, float] = {}  # buffer -> time of communication per byte
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
