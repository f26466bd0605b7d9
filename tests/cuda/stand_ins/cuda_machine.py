"""A GPU that is not there, behind the calls of CuPy and cuda-bindings that `minidl.devices.cuda.driver` makes.

Streams are queues. Nothing runs when it is issued; when somebody waits, the heads of the queues run in an order drawn
from a seed, as far as events allow it. So a wait that is missing gives wrong numbers sooner or later, and with a
captured graph any order of its nodes that the edges allow may come. A kernel whose edge is programmatic may start
before the kernel before it has ended, and is blocked at its wait. Says nothing about time.

As strict as the API, or stricter: calls are held against the installed functions (`cuda_signatures`); addresses must
lie in memory that somebody still holds; a capture refuses what CUDA refuses there, and kernels that were never launched
before. Several threads may capture at once, each with streams of its own; nobody may wait for the device meanwhile,
whatever the mode, nor allocate if one mode is global (CUDA C++ Programming Guide, "Prohibited and Unhandled Operations"
of stream capture; Runtime API, `cudaThreadExchangeStreamCaptureMode`). What a GPU takes without a word is refused as
well: a stream's priority that has no effect, and a graph's time that holds the host's launch.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import re
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda_on_cpu import run_packed
from cuda_signatures import checked, installed

from minidl.kernels import cuda

COPY_DEFAULT, EXTERNAL = 4, 1  #: cudaMemcpyDefault, cudaEventRecordExternal
SUCCESS, INVALID, NOT_READY = 0, 1, 600  #: of cudaError_t
Errors = enum.IntEnum("Errors", {"cudaErrorLossyQuery": 402})
SMS = 132  #: multiprocessors
LEAST, GREATEST = 0, -5  #: priorities of streams
USE_NODE_PRIORITY = 8  #: cudaGraphInstantiateFlagUseNodePriority
SET_AT_LAUNCH, WHILE, IF = 1, 1, 0  #: cudaGraphCondAssignDefault, cudaGraphCondTypeWhile, cudaGraphCondTypeIf
GLOBAL, RELAXED = 0, 2  #: cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed
ENDLESS = 10_000  #: turns of a loop on the device
PROGRAMMATIC = 6  #: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
NOT_CAPTURED, CAPTURED = 0, 1  #: of cudaStreamCaptureStatus
_handles = itertools.count(1 << 20, 16)  #: of streams, events, functions and graphs: no two machines share one


class Event:
    def __init__(self, timed: bool) -> None:
        self.timed, self.recorded, self.reached = timed, 0, 0
        self.time: float | None = None
        self.early = False  # recorded on an idle stream, to which a graph was launched then
        self.nodes: list[int] | None = None  # recorded in a capture: what it stands for
        self.capture: Graph | None = None


class Queue:
    def __init__(self, priority: int = LEAST) -> None:
        self.priority = priority
        self.ops: list[tuple[str, Any]] = []
        self.frontier: list[int] | None = None  # in a capture
        self.capture: Graph | None = None  # that one
        self.destroyed = False
        self.sms: range | None = None  # those that its work uses, None: all


class Graph:
    """Calls, the calls before each, the memory that each touches, and the priority of its stream."""

    def __init__(self, origin: Queue) -> None:
        self.origin, self.thread, self.mode = origin, 0, RELAXED  # of the capture
        self.calls: list[Callable[..., None]] = []
        self.before: list[list[int]] = []
        self.touched: list[Sequence[tuple[int, int]]] = []
        self.priorities: list[int] = []
        self.numbers: list[int] = []  # handles of the nodes
        self.condition: Any = None  # of a loop: its memory, to which a handle is the address
        self.body: Graph | None = None  # what a loop repeats
        self.around: Graph | None = None  # the loop around a body
        self.kernels: dict[int, Queue] = {}  # nodes that are kernels of ours, and their streams
        self.early: dict[int, int] = {}  # a kernel, and the one that may start before it has ended

    def add(self, call: Callable[..., None], before: list[int], touched: Sequence[tuple[int, int]] = (),
            priority: int = LEAST) -> int:
        """The handle of a new node."""
        self.calls.append(call)
        self.before.append(before)
        self.touched.append(touched)
        self.priorities.append(priority)
        self.numbers.append(made := next(_handles))
        return made


class Executable:
    """What is launched of a graph."""

    def __init__(self, graph: Graph, flags: int) -> None:
        self.graph, self.flags, self.uploaded = graph, flags, False

    def priorities(self, stream: Queue) -> list[int]:
        """Of its nodes, when it is launched to a stream."""
        return self.graph.priorities if self.flags & USE_NODE_PRIORITY else [stream.priority] * len(self.graph.calls)


class Blocks:
    """Pieces of memory by address: which of them somebody holds."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._lock = threading.Lock()
        self._given_back: deque[int] = deque()  # by whoever collects garbage, in the middle of anything

    def add(self, start: int, nbytes: int) -> None:
        with self._lock:
            self._remove()
            at = bisect_right(self._starts, start)
            self._starts.insert(at, start)
            self._ends.insert(at, start + nbytes)

    def give_back(self, start: int) -> None:
        self._given_back.append(start)

    def _remove(self) -> None:
        while self._given_back:
            at = bisect_right(self._starts, start := self._given_back.popleft()) - 1
            assert self._starts[at] == start
            del self._starts[at], self._ends[at]

    def hold(self, start: int, nbytes: int) -> bool:
        """Whether these bytes lie in one piece."""
        with self._lock:
            self._remove()
            at = bisect_right(self._starts, start) - 1
            return at >= 0 and start + nbytes <= self._ends[at]


class Machine:
    """Memory, streams, events, kernels and graphs, known by addresses and handles."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.clock = 0.0
        self.lock = threading.RLock()  # several threads may issue
        self.issued = 0  #: calls that went to a stream
        self.queues: dict[int, Queue] = {}
        self.events: dict[int, Event] = {}
        self.functions: dict[int, tuple[str, str]] = {}
        self.sizes: dict[int, list[int]] = {}  #: of a function: bytes of its parameters
        self.launched: set[Any] = set()  #: what has been loaded by a launch outside of a capture
        self.graphs: dict[int, Graph] = {}
        self.executables: dict[int, Executable] = {}
        self.captures: list[Graph] = []  #: those that have begun and not ended, of all threads
        self.device, self.pinned = Blocks(), Blocks()
        self._given_back: list[Any] = []  # memory that is not reused before what was issued has run

    # -------------------------------------------------------------------------------------------------------- memory
    def allocate(self, nbytes: int, blocks: Blocks, fill: int) -> Any:
        """Bytes that are held as long as what is returned lives, and then kept until nothing uses them."""
        if any(graph.mode == GLOBAL for graph in self.captures):
            raise RuntimeError("memory is allocated while a thread captures in the global mode")
        raw = np.full(nbytes + 256, fill, np.uint8)  # nobody has written it
        start = raw.ctypes.data + -raw.ctypes.data % 256
        held = (ctypes.c_ubyte * nbytes).from_address(start)
        blocks.add(start, nbytes)
        weakref.finalize(held, self._give_back, raw, start, blocks).atexit = False
        return held

    def _give_back(self, raw: Any, start: int, blocks: Blocks) -> None:
        blocks.give_back(start)
        self._given_back.append(raw)

    def check_held(self, start: int, nbytes: int, what: str) -> None:
        assert self.device.hold(start, nbytes), (
            f"{what}: {nbytes} bytes at {start:#x} are no memory of the device that is held")

    # ------------------------------------------------------------------------------------------------------- issuing
    def issue(self, stream: int, call: Callable[[], None], touched: Sequence[tuple[int, int]] = (),
              loads: Any = None, kernel: bool = False, early: bool = False, timed: bool = False) -> None:
        """`touched`: (address, bytes) of the device's memory; `loads`: what is loaded when it is called first; `early`:
        whether it, a `kernel`, may start before the kernel before it has ended; `timed`: whether it is an event."""
        for start, nbytes in touched:
            self.check_held(start, nbytes, "a call")
        queue = self.queues[stream]
        with self.lock:
            self.issued += 1
            if queue.frontier is None:
                assert not early, "a launch outside of a capture may start early: that was never meant"
                self.launched.add(loads)
                queue.ops.append(("call", call))
                return
            graph = queue.capture
            assert graph is not None
            assert graph.thread == threading.get_ident(), "a thread issues work to a stream that another one captures"
            assert loads is None or loads in self.launched, f"{loads} is loaded during a capture"
            assert graph.around is None or not timed, "a body of a loop may have no events"
            if early:
                assert [graph.kernels.get(node) for node in queue.frontier] == [queue], (
                    "a launch may start early, and what is before it is not one kernel of its stream")
                graph.early[queue.frontier[0]] = len(graph.calls)
            if kernel:
                graph.kernels[len(graph.calls)] = queue
            graph.add(call, queue.frontier, touched, queue.priority)
            queue.frontier = [len(graph.calls) - 1]

    def record(self, event: Event, queue: Queue) -> None:
        with self.lock:
            if queue.frontier is not None:
                assert queue.capture is not None
                assert queue.capture.thread == threading.get_ident(), "a thread records in another one's capture"
                event.nodes, event.capture = list(queue.frontier), queue.capture
                return
            event.nodes, event.early = None, False
            event.recorded += 1
            queue.ops.append(("record", (event, event.recorded)))

    def wait(self, queue: Queue, event: Event) -> None:
        with self.lock:
            if event.nodes is not None:
                assert event.capture in self.captures, "a stream waits for an event of a capture that has ended"
                assert queue.capture in (None, event.capture), "a stream of one capture waits for another capture"
                queue.capture = event.capture
                queue.frontier = sorted({*(queue.frontier or []), *event.nodes})
            elif queue.frontier is not None:
                raise AssertionError("a captured stream waits for an event from outside the capture")
            else:
                queue.ops.append(("wait", (event, event.recorded)))

    def mark(self, event: Event) -> None:
        """What a node does that records an event."""
        self.clock += 1
        event.time = self.clock

    def destroy_stream(self, stream: int) -> None:
        """What was issued to it runs to its end."""
        self.queues[stream].destroyed = True

    def _forget(self) -> None:
        """Gives back what nothing uses any more."""
        with self.lock:
            for stream in [s for s, q in self.queues.items() if q.destroyed and not q.ops]:
                del self.queues[stream]
            if not any(q.ops for q in self.queues.values()):
                self._given_back.clear()

    # ------------------------------------------------------------------------------------------------------- running
    def until(self, done: Callable[[], bool]) -> None:
        while True:
            with self.lock:
                if done():
                    break
                if self.turn():
                    continue
                self.check_stuck()
            time.sleep(1e-6)
        self._forget()

    def check_stuck(self) -> None:
        """Nothing can go on: raises AssertionError unless somebody else will change that."""
        raise AssertionError("deadlock: every stream waits")

    def turn(self) -> bool:
        """Runs some of one queue; False where none can go on."""
        with self.lock:
            ready = [q for q in self.queues.values()
                     if q.ops and not (q.ops[0][0] == "wait" and q.ops[0][1][0].reached < q.ops[0][1][1])]
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

    def not_in_capture(self, what: str) -> None:
        """Refuses what would become a part of the calling thread's capture, or end it."""
        assert all(graph.thread != threading.get_ident() for graph in self.captures), f"{what} during a capture"

    # ------------------------------------------------------------------------------------------------------- capture
    def begin_capture(self, stream: int, mode: int, into: int | None = None) -> None:
        assert mode in (GLOBAL, RELAXED)
        with self.lock:
            queue = self.queues[stream]
            assert queue.frontier is None, "a stream is captured twice"
            graph, queue.frontier = Graph(queue) if into is None else self.graphs[into], []
            assert not graph.calls, "a body of a loop is captured twice"
            graph.origin, graph.thread, graph.mode = queue, threading.get_ident(), mode
            queue.capture = graph
            self.captures.append(graph)

    def make_graph(self) -> int:
        self.graphs[made := next(_handles)] = Graph(Queue())
        return made

    def make_condition(self, graph: int, value: int, flags: int) -> int:
        """The handle of a condition: its address, to which the stand-in of the kernels writes."""
        assert flags == SET_AT_LAUNCH
        made = self.graphs[graph].condition = ctypes.c_uint(value)
        return ctypes.addressof(made)

    def add_loop(self, graph: int, handle: int) -> int:
        """The empty body of a loop that is all of a graph."""
        whole = self.graphs[graph]
        assert ctypes.addressof(whole.condition) == handle, "the condition belongs to another graph"
        assert whole.body is None
        self.graphs[made := next(_handles)] = whole.body = Graph(Queue())
        whole.body.around = whole
        whole.condition.default = whole.condition.value
        return made

    def add_node(self, graph: int, after: Sequence[Any] | None, call: Callable[[], None]) -> int:
        """The handle of a node, after nodes of the same graph."""
        found = self.graphs[graph]
        return found.add(call, [found.numbers.index(int(node)) for node in after or ()])

    def update(self, executable: int, graph: int) -> None:
        """The graph takes the place of another one with equal edges."""
        found, new = self.executables[executable], self.graphs[graph]
        assert found.graph.before == new.before, "a graph is updated to one of another shape"
        found.graph = new

    def end_capture(self, stream: int) -> int:
        """The handle of what was captured."""
        with self.lock:
            queue = self.queues[stream]
            graph = queue.capture
            assert graph is not None
            assert queue is graph.origin, "a capture ends on the stream that it began on"
            joined, stack = set(), list(queue.frontier or [])
            while stack:
                node = stack.pop()
                if node not in joined:
                    joined.add(node)
                    stack += graph.before[node]
            number = next((n for n, g in self.graphs.items() if g is graph), 0) or next(_handles)
            self.captures.remove(graph)
            mine = [(i, q) for i, q in enumerate(self.queues.values()) if q.capture is graph]
            unjoined = [i for i, q in mine if set(q.frontier or []) - joined]
            for _, other in mine:
                other.frontier = other.capture = None
        assert not unjoined, f"stream {unjoined[0]} was forked and not joined"
        self.graphs[number] = graph
        return number

    def destroy_graph(self, number: int) -> None:
        found = self.graphs.pop(number)
        assert found.around is None, "the body of a loop is destroyed by itself"
        for other in [n for n, g in self.graphs.items() if g.around is found]:
            del self.graphs[other]

    def instantiate(self, number: int, flags: int) -> int:
        self.executables[made := next(_handles)] = Executable(self.graphs[number], flags)
        return made

    def upload(self, number: int, stream: int) -> None:
        assert self.queues[stream].frontier is None, "a graph is uploaded to a stream that is captured"
        self.executables[number].uploaded = True

    def launch_graph(self, number: int, stream: int) -> None:
        graph, queue = self.executables[number].graph, self.queues[stream]
        assert queue.frontier is None, "a graph is launched to a stream that is captured"
        assert self.executables[number].uploaded, "a graph is launched that was not uploaded: the first launch does it"
        with self.lock:
            if all(kind == "record" for kind, _ in queue.ops):
                for _, (event, _) in queue.ops:
                    event.early = True

        whole, graph = graph, graph.body or graph

        def loop() -> None:
            whole.condition.value = whole.condition.default
            for _ in range(ENDLESS):
                if not whole.condition.value:
                    return
                body()
            raise AssertionError("a loop on the device does not end")

        def body() -> None:
            after: list[list[int]] = [[] for _ in graph.calls]
            missing = [len(set(b)) for b in graph.before]
            for node, sources in enumerate(graph.before):
                for source in set(sources):
                    after[source].append(node)
            ready = [i for i, n in enumerate(missing) if not n]
            while ready:
                node = ready.pop(int(self.random.integers(len(ready))))
                follower = graph.early.get(node)
                if follower is not None and self.random.random() < 0.5:  # it starts, and then waits for this one
                    graph.calls[follower](graph.calls[node])
                    ended = [node, follower]
                else:
                    graph.calls[node]()
                    ended = [node]
                for n in (n for done in ended for n in after[done]):
                    missing[n] -= 1
                    if not missing[n] and n not in ended:
                        ready.append(n)

        self.issue(stream, body if graph is whole else loop, [place for places in graph.touched for place in places])

    # -------------------------------------------------------------------------------------------------- CuPy's runtime
    def memset(self, ptr: int, value: int, size: int, stream: int) -> None:
        if size:
            self.issue(stream, lambda: ctypes.memset(ptr, value, size) and None, [(ptr, size)])

    def memcpy(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        assert kind == COPY_DEFAULT
        assert size, "a copy of nothing"
        device = [p for p in (dst, src) if self.device.hold(p, size)]
        pinned = [p for p in (dst, src) if p not in device and self.pinned.hold(p, size)]
        pageable = [p for p in (dst, src) if p not in device and p not in pinned]
        assert device, f"a copy from {src:#x} to {dst:#x} touches no memory of the device that is held"
        assert not pageable or self.queues[stream].frontier is None, "pageable memory is copied in a capture"
        # it is read at once
        saved = np.frombuffer((ctypes.c_ubyte * size).from_address(src), np.uint8).copy() if src in pageable else None

        def body() -> None:
            assert all(self.pinned.hold(p, size) for p in pinned), ("pinned memory was given "
                                                                    "back before its copy has run")
            ctypes.memmove(dst, src if saved is None else saved.ctypes.data, size)

        self.issue(stream, body, [(p, size) for p in device])
        if dst in pageable:
            self.synchronize_stream(stream)

    def query(self, event: int) -> int:
        found = self.events[event]
        assert found.nodes is None, "an event of a capture is asked for"
        self.turn()  # each look lets some of what was issued run
        return SUCCESS if found.reached >= found.recorded else NOT_READY

    def synchronize_event(self, event: int) -> None:
        found = self.events[event]
        assert found.nodes is None, "an event of a capture is waited for"
        self.until(lambda: found.reached >= found.recorded)

    def synchronize_stream(self, stream: int) -> None:
        queue = self.queues[stream]
        assert queue.frontier is None, "the host waits for a stream that is captured"
        self.until(lambda: not queue.ops)

    def synchronize(self) -> None:
        with self.lock:
            assert not self.captures, "the host waits for the device during a capture"
        self.until(lambda: not any(q.ops for q in self.queues.values()))

    def elapsed(self, begin: int, end: int) -> float:
        """Milliseconds."""
        first, last = self.events[begin], self.events[end]
        assert all(e.timed for e in (first, last)), "events without timing are asked for a time"
        assert None not in (first.time, last.time), "events are asked for a time that have not happened"
        assert not first.early, "the time of a graph begins on an idle stream: it holds the host's launch"
        return (last.time - first.time) / 1000

    def launch(self, f: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int, stream: int,
               params: int, extra: int, early: bool = False) -> None:
        """What is launched takes the values that its parameters have now."""
        assert extra == 0
        source, kernel = self.functions[f]
        if not source:  # of somebody else, with nothing to do
            self.issue(stream, lambda: None, (), f"{kernel} of a benchmark")
            return
        kinds, sizes = cuda.signature(source, kernel), self.sizes[f]
        places = (ctypes.c_void_p * max(len(sizes), 1)).from_address(params)
        values = [ctypes.string_at(place, size) for place, size in zip(places, sizes, strict=False)]
        pointers = [int.from_bytes(value, "little") for kind, value in zip(kinds, values, strict=True)
                    if kind.endswith("*")]
        touched = [(p, 0) for p in pointers if p]  # an empty array may lie at the end

        def body(*before: Callable[[], None]) -> None:
            run_packed(source, kernel, (gx, gy, gz), (bx, by, bz), shared, values, int(self.random.integers(1 << 30)),
                       *before)

        self.issue(stream, body, touched, f"{kernel} of {source}", kernel=True, early=early)

    def launch_with(self, config: Any, f: int, kernelParams: int, extra: int) -> None:
        """With one attribute: the launch may start early."""
        (attribute,) = config.attrs
        assert (int(attribute.id), config.numAttrs) == (PROGRAMMATIC, 1)
        assert attribute.value.programmaticStreamSerializationAllowed == 1
        self.launch(f, config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.blockDimY,
                    config.blockDimZ, config.sharedMemBytes, int(config.hStream), kernelParams, extra, True)


# -------------------------------------------------------------------------------------------------------- their modules
def cupy(machine: Machine) -> Any:
    """What the driver uses of CuPy, on a machine."""
    real = installed("cupy")
    part = (lambda path: _part(real, path)) if real else (lambda path: None)
    constants = {"memcpyDefault": COPY_DEFAULT, "streamCaptureModeRelaxed": 2}
    runtime = SimpleNamespace(CUDARuntimeError=RuntimeError, **constants, **checked(
        part("cuda.runtime"), memsetAsync=machine.memset, memcpyAsync=machine.memcpy, eventQuery=machine.query,
        eventRecord=lambda event, stream: machine.record(machine.events[event], machine.queues[stream]),
        streamWaitEvent=lambda stream, event, flags=0: machine.wait(machine.queues[stream], machine.events[event]),
        graphLaunch=lambda graphExec, stream: machine.launch_graph(graphExec, stream),
        graphUpload=lambda graphExec, stream: machine.upload(graphExec, stream),
        streamEndCapture=machine.end_capture, streamSynchronize=machine.synchronize_stream,
        streamBeginCapture=machine.begin_capture, graphDestroy=lambda graph: machine.destroy_graph(graph),
        graphExecDestroy=lambda graphExec: machine.executables.pop(graphExec) and None,
        streamGetPriority=lambda stream: machine.queues[stream].priority,
        deviceGetPCIBusId=lambda device: f"0000:{id(machine):x}:00.0",
        getDeviceProperties=lambda device: {"name": b"a GPU that is not there", "totalGlobalMem": 1 << 37,
                                             "l2CacheSize": 1 << 26, "multiProcessorCount": SMS,
                                             "maxThreadsPerMultiProcessor": 2048},
        driverGetVersion=lambda: 13000, runtimeGetVersion=lambda: 13020))
    driver = SimpleNamespace(**checked(part("cuda.driver"), launchKernel=machine.launch))
    depth = [0]

    def pop() -> None:
        depth[0] -= 1
        assert depth[0] >= 0, "a range is closed that was not opened"

    nvtx = SimpleNamespace(**checked(
        part("cuda.nvtx"), RangePush=lambda message, id_color=-1: depth.__setitem__(0, depth[0] + 1), RangePop=pop))
    where = threading.local()  # the device and the stream in force

    class Context:
        """What `with` puts in force."""

        def __enter__(self) -> Any:
            where.found = [*getattr(where, "found", []), self]
            return self

        def __exit__(self, *_: object) -> None:
            assert where.found.pop() is self

    class Device(Context):
        compute_capability = "90"

        def __init__(self, device: int) -> None:
            self.id = device

        def use(self) -> Any:
            return self

        def synchronize(self) -> None:
            machine.synchronize()

    class Stream(Context):
        def __init__(self, non_blocking: bool = False, priority: int | None = None) -> None:
            assert non_blocking, "a stream that waits for the legacy one"
            assert GREATEST <= (priority or LEAST) <= LEAST, (
                f"priority {priority} of a stream is none from {GREATEST} to {LEAST}: CUDA would take the nearest")
            self.ptr = next(_handles)
            with machine.lock:
                machine.queues[self.ptr] = Queue(priority or LEAST)
            weakref.finalize(self, machine.destroy_stream, self.ptr).atexit = False

    class Timed:
        def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
            self.ptr = next(_handles)
            machine.events[self.ptr] = Event(not disable_timing)
            weakref.finalize(self, machine.events.pop, self.ptr).atexit = False

        def synchronize(self) -> None:
            machine.synchronize_event(self.ptr)

    class ndarray:
        """Bytes on the device."""

        shape: tuple[int, ...]

        def __init__(self, nbytes: int, dtype: Any) -> None:
            assert np.dtype(dtype) == np.uint8
            machine.not_in_capture("memory is allocated")
            assert any(isinstance(c, Stream) for c in where.found), (
                "memory is allocated from the pool of no stream of ours")
            self._held = machine.allocate(nbytes, machine.device, 0xFF)
            self.data = SimpleNamespace(ptr=ctypes.addressof(self._held))
            self.nbytes = self.size = nbytes
            self.itemsize, self.shape, self.strides, self.dtype = 1, (nbytes,), (1,), np.dtype(np.uint8)
            self.flags, self.device = SimpleNamespace(c_contiguous=True), SimpleNamespace(id=0)

        def __len__(self) -> int:
            return self.size

    class CompileException(Exception):
        pass

    class RawModule:
        def __init__(self, *, code: str, options: tuple[str, ...], name_expressions: Sequence[str] = ()) -> None:
            self.code, self.names = code, name_expressions

        def get_function(self, name: str) -> Any:
            machine.not_in_capture(f"{name} is compiled")
            if not self.names:  # a kernel that does nothing
                assert re.search(rf'extern "C" __global__ void {name}\([^)]*\) {{}}$', self.code)
                machine.functions[number := next(_handles)] = "", name
                return SimpleNamespace(kernel=SimpleNamespace(ptr=number))
            assert name in self.names
            source = next(s.name for s in cuda.SOURCES.glob("*.cu") if cuda.text(s.name) == self.code)
            cuda.signature(source, name)
            machine.functions[number := next(_handles)] = source, name
            return SimpleNamespace(kernel=SimpleNamespace(ptr=number))

    compiler = SimpleNamespace(CompileException=CompileException)
    return SimpleNamespace(
        __version__="0", uint8=np.uint8, ndarray=ndarray, empty=ndarray, RawModule=RawModule,
        cuda=SimpleNamespace(runtime=runtime, driver=driver, nvtx=nvtx, compiler=compiler, Device=Device, Stream=Stream,
                             Event=Timed, get_elapsed_time=lambda start_event, end_event: machine.elapsed(
                                 start_event.ptr, end_event.ptr)))


def cupyx(machine: Machine) -> Any:
    def empty_pinned(shape: int, dtype: Any = float) -> Any:
        assert shape, "no bytes of pinned memory"
        return np.frombuffer(machine.allocate(shape * np.dtype(dtype).itemsize, machine.pinned, 0xEE), dtype)

    return SimpleNamespace(empty_pinned=empty_pinned)


def bindings(machine: Machine) -> Any:
    """What the driver uses of cuda-bindings' runtime."""
    real = installed("cuda.bindings.runtime")

    def said(*values: Any) -> tuple[Any, ...]:
        return (real.cudaError_t.cudaSuccess if real else SUCCESS, *values)

    def nodes(numbers: Sequence[int]) -> list[Any]:
        return [real.cudaGraphNode_t(n) for n in numbers] if real else list(numbers)

    def record(event: int, stream: int, flags: int) -> tuple[Any, ...]:
        found, queue = machine.events[event], machine.queues[stream]
        assert flags == EXTERNAL
        assert queue.frontier is not None, "an external event is recorded outside a capture"
        assert found.timed
        machine.issue(stream, lambda: machine.mark(found), timed=True)
        return said()

    def get_nodes(graph: int, numNodes: int = 0) -> tuple[Any, ...]:
        numbers = machine.graphs[graph].numbers
        return said(nodes(numbers[:numNodes]), len(numbers))

    def get_edges(graph: int, numEdges: int = 0) -> tuple[Any, ...]:
        """As if a library had launched programmatically: one edge carries data, so that how many there are can not be
        asked for alone. Places that are left over are empty."""
        if not numEdges:
            return ((real.cudaError_t if real else Errors).cudaErrorLossyQuery, None, None, None, None)
        found = machine.graphs[graph]
        pairs = [(found.numbers[a], found.numbers[b]) for b, sources in enumerate(found.before)
                 for a in sources][:numEdges]
        left = [0] * (numEdges - len(pairs))
        return said(nodes([a for a, _ in pairs] + left), nodes([b for _, b in pairs] + left),
                    [None] * numEdges, len(pairs))

    def info(stream: int) -> tuple[Any, ...]:
        queue = machine.queues[stream]
        graph = queue.capture
        if queue.frontier is None or graph is None:
            return said(NOT_CAPTURED, 0, None, [], [], 0)
        found = [graph.numbers[n] for n in queue.frontier]
        return said(CAPTURED, 1, None, nodes(found), [None] * len(found), len(found))

    def graph(number: int) -> Any:
        return real.cudaGraph_t(number) if real else number

    def add_after(graph: Any, pDependencies: Any, numDependencies: int,
                  call: Callable[[], None] = lambda: None) -> tuple[Any, ...]:
        assert len(pDependencies or ()) == numDependencies
        assert real is None or all(isinstance(node, real.cudaGraphNode_t) for node in pDependencies or ())
        return said(*nodes([machine.add_node(int(graph), pDependencies, call)]))

    def add_child(graph: Any, pDependencies: Any, numDependencies: int, childGraph: int) -> tuple[Any, ...]:
        child = machine.graphs[int(childGraph)]
        return add_after(graph, pDependencies, numDependencies, lambda: [call() for call in child.calls] and None)

    def update(hGraphExec: int, hGraph: int) -> tuple[Any, ...]:
        machine.update(hGraphExec, hGraph)
        return said(None)

    def add_node(graph: Any, pDependencies: Any, dependencyData: Any, numDependencies: int,
                 nodeParams: Any) -> tuple[Any, ...]:
        asked = nodeParams.conditional
        if asked.type == IF:
            return add_after(graph, pDependencies, numDependencies)
        assert (pDependencies, dependencyData, numDependencies) == (None, None, 0)
        assert (nodeParams.type, asked.type, asked.size) == ("conditional", WHILE, 1)
        asked.phGraph_out = [made := machine.add_loop(int(graph), int(asked.handle))]
        return said(*nodes([made]))

    def node_params() -> Any:
        """With the attributes of the installed package."""
        if real:
            assert all(hasattr(real.cudaGraphNodeParams().conditional, name)
                       for name in ("handle", "type", "size", "phGraph_out"))
            assert hasattr(real.cudaGraphNodeParams(), "type")
        return SimpleNamespace(type=None, conditional=SimpleNamespace())

    def begin_into(stream: int, graph: Any, dependencies: Any, dependencyData: Any, numDependencies: int,
                   mode: Any) -> tuple[Any, ...]:
        assert (dependencies, dependencyData, numDependencies, int(mode)) == (None, None, 0, RELAXED)
        machine.begin_capture(stream, int(mode), int(graph))
        return said()

    if real:
        assert real.cudaGraphNodeType.cudaGraphNodeTypeConditional
        assert int(real.cudaGraphConditionalNodeType.cudaGraphCondTypeWhile) == WHILE
        assert int(real.cudaGraphConditionalNodeType.cudaGraphCondTypeIf) == IF
        assert int(real.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed) == RELAXED
    names = {"cudaGraphNodeParams": node_params, "cudaGraphNodeType": SimpleNamespace(
                 cudaGraphNodeTypeConditional="conditional"),
             "cudaGraphConditionalNodeType": SimpleNamespace(cudaGraphCondTypeWhile=WHILE, cudaGraphCondTypeIf=IF),
             "cudaStreamCaptureMode": SimpleNamespace(cudaStreamCaptureModeRelaxed=RELAXED)}
    return SimpleNamespace(cudaEventRecordExternal=EXTERNAL, **names, **checked(
        real, cudaGraphCreate=lambda flags: said(graph(machine.make_graph())),
        cudaGraphConditionalHandleCreate=lambda graph, defaultLaunchValue, flags: said(
            machine.make_condition(int(graph), defaultLaunchValue, flags)),
        cudaGraphAddEmptyNode=add_after, cudaGraphAddChildGraphNode=add_child, cudaGraphExecUpdate=update,
        cudaGraphAddNode=add_node, cudaStreamBeginCaptureToGraph=begin_into, cudaSetDevice=lambda device: said(),
        cudaEventRecordWithFlags=record, cudaGraphGetNodes=get_nodes,
        cudaGraphGetEdges=get_edges,
        cudaStreamGetCaptureInfo=info, cudaDeviceGetStreamPriorityRange=lambda: said(LEAST, GREATEST),
        cudaGraphInstantiate=lambda graph, flags: said(machine.instantiate(graph, flags))))


def extended(machine: Machine) -> Any:
    """What the driver uses of cuda-bindings' driver API."""
    real = installed("cuda.bindings.driver")

    def ok(*values: Any) -> tuple[Any, ...]:
        return (real.CUresult.CUDA_SUCCESS if real else SUCCESS, *values)

    def launch(*arguments: Any) -> tuple[Any, ...]:
        machine.launch_with(*arguments)
        return ok()

    def plain(*arguments: Any) -> tuple[Any, ...]:
        machine.launch(*arguments)
        return ok()

    parts: dict[int, range] = {}  # of descriptors and contexts

    def part(sms: range) -> Any:
        return SimpleNamespace(sm=SimpleNamespace(smCount=len(sms)), sms=sms)

    def split(nbGroups: int, input_: Any, flags: int, minCount: int) -> tuple[Any, ...]:
        """As on Hopper: a part has a multiple of 8."""
        assert (nbGroups, flags, input_.sms) == (1, 0, range(SMS))
        count = -(-minCount // 8) * 8
        if not 0 < count < SMS:
            return (Failed(),)
        return ok([part(range(count))], 1, part(range(count, SMS)))

    def described(resources: Any, nbResources: int) -> tuple[Any, ...]:
        assert len(resources) == nbResources == 1
        parts[number := next(_handles)] = resources[0].sms
        return ok(number)

    def context(desc: int, dev: int, flags: int) -> tuple[Any, ...]:
        assert flags == 1
        parts[number := next(_handles)] = parts[desc]
        return ok(number)

    def stream(greenCtx: int, flags: int, priority: int) -> tuple[Any, ...]:
        assert flags == 1, "a stream that waits for the legacy one"
        assert GREATEST <= priority <= LEAST
        machine.queues[number := next(_handles)] = Queue(priority)
        machine.queues[number].sms = parts[greenCtx]
        return ok(number)

    calls = checked(real, cuLaunchKernelEx=launch, cuLaunchKernel=plain, cuGreenCtxCreate=context,
                    cuDevResourceGenerateDesc=described, cuGreenCtxStreamCreate=stream,
                    cuDevSmResourceSplitByCount=split, cuDeviceGet=lambda ordinal: ok(0),
                    cuDeviceGetDevResource=lambda device, typename: ok(part(range(SMS))))
    if real:
        classes = {name: getattr(real, name) for name in (
            "CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID", "CUdevResourceType", "CUgreenCtxCreate_flags",
            "CUstream_flags")}
    else:
        ids = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=PROGRAMMATIC)
        classes = {"CUlaunchConfig": SimpleNamespace, "CUlaunchAttributeID": ids,
                   "CUlaunchAttribute": lambda: SimpleNamespace(value=SimpleNamespace()),
                   "CUdevResourceType": SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1),
                   "CUgreenCtxCreate_flags": SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1),
                   "CUstream_flags": SimpleNamespace(CU_STREAM_NON_BLOCKING=1)}
    return SimpleNamespace(**classes, **calls)


class Failed:
    """An error code of the driver API."""

    name = "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"

    def __int__(self) -> int:
        return 914


def _part(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module
