"""DeepPCR: the backward pass of a chain of narrow layers in log2 L steps, by products of Jacobians.

Danieli, Sarabia, Suau, Rodriguez, Zappella, "DeepPCR: parallelizing sequential operations in neural networks"
(2309.16318). The Jacobian of each layer and sample is computed by the layer's own tasks, for every unit vector at once
with all other layers. Doubling gives the products of all Jacobians from the top down to each layer in ceil(log2 L)
levels (Hillis and Steele, 1986); then each layer's gradient is one product. This is O(L d^3 log L) work for each sample
and O(L d^2) memory, so layers must be narrow. Sums have another order than in the chain: gradients are inexact in their
last bits.
"""

from __future__ import annotations

from ..core.graph import Launch, View
from ..core.tasks import Kind
from .draft import Draft
from .flow import Again, Flow
from .jacobians import Jacobians, Making, ends_of


def deeppcr(draft: Draft) -> tuple[Draft, str]:
    """The step with its backward passes by doubling, and a remark. Raises Refused for a network that is no chain of
    narrow layers, each on one sample at a time."""
    again = Again(draft.edit())
    levels = [_doubled(again, flow) for flow in Flow.all_of(draft.graph)]
    return again.draft, f"gradients are inexact in their last bits: products of Jacobians in {max(levels)} levels"


def _doubled(again: Again, flow: Flow) -> int:
    """Replaces one backward pass; returns the number of levels."""
    e, runs = again.edit, flow.runs
    ends = ends_of(e, flow, "deeppcr")
    make = Making(again, runs[0][0], Kind.O)
    order, products = [*runs[0]], list[Jacobians]()
    for r, run in enumerate(runs[1:], 1):
        made, task = make.jacobian(f"Jacobian {r}", run, ends[r - 1], ends[r])
        products.append(made)
        order.append(task)
    levels = 0
    while 1 << levels < len(products):
        step, before = 1 << levels, [*products]
        levels += 1
        for r in range(step, len(products)):
            products[r], task = make.product(f"product {r + 1}, level {levels}", before[r - step], before[r],
                                             ends[r + 1])
            order.append(task)
    for r, made in enumerate(products, 1):  # each layer's gradient
        rows = [View(v.storage, (v.shape[0], 1, v.shape[1]), (v.shape[1], v.shape[1], 1), 0, v.dtype)
                for v in (ends[0], ends[r])]
        gradient, result = ({b for run in runs for t in run for b in e.writes[t] if e.storage_of[b] == v.storage}
                            for v in rows)
        order.append(make.task(f"gradient {r}", gradient | {made.buffer}, result,
                               [Launch("matmul", (rows[0], made.matrices()), (rows[1],))],
                               2.0 * made.shape[0] * made.shape[1] * made.shape[2]))
    again.replace(flow, order)
    return levels
