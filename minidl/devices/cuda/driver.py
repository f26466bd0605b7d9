"""CUDA through CuPy: memory, streams, events, copies, our kernels, capture.

Work that is issued more than once is a prebuilt call without arguments (`Thunk`). Knows arrays and addresses, no
tensors, tasks or schedules. The tests replace this driver by one that runs everything on the CPU.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from typing import Any

import numpy as np

from ...kernels import Thunk, cuda
from .. import DeviceError
from ..far import OnHost

#: compiler options; CuPy adds the architecture, CUDA's headers and -ftz=true (float32 below 1.2e-38 is 0)
OPTIONS = ("-std=c++17",)
HAPPENED, NOT_YET = 0, 600  #: cudaSuccess, cudaErrorNotReady
CAPTURING = 1  #: cudaStreamCaptureStatusActive
USE_NODE_PRIORITY = 8  #: cudaGraphInstantiateFlagUseNodePriority
SET_AT_LAUNCH = 1  #: cudaGraphCondAssignDefault


def libraries() -> tuple[Any, Any, Any]:
    """CuPy, its extensions, and the runtime of cuda-bindings, for functions on graphs that CuPy lacks."""
    import cupy
    import cupyx
    from cuda.bindings import runtime

    return cupy, cupyx, runtime


class DeviceArray(np.ndarray[Any, Any]):
    """An array at an address of the device. NumPy computes its views and strides as usual. Reading its elements on the
    host would be a segmentation fault, so the usual ways (arithmetic, an element, a copy, printing) raise errors."""

    def __repr__(self) -> str:
        return f"{self.dtype} {self.shape} at {self.ctypes.data:#x}"

    __str__ = __repr__

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if not all(k is None or k is Ellipsis or isinstance(k, int | slice) for k in keys) or (
                sum(isinstance(k, int) for k in keys) == self.ndim and Ellipsis not in keys):
            self._refuse()
        return super().__getitem__(key)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{self!r} is on the device: the host cannot read its elements")

    __array_ufunc__ = __setitem__ = __float__ = __int__ = __bool__ = item = tolist = tobytes = copy = astype = _refuse


def on_host(array: Any) -> bool:
    """Whether this is an array of the host."""
    return isinstance(array, np.ndarray) and not isinstance(array, DeviceArray)


class Stream:
    """A stream of the device. `number`: streams are numbered in the order in which they are made. `sms`: how many
    multiprocessors its work can use, if not all; then `raw`, to which nothing is issued, only keeps its memory."""

    def __init__(self, raw: Any, number: int, ptr: int | None = None, sms: int = 0) -> None:
        self.raw, self.number, self.ptr, self.sms = raw, number, int(raw.ptr) if ptr is None else ptr, sms


class Graph:
    """The handles of a captured graph: the graph itself, and the executable form of it or of the loop around it. Both
    are destroyed with it."""

    def __init__(self, captured: int, executable: int) -> None:
        self.captured, self.executable = captured, executable


class Loop:
    """A graph that repeats its `body`, into which work is captured, as long as a kernel sets the condition `handle` to
    another value than 0 (`cudaGraphSetConditional`). It always runs once."""

    def __init__(self, whole: int, body: int, handle: int) -> None:
        self.whole, self.body, self.handle = whole, body, handle


class Driver:
    """One GPU. CuPy's errors pass through; the device turns them into messages.

    `dependent`: whether a kernel of ours that is captured right behind another one may start before that has ended.
    """

    dependent = False

    def __init__(self, ordinal: int) -> None:
        self.cupy, self.cupyx, self.bindings = libraries()
        cupy, self.ordinal = self.cupy, ordinal
        self.runtime, self.launcher = cupy.cuda.runtime, cupy.cuda.driver.launchKernel
        self.device = cupy.cuda.Device(ordinal)
        self.use()
        self.architecture = int(self.device.compute_capability)
        properties = self.runtime.getDeviceProperties(ordinal)
        self.cache_bytes = int(properties["l2CacheSize"])  #: of the second level
        self.sms = int(properties["multiProcessorCount"])
        self.resident = self.sms * int(properties["maxThreadsPerMultiProcessor"])  #: threads at the same time, at most
        self._ours: dict[int, int] = {}  #: nodes of the capture that are kernels of ours -> their stream
        self._alone, self._captures = threading.RLock(), False
        self._given_back: deque[Any] = deque()  #: pinned memory that work of the device may still use
        self._streams = 0
        self._modules: list[Any] = []  # a module is unloaded when no reference is left

    def describe(self) -> dict[str, Any]:
        """The description of the GPU for records of benchmarks."""
        properties = self.runtime.getDeviceProperties(self.ordinal)
        return {"name": properties["name"].decode(), "capability": self.architecture,
                "memory_bytes": int(properties["totalGlobalMem"]), "driver": self.runtime.driverGetVersion(),
                "runtime": self.runtime.runtimeGetVersion(), "cupy": self.cupy.__version__,
                "stream_priorities": self.priorities()}

    def use(self) -> None:
        """Makes this GPU the calling thread's; each thread that issues calls needs it once. CuPy and cuda-bindings each
        have a CUDA runtime, and both must use the same GPU."""
        self.device.use()
        _checked(self.bindings.cudaSetDevice(self.ordinal))

    def address(self) -> str:
        """The GPU's bus address, by which two device numbers of one GPU can be recognised."""
        return str(self.runtime.deviceGetPCIBusId(self.ordinal))

    # -------------------------------------------------------------------------------------------------------- memory
    def allocate(self, nbytes: int, stream: Stream) -> Any:
        """Uninitialised bytes from CuPy's pool of this stream. When freed, only this stream can get them again."""
        with self.device, stream.raw:
            return self.cupy.empty(nbytes, self.cupy.uint8)

    def owns(self, memory: Any) -> bool:
        if isinstance(memory, OnHost):
            return memory.owner is self
        return isinstance(memory, self.cupy.ndarray) and memory.device.id == self.ordinal

    def array(self, memory: Any, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...], offset: int) -> Any:
        """The strided array at byte `offset`; strides in bytes. It does not keep `memory` alive."""
        ends = [(n - 1) * s for n, s in zip(shape, strides, strict=True)] if 0 not in shape else []
        below = -sum(min(end, 0) for end in ends)  # bytes before the first element, for negative strides
        extent = below + sum(max(end, 0) for end in ends) + (np.dtype(dtype).itemsize if 0 not in shape else 0)
        base: Any = (ctypes.c_ubyte * extent).from_address(int(memory.data.ptr) + offset - below)
        return DeviceArray(shape, dtype, base, below, strides)

    def pinned(self, nbytes: int) -> Any:
        """Pinned host bytes, whose copies are asynchronous; they live as long as the array."""
        return self.cupyx.empty_pinned(nbytes, np.uint8)

    def give_back(self, pinned: Any) -> None:
        """Lets pinned memory go when no work can use it: now, or after the capture or the wait of a thread for the
        device. For finalizers, which may run in the middle of anything."""
        self._given_back.append(pinned)
        self._let_go()

    def _let_go(self) -> None:
        while self._given_back and self._alone.acquire(blocking=False):
            try:
                if self._captures:  # in this thread
                    return
                gone = []
                with suppress(IndexError):  # whoever collects garbage may be faster
                    while True:
                        gone.append(self._given_back.popleft())
                self.device.synchronize()
            finally:
                self._alone.release()

    # ------------------------------------------------------------------------------------------------------- streams
    def priorities(self) -> tuple[int, int]:
        """The lowest and the highest priority of a stream; CUDA gives the highest one the smallest number."""
        least, greatest = _checked(self.bindings.cudaDeviceGetStreamPriorityRange())
        return int(least), int(greatest)

    def stream(self, priority: int = 1) -> Stream:
        """A non-blocking stream. `priority`: as for lanes, 0 goes before 1, and -1 before both. 1 is CUDA's lowest:
        CUDA's numbers are negative, and it treats a number that is too large as the lowest, without an error."""
        self._streams += 1
        with self.device:
            raw = self.cupy.cuda.Stream(non_blocking=True, priority=self._number_of(priority))
        return Stream(raw, self._streams - 1)

    def _number_of(self, priority: int) -> int:
        least, greatest = self.priorities()
        return max(greatest, min(least, least - 1 + priority))

    @property
    def sm_step(self) -> int:
        """A part of the GPU has a multiple of so many multiprocessors."""
        return 8 if self.architecture >= 90 else 4 if self.architecture >= 80 else 2

    @cache  # noqa: B019  one driver a process
    def parts(self, side: int) -> tuple[Any, Any]:
        """Two parts of the GPU without a common multiprocessor, as green contexts: the second has `side`, the first the
        others. Raises DeviceError if the GPU or its driver cannot be divided like this."""
        api, found = self.extended, list[Any]()
        try:
            device = _checked(api.cuDeviceGet(self.ordinal))[0]
            whole = _checked(api.cuDeviceGetDevResource(device, api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))[0]
            groups, _, rest = _checked(api.cuDevSmResourceSplitByCount(1, whole, 0, side))
            for part, count in ((rest, self.sms - side), (groups[0], side)):
                if int(part.sm.smCount) != count:
                    raise RuntimeError(f"a part has {part.sm.smCount} SMs, not {count}")
                described = _checked(api.cuDevResourceGenerateDesc([part], 1))[0]
                found.append(_checked(api.cuGreenCtxCreate(
                    described, device, int(api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)))[0])
        except (RuntimeError, AttributeError) as error:
            raise DeviceError(f"the SMs of the GPU cannot be divided into {self.sms - side} and {side}: {error}; it "
                              f"needs a driver of CUDA 12.4 or later, and steps of {self.sm_step} SMs") from error
        return found[0], found[1]

    def stream_of_part(self, side: int, part: int, priority: int) -> Stream:
        """A stream whose work uses only this part of `parts`. `priority`: as in `stream`."""
        context, like = self.parts(side)[part], self.stream(priority)
        ptr = _checked(self.extended.cuGreenCtxStreamCreate(
            context, int(self.extended.CUstream_flags.CU_STREAM_NON_BLOCKING), self._number_of(priority)))[0]
        return Stream(like.raw, like.number, int(ptr), side if part else self.sms - side)

    def event(self, timing: bool = False) -> Any:
        with self.device:
            return self.cupy.cuda.Event(disable_timing=not timing)

    def record(self, event: Any, stream: Stream) -> Thunk:
        return _keep(partial(self.runtime.eventRecord, event.ptr, stream.ptr), event)

    def wait(self, stream: Stream, event: Any) -> Thunk:
        return _keep(partial(self.runtime.streamWaitEvent, stream.ptr, event.ptr), event)

    def record_in_graph(self, event: Any, stream: Stream) -> Thunk:
        """A record that becomes a graph node when captured, and then takes a time at each launch of the graph."""
        bindings = self.bindings

        def record() -> None:
            _checked(bindings.cudaEventRecordWithFlags(event.ptr, stream.ptr, bindings.cudaEventRecordExternal))

        return record

    def elapsed(self, begin: Any, end: Any) -> float:
        """Microseconds between two timed events that have happened."""
        return float(self.cupy.cuda.get_elapsed_time(begin, end)) * 1000

    def wait_for(self, event: Any) -> None:
        """Blocks the host until the event has happened."""
        event.synchronize()

    def keep(self, owner: Any, events: Sequence[Any], memory: Any) -> None:
        """When `owner` goes, its pinned memory stays until these events have happened: copies may still use it."""
        weakref.finalize(owner, _wait_for, self, events, memory).atexit = False

    def waiting(self, event: Any) -> Thunk:
        """`wait_for` as a call without arguments."""
        return event.synchronize

    def happened(self, event: Any) -> bool:
        """Whether all work issued before the last record has run; does not wait. Raises the device's error if there was
        one; `event.done` of CuPy would return False then."""
        status = int(self.runtime.eventQuery(event.ptr))
        if status not in (HAPPENED, NOT_YET):
            raise self.runtime.CUDARuntimeError(status)
        return status == HAPPENED

    def synchronize(self, stream: Stream) -> None:
        self.runtime.streamSynchronize(stream.ptr)

    def synchronize_device(self) -> None:
        """Waits for all work of the device. CUDA forbids it while any thread captures, so captures end first."""
        with self.alone():
            self.device.synchronize()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it, no other thread captures on this device, nor waits for all of it."""
        try:
            with self._alone:
                yield
        finally:
            self._let_go()

    # ---------------------------------------------------------------------------------------------------------- calls
    @cached_property
    def extended(self) -> Any:
        """The driver API of cuda-bindings, for launches with attributes and parts of the GPU."""
        from cuda.bindings import driver

        return driver

    def launch(self, grid: cuda.Grid, stream: Stream) -> Thunk:
        """A call that launches one of our kernels. Its arguments are packed now."""
        packed = cuda.Packed(grid)
        function = self._function(grid.source, grid.kernel, self.dependent)
        blocks, threads = (*grid.blocks, 1, 1)[:3], (*grid.threads, 1, 1)[:3]
        launch = partial(self.launcher, function, *blocks, *threads, grid.shared, stream.ptr, packed.address, 0)
        if self.dependent:
            launch = self._dependent(launch, function, (*blocks, *threads, grid.shared), stream, packed)
        return _keep(launch, packed, grid)

    def _dependent(self, launch: Any, function: int, geometry: Sequence[int], stream: Stream, packed: Any) -> Any:
        """The same call. If it is captured and the only node before it is a kernel of ours on the same stream, the edge
        between them is programmatic: this kernel may start at once, up to its wait (`begin_kernel` of common.cuh)."""
        early = self.programmatic(function, geometry, stream, packed.address)

        def issue() -> None:
            before = self._captured_last(stream)
            if before is None:  # no capture
                launch()
                return
            (early if [self._ours.get(node) for node in before] == [stream.ptr] else launch)()
            self._ours |= dict.fromkeys(self.frontier(stream), stream.ptr)

        return issue

    def programmatic(self, function: int, geometry: Sequence[int], stream: Stream, arguments: int) -> Thunk:
        """A launch that may start before the kernel before it has ended. `geometry`: blocks and threads along each
        axis, and bytes of dynamic shared memory."""
        api = self.extended
        attribute, config = api.CUlaunchAttribute(), api.CUlaunchConfig()
        attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        for name, value in zip(("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ",
                                "sharedMemBytes"), geometry, strict=True):
            setattr(config, name, value)
        config.hStream, config.attrs, config.numAttrs = stream.ptr, [attribute], 1
        return lambda: _checked(api.cuLaunchKernelEx(config, function, arguments, 0))

    @cache  # noqa: B019  one driver a process
    def _function(self, source: str, kernel: str, dependent: bool = False) -> int:
        """The handle of a compiled kernel. CuPy keeps compiled code on disk. Raises RuntimeError for a kernel that does
        not compile."""
        options = (*OPTIONS, "-DDEPENDENT") if dependent else OPTIONS
        with self.device:
            module = self.cupy.RawModule(code=cuda.text(source), options=options, name_expressions=[kernel])
            try:
                raw = module.get_function(kernel)
            except self.cupy.cuda.compiler.CompileException as error:
                raise RuntimeError(
                    f"{kernel} of {source} does not compile for sm_{self.architecture}: {error}") from error
            self._modules.append((module, raw))
            return int(raw.kernel.ptr)

    def zeros(self, array: Any, stream: Stream) -> Thunk:
        return _keep(partial(self.runtime.memsetAsync, cuda.pointer(array), 0, array.nbytes, stream.ptr), array)

    def copy(self, source: Any, out: Any, stream: Stream) -> Thunk:
        """A call that copies contiguous bytes. Either array may be on the host (NumPy); if it is not pinned, the
        copy is synchronous."""
        nbytes, kind = int(source.nbytes), self.runtime.memcpyDefault
        return _keep(partial(self.runtime.memcpyAsync, cuda.pointer(out), cuda.pointer(source), nbytes, kind,
                             stream.ptr), source, out)

    def ranges(self, name: str) -> tuple[Thunk, Thunk]:
        """Calls that open and close an NVTX range."""
        nvtx = self.cupy.cuda.nvtx
        return partial(nvtx.RangePush, name), nvtx.RangePop

    # -------------------------------------------------------------------------------------------------------- capture
    def loop(self) -> Loop:
        """An empty loop. Raises RuntimeError if CUDA has no conditional nodes (before 12.4)."""
        bindings = self.bindings
        whole = _checked(bindings.cudaGraphCreate(0))[0]
        handle = _checked(bindings.cudaGraphConditionalHandleCreate(whole, 1, SET_AT_LAUNCH))[0]
        return Loop(int(whole), self.add_loop(whole, handle), int(handle))

    def add_loop(self, graph: Any, handle: Any) -> int:
        """The empty body of a loop that becomes a node of a graph."""
        bindings = self.bindings
        node = bindings.cudaGraphNodeParams()
        node.type = bindings.cudaGraphNodeType.cudaGraphNodeTypeConditional
        node.conditional.handle, node.conditional.size = handle, 1
        node.conditional.type = bindings.cudaGraphConditionalNodeType.cudaGraphCondTypeWhile
        add = getattr(bindings, "cudaGraphAddNode_v2", bindings.cudaGraphAddNode)  # CUDA 12 has both, as below
        _checked(add(graph, None, None, 0, node))
        return int(node.conditional.phGraph_out[0])

    def begin_capture(self, stream: Stream, into: Loop | None = None) -> None:
        self._ours.clear()
        if into is None:
            self.runtime.streamBeginCapture(stream.ptr, self.runtime.streamCaptureModeRelaxed)
        else:
            relaxed = self.bindings.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
            _checked(self.bindings.cudaStreamBeginCaptureToGraph(stream.ptr, into.body, None, None, 0, relaxed))
        self._captures = True

    def end_capture(self, stream: Stream, into: Loop | None = None) -> Graph:
        """The graph of the work issued since `begin_capture`, or the loop around it, ready to be launched. Its kernels
        keep the priorities of their streams; CuPy's own graph would give all of them the priority of the stream to
        which it is launched."""
        try:
            captured = int(self.runtime.streamEndCapture(stream.ptr))
        finally:
            self._captures = False
        whole = captured if into is None else into.whole
        try:
            executable = int(_checked(self.bindings.cudaGraphInstantiate(whole, USE_NODE_PRIORITY))[0])
        except BaseException:
            self.runtime.graphDestroy(whole)
            raise
        graph = Graph(captured, executable)
        weakref.finalize(graph, _destroy, self.runtime, whole, executable).atexit = False
        return graph

    def dependencies(self, graph: Graph) -> tuple[list[int], list[tuple[int, int]]]:
        """The nodes of a graph, and its edges as pairs of their indices."""
        count = _checked(self.bindings.cudaGraphGetNodes(graph.captured))[-1]
        nodes = [int(n) for n in _checked(self.bindings.cudaGraphGetNodes(graph.captured, count))[0][:count]]
        place, room = {node: i for i, node in enumerate(nodes)}, 2 * len(nodes) + 16
        # CUDA 12 has both functions, CUDA 13 only the second
        get_edges = getattr(self.bindings, "cudaGraphGetEdges_v2", self.bindings.cudaGraphGetEdges)
        while True:  # asking for their number is an error where an edge of a library carries data
            before, after, *_, count = _checked(get_edges(graph.captured, room))
            if count < room:
                return nodes, [(place[int(a)], place[int(b)])
                               for a, b in zip(before[:count], after[:count], strict=True)]
            room *= 2

    def abandon_capture(self, stream: Stream, into: Loop | None = None) -> None:
        """Ends a capture in which a call failed. Hides the error of the capture: the call's own error says why."""
        with suppress(Exception):
            captured = self.runtime.streamEndCapture(stream.ptr)
            self.runtime.graphDestroy(captured if into is None else into.whole)
        self._captures = False

    def frontier(self, stream: Stream) -> list[int]:
        """The nodes on which the next node captured on this stream will depend. Raises RuntimeError if the stream is
        not being captured."""
        nodes = self._captured_last(stream)
        if nodes is None:
            raise RuntimeError(f"the capture of stream {stream.number} has ended: a call was made that a capture does "
                               f"not allow")
        return nodes

    def _captured_last(self, stream: Stream) -> list[int] | None:
        """`frontier`, or None if the stream is not being captured."""
        info = getattr(self.bindings, "cudaStreamGetCaptureInfo_v3", self.bindings.cudaStreamGetCaptureInfo)  # as above
        # also returns the capture's number, its graph, and the edges' data
        status, _, _, nodes, *_, count = _checked(info(stream.ptr))
        return [int(n) for n in nodes[:count]] if int(status) == CAPTURING else None

    def replay(self, graph: Graph, stream: Stream) -> Thunk:
        """A call that launches the whole graph, which is uploaded now."""
        self.runtime.graphUpload(graph.executable, stream.ptr)
        return _keep(partial(self.runtime.graphLaunch, graph.executable, stream.ptr), graph)


def _wait_for(driver: Driver, events: Sequence[Any], memory: Any) -> None:
    for event in events:
        driver.wait_for(event)


def _destroy(runtime: Any, whole: int, executable: int) -> None:
    runtime.graphExecDestroy(executable)
    runtime.graphDestroy(whole)


def _checked(result: Sequence[Any]) -> Sequence[Any]:
    """The results of a function of cuda-bindings without its error code, which must be 0."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA: {error.name}")
    return values


def _keep(thunk: Any, *owners: Any) -> Thunk:
    """The call, which now keeps alive the memory at its addresses."""
    thunk.owners = owners
    return thunk
