"""Experts over data-parallel ranks: each rank has the parameters of some of them, and tokens go to the ranks of theirs.

Lepikhin et al., "GShard", 2006.16668; Rajbhandari et al., "DeepSpeed-MoE", 2201.05596. Rank r of p has experts r E/p to
(r + 1) E/p - 1 of E: a share of each parameter, which a run keeps, saves and gathers as it does shards of level 3. An
exchange (X) of counts tells each rank how many rows come. Rows, which are sorted by expert and so by rank, go there by
an exchange and back by another, in the backward pass their gradients: `5X0` for the forward of unit 5, `5X0/1` for its
backward. An expert works on the rows of one source (a rank) after the other, as one process does with as many
micro-batches, and adds up their weight gradients in this order, so the bits are equal; nothing is left to sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod

import numpy as np

from ..core.columns import grouped
from ..core.graph import Launch, Role, View
from ..core.placement import Refused
from ..core.tasks import SUMS, Kind, pack, unpack
from .draft import Draft
from .rewrite import gradients
from .shares import WHOLE

WHAT = "experts over ranks"  #: for messages
TOKENS = ("dispatch", "combine", "gate_grad")  #: kernels that work on a rank's own rows
GROUPED = ("grouped_linear", "grouped_linear_input_grad", "grouped_linear_weight_grad")  #: on rows of experts
ANY_REST = (("rest", False),)  #: rows after the last one may be left as they are
NEED_ALL = ("square_sum", "unscale")  #: gradients of all experts
LEAVE = "leave --experts-over out"


@dataclass(frozen=True)
class _Route:
    """A choice of experts: the task that makes it, and where it says how many rows each expert gets. `rows`: of a rank,
    tokens times choices; `most`: that a rank can get from another one."""

    task: int
    counts: View
    rows: int
    most: int


def experts_over_ranks(draft: Draft) -> Draft:
    """The step of a rank that has a share of the experts. Raises Refused for a step on one rank or in stages, without
    experts, or with a number of them that ranks do not divide; and for kernels on experts' rows, parameters or
    gradients that need what other ranks have."""
    ranks = draft.machine.ranks
    if draft.staged or ranks == 1:
        raise Refused(WHAT, "each of several data-parallel ranks has a share", f"give --parallel data and at least 2 "
                      f"ranks, or {LEAVE}")
    if draft.sums is None:
        raise Refused(WHAT, f"ranks do not sum gradients under {draft.name}", f"take another scheduler, or {LEAVE}")
    work = _Work(draft, ranks)
    if not work.routes:
        raise Refused(WHAT, "the network has no experts", LEAVE)
    for (storage, at), tasks in work.find().items():
        work.exchange(storage, tasks, leave=at < 0)
    work.gradients()
    return work.done()


class _Work:
    """The step, as it is changed."""

    def __init__(self, draft: Draft, ranks: int) -> None:
        self.draft, self.graph, self.e, self.ranks = draft, draft.graph, draft.edit(), ranks
        self.sums = np.flatnonzero(np.isin(self.graph.kind, SUMS)).tolist()
        self.tasks = np.flatnonzero(~np.isin(self.graph.kind, SUMS)).tolist()
        self.makers = self.graph.writes.transposed(len(self.graph.buffer_bytes))
        self.routes = {launch.writes[2].storage: self._route(t, launch) for t, launch in self._launches()
                       if launch.kernel == "route"}  # by the storage of places
        self.rows = dict[int, _Route]()  # storage of rows that are with their experts -> where they were chosen
        self.weights = dict[int, int]()  # storage with a part for each expert -> the number of experts
        self.received = dict[View, tuple[View, int]]()  # counts -> the ones received, and their buffer
        #: storages of which tasks read the rows after the last one
        self.whole = {v.storage for _, launch in self._launches() if launch.kernel not in (*TOKENS, *GROUPED)
                      for v in launch.reads}
        #: storage of gradients -> the one of their parts by source, and its own buffers
        self.apart, self.names = dict[int, tuple[int, set[int]]](), {*self.e.keys}

    def _launches(self) -> Iterator[tuple[int, Launch]]:
        return ((t, launch) for t in self.tasks for launch in self.e.launches[t])

    def _route(self, t: int, launch: Launch) -> _Route:
        place, counts = launch.writes[2:4]
        experts, capacity = counts.shape[1], dict(launch.constants)["capacity"]
        if experts % self.ranks:
            raise Refused(WHAT, f"{self.ranks} ranks cannot have equal shares of {experts} experts",
                          "take a number of ranks that divides it")
        return _Route(t, counts, place.size, min(place.size, capacity * experts // self.ranks or place.size))

    # --------------------------------------------------------------------------------------------------- what there is
    def find(self) -> dict[tuple[int, int], list[int]]:
        """Finds the rows and the weights of experts. Returns the tasks in which rows leave a rank, by (storage, -1), or
        are back, by (storage, 0)."""
        ends = defaultdict[tuple[int, int], list[int]](list)
        for t, launch in self._launches():
            name, read = launch.kernel, [v.storage for v in launch.reads]
            if name == "dispatch":
                self.rows[launch.writes[0].storage] = self.routes[read[1]]
                ends[launch.writes[0].storage, -1].append(t)
            elif name in TOKENS:
                ends[read[name == "gate_grad"], 0].append(t)
            elif mine := [s for s in read if s in self.rows]:
                if name != "grouped_linear_weight_grad":
                    self.rows |= dict.fromkeys((v.storage for v in launch.writes), self.rows[mine[0]])
                self._check(t, launch)
            if name in GROUPED:
                own = launch.writes if name.endswith("weight_grad") else launch.reads[2:]
                self.weights |= {v.storage: launch.reads[0].shape[1] for v in own if v.storage not in self.rows}
            elif name == "move_bias":
                raise Refused(WHAT, "the bias of a router moves by the loads of all ranks, one after the other",
                              f"even loads by balance, or {LEAVE}")
        while more := {v.storage: self.weights[of.storage] for _, launch in self._launches()
                       if launch.kernel not in (*GROUPED, "unscale") for of in launch.views
                       if of.storage in self.weights
                       for v in launch.views if v.size == of.size and v.storage not in self.weights}:
            self.weights |= more
        if any(self.e.specs[s].filled is not None for s in self.weights):
            raise Refused(WHAT, f"{self.draft.name} keeps a copy of the weights", f"take another scheduler, or {LEAVE}")
        for t, launch in self._launches():
            used = [[v.storage for v in views if v.storage in self.weights] for views in (launch.reads, launch.writes)]
            if (launch.kernel in WHOLE or launch.kernel.endswith("_many")) and any(used):
                raise Refused(WHAT, f"{launch.kernel} in {self.graph.name(t)} needs all experts", LEAVE)
            if launch.kernel == "unscale" and used[0] != used[1]:
                raise Refused(WHAT, f"{self.graph.name(t)} divides gradients into others", LEAVE)
        return ends

    def _check(self, t: int, launch: Launch) -> None:
        """Raises Refused for work on a row of experts that needs something besides this row and the parameters."""
        if launch.kernel not in GROUPED and (
                launch.cuts is None or launch.cuts.axes[0] not in "=." or "sample" in dict(launch.constants)
                or any(v.size > 1 and v.storage not in self.rows for v in launch.reads)):
            raise Refused(WHAT, f"{launch.kernel} in {self.graph.name(t)} does not work on each row of experts by "
                          f"itself", LEAVE)

    # ---------------------------------------------------------------------------------------------------- what is done
    def exchange(self, storage: int, tasks: list[int], leave: bool) -> None:
        """Rows of a storage go to their experts after the task that makes them, or come back before the first of these
        tasks. These work on memory of their own."""
        e, route = self.e, self.rows[storage]
        counts, buffer = self._counts(route)
        there = sorted({b for t in tasks for b in self._of(t, storage)})
        copies = e.copies(there, "of this rank")
        before = [int(t) for b in there for t in self.makers[b] if t < tasks[0]]
        for t in tasks:
            if any(v.storage in self.rows for launch in e.launches[t] if launch.kernel not in TOKENS
                   for v in launch.views):
                raise Refused(WHAT, f"{self.graph.name(t)} works on rows of experts and of this rank", LEAVE)
            e.move(copies, t)
        width, dtype = prod(e.specs[storage].shape) // route.rows, e.specs[storage].dtype
        here, far = (View(s, (n, width), (width, 1), 0, dtype) for s, n in (
            (copies.storages[storage], route.rows), (storage, self.ranks * route.most)))
        known, numbers = {*self._of(route.task, route.counts.storage), buffer}, (route.counts, counts)
        own, nbytes = {*copies.buffers.values()}, here.size * np.dtype(dtype).itemsize
        if leave:
            self._new(tasks[0], tasks[0], Kind.X, own | known, {*there}, Launch(
                "exchange", (here, *numbers), (far,), constants=() if storage in self.whole else ANY_REST), nbytes)
        else:
            self._new(tasks[0], max(before), Kind.X, {*there} | known, own,
                      Launch("exchange", (far, *numbers[::-1]), (here,)), nbytes)

    def _counts(self, route: _Route) -> tuple[View, int]:
        """The counts (p, E/p) of the rows that come to this rank, and their buffer. An exchange brings them."""
        own = route.counts
        if own not in self.received:
            shape = (self.ranks, own.shape[1] // self.ranks)
            counts, buffer = self.received[own] = self.e.array("counts received", shape, own.dtype, Role.ACTIVATION)
            self._new(route.task, route.task, Kind.X, {*self._of(route.task, own.storage)}, {buffer},
                      Launch("exchange", (own,), (counts,)), self.e.buffer_bytes[buffer])
        return self.received[own]

    def _of(self, t: int, storage: int) -> list[int]:
        return self.e.buffers_of(t).get(storage, [])

    def _new(self, like: int, after: int, kind: Kind, reads: set[int], writes: set[int], launch: Launch,
             nbytes: int) -> None:
        """A collective of the unit of task `like`, right after another task."""
        e, own, forward = self.e, unpack(self.e.keys[like]), self.graph.kind[like] == Kind.F
        keys = (int(pack(own.unit, kind, own.micro_batch if kind == Kind.X else 0, part=part))
                for part in count(int(kind == Kind.X and not forward), 2))
        self.names.add(key := next(key for key in keys if key not in self.names))
        e.task(after, own.unit, kind, own.micro_batch if kind == Kind.X else 0, part=unpack(key).part,
               stage=e.stage[like], reads=reads, writes=writes, launches=[launch], time=np.nan, nbytes=nbytes)

    def gradients(self) -> None:
        """Gradients of experts are divided by the number of ranks after the last task that adds to them, not summed.
        For norms, and for a loss scale, which looks for numbers that are not finite, all ranks' come together."""
        e, kind, last = self.e, self.graph.kind, dict[int, int]()
        for b in (b for buffers in gradients(self.graph).values() for b in buffers.tolist()):
            if (storage := e.storage_of[b]) in self.weights:
                made = max(int(t) for t in self.makers[b] if kind[t] not in (Kind.U, *SUMS))
                last[storage] = max(last.get(storage, -1), made)
        for t in self.sums:
            mine = {b for b in e.writes[t] if e.storage_of[b] in last}
            e.reads[t], e.writes[t] = e.reads[t] - mine, e.writes[t] - mine
            e.bytes[t] = sum(e.buffer_bytes[b] for b in e.writes[t])
            e.launches[t] = tuple(replace(launch, reads=kept, writes=kept) for launch in e.launches[t]
                                  if (kept := tuple(v for v in launch.reads if v.storage not in last)))
        last = {self._apart(storage): t for storage, t in last.items()}
        whole = self._whole(last)
        self._resize()
        for storage, t in last.items():
            share, (source, own) = e.whole(storage), self.apart[storage]
            parts = [e.whole(source).part(0, r * share.size, (r + 1) * share.size) for r in range(self.ranks)]
            e.launches[t] += (*(Launch("add", (share if r > 1 else parts[0], parts[r]), (share,))
                                for r in range(1, self.ranks)),
                              Launch("scale", (share,), (share,), constants=(("factor", 1 / self.ranks),)))
            e.writes[t] |= own
            if storage in whole:
                at, buffer = whole[storage]
                self._new(t, t, Kind.AG, {*self._of(t, storage)}, {buffer},
                          Launch("all_gather", (share,), (e.whole(at),)), e.buffer_bytes[buffer])

    def _apart(self, storage: int) -> int:
        """The storage of the gradients that updates read, in place of one with the room of all experts: there each
        source's rows have gradients of their own, to which all micro-batches add, as on that rank in other layers."""
        e, own = self.e, [b for b, s in enumerate(self.e.storage_of) if s == storage]
        copies = e.copies(own, "summed")
        made = copies.storages[storage]
        e.move(copies, *np.flatnonzero(self.graph.kind == Kind.U).tolist())
        self.apart[made] = storage, {*copies.buffers.values()}
        self.weights[made] = self.weights[storage]
        return made

    def _whole(self, gradients: Collection[int]) -> dict[int, tuple[int, int]]:
        """The gradients (storages) of which a task needs all ranks' -> a storage and a buffer that it uses."""
        e, found = self.e, dict[int, tuple[int, int]]()
        for t in self.tasks:
            for i, launch in enumerate(e.launches[t]):
                mine = [v for v in launch.reads if v.storage in gradients] if launch.kernel in NEED_ALL else []
                for v in mine:
                    if v.storage not in found:
                        spec = e.specs[v.storage]
                        found[v.storage] = e.place(replace(spec, name=f"{spec.name}, whole", role=Role.WORKSPACE))
                    e.reads[t].add(found[v.storage][1])
                every = tuple(replace(v, storage=found[v.storage][0]) for v in mine)
                if every and launch.kernel == "unscale":  # which divides this rank's part as well
                    work = [e.array("work", v.shape, "bool", Role.WORKSPACE) for v in every]
                    launch = replace(launch, reads=(*launch.reads[:-1], *every, launch.reads[-1]),
                                     writes=(*launch.writes[:-1], *every, launch.writes[-1]),
                                     work=(*launch.work, *(view for view, _ in work)))
                    e.writes[t] |= {found[v.storage][1] for v in mine} | {b for _, b in work}
                elif every:
                    launch = replace(launch, reads=every)
                e.launches[t] = (*e.launches[t][:i], launch, *e.launches[t][i + 1 :])
        return found

    def _resize(self) -> None:
        """Rows of experts get the room of all that may come, weights the one for this rank's experts."""
        e, buffers = self.e, grouped((s, b) for b, s in enumerate(self.e.storage_of))
        factor = {s: (route.rows, self.ranks * route.most) for s, route in self.rows.items()}
        apart = {e.storage_of[b] for t in self.tasks if self.graph.kind[t] in (Kind.O, Kind.W, Kind.B)
                 for b in e.writes[t]}  # gradients
        factor |= {s: (experts, experts // self.ranks) for s, experts in self.weights.items() if s not in apart}
        size = {s: prod(e.specs[s].shape) for s in factor}

        def sized(storage: int, shape: Sequence[int]) -> None:
            spec = e.specs[storage]
            new = prod(shape) * np.dtype(spec.dtype).itemsize
            for b in buffers[storage]:
                e.buffer_bytes[b] = e.buffer_bytes[b] * new // spec.bytes
            e.specs[storage] = replace(spec, shape=tuple(shape), bytes=new)

        def view(v: View) -> View:
            if v.storage not in factor:
                return v
            old, new = factor[v.storage]
            if v.shape[0] % old or v.shape[0] * v.strides[0] != size[v.storage]:
                raise Refused(WHAT, f"a task uses {e.specs[v.storage].name} in another form than by rows or experts",
                              LEAVE)
            return replace(v, shape=(v.shape[0] // old * new, *v.shape[1:]))

        def resized(t: int, launch: Launch) -> Launch:
            if not any(v.storage in factor for v in launch.views):
                return launch
            reads, writes = (tuple(map(view, views)) for views in (launch.reads, launch.writes))
            if launch.kernel in GROUPED:
                counts, buffer = self.received[reads[0]]
                if launch.kernel == GROUPED[-1]:  # of each source by itself
                    counts = replace(counts, shape=reads[0].shape, strides=reads[0].strides)
                reads = (counts, *reads[1:])
                e.reads[t].add(buffer)
            shapes = ([shape for shape, _ in launch.cuts.work(reads, writes, **dict(launch.constants))] if launch.cuts
                      else [(1,), *(v.shape for v in writes[:-1])] if launch.kernel == "unscale" else [])
            for v, shape in zip(launch.work, shapes, strict=True):
                sized(v.storage, shape)
            work = (View.of(e.specs[v.storage], v.storage) for v in launch.work)
            more = ANY_REST if launch.kernel in GROUPED[:2] and not any(v.storage in self.whole for v in writes) else ()
            return replace(launch, reads=reads, writes=writes, work=tuple(work), constants=(*launch.constants, *more))

        for storage, (old, new) in factor.items():
            sized(storage, (size[storage] // old * new,))
            if storage in self.weights and (live := e.specs[storage].live) is not None:
                e.specs[storage] = replace(e.specs[storage], live=None, share_of=live)
        for t in self.tasks:
            e.launches[t] = tuple(resized(t, launch) for launch in e.launches[t])

    def done(self) -> Draft:
        """The changed draft, without sums that have nothing left to sum."""
        made = self.e.draft
        empty = np.isin(made.graph.kind, SUMS) & np.array([not launches for launches in made.graph.launches], bool)
        return made.take(np.flatnonzero(~empty)) if empty.any() else made
