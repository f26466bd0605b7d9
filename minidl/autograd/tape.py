"""Where tasks go when ops emit them: run at once (eager), or kept as a graph (record).

An op never knows which. The tape hands out storages and unit numbers and knows the micro-batch; it does not know
what a gradient is.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.graph import GraphBuilder, Launch, Role, StorageSpec, TaskGraph, View
from ..core.machine import is_whole, shorten
from ..core.tasks import Kind
from ..devices import device as devices
from ..devices.returned import Returned
from ..kernels import KERNELS
from .initial import Elsewhere, Initial

if TYPE_CHECKING:
    from .tensor import Tensor


@functools.cache
def itemsize(dtype: str) -> int:
    """The bytes of one element."""
    return np.dtype(dtype).itemsize


_allocating = threading.RLock()  #: two threads may ask for the same data


class Storage:
    """One piece of memory. `data`: the device's bytes. `recorded`: the recording that it is of, if it has none. `slab`:
    its regions, if it is written region by region. `changed`: the number of the last use of an op before an update or
    `assign` changed the values. `initial`: the device and the initial values of a storage whose data nobody has asked
    for; it has no memory yet. They are drawn then, or read from a file, or a step has brought them to the host."""

    __slots__ = ("changed", "data", "dtype", "initial", "name", "recorded", "role", "shape", "slab")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str, role: Role, data: Any = None,
                 initial: tuple[Any, Initial | Elsewhere | Returned] | None = None) -> None:
        self.name, self.shape, self.dtype, self.role, self.initial = name, shape, dtype, role, initial
        self.recorded: Any = initial is None and data is None
        if data is not None:
            self.data = data
        self.slab: Slab | None = None
        self.changed = 0

    def __getattr__(self, name: str) -> Any:
        """Called for `data` before there is any."""
        if name != "data":
            raise AttributeError(f"a Storage has no {name!r}")
        with _allocating:
            if self.initial is not None:
                self.allocate(*self.initial)
        if self.recorded:
            raise self.no_value()
        return self.data

    def no_value(self) -> RuntimeError:
        return RuntimeError(f"{self.name} has no value while a step is recorded, to read (item(), numpy(), `if`) or to "
                            f"set, nor in another step: return it from the step instead, choose with where(mask, a, b)"
                            f", or do this between the runs of the step")

    def allocate(self, device: Any, values: Initial | Elsewhere | Returned | None = None) -> None:
        """Gives the storage memory, filled with these values; without them, not filled."""
        lasts = self.role == Role.PARAMETER or isinstance(values, Initial)  # states of optimizers have initial values
        memory = (device.lasting if lasts else device.allocate)(max(self.bytes, 1))
        if values is not None and self.bytes:
            device.write(device.array(memory, View.of(self)), np.asarray(values))
        # last: other threads, or a second try after an error, must not find memory without its values
        self.data, self.initial, self.recorded = memory, None, False

    def overwritten(self) -> None:
        """Called before all values are written: the initial ones need not be drawn."""
        with _allocating:
            if self.initial is not None:
                self.allocate(self.initial[0])

    def values(self, device: Any) -> Any:
        """All values in memory order, (n,), without memory of its own for initial ones."""
        if self.initial is not None:
            return np.asarray(self.initial[1]).reshape(-1)
        return device.array(self.data, View(0, (math.prod(self.shape),), (1,), 0, self.dtype))

    def given_up(self) -> None:
        """Frees the memory: the values are elsewhere, until they are `overwritten`."""
        with _allocating:
            device = devices.of(self.data) if self.initial is None else self.initial[0]
            if self.initial is None:
                del self.data
            self.initial = device, Elsewhere(self.name)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def storage(self) -> Storage:
        """A storage is also a part: the whole."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Storage:
        """A storage with memory of its own, if there is memory."""
        initial = self.initial
        data = None if initial or self.recorded else devices.of(self.data).duplicate(self.data)
        memo[id(self)] = found = Storage(self.name, self.shape, self.dtype, self.role, data, initial)
        found.slab, found.changed = deepcopy(self.slab, memo), self.changed
        return found


@dataclass(frozen=True, eq=False)
class Region:
    """A region of a storage that no other part of it overlaps."""

    storage: Storage
    bytes: int
    name: str


StoragePart = Storage | Region  #: the unit of dependencies


@dataclass
class Slab:
    """Regions along one axis, written one after the other from the start: (begin, end, part) each."""

    axis: int
    regions: list[tuple[int, int, StoragePart]] = field(default_factory=list)

    @property
    def filled(self) -> int:
        return self.regions[-1][1] if self.regions else 0

    def parts(self, begin: int, end: int) -> tuple[StoragePart, ...]:
        """The parts that lie at least partly in begin..end."""
        return tuple(part for first, last, part in self.regions if first < end and last > begin)


@dataclass
class Call:
    """A kernel call on tensors, before it goes to the tape."""

    kernel: str
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    constants: dict[str, Any]


@dataclass
class _Place:
    """The place of the next task: micro-batch and its group, unit, number of the next dropout, of the first sample."""

    micro_batch: int = 0
    unit: int = 0
    units: int = 0
    draws: int = 0
    sample: int = 0
    labels: list[str] = field(default_factory=list)
    calls: list[Call] | None = None
    group: int = 0
    inner: bool = False  #: within a micro-batch


@dataclass
class _Round:
    """The micro-batches of one batch, each at most once. All count units and dropouts from the same numbers on; but one
    that follows another counts dropouts from `drawn` on, the other's end."""

    units: int
    draws: int
    numbers: set[int] = field(default_factory=set)
    drawn: int = 0


class Tape:
    """The eager tape: a task runs when it is emitted."""

    recording = False

    def __init__(self, device: Any = None) -> None:
        if device is not None:
            self.device = device
        self.place = _Place()
        self.draws = 0  #: dropouts so far; the same dropout in several micro-batches counts once
        self.batch: _Round | None = None  #: whose micro-batches are emitted
        self.gradients = True
        self.autocast: str | None = None  #: the 16-bit type in which products are computed, see `op.autocast`
        self.dither: Any = None  #: rounds the gradients that O and W read, see `ops.dither`
        self.rounded: dict[Tensor, Tensor] = {}  #: parameter -> its copy rounded to that type
        self.random: Any = None  #: a `random.State` of its own; None: the thread's

    @functools.cached_property
    def device(self) -> Any:
        return devices.cpu()

    # -------------------------------------------------------------------------------------------------------- places
    def new_unit(self, label: str = "") -> int:
        """The number of a new unit, one use of one layer."""
        name = "/".join([*self.place.labels, label] if label else self.place.labels)
        while not self.name_unit(self.place.units, name):
            self.place.units += 1
        self.place.unit = self.place.units
        self.place.units += 1
        if self.batch and not self.place.inner:
            self.batch.numbers.add(self.place.micro_batch)
        return self.place.unit

    def name_unit(self, unit: int, name: str) -> bool:
        """Whether the unit can have this name; eager tasks need no names."""
        return True

    def draw(self, counter: Tensor) -> tuple[Tensor, int]:
        """The number of the next dropout, as a buffer (1,) uint64 and what to add to it modulo 2^64; for its task.

        An eager dropout keeps a copy of its number, since others increase the counter before its gradient is computed.
        """
        kept = type(counter)(self.storage("draw", (1,), "uint64", Role.ACTIVATION))
        behind = self.draws - self._next_draw()  # other micro-batches of the batch have counted on by this many
        self.call("tick", [counter], [kept], draws=-behind % 2**64)
        if not behind:
            self.call("tick", [counter], [counter], draws=1)
        return kept, 0

    def _next_draw(self) -> int:
        """The number of the next dropout of this tape."""
        number = self.place.draws
        self.place.draws += 1
        self.draws = max(self.draws, self.place.draws)
        return number

    def end_step(self) -> None:
        """Counts units from 0 again. After an update within a micro-batch, the other micro-batches of the batch still
        start from the same numbers."""
        self.place.unit = self.place.units = 0
        if not self.place.inner:
            self.batch = None

    def remember(self, parameter: Tensor, dropped: bool = False) -> None:
        """Called before a parameter's gradient changes, or is dropped."""

    def spend(self, parameter: Tensor) -> None:
        """Called when an update has used a parameter's gradient: the next backward starts a new one."""
        parameter.used = True
        parameter.mark_changed()

    # --------------------------------------------------------------------------------------------------------- tasks
    def _work(self, call: Call) -> Sequence[tuple[tuple[int, ...], Any]]:
        """Scratch arrays of a call on this tape's device, as (shape, type)."""
        work = self.device.work(KERNELS[call.kernel])
        return work(call.reads, call.writes, **call.constants) if work else ()

    def storage(self, name: str, shape: tuple[int, ...], dtype: str, role: Role) -> Storage:
        storage = Storage(name, shape, dtype, role)
        storage.allocate(self.device)
        return storage

    @contextmanager
    def task(self, unit: int, kind: Kind, micro_batch: int | None = None) -> Iterator[None]:
        """A context that makes one task of all kernel calls inside; without a call, no task. `micro_batch`: another one
        than this place's, since the backward pass of slices goes back through several."""
        place = self.place
        if place.calls is not None:
            raise RuntimeError("an op is used in the forward or gradient of another; call kernels there: self.call")
        before, place.calls = place.micro_batch, []
        place.micro_batch = before if micro_batch is None else micro_batch
        try:
            yield
            calls, place.calls = place.calls, None
            if calls:
                self.emit(unit, kind, calls)
        finally:
            place.micro_batch, place.calls = before, None

    def call(self, kernel: str, reads: Sequence[Tensor], writes: Sequence[Tensor], **constants: Any) -> Tensor:
        """One kernel call of the task that is open. Returns the first tensor that it writes."""
        if self.place.calls is None:
            raise RuntimeError(f"kernel {kernel} is called outside a task: call the op itself, not its forward")
        self.place.calls.append(Call(kernel, reads, writes, constants))
        return writes[0]

    def emit(self, unit: int, kind: Kind, calls: list[Call]) -> None:
        if unsettled:
            settle()
        for call in calls:
            work = [self.storage("work", tuple(shape), str(np.dtype(dtype)), Role.WORKSPACE)
                    for shape, dtype in self._work(call)]
            storages = [*dict.fromkeys(t.storage for t in (*call.reads, *call.writes)), *work]
            number, memory = {s: i for i, s in enumerate(storages)}, [s.data for s in storages]
            launch = Launch(call.kernel, tuple(t.view_of(number[t.storage]) for t in call.reads),
                            tuple(t.view_of(number[t.storage]) for t in call.writes),
                            tuple(View.of(s, number[s]) for s in work), tuple(call.constants.items()))
            with np.errstate(all="ignore"):
                for thunk in self.device.bind(launch, lambda v, memory=memory: self.device.array(memory[v.storage], v)):
                    thunk()


class _Once(dict[Any, Any]):
    """A table whose entries are made when they are first asked for."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __missing__(self, thing: Any) -> Any:
        found = self[thing] = self._make(thing)
        return found


class Recorder(Tape):
    """Keeps tasks as a graph, which refers to storages made before the recording, and works on them when it runs."""

    recording = True

    def __init__(self, device: Any = None) -> None:
        super().__init__(device)
        self._builder = GraphBuilder()
        self._own = object()  #: what its storages say that they are of
        self.number = _Once(self._add_storage)  #: storage -> its number in the graph
        self._buffer = _Once(self._add_buffer)  # part of a storage -> its number
        self._access = _Once(lambda t: (t.view_of(self.number[t.storage]), [self._buffer[p] for p in t.parts], t.bytes))
        self._times: Counter[tuple[int, Kind, int]] = Counter()  # (unit, kind, micro-batch) -> tasks so far
        # (unit, micro-batch, how often before) -> the unit of such a repeated task
        self._again: dict[tuple[int, int, int], int] = {}
        #: of each parameter what there was of its gradient: uses, total, used, grad_unit, and when it changed
        self._before: dict[int, tuple[Tensor, dict[tuple[int, int], Tensor], Tensor | None, bool, int | None, int]] = {}
        self._dropped: set[int] = set()  #: parameters whose gradients the step drops before it computes them
        self._spent: list[Tensor] = []
        #: (id, attribute) of what the step reads: the object and its place; and of what it sets: the object, and
        #: whether the step had read it
        self.read: dict[tuple[int, str], tuple[Any, str]] = {}
        self.set_by_step: dict[tuple[int, str], tuple[Any, bool]] = {}

    def remember(self, parameter: Tensor, dropped: bool = False) -> None:
        if id(parameter) not in self._before:
            self._dropped |= {id(parameter)} if dropped else set()
            self._before[id(parameter)] = (parameter, parameter.uses, parameter.total, parameter.used,
                                           parameter.grad_unit, parameter.storage.changed)
            parameter.grad = None

    def spend(self, parameter: Tensor) -> None:
        super().spend(parameter)
        self._spent.append(parameter)

    def check_spent(self) -> None:
        """Raises RuntimeError if the step leaves a gradient for its next call: a recorded step begins without any."""
        for p in self._spent:
            if p.uses and not p.used and id(p) not in self._dropped:
                raise RuntimeError(f"the step ends with a gradient of {p.storage.name} {p.shape} that was computed "
                                   f"after its update. The next eager step would add to it, but a recorded step begins "
                                   f"without gradients. Update after the last backward, or drop the gradient: "
                                   f"parameter.grad = None, or zero_grad() before the first backward")

    def leaves(self) -> list[Tensor]:
        """The tensors that were made before the recording."""
        return [t for t in self._access if t.node is None and not t.storage.recorded]

    def restore(self) -> None:
        """Undoes the recording's changes to the attributes of parameters."""
        for parameter, uses, total, used, unit, changed in self._before.values():
            parameter.uses, parameter.total, parameter.used, parameter.grad_unit = uses, total, used, unit
            parameter.storage.changed = changed

    def name_unit(self, unit: int, name: str) -> bool:
        """Names the unit; or says that another micro-batch has used its number for another layer or update."""
        return self._builder.unit_names.setdefault(unit, name) == name

    def draw(self, counter: Tensor) -> tuple[Tensor, int]:
        """As in `Tape`; a recorded step increases the counter only at its end, so no copy is needed."""
        return counter, self._next_draw()

    def end_step(self) -> None:
        """Lets units count on, so that the tasks before and after an update have different names. Within a micro-batch
        its number already tells them apart."""
        if not self.place.inner:
            self.batch = None

    def storage(self, name: str, shape: tuple[int, ...], dtype: str, role: Role) -> Storage:
        if role == Role.ACTIVATION:  # so that messages can tell two layers' outputs apart
            name = f"{self.place.unit}.{name}" + (f"[{self.place.micro_batch}]" if self.place.micro_batch else "")
        found = Storage(name, shape, dtype, role)
        found.recorded = self._own
        return found

    def _add_storage(self, storage: Storage) -> int:
        """Adds a storage to the graph, which keeps one that has data alive."""
        if storage.recorded and storage.recorded is not self._own:
            raise storage.no_value()
        live = None if storage.recorded else storage
        # what was made before the recording is a constant of the graph
        role = Role.STATE if live is not None and not storage.role.persistent else storage.role
        if role == Role.PARAMETER:
            storage.name = ".".join([*filter(None, ["/".join(self.place.labels)]), storage.name.rpartition(".")[2]])
        return self._builder.storage(StorageSpec(storage.name, storage.shape, storage.dtype, storage.bytes, role, live))

    def _add_buffer(self, part: StoragePart) -> int:
        storage = self.number[part.storage]
        return self._builder.buffer(part.name, part.bytes, self._builder._storages[storage].role, storage)

    def _unit(self, unit: int, kind: Kind) -> int:
        """The unit of the next task: the layer's unit the first time, then a new unit of the same name. So a second
        backward pass over a layer, or a second optimizer's update of it, has tasks of its own."""
        task = unit, kind, self.place.micro_batch
        time, self._times[task] = self._times[task], self._times[task] + 1
        if not time:
            return unit
        key = unit, self.place.micro_batch, time
        if key not in self._again:
            self._again[key] = self.place.units
            self.place.units += 1
            self.name_unit(self._again[key], f"{self._builder.unit_names[unit]} ({time + 1})")
        return self._again[key]

    def emit(self, unit: int, kind: Kind, calls: list[Call]) -> None:
        unit = self._unit(unit, kind)
        reads: list[int] = []
        launches, flops, nbytes = [], 0.0, 0
        access, device = self._access, self.device
        made: set[int] = set()  # written by an earlier launch of this task, so reading them is no dependency
        for call in calls:
            work = [self.storage(f"work{unit}", tuple(shape), str(np.dtype(dtype)), Role.WORKSPACE)
                    for shape, dtype in self._work(call)]
            read, written = [access[t] for t in call.reads], [access[t] for t in call.writes]
            kernel = KERNELS[call.kernel]
            launches.append(Launch(
                call.kernel, tuple([view for view, *_ in read]), tuple([view for view, *_ in written]),
                tuple([View.of(s, self.number[s]) for s in work]), tuple(call.constants.items()),
                device.cuts(kernel, call.reads, call.constants),
                kernel.company(call.reads, call.writes, call.constants)))
            for _, buffers, size in read:
                nbytes += size
                reads += [b for b in buffers if b not in made]
            for _, buffers, size in written:
                nbytes += size
                made.update(buffers)
            made.update([self._buffer[s] for s in work])
            if kernel.flops:
                flops += float(kernel.flops(call.reads, call.writes))
        self._builder.task(unit, kind, self.place.micro_batch, reads=reads, writes=made, launches=tuple(launches),
                           flops=flops, nbytes=nbytes)

    def build(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], name: str) -> TaskGraph:
        given, made = (tuple([self._access[t][0] for t in tensors]) for tensors in (inputs, outputs))
        graph = self._builder.build(given, made, name)
        left = [*self._access]  # without circles, all that the recording made goes at once, not by a collector
        while left:
            t = left.pop()
            if t.node is not None and t.storage.recorded:
                left += t.node.inputs
                t.node, t.requires_grad = None, False
        del self.number, self._buffer, self._access
        return graph


# --------------------------------------------------------------------------------------------------- unsettled steps
unsettled: set[Any] = set()  #: executors that have not run the late tasks of their last step
#: how often something has changed that recorded steps may depend on: an attribute one has read, memory that lasts
changes = 0


def changed(thing: Any, name: str) -> None:
    """Notes that this attribute of the object was set. A recorded step does not depend on those that it sets itself."""
    global changes
    changes += 1
    tape = current()
    if isinstance(tape, Recorder):
        key = id(thing), name
        tape.set_by_step.setdefault(key, (thing, key in tape.read))


def settle() -> None:
    """Makes every executor run its late tasks, so that memory holds what synchronous training would have left."""
    for executor in list(unsettled):
        executor.settle()


# -------------------------------------------------------------------------------------------------- the tape in force
class _Current(threading.local):
    def __init__(self) -> None:
        self.tape = Tape()


_current = _Current()


def current() -> Tape:
    """This thread's tape."""
    return _current.tape


def device_of(given: Any) -> Any:
    """The device that is given, by its name or itself; if None, this thread's."""
    return current().device if given is None else devices.get(given)


def set_default_device(device: Any) -> None:
    """Sets the device on which this thread makes tensors and runs steps: a name (`cpu`, `cuda`, `cuda:1`) or a device.
    Existing tensors stay where they are."""
    settle()
    _current.tape = Tape(device_of(device))


@contextmanager
def use(tape: Tape) -> Iterator[Tape]:
    """Makes `tape` this thread's tape inside the `with` block."""
    before, _current.tape = _current.tape, tape
    try:
        yield tape
    finally:
        _current.tape = before


@contextmanager
def micro_batch(number: int, first_sample: int = 0, group: int = 0, follows: bool = False) -> Iterator[None]:
    """Makes tasks emitted inside part of this micro-batch: `4W0` becomes `4W1`. Gradients add up until the next update.

    `first_sample`: the position of its first sample in the whole batch, so that dropout equals the whole batch's.
    `group`: gradients add up within their group first, then the groups in the order of their numbers. `follows`:
    whether it has the same samples as the micro-batch before, as the next slice of their sequences: then it has other
    dropouts. A backward pass through several micro-batches has tasks in each of them.
    Raises ValueError within another micro-batch, and for numbers that are not whole.
    """
    tape = current()
    if not is_whole(number, 0):
        raise ValueError(f"the micro-batch is {shorten(number)}; it must be a whole number of at least 0")
    if tape.place.inner:
        raise ValueError("a micro-batch cannot begin within another micro-batch")
    if tape.batch is None or number in tape.batch.numbers:
        tape.batch = _Round(tape.place.units, tape.place.draws)
    batch, before = tape.batch, tape.place
    batch.numbers.add(number)
    tape.place = _Place(number, units=batch.units, draws=batch.drawn if follows else batch.draws,
                        sample=before.sample + first_sample, group=group, labels=before.labels, inner=True)
    try:
        yield
    finally:
        batch.drawn = tape.place.draws
        before.units = max(before.units, tape.place.units)
        before.draws = max(before.draws, tape.place.draws)
        tape.place = before


@contextmanager
def setting(**values: Any) -> Iterator[Tape]:
    """Sets attributes of this thread's tape inside the `with` block."""
    tape = current()
    before = {name: getattr(tape, name) for name in values}
    vars(tape).update(values)
    try:
        yield tape
    finally:
        vars(tape).update(before)


@contextmanager
def no_grad() -> Iterator[None]:
    """Ops inside keep nothing for the backward pass."""
    with setting(gradients=False):
        yield


@contextmanager
def label(name: str) -> Iterator[None]:
    """Puts this name in front of the names of units emitted inside."""
    labels = current().place.labels
    labels.append(name)
    try:
        yield
    finally:
        labels.pop()
