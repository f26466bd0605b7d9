"""Launches on CUDA: the host's cost of one, and the time between two on the device, by all ways to issue one.

Streams, events, graphs and copies go through minidl's driver, whose calls are prebuilt. For comparison: CuPy, numba,
cuBLAS, cuDNN and torch as used without minidl.

The device's time is measured with a full queue: the stream first fills memory for longer than the host needs to issue
all calls, so the time between the two events around them is only the device's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from launches import CHAINS, Missing, Row, Samples, bursts, pieces

from minidl.core.graph import View
from minidl.devices.cuda.clock import Hold
from minidl.devices.cuda.lanes import capture
from minidl.kernels import KERNELS, cuda
from minidl.kernels.registry import Thunk
from minidl.kernels.small_product import small_product

SIZES = {4: "4 B", 4 << 10: "4 KiB", 1 << 20: "1 MiB", 64 << 20: "64 MiB"}
HELD = 256 << 20  #: bytes that are filled to keep a stream busy
Issue = Callable[[], Any]


class Gpu:
    """The device, and the state that all measurements share."""

    def __init__(self, device: Any, quick: bool) -> None:
        self.device, self.driver, self.main = device, device.driver, device.main
        self.calls, self.rounds = (20, 3) if quick else (100, 40)
        self._kept = [device.allocate(HELD)]  # memory that addresses point to
        self.hold = Hold(self.driver, self.main, self._kept[0])

    def array(self, *shape: int) -> Any:
        """float32 zeros, in the form that launches accept."""
        steps = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
        self._kept.append(self.device.allocate(4 * int(np.prod(shape))))
        return self.device.array(self._kept[-1], View(0, shape, steps, 0, "float32"))

    def small(self, stream: Any, array: Any) -> Thunk:
        """A prebuilt launch of a small kernel in place."""
        (grid,) = KERNELS["relu"].cuda_calls([array], [array], [], {})
        return self.driver.launch(grid, stream)

    def times(self, issue: Issue, calls: int) -> Samples:
        """The times of calls that are issued to the main stream, or forked from it and joined. At most a few hundred
        calls may be queued, otherwise the host waits for the device."""
        issue()
        self.driver.synchronize_device()
        host = bursts(issue, calls, self.rounds, self.driver.synchronize_device)
        begin, end = self.driver.event(True), self.driver.event(True)
        first, last = self.driver.record(begin, self.main), self.driver.record(end, self.main)
        device = []
        for _ in range(self.rounds):
            self.hold(1.5 * float(np.median(host)) * calls)
            first()
            for _ in range(calls):
                issue()
            last()
            self.driver.synchronize_device()
            device.append(float(self.driver.elapsed(begin, end)) / calls)
        return {"host": host, "device": device}


def rows(device: Any, quick: bool) -> Iterator[Row]:
    """All rows for CUDA; `quick`: few samples and short chains."""
    gpu = Gpu(device, quick)

    def issued(make: Callable[..., AbstractContextManager[Issue]], *arguments: Any,
               calls: int = gpu.calls) -> Callable[[], Samples]:
        """Issues what `make` sets up again and again."""
        def measure() -> Samples:
            with make(gpu, *arguments) as issue:
                return gpu.times(issue, calls)

        return measure

    group = "a kernel"
    yield Row(group, "minidl, prebuilt launch",
              "arguments packed beforehand: what a task of a schedule costs uncaptured", issued(_prebuilt))
    for count in (0, 1, 2, 4, 8, 16):
        yield Row(group, f"CuPy RawKernel, {count} arguments", "an empty kernel of our own; each argument is an array",
                  issued(_raw, count), {"arguments": count})
    yield Row(group, "CuPy ufunc", "cupy.add(x, y, out=z) of 1024 numbers", issued(_ufunc))
    yield Row(group, "CuPy ElementwiseKernel", "the same as a kernel made from an expression", issued(_elementwise))
    for count in (0, 1, 4, 16):
        yield Row(group, f"numba.cuda kernel, {count} arrays", "an empty kernel, configured beforehand",
                  issued(_numba, count), {"arguments": count})
    yield Row(group, "torch op", "torch.add(t, 1, out=t) of 1024 numbers, on the same stream", issued(_torch))
    yield Row(group, "fill of 4 KiB", "a prebuilt cudaMemsetAsync", issued(_fill))

    group = "a library's kernel"
    yield Row(group, "cuBLAS through CuPy", "cupy.matmul of 64 x 64 matrices into a third", issued(_matmul))
    yield Row(group, "cuBLAS through nvmath",
              "gemm_ex of the same, its arguments converted at each call", issued(_gemm))
    yield Row(group, "minidl, prebuilt product",
              "cublasLt of the same by nvmath: descriptors and algorithm made beforehand", issued(_product))
    yield Row(group, "minidl, small product", "the same by our own kernel", issued(_small_product))
    yield Row(group, "cuDNN execute", "a prebuilt plan of a 1 x 1 convolution, 8 x 8 pixels, 16 channels",
              issued(_convolution))

    group = "events"
    yield Row(group, "event record", "prebuilt, without timing", issued(_record))
    yield Row(group, "stream waits for an event", "the event has happened; prebuilt", issued(_wait))
    yield Row(group, "event made", "and given back", issued(_event))
    for count in (1, 3, 7):
        yield Row(group, f"fork to and join with {count} streams", "two events for each stream, no kernels between",
                  issued(_fork, count, calls=max(1, gpu.calls // 5)), {"streams": count + 1})

    for size, said in SIZES.items():
        calls = 3 if size > 32 << 20 else 10 if size > 1 << 19 else gpu.calls
        for pinned in (True, False):
            yield Row("host to device", f"copy of {said}, {'pinned' if pinned else 'pageable'}",
                      "host memory that the device reads by itself" if pinned
                      else "ordinary host memory: the host waits while it is staged",
                      partial(_upload, gpu, size, pinned, calls), {"bytes": size, "pinned": pinned})

    for graph in (False, True):
        group = "a chain of small kernels, one graph launch" if graph else "a chain of small kernels, launch by launch"
        words = ("captured beforehand; host: its launch, shared by all kernels" if graph else
                 "prebuilt launches; device: from the first to the last, on a device that was idle")
        for n in (8, 40) if quick else (10, 100, 1000, 10_000):
            for branches, said in CHAINS.items():
                yield Row(group, f"{n} kernels, {said}", words, partial(_chain, gpu, n, branches, graph),
                          {"kernels": n, "branches": branches, "by": "graph" if graph else "stream"})
        if graph:
            yield Row(group, "100 kernels, dependent launch", "each may start before the one before it has ended",
                      partial(_dependent_chain, gpu, 100))


# -------------------------------------------------------------------------------------------------------------- kernels
@contextmanager
def _prebuilt(gpu: Gpu) -> Iterator[Issue]:
    yield gpu.small(gpu.main, gpu.array(1024))


@contextmanager
def _cupy(gpu: Gpu) -> Iterator[Any]:
    """CuPy with the main stream as its current one."""
    import cupy

    with gpu.driver.device, gpu.main.raw:
        yield cupy


@contextmanager
def _raw(gpu: Gpu, count: int) -> Iterator[Issue]:
    with _cupy(gpu) as cupy:
        parameters = ", ".join(f"float* a{i}" for i in range(count))
        kernel = cupy.RawKernel(f'extern "C" __global__ void nothing({parameters}) {{}}', "nothing")
        arguments = (cupy.zeros(1024, cupy.float32),) * count
        yield lambda: kernel((1,), (32,), arguments)


@contextmanager
def _ufunc(gpu: Gpu) -> Iterator[Issue]:
    with _cupy(gpu) as cupy:
        x, y, z = (cupy.ones(1024, cupy.float32) for _ in range(3))
        yield lambda: cupy.add(x, y, out=z)


@contextmanager
def _elementwise(gpu: Gpu) -> Iterator[Issue]:
    with _cupy(gpu) as cupy:
        kernel = cupy.ElementwiseKernel("float32 x, float32 y", "float32 z", "z = x + y", "minidl_bench_add")
        x, y, z = (cupy.ones(1024, cupy.float32) for _ in range(3))
        yield lambda: kernel(x, y, z)


@contextmanager
def _numba(gpu: Gpu, count: int) -> Iterator[Issue]:
    with _cupy(gpu) as cupy:
        from numba import cuda as numba_cuda

        space: dict[str, Any] = {}
        exec(f"def nothing({', '.join(f'a{i}' for i in range(count))}):\n    pass\n", space)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numba warns about a grid of one block, which is intended here
            configured = numba_cuda.jit(space["nothing"])[1, 32, numba_cuda.external_stream(gpu.main.ptr)]
        arguments = [numba_cuda.as_cuda_array(cupy.zeros(1024, cupy.float32)) for _ in range(count)]
        yield lambda: configured(*arguments)


@contextmanager
def _torch(gpu: Gpu) -> Iterator[Issue]:
    import torch

    if not torch.cuda.is_available():
        raise Missing("this torch has no CUDA")
    with torch.cuda.stream(torch.cuda.ExternalStream(gpu.main.ptr)):
        t = torch.zeros(1024, device="cuda")
        yield lambda: torch.add(t, 1.0, out=t)


@contextmanager
def _fill(gpu: Gpu) -> Iterator[Issue]:
    yield gpu.driver.zeros(gpu.array(1024), gpu.main)


# ------------------------------------------------------------------------------------------------------------ libraries
@contextmanager
def _matmul(gpu: Gpu) -> Iterator[Issue]:
    with _cupy(gpu) as cupy:
        a, b, c = (cupy.ones((64, 64), cupy.float32) for _ in range(3))
        yield lambda: cupy.matmul(a, b, out=c)


@contextmanager
def _gemm(gpu: Gpu) -> Iterator[Issue]:
    from nvmath.bindings import cublas

    handle = cublas.create()
    try:
        cublas.set_stream(handle, gpu.main.ptr)  # must come first: it resets the workspace
        workspace = gpu.array(8 << 20)
        cublas.set_workspace(handle, cuda.pointer(workspace), workspace.nbytes)
        a, b, c = (cuda.pointer(gpu.array(64, 64)) for _ in range(3))
        factors = np.array([1, 0], np.float32)
        one, nothing, kind = factors.ctypes.data, factors[1:].ctypes.data, 0  # CUDA_R_32F
        how = int(cublas.ComputeType.COMPUTE_32F), int(cublas.GemmAlgo.DFALT)
        yield lambda: cublas.gemm_ex(handle, 0, 0, 64, 64, 64, one, a, kind, 64, b, kind, 64,
                                     nothing, c, kind, 64, *how)
        gpu.driver.synchronize_device()
    finally:
        cublas.destroy(handle)


@contextmanager
def _product(gpu: Gpu) -> Iterator[Issue]:
    from minidl.devices.cuda.products import Products

    yield Products(gpu.driver).bind(cuda.Product(*(gpu.array(64, 64) for _ in range(3))), gpu.main, False, small=False)


@contextmanager
def _small_product(gpu: Gpu) -> Iterator[Issue]:
    yield gpu.driver.launch(small_product(cuda.Product(*(gpu.array(64, 64) for _ in range(3)))), gpu.main)


@contextmanager
def _convolution(gpu: Gpu) -> Iterator[Issue]:
    from minidl.devices.cuda.dnn import Dnn

    x, w, y = gpu.array(1, 8, 8, 16), gpu.array(16, 1, 1, 16), gpu.array(1, 8, 8, 16)
    yield Dnn(gpu.driver).bind(cuda.Convolution("forward", x, w, y, (1, 1), (0, 0), (1, 1), 1), gpu.main)


# --------------------------------------------------------------------------------------------------------------- events
@contextmanager
def _record(gpu: Gpu) -> Iterator[Issue]:
    yield gpu.driver.record(gpu.driver.event(), gpu.main)


@contextmanager
def _wait(gpu: Gpu) -> Iterator[Issue]:
    event, other = gpu.driver.event(), gpu.device.streams((0, 1))[1]
    gpu.driver.record(event, other)()
    gpu.driver.synchronize_device()
    yield gpu.driver.wait(gpu.main, event)


@contextmanager
def _event(gpu: Gpu) -> Iterator[Issue]:
    yield gpu.driver.event


@contextmanager
def _fork(gpu: Gpu, count: int) -> Iterator[Issue]:
    fork, join = _fork_and_join(gpu, gpu.device.streams((0, *(1,) * count)))
    calls = [*fork, *join]

    def issue() -> None:
        for call in calls:
            call()

    yield issue


def _fork_and_join(gpu: Gpu, streams: list[Any]) -> tuple[list[Thunk], list[Thunk]]:
    """Calls that let the other streams begin after the first, and that let the first go on after them."""
    main, *others = streams
    if not others:
        return [], []
    start, ends = gpu.driver.event(), [gpu.driver.event() for _ in others]
    fork = [gpu.driver.record(start, main), *(gpu.driver.wait(other, start) for other in others)]
    join = [call for other, end in zip(others, ends, strict=True)
            for call in (gpu.driver.record(end, other), gpu.driver.wait(main, end))]
    return fork, join


def _upload(gpu: Gpu, size: int, pinned: bool, calls: int) -> Samples:
    host = gpu.driver.pinned(size) if pinned else np.empty(size, np.uint8)
    host[...] = 1
    out = gpu.device.allocate(size)
    return gpu.times(gpu.driver.copy(host, out, gpu.main), calls)


# --------------------------------------------------------------------------------------------------------------- chains
def _program(gpu: Gpu, n: int, branches: int) -> list[Thunk]:
    """Calls for n small kernels on `branches` streams at the same time; 0: on two streams in turn."""
    streams = gpu.device.streams((0, *(1,) * ((branches or 2) - 1)))
    kernels = [gpu.small(stream, gpu.array(1024)) for stream in streams]
    fork, join = _fork_and_join(gpu, streams)
    if branches:
        order = sorted((i, b) for b, piece in enumerate(pieces(n, branches)) for i in piece)
        return [*fork, *(kernels[b] for _, b in order), *join]
    calls = list(fork)
    for i in range(n):
        if i:
            event = gpu.driver.event()
            calls += [gpu.driver.record(event, streams[(i - 1) % 2]), gpu.driver.wait(streams[i % 2], event)]
        calls.append(kernels[i % 2])
    return [*calls, *join]


def _dependent_chain(gpu: Gpu, n: int) -> Samples:
    gpu.device.dependent_launch = True
    try:
        return _chain(gpu, n, 1, True)
    finally:
        gpu.device.dependent_launch = False


def _chain(gpu: Gpu, n: int, branches: int, graph: bool) -> Samples:
    program = _program(gpu, n, branches)

    def issue() -> None:
        for call in program:
            call()

    issue()  # loads modules, which a capture does not allow
    gpu.driver.synchronize_device()
    if not graph:
        return _between_events(gpu, issue, n)
    begin = perf_counter()
    launch = gpu.driver.replay(capture(gpu.driver, gpu.main, issue), gpu.main)
    made = (perf_counter() - begin) * 1e6
    found = _between_events(gpu, launch, n, before=launch)
    return {**found, "launch": [h * n for h in found["host"]], "capture": [made]}


def _between_events(gpu: Gpu, issue: Issue, n: int, before: Issue = lambda: None) -> Samples:
    """Times per kernel: single calls are issued to an idle device; a graph is issued behind a running one, so that its
    launch is not part of the device's time."""
    begin, end = gpu.driver.event(True), gpu.driver.event(True)
    first, last = gpu.driver.record(begin, gpu.main), gpu.driver.record(end, gpu.main)
    host, device = [], []
    for _ in range(gpu.rounds + 3):
        before()
        first()
        start = perf_counter()
        issue()
        host.append((perf_counter() - start) / n * 1e6)
        last()
        gpu.driver.synchronize_device()
        device.append(float(gpu.driver.elapsed(begin, end)))
    return {"host": host[3:], "device": [d / n for d in device[3:]], "whole": device[3:]}
