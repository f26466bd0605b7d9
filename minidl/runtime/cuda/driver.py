"""CUDA by way of CuPy: memory, streams, events, copies, our kernels, capture. The only file that imports CuPy.

Whatever is issued more than once is a prebuilt call without arguments (`Thunk`). Knows arrays and addresses, no
tensors, tasks or schedules. The tests put another driver in its place, which runs everything on the CPU.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import numpy as np

from ...kernels import Thunk, cuda

#: to which CuPy adds the architecture, CUDA's headers and -ftz=true (float32 below 1.2e-38 is 0)
OPTIONS = ("-std=c++17",)
HAPPENED, NOT_YET = 0, 600  #: cudaSuccess, cudaErrorNotReady
CAPTURING = 1  #: cudaStreamCaptureStatusActive
USE_NODE_PRIORITY = 8  #: cudaGraphInstantiateFlagUseNodePriority


def libraries() -> tuple[Any, Any, Any]:
    """CuPy, its extensions, and the runtime of cuda-bindings, which tells of graphs what CuPy does not."""
    import cupy
    import cupyx
    from cuda.bindings import runtime

    return cupy, cupyx, runtime


class There(np.ndarray[Any, Any]):
    """An array at an address of the device. NumPy computes its views and strides as ever; to look inside would be a
    segmentation fault, so what is likely to be tried (arithmetic, an element, a copy, to print it) is refused."""

    def __repr__(self) -> str:
        return f"{self.dtype} {self.shape} at {self.ctypes.data:#x}"

    def __str__(self) -> str:
        return repr(self)

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if not all(k is None or k is Ellipsis or isinstance(k, int | slice) for k in keys):
            self._refuse()
        if sum(isinstance(k, int) for k in keys) == self.ndim and Ellipsis not in keys:
            self._refuse()
        return super().__getitem__(key)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{self!r} lies on the device: the host cannot look inside")

    __array_ufunc__ = __setitem__ = __float__ = __int__ = __bool__ = item = tolist = tobytes = copy = astype = _refuse


class Stream:
    """A stream of the device; `number` is its place in the order of making."""

    def __init__(self, raw: Any, number: int) -> None:
        self.raw, self.number, self.ptr = raw, number, int(raw.ptr)


class Graph:
    """Handles of a captured graph: of what was captured, and of what is launched. Both are destroyed with it."""

    def __init__(self, captured: int, executable: int) -> None:
        self.captured, self.executable = captured, executable


class Driver:
    """One GPU. Raises whatever CuPy raises: the device turns it into a message."""

    def __init__(self, ordinal: int) -> None:
        self.cupy, self.cupyx, self.bindings = libraries()
        cupy, self.ordinal = self.cupy, ordinal
        self.runtime, self.launcher = cupy.cuda.runtime, cupy.cuda.driver.launchKernel
        self.device = cupy.cuda.Device(ordinal)
        self.use()
        self.architecture = int(self.device.compute_capability)
        self._streams = 0
        self._modules: list[Any] = []  # a module is unloaded when nobody holds it

    def describe(self) -> dict[str, Any]:
        """What a record says of the machine."""
        properties = self.runtime.getDeviceProperties(self.ordinal)
        return {"name": properties["name"].decode(), "capability": self.architecture,
                "memory_bytes": int(properties["totalGlobalMem"]), "driver": self.runtime.driverGetVersion(),
                "runtime": self.runtime.runtimeGetVersion(), "cupy": self.cupy.__version__,
                "stream_priorities": self.priorities()}

    def use(self) -> None:
        """Makes this the calling thread's GPU; each thread that issues calls does so once. CuPy and cuda-bindings have
        a CUDA runtime each, which must mean the same one."""
        self.device.use()
        _checked(self.bindings.cudaSetDevice(self.ordinal))

    def address(self) -> str:
        """The GPU's place on the machine's bus: under two numbers, one GPU has one."""
        return str(self.runtime.deviceGetPCIBusId(self.ordinal))

    # -------------------------------------------------------------------------------------------------------- memory
    def allocate(self, nbytes: int, stream: Stream) -> Any:
        """Uninitialised bytes, from CuPy's pool of this stream: given back there, they serve this stream alone."""
        with self.device, stream.raw:
            return self.cupy.empty(nbytes, self.cupy.uint8)

    def owns(self, memory: Any) -> bool:
        return isinstance(memory, self.cupy.ndarray) and memory.device.id == self.ordinal

    def array(self, memory: Any, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...], offset: int) -> Any:
        """The strided array at byte `offset`; strides in bytes. `memory` has to be kept by others."""
        ends = [(n - 1) * s for n, s in zip(shape, strides, strict=True)] if 0 not in shape else []
        below = -sum(min(end, 0) for end in ends)  # bytes before the first element, where steps go back
        extent = below + sum(max(end, 0) for end in ends) + (np.dtype(dtype).itemsize if 0 not in shape else 0)
        there: Any = (ctypes.c_ubyte * extent).from_address(int(memory.data.ptr) + offset - below)
        return There(shape, dtype, there, below, strides)

    def pinned(self, nbytes: int) -> Any:
        """Host bytes that copies can overlap with; they live as long as the array."""
        return self.cupyx.empty_pinned(nbytes, np.uint8)

    # ------------------------------------------------------------------------------------------------------- streams
    def priorities(self) -> tuple[int, int]:
        """The least and the greatest of a stream, as CUDA counts: the greatest is the smaller number."""
        least, greatest = _checked(self.bindings.cudaDeviceGetStreamPriorityRange())
        return int(least), int(greatest)

    def stream(self, priority: int = 1) -> Stream:
        """A non-blocking stream. `priority` as lanes have it: 0 goes before 1, and -1 before both. 1 is CUDA's least:
        its numbers are negative, and one that is too large means the least without a word."""
        self._streams += 1
        least, greatest = self.priorities()
        with self.device:
            raw = self.cupy.cuda.Stream(non_blocking=True, priority=max(greatest, min(least, least - 1 + priority)))
        return Stream(raw, self._streams - 1)

    def event(self, timing: bool = False) -> Any:
        with self.device:
            return self.cupy.cuda.Event(disable_timing=not timing)

    def record(self, event: Any, stream: Stream) -> Thunk:
        return _keep(partial(self.runtime.eventRecord, event.ptr, stream.ptr), event)

    def wait(self, stream: Stream, event: Any) -> Thunk:
        return _keep(partial(self.runtime.streamWaitEvent, stream.ptr, event.ptr), event)

    def record_in_graph(self, event: Any, stream: Stream) -> Thunk:
        """A record that becomes a node when captured and then gives a time at each launch of the graph."""
        bindings = self.bindings

        def record() -> None:
            _checked(bindings.cudaEventRecordWithFlags(event.ptr, stream.ptr, bindings.cudaEventRecordExternal))

        return record

    def elapsed(self, begin: Any, end: Any) -> float:
        """Microseconds between two timed events that have happened."""
        return float(self.cupy.cuda.get_elapsed_time(begin, end)) * 1000

    def wait_for(self, event: Any) -> None:
        """Blocks the host."""
        event.synchronize()

    def happened(self, event: Any) -> bool:
        """Whether all that was issued before the last record has run; does not wait. Raises what the device failed
        with, which `event.done` of CuPy takes for not yet."""
        status = int(self.runtime.eventQuery(event.ptr))
        if status not in (HAPPENED, NOT_YET):
            raise self.runtime.CUDARuntimeError(status)
        return status == HAPPENED

    def synchronize(self, stream: Stream) -> None:
        stream.raw.synchronize()

    def synchronize_device(self) -> None:
        self.device.synchronize()

    # ---------------------------------------------------------------------------------------------------------- calls
    def launch(self, grid: cuda.Grid, stream: Stream) -> Thunk:
        """A launch of one of our kernels, its arguments packed now."""
        packed = cuda.Packed(grid)
        function = self._function(grid.source, grid.kernel)
        blocks, threads = (*grid.blocks, 1, 1)[:3], (*grid.threads, 1, 1)[:3]
        return _keep(partial(self.launcher, function, *blocks, *threads, grid.shared, stream.ptr, packed.address, 0),
                     packed, grid)

    @cache  # noqa: B019  one driver a process
    def _function(self, source: str, kernel: str) -> int:
        """The handle of a compiled kernel, loaded now; CuPy keeps compiled code on disk. Raises RuntimeError for one
        that does not compile."""
        with self.device:
            module = self.cupy.RawModule(code=cuda.text(source), options=OPTIONS, name_expressions=[kernel])
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
        """Contiguous bytes, either of which may be the host's (NumPy): pinned, or the copy is not asynchronous."""
        nbytes, kind = int(source.nbytes), self.runtime.memcpyDefault
        return _keep(partial(self.runtime.memcpyAsync, cuda.pointer(out), cuda.pointer(source), nbytes, kind,
                             stream.ptr), source, out)

    def ranges(self, name: str) -> tuple[Thunk, Thunk]:
        """Calls that open and close an NVTX range."""
        nvtx = self.cupy.cuda.nvtx
        return partial(nvtx.RangePush, name), nvtx.RangePop

    # -------------------------------------------------------------------------------------------------------- capture
    def begin_capture(self, stream: Stream) -> None:
        stream.raw.begin_capture()

    def end_capture(self, stream: Stream) -> Graph:
        """The graph of what was issued since `begin_capture`, ready to be launched. Its kernels keep the priorities of
        their streams: CuPy's own graph gives all of them that of the stream it is launched to."""
        captured = int(self.runtime.streamEndCapture(stream.ptr))
        try:
            executable = int(_checked(self.bindings.cudaGraphInstantiate(captured, USE_NODE_PRIORITY))[0])
        except BaseException:
            self.runtime.graphDestroy(captured)
            raise
        graph = Graph(captured, executable)
        weakref.finalize(graph, _destroy, self.runtime, captured, executable).atexit = False
        return graph

    def dependencies(self, graph: Graph) -> tuple[list[int], list[tuple[int, int]]]:
        """The nodes of a graph, and its edges as pairs of places in them."""
        count = _checked(self.bindings.cudaGraphGetNodes(graph.captured))[-1]
        nodes = [int(n) for n in _checked(self.bindings.cudaGraphGetNodes(graph.captured, count))[0][:count]]
        place, room = {node: i for i, node in enumerate(nodes)}, 2 * len(nodes) + 16
        # CUDA 12 has both, 13 the second alone
        get_edges = getattr(self.bindings, "cudaGraphGetEdges_v2", self.bindings.cudaGraphGetEdges)
        while True:  # to ask how many there are is an error where one of a library's edges carries data
            before, after, *_, count = _checked(get_edges(graph.captured, room))
            if count < room:
                return nodes, [(place[int(a)], place[int(b)])
                               for a, b in zip(before[:count], after[:count], strict=True)]
            room *= 2

    def abandon_capture(self, stream: Stream) -> None:
        """Ends a capture in which a call failed: what that raised says why, this would only say that
        nothing was captured."""
        with suppress(Exception):
            self.runtime.graphDestroy(self.runtime.streamEndCapture(stream.ptr))

    def frontier(self, stream: Stream) -> list[int]:
        """The nodes that the next one captured on this stream will depend on. Raises RuntimeError where the stream is
        not, or no more, captured."""
        info = getattr(self.bindings, "cudaStreamGetCaptureInfo_v3", self.bindings.cudaStreamGetCaptureInfo)  # as above
        # and the capture's number, its graph, what edges carry
        status, _, _, nodes, *_, count = _checked(info(stream.ptr))
        if int(status) != CAPTURING:
            raise RuntimeError(f"stream {stream.number} is not captured any more: something was called "
                               f"that a capture does not allow")
        return [int(n) for n in nodes[:count]]

    def replay(self, graph: Graph, stream: Stream) -> Thunk:
        """One launch of the whole graph; uploaded now."""
        self.runtime.graphUpload(graph.executable, stream.ptr)
        return _keep(partial(self.runtime.graphLaunch, graph.executable, stream.ptr), graph)


def _destroy(runtime: Any, captured: int, executable: int) -> None:
    runtime.graphExecDestroy(executable)
    runtime.graphDestroy(captured)


def _checked(result: Sequence[Any]) -> Sequence[Any]:
    """What a function of cuda-bindings returned beside its error code."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA: {error.name}")
    return values


def _keep(thunk: Any, *owners: Any) -> Thunk:
    """A call that keeps alive what its addresses point to."""
    thunk.owners = owners
    return thunk
