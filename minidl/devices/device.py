"""A device: memory, the array module, bound kernels, and lanes that run them. Here the CPU; CUDA is in
`minidl.devices.cuda`.

The CPU keeps BLAS to one thread for each stream, because two streams with two BLAS threads each would fight for the
same cores and because the bits of a product may depend on the number of threads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from ..core.tasks import Cuts, Launch, View, strided
from ..kernels import KERNELS, Kernel, Thunk, Work, linear
from ..system import process
from . import DeviceError, far, pages
from .lanes import Threads
from .lanes import Work as Tasks
from .native import no_native_lanes
from .ring import Ring

LANES = ("native", "python")
ALIGNMENT = 256  #: bytes; every buffer begins at a multiple
_LASTING = pages.Shared(ALIGNMENT)  # of the whole process, as its memory


@dataclass(frozen=True)
class Scratch:
    """The scratch arrays of a launch of this kernel, as (shape, type). With it a graph can be pickled."""

    kernel: str

    def __call__(self, reads: Sequence[View], writes: Sequence[View], **constants: Any
                 ) -> Sequence[tuple[tuple[int, ...], Any]]:
        work = KERNELS[self.kernel].work
        return work(reads, writes, **constants) if work else ()


class CPU:
    """Host memory and NumPy. `blas_threads`: how many threads one matrix product may use, on any stream."""

    name = "cpu"
    kind_of_lanes = ""  #: native or python; empty: as MINIDL_LANES says, or else the default
    captures = False  #: whether lanes can be captured and replayed by one launch
    halves = False  #: whether kernels take 16-bit floats
    flash = False  #: whether there are flash kernels of attention in 16 bits
    far_file: str | None = None  #: where far memory is; None: a temporary file
    most_scores: float = 1 << 16  #: of a head, that attention keeps for its gradient; more are computed again

    def __init__(self, blas_threads: int = 1) -> None:
        self.set_blas_threads(blas_threads)

    def set_blas_threads(self, threads: int) -> None:
        """Sets the number of threads of each matrix product, for the whole process."""
        from threadpoolctl import threadpool_limits

        self._limits = threadpool_limits(threads, "blas")
        self.blas_threads, linear.one_thread = threads, threads == 1

    def set_lanes(self, kind: str) -> None:
        """Sets who makes the calls of tasks, for all executors made from now on: compiled code (`native`) or the
        interpreter (`python`); empty: the default. Raises DeviceError if this machine has no native lanes."""
        if kind not in ("", *LANES):
            raise ValueError(f"unknown lanes {kind!r}; known: {', '.join(LANES)}")
        if kind == "native" and (why := no_native_lanes()):
            raise DeviceError(why)
        self.kind_of_lanes = kind

    @property
    def lanes_used(self) -> str:
        """The kind of the lanes that are made now: native or python."""
        return self.kind_of_lanes or default_lanes()

    def spin(self) -> float:
        """Microseconds for which a waiting lane looks out before it sleeps, if all lanes have cores of their own."""
        if self.lanes_used == "python":
            return 0.0
        from .native.lanes import spin_us

        return spin_us()

    def lanes(self, work: Tasks, trace: bool = False, stamped: bool = False) -> Any:
        """Lanes that run this work. `stamped`: somebody may ask where they are, which costs stamps in native ones."""
        if self.lanes_used == "python":
            return Threads(work, trace)
        from .native.lanes import NativeLanes

        lanes = NativeLanes(work, trace, stamped=stamped)
        if process.debug_level():
            print(lanes, file=sys.stderr)
        return lanes

    def program(self, calls: list[Thunk]) -> list[Thunk]:
        """Calls that make these calls in order: on native lanes, one that makes them all without the interpreter."""
        if self.lanes_used == "python":
            return calls
        return [self.lanes(Tasks(["main"], [0], [[0]], [], lambda task, stream: calls, str)).run]

    def once(self, calls: Sequence[Thunk]) -> None:
        """Makes these calls in turn; on a device that captures, not during the capture of another thread."""
        with np.errstate(all="ignore"):
            for call in calls:
                call()

    def allocate(self, nbytes: int) -> Any:
        """Uninitialised bytes, aligned."""
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + nbytes]

    def arena(self, nbytes: int) -> Any:
        """Uninitialised bytes, aligned, for all that a run computes; in large pages."""
        return pages.own(nbytes, self.allocate)

    def lasting(self, nbytes: int) -> Any:
        """Uninitialised bytes, aligned, for a parameter or a state; in large pages, beside others."""
        return _LASTING.piece(nbytes, self.allocate)

    def set_far_file(self, path: str | None) -> None:
        """Sets the file of far memory, for all executors made from now on. Raises OSError if it cannot be written."""
        if path is not None:
            far.mapped(0, path)
        self.far_file = path

    def far(self, nbytes: int, rank: int = 0) -> Any:
        """Zeros in memory that is not the device's own: in a file. Raises OSError if there is no room for them."""
        return far.mapped(nbytes, self.far_file, rank)

    array = staticmethod(strided)  #: the strided array that a view means in memory, from a byte on

    def work(self, kernel: Kernel) -> Work | None:
        """The function that returns the scratch arrays of a kernel on this device; None without scratch."""
        return kernel.work

    def cuts(self, kernel: Kernel, reads: Sequence[Any], constants: dict[str, Any]) -> Cuts | None:
        """How a launch of this kernel may be cut; None if it must stay whole."""
        axes = kernel.cut(reads, constants)
        return _cuts(kernel.name, axes, kernel.window) if axes else None

    def bind(self, launch: Launch, array: Any, stream: Any = None) -> list[Thunk]:
        """Prebuilt calls for one launch; `array(view)` gives the arrays. All streams of the CPU are alike."""
        reads, writes, work = ([array(v) for v in views] for views in (launch.reads, launch.writes, launch.work))
        if launch.kernel == "copy" and (call := far.transfer(*reads, *writes)):
            return [call]
        return KERNELS[launch.kernel].bind(reads, writes, work, dict(launch.constants))

    def read(self, array: Any) -> Any:
        """The array on the host: on the CPU the array itself, elsewhere a copy, made when all earlier work has run."""
        return array

    def fetch(self, array: Any) -> Callable[[], Any]:
        """A function that returns the present values of the array; on CUDA the copy runs while the host goes on."""
        values = array.copy()
        return lambda: values

    def not_finite(self) -> bool | None:
        """Whether an update has used a gradient that is not finite since the last call; None if none checks."""
        return None

    def fetch_not_finite(self) -> Callable[[], bool | None]:
        """A function that waits for all work issued so far and then returns `not_finite`."""
        return self.not_finite

    def write(self, array: Any, value: Any) -> None:
        """Writes host values to an array, after all work issued before."""
        array[...] = value

    def duplicate(self, memory: Any) -> Any:
        """New memory with the same bytes."""
        copy = self.lasting(len(memory))
        copy[...] = memory
        return copy

    def move(self, source: Any, out: Any) -> None:
        """Copies one array to another of the same shape."""
        np.copyto(out, source)

    def snapshot(self, array: Any) -> Any:
        """New memory with the array's elements in row-major order."""
        return array.copy().reshape(-1).view(np.uint8)

    def copier(self, source: Any, out: Any) -> Thunk:
        """A call that copies one array to another of the same shape, after all work issued before."""
        return partial(np.copyto, out, source)

    def pinned(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An uninitialised host array of the kind that is fastest as an input of a step; on the CPU, any array."""
        return np.empty(shape, dtype)

    def block(self, nbytes: int) -> Any:
        """Memory for all inputs of a step, apart from the memory plan's; None: the plan has their places."""
        return None

    def feed(self, places: Sequence[Any], outputs: Sequence[Any] = (), block: Any = None
             ) -> Callable[[Sequence[Any]], None]:
        """A call that copies host arrays to these places, before the next step. On devices that capture it is an object
        whose graphs may also bring the outputs to the host; `block` holds all places then."""
        numbered = tuple(enumerate(places))  # to zip takes longer, which small steps notice

        def put(values: Sequence[Any]) -> None:
            for i, place in numbered:
                place[...] = values[i]

        return put

    def ring(self, inputs: Sequence[Any], outputs: Sequence[Any], count: int) -> Ring:
        """Room for the batches and results of `count` steps that one launch runs."""
        return Ring(inputs, outputs, count)

    def synchronize(self) -> None:
        """Waits for all issued work; on the CPU, calls are done when they return."""


def default_lanes() -> str:
    """The kind of lanes that MINIDL_LANES names; else native ones where this machine has them. Raises ValueError for an
    unknown name, and DeviceError for native lanes if there are none."""
    kind = os.environ.get("MINIDL_LANES") or ("python" if no_native_lanes() else "native")
    if kind not in LANES:
        raise ValueError(f"MINIDL_LANES is {kind[:40]!r}; it must be {' or '.join(LANES)}")
    if kind == "native" and (why := no_native_lanes()):
        raise DeviceError(why)
    return kind


@cache
def cpu() -> CPU:
    """The one CPU of this process."""
    return CPU()


def get(name: Any) -> Any:
    """The device of this name: `cpu`, `cuda`, `cuda:1`; a device itself. Raises ValueError for an unknown name, and
    DeviceError for a device that is not available here; the message says what is missing."""
    if name == "cpu" or hasattr(name, "captures"):
        return cpu() if name == "cpu" else name
    kind, colon, number = str(name).partition(":")
    if kind == "cuda" and (number.isdigit() or not colon):
        from .cuda.device import cuda_device

        return cuda_device(int(number or 0))
    raise ValueError(f"unknown device {name!r}; known: cpu, cuda, cuda:N")


def of(memory: Any) -> Any:
    """The device on which memory was allocated."""
    if type(memory) in (np.ndarray, far.Mapped):
        return cpu()
    from .cuda.device import owner

    return owner(memory)


@cache
def _cuts(kernel: str, axes: str, window: Any) -> Cuts:
    return Cuts(axes, Scratch(kernel), window)
