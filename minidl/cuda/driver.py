"""CUDA by way of CuPy: memory, streams, events, copies, our kernels, capture. The only file that imports CuPy.

Whatever is issued more than once is a prebuilt call without arguments (`Thunk`). Knows arrays and addresses, no tensors,
tasks or schedules. The tests put another driver in its place, which runs everything on the CPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ..kernels import Thunk, cuda

OPTIONS = ("-std=c++17",)
#: where wheels and installations of CUDA keep its headers, below `nvidia` or by themselves
HEADERS = ("cu13/include", "cuda_runtime/include")
INSTALLED = ("/usr/local/cuda/include", "/opt/cuda/include")


def headers() -> Path | None:
    """The folder with CUDA's headers for the 16-bit types; None where there is none to be found."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(base) / below for base in (spec.submodule_search_locations or ()) for below in HEADERS] if spec else []
    home = os.environ.get("CUDA_PATH") or os.environ.get("CUDA_HOME")
    places = [*wheels, *([Path(home) / "include"] if home else []), *map(Path, INSTALLED)]
    return next((place for place in places if (place / "cuda_bf16.h").is_file()), None)


class Stream:
    """A stream of the device; `number` is its place in the order of making."""

    def __init__(self, raw: Any, number: int) -> None:
        self.raw, self.number, self.ptr = raw, number, int(raw.ptr)


class Graph:
    """A captured graph: `nodes` and `edges` (pairs of places in `nodes`), and the graph that can be launched."""

    def __init__(self, raw: Any, nodes: list[int], edges: list[tuple[int, int]]) -> None:
        self.raw, self.nodes, self.edges = raw, nodes, edges


class Driver:
    """One GPU. Raises whatever CuPy raises: the device turns it into a message."""

    def __init__(self, ordinal: int) -> None:
        import cupy

        self.cupy, self.ordinal = cupy, ordinal
        self.runtime, self.launcher = cupy.cuda.runtime, cupy.cuda.driver.launchKernel
        self.device = cupy.cuda.Device(ordinal)
        self.device.use()
        self.architecture = int(self.device.compute_capability)
        self.multiprocessors = int(self.device.attributes["MultiProcessorCount"])
        self._streams = 0
        self._modules: list[Any] = []  # a module is unloaded when nobody holds it

    def describe(self) -> dict[str, Any]:
        """What a record says of the machine."""
        properties = self.runtime.getDeviceProperties(self.ordinal)
        return {"name": properties["name"].decode(), "capability": self.architecture, "memory_bytes": int(properties["totalGlobalMem"]),
                "driver": self.runtime.driverGetVersion(), "runtime": self.runtime.runtimeGetVersion(), "cupy": self.cupy.__version__}

    def use(self) -> None:
        """Makes this the calling thread's GPU; each thread that issues calls does so once."""
        self.device.use()

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
        """The strided array at byte `offset`; strides in bytes. It is NumPy's, at an address of the device: shapes and
        views are computed as ever, but the host must never look inside. `memory` has to be kept by others."""
        if 0 in shape:
            return np.empty(shape, dtype)
        extent = np.dtype(dtype).itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        there: Any = (ctypes.c_ubyte * extent).from_address(int(memory.data.ptr) + offset)
        return np.ndarray(shape, dtype, there, 0, strides)

    def pinned(self, nbytes: int) -> Any:
        """Host bytes that copies can overlap with; they live as long as the array."""
        import cupyx

        return cupyx.empty_pinned(nbytes, np.uint8)

    # ------------------------------------------------------------------------------------------------------- streams
    def stream(self, priority: int = 0) -> Stream:
        """A non-blocking stream; a lower priority goes first."""
        self._streams += 1
        with self.device:
            return Stream(self.cupy.cuda.Stream(non_blocking=True, priority=priority), self._streams - 1)

    def event(self, timing: bool = False) -> Any:
        with self.device:
            return self.cupy.cuda.Event(disable_timing=not timing)

    def record(self, event: Any, stream: Stream) -> Thunk:
        return _keep(partial(self.runtime.eventRecord, event.ptr, stream.ptr), event)

    def wait(self, stream: Stream, event: Any) -> Thunk:
        return _keep(partial(self.runtime.streamWaitEvent, stream.ptr, event.ptr), event)

    def record_in_graph(self, event: Any, stream: Stream) -> Thunk:
        """A record that becomes a node when captured and then gives a time at each launch of the graph."""
        from cuda.bindings import runtime

        external = runtime.cudaEventRecordExternal

        def record() -> None:
            _checked(runtime.cudaEventRecordWithFlags(event.ptr, stream.ptr, external))

        return record

    def elapsed(self, begin: Any, end: Any) -> float:
        """Microseconds between two timed events that have happened."""
        return float(self.cupy.cuda.get_elapsed_time(begin, end)) * 1000

    def wait_for(self, event: Any) -> None:
        """Blocks the host."""
        event.synchronize()

    def happened(self, event: Any) -> bool:
        """Whether all that was issued before the last record has run; does not wait."""
        return bool(event.done)

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
        return _keep(partial(self.launcher, function, *blocks, *threads, grid.shared, stream.ptr, packed.address, 0), packed, grid)

    @cache  # noqa: B019  one driver a process
    def _function(self, source: str, kernel: str) -> int:
        """The handle of a compiled kernel; CuPy keeps compiled code on disk."""
        with self.device:
            found = headers()
            options = (*OPTIONS, *([f"-I{found}"] if found else []))
            module = self.cupy.RawModule(code=cuda.text(source), options=options, name_expressions=[kernel])
            raw = module.get_function(kernel)
            self._modules.append((module, raw))
            return int(raw.kernel.ptr)

    def zeros(self, array: Any, stream: Stream) -> Thunk:
        return _keep(partial(self.runtime.memsetAsync, cuda.pointer(array), 0, array.nbytes, stream.ptr), array)

    def copy(self, source: Any, out: Any, stream: Stream) -> Thunk:
        """Contiguous bytes, either of which may be the host's (NumPy): pinned, or the copy is not asynchronous."""
        nbytes, kind = int(source.nbytes), self.runtime.memcpyDefault
        return _keep(partial(self.runtime.memcpyAsync, cuda.pointer(out), cuda.pointer(source), nbytes, kind, stream.ptr), source, out)

    def ranges(self, name: str) -> tuple[Thunk, Thunk]:
        """Calls that open and close an NVTX range."""
        nvtx = self.cupy.cuda.nvtx
        return partial(nvtx.RangePush, name), nvtx.RangePop

    # -------------------------------------------------------------------------------------------------------- capture
    def begin_capture(self, stream: Stream) -> None:
        stream.raw.begin_capture()

    def end_capture(self, stream: Stream) -> Graph:
        from cuda.bindings import runtime

        raw = stream.raw.end_capture()
        count = _checked(runtime.cudaGraphGetNodes(raw.graph))[1]
        nodes = [int(n) for n in _checked(runtime.cudaGraphGetNodes(raw.graph, count))[0]]
        found = _checked(runtime.cudaGraphGetEdges(raw.graph))
        pairs = _checked(runtime.cudaGraphGetEdges(raw.graph, found[-1]))
        place = {node: i for i, node in enumerate(nodes)}
        return Graph(raw, nodes, [(place[int(a)], place[int(b)]) for a, b in zip(pairs[0], pairs[1], strict=True)])

    def frontier(self, stream: Stream) -> list[int]:
        """The nodes that the next one captured on this stream will depend on."""
        from cuda.bindings import runtime

        found = _checked(runtime.cudaStreamGetCaptureInfo(stream.ptr))  # status, id, graph, dependencies, edge data, count
        return [int(n) for n in found[3][: found[-1]]]

    def replay(self, graph: Graph, stream: Stream) -> Thunk:
        """One launch of the whole graph; uploaded now."""
        graph.raw.upload(stream.raw)
        return _keep(partial(self.runtime.graphLaunch, graph.raw.graphExec, stream.ptr), graph)


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
