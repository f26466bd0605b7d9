"""What `minidl.devices.cuda` calls in other packages, held against those that are installed: names, parameters,
numbers; and that the machine in their place refuses what they refuse."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import cuda_blas
import cuda_dnn
import cuda_machine
import cuda_on_cpu
import cuda_runtime
import cuda_signatures
import numpy as np
import pytest
import test_gpu
from helpers import IMPORTABLE, PATIENCE, ROOT, need

import minidl as ml
from minidl import schedulers
from minidl.autograd.tape import Tape, use
from minidl.core.graph import View
from minidl.devices import DeviceError
from minidl.devices.cuda import clock, lanes, products, tuner
from minidl.devices.cuda import device as devices
from minidl.devices.cuda import driver as drivers
from minidl.devices.cuda.driver import DeviceArray, Driver
from minidl.kernels import KERNELS, cuda
from minidl.measuring import sms
from minidl.measuring.pairs import measure_pairs
from minidl.runtime.bound import Bound
from minidl.runtime.executors import GraphExecutor, TaskError


# --------------------------------------------------------------------------------------------------- installed packages
@pytest.fixture
def bare():
    """The driver of a GPU that is not there, on CuPy itself, whose every call therefore fails in CUDA."""
    need("cupy")
    need("cuda.bindings")
    import cupy

    if cupy.cuda.is_available():
        pytest.skip("there is a GPU, which would be called")
    found: Any = object.__new__(Driver)
    found.cupy, found.cupyx, found.bindings = drivers.libraries()
    found.ordinal, found._streams, found._modules, found._ours, found.architecture = 0, 0, [], {}, 90
    found.runtime, found.launcher, found.device = (cupy.cuda.runtime, cupy.cuda.driver.launchKernel,
                                                   Taken(cupy.cuda.Device(0)))
    return found


class Taken:
    """A device that has been made the current one, so that what comes after is called."""

    def __init__(self, device: Any) -> None:
        self.use, self.synchronize = device.use, device.synchronize

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class Current(nullcontext[None]):
    """A stream that has been made the current one."""

    ptr = 7


STREAM, EVENT = drivers.Stream(Current(), 0), SimpleNamespace(ptr=9)
HOST = np.zeros(4, np.float32)


def condition(bindings: Any) -> Any:
    """A condition that was never made, as the package returns one."""
    return bindings.cudaGraphConditionalHandle()


RELU = cuda.Grid("elementwise.cu", "relu<float>", (1,), (32,), (HOST, HOST, 4))
CALLS = {
    "use": lambda d: d.use(), "describe": lambda d: d.describe(), "address": lambda d: d.address(),
    "allocate": lambda d: d.allocate(8, STREAM), "pinned": lambda d: d.pinned(8), "stream": lambda d: d.stream(-1),
    "event": lambda d: d.event(True), "record": lambda d: d.record(EVENT, STREAM)(),
    "wait": lambda d: d.wait(STREAM, EVENT)(), "record_in_graph": lambda d: d.record_in_graph(EVENT, STREAM)(),
    "elapsed": lambda d: d.elapsed(EVENT, EVENT), "happened": lambda d: d.happened(EVENT),
    "device": lambda d: d.device.synchronize(), "zeros": lambda d: d.zeros(HOST, STREAM)(),
    "copy": lambda d: d.copy(HOST, HOST, STREAM)(), "launch": lambda d: d.launch(RELU, STREAM),
    "programmatic": lambda d: d.programmatic(5, (1, 1, 1, 32, 1, 1, 0), STREAM, 9)(),
    "frontier": lambda d: d.frontier(STREAM), "launcher": lambda d: d.launcher(1, 1, 1, 1, 1, 1, 1, 0, 7, 9, 0),
    "graph launch": lambda d: d.runtime.graphLaunch(5, 7), "priorities": lambda d: d.priorities(),
    "end_capture": lambda d: d.end_capture(STREAM), "replay": lambda d: d.replay(drivers.Graph(5, 6), STREAM),
    "instantiate": lambda d: drivers._checked(d.bindings.cudaGraphInstantiate(5, drivers.USE_NODE_PRIORITY)),
    "edges": lambda d: drivers._checked(d.bindings.cudaGraphGetEdges(5, 16)),
    "dependencies": lambda d: d.dependencies(drivers.Graph(5, 6)),
    "loop": lambda d: d.loop(), "add_loop": lambda d: d.add_loop(d.bindings.cudaGraph_t(5), condition(d.bindings)),
    "condition": lambda d: drivers._checked(d.bindings.cudaGraphConditionalHandleCreate(5, 1, drivers.SET_AT_LAUNCH)),
    "begin_capture": lambda d: d.begin_capture(STREAM, drivers.Loop(5, 6, 8)),
    "graphExecDestroy": lambda d: d.runtime.graphExecDestroy(6), "graphDestroy": lambda d: d.runtime.graphDestroy(5)}


@pytest.mark.may_skip
@pytest.mark.parametrize("name", CALLS)
def test_cupy_takes_the_drivers_calls(bare, name, monkeypatch):
    """Without a GPU a call that is right fails in CUDA, and one that is wrong before it gets there."""
    # CuPy's stream that could not be made has something to say when it goes
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    with pytest.raises(RuntimeError, match="cudaError|CUDA_ERROR|CUDA: |libcuda|NVIDIA driver library"):
        CALLS[name](bare)
    gc.collect()


@pytest.mark.may_skip
def test_ranges_can_be_opened_without_a_gpu(bare):
    opened, closed = bare.ranges("4W0")
    opened()
    closed()


def public(thing: Any) -> list[str]:
    return [name for name in vars(thing) if not name.startswith("_")]


def test_what_stands_for_cupy_has_what_cupy_has():
    """Names of modules, classes and methods, and the attributes that CuPy's documentation tells."""
    cupy = need("cupy")
    double = cuda_machine.cupy(cuda_machine.Machine(0))
    told = {"ptr": "Attributes"}
    for place, real in (("", cupy), ("cuda", cupy.cuda), ("cuda.runtime", cupy.cuda.runtime),
                        ("cuda.driver", cupy.cuda.driver), ("cuda.nvtx", cupy.cuda.nvtx)):
        stand_in = cuda_machine._part(double, place) if place else double
        assert not [name for name in public(stand_in) if not hasattr(real, name)], place
    for name in ("Stream", "Event", "Device"):
        ours, real = getattr(double.cuda, name), getattr(cupy.cuda, name)
        assert not [n for n in public(ours) if not hasattr(real, n) and n not in told], name
        assert "ptr" in real.__doc__ or name == "Device"
    cupy.RawModule(code="", options=drivers.OPTIONS, name_expressions=["a<float>"])
    assert cupy.RawKernel.kernel
    assert isinstance(cupy.cuda.compiler.CompileException("x", "", "", ()), Exception)


def test_numbers_are_those_of_cuda():
    runtime = need("cuda.bindings.runtime")
    errors, copies, status = runtime.cudaError_t, runtime.cudaMemcpyKind, runtime.cudaStreamCaptureStatus
    assert (errors.cudaSuccess, errors.cudaErrorNotReady) == (drivers.HAPPENED, drivers.NOT_YET)
    assert status.cudaStreamCaptureStatusActive == drivers.CAPTURING == cuda_machine.CAPTURED
    assert errors.cudaErrorLossyQuery == cuda_machine.Errors.cudaErrorLossyQuery
    assert (runtime.cudaGraphInstantiateFlags.cudaGraphInstantiateFlagUseNodePriority == drivers.USE_NODE_PRIORITY
            == cuda_machine.USE_NODE_PRIORITY)
    assert (copies.cudaMemcpyDefault,
            runtime.cudaEventRecordExternal) == (cuda_machine.COPY_DEFAULT, cuda_machine.EXTERNAL)


def test_numbers_are_those_of_cublas():
    """Also those that the products name by attributes, and the types that attributes have."""
    need("nvmath")
    types, cublas, lt = products.libraries()
    doubles = {cuda_blas.CudaDataType: types, cuda_blas.ComputeType: cublas.ComputeType,
               **{e: getattr(lt, n) for n, e in cuda_blas.ENUMS.items()}}
    for ours, real in doubles.items():
        assert {m.name: int(m) for m in ours}.items() <= {m.name: int(m) for m in real}.items()
    for kind, wanted in cuda_blas.DTYPES.items():
        assert {n: getattr(lt, f"get_{kind}_attribute_dtype")(n) for n in wanted} == wanted
    assert lt.matmul_heuristic_result_dtype == cuda_blas.HEURISTIC
    assert issubclass(lt.cuBLASLtError, Exception)


@pytest.mark.may_skip
def test_kernels_compile_as_cupy_compiles_them(bare, monkeypatch):
    """With its options, its headers and its names, for an architecture that is not there."""
    from cupy._core import core
    from cupy.cuda import compiler

    monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda arch=None: ("-arch=sm_90", "cubin"))
    options = (*core.assemble_cupy_compiler_options(drivers.OPTIONS), "-ftz=true")
    names = ["relu<__half>", "relu<__nv_bfloat16>", "add<double>"]
    code, lowered = compiler._compile_using_nvrtc_no_warning(cuda.text("elementwise.cu"), options, "90",
                                                             name_expressions=names)
    assert code[:4] == b"\x7fELF"
    assert lowered.keys() == set(names)
    assert len(set(lowered.values())) == 3


# ----------------------------------------------------------------------------------------------------------- signatures
@pytest.mark.parametrize(("arguments", "named", "message"), [
    ((1, 2), {}, "f misses its argument c"), ((1, 2, "x", 4, 5), {}, "f takes 4 arguments, not 5"),
    ((1.5, 2, "x"), {}, "f: a is intptr_t, not 1.5"), ((1, -1, "x"), {}, "f: b is unsigned int, which -1 does not fit"),
    ((1, 2, 3), {}, "f: c is str, not 3"), ((1, 2, "x"), {"e": 1}, "f has no parameter e"),
    ((1, 2, "x"), {"a": 1}, "f gets {'a'} twice"), ((1, 2, "x"), {}, None),
    ((np.int64(1),), {"b": 2, "c": "x", "d": None}, None)])
def test_a_call_that_does_not_fit_is_told(arguments, named, message):
    told = "f(intptr_t a, unsigned int b, str c, d=None) -> int\n\nDoes nothing."
    if message is None:
        cuda_signatures.check("f", told, arguments, named)
    else:
        with pytest.raises(AssertionError) as found:
            cuda_signatures.check("f", told, arguments, named)
        assert str(found.value).startswith(message)


# ------------------------------------------------------------------------------------------------- arrays of the device
LOOKS = [lambda a: a + 1, lambda a: a == a, lambda a: float(a[:1, :1].reshape(())), lambda a: a[0, 0],
         lambda a: a.tolist(), lambda a: a.copy(), lambda a: bool(a), lambda a: a.astype("float64"),
         lambda a: a.__setitem__(0, 1), lambda a: a[np.array([0])], lambda a: a.sum() + 0]


@pytest.mark.few(5)
@pytest.mark.parametrize("look", LOOKS)
def test_the_host_does_not_look_into_the_device(look):
    there = cuda_runtime.device()
    memory = there.allocate(64)
    with pytest.raises(TypeError, match=r"float32 \(.*\) at 0x[0-9a-f]+ is on the device"):
        look(there.array(memory, View(0, (3, 4), (4, 1), 0, "float32")))


def test_arrays_of_the_device_have_views_as_ever():
    there = cuda_runtime.device()
    memory = there.allocate(64)
    array = there.array(memory, View(0, (3, 4), (4, 1), 0, "float32"))
    for view, shape, offset in ((array[1:, ::2], (2, 2), 16), (array.T, (4, 3), 0), (array.reshape(-1)[5:], (7,), 20),
                                (array[2], (4,), 32), (array[..., None], (3, 4, 1), 0)):
        assert isinstance(view, DeviceArray)
        assert (view.shape, view.ctypes.data - array.ctypes.data) == (shape, offset)
    assert repr(array) == str(array) == f"float32 (3, 4) at {memory.data.ptr:#x}"
    assert f"{array}" == repr(array)


# -------------------------------------------------------------------------------------------------------------- capture
def kernel(there: Any, stream: Any, memory: Any) -> Any:
    array = there.array(memory, View(0, (8,), (1,), 0, "float32"))
    (call,) = KERNELS["relu"].cuda_calls([array], [array], [], {})
    return there.driver.launch(call, stream)


@pytest.fixture
def ready():
    """A device, its streams, and a launch on each that has run."""
    there = cuda_runtime.device()
    one, other = there.streams((0, 1))
    memory = there.allocate(32)
    first, second = (kernel(there, stream, memory) for stream in (one, other))
    first(), second()
    there.synchronize()
    return SimpleNamespace(device=there, driver=there.driver, one=one, other=other, memory=memory,
                           first=first, second=second)


def fork(r: Any) -> None:
    event = r.driver.event()
    r.driver.record(event, r.one)()
    r.driver.wait(r.other, event)()


def look_at_what_was_recorded(r: Any) -> None:
    event = r.driver.event()
    r.driver.record(event, r.one)()
    r.driver.happened(event)


def wait_for_what_came_before(r: Any) -> None:
    event = r.driver.event()
    r.driver.record(event, r.other)()
    r.driver.wait(r.one, event)()


FORBIDDEN = [(lambda r: r.device.allocate(8), "memory is allocated during a capture"),
             (lambda r: r.driver.synchronize(r.one), "waits for a stream that is captured"),
             (lambda r: r.device.synchronize(), "the host waits for the device during a capture"),
             (look_at_what_was_recorded, "an event of a capture is asked for"),
             (wait_for_what_came_before, "a captured stream waits for an event from outside"),
             (lambda r: r.driver.copy(HOST, r.memory, r.one)(), "pageable memory is copied in a capture"),
             (lambda r: kernel_of(r, "sigmoid")(), "is compiled during a capture"),
             (lambda r: r.first_launch(), r"tanh_<float> of \w+.cu is loaded during a capture"),
             (lambda r: (fork(r), r.second()), "was forked and not joined"),
             (lambda r: r.driver.replay(r.graph, r.one), "a graph is uploaded to a stream that is captured"),
             (lambda r: r.replay(), "a graph is launched to a stream that is captured")]


def kernel_of(r: Any, name: str) -> Any:
    array = r.device.array(r.memory, View(0, (8,), (1,), 0, "float32"))
    return r.driver.launch(KERNELS[name].cuda_calls([array], [array], [], {})[0], r.one)


@pytest.mark.few(5)
@pytest.mark.parametrize(("do", "message"), FORBIDDEN, ids=[m for _, m in FORBIDDEN])
def test_a_capture_refuses_what_cuda_refuses_there_and_what_it_said_is_told(ready, do, message):
    ready.graph, ready.first_launch = lanes.capture(ready.driver, ready.one, ready.first), kernel_of(ready, "tanh")
    ready.replay = ready.driver.replay(ready.graph, ready.one)
    assert gc.isenabled()
    with pytest.raises(AssertionError, match=message):
        lanes.capture(ready.driver, ready.one, lambda: do(ready))
    assert gc.isenabled()
    lanes.capture(ready.driver, ready.one, ready.first)  # the stream can be captured again


def in_threads(*does: Any) -> list[Any]:
    with ThreadPoolExecutor(len(does)) as pool:
        return [future.result(30) for future in [pool.submit(do) for do in does]]


def test_threads_capture_on_one_device_in_turns_and_a_wait_for_it_comes_after(ready):
    inside, asked = threading.Event(), threading.Semaphore(0)
    others = (lambda: lanes.capture(ready.driver, ready.other, ready.second), ready.driver.synchronize_device,
              lambda: ready.device.allocate(8))

    def first() -> None:
        inside.set()
        for _ in others:
            assert asked.acquire(timeout=10)
        time.sleep(0.01)  # time for others to do what they must not
        ready.first()

    def then(do: Any) -> Any:
        assert inside.wait(10)
        asked.release()
        return do()

    graphs = in_threads(partial(lanes.capture, ready.driver, ready.one, first),
                        *(partial(then, do) for do in others))[:2]
    assert [len(ready.driver.machine.graphs[graph.captured].calls) for graph in graphs] == [1, 1]
    assert gc.isenabled()


@pytest.mark.parametrize("what", ["costs", "pairs", "SMs", "slots"])
def test_measuring_waits_for_the_capture_of_another_thread(ready, monkeypatch, what):
    """One that begins when the inputs are there: the launches before the timed ones would be a part of it."""
    there, loaded, inside, load = ready.device, threading.Event(), threading.Event(), Bound.load_random
    for module, name, value in ((clock, "REPEATS", 1), (clock, "ROUNDS", 1), (clock, "WARM", 0), (sms, "SIZE", 64)):
        monkeypatch.setattr(module, name, value)
    with use(Tape(there)):
        graph = ml.record(lambda x: x * 2 + x, np.ones(8, np.float32))
    name, cost, bound = graph.name(0), ml.CostModel(kinds={"F": 1.0}), Bound(graph, None, there, private=True)
    measured = {"costs": lambda: ml.measure(graph, device=there), "SMs": lambda: sms.measure_sms(graph, there),
                "slots": lambda: bound.load_random(np.random.default_rng(0)) and bound.feed.slots(),
                "pairs": lambda: measure_pairs(graph, cost, {name: "a"}, [("a", "a")], device=there)}[what]

    def loading(self: Any, random: Any) -> Any:
        found = load(self, random)
        loaded.set()
        assert inside.wait(10)
        return found

    def capturing() -> None:
        assert loaded.wait(10)
        lanes.capture(ready.driver, ready.one, lambda: (inside.set(), time.sleep(0.01)))

    monkeypatch.setattr(Bound, "load_random", loading)
    assert in_threads(measured, capturing)[0] is not None


def test_the_stand_in_permits_several_captures_and_refuses_what_cuda_refuses_meanwhile(ready):
    """The calls themselves, without the engine's turns."""
    runtime, one, other = ready.driver.runtime, ready.one.ptr, ready.other.ptr
    event = ready.driver.event()
    for stream in (one, other):
        runtime.streamBeginCapture(stream, runtime.streamCaptureModeRelaxed)
    ready.first(), ready.second()
    with pytest.raises(AssertionError, match="waits for the device during a capture"):
        in_threads(ready.driver.device.synchronize)
    ready.driver.record(event, ready.one)()
    with pytest.raises(AssertionError, match="waits for another capture"):
        ready.driver.wait(ready.other, event)()
    in_threads(lambda: ready.driver.allocate(8, ready.one))
    graphs = [runtime.streamEndCapture(stream) for stream in (other, one)]
    assert [len(ready.driver.machine.graphs[graph].calls) for graph in graphs] == [1, 1]
    runtime.streamBeginCapture(one, 0)
    with pytest.raises(RuntimeError, match="while a thread captures in the global mode"):
        in_threads(lambda: ready.driver.allocate(8, ready.other))
    runtime.streamEndCapture(one)


def test_far_memory_that_is_dropped_in_a_capture_goes_after_it(ready):
    """In the thread that captures, or in another one."""
    held = ready.driver.machine.pinned
    for drop in (lambda far: far.clear(), lambda far: in_threads(far.clear)):
        far = [ready.device.far(64)]
        begin = far[0].ctypes.data

        def fill(drop: Any = drop, far: Any = far, begin: int = begin) -> None:
            drop(far)
            assert held.hold(begin, 64)
            ready.first()

        lanes.capture(ready.driver, ready.one, fill)
        assert not held.hold(begin, 64)


def test_an_event_of_a_capture_means_nothing_after_it(ready):
    event = ready.driver.event()

    def fill() -> None:
        ready.first()
        ready.driver.record(event, ready.one)()

    lanes.capture(ready.driver, ready.one, fill)
    with pytest.raises(AssertionError, match="waits for an event of a capture that has ended"):
        ready.driver.wait(ready.other, event)()


def test_a_stream_that_is_not_captured_has_no_frontier(ready):
    with pytest.raises(RuntimeError,
                       match="the capture of stream 0 has ended: a call was made that a capture does not allow"):
        ready.driver.frontier(ready.one)


def test_a_task_whose_call_cannot_be_captured_is_named(monkeypatch):
    there = cuda_runtime.device()
    with use(Tape(there)):
        graph = ml.record(lambda x: ml.ops.tanh(x * 2.0), np.zeros((3, 2), np.float32))
    real, seen = Driver.frontier, []

    def frontier(self: Any, stream: Any) -> Any:
        seen.append(stream)
        if len(seen) == 2:
            raise RuntimeError("not captured any more")
        return real(self, stream)

    monkeypatch.setattr(Driver, "frontier", frontier)
    with pytest.raises((TaskError, lanes.LaneError, DeviceError), match="not captured any more"):
        GraphExecutor(graph, schedulers.in_order(graph), device=there)


def both(r: Any) -> None:
    """A kernel on each of two streams."""
    fork(r)
    r.first(), r.second()
    event = r.driver.event()
    r.driver.record(event, r.other)()
    r.driver.wait(r.one, event)()


def test_kernels_of_a_graph_keep_the_priorities_of_their_lanes(ready):
    """The main one's goes first: CUDA's numbers are negative."""
    machine, graph = ready.driver.machine, lanes.capture(ready.driver, ready.one, lambda: both(ready))
    assert [ready.driver.runtime.streamGetPriority(stream.ptr) for stream in (ready.one, ready.other)] == [-1, 0]
    assert machine.executables[graph.executable].priorities(machine.queues[ready.one.ptr]) == [-1, 0]
    plain = machine.executables[machine.instantiate(graph.captured, 0)]
    assert plain.priorities(machine.queues[ready.one.ptr]) == [-1, -1], (
        "what CuPy makes: all as the stream that it is launched to")
    del graph, plain
    gc.collect()
    assert not machine.graphs, "a graph that nobody holds is destroyed"


def test_streams_have_priorities_that_the_device_knows(ready):
    assert [ready.driver.runtime.streamGetPriority(ready.driver.stream(p).ptr)
            for p in (9, 1, 0, -1, -9)] == ([0, 0, -1, -2, -5])
    assert ready.driver.describe()["stream_priorities"] == (0, -5)
    with pytest.raises(AssertionError,
                       match="priority 1 of a stream is none from -5 to 0: CUDA would take the nearest"):
        ready.driver.cupy.cuda.Stream(non_blocking=True, priority=1)


def test_streams_are_the_same_ones_each_time(ready):
    """With their handles and workspaces, whatever was asked for between."""
    three = ready.device.streams((0, 1, 1))
    assert three[:2] == [ready.one, ready.other]
    ready.device.streams((0, 0, -1))
    assert ready.device.streams((0, 1, 1)) == three
    assert ready.device.streams(()) == [ready.one]
    assert len({stream.ptr for stream in three}) == 3


def test_edges_are_asked_for_with_room(ready):
    """How many there are is an error, as with a library's programmatic launches."""
    streams, memory = ready.device.streams((0, *(1,) * 7)), ready.memory
    kernels = [kernel(ready.device, stream, memory) for stream in streams]
    for call in kernels:
        call()
    ready.device.synchronize()

    def meet() -> None:
        events = [ready.driver.event() for _ in streams]
        for event, stream in zip(events, streams, strict=True):
            ready.driver.record(event, stream)()
        for stream in streams:
            for event in events:
                ready.driver.wait(stream, event)()

    def fill() -> None:
        start = ready.driver.event()
        ready.driver.record(start, streams[0])()
        for stream in streams[1:]:
            ready.driver.wait(stream, start)()
        for _ in range(6):
            for call in kernels:
                call()
            meet()

    graph = lanes.capture(ready.driver, ready.one, fill)
    nodes, edges = ready.driver.dependencies(graph)
    assert len(nodes) == 48
    assert set(edges) == {(8 * n + a, 8 * n + 8 + b) for n in range(5) for a in range(8) for b in range(8)}
    with pytest.raises(RuntimeError, match="CUDA: cudaErrorLossyQuery"):
        drivers._checked(ready.driver.bindings.cudaGraphGetEdges(graph.captured))


def test_the_time_of_a_graph_is_without_its_launch(ready):
    launch = ready.driver.replay(lanes.capture(ready.driver, ready.one, ready.first), ready.one)
    begin, end = ready.driver.event(True), ready.driver.event(True)

    def timed(*before: Any) -> float:
        for call in (*before, ready.driver.record(begin, ready.one), launch, ready.driver.record(end, ready.one)):
            call()
        ready.device.synchronize()
        return float(ready.driver.elapsed(begin, end))

    with pytest.raises(AssertionError, match="begins on an idle stream: it holds the host's launch"):
        timed()
    assert timed(launch) > 0
    assert timed(clock.Hold(ready.driver, ready.one, ready.device.allocate(64))._fill) > 0
    assert min(clock.replayed(ready.driver, ready.one, ready.first, ready.first)) > 0


# -------------------------------------------------------------------------------------------------- memory and failures
def test_memory_that_was_given_back_is_not_used(ready):
    """By a launch, nor by a graph."""
    late = kernel(ready.device, ready.one, memory := ready.device.allocate(32))
    late()
    ready.device.synchronize()
    replay = ready.driver.replay(lanes.capture(ready.driver, ready.one, late), ready.one)
    replay()
    ready.device.synchronize()
    del memory
    for use_it in (late, replay):
        with pytest.raises(AssertionError, match="are no memory of the device that is held"):
            use_it()


def test_pinned_memory_is_kept_until_its_copy_has_run(ready):
    host = ready.driver.pinned(32)
    ready.driver.copy(host, ready.memory, ready.one)()
    del host
    with pytest.raises(AssertionError, match="pinned memory was given back before its copy has run"):
        ready.device.synchronize()


def test_what_the_device_failed_with_is_not_waited_for(ready, monkeypatch):
    """CuPy's `event.done` is False then, for ever."""
    event = ready.driver.event()
    monkeypatch.setattr(ready.driver.runtime, "eventQuery", lambda event: 700)
    with pytest.raises(RuntimeError, match="700"):
        ready.driver.happened(event)


def test_a_source_that_does_not_compile_is_named(ready, monkeypatch):
    compile_exception = ready.driver.cupy.cuda.compiler.CompileException

    def refuse(self: Any, name: str) -> Any:
        raise compile_exception("line 1: undefined")

    monkeypatch.setattr(ready.driver.cupy.RawModule, "get_function", refuse)
    with pytest.raises(RuntimeError, match=r"sigmoid<float> of \w+.cu does not compile for sm_90: line 1: undefined"):
        kernel_of(ready, "sigmoid")


# ------------------------------------------------------------------------------------------------------------- products
def test_products_are_of_one_type(ready):
    found = {t: ready.device.array(ready.device.allocate(64), View(0, (2, 2), (2, 1), 0, t))
             for t in ("float32", "float16", "int32")}
    of = cuda_runtime.make_products(ready.driver)
    for a, b, out in (("float16", "float32", "float32"), ("float32", "float32", "float16"),
                      ("int32", "int32", "int32")):
        with pytest.raises(cuda.LaunchError,
                           match="a product must have one type, float32 or float64 or float16 or bfloat16, not"):
            of.bind(cuda.Product(found[a], found[b], found[out]), ready.one, False)


def test_a_product_that_the_library_refuses_is_one_line(ready, monkeypatch):
    of = cuda_runtime.make_products(ready.driver)
    memory = ready.device.allocate(64)
    array = ready.device.array(memory, View(0, (2, 2), (2, 1), 0, "float32"))

    def refuse(*arguments: Any) -> None:
        raise cuda_blas.cuBLASLtError("CUBLAS_STATUS_NOT_SUPPORTED (15)")

    monkeypatch.setattr(of.lt, "matmul_algo_get_heuristic", refuse)
    with pytest.raises(RuntimeError,
                       match=r"^cuBLASLt refuses \('float32', False, Side.*\): CUBLAS_STATUS_NOT_SUPPORTED \(15\)$"):
        of.bind(cuda.Product(array, array, array), ready.one, False)
    monkeypatch.setattr(of.lt, "matmul_algo_get_heuristic", lambda *arguments: None)
    with pytest.raises(RuntimeError, match="^cuBLASLt has no algorithm for "):
        of.bind(cuda.Product(array, array, array), ready.one, False)


# ----------------------------------------------------------------------------------------------------- tests on a GPU
LOSING = """
import pathlib, sys, time, types, pytest, cuda_on_gpu
soon = pathlib.Path(__file__).with_name("soon")  # the process after the one that loses the GPU is given little time
if soon.exists():
    cuda_on_gpu.PATIENCE = 1.5
    soon.unlink()
lost = []

def synchronize():
    if lost:
        raise Failed("cudaErrorIllegalAddress")

Failed = type("Failed", (Exception,), {})
runtime = types.SimpleNamespace(CUDARuntimeError=Failed, deviceSynchronize=synchronize)
sys.modules["cupy"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: True, runtime=runtime))
pytestmark = pytest.mark.gpu

def test_before(): pass
def test_loses(): soon.touch(), lost.append(1)
def test_hangs(): time.sleep(3600)
def test_after(): pass
"""


@pytest.mark.slow
def test_a_test_that_loses_the_gpu_or_never_ends_hides_no_other(tmp_path):
    """Each in a process that is then replaced, with what was said."""
    (tmp_path / "test_losing.py").write_text(LOSING)
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-v", "-n", "1", "--dist", "load", "-p", "no:cacheprovider", "--rootdir",
               str(tmp_path), "-o", "addopts=", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": IMPORTABLE}, capture_output=True,
                          text=True, timeout=PATIENCE)
    said = done.stdout + done.stderr
    assert "2 failed, 3 passed" in said
    assert re.search(r"the GPU cannot be used any more after \S*test_loses: cudaErrorIllegalAddress", said)
    assert {name for name in ("test_before", "test_loses", "test_hangs", "test_after")
            if f"crashed while running 'test_losing.py::{name}'" in said} == ({"test_loses", "test_hangs"})


def test_the_tests_of_kernels_run_on_a_device_as_they_do_without(monkeypatch):
    """Views of all sorts, nothing at all, what is written in place."""
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((6, 8)).astype(np.float32)
    monkeypatch.setenv("MINIDL_TEST_GPU", "1")
    monkeypatch.setitem(devices._devices, 0, cuda_runtime.device(3))
    run = cuda_on_cpu.run_kernel
    for x in (whole, whole[::-1], whole[:, ::2], whole.T, whole[2:, 3:], whole[:0]):
        out = np.full(x.shape, np.nan, np.float32)
        run("softmax", [x], [out])
        np.testing.assert_allclose(out, KERNELS["softmax"].reference(np, x) if x.size else x, rtol=1e-6)
    both = whole.copy()
    run("add", [both[:3], both[3:]], [both[:3]])
    np.testing.assert_array_equal(both, np.concatenate([whole[:3] + whole[3:], whole[3:]]))


@pytest.mark.few(2)
@pytest.mark.parametrize(("model", "arguments"), test_gpu.MODELS, ids=[m for m, _ in test_gpu.MODELS])
def test_what_is_trained_on_a_gpu_can_be_recorded(model, arguments):
    run = test_gpu.Run(cuda_runtime.device(), model, **arguments)
    assert [v.shape for v in run.graph.inputs] == [x.shape for x in next(run.batches)]


# ---------------------------------------------------------------------------------------------------------------- cuDNN
def test_cudnn_gets_integers_a_handle_for_each_stream_and_a_workspace(ready, monkeypatch):
    """By the frontend's own Python; only its compiled part is not called, which needs a GPU."""
    cudnn = need("cudnn")
    from minidl.devices.cuda import dnn

    said: list[Any] = []

    class Graph:
        execute_plan_at_index = cudnn.pygraph.execute_plan_at_index

        def get_workspace_size_plan_at_index(self, index: int) -> int:
            return 1000

        def build_plan_at_index(self, index: int) -> None: ...

        def get_plan_name_at_index(self, index: int) -> str:
            return "eng"

        def _execute_plan_at_index(self, *arguments: Any) -> None:
            said.append(arguments)

    assert not [name for name in public(cuda_dnn.Graph) if not hasattr(cudnn.pygraph, name)]
    assert not [name for name in public(cuda_dnn.Frontend) if not hasattr(cudnn, name)]
    assert issubclass(cudnn.cudnnGraphNotSupportedError, Exception)
    handles, made = iter((10, 11, 12)), []
    assert cudnn.create_handle.__doc__.startswith("create_handle() -> int")
    assert cudnn.set_stream.__doc__.startswith("set_stream(handle: int, stream: int) -> None")
    monkeypatch.setattr(cudnn, "create_handle", lambda: next(handles))
    monkeypatch.setattr(cudnn, "set_stream", lambda handle, stream: said.append((handle, stream)))
    monkeypatch.setattr(cudnn, "backend_version", lambda: 91900)
    monkeypatch.setattr(dnn, "described", lambda library, key, **options: made.append(options) or Graph())
    monkeypatch.setattr(tuner.Tuner, "choose", lambda self, key, candidates, usable: "3 eng" * usable("3 eng"))
    memory = ready.device.allocate(4096)
    x, w, y = (ready.device.array(memory, View(0, (1, 4, 4, 4), (64, 16, 4, 1), 64 * i, "float32")) for i in range(3))
    call, library = cuda.Convolution("forward", x, w, y, (1, 1), (0, 0), (1, 1), 1), dnn.Dnn(ready.driver)
    thunks = [library.bind(call, stream) for stream in (ready.one, ready.other, ready.one)]
    assert said == [(10, library.tuner.stream.ptr), (11, ready.one.ptr), (12, ready.other.ptr)]
    assert made == [{"handle": 10}], "one plan for all streams"
    for thunk, handle in zip(thunks, (11, 12, 11), strict=True):
        thunk()
        pointers, workspace, plan, given, *rest = said.pop()
        assert (pointers, plan, given, any(rest)) == ({i + 1: memory.data.ptr + 256 * i for i in range(3)},
                                                      3, handle, False)
        ready.driver.machine.check_held(workspace, 1000, "a workspace")
        assert {type(v) for v in (*pointers, *pointers.values(), workspace)} == {int}
