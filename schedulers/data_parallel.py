"""Data-parallel schedules: in which order gradients are computed, summed over ranks, and used.

Each policy says how gradients are summed, and orders the step with these sums (`minidl.passes.synchronise`): one
compute lane, one communication lane, and updates one step late (`minidl.passes.boundary`), so that communication may go
on into the next forward.

On the compute lane W of a layer runs before its O, unless it waits: its transfer starts earlier, and the layers below
start later.

Every rank gets the same schedule, so all start their communication in the same order without negotiation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import Parameter, signature
from typing import Any

import numpy as np

from ..core.graph import TaskGraph
from ..core.machine import Machine, PlanError
from ..core.schedule import Schedule
from ..core.tasks import Kind
from ..passes.boundary import Loop, cross_boundary
from ..passes.draft import Sums
from ..passes.rewrite import gradients
from ..passes.synchronise import reverse_buckets
from ..plans.memory import MemoryLimitError
from ..plans.plan import Plan
from ..plans.program import lower
from ..pricing.cost import CostModel
from .iterations import Iterations, Rules, search
from .ordered import Ordered, beyond

BUCKET_BYTES = 25 * 2**20  #: as in DDP
PART_BYTES = 2**20


@dataclass(frozen=True)
class Policy:
    """One scheduler: `sums(graph, ...)` says how the gradients of a recorded step are summed (None: they are not), and
    `order(graph, cost, machine, ...)` orders the step with these sums, whose times the costs have. Their other
    parameters are the policy's options."""

    order: Callable[..., Schedule | Ordered]
    sums: Callable[..., Sums] | None = lambda graph: Sums()

    @cached_property
    def options(self) -> dict[str, Parameter]:
        """The policy's options, of both functions."""
        return beyond(self.order, 3) | (beyond(self.sums) if self.sums else {})

    @cached_property
    def taken(self) -> frozenset[str]:
        """The names of the options that `order` accepts."""
        return frozenset(signature(self.order).parameters)

    @cached_property
    def name(self) -> str:
        return self.order.__name__

    def summed(self, graph: TaskGraph, options: Mapping[str, Any]) -> Sums | None:
        """How ranks sum the gradients of this step."""
        known = signature(self.sums).parameters if self.sums else ()
        return self.sums and self.sums(graph, **{name: options[name] for name in options if name in known})

    def __call__(self, graph: TaskGraph, cost: CostModel, machine: Machine, **options: Any) -> Schedule | Ordered:
        """The result of `order` for a step with its sums, with the options that it accepts."""
        return self.order(graph, cost, machine, **{name: options[name] for name in options.keys() & self.taken})


def no_overlap(graph: TaskGraph, cost: CostModel, machine: Machine) -> Ordered:
    """All communication after the backward pass, on the compute lane: nothing overlaps."""
    return _settled(graph, cost, Rules(crosses="none", overlaps=False))


def barrier(graph: TaskGraph, cost: CostModel, machine: Machine) -> Ordered:
    """Each layer's gradients are summed while the backward pass goes on, all before any update (as DDP and Horovod do,
    a layer at a time)."""
    return _settled(graph, cost, Rules(crosses="none"))


def buckets(graph: TaskGraph, cost: CostModel, machine: Machine) -> Ordered:
    """As `barrier`, but in buckets of at most `bucket_bytes`, or of one larger layer (PyTorch DDP, 2020).

    `buckets`: this many with equal numbers of layers instead. DDP's own end once full, by default the first at 1 MiB.
    """
    return barrier(graph, cost, machine)


def in_buckets(graph: TaskGraph, *, buckets: int | None = None, bucket_bytes: int = BUCKET_BYTES) -> Sums:
    """Sums of several layers' gradients together. Raises PlanError for more buckets than layers."""
    if buckets is None:
        return Sums(reverse_buckets(graph, bucket_bytes))
    layers = sorted(gradients(graph), key=lambda u: -int(graph.unit[u]))
    if not 1 <= buckets <= len(layers):
        raise PlanError(f"{len(layers)} layers are too few for {buckets} buckets")
    return Sums([part.tolist() for part in np.array_split(np.array(layers), buckets)])


def fifo(graph: TaskGraph, cost: CostModel, machine: Machine) -> Ordered:
    """An update waits only for its own gradient, across the iteration boundary; gradients are sent in the order in
    which they become ready."""
    return _settled(graph, cost, Rules())


def priority(graph: TaskGraph, cost: CostModel, machine: Machine) -> Ordered:
    """As `fifo`, but gradients are sent in parts of at most `part_bytes`, and the part that the next forward pass needs
    first goes first (P3, TicTac, ByteScheduler, 2019)."""
    return _settled(graph, cost, Rules(first="need"))


def in_parts(graph: TaskGraph, *, part_bytes: int = PART_BYTES) -> Sums:
    """Sums of parts of gradients."""
    return Sums(part_bytes=part_bytes)


def dear(graph: TaskGraph, cost: CostModel, machine: Machine) -> Ordered:
    """Gradients are reduce-scattered in the backward pass and all-gathered in the next forward pass (DeAR, 2023)."""
    return _settled(graph, cost, Rules())


def reverse_first_k(graph: TaskGraph, cost: CostModel, machine: Machine, *, k: int | None = None,
                    released: bool = False) -> Ordered:
    """As `priority`, but the weight gradients of the first k layers run after the rest of the backward pass, the first
    layer's first, so that the transfer that is needed first starts as early as possible (Oh, Lee, Kim, Seo, EuroSys
    2022, section 5).

    `k`: None searches the k of the shortest period (without contention) among those that fit the machine's memory.
    The order is the authors'; the search for k is reconstructed. `released`: as in the authors' code, only the updates
    of the first k layers cross the iteration boundary; all others are made before the next forward pass.
    Raises PlanError for more layers than can wait, and MemoryLimitError if no k fits.
    """
    iterations = Iterations(late_updates(graph).body[0], cost, Rules("first k" if released else "all", first="need"))
    layers, limit = len(iterations.delayable), machine.memory_limit
    if k is None:
        def peak(n: int) -> int:
            return lower(graph, iterations.schedule(n)).peak_bytes

        try:
            k = search(iterations.periods, layers, None if limit is None else lambda n: peak(n) <= limit)
        except MemoryLimitError as error:
            raise MemoryLimitError(str(error), peak(0)) from None
    elif not 0 <= k <= layers:
        raise PlanError(f"k is {k}; it must be from 0 to {layers}, the number of layers whose weight gradient may wait")
    found = iterations.ordered(cost, k)
    return replace(found, notes={**found.notes, "k": k, "largest_k": layers})


def _settled(graph: TaskGraph, cost: CostModel, rules: Rules) -> Ordered:
    """The order to which the lanes of a synchronised graph settle."""
    return Iterations(late_updates(graph).body[0], cost, rules).ordered(cost)


def late_updates(graph: TaskGraph) -> Loop:
    """The loop of a synchronised graph whose updates are one step late."""
    return cross_boundary(graph, np.flatnonzero(graph.kind == Kind.U).tolist())


def hidden(plan: Plan) -> float:
    """The share of the communication that overlaps with computation; 1.0 where there is no communication."""
    communication = plan.notes["communication"]
    if not communication:
        return 1.0
    lanes = sum(lane.name != "comm" for lane in plan.schedule.lanes)
    return float(max(0.0, 1 - max(0.0, plan.period - plan.notes["compute"] / lanes) / communication))  # includes waits
