"""The Jacobians of a chain of narrow layers, each of one sample, as tasks: made by the layers' own backward tasks from
unit vectors, and multiplied. `deeppcr` and `newton` build on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..core.graph import Launch, Role, View
from ..core.placement import Refused
from ..core.tasks import Kind, unpack
from .draft import NONE, Copies, Edit, fill
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


@dataclass(frozen=True)
class Making:
    """Makes tasks of one kind for the micro-batch and on the stage of another task."""

    again: Again
    like: int
    kind: Kind

    def task(self, name: str, reads: Iterable[int], writes: Iterable[int], launches: Sequence[Launch],
             flops: float = 0.0) -> int:
        e = self.again.edit
        nbytes = sum(e.specs[s].bytes for s in {v.storage for launch in launches for v in launch.views})
        return e.task(-1, e.unit(name), self.kind, unpack(e.keys[self.like]).micro_batch, stage=e.stage[self.like],
                      reads=reads, writes=writes, launches=launches, flops=flops, nbytes=nbytes)

    def memory(self, name: str, rows: int, like: View) -> Jacobians:
        """Room for matrices of so many rows for each sample."""
        shape = rows, like.shape[0], like.shape[1]
        view, buffer = self.again.edit.array(name, shape, like.dtype, Role.GRADIENT)
        return Jacobians(view.storage, buffer, shape, like.dtype)

    def jacobian(self, name: str, run: Sequence[int], top: View, bottom: View,
                 copies: Copies = NONE) -> tuple[Jacobians, int]:
        """The Jacobian of a layer, by the backward tasks `run` between the gradients of its output and its input, on
        these copies of what they read."""
        e, width = self.again.edit, top.shape[1]
        unit, made = self.memory(f"unit vectors of {name}", width, top), self.memory(name, width, bottom)
        ones = View(unit.storage, (width, top.shape[0]), (unit.at(1) + 1, width), 0, top.dtype)
        launches = [fill(e.whole(unit.storage), 0.0), fill(ones, 1.0)]
        scratch = copies | self.again.memory(run, f"of {name}")
        for i in range(width):
            def moved(v: View, i: int = i) -> View:
                for end, to in ((top, unit), (bottom, made)):
                    if v.storage == end.storage:
                        return replace(v, storage=to.storage, offset=v.offset + to.at(i))
                return replace(v, storage=scratch.storages.get(v.storage, v.storage))

            launches += [replace(x, reads=tuple(map(moved, x.reads)), writes=tuple(map(moved, x.writes)),
                                 work=tuple(map(moved, x.work))) for t in run for x in e.launches[t]]
        own = {b for t in run for b in e.writes[t]}
        reads = copies.of(b for t in run for b in e.reads[t] if e.storage_of[b] != top.storage) - own
        writes = {scratch.buffers[b] for b in own if e.storage_of[b] != bottom.storage} | {unit.buffer, made.buffer}
        return made, self.task(name, reads, writes, launches, width * sum(e.flops[t] for t in run))

    def product(self, name: str, a: Jacobians, b: Jacobians, like: View) -> tuple[Jacobians, int]:
        """a b, with the columns of `like`."""
        made = self.memory(name, a.shape[0], like)
        return made, self.task(name, {a.buffer, b.buffer}, {made.buffer},
                               [Launch("matmul", (a.matrices(), b.matrices()), (made.matrices(),))],
                               2.0 * a.shape[0] * b.shape[0] * b.shape[1] * b.shape[2])


def ends_of(e: Edit, flow: Flow, name: str) -> list[View]:
    """The gradient that each run of a flow hands on, of a layer's output (samples, units). Raises Refused."""
    runs, cure = flow.runs, "take a network such as mlp with layers of few units"
    others = {e.storage_of[b] for t in range(len(e.old.graph)) if t not in flow.needs for b in e.reads[t]}
    ends = list[View]()
    for r, run in enumerate(runs):
        above = {s for t in run for s in flow.needs[t] if flow.run[flow.place[s]] != r}
        here = {e.storage_of[b] for t in run for b in e.writes[t]} & others
        end = e.launches[run[-1]][-1].writes[0]
        if len(runs) < 2 or (r and (above != {ends[-1].storage} or not here <= {end.storage})):
            raise Refused(name, "this network is not a chain of layers with one gradient between each two", cure)
        if end.ndim != 2 or end.shape != e.specs[end.storage].shape or len({v.shape[0] for v in [*ends, end]}) > 1:
            raise Refused(name, "a layer of this network gives more than a row for each sample", cure)
        if r and end.shape[0] > 1 and not all(_by_rows(x, flow) for t in run for x in e.launches[t]):
            raise Refused(name, "a layer of this network mixes samples, so their Jacobians are not apart", cure)
        if end.shape[1] > WIDEST:
            raise Refused(name, f"a layer has {end.shape[1]} units, and products of Jacobians pay only up to "
                          f"{WIDEST}", cure)
        ends.append(end)
    return ends


def _by_rows(launch: Launch, flow: Flow) -> bool:
    """Whether a launch makes each row of its results of the same rows of gradients."""
    if launch.cuts is None:
        return False
    reads, writes = axes_of(launch)
    rows = {"".join(axes[:1]) for axes in writes}
    rows |= {"".join(axes[:1]) for axes, v in zip(reads, launch.reads, strict=True) if v.storage in flow.place}
    return len(rows) == 1 and "" not in rows
