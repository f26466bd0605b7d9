"""A CUDA runtime that runs on the CPU and hides nothing: a driver for `minidl.cuda` without a GPU.

Streams are queues. Nothing runs when it is issued; when somebody waits, the heads of the queues run in an order drawn
from a seed, as far as events allow it. So a wait that is missing gives wrong numbers sooner or later, and with a
captured graph any order of its nodes that the edges allow may come. Kernels are those of `cuda_on_cpu`. Says nothing
about time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda_on_cpu import run, run_grid

from minidl.cuda import device as devices
from minidl.cuda.device import Cuda
from minidl.cuda.products import Side
from minidl.kernels import Thunk, cuda


class Memory(np.ndarray):
    """Bytes on the device that is not there."""


class Event:
    def __init__(self) -> None:
        self.recorded = self.reached = 0
        self.time = 0.0
        self.nodes: list[int] | None = None  # in a capture: what it stands for


class Queue:
    def __init__(self, number: int) -> None:
        self.number, self.ptr = number, 1000 + number
        self.ops: list[tuple[str, Any]] = []
        self.frontier: list[int] | None = None  # in a capture


class Graph:
    def __init__(self, calls: list[Callable[[], None]], before: list[list[int]]) -> None:
        self.calls, self.before = calls, before
        self.nodes = list(range(len(calls)))
        self.edges = [(a, b) for b, sources in enumerate(before) for a in sources]


class Runtime:
    """The interface of `minidl.cuda.driver.Driver`."""

    cupy = np
    architecture = 90

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.queues: list[Queue] = []
        self.clock = 0.0
        self.capture: Graph | None = None
        self._lock = threading.RLock()  # several threads may issue
        self.issued = 0  #: calls that went to a stream
        #: device memory and pinned host memory: copies touch it when they run, and other host memory when they are issued
        self._pool: list[Any] = []  # memory that is given back is not reused before what was issued has run
        self._ours: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    # -------------------------------------------------------------------------------------------------------- memory
    def allocate(self, nbytes: int, stream: Queue) -> Any:
        assert self.capture is None, "memory is allocated during a capture"
        raw = np.full(nbytes + 256, 0xFF, np.uint8)  # NaN: nobody has written it
        self._ours[id(raw)] = raw
        self._pool.append(raw)
        start = -raw.ctypes.data % 256
        return raw[start : start + nbytes].view(Memory)

    def owns(self, memory: Any) -> bool:
        return isinstance(memory, Memory) and id(_root(memory)) in self._ours

    def array(self, memory: Any, shape: Any, dtype: str, strides: Any, offset: int) -> Any:
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, memory, offset, strides)

    def pinned(self, nbytes: int) -> Any:
        raw = np.full(nbytes, 0xEE, np.uint8)
        self._ours[id(raw)] = raw
        return raw

    # ------------------------------------------------------------------------------------------------------- streams
    def stream(self, priority: int = 0) -> Queue:
        self.queues.append(Queue(len(self.queues)))
        return self.queues[-1]

    def event(self, timing: bool = False) -> Event:
        return Event()

    def record(self, event: Event, stream: Queue) -> Thunk:
        def issue() -> None:
            if stream.frontier is not None:
                event.nodes = list(stream.frontier)
                return
            with self._lock:
                event.nodes = None
                event.recorded += 1
                stream.ops.append(("record", (event, event.recorded)))

        return issue

    def wait(self, stream: Queue, event: Event) -> Thunk:
        def issue() -> None:
            if event.nodes is not None and self.capture is not None:
                stream.frontier = sorted({*(stream.frontier or []), *event.nodes})
            elif stream.frontier is not None:
                raise RuntimeError("a captured stream waits for an event from outside the capture")
            else:
                stream.ops.append(("wait", (event, event.recorded)))

        return issue

    def record_in_graph(self, event: Event, stream: Queue) -> Thunk:
        def reach() -> None:
            self.clock += 1
            event.time = self.clock

        def issue() -> None:
            assert stream.frontier is not None, "an external event is recorded outside a capture"
            self._issue(stream, reach)

        return issue

    def elapsed(self, begin: Event, end: Event) -> float:
        return end.time - begin.time

    def use(self) -> None:
        """There is one."""

    def happened(self, event: Event) -> bool:
        """Each look lets some of what was issued run."""
        with self._lock:
            self._turn()
            return event.reached >= event.recorded

    def wait_for(self, event: Event) -> None:
        self._drain(lambda: event.reached >= event.recorded)

    def synchronize(self, stream: Queue) -> None:
        assert self.capture is None, "the host waits during a capture"
        self._drain(lambda: not stream.ops)

    def synchronize_device(self) -> None:
        self._drain(lambda: not any(q.ops for q in self.queues))

    def _drain(self, done: Callable[[], bool]) -> None:
        while True:
            with self._lock:
                if done():
                    break
                assert self._turn(), "deadlock: every stream waits"
        with self._lock:
            if not any(q.ops for q in self.queues):
                self._pool.clear()

    def _turn(self) -> bool:
        """Runs some of one queue; False where none can go on."""
        ready = [q for q in self.queues if q.ops and not (q.ops[0][0] == "wait" and q.ops[0][1][0].reached < q.ops[0][1][1])]
        if not ready:
            return False
        queue = ready[int(self.random.integers(len(ready)))]
        for _ in range(int(self.random.integers(1, 12))):  # in bursts, so that one may run far ahead
            if not queue.ops:
                break
            kind, what = queue.ops[0]
            if kind == "wait" and what[0].reached < what[1]:
                break
            queue.ops.pop(0)
            self.clock += 1
            if kind == "record":
                what[0].reached, what[0].time = what[1], self.clock
            elif kind == "call":
                with np.errstate(all="ignore"):
                    what()
        return True

    def _issue(self, stream: Queue, call: Callable[[], None]) -> None:
        with self._lock:
            self.issued += 1
            if stream.frontier is None:
                stream.ops.append(("call", call))
                return
            assert self.capture is not None
            self.capture.calls.append(call)
            self.capture.before.append(stream.frontier)
            stream.frontier = [len(self.capture.calls) - 1]

    # ---------------------------------------------------------------------------------------------------------- calls
    def launch(self, grid: cuda.Grid, stream: Queue) -> Thunk:
        packed = cuda.Packed(grid)

        def body() -> None:
            run_grid(grid, packed, int(self.random.integers(1 << 30)))

        return lambda: self._issue(stream, body)

    def zeros(self, array: Any, stream: Queue) -> Thunk:
        return lambda: self._issue(stream, lambda: run(cuda.Zeros(array)) if array.size else None)

    def copy(self, source: Any, out: Any, stream: Queue) -> Thunk:
        def issue() -> None:
            pageable = [a for a in (source, out) if id(_root(a)) not in self._ours]
            given = source.copy() if any(a is source for a in pageable) else source
            self._issue(stream, lambda: run(cuda.Copy(given, out)))
            if any(a is out for a in pageable):
                self.synchronize(stream)

        return issue

    def ranges(self, name: str) -> tuple[Thunk, Thunk]:
        return (lambda: None), (lambda: None)

    # -------------------------------------------------------------------------------------------------------- capture
    def begin_capture(self, stream: Queue) -> None:
        assert self.capture is None
        self.capture, stream.frontier = Graph([], []), []

    def frontier(self, stream: Queue) -> list[int]:
        assert stream.frontier is not None, "this stream is not part of the capture"
        return list(stream.frontier)

    def end_capture(self, stream: Queue) -> Graph:
        assert self.capture is not None
        graph = Graph(self.capture.calls, self.capture.before)
        joined, stack = set(), list(stream.frontier or [])
        while stack:
            node = stack.pop()
            if node not in joined:
                joined.add(node)
                stack += graph.before[node]
        self.capture = None
        for queue in self.queues:
            open_ends, queue.frontier = set(queue.frontier or []) - joined, None
            if open_ends:
                raise RuntimeError(f"stream {queue.number} was forked and not joined")
        return graph

    def replay(self, graph: Graph, stream: Queue) -> Thunk:
        def body() -> None:
            missing = [len(set(b)) for b in graph.before]
            after: list[list[int]] = [[] for _ in graph.calls]
            for a, b in set(graph.edges):
                after[a].append(b)
            ready = [i for i, n in enumerate(missing) if not n]
            while ready:
                node = ready.pop(int(self.random.integers(len(ready))))
                graph.calls[node]()
                for n in after[node]:
                    missing[n] -= 1
                    if not missing[n]:
                        ready.append(n)

        return lambda: self._issue(stream, body)


def _root(array: Any) -> Any:
    """The array whose memory this is."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Products:
    """cuBLASLt's arithmetic, by columns, from the sides that the real one is given."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def bind(self, product: cuda.Product, stream: Queue, tf32: bool) -> Thunk:
        sides = [Side.of(a) for a in (product.b, product.a, product.out)]
        count = int(np.prod(product.out.shape[:-2], dtype=np.int64))

        def by_columns(array: Any, side: Any, i: int) -> Any:
            size = array.dtype.itemsize
            flat = np.lib.stride_tricks.as_strided(array, (1,), (size,)) if array.size else array
            first = np.lib.stride_tricks.as_strided(flat, (count, side.rows, side.columns),
                                                    (side.batch_step * size, size, side.leading * size))[i]
            return first.T if side.transposed else first

        def body() -> None:
            wide = np.float32 if product.out.dtype.itemsize == 2 else product.out.dtype
            for i in range(count):
                first, second, out = (by_columns(a, s, i) for a, s in zip((product.b, product.a, product.out), sides, strict=True))
                y = first.astype(wide) @ second.astype(wide)
                y = y if product.bias is None else y + product.bias.astype(wide)[:, None]
                y = y + out if product.accumulate else y
                out[...] = np.maximum(y, 0) if product.act else y

        return lambda: self.runtime._issue(stream, body)


class Dnn:
    """cuDNN's results, by NumPy. Where they need not repeat their bits, the last ones of a convolution's weight gradient are
    anyone's."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def bind(self, call: cuda.Convolution | cuda.Attention, stream: Queue, *, tf32: bool, deterministic: bool) -> Thunk:
        def body() -> None:
            run(call)
            if call.what == "weight_grad" and not deterministic:
                call.w[...] = np.nextafter(call.w, np.inf) if self.runtime.random.integers(2) else call.w

        return lambda: self.runtime._issue(stream, body)


def device(seed: int = 0) -> Cuda:
    """A CUDA device without a GPU, one more each time. It is known as the owner of its memory, but not found by name."""
    runtime = Runtime(seed)
    made = Cuda(runtime, lambda: Products(runtime), lambda: Dnn(runtime), "cuda:0")
    devices._devices[min(devices._devices, default=0) - 1] = made
    return made
