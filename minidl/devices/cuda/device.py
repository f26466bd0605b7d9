"""The CUDA device: one GPU, as `minidl.devices.device.CPU` is the CPU.

Everything outside a step (copies to and from the host, results, eager tasks) goes through the main stream, so it stays
in order. Products and convolutions are set up when they are first needed; each needs its own package. Knows no
schedules.
"""

from __future__ import annotations

import importlib.util
import math
import os
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from ...core.tasks import Cuts, Launch, View, strided, strides_of
from ...kernels import KERNELS, Kernel, Thunk, Work, cuda
from .. import DeviceError
from ..far import OnHost
from . import clock
from .driver import Driver, on_host
from .lanes import Captured, Streams
from .ring import Ring
from .slots import Slot, at, fit

SLOT = 4096  #: the most bytes that are fetched without waiting
NODES = 1 << 20  #: the most bytes of inputs that a step's own graph uploads
TILE = 128 * 64  #: numbers of a result that one block of a library's product makes: assumed
HELD = 64 << 20  #: bytes that are filled to keep a stream busy
STEPS = (0, 1)  #: priorities of the lanes of a step (`schedule.Lane`), on whose streams costs are measured
#: hardware queues of the process, read when its CUDA context is made. With CUDA's default of 8, streams of a step, of
#: its inputs and of communication may share one, and then wait for each other
CONNECTIONS = "32"
#: packages beside CuPy, by the name they are imported under
PACKAGES = {"cupy": "cupy", "nvmath": "nvmath-python", "cudnn": "nvidia-cudnn-frontend"}


class Cuda:
    """One GPU; methods without a docstring do as the same ones of `CPU`. `driver`, `products`, `dnn` run the kinds of
    calls; the tests replace them.

    For calls that are bound from now on: `tf32`: whether float32 products and convolutions may round their inputs for
    the tensor cores; `deterministic`: whether calls of cuDNN must be bit-identical each time; `small_products`: whether
    small products may run as our kernel, if it is faster than cuBLASLt's.
    """

    tf32 = False
    deterministic = True
    small_products = True
    captures = True
    halves = True
    most_scores = math.inf  #: flash kernels are a rule of fusion here

    def __init__(self, driver: Any, products: Callable[[], Any], dnn: Callable[[], Any], name: str) -> None:
        self.driver, self.name = driver, name
        self._products, self._dnn = cache(products), cache(dnn)  #: made when they are first needed
        self.main, self.cache_bytes = driver.stream(0), driver.cache_bytes
        self._slots: list[tuple[Any, Any]] = []  #: pinned memory and events for `fetch` that are free
        self.flag_memory = self.allocate(4)
        self.flag = self.array(self.flag_memory, View(0, (1,), (1,), 0, "int32"))  #: `cuda.FLAG` of launches
        self._fills: dict[Any, tuple[Any, Thunk]] = {}  #: of single numbers: the argument of a launch, and the launch
        self.seen_not_finite = False  #: what slots have told that nobody had asked
        self.in_use: list[Slot] = []
        self._others: dict[Any, Any] = {}  #: streams beside the main one, by priority, part of the GPU and number

    @property
    def flash(self) -> bool:
        """Whether cuDNN has flash kernels here, forward and gradient: from Ampere on, see `Dnn`."""
        return bool(self.driver.architecture >= 80 and self._dnn().flash)

    @property
    def dependent_launch(self) -> bool:
        """Whether, in a captured step, a kernel of ours may start before the kernel of ours before it on its stream has
        ended, up to its first access to memory; for calls that are bound from now on. Raises DeviceError if the GPU
        cannot."""
        return bool(self.driver.dependent)

    @dependent_launch.setter
    def dependent_launch(self, wanted: bool) -> None:
        if wanted and self.driver.architecture < 90:
            raise DeviceError(f"dependent launch needs a GPU of compute capability 9.0 (Hopper) or later; {self.name} "
                              f"has {self.driver.architecture / 10}")
        self.driver.dependent = wanted

    def interface(self, array: Any) -> dict[str, Any]:
        """An array's CUDA array interface (version 3), for other libraries."""
        return {"shape": array.shape, "typestr": array.dtype.str, "data": (cuda.pointer(array), False),
                "strides": array.strides, "version": 3, "stream": self.main.ptr}

    # -------------------------------------------------------------------------------------------------------- memory
    def allocate(self, nbytes: int) -> Any:
        """Zeroed bytes. When freed, they can be allocated again for the main stream."""
        memory = self.driver.allocate(nbytes, self.main)
        self.zero(memory)
        return memory

    arena = lasting = allocate

    def zero(self, memory: Any) -> None:
        """Sets all bytes to 0."""
        self.once([self.driver.zeros(memory, self.main)])

    def far(self, nbytes: int, rank: int = 0) -> Any:
        """Zeros in pinned memory of the host, given back when no work can use them. Raises DeviceError if the host
        cannot pin so many bytes."""
        try:
            pinned = self.driver.pinned(max(nbytes, 1))
        except self.driver.runtime.CUDARuntimeError as error:
            raise DeviceError(f"{self.name} cannot pin {nbytes:,} bytes of the host's memory: {error}; offload less, "
                              f"or leave --offload out") from error
        pinned[...] = 0
        found = pinned[:nbytes].view(OnHost)
        found.owner = self.driver
        weakref.finalize(found, self.driver.give_back, pinned).atexit = False
        return found

    def array(self, memory: Any, view: View, base: int = 0) -> Any:
        """The strided array of `view` in `memory`, whose storage begins at byte `base`. It has only address, shape and
        strides, for launches, and does not keep the memory alive; in far memory it is an array of the host."""
        if isinstance(memory, OnHost):
            return strided(memory, view, base)
        size = np.dtype(view.dtype).itemsize
        return self.driver.array(memory, view.shape, view.dtype, tuple(s * size for s in view.strides),
                                 base + view.offset * size)

    def read(self, array: Any) -> Any:
        """A NumPy copy, made when all earlier work has run."""
        if on_host(array):
            self.driver.synchronize(self.main)
            return array.copy()
        host = np.empty(array.shape, array.dtype)
        if host.size:
            memory = None if cuda.contiguous(array) else self.snapshot(array)
            self.driver.copy(array if memory is None else self._whole(memory, array), host, self.main)()
            self.driver.synchronize(self.main)
        return host

    def fetch(self, array: Any, most: int = SLOT, free: list[tuple[Any, Any]] | None = None) -> Callable[[], Any]:
        """Starts a copy of an array to the host, after the work issued before. The returned function waits for it and
        returns the NumPy array. It need not be called: later copies to the same pinned memory use the same stream.
        `free`: pinned memory of `most` bytes and events that are free, by default what all arrays share."""
        if not cuda.contiguous(array) or not 0 < array.nbytes <= most:
            return lambda: self.read(array)
        free = self._slots if free is None else free
        pinned, event = free.pop() if free else (self.driver.pinned(most), self.driver.event())
        host = at(pinned, 0, array)
        self.driver.copy(array, host, self.main)()
        self.driver.record(event, self.main)()

        @cache
        def value() -> Any:
            self.driver.wait_for(event)
            return host.copy()

        weakref.finalize(value, free.append, (pinned, event)).atexit = False
        return value

    def not_finite(self) -> bool:
        """Whether an update has used a gradient that is not finite since the last call of this or
        `fetch_not_finite`. Waits for all issued work."""
        return self.fetch_not_finite()()

    def fetch_not_finite(self) -> Callable[[], bool]:
        """As `not_finite`, but the copy to the host is only started, as in `fetch`; the function waits for it."""
        found: list[Callable[[], Any]] = [slot.ask() for slot in [*self.in_use] if slot.unasked]
        found.append(self.fetch(self.flag))
        self.driver.zeros(self.flag, self.main)()
        seen, self.seen_not_finite = self.seen_not_finite, False
        return lambda: seen or any(value()[0] for value in found)

    def write(self, array: Any, value: Any) -> None:
        """Writes host values to an array, after all work issued before. A single number is the argument of a launch,
        for which nobody waits, so a learning rate can be set while a step runs."""
        self.once([partial(self._write, array, value)])

    def _write(self, array: Any, value: Any) -> None:
        if on_host(array):
            self.driver.synchronize(self.main)
            array[...] = value
            return
        if array.size == 1 and array.dtype.kind == "f":
            key = cuda.pointer(array), array.dtype
            if key not in self._fills:
                fill: Any = self.calls("fill", [array], [array], self.main, value=0.0)[0]
                self._fills[key] = fill.owners[0].values[1], fill
            number, fill = self._fills[key]
            number.value = float(np.asarray(value).reshape(()))  # a launch takes what its arguments are then
            fill()
            return
        host = np.ascontiguousarray(np.broadcast_to(np.asarray(value, array.dtype), array.shape))
        if not host.size:
            return
        if cuda.contiguous(array):
            self.driver.copy(host, array, self.main)()
        else:
            memory = self.driver.allocate(host.nbytes, self.main)
            self.driver.copy(host, self._whole(memory, array), self.main)()
            self.copier(self._whole(memory, array), array)()
        self.driver.synchronize(self.main)

    def duplicate(self, memory: Any) -> Any:
        """New memory of the same kind with the same bytes."""
        far = isinstance(memory, OnHost)
        copy = self.far(len(memory)) if far else self.driver.allocate(len(memory), self.main)
        self.move(memory, copy)
        return copy

    def move(self, source: Any, out: Any) -> None:
        """Issues a copy of one array to another of the same shape."""
        self.once([self.copier(source, out)])

    def snapshot(self, array: Any) -> Any:
        memory = self.driver.allocate(max(array.size * array.dtype.itemsize, 1), self.main)
        self.copier(array, self._whole(memory, array))()
        return memory

    def copier(self, source: Any, out: Any) -> Thunk:
        """A call that copies one array to another of the same shape, on the main stream."""
        if on_host(source) and on_host(out):
            return partial(self.write, out, source)
        if cuda.contiguous(source, out):
            return self.driver.copy(source, out, self.main) if source.size else _nothing
        thunks = self.calls("copy", [source], [out], self.main)
        return thunks[0] if len(thunks) == 1 else lambda: [thunk() for thunk in thunks]

    def _whole(self, memory: Any, array: Any) -> Any:
        """Memory as an array of the same shape and type, row-major."""
        return self.array(memory, View(0, array.shape, strides_of(array.shape), 0, str(array.dtype)))

    def pinned(self, shape: tuple[int, ...], dtype: str) -> Pinned:
        """An uninitialised host array that steps take as an input without another copy on the host."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        return self.driver.pinned(max(nbytes, 1))[:nbytes].view(dtype).reshape(shape).view(Pinned)

    def block(self, nbytes: int) -> Any:
        """Memory for all inputs of a step that its own graph uploads; None if they are too large."""
        return self.allocate(nbytes) if 0 < nbytes <= NODES else None

    def feed(self, places: Sequence[Any], outputs: Sequence[Any] = (), block: Any = None) -> Feed:
        """A call that copies host arrays to these places for the next step, while the last step may still run."""
        return Feed(self, places, outputs, block)

    def ring(self, inputs: Sequence[Any], outputs: Sequence[Any], count: int) -> Ring:
        with self.driver.alone():
            return Ring(self, inputs, outputs, count)

    # --------------------------------------------------------------------------------------------------------- calls
    def work(self, kernel: Kernel) -> Work | None:
        return kernel.cuda_work

    def cuts(self, kernel: Kernel, reads: Sequence[Any], constants: dict[str, Any]) -> Cuts | None:
        """None: a launch fills the device, so it stays whole."""
        return None

    def bind(self, launch: Launch, array: Any, stream: Any = None) -> list[Thunk]:
        """Prebuilt calls for one launch on a stream, by default the main one; `array(view)` gives the arrays."""
        return self.thunks(_calls(launch, array), stream)

    def thunks(self, calls: Sequence[cuda.Call], stream: Any = None) -> list[Thunk]:
        """Prebuilt calls on a stream, by default the main one."""
        return [self._thunk(call, stream or self.main) for call in calls]

    def calls(self, kernel: str, reads: Sequence[Any], writes: Sequence[Any], stream: Any,
              **constants: Any) -> list[Thunk]:
        """Prebuilt calls of a kernel that needs no scratch, on these arrays."""
        return self.thunks(KERNELS[kernel].cuda_calls(reads, writes, [], constants), stream)

    def _thunk(self, call: cuda.Call, stream: Any) -> Thunk:
        if isinstance(call, cuda.Grid):
            return self.driver.launch(call.flagged(self.flag), stream)
        if isinstance(call, cuda.Product):
            return self._products().bind(call, stream, self.tf32, self.small_products)
        if isinstance(call, cuda.Convolution | cuda.Attention):
            return self._dnn().bind(call, stream, tf32=self.tf32, deterministic=self.deterministic)
        if isinstance(call, cuda.Zeros):
            return self.driver.zeros(call.out, stream)
        return self.driver.copy(call.source, call.out, stream)

    # --------------------------------------------------------------------------------------------------------- lanes
    def streams(self, priorities: Sequence[int], side_sms: int = 0) -> list[Any]:
        """A stream for each lane, the same ones each time. The first is the main stream, which has a higher priority
        than streams of priority 1. `side_sms`: all lanes but the first share so many SMs, and the first has the others,
        on a stream that is not the main one. Raises DeviceError if the GPU cannot be divided like this."""
        found = [] if side_sms else [self.main]
        for i, priority in enumerate(priorities[len(found) :], len(found)):
            kind = (priority, side_sms, bool(side_sms and i), list(priorities[1:i]).count(priority))
            if kind not in self._others:
                self._others[kind] = (self.driver.stream_of_part(side_sms, int(i > 0), priority) if side_sms
                                      else self.driver.stream(priority))
            found.append(self._others[kind])
        return found

    @property
    def sms(self) -> tuple[int, int]:
        """All multiprocessors of the GPU, and the step in which lanes may divide them."""
        return self.driver.sms, self.driver.sm_step

    def filled(self, launch: Launch, array: Any) -> float:
        """The share of the GPU's multiprocessors, from 0 to 1, that a launch fills: its largest grid by the threads
        that can be there at once; a library's call, whose grid is not known, by an SM for each TILE numbers of its
        result."""
        shares = [0.0]  # of a copy engine
        for call in _calls(launch, array):
            if isinstance(call, cuda.Grid):
                shares.append(math.prod(call.blocks) * math.prod(call.threads) / self.driver.resident)
            elif isinstance(call, cuda.Product | cuda.Convolution | cuda.Attention):
                shares.append(sum(math.ceil(view.size / TILE) for view in launch.writes) / self.driver.sms)
        return min(1.0, max(shares))

    def lanes(self, work: Any, trace: bool = False) -> Streams:
        """Lanes that are issued call by call."""
        return Streams(self, work, trace)

    def captured(self, work: Any, trace: bool = False) -> Captured:
        """Lanes that are captured once and replayed by one launch."""
        return Captured(self, work, trace)

    def synchronize(self) -> None:
        self.driver.synchronize_device()

    # -------------------------------------------------------------------------------------------------------- times
    def once(self, calls: Sequence[Thunk]) -> None:
        """As `CPU.once`: else the calls would become a part of another thread's capture."""
        with self.driver.alone():
            clock.run(calls)

    def task_times(self, programs: Sequence[Sequence[Sequence[Thunk]]],
                   progress: Callable[[float], None] | None = None, repeats: int = clock.REPEATS,
                   stream: Any = None) -> list[float]:
        """Microseconds of each program of a stream, by default the main one, as it runs `repeats` times inside a
        replayed graph: a program is a list of equal sequences of calls, on buffers of their own, that run in turn. All
        must have run before."""
        return clock.each(self.driver, stream or self.main, programs, progress, repeats)

    def node(self) -> float:
        """Microseconds of a launch that does hardly anything, as `task_times` says."""
        memory = self.allocate(256)
        small = self.array(memory, View(0, (32,), (1,), 0, "float32"))
        fill = self.calls("fill", [small], [small], self.main, value=0.5)
        self.once(fill)
        return self.task_times([[fill]])[0]

    def hop(self) -> float:
        """Microseconds that a chain of launches loses where it changes streams."""
        one, other = self.streams(STEPS)
        memory = self.allocate(256)
        small = self.array(memory, View(0, (32,), (1,), 0, "float32"))
        first, second = (self.calls("fill", [small], [small], stream, value=0.5)[0] for stream in (one, other))
        self.once([first, second])
        return clock.hop(self.driver, one, other, (first, second))

    def step_time(self, issue: Callable[[], None]) -> float:
        """Microseconds that the main stream needs for the copies of inputs and outputs, when the host runs ahead."""
        hold = clock.Hold(self.driver, self.main, self.driver.allocate(HELD, self.main))
        with self.driver.alone():
            return clock.behind(self.driver, self.main, hold, issue)

    def together(self, programs: Callable[[Any, Any], tuple[Sequence[Thunk], Sequence[Thunk]]],
                 alone: tuple[float, float]) -> tuple[float, float]:
        """How many times longer two programs take beside each other; `programs(stream, stream)` binds them."""
        one, other = self.streams(STEPS)
        first, second = programs(one, other)
        self.once([*first, *second])
        return clock.together(self.driver, one, other, first, second, alone)


class Pinned(np.ndarray):
    """A host array in pinned memory, from `Cuda.pinned`. A step copies it directly, possibly after its call has
    returned: do not change it until a result of that step, for example its loss, has been fetched."""


class Feed:
    """Copies host arrays to a step's inputs, through double buffers in pinned memory and on the device, so that the
    copy of one step's inputs overlaps with the step before. Arrays that are already pinned are copied directly.

    After `slots`, a call only fills the pinned memory of the slot `turn`, which the step's graph of that slot uploads:
    a small step takes less time than calls of copies and events. `block`: memory on the device for all inputs.
    """

    def __init__(self, device: Cuda, places: Sequence[Any], outputs: Sequence[Any], block: Any) -> None:
        self.device, self.driver, self.places = device, device.driver, list(places)
        self.turn = 1  #: the buffer, or slot, of the last call
        self.slot: Slot | None = None  #: of the last call, if its step leaves the outputs there
        self._outputs, self._block, self._in_graphs = list(outputs), block, list[Slot]()
        self._buffers: list[dict[str, Any]] = []  #: once a call needs them

    def _prepare(self) -> None:
        """Makes the buffers. (A cached property of all feeds has one lock before Python 3.12: ranks would hang.)"""
        self._copies = self.driver.stream()
        self._buffers = [self._buffer() for _ in range(2)]
        self.driver.keep(self, [buffer["arrived"] for buffer in self._buffers], self._buffers)

    def _buffer(self) -> dict[str, Any]:
        """One buffer: its host arrays, the copies to the device and from there to the inputs, and their events."""
        driver, main, copies, places = self.driver, self.device.main, self._copies, self.places
        hosts = [np.asarray(self.device.pinned(place.shape, str(place.dtype))) for place in places]
        memories = [driver.allocate(max(host.nbytes, 1), main) for host in hosts]
        staged = [self.device._whole(memory, place) for memory, place in zip(memories, places, strict=True)]
        up = [driver.copy(host, to, copies) if host.size else _nothing for host, to in zip(hosts, staged, strict=True)]
        across = [self.device.copier(source, place) for source, place in zip(staged, places, strict=True)]
        driver.synchronize(main)
        arrived, free = driver.event(), driver.event()
        driver.record(free, main)()
        return {"hosts": hosts, "staged": staged, "memories": memories, "arrived": arrived, "up": up,
                "before": driver.wait(copies, free), "after": driver.record(arrived, copies),
                "across": [driver.wait(main, arrived), *across, driver.record(free, main)]}

    def slots(self) -> list[Slot]:
        """The slots whose calls graphs of the step make, each of which is for one graph. From now on only these bring
        the inputs to their places. Empty for large inputs, whose copies should overlap with the step before."""
        if self._block is not None:
            leaves = fit(self._outputs)
            block = self.device._whole(self._block, self._block)
            self._in_graphs = [Slot(self.device, block, self.places, self._outputs if leaves else ()) for _ in range(2)]
            self.device.in_use += self._in_graphs
            weakref.finalize(self, _let_go, self.device, self._in_graphs).atexit = False
        return self._in_graphs

    def __call__(self, values: Sequence[Any]) -> None:
        self.turn = turn = 1 - self.turn
        if self._in_graphs:
            slot = self._in_graphs[turn]
            slot.wait()  # until the step of two calls ago has run
            for found in slot.given:
                if (returned := found()) is not None and returned.own is None:
                    returned.own = returned.place.copy()
            slot.given.clear()
            for host, value in zip(slot.inputs, values, strict=True):
                host[...] = value
            if slot.outputs:
                if slot.not_finite[0]:
                    self.device.seen_not_finite |= slot.unasked
                    slot.not_finite[0] = 0
                self.slot, slot.unasked = slot, True
            return
        if not self._buffers:
            self._prepare()
        buffer = self._buffers[turn]
        self.driver.wait_for(buffer["arrived"])  # until the host's bytes of two steps ago have been copied
        buffer["sent"] = values
        buffer["before"]()
        for host, staged, up, value in zip(buffer["hosts"], buffer["staged"], buffer["up"], values, strict=True):
            if isinstance(value, Pinned) and value.size and cuda.contiguous(value):
                self.driver.copy(value, staged, self._copies)()
            else:
                np.copyto(host, value)
                up()
        for call in (buffer["after"], *buffer["across"]):
            call()


def _calls(launch: Launch, array: Callable[[View], Any]) -> Sequence[cuda.Call]:
    """The calls of a launch, on no stream yet."""
    reads, writes, work = ([array(v) for v in views] for views in (launch.reads, launch.writes, launch.work))
    if launch.kernel == "copy" and (on_host(*reads) or on_host(*writes)):
        return [cuda.Copy(*reads, *writes)] if writes[0].size else []
    return KERNELS[launch.kernel].cuda_calls(reads, writes, work, dict(launch.constants))


def _let_go(device: Cuda, slots: Sequence[Slot]) -> None:
    """Waits for the last steps of these slots, whose memory can go then."""
    for slot in slots:
        slot.wait()
        device.in_use.remove(slot)
        device.seen_not_finite |= slot.unasked and bool(slot.not_finite[0])


def _nothing() -> None:
    pass


# --------------------------------------------------------------------------------------------------------- which ones
_devices: dict[int, Cuda] = {}


def cuda_device(ordinal: int) -> Cuda:
    """The device of this number, always the same object. Raises DeviceError; the message says what is missing."""
    if ordinal not in _devices:
        _devices[ordinal] = _open(ordinal)
    return _devices[ordinal]


def gpus() -> int:
    """The number of GPUs of this process. Raises DeviceError; the message says what is missing."""
    if missing := [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]:
        raise DeviceError(f"cuda needs {', '.join(missing)}: pip install 'minidl[cuda13]' (or "
                          f"[cuda12] for an older driver)")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", CONNECTIONS)
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"cuda has no driver or no GPU here: {error}") from error


def _open(ordinal: int) -> Cuda:
    count = gpus()
    if ordinal >= count:
        raise DeviceError(f"there is no GPU {ordinal}; this machine has {count}")
    driver = Driver(ordinal)

    def library(room: str, name: str) -> Callable[[], Any]:
        return lambda: getattr(importlib.import_module(f".{room}", __package__), name)(driver)

    return Cuda(driver, library("products", "Products"), library("dnn", "Dnn"), f"cuda:{ordinal}")


def owner(memory: Any) -> Cuda:
    """The device on which memory was allocated. Raises DeviceError for memory of any other origin."""
    for device in _devices.values():
        if device.driver.owns(memory):
            return device
    raise DeviceError(f"memory of type {type(memory).__name__} belongs to none of the CUDA devices in use")
