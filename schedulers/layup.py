"""LayUp: each rank trains weights of its own, and sends a layer to one drawn rank as soon as it has updated it.

"PD-ASGD" and "LayUp" (2410.05985, version 4). No rank waits for another one: a layer that arrives is mixed into the
receiver's at once. The mixing is reconstructed as sum-weight gossip: each rank has a share a of each layer, 1 at first;
a sender halves its a and sends (a, w); the receiver's weights become (a w + a' w') / (a + a'), and its share a + a'. So
shares of all ranks and messages always sum to the number of ranks.

As in `pd_asgd`, a simulated clock gives every task a moment, and each layer that arrives as well; or real time does. A
step is as long as all its batches (micro-batches) on the fastest rank: a rank that is slower runs as many whole batches
as fit. It ends when its last message has arrived.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ..core.graph import Role, TaskGraph
from ..core.machine import Machine, PlanError
from ..core.schedule import Lane, Schedule
from ..core.tasks import Kind
from ..pricing.cost import CostModel
from .batches import Batches
from .ordered import Ordered

Slow = Sequence[tuple[int, float]]  #: ranks and how many times slower they are
#: (rank, task, False), or (rank, update, True) when the layer that this update of this rank has sent is at its peer
Moment = tuple[int, int, bool]


def batches_of(ranks: int, batches: int, slow: Slow) -> list[int]:
    """How many batches each rank runs in a step. Raises PlanError for a rank that does not exist or runs none."""
    factor = np.ones(ranks)
    for rank, times in slow:
        if not 0 <= rank < ranks or not 0 < times < np.inf:
            raise PlanError(f"layup: rank {rank} cannot be {times:g} times slower; ranks are 0 to {ranks - 1}, and the "
                            f"factor is above 0 and finite")
        factor[rank] = times
    factor /= factor.min()
    found = np.floor(batches / factor + 1e-9).astype(int).tolist()
    if 0 in found:
        raise PlanError(f"layup: rank {found.index(0)}, {factor[found.index(0)]:g} times slower than the fastest, ends "
                        f"no batch in a step of {batches}; take at least --micro-batches {np.ceil(factor.max()):g}")
    return found


def moments(graph: TaskGraph, cost: CostModel, machine: Machine, slow: Slow = (),
            message: float | None = None) -> list[Moment]:
    """All ranks' tasks of a step and the layers that arrive, in the order of their moments: the end of an update or of
    a message, the start of any other task. Ties: ends first, then the lower key, then the lower rank. `message`: the
    time of a message; by default as an all-reduce of the layer. Raises PlanError as `batches_of` does, and Refused as
    `Batches.of`."""
    found = Batches.of(graph, "layup")
    counts = batches_of(machine.ranks, len(found.forward), slow)
    time, factor = cost.durations(graph), dict.fromkeys(range(machine.ranks), 1.0) | dict(slow)
    owns = graph.role_is(Role.PARAMETER)
    sends = graph.changed_by(owns) & (graph.kind == Kind.U)
    order, events = list[Moment](), list[tuple[float, bool, int, int, int, bool]]()
    todo = [[t for i in range(n) for t in (*found.forward[i], *found.backward[i])]
            + (found.rest if n == len(found.forward) else []) for n in counts]

    def begin(now: float, rank: int, place: int) -> None:
        task = todo[rank][place]
        ends = graph.kind[task] == Kind.U
        heapq.heappush(events, (now + (time[task] * factor[rank] if ends else 0.0), not ends, int(graph.keys[task]),
                                rank, place, False))

    for rank in range(machine.ranks):
        begin(0.0, rank, 0)
    while events:
        now, starts, key, rank, place, arrives = heapq.heappop(events)
        task = todo[rank][place]
        order.append((rank, task, arrives))
        if arrives:
            continue
        if sends[task]:
            size = sum(int(graph.buffer_bytes[b]) for b in graph.writes[task].tolist() if owns[b])
            wait = message if message is not None else machine.collective({0: size}) if machine.collective else 0.0
            heapq.heappush(events, (now + wait, False, key, rank, place, True))
        if place + 1 < len(todo[rank]):
            begin(now + (time[task] * factor[rank] if starts else 0.0), rank, place + 1)
    return order


def layup(graph: TaskGraph, cost: CostModel, machine: Machine, *, slow: Slow = (), message: float | None = None,
          share: float = 1.0, clock: str = "simulated") -> Ordered:
    """Each rank trains weights of its own and sends each layer that it has updated to one drawn rank, which mixes it
    into its own (LayUp, 2410.05985; the mixing is reconstructed as sum-weight gossip); nobody waits. Each micro-batch
    is a batch with an update. `slow`: ranks and how many times slower they are (--slow 0=4). `message`: the time of a
    message, by default as an all-reduce of the layer. `share`: of the updates after which a layer is sent. `clock`:
    "simulated", or "real": a layer is mixed in when it arrives, so runs differ, and each repeats from its log."""
    found = Batches.of(graph, "layup")
    counts = batches_of(machine.ranks, len(found.forward), slow)
    if not 0 <= share <= 1:
        raise PlanError(f"layup: share is {share:g}; it must be between 0 and 1")
    if message is not None and not message >= 0:
        raise PlanError(f"layup: message is {message:g}; a time must be at least 0")
    if clock not in ("simulated", "real") or (clock == "real" and (slow or message is not None)):
        raise PlanError(f"layup: the clock is simulated or real, not {clock!r}" if clock != "real" else
                        "layup: on the real clock nothing is slower than it is; leave --slow and message out")
    tasks = [t for ahead, back in zip(found.forward, found.backward, strict=True) for t in (*ahead, *back)]
    return Ordered(Schedule.of(graph, {Lane(0): tasks + found.rest}), {
        "stale": machine.ranks > 1 and share > 0, "batches": counts})
