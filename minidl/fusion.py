"""Graph to graph: launches that one kernel can do together become one. For devices on which a launch costs more than work.

Each rule is a function on a `Draft` and can be left out, so that gains can be told apart. The graph that comes out has
fewer tasks, the same inputs, outputs, parameters and mathematics; its bits may differ from those of the graph that went
in, and are the same under every schedule of it. Knows kernels by name and what scratch memory a device needs for them,
and no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from .device import strides_of
from .fusion_casts import casts
from .fusion_se import squeeze_excite
from .graph import ROLES, Kind, Launch, Role, Rows, StorageSpec, TaskGraph, View
from .kernels import KERNELS
from .kernels.conv_cuda import way

#: activations that a batch norm can end with, and whether their gradient reads the output (else the input)
ACTIVATIONS = {"relu": True, "relu6": True, "hardswish": False}
UPDATES = ("sgd", "adam")


@dataclass
class Entry:
    """A task in the making: its row of the graph that went in, its launches, and the buffers it touches."""

    row: int
    launches: tuple[Launch, ...]
    reads: set[int]
    writes: set[int]
    flops: float
    unit: int

    @property
    def only(self) -> Launch | None:
        """Its launch, if it has one alone."""
        return self.launches[0] if len(self.launches) == 1 else None


class Draft:
    """The tasks of a graph, to be merged."""

    def __init__(self, graph: TaskGraph, device: Any) -> None:
        self.graph, self.device = graph, device
        self.scratch: list[StorageSpec] = []
        self.entries: list[Entry | None] = [
            Entry(t, graph.launches[t], set(graph.reads[t].tolist()), set(graph.writes[t].tolist()), float(graph.flops[t]), int(graph.unit[t]))
            for t in range(len(graph))]
        self.units = list(graph.unit_names)
        of_storage: dict[int, list[int]] = {}
        for buffer, storage in enumerate(graph.buffer_storage.tolist()):
            of_storage.setdefault(storage, []).append(buffer)
        self._buffer = {s: buffers[0] for s, buffers in of_storage.items() if len(buffers) == 1}
        self.kept = {self._buffer[v.storage] for v in graph.outputs if v.storage in self._buffer}
        self._readers: dict[int, list[int]] = {}
        self._writers: dict[int, list[int]] = {}
        for i, entry in enumerate(self.alive()):
            for table, buffers in ((self._readers, entry.reads), (self._writers, entry.writes)):
                for buffer in buffers:
                    table.setdefault(buffer, []).append(i)

    def alive(self) -> Iterator[Entry]:
        return (e for e in self.entries if e is not None)

    def numbered(self) -> Iterator[tuple[int, Entry]]:
        return ((i, e) for i, e in enumerate(self.entries) if e is not None)

    def __getitem__(self, task: int) -> Entry:
        entry = self.entries[task]
        assert entry is not None, "this task has been merged into another"
        return entry

    def kind(self, task: int) -> int:
        return int(self.graph.kind[self[task].row])

    def buffer(self, view: View) -> int | None:
        """The buffer of a whole storage; None for a region of a slab."""
        return self._buffer.get(view.storage)

    def readers(self, buffer: int) -> list[int]:
        return [i for i in self._readers.get(buffer, []) if (e := self.entries[i]) is not None and buffer in e.reads]

    def writers(self, buffer: int) -> list[int]:
        return [i for i in self._writers.get(buffer, []) if (e := self.entries[i]) is not None and buffer in e.writes]

    def passed_on(self, view: View) -> int | None:
        """The buffer of a view that one task makes, nobody asks for afterwards, and that has no other view."""
        buffer = self.buffer(view)
        return None if buffer is None or buffer in self.kept or len(self.writers(buffer)) != 1 else buffer

    def merge(self, into: int, gone: Sequence[int], launches: Sequence[Launch], dropped: Iterable[int], work: Iterable[int], *,
              as_task: int | None = None, reads: Iterable[int] = (), reads_not: Iterable[int] = ()) -> None:
        """Task `into` takes the place of `gone` too, with these launches and the scratch buffers `work`; it goes by the name
        of `as_task`. Buffers `dropped` exist no more; `reads` and `reads_not` are read besides, or no longer."""
        target = self[into]
        if as_task is not None:
            target.row, target.unit = self[as_task].row, self[as_task].unit
        for i in gone:
            entry = self[i]
            target.reads |= entry.reads
            target.writes |= entry.writes
            target.flops += entry.flops
            self.entries[i] = None
        target.reads = (target.reads | {*reads}) - {*dropped} - {*reads_not}
        target.writes = (target.writes | {*work}) - {*dropped}
        target.launches = tuple(launches)
        self._found(into)

    def change(self, task: int, launches: Sequence[Launch], *, reads: Iterable[int] = (), reads_not: Iterable[int] = (),
               writes: Iterable[int] = (), writes_not: Iterable[int] = ()) -> None:
        """The task has these launches, and so these buffers that it touches besides, or no longer."""
        entry = self[task]
        entry.launches = tuple(launches)
        entry.reads = (entry.reads | {*reads}) - {*reads_not}
        entry.writes = (entry.writes | {*writes}) - {*writes_not}
        self._found(task)

    def _found(self, task: int) -> None:
        """The task is known by the buffers that it touches."""
        for table, buffers in ((self._readers, self[task].reads), (self._writers, self[task].writes)):
            for buffer in buffers:
                if task not in table.setdefault(buffer, []):
                    table[buffer].append(task)

    def remove(self, task: int) -> None:
        """The task is needed no more."""
        self.entries[task] = None

    def launch(self, kernel: str, reads: Sequence[View], writes: Sequence[View], **constants: Any) -> tuple[Launch, list[int]]:
        """A launch with the scratch memory that it needs, and the buffers of that."""
        work = self.device.work(KERNELS[kernel])
        views, buffers = [], []
        for shape, dtype in work([_Shaped(v) for v in reads], [_Shaped(v) for v in writes], **constants) if work else ():
            kind = str(np.dtype(dtype))
            spec = StorageSpec(f"work {kernel}", tuple(shape), kind, prod(shape) * np.dtype(kind).itemsize, Role.WORKSPACE)
            buffers.append(len(self.graph.buffer_bytes) + len(self.scratch))
            views.append(View(len(self.graph.storages) + len(self.scratch), spec.shape, strides_of(spec.shape), 0, kind))
            self.scratch.append(spec)
        return Launch(kernel, tuple(reads), tuple(writes), tuple(views), tuple(constants.items())), buffers

    def buffers(self, *views: View) -> list[int]:
        """Those of whole storages."""
        return [b for b in map(self.buffer, views) if b is not None]

    def moves(self, task: int, to: int, besides: Sequence[int] = ()) -> bool:
        """Whether nothing between `task` and `to` minds that it runs at the place of `to`; `besides` those that move too."""
        entry = self[task]
        touched = entry.reads | entry.writes
        low, high = sorted((task, to))
        return all(other is None or i in besides or not (other.writes & touched or other.reads & entry.writes)
                   for i, other in enumerate(self.entries[low + 1 : high], low + 1))

    def _with_scratch(self) -> TaskGraph:
        g, new = self.graph, self.scratch
        if not new:
            return g
        first = len(g.storages)
        return replace(
            g, storages=g.storages + tuple(new), buffer_bytes=np.concatenate([g.buffer_bytes, [s.bytes for s in new]]).astype(g.buffer_bytes.dtype),
            buffer_role=np.concatenate([g.buffer_role, [ROLES.index(Role.WORKSPACE)] * len(new)]).astype(g.buffer_role.dtype),
            buffer_storage=np.concatenate([g.buffer_storage, np.arange(first, first + len(new))]).astype(g.buffer_storage.dtype),
            buffer_names=g.buffer_names + tuple(s.name for s in new) if g.buffer_names else ())

    def graph_of_it(self) -> TaskGraph:
        """The tasks that are left, in their order."""
        entries = list(self.alive())
        rows = np.array([e.row for e in entries], np.int64)
        g = self._with_scratch()
        nbytes = np.array([int(g.buffer_bytes[sorted(e.reads | e.writes)].sum()) for e in entries], g.bytes.dtype)
        return replace(g, unit=np.array([e.unit for e in entries], g.unit.dtype), kind=g.kind[rows], micro_batch=g.micro_batch[rows],
                       iteration=g.iteration[rows], flops=np.array([e.flops for e in entries], g.flops.dtype), bytes=nbytes,
                       reads=Rows.of([sorted(e.reads) for e in entries]), writes=Rows.of([sorted(e.writes) for e in entries]),
                       launches=tuple(e.launches for e in entries), unit_names=tuple(self.units))


class _Shaped:
    """A view as `work` of a kernel looks at it."""

    def __init__(self, view: View) -> None:
        self.shape, self.dtype, self.ndim, self.size = view.shape, view.dtype, len(view.shape), prod(view.shape)
        self.strides = view.strides


# --------------------------------------------------------------------------------------------------------------- rules
def updates(draft: Draft) -> None:
    """All updates of a kind in one launch for many parameters: one task, which waits for every weight gradient."""
    tasks = [i for i, e in draft.numbered() if any(launch.kernel in UPDATES for launch in e.launches)
             and all(launch.kernel in (*UPDATES, "mul") for launch in e.launches)]
    tasks = [i for i in tasks if i == tasks[-1] or draft.moves(i, tasks[-1])]
    if len(tasks) < 2:
        return
    launches = [launch for i in tasks for launch in draft[i].launches]
    alike: dict[Any, list[Launch]] = {}
    for launch in launches:
        if launch.kernel in UPDATES:
            alike.setdefault((launch.kernel, len(launch.writes), _shared(launch), launch.constants), []).append(launch)
    many = [draft.launch(*_many(same), **dict(same[0].constants), count=len(same)) for same in alike.values()]
    rest = [launch for launch in launches if launch.kernel not in UPDATES]
    draft.merge(tasks[-1], tasks[:-1], [*rest, *(launch for launch, _ in many)], [], [b for _, buffers in many for b in buffers])
    draft.units.append("updates")
    draft[tasks[-1]].unit = len(draft.units) - 1


def _shared(launch: Launch) -> tuple[View, ...]:
    """What all parameters read alike: of sgd (p, g, lr, v..., skip...) and adam (p, g, m, v, lr, powers, skip...)."""
    return tuple(v for v in launch.reads if v not in _own(launch))


def _own(launch: Launch) -> tuple[View, ...]:
    """The parameter, its gradient and its states, of which there are as many as are written beside it."""
    first, states = (3, len(launch.writes) - 1) if launch.kernel == "sgd" else (2, 2)
    return (*launch.reads[:2], *launch.reads[first : first + states])


def _many(launches: Sequence[Launch]) -> tuple[str, tuple[View, ...], tuple[View, ...]]:
    """Kernel, reads and writes of one launch on the operands of all, each parameter's own first."""
    return (f"{launches[0].kernel}_many", tuple(v for launch in launches for v in _own(launch)) + _shared(launches[0]),
            tuple(v for launch in launches for v in launch.writes))


def epilogue(draft: Draft) -> None:
    """The relu after a product is done by the product: after an affine layer, and after a 1x1 convolution with bias."""
    for i, entry in list(draft.numbered()):
        first = entry.only
        if first is None or not _is_product(first) or (made := draft.passed_on(first.writes[0])) is None:
            continue
        readers = draft.readers(made)
        second = draft[readers[0]].only if len(readers) == 1 else None
        if second is None or second.kernel != "relu" or second.reads[0] != first.writes[0] or not draft.moves(i, readers[0], readers):
            continue
        launch, work = draft.launch(first.kernel, first.reads, second.writes, **dict(first.constants), act="relu")
        draft.merge(readers[0], [i], [launch], [made], work, as_task=i)


def _is_product(launch: Launch) -> bool:
    if launch.kernel == "conv2d":
        geometry = dict(launch.constants)["geometry"]
        return launch.reads[1].shape[1:3] == (1, 1) and geometry.groups == 1 and geometry.stride == (1, 1) and geometry.padding == (0, 0)
    return launch.kernel == "linear"


def slabs(draft: Draft) -> None:
    """A convolution writes its output where it is joined to others, and its gradients read theirs from there: no copies.
    Only where convolutions take images with gaps between pixels."""
    if not draft.device.captures:
        return
    for i, entry in list(draft.numbered()):
        copy = entry.only
        if copy is None or copy.kernel != "copy" or copy.reads[0].dtype != copy.writes[0].dtype:
            continue
        if draft.kind(i) == Kind.F:
            _write_there(draft, i, copy)
        elif (made := draft.passed_on(copy.writes[0])) is not None and _pixels(copy.reads[0]):
            readers = draft.readers(made)
            if all(draft.moves(i, t, readers) and all(_takes(launch, copy.writes[0]) for launch in draft[t].launches) for t in readers):
                for t in readers:
                    launches = [replace(launch, reads=tuple(copy.reads[0] if v == copy.writes[0] else v for v in launch.reads))
                                for launch in draft[t].launches]
                    draft.merge(t, [], launches, [made], [], reads=entry.reads)
                draft.remove(i)


def _write_there(draft: Draft, i: int, copy: Launch) -> None:
    made = draft.passed_on(copy.reads[0])
    if made is None or draft.readers(made) != [i] or not _pixels(copy.writes[0]):
        return
    (source,) = draft.writers(made)
    first = draft[source].only
    if (first is not None and first.kernel == "conv2d" and len(first.reads) == 2 and first.writes[0] == copy.reads[0] and _has_gaps(first)
            and draft.moves(source, i, [i])):
        launch, work = draft.launch("conv2d", first.reads, copy.writes, **dict(first.constants))
        draft.merge(i, [source], [launch], [made], work, as_task=source)


def _takes(launch: Launch, view: View) -> bool:
    """Whether a launch reads the view, if at all, as the gradient of a convolution that it goes on from."""
    if view not in launch.reads:
        return True
    at = {"conv2d_input_grad": 0, "conv2d_weight_grad": 1}.get(launch.kernel)
    return at is not None and launch.reads[at] == view != launch.reads[1 - at] and _has_gaps(launch)


def _has_gaps(launch: Launch) -> bool:
    """Whether a convolution's output, or the gradient of that, may have gaps between its pixels."""
    constants = dict(launch.constants)
    x, w = {"conv2d": launch.reads[:2], "conv2d_input_grad": (launch.writes[0], launch.reads[1]),
            "conv2d_weight_grad": (launch.reads[0], launch.writes[0])}[launch.kernel]
    return way(x, w, constants["geometry"]) in ("pointwise", "library") and not constants.get("bias") and not constants.get("act")


def _pixels(view: View) -> bool:
    """Channels lie side by side, and pixels equally far apart."""
    steps = [(n, s) for n, s in zip(view.shape[:-1], view.strides[:-1], strict=True) if n > 1]
    return view.strides[-1] == 1 and all(a == b * n for (_, a), (n, b) in zip(steps, steps[1:], strict=False))


def batch_norm_act(draft: Draft) -> None:
    """Batch norm with the activation after it, and with the sum between the two where there is one; forward and backward."""
    for i, entry in list(draft.numbered()):
        if entry.only is not None and entry.only.kernel == "batch_norm":
            _end_batch_norm(draft, i)


def _end_batch_norm(draft: Draft, i: int) -> None:
    """Puts a batch norm together with what follows it, where all of it can be, forward and backward."""
    first = draft[i].launches[0]
    tail = _tail(draft, first.writes[0])
    if tail is None or not draft.moves(i, tail.forward[-1], tail.forward):
        return
    into, last = tail.forward[-1], draft[tail.forward[-1]].launches[0]
    constants = {**dict(first.constants), "act": tail.act}
    if tail.gradient is not None and not _end_gradient(draft, first, last.writes[0], tail) and not ACTIVATIONS[tail.act]:
        return  # its gradient needs what would not be there
    gone = [draft.passed_on(draft[t].launches[0].writes[0]) for t in (i, *tail.forward[:-1])]
    launch, work = draft.launch("batch_norm_act", [*first.reads, *tail.added], [last.writes[0], *first.writes[1:]], **constants)
    draft.merge(into, [i, *tail.forward[:-1]], [launch], [b for b in gone if b is not None], work, as_task=i)


def _end_gradient(draft: Draft, norm: Launch, y: View, tail: Tail) -> bool:
    """The backward half; False where something stands in its way."""
    assert tail.gradient is not None
    g = draft[tail.gradient].launches[0]
    seen, dy, ds = g.reads[0], g.reads[1], g.writes[0]
    passed = draft.passed_on(ds)
    if passed is None or len(draft[tail.gradient].launches) > 1:
        return False
    readers = draft.readers(passed)
    sums = [t for t in readers if _is(draft[t], "batch_norm_weight_grad", norm.writes[1], ds)]
    inputs = [t for t in readers if _is(draft[t], "batch_norm_input_grad", norm.writes[1], ds, others=True)]
    if len(sums) != 1 or len(inputs) > 1 or (not tail.added and len(readers) != len(sums) + len(inputs)):
        return False
    x, mean, rstd, w, b = norm.reads[0], *norm.writes[1:3], *norm.reads[1:3]
    given = draft[tail.gradient].reads - {draft.buffer(seen)}  # the buffers of dy
    old = draft[sums[0]].launches[0]
    if tail.added:
        launch, work = draft.launch("batch_norm_act_weight_grad", [x, mean, rstd, w, b, dy, y], [*old.writes, ds], act=tail.act)
        draft.merge(tail.gradient, sums, [launch], [], work, as_task=sums[0], reads=draft.buffers(w, b), reads_not=[passed])
        return True
    if any(not draft.moves(tail.gradient, t, (*sums, *inputs)) for t in inputs):
        return False
    for t in inputs:
        o, *others = draft[t].launches
        launch, work = draft.launch("batch_norm_act_input_grad", [x, mean, rstd, w, b, *o.reads[4:6], dy], o.writes, act=tail.act)
        draft.merge(t, [], [launch, *others], [passed], work, reads=[*given, *draft.buffers(w, b)])
    launch, work = draft.launch("batch_norm_act_weight_grad", [x, mean, rstd, w, b, dy], old.writes, act=tail.act)
    unread = [s for s in draft.buffers(seen) if s not in given]
    draft.merge(tail.gradient, sums, [launch], [passed], work, as_task=sums[0], reads=draft.buffers(w, b), reads_not=unread)
    return True


def _is(entry: Entry, kernel: str, mean: View, ds: View, others: bool = False) -> bool:
    """Whether a task begins with this gradient of the batch norm that made `mean`, and has no others, or none that read ds."""
    first, *rest = entry.launches
    return (first.kernel == kernel and first.reads[1] == mean and first.reads[-1] == ds
            and all(others and ds not in launch.reads for launch in rest))


@dataclass(frozen=True)
class Tail:
    """What follows a batch norm: the forward tasks up to the activation, what is added before it, the activation, and the
    task of its gradient, if there is one."""

    forward: list[int]
    added: list[View]
    act: str
    gradient: int | None


def _tail(draft: Draft, y: View) -> Tail | None:
    """None where nothing follows the output y that could be put together with it."""
    forward: list[int] = []
    added: list[View] = []
    while True:
        buffer = draft.passed_on(y)
        readers = [] if buffer is None else draft.readers(buffer)
        after = [t for t in readers if draft.kind(t) == Kind.F]
        launch = draft[after[0]].only if len(after) == 1 else None
        if launch is None or y not in launch.reads or (added and launch.kernel not in ACTIVATIONS):
            return Tail(forward, added, "none", None) if added else None
        forward.append(after[0])
        rest = [t for t in readers if t != after[0]]
        if launch.kernel == "add" and not added and not rest and launch.reads[0] != launch.reads[1]:
            (z,) = (v for v in launch.reads if v != y)
            if z.shape != y.shape or z.strides != strides_of(z.shape):
                return None
            added, y = [z], launch.writes[0]
            continue
        if launch.kernel not in ACTIVATIONS:
            return None
        if added and not ACTIVATIONS[launch.kernel]:
            return Tail(forward[:-1], added, "none", None)
        seen = launch.writes[0] if ACTIVATIONS[launch.kernel] else y
        of_seen = draft.buffer(seen)
        gradient = [] if of_seen is None else [t for t in draft.readers(of_seen) if any(
            g.kernel == f"{launch.kernel}_grad" and g.reads[0] == seen for g in draft[t].launches)]
        if len(gradient) > 1 or any(t not in gradient for t in rest):
            return None
        return Tail(forward, added, launch.kernel, gradient[0] if gradient else None)


RULES: dict[str, Callable[[Draft], None]] = {"casts": casts, "batch_norm_act": batch_norm_act, "squeeze_excite": squeeze_excite, "epilogue": epilogue,
                                             "slabs": slabs, "updates": updates}


def fused(graph: TaskGraph, device: Any, rules: Iterable[str] = tuple(RULES)) -> TaskGraph:
    """The graph with these rules applied, in their order, for a device.

    Raises ValueError for a rule that is not known, and for a graph without kernels.
    """
    if len(graph) and not graph.launches:
        raise ValueError(f"graph {graph.name_of_graph!r} has no kernels to put together")
    draft = Draft(graph, device)
    for name in rules:
        if name not in RULES:
            raise ValueError(f"unknown fusion {name!r}; known: {', '.join(RULES)}")
        RULES[name](draft)
    return draft.graph_of_it()
