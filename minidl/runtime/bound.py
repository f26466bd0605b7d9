"""A recorded graph bound to memory: arrays for its views, prebuilt calls for its tasks, copies of inputs and outputs.

The executors decide the order of the tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import numpy as np

from ..autograd import tape as tapes
from ..autograd.tape import Storage
from ..autograd.tensor import ShapeError, Tensor, unmasked
from ..core.columns import offsets
from ..core.graph import Launch, Role, StorageSpec, TaskGraph, View, check_kinds
from ..core.tasks import GraphError, strides_of
from ..devices.far import FAR
from ..devices.returned import Returned
from ..kernels import Thunk
from ..kernels.registry import any_outside, check_range, jitted
from ..plans.memory import MemoryPlan, rounded

#: kernels with an index: (which operand it is, what it counts: an axis of the first operand or a constant, its name)
INDEXED: dict[str, tuple[int, Any, str]] = {
    "cross_entropy": (1, -1, "label"), "embedding": (1, 0, "index"), "label_weights": (1, 0, "label"),
    "embedding_grad": (0, "rows", "index"), "embedding_largest": (0, "rows", "index")}


def _held(call: Thunk, memory: Any) -> None:
    """A call with the memory that it needs."""
    call()


def with_far(storages: Sequence[StorageSpec], device: Any, rank: int = 0) -> tuple[StorageSpec, ...]:
    """The storages with memory for those that are far. States of an optimizer move there, and stay."""
    found, size = list(storages), rounded(np.array([spec.bytes for spec in storages], np.int64))
    far = [i for i, spec in enumerate(storages) if spec.role == Role.FAR
           and (spec.live is None or not isinstance(spec.live.data, FAR))]
    memory: Any = device.far(int(size[far].sum()), rank) if far else b""
    for i, begin in zip(far, (np.cumsum(size[far]) - size[far]).tolist(), strict=True):
        spec, own = storages[i], memory[begin : begin + max(storages[i].bytes, 1)]
        if spec.live is None:
            found[i] = replace(spec, live=Storage(spec.name, spec.shape, spec.dtype, Role.FAR, own))
        else:
            device.move(spec.live.data, own)
            spec.live.data = own
            tapes.changes += 1
    return tuple(found)


class Bound:
    """A graph bound to memory. With a memory plan, storages lie in one arena; without one, each has its own memory.

    `private`: uses copies of parameters and states, so that a run changes nothing outside. `arena`: the memory to use,
    which graphs may share if they never run at the same time.
    """

    def __init__(self, graph: TaskGraph, plan: MemoryPlan | None, device: Any = None, *, private: bool = False,
                 arena: Any = None) -> None:
        check_kinds(graph=(graph, TaskGraph))
        if len(graph) and not graph.launches:
            raise GraphError(f"graph {graph.name_of_graph!r} has no kernels; only graphs of minidl.record can run")
        self.graph, self.plan = graph, plan
        self.device = tapes.device_of(device)
        self._live = {i: s.live for i, s in enumerate(graph.storages) if s.live is not None}
        if plan is not None:
            self.arena = arena if arena is not None else self.device.arena(max(plan.arena_bytes, 1))
        else:
            own = [0 if i in self._live else int(rounded(np.array([s.bytes]))[0]) for i, s in enumerate(graph.storages)]
            self._own = offsets(own)
            self.arena = self.device.arena(max(int(self._own[-1]), 1))
        self._bound_to = {i: self.device.duplicate(s.data) if private else s.data for i, s in self._live.items()}
        self.persistent = list(self._bound_to.values())  #: the memory of parameters and states
        self._private, self._seen = private, -1
        self._apart = self._inputs_apart()
        self._inputs = [self.array(v) for v in graph.inputs]
        self._takes = [(a.shape, a.dtype) for a in self._inputs]
        self._outputs = [self.array(v) for v in graph.outputs]
        self.feed = self.device.feed(self._inputs, self._outputs, self._block)
        self._named = [(graph.storages[v.storage].name, v.shape, v.dtype, strides_of(v.shape)) for v in graph.outputs]
        self._indices = self._index_limits()
        self._outside: Any = jitted(any_outside) if self._indices else None

    def _inputs_apart(self) -> dict[int, int]:
        """Where the storages of inputs begin in a block of their own, if the device wants one."""
        found = [v.storage for v in self.graph.inputs if v.storage not in self._live]
        starts = offsets(rounded(np.array([self.graph.storages[i].bytes for i in found], np.int64)))
        whole = len({*found}) == len([v for v in self.graph.inputs if v.dense]) == len(self.graph.inputs)
        self._block = self.device.block(int(starts[-1])) if found and whole else None
        return {} if self._block is None else dict(zip(found, starts.tolist()[:-1], strict=True))

    def load_random(self, random: np.random.Generator) -> tuple[Any, ...]:
        """Fills the inputs with values that a step can use (normal numbers, labels in range; zeros in place of numbers
        from which it may compute an index), and returns them."""
        classes = {i: least for i, least, *_ in reversed(self._indices)}
        values = tuple(random.integers(0, classes.get(i, 2), a.shape) if a.dtype.kind == "i"
                       else (random.standard_normal(a.shape) * (not self._computes)).astype(a.dtype)
                       for i, a in enumerate(self._inputs))
        self.load(values)
        return values

    def refills(self) -> list[Thunk]:
        """Calls that bring today's inputs back to their places, for the same step again: a step uses the memory of its
        inputs for other things after their last use. For devices that capture graphs."""
        return [partial(_held, self.device.copier(self.device._whole(memory, place), place), memory)
                for memory, place in ((self.device.snapshot(place), place) for place in self._inputs)]

    def place(self, storage: int) -> tuple[Any, int]:
        """The memory that holds a storage, and the byte at which the storage begins in it."""
        if storage in self._live:
            return self._bound_to[storage], 0
        if storage in self._apart:
            return self._block, self._apart[storage]
        return self.arena, int(self.plan.offset[storage] if self.plan is not None else self._own[storage])

    def array(self, view: View) -> Any:
        memory, base = self.place(view.storage)
        return self.device.array(memory, view, base)

    def flat(self, storage: int) -> Any:
        """All elements of a storage in a row."""
        spec = self.graph.storages[storage]
        return self.array(View(storage, (spec.bytes // np.dtype(spec.dtype).itemsize,), (1,), 0, spec.dtype))

    def thunks(self, task: int, stream: Any = None) -> list[Thunk]:
        """The prebuilt calls of one task, on a stream of the device."""
        return [thunk for launch in self.graph.launches[task] for thunk in self.device.bind(launch, self.array, stream)]

    def thunks_elsewhere(self, task: int) -> list[Thunk]:
        """The same calls on copies of the storages that they use. The calls keep the copies alive."""
        launches = self.graph.launches[task]
        copies: dict[int, Any] = {}
        for storage in {view.storage for launch in launches for view in launch.views}:
            nbytes = max(self.graph.storages[storage].bytes, 1)
            copies[storage] = self.device.snapshot(self.array(View(storage, (nbytes,), (1,), 0, "uint8")))
        found = [thunk for launch in launches
                 for thunk in self.device.bind(launch, lambda view: self.device.array(copies[view.storage], view))]
        return [partial(_held, thunk, copies) for thunk in found]

    def _index_limits(self) -> list[tuple[int, int, str, int]]:
        """(input, length, "label" or "index", a label that is also allowed) for every input that kernels use as an
        index (labels, tokens), for a check of its range. Sets `_computes`: whether there are other indices."""
        origin = {v.storage: i for i, v in enumerate(self.graph.inputs)}  # also of copies of an input
        found, self._computes = set(), False
        for launch in (launch for task in self.graph.launches for launch in task):
            if (launch.kernel in ("copy", "cast") and launch.reads[0].storage in origin
                and np.dtype(launch.reads[0].dtype).kind in "iu"):
                origin[launch.writes[0].storage] = origin[launch.reads[0].storage]
            elif launch.kernel in INDEXED:
                at, counted, what = INDEXED[launch.kernel]
                constants = dict(launch.constants)
                length = constants[counted] if isinstance(counted, str) else launch.reads[0].shape[counted]
                if (storage := launch.reads[at].storage) in origin:
                    found.add((origin[storage], length, what, constants.get("ignore", 0)))
                self._computes |= storage not in origin and storage not in self._live
        return sorted(found)

    def load(self, values: tuple[Any, ...], settles: bool = True) -> None:
        """Copies a step's inputs to their buffers, if they pass `checked`."""
        self.feed(self.checked(values, settles))

    def checked(self, values: tuple[Any, ...], settles: bool = True) -> list[Any]:
        """A step's inputs as NumPy arrays. Raises ShapeError or ValueError for wrong ones, and RuntimeError if a
        parameter or state has moved to other memory since this was made, or if something that the step has read
        changed since it was recorded.

        `settles`: executors with late tasks run them first.
        """
        if settles and tapes.unsettled:
            tapes.settle()
        if self._seen != tapes.changes:
            self._check_unchanged()
        if len(values) != len(self._inputs):
            raise ShapeError(f"the step takes {len(self._inputs)} inputs, not {len(values)}")
        arrays = []
        for i, value in enumerate(values):  # a comprehension would be one more call, as small steps notice
            if type(value) is not np.ndarray and (np.ma.isMA(value) or not isinstance(value, np.ndarray)):
                value = value.numpy() if isinstance(value, Tensor) else unmasked(value)
            wanted, kind = self._takes[i]
            if value.shape != wanted or value.dtype != kind:
                raise ShapeError(f"input {i} is {value.dtype} {value.shape}; the step was recorded with {kind} "
                                 f"{wanted}")
            arrays.append(value)
        for i, length, what, ignored in self._indices:
            if self._outside(arrays[i], length):
                check_range(what, arrays[i], length, ignored)
        return arrays

    def ring(self, count: int) -> Any:
        """The device's room for the inputs and outputs of so many steps. Raises ValueError for an output with gaps."""
        for view, (name, *_) in zip(self.graph.outputs, self._named, strict=True):
            if not view.dense:
                raise ValueError(f"{name} is a part of a larger array, so that several steps cannot return it from one "
                                 f"launch; return a copy, or run single steps")
        return self.device.ring(self._inputs, self._outputs, count)

    def _check_unchanged(self) -> None:
        now = tapes.changes
        if self.graph.made_of is not None and not self._private:
            self.graph.made_of.check()
        for i, live in self._live.items():
            if not self._private and live.data is not self._bound_to[i]:
                raise RuntimeError(f"{live.name} has moved to far memory since this executor was made; make it after "
                                   f"the one that offloads")
        self._seen = now

    def results(self) -> Any:
        """Copies of the outputs: a tensor, a tuple of tensors, or None."""
        out: list[Tensor] = []
        slot = self.feed.slot if self.device.captures else None
        for i, (name, shape, dtype, strides) in enumerate(self._named):
            if slot is None:
                storage = Storage(name, shape, dtype, Role.ACTIVATION, self.device.snapshot(self._outputs[i]))
            else:
                value = Returned(slot.outputs[i], slot.wait)
                slot.given.append(ref(value))
                storage = Storage(name, shape, dtype, Role.ACTIVATION, initial=(self.device, value))
            out.append(Tensor(storage, shape, strides))
        return out[0] if len(out) == 1 else tuple(out) or None

    def check_finite(self, task: int, launch: Launch) -> None:
        """Raises FloatingPointError that names the task if what this launch of it has just written is not finite."""
        for view in launch.writes:
            array = self.device.read(self.array(view))
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise FloatingPointError(f"task {self.graph[task].label}: {launch.kernel} wrote a value that is not "
                                         f"finite to {self.graph.storages[view.storage].name}")
