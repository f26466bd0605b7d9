"""Split: a task becomes parts that write disjoint elements, so that several lanes can share one task.

Each kernel says along which of its axes a launch may be cut (`minidl.kernels.registry.kernel`), and nothing here knows
a kernel. A written buffer becomes one buffer for each part, so that edges join only the parts that touch the same
elements: parts of one task need not run at the same time, and need not wait for each other before the next task.

The split graph has bits of its own, the same under each of its schedules: a library may choose another kernel for fewer
rows, which adds in another order. Cuts are at multiples of TILE elements if there are enough; then a large product in
parts is mostly equal to the whole, bit by bit. Tasks whose width is chosen when they are scheduled are called moldable
(Feitelson et al., "Theory and practice in parallel job scheduling", 1997); here each part is a task of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice, product
from math import prod

import numpy as np

from ..core.columns import Ints, Rows
from ..core.graph import Launch, Role, StorageSpec, TaskGraph, View
from ..core.placement import Refused
from ..core.schedule import Schedule
from ..core.tasks import AXES, COMPUTE, Kind, repack, unpack
from .draft import Draft, Edit

TILE = 16  #: elements along a cut axis: BLAS computes tiles of so many rows
TRIES = 64  #: how many ways are tried to cut a task with several launches
MOST = 64  #: pieces of a buffer that tasks cut along several axes
Axes = list[list[str]]  #: a label for each axis of each view
Held = tuple[tuple[View, ...], ...]  #: the views of each part of a task, or of several tasks' parts that meet


def split(draft: Draft, parts: int | Mapping[int, int] = 1) -> Draft:
    """The tasks in parts: all in so many, or, from a task's key to the number of its parts, some. Parts count from 1,
    as in `4O0/1` and `4O0/2`. A task that cannot be cut stays whole. A stage's task for a micro-batch is cut like any
    other one, after a policy has ordered it; its update stays whole, since other ranks may read it.

    Raises Refused for stages that read older weights, and if nothing can be cut.
    """
    graph = draft.graph
    wanted = np.array([parts if isinstance(parts, int) else parts.get(key, 1) for key in graph.keys.tolist()])
    if draft.staged:
        wanted[graph.kind == Kind.U] = 1
    if (wanted[np.isin(graph.kind, COMPUTE)] <= 1).all():
        return draft
    if draft.stale:
        raise Refused("split", "older weights are proved by one lane's order; parts have several", "leave split out")
    found = _cut(graph, wanted)
    if not found:
        raise Refused("split", "no task of this step can be cut in so many parts on this device",
                      "give fewer parts, or leave split out")
    e, pieces = draft.edit(), _pieces(graph, found)
    for t in range(len(graph)):
        if t in found:
            _replace(e, t, found[t], pieces)
        else:
            e.reads[t], e.writes[t] = _all(e, e.reads[t], pieces), _all(e, e.writes[t], pieces)
    return e.draft


def to_be_priced(graph: TaskGraph, count: int) -> tuple[TaskGraph, Ints]:
    """The parts of the tasks that can be cut in so many, only to be priced: without edges; and the task of each."""
    found = _cut(graph, np.full(len(graph), count))
    parts, of = [part for own in found.values() for part in own], np.repeat([*found], count).astype(np.int64)
    none, share = Rows.of([[]] * len(of)), np.array([part.share for part in parts])
    keys, nbytes = repack(graph.keys[of], part=np.arange(len(of)) % count + 1), [part.bytes for part in parts]
    return replace(graph, keys=keys, flops=graph.flops[of] * share, bytes=np.array(nbytes, np.int64), reads=none,
                   writes=none, launches=()), of


def _cut(graph: TaskGraph, wanted: Ints) -> dict[int, tuple[Part, ...]]:
    """The parts of the tasks that are wanted in several, and can be cut in so many."""
    return {t: cut for t in np.flatnonzero(np.isin(graph.kind, COMPUTE) & (wanted > 1)).tolist() if graph.launches
            and (cut := cut_in_parts(graph.launches[t], int(wanted[t])))}


# ------------------------------------------------------------------------------------------------------------- launches
@dataclass(frozen=True)
class Part:
    """The launches of one part of a task, its share of the work, and new scratch memory: storage -1 - i of its views is
    `scratch[i]`."""

    launches: tuple[Launch, ...]
    share: float
    scratch: tuple[StorageSpec, ...]

    @property
    def bytes(self) -> int:
        """That it reads and writes."""
        return sum(_bytes(launch.reads) + _bytes(launch.writes) for launch in self.launches)

    def views(self, storage: int, written: bool) -> tuple[View, ...]:
        """The views on a storage that it writes, or that it reads."""
        return tuple(dict.fromkeys(v for launch in self.launches for v in (launch.writes if written else launch.reads)
                                   if v.storage == storage))


@lru_cache(1 << 14)  # plans for several widths cut the same tasks
def cut_in_parts(launches: tuple[Launch, ...], count: int) -> tuple[Part, ...]:
    """The parts of a task, which may run in any order; none if it cannot be cut in so many. A launch that cannot
    be cut belongs to the first part, if no other part needs its results."""
    axes = [axes_of(launch) for launch in launches]
    labels = [[*_labels(launch, *own, count), ""] for launch, own in zip(launches, axes, strict=True)]
    for chosen in islice(product(*labels), TRIES):
        if any(chosen) and not clash(parts := tuple(_part(launches, axes, chosen, count, p) for p in range(count))):
            return parts
    return ()


def _labels(launch: Launch, reads: Axes, writes: Axes, count: int) -> list[str]:
    """The labels along which a launch can be cut in so many parts: first those that all its results have, then axes of
    its largest array, then the outermost one. So a product of few rows is cut along its weight's rows or columns, which
    each lane keeps in its cache."""
    found, every = [], [*zip((*launch.reads, *launch.writes), (*reads, *writes), strict=False)]
    largest = max((v.size for v, _ in every), default=0)
    for label in dict.fromkeys(label for axes in writes for label in axes if label):
        n = max(_length(v, axes, label) for v, axes in zip(launch.writes, writes, strict=True))
        fits = (label == "r" or _length(v, axes, label) in (0, 1, n)
                for v, axes in zip(launch.reads, reads, strict=True))
        if n >= count and all(fits) and all(
                _length(v, axes, label) in (0, n) for v, axes in zip(launch.writes, writes, strict=True)):
            found.append((sum(label not in axes for axes in writes),
                          all(label not in axes for v, axes in every if v.size == largest), label))
    return [label for missing, _, label in sorted(found, key=lambda f: f[:2]) if missing in (0, found[0][0])]


def axes_of(launch: Launch) -> tuple[Axes, Axes]:
    """The label of each axis of what a launch reads and writes; empty if it may not be cut."""
    if launch.cuts is None:
        return [], []
    reads, writes = (side.split(",") for side in launch.cuts.axes.split("->"))
    return ([_labelled(axes, v, launch.kernel) for axes, v in zip(reads, launch.reads, strict=False)],
            [_labelled(axes, v, launch.kernel) for axes, v in zip(writes, launch.writes, strict=False)])


def _labelled(axes: str, view: View, kernel: str) -> list[str]:
    if axes == "=":
        first = next((i for i, n in enumerate(view.shape) if n > 1), 0)
        return ["=" * (i == first) for i in range(view.ndim)]
    if axes.startswith("..."):
        lead = view.ndim - len(axes) + 3
        rest = replace(view, shape=view.shape[lead:])
        return [*(f".{lead - i}" for i in range(lead)), *_labelled(axes[3:], rest, kernel)]
    head, star, tail = axes.partition("*")
    if (free := view.ndim - len(head + tail)) and not (star and free > 0):
        raise ValueError(f"the axes {axes!r} of kernel {kernel} do not fit {view.shape}; give each axis one label")
    return [*(c * c.islower() for c in head), *[""] * free, *(c * c.islower() for c in tail)]


def _length(view: View, axes: Sequence[str], label: str) -> int:
    return view.shape[axes.index(label)] if label in axes else 0


def bounds(n: int, count: int) -> list[int]:
    """Where `count` parts of n elements begin and end."""
    tile = TILE if n >= TILE * count else 1
    return [*(int(n / tile * p / count + 0.5) * tile for p in range(count)), n]


def _part(launches: Sequence[Launch], axes_of_each: Sequence[tuple[Axes, Axes]], chosen: Sequence[str], count: int,
          p: int) -> Part:
    """Part p of a task whose launches are cut along these labels; one without a label belongs to part 0."""
    own, scratch, share = list[Launch](), list[StorageSpec](), 0.0

    def new(shape: Sequence[int], dtype: str) -> View:
        """A view on new memory."""
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        scratch.append(StorageSpec("work", tuple(shape), str(np.dtype(dtype)), nbytes, Role.WORKSPACE))
        return View.of(scratch[-1], -len(scratch))

    for launch, (reads, writes), label in zip(launches, axes_of_each, chosen, strict=True):
        if not label:
            own += [replace(launch, work=tuple(new(v.shape, v.dtype) for v in launch.work))] * (p == 0)
            continue
        assert launch.cuts is not None
        v, axis = next((v, axes.index(label)) for v, axes in zip(launch.writes, writes, strict=True) if label in axes)
        begin, end = bounds(n := v.shape[axis], count)[p : p + 2]
        share, first, last, constants = share or (end - begin) / n, begin, end, dict(launch.constants)
        if label == "r":
            assert launch.cuts.window is not None
            first, last, constants = launch.cuts.window(begin, end, launch.reads, **constants)

        def cut(views: Sequence[View], labels: Sequence[Sequence[str]], begin: int, end: int, label: str = label
                ) -> tuple[View, ...]:
            return tuple(v.part(axes.index(label), begin, end) if _length(v, axes, label) > 1 else v
                         for v, axes in zip(views, labels, strict=True))

        # what all parts would write, the first one does; the others leave it in memory that nobody reads
        elsewhere = {v: new(v.shape, v.dtype) for v, axes in zip(launch.writes, writes, strict=True)
                     if p and label not in axes}
        one = replace(launch, reads=tuple(elsewhere.get(v, v) for v in cut(launch.reads, reads, first, last)),
                      writes=tuple(elsewhere.get(v, v) for v in cut(launch.writes, writes, begin, end)),
                      constants=tuple(constants.items()))
        one = replace(one, work=tuple(new(*spec) for spec in launch.cuts.work(one.reads, one.writes, **constants)),
                      cuts=replace(launch.cuts, along=AXES.get(label, f"axis {axis}")))
        own.append(one.shifted(begin) if label == "s" else one)
    return Part(tuple(own), share, tuple(scratch))


def clash(parts: Sequence[Part]) -> bool:
    """Whether one part writes what another one touches."""
    touch, write = dict[View, set[int]](), dict[View, set[int]]()
    for p, part in enumerate(parts):
        for launch in part.launches:
            for v in launch.views:
                touch.setdefault(v, set()).add(p)
            for v in launch.writes:
                write.setdefault(v, set()).add(p)
    written, near = {v.storage for v in write if v.storage >= 0}, list[tuple[View, int]]()
    for v in sorted((v for v in touch if v.storage in written), key=lambda v: (v.storage, v.offset)):
        near = [(w, last) for w, last in [*near, (v, _last(v))] if w.storage == v.storage and last >= v.offset]
        if any(own and len(own | touch[other]) > 1 and overlap(v, w) for w, _ in near
               for own, other in ((write.get(v), w), (write.get(w), v))):
            return True
    return False


def _last(v: View) -> int:
    """The place of the last element."""
    return v.offset + sum((n - 1) * s for n, s in zip(v.shape, v.strides, strict=True))


def overlap(a: View, b: View) -> bool:
    """Whether two views may have an element in common; True if that is not clear."""
    if (a.storage != b.storage or a.storage < 0 or not a.size or not b.size
        or _last(a) < b.offset or _last(b) < a.offset):
        return False
    if a.strides != b.strides:
        return True
    low, high = (a, b) if a.offset < b.offset else (b, a)
    rest, beyond, found = high.offset - low.offset, np.inf, True
    for axis in sorted(range(a.ndim), key=lambda i: -a.strides[i]):  # the steps from one view's begin to the other's
        if stride := a.strides[axis]:
            steps, rest = divmod(rest, stride)
            if max(steps + high.shape[axis], low.shape[axis]) * stride > beyond:
                return True  # one view's next line may have the elements of the other's line
            beyond, found = stride, found and steps < low.shape[axis]
    return found


# -------------------------------------------------------------------------------------------------------------- buffers
@dataclass(frozen=True)
class Pieces:
    """A buffer that parts write. `views[i]`: what each cut of the buffer holds of piece i, which is what all of them
    have in common; `buffers[i]`: its buffer. `rest`: whether there is a task that writes it otherwise, so that the
    buffer itself stays for its other elements. `met`: by views, the pieces with elements of them."""

    views: tuple[Held, ...]
    buffers: list[int]
    rest: bool
    met: dict[tuple[View, ...], list[int]] = field(default_factory=dict)

    def near(self, views: tuple[View, ...]) -> tuple[list[int], bool]:
        """The pieces that may have elements of these views, and whether the views are a part of one of the cuts."""
        own = [i for i, held in enumerate(self.views) if views in held]
        if not own and views not in self.met:
            self.met[views] = [i for i, held in enumerate(self.views) if all(_meet(views, other) for other in held)]
        return own or self.met[views], bool(own)


def _meet(views: Sequence[View], others: Sequence[View]) -> bool:
    return any(overlap(v, w) for v in views for w in others)


def _pieces(graph: TaskGraph, found: Mapping[int, Sequence[Part]]) -> dict[int, Pieces]:
    """The buffers of the graph that parts write. A buffer has as many pieces as the task has parts that has the most;
    if others write it all along other axes, as results that are written over what they are made of, each piece is what
    a part of each has in common. No buffers of their own yet. A task that writes several buffers of one storage leaves
    these as they are."""
    place, cuts, made = graph.buffer_storage.tolist(), dict[int, dict[Held, None]](), dict[int, Pieces]()
    for t, parts in found.items():
        own = graph.writes[t].tolist()
        for b in own:
            cut = tuple(mine for part in parts if (mine := part.views(place[b], written=True)))
            if len(cut) > 1 and sum(place[o] == place[b] for o in own) == 1:
                cuts.setdefault(b, {})[cut] = None
    writers = graph.writes.transposed(len(place))
    for b, of in cuts.items():
        views, whole = list[Held]([()]), [cut for cut in of if sum(map(_bytes, cut)) == graph.buffer_bytes[b]]
        for cut in sorted(whole, key=len, reverse=True) or [max(of, key=len)]:
            finer = [(*held, own) for held in views for own in cut if all(_meet(own, other) for other in held)]
            views = finer if len(finer) <= max(MOST, len(cut)) else views
        known = {own for held in views for own in held}
        made[b] = Pieces(tuple(views), [], any(t not in found or not known.issuperset(
            mine for part in found[t] if (mine := part.views(place[b], True))) for t in writers[b].tolist()))
    return made


def _buffers(e: Edit, b: int, pieces: Pieces) -> list[int]:
    """The buffers of the pieces, made when they are first needed; of several cuts, with the product of their shares."""
    if not pieces.buffers:
        whole, weights = e.buffer_bytes[b], [prod(map(_bytes, held)) for held in pieces.views]
        all_of_it = whole if len(pieces.views[0]) > 1 else sum(weights)
        for i, weight in enumerate(weights):
            pieces.buffers.append(e.buffer(b, e.storage_of[b], f"{e.names[b]}/{i + 1}" if e.names else ""))
            e.buffer_bytes[pieces.buffers[-1]] = min(whole, weight * all_of_it // max(1, sum(weights)))
        e.buffer_bytes[b] = max(0, whole - sum(e.buffer_bytes[piece] for piece in pieces.buffers))
    return pieces.buffers


def _bytes(views: Sequence[View]) -> int:
    return sum(v.size * np.dtype(v.dtype).itemsize for v in dict.fromkeys(views))


def _all(e: Edit, buffers: set[int], pieces: Mapping[int, Pieces]) -> set[int]:
    """All pieces of the buffers that a whole task touches."""
    found = set[int]()
    for b in buffers:
        own = pieces.get(b)
        found.update([b] if own is None else [*_buffers(e, b, own), *[b] * own.rest])
    return found


def _touched(e: Edit, part: Part, parts: Sequence[Part], buffers: set[int], pieces: Mapping[int, Pieces],
             written: bool) -> Iterator[int]:
    """The buffers, or their pieces, that one of the parts touches."""
    for b in buffers:
        views = part.views(e.storage_of[b], written)
        if b not in pieces:
            if views or not any(other.views(e.storage_of[b], written) for other in parts):
                yield b
        elif views:
            own = pieces[b]
            near, mine = own.near(views)
            yield from (_buffers(e, b, own)[i] for i in near)
            if own.rest and not (mine and written):
                yield b


def _replace(e: Edit, t: int, parts: Sequence[Part], pieces: Mapping[int, Pieces]) -> None:
    """The parts in the place of task t."""
    scratch = {v.storage for launch in e.launches[t] for v in launch.work}
    reads, writes = e.reads[t], {b for b in e.writes[t] if e.storage_of[b] not in scratch}
    own, key, time, flops = unpack(e.keys[t]), e.keys[t], e.time[t], e.flops[t]
    for p, part in enumerate(parts):
        places = {-1 - i: e.place(spec) for i, spec in enumerate(part.scratch)}
        launches = tuple(launch.moved({s: storage for s, (storage, _) in places.items()}) for launch in part.launches)
        mine = {"reads": {*_touched(e, part, parts, reads, pieces, False)},
                "writes": {*_touched(e, part, parts, writes, pieces, True), *(b for _, b in places.values())},
                "launches": launches, "time": time * part.share, "flops": flops * part.share, "nbytes": part.bytes}
        if p:
            e.then(t, e.task(t, own.unit, Kind(own.kind), own.micro_batch, part=p + 1, late=own.late, stage=e.stage[t],
                             **mine))
        else:
            e.keys[t] = int(repack(key, part=1))
            e.reads[t], e.writes[t], e.launches[t] = mine["reads"], mine["writes"], launches
            e.time[t], e.flops[t], e.bytes[t] = mine["time"], mine["flops"], mine["nbytes"]


# ---------------------------------------------------------------------------------------------------------------- lanes
def side_by_side(draft: Draft) -> Draft:
    """The second parts of each rank's tasks on a lane `sub1`, the third ones on `sub2`, and so on. A legal order of one
    lane stays legal, since each lane keeps it. An order with several lanes of a rank that compute, or with sums on such
    a lane, stays as it is, and so does a step on one device: there the policy places all tasks. Stages in parts (of
    `layerpipe`) are no tasks in parts, and stay as well."""
    order = draft.order
    if draft.placement.parts is not None if draft.staged else draft.sums is None:
        return draft
    own, lane = unpack(order.keys), order.lane_of_each()
    computes = np.isin(own.kind, COMPUTE)
    other = np.where(computes, np.maximum(own.part, 1) - 1, 0)
    main = np.unique(lane[computes])
    if len({order.lanes[i].rank for i in main}) < len(main) or not other.any() or np.isin(lane[~computes], main).any():
        return draft
    lanes, keys = list(order.lanes), [order.keys[(lane == i) & (other == 0)] for i in range(len(order.lanes))]
    for i, part in product(main, range(1, int(other.max()) + 1)):
        lanes.append(replace(order.lanes[i], name=f"sub{part}"))
        keys.append(order.keys[(lane == i) & (other == part)])
    return replace(draft, schedule=Schedule.of_keys(lanes, keys, notes=order.notes))
