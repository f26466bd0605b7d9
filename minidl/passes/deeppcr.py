"""DeepPCR: the backward pass of a chain of narrow layers in log2 L steps, by products of Jacobians.

Danieli, Sarabia, Suau, Rodriguez, Zappella, "DeepPCR: parallelizing sequential operations in neural networks"
(2309.16318). The Jacobian of each layer and sample is computed by the layer's own tasks, for every unit vector at once
with all other layers. Doubling gives the products of all Jacobians from the top down to each layer in ceil(log2 L)
levels (Hillis and Steele, 1986); then each layer's gradient is one product. This is O(L d^3 log L) work for each sample
and O(L d^2) memory, so layers must be narrow. Sums have another order than in the chain: gradients are inexact in their
last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..core.graph import Launch, Role, StorageSpec, View
from ..core.placement import Refused
from ..core.tasks import Kind, unpack
from .draft import Draft, Edit
from .flow import Again, Flow
from .split import axes_of

WIDEST = 64  #: units of a layer


@dataclass(frozen=True)
class Jacobians:
    """Matrices (inputs, samples, outputs) in a buffer: a gradient (samples, inputs) times them is one of outputs."""

    storage: int
    buffer: int
    shape: tuple[int, int, int]
    dtype: str

    def at(self, i: int) -> int:
        """The first element for unit vector i."""
        return i * self.shape[1] * self.shape[2]

    def matrices(self) -> View:
        """As (samples, inputs, outputs)."""
        rows, n, columns = self.shape
        return View(self.storage, (n, rows, columns), (columns, n * columns, 1), 0, self.dtype)


def deeppcr(draft: Draft) -> tuple[Draft, str]:
    """The step with its backward passes by doubling, and a remark. Raises Refused for a network that is no chain of
    narrow layers, each on one sample at a time."""
    again = Again(draft.edit())
    levels = [_doubled(again, flow) for flow in Flow.all_of(draft.graph)]
    return again.draft, f"gradients are inexact in their last bits: products of Jacobians in {max(levels)} levels"


def _doubled(again: Again, flow: Flow) -> int:
    """Replaces one backward pass; returns the number of levels."""
    e = again.edit
    runs = [[t for a, atom in enumerate(flow.atoms) if flow.run[a] == r for t in atom]
            for r in range(flow.run[-1] + 1)]
    ends = _ends(e, flow, runs)
    mb, stage = unpack(e.keys[runs[0][0]]).micro_batch, e.stage[runs[0][0]]

    def new(name: str, rows: int, like: View) -> Jacobians:
        shape = rows, like.shape[0], like.shape[1]
        nbytes = rows * e.specs[like.storage].bytes
        return Jacobians(*e.place(StorageSpec(name, shape, like.dtype, nbytes, Role.GRADIENT)), shape, like.dtype)

    def task(name: str, reads: set[int], writes: set[int], launches: Sequence[Launch], flops: float = 0.0) -> int:
        nbytes = sum(e.specs[s].bytes for s in {v.storage for launch in launches for v in launch.views})
        return e.task(-1, e.unit(name), Kind.O, mb, stage=stage, reads=reads, writes=writes, launches=launches,
                      flops=flops, nbytes=nbytes)

    order, products = [*runs[0]], list[Jacobians]()
    for r, run in enumerate(runs[1:], 1):  # the Jacobian of each layer
        top, bottom = ends[r - 1], ends[r]
        width = top.shape[1]
        unit, made = new(f"unit vectors {r}", width, top), new(f"Jacobian {r}", width, bottom)
        ones = View(unit.storage, (width, top.shape[0]), (unit.at(1) + 1, width), 0, top.dtype)
        launches = [Launch("fill", (v,), (v,), constants=(("value", value),)) for v, value in (
            (e.whole(unit.storage), 0.0), (ones, 1.0))]
        scratch = again.memory(run, f"of Jacobian {r}")
        for i in range(width):
            def moved(v: View, i: int = i, top: View = top, bottom: View = bottom, unit: Jacobians = unit,
                      made: Jacobians = made, scratch: dict[int, int] = {**scratch.storages}) -> View:  # noqa: B006
                for end, to in ((top, unit), (bottom, made)):
                    if v.storage == end.storage:
                        return replace(v, storage=to.storage, offset=v.offset + to.at(i))
                return replace(v, storage=scratch.get(v.storage, v.storage))

            launches += [replace(x, reads=tuple(map(moved, x.reads)), writes=tuple(map(moved, x.writes)),
                                 work=tuple(map(moved, x.work))) for t in run for x in e.launches[t]]
        own = {b for t in run for b in e.writes[t]}
        reads = {b for t in run for b in e.reads[t] if e.storage_of[b] != top.storage} - own
        writes = {scratch.buffers[b] for b in own if e.storage_of[b] != bottom.storage} | {unit.buffer, made.buffer}
        order.append(task(f"Jacobian {r}", reads, writes, launches, width * sum(e.flops[t] for t in run)))
        products.append(made)
    levels = 0
    while 1 << levels < len(products):
        step, before = 1 << levels, [*products]
        levels += 1
        for r in range(step, len(products)):
            a, b = before[r - step], before[r]
            made = products[r] = new(f"product {r + 1}, level {levels}", a.shape[0], ends[r + 1])
            order.append(task(f"product {r + 1}, level {levels}", {a.buffer, b.buffer}, {made.buffer},
                              [Launch("matmul", (a.matrices(), b.matrices()), (made.matrices(),))],
                              2.0 * a.shape[0] * b.shape[0] * b.shape[1] * b.shape[2]))
    for r, made in enumerate(products, 1):  # each layer's gradient
        rows = [View(v.storage, (v.shape[0], 1, v.shape[1]), (v.shape[1], v.shape[1], 1), 0, v.dtype)
                for v in (ends[0], ends[r])]
        gradient, result = ({b for run in runs for t in run for b in e.writes[t] if e.storage_of[b] == v.storage}
                            for v in rows)
        order.append(task(f"gradient {r}", gradient | {made.buffer}, result,
                          [Launch("matmul", (rows[0], made.matrices()), (rows[1],))],
                          2.0 * made.shape[0] * made.shape[1] * made.shape[2]))
    again.replace(flow, order)
    return levels


def _ends(e: Edit, flow: Flow, runs: Sequence[Sequence[int]]) -> list[View]:
    """The gradient that each run hands on, of a layer's output (samples, units). Raises Refused."""
    cure = "take jacobi, or a network such as mlp with layers of few units"
    others = {e.storage_of[b] for t in range(len(e.old.graph)) if t not in flow.needs for b in e.reads[t]}
    ends = list[View]()
    for r, run in enumerate(runs):
        above = {s for t in run for s in flow.needs[t] if flow.run[flow.place[s]] != r}
        here = {e.storage_of[b] for t in run for b in e.writes[t]} & others
        end = e.launches[run[-1]][-1].writes[0]
        if len(runs) < 2 or (r and (above != {ends[-1].storage} or not here <= {end.storage})):
            raise Refused("deeppcr", "this network is not a chain of layers with one gradient between each two", cure)
        if end.ndim != 2 or end.shape != e.specs[end.storage].shape or len({v.shape[0] for v in [*ends, end]}) > 1:
            raise Refused("deeppcr", "a layer of this network gives more than a row for each sample", cure)
        if r and end.shape[0] > 1 and not all(_by_rows(x, flow) for t in run for x in e.launches[t]):
            raise Refused("deeppcr", "a layer of this network mixes samples, so their Jacobians are not apart", cure)
        if end.shape[1] > WIDEST:
            raise Refused("deeppcr", f"a layer has {end.shape[1]} units, and products of Jacobians pay only up to "
                          f"{WIDEST}", cure)
        ends.append(end)
    return ends


def _by_rows(launch: Launch, flow: Flow) -> bool:
    """Whether a launch makes each row of its results of the same rows of gradients."""
    if launch.cuts is None:
        return False
    reads, writes = axes_of(launch)
    rows = {axes[0] for axes in writes}
    rows |= {axes[0] for axes, v in zip(reads, launch.reads, strict=True) if v.storage in flow.place}
    return len(rows) == 1 and "" not in rows
