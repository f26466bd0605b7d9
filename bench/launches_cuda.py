"""Launches on CUDA: the host's cost of one, its latency, and the time between two on the device, by all ways to issue
one, over the number of nodes, by kind of node.

Streams, events, graphs and copies go through minidl's driver, whose calls are prebuilt. For comparison: CuPy, numba,
cuda.core, cuda-bindings, Triton, cuBLAS, cuDNN and torch as used without minidl.

The time between two calls is measured with a full queue: the stream first fills memory for longer than the host needs
to issue all calls, so the time between the two events around them is only the device's.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from launches import CHAINS, Bench, Missing, Row, Samples, nothing_of, pieces

from minidl.core.graph import View
from minidl.devices.cuda.clock import Hold, run, warm
from minidl.devices.cuda.driver import OPTIONS, SET_AT_LAUNCH, USE_NODE_PRIORITY, Graph, _checked, _destroy
from minidl.devices.cuda.lanes import capture
from minidl.kernels import KERNELS, cuda
from minidl.kernels.registry import Thunk
from minidl.kernels.small_product import small_product

SIZES = {4: "4 B", 1 << 20: "1 MiB", 64 << 20: "64 MiB"}
HELD = 256 << 20  #: bytes that are filled to keep a stream busy
POLLS = 20_000  #: looks of the host at a word that a kernel writes: some milliseconds
STARTING = 5.0  #: seconds that a process needs before it measures
NOTHING = 'extern "C" __global__ void nothing({}) {{}}'
Issue = Callable[[], Any]


class Gpu(Bench):
    """The device, and the state that all measurements share."""

    def __init__(self, device: Any) -> None:
        self.device, self.driver, self.main = device, device.driver, device.main
        self._kept: list[Any] = [device.allocate(HELD)]  # memory that addresses point to
        warm(self.driver, self.main)
        self.hold = Hold(self.driver, self.main, self._kept[0])
        self.flag = self.driver.pinned(4).view(np.float32)

    def array(self, *shape: int) -> Any:
        """float32 zeros, in the form that launches accept."""
        steps = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
        self._kept.append(self.device.allocate(4 * int(np.prod(shape))))
        return self.device.array(self._kept[-1], View(0, shape, steps, 0, "float32"))

    def small(self, stream: Any) -> Thunk:
        """A prebuilt launch of a small kernel in place."""
        array = self.array(1024)
        (grid,) = KERNELS["relu"].cuda_calls([array], [array], [], {})
        return self.driver.launch(grid, stream)

    def queued(self, issue: Issue, most: int = 100) -> Samples:
        """Calls that are issued to the main stream in a row, or forked from it and joined. At most a few hundred may be
        queued, otherwise the host waits for the device."""
        with self.part(0.5):
            host = self.bursts(issue, most, self.driver.synchronize_device)
        once = float(np.median(host))
        calls = max(1, min(most, int(2000 / once)))
        hold, many = partial(self.hold, 1.5 * once * calls), partial(run, [issue] * calls)
        return {"host": host, "device": [self.between(many, hold)[1] / calls for _ in self.rounds()]}

    def between(self, issue: Issue, before: Issue = lambda: None) -> tuple[float, float]:
        """Microseconds of the host for `issue`, and of the main stream between two events around it."""
        begin, end = self.driver.event(True), self.driver.event(True)
        before()
        self.driver.record(begin, self.main)()
        start = perf_counter()
        issue()
        host = (perf_counter() - start) * 1e6
        self.driver.record(end, self.main)()
        self.driver.synchronize_device()
        return host, float(self.driver.elapsed(begin, end))

    def alone(self, issue: Issue, writes: bool = False) -> Samples:
        """Single calls on an idle device. `writes`: whether a kernel sets the flag, which lies in the host's memory."""
        found: dict[str, list[float]] = {"host": [], **({"first": []} if writes else {}), "done": []}
        seen, wait = self.flag.item, self.driver.synchronize_device
        for _ in self.rounds(50, 20_000):
            self.flag[0] = 0
            begin = perf_counter()
            issue()
            issued = perf_counter()
            if writes:
                for _ in range(POLLS):
                    if seen():
                        break
                found["first"].append((perf_counter() - begin) * 1e6)
            wait()
            found["done"].append((perf_counter() - begin) * 1e6)
            found["host"].append((issued - begin) * 1e6)
            if writes and not seen():
                raise Missing("the host does not see what a kernel writes to pinned memory")
        return {kind: samples[1:] for kind, samples in found.items()}

    def graph(self, calls: list[Thunk], warm: bool = True) -> Graph:
        """These calls, captured from the main stream. `warm`: they are made once before, which loads modules."""
        if warm:
            run(calls)
        self.driver.synchronize_device()
        self._kept.append(calls)
        return capture(self.driver, self.main, partial(run, calls))

    def replay(self, graph: Graph) -> Thunk:
        return self.driver.replay(graph, self.main)

    def built(self, n: int, add: Callable[[int, Any, int], Any]) -> Graph:
        """A graph of n nodes in a row; `add(graph, nodes, count)` makes one after these."""
        bindings, after = self.driver.bindings, list[Any]()
        graph = int(_checked(bindings.cudaGraphCreate(0))[0])
        for _ in range(n):
            after = [_checked(add(graph, after or None, len(after)))[0]]
        made = Graph(graph, int(_checked(bindings.cudaGraphInstantiate(graph, USE_NODE_PRIORITY))[0]))
        weakref.finalize(made, _destroy, self.driver.runtime, made.captured, made.executable).atexit = False
        return made


# -------------------------------------------------------------------------------------------------------- ways to time
def timed(way: Callable[..., Samples]) -> Callable[..., Callable[[Gpu], Samples]]:
    """A way to time what `make(gpu, ...)` returns, with the main stream as CuPy's current one."""
    def row(make: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[Gpu], Samples]:
        def how(gpu: Gpu) -> Samples:
            with gpu.driver.device, gpu.main.raw:
                return way(gpu, make(gpu, *arguments), **options)

        return how

    return row


queued, alone = timed(Gpu.queued), timed(Gpu.alone)


def by_length(make: Callable[..., Issue], *arguments: Any, behind: bool = False) -> Callable[[Gpu], Samples]:
    """What `make(gpu, n, ...)` returns, over n, on an idle device. `behind`: behind the same, which runs, so that the
    launch is not part of the device's time."""
    def samples(gpu: Gpu, n: int) -> Samples:
        issue = make(gpu, n, *arguments)
        issue()
        found = [gpu.between(issue, issue if behind else lambda: None) for _ in gpu.rounds(most=100)][1:]
        return {"host": [host for host, _ in found], "device": [device for _, device in found]}

    return lambda gpu: gpu.over(partial(samples, gpu))


# -------------------------------------------------------------------------------------------------------------- kernels
def _null(gpu: Gpu, nbytes: int = 0, blocks: int = 1, threads: int = 32, shared: int = 0,
          stream: Any = None) -> tuple[int, ...]:
    """A null kernel as launches take it: function, grid, block, shared memory, stream, packed arguments, 0."""
    code = NOTHING.format("") if not nbytes else f"struct Bytes {{ char at[{nbytes}]; }};\n{NOTHING.format('Bytes')}"
    module = gpu.driver.cupy.RawModule(code=code, options=OPTIONS)
    function, value = module.get_function("nothing"), ctypes.create_string_buffer(max(nbytes, 1))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(value))
    gpu._kept += [module, function, value, pointers, stream]
    return (int(function.kernel.ptr), blocks, 1, 1, threads, 1, 1, shared, (stream or gpu.main).ptr,
            ctypes.addressof(pointers), 0)


def _prebuilt(gpu: Gpu, *form: int, priority: int | None = None) -> Issue:
    stream = None if priority is None else gpu.driver.stream(priority)
    return partial(gpu.driver.launcher, *_null(gpu, *form, stream=stream))


def _bindings(gpu: Gpu) -> Issue:
    call = partial(gpu.driver.extended.cuLaunchKernel, *_null(gpu))
    _checked(call())
    return call


def _core(gpu: Gpu) -> Issue:
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, Stream, launch

    Device(gpu.driver.ordinal).set_current()
    options = ProgramOptions(arch=f"sm_{gpu.driver.architecture}")
    kernel = Program(NOTHING.format(""), "c++", options).compile("cubin").get_kernel("nothing")
    return partial(launch, Stream.from_handle(gpu.main.ptr), LaunchConfig(grid=1, block=32), kernel)


def _raw(gpu: Gpu, count: int) -> Issue:
    import cupy

    kernel = cupy.RawKernel(NOTHING.format(", ".join(f"float* a{i}" for i in range(count))), "nothing")
    return partial(kernel, (1,), (32,), (cupy.zeros(1024, cupy.float32),) * count)


def _on_arrays(gpu: Gpu, what: str) -> Issue:
    """A call of CuPy on three arrays."""
    import cupy

    x, y, z = (cupy.ones((64, 64) if what == "matmul" else 1024, cupy.float32) for _ in range(3))
    if what == "elementwise":
        return partial(cupy.ElementwiseKernel("float32 x, float32 y", "float32 z", "z = x + y", "bench_add"), x, y, z)
    return partial(getattr(cupy, what), x, y, out=z)


def _numba(gpu: Gpu, count: int) -> Issue:
    import cupy
    from numba import cuda as numba_cuda

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numba warns about a grid of one block, which is intended here
        configured = numba_cuda.jit(nothing_of(count))[1, 32, numba_cuda.external_stream(gpu.main.ptr)]
    return partial(configured, *(numba_cuda.as_cuda_array(cupy.zeros(1024, cupy.float32)) for _ in range(count)))


def _torch(gpu: Gpu, compiler: Any = None) -> Issue:
    """An operation of torch on the main stream, or a kernel of Triton on its tensor."""
    import torch

    if not torch.cuda.is_available():
        raise Missing("this torch has no CUDA")
    torch.cuda.set_device(gpu.driver.ordinal)
    torch.cuda.set_stream(torch.cuda.ExternalStream(gpu.main.ptr))
    t = torch.zeros(1024, device="cuda")
    return partial(torch.add, t, 1.0, out=t) if compiler is None else partial(compiler[(1,)], t, num_warps=1)


def _triton(gpu: Gpu) -> Issue:
    import triton

    def nothing(x):  # type: ignore[no-untyped-def]  # its source is read
        pass

    return _torch(gpu, triton.jit(nothing))


def _fill(gpu: Gpu) -> Thunk:
    return gpu.driver.zeros(gpu.array(1024), gpu.main)


def _product(gpu: Gpu, small: bool) -> Any:
    """64 x 64 by 64 x 64."""
    call = cuda.Product(*(gpu.array(64, 64) for _ in range(3)))
    if small:
        return gpu.driver.launch(small_product(call), gpu.main)
    return gpu.device._products().bind(call, gpu.main, False, False)


def _convolution(gpu: Gpu) -> Any:
    x, w, y = gpu.array(1, 8, 8, 16), gpu.array(16, 1, 1, 16), gpu.array(1, 8, 8, 16)
    return gpu.device.thunks([cuda.Convolution("forward", x, w, y, (1, 1), (0, 0), (1, 1), 1)])[0]


def _copy(gpu: Gpu, way: str, size: int) -> Any:
    """`h2d`, `d2h`, `d2d`; `pageable`: to the device, from ordinary memory of the host."""
    host = np.empty(size, np.uint8) if way == "pageable" else gpu.driver.pinned(size)
    host[...] = 1
    source = gpu.device.allocate(size) if way in ("d2h", "d2d") else host
    return gpu.driver.copy(source, host if way == "d2h" else gpu.device.allocate(size), gpu.main)


# ------------------------------------------------------------------------------------------------- events and streams
def _wait(gpu: Gpu) -> Any:
    event, other = gpu.driver.event(), gpu.device.streams((0, 1))[1]
    gpu.driver.record(event, other)()
    gpu.driver.synchronize_device()
    return gpu.driver.wait(gpu.main, event)


def record_to_wait(other: bool) -> Callable[[Gpu], Samples]:
    """From an event of the busy main stream to the next event of an idle stream that waits for the first one, or of the
    same stream."""
    def how(gpu: Gpu) -> Samples:
        driver, main = gpu.driver, gpu.main
        waiting = gpu.device.streams((0, 1))[1] if other else main
        begin, hand, end = driver.event(True), driver.event(), driver.event(True)
        calls = [driver.record(begin, main), driver.record(hand, main), driver.wait(waiting, hand),
                 driver.record(end, waiting), driver.synchronize_device]
        found = []
        for _ in gpu.rounds(10, 1000):
            gpu.hold(100)
            run(calls)
            found.append(float(driver.elapsed(begin, end)))
        return {"device": found[1:]}

    return how


def _program(gpu: Gpu, n: int, branches: int) -> list[Thunk]:
    """Calls for n small kernels on `branches` streams at the same time, forked from the main one and joined; 0: on two
    streams in turn."""
    streams, driver = gpu.device.streams((0, *(1,) * ((branches or 2) - 1))), gpu.driver
    kernels, (main, *others) = [gpu.small(stream) for stream in streams], streams
    start, ends = driver.event(), [driver.event() for _ in others]
    fork = [driver.record(start, main), *(driver.wait(other, start) for other in others)] if others else []
    join = [call for other, end in zip(others, ends, strict=True)
            for call in (driver.record(end, other), driver.wait(main, end))]
    if branches:
        order = sorted((i, b) for b, piece in enumerate(pieces(n, branches)) for i in piece)
        return [*fork, *(kernels[b] for _, b in order), *join]
    calls = list(fork)
    for i in range(n):
        if i:
            event = driver.event()
            calls += [driver.record(event, streams[(i - 1) % 2]), driver.wait(streams[i % 2], event)]
        calls.append(kernels[i % 2])
    return [*calls, *join]


def _issued(gpu: Gpu, n: int, branches: int) -> Issue:
    return partial(run, _program(gpu, n, branches))


# --------------------------------------------------------------------------------------------------------------- graphs
def _chain(gpu: Gpu, n: int, branches: int) -> Thunk:
    return gpu.replay(gpu.graph(_program(gpu, n, branches)))


def _writes(gpu: Gpu, nodes: int | None) -> Any:
    """A kernel that sets the flag, launched, or as the first of a graph of small kernels."""
    (write,) = gpu.device.calls("fill", [gpu.flag], [gpu.flag], gpu.main, value=1.0)
    return write if nodes is None else gpu.replay(gpu.graph([write, *[gpu.small(gpu.main)] * (nodes - 1)]))


def _nodes(gpu: Gpu, n: int, kind: str) -> Thunk:
    """The launch of a graph of n nodes of a kind in a row."""
    driver, bindings = gpu.driver, gpu.driver.bindings
    if kind == "empty":
        return gpu.replay(gpu.built(n, bindings.cudaGraphAddEmptyNode))
    if kind == "child graph":
        child = gpu.graph([gpu.small(gpu.main)])
        return gpu.replay(gpu.built(n, lambda *at: bindings.cudaGraphAddChildGraphNode(*at, child.captured)))
    if kind == "conditional":
        return gpu.replay(gpu.built(n, partial(_condition, bindings)))
    if kind == "event":
        return gpu.replay(gpu.graph([driver.record_in_graph(driver.event(True), gpu.main)] * n, warm=False))
    gpu.device.dependent_launch = kind == "kernel, dependent"
    try:
        call = _fill(gpu) if kind == "memset" else _copy(gpu, kind, 4096) if "2" in kind else gpu.small(gpu.main)
        return gpu.replay(gpu.graph([call] * n))
    finally:
        gpu.device.dependent_launch = False


def _condition(bindings: Any, graph: int, after: Any, count: int) -> Any:
    """A node whose body, an empty graph, does not run."""
    node = bindings.cudaGraphNodeParams()
    node.type = bindings.cudaGraphNodeType.cudaGraphNodeTypeConditional
    node.conditional.handle = _checked(bindings.cudaGraphConditionalHandleCreate(graph, 0, SET_AT_LAUNCH))[0]
    node.conditional.type, node.conditional.size = bindings.cudaGraphConditionalNodeType.cudaGraphCondTypeIf, 1
    add = getattr(bindings, "cudaGraphAddNode_v2", bindings.cudaGraphAddNode)  # CUDA 12 has both
    return add(graph, after, None, count, node)


def made_ready(what: str) -> Callable[[Gpu], Samples]:
    """Times of the host for one graph of n kernels in a row."""
    def samples(gpu: Gpu, n: int) -> Samples:
        driver, bindings, program = gpu.driver, gpu.driver.bindings, [gpu.small(gpu.main)] * n
        graph, other = gpu.graph(program), gpu.graph(program)

        def instantiate() -> int:
            return int(_checked(bindings.cudaGraphInstantiate(graph.captured, USE_NODE_PRIORITY))[0])

        def upload(executable: int) -> int:
            driver.runtime.graphUpload(executable, gpu.main.ptr)
            driver.synchronize_device()
            return executable

        destroy, update = driver.runtime.graphExecDestroy, bindings.cudaGraphExecUpdate
        ways: dict[str, tuple[Any, ...]] = {
            "capture": (partial(gpu.graph, program, False),), "instantiate": (instantiate, None, destroy),
            "upload": (upload, instantiate, destroy),
            "update": (lambda: _checked(update(graph.executable, other.captured)),)}
        return {"host": gpu.singles(*ways[what], least=4, most=50)}

    return lambda gpu: gpu.over(partial(samples, gpu))


def with_connections(count: int, row: str) -> Callable[[Gpu], Samples]:
    """Another row, in a process with so many hardware queues: they are set when the GPU is first used."""
    def how(gpu: Gpu) -> Samples:
        if (left := gpu.end - perf_counter()) < STARTING:
            raise Missing(f"needs a process of its own, for which {max(left, 0):.0f} of {STARTING:g} s were left")
        command = [sys.executable, str(Path(__file__).with_name("launch_overhead.py")), "--device", gpu.device.name,
                   "--quick", "--json", "--row", row]
        done = subprocess.run(command, capture_output=True, text=True, timeout=left,
                              env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(count)})
        if done.returncode:
            raise Missing(f"a process with {count} connections ended with {done.returncode}: "
                          f"{(done.stderr.strip().splitlines() or [''])[-1]}")
        (entry,) = json.loads(done.stdout)["rows"]
        if "missing" in entry:
            raise Missing(entry["missing"])
        return {key: entry[key] for key in ("us", "fit") if key in entry}

    return how


# ---------------------------------------------------------------------------------------------------------------- rows
KERNEL, FORM, LATENCY, LIBRARY, EVENTS, NODES, READY, LAUNCHES, CHAIN, PACKAGE = (
    "a null kernel, by back end", "a null kernel, by its form", "one launch on an idle device", "a library's kernel",
    "events", "n nodes in one graph, by kind", "making a graph of n nodes", "n small kernels, launch by launch",
    "n small kernels, one graph launch", "a kernel by packages that take long to import")
FOLLOWED = "8 branches, launch by launch"
KINDS = {"kernel": "of 1024 numbers", "kernel, dependent": "each may start before the one before it has ended",
         "memset": "of 4 KiB", "h2d": "4 KiB from pinned memory", "d2h": "4 KiB to pinned memory",
         "d2d": "4 KiB on the device", "event": "an external record of one event", "empty": "",
         "child graph": "of one kernel each", "conditional": "an IF whose condition is 0"}

ROWS = (
    Row(LATENCY, "null kernel", "minidl's prebuilt launch", alone(_prebuilt)),
    Row(LATENCY, "kernel that writes", "one number to pinned memory, where the host looks",
        alone(_writes, None, writes=True)),
    Row(LATENCY, "empty graph", "no node", alone(lambda gpu: gpu.replay(gpu.built(0, lambda *at: None)))),
    *(Row(LATENCY, f"{n}-node graph", "the kernel that writes, then small ones", alone(_writes, n, writes=True))
      for n in (1, 100)),
    Row(LATENCY, "memset", "of 4 KiB", alone(_fill)),
    *(Row(LATENCY, f"copy {way}", "of 4 B, pinned", alone(_copy, way, 4)) for way in ("h2d", "d2h", "d2d")),
    Row(LATENCY, "CuPy RawKernel", "null kernel of 4 arguments", alone(_raw, 4)),

    Row(KERNEL, "minidl, prebuilt launch", "CuPy's launchKernel, arguments packed beforehand", queued(_prebuilt)),
    Row(KERNEL, "cuda-bindings cuLaunchKernel", "arguments packed beforehand", queued(_bindings)),
    Row(KERNEL, "cuda.core launch", "no arguments", queued(_core)),
    *(Row(KERNEL, f"CuPy RawKernel, {count} arguments", "each argument is an array", queued(_raw, count),
          {"arguments": count}) for count in (0, 1, 4, 16)),
    Row(KERNEL, "CuPy ufunc", "cupy.add(x, y, out=z) of 1024 numbers", queued(_on_arrays, "add")),
    Row(KERNEL, "CuPy ElementwiseKernel", "the same as a kernel of an expression", queued(_on_arrays, "elementwise")),
    Row(KERNEL, "fill of 4 KiB", "a prebuilt cudaMemsetAsync", queued(_fill)),

    *(Row(LAUNCHES, f"{shape}, launch by launch", "prebuilt; device: from the first to the last, on an idle device",
          by_length(_issued, branches), {"by": "stream", "branches": branches}) for branches, shape in CHAINS.items()),
    *(Row(CHAIN, f"{shape}, one graph", "captured beforehand; host: its launch",
          by_length(_chain, branches, behind=True), {"by": "graph", "branches": branches})
      for branches, shape in CHAINS.items()),
    *(Row(NODES, f"node: {kind}", words, by_length(_nodes, kind, behind=True), {"kind": kind})
      for kind, words in KINDS.items()),

    Row(EVENTS, "event record", "prebuilt, without timing",
        queued(lambda gpu: gpu.driver.record(gpu.driver.event(), gpu.main))),
    Row(EVENTS, "stream waits for an event", "the event has happened; prebuilt", queued(_wait)),
    Row(EVENTS, "record to wait, idle stream", "from an event to the next one on a stream that waits for it",
        record_to_wait(True)),
    Row(EVENTS, "record to wait, same stream", "the same without a change of streams", record_to_wait(False)),
    Row(EVENTS, "event made", "and given back", queued(lambda gpu: gpu.driver.event)),
    *(Row(EVENTS, f"fork to and join with {count - 1} streams", "two events for each stream, no kernels between",
          queued(_issued, 0, count, most=20), {"streams": count}) for count in (2, 4, 8)),

    *(Row(READY, what, words, made_ready(what)) for what, words in {
        "capture": "the calls issued, captured, and instantiated", "instantiate": "cudaGraphInstantiate",
        "upload": "cudaGraphUpload of a new executable graph, and waiting for it",
        "update": "cudaGraphExecUpdate to another graph of the same kind"}.items()),

    *(Row(FORM, f"{said} of arguments", "prebuilt", queued(_prebuilt, nbytes), {"argument_bytes": nbytes})
      for nbytes, said in {8: "8 B", 256: "256 B", 1024: "1 KiB", 4096: "4 KiB"}.items()),
    *(Row(FORM, f"{blocks} blocks of {threads} threads", "prebuilt", queued(_prebuilt, 0, blocks, threads),
          {"blocks": blocks, "threads": threads}) for blocks, threads in ((1, 1024), (132, 256), (10_000, 256))),
    Row(FORM, "48 KiB of shared memory", "prebuilt", queued(_prebuilt, 0, 1, 32, 48 << 10)),
    *(Row(FORM, f"stream of {words} priority", "single launches on an idle device",
          alone(partial(_prebuilt, priority=priority))) for priority, words in ((1, "lowest"), (-1, "higher"))),

    *(Row(PACKAGE, f"numba.cuda kernel, {count} arrays", "a null kernel, configured beforehand", queued(_numba, count),
          {"arguments": count}) for count in (0, 1, 4, 16)),
    Row(PACKAGE, "Triton kernel", "a null kernel of one tensor, one warp", queued(_triton)),
    Row(PACKAGE, "torch op", "torch.add(t, 1, out=t) of 1024 numbers, on the same stream", queued(_torch)),
    Row(PACKAGE, "torch op, alone", "the same on an idle device", alone(_torch)),

    Row(LIBRARY, "cuBLAS through CuPy", "cupy.matmul of 64 x 64 matrices", queued(_on_arrays, "matmul")),
    Row(LIBRARY, "minidl, prebuilt product",
        "cublasLt of the same by nvmath: descriptors and algorithm made beforehand", queued(_product, False)),
    Row(LIBRARY, "minidl, small product", "the same by our own kernel", queued(_product, True)),
    Row(LIBRARY, "cuDNN execute", "a prebuilt plan of a 1 x 1 convolution, 8 x 8 pixels, 16 channels",
        queued(_convolution)),

    *(Row("a copy", f"{way}, {said}", "ordinary memory of the host, to the device: the host waits while it is staged"
          if way == "pageable" else "host memory is pinned", queued(_copy, way, size, most=10 if size > 4 else 100),
          {"bytes": size}) for way in ("h2d", "d2h", "d2d", "pageable") for size, said in SIZES.items()),

    Row("hardware queues", "8 branches, 8 connections", f"'{FOLLOWED}' in a process with CUDA's default of queues",
        with_connections(8, FOLLOWED), {"connections": 8}),
)
