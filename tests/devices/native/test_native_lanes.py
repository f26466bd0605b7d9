"""Native lanes: converted calls and whole steps have the bits of Python's; lanes fail, stop and end as Python's do."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import numpy as np
import pytest
from helpers import SMALL, bits, bytes_allocated, deadline, recorded, recorded_classifier

import minidl as ml
from minidl import nn, optim
from minidl.devices import device as devices
from minidl.devices.lanes import LaneError, Stop, Work
from minidl.kernels.registry import loop
from minidl.runtime.checking import random_schedule
from minidl.runtime.executors import SequentialExecutor, StreamExecutor

pytest.importorskip("numba")
import llvmlite.binding as llvm
from llvmlite import ir

if devices.no_native_lanes():
    pytest.skip(devices.no_native_lanes(), allow_module_level=True)

from minidl.devices.native import calls, code, stamps
from minidl.devices.native.lanes import FEW_SPINS, SPINS, NativeLanes
from minidl.devices.native.machines import MACHINES

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64)
(VALUES,) = SMALL.batches(1)


def device_with(kind):
    device = devices.CPU()
    device.set_lanes(kind)
    return device


# -------------------------------------------------------------------------------------------------- every machine
@pytest.mark.parametrize(("name", "pause", "counter"), [("x86_64", "pause", "rdtsc"),
                                                        ("aarch64", "yield", "cntvct_el0")])
def test_what_differs_between_machines_compiles_for_each(name, pause, counter):
    """Here as well, as the compiler of numba's wheels knows all of them."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = f"{name}-unknown-linux-gnu"
    look = ir.Function(module, ir.FunctionType(ir.IntType(64), []), "look")
    b = ir.IRBuilder(look.append_basic_block())
    MACHINES[name].pause(b)
    b.ret(MACHINES[name].ticks(b))
    try:
        machine = llvm.Target.from_triple(module.triple).create_target_machine()
    except RuntimeError as error:
        pytest.skip(str(error))
    code = machine.emit_assembly(llvm.parse_assembly(str(module))).lower().split()
    assert code.index(pause) < code.index(counter)


@pytest.mark.parametrize(("cores", "spins"), [(1, FEW_SPINS), (2, SPINS), (3, SPINS)])
def test_lanes_with_fewer_cores_than_they_are_sleep_early(cores, spins, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(cores)})
    work = Work(["a", "b"], [0, 0], [[0], [1]], [(1, 0)], lambda task, stream: [], str)
    with closing(NativeLanes(work)) as lanes:
        assert [int(lane.words[code.SPINS]) for lane in lanes._lanes] == [spins] * 2
        lanes.run()


# ---------------------------------------------------------------------------------------------------- single calls
class Draw:
    """Random bound calls of the kinds that kernels make."""

    unary = (np.exp, np.log, np.sqrt, np.tanh, np.abs, np.negative, np.positive, np.sign)
    binary = (np.add, np.subtract, np.multiply, np.divide, np.maximum, np.minimum, np.power)
    comparing = (np.equal, np.greater, np.less)

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.dtype = str(self.random.choice(["float32", "float64"]))

    def pick(self, choices):
        return choices[int(self.random.integers(len(choices)))]

    def chance(self, share):
        return self.random.random() < share

    def shape(self, axes, most=100_000):
        shape = tuple(int(n) for n in self.random.choice([1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 64, 100], axes))
        return shape if np.prod(shape) < most else shape[:2]

    def smaller(self, shape):
        """A shape that broadcasts to this one."""
        return tuple(1 if self.chance(0.25) else n for n in shape)[self.pick([0, 0, 0, len(shape) // 2]) :]

    def array(self, shape, dtype=None, special=True):
        """Any order of axes, any gaps; zeros of both signs, infinities and NaN among the values."""
        order = self.random.permutation(len(shape)) if self.chance(0.4) else np.arange(len(shape))
        steps = [self.pick([1, 1, 1, 2, 3]) if np.prod(shape) < 20_000 else 1 for _ in shape]
        whole = np.empty([shape[a] * steps[a] for a in order], dtype or self.dtype)
        if whole.dtype.kind == "f":
            whole[...] = self.random.standard_normal(whole.shape) * self.pick([1e-3, 1, 50])
            if special and self.chance(0.3):
                count = max(1, whole.size // 20)
                whole.flat[self.random.integers(0, whole.size, count)] = self.random.choice(
                    [0.0, -0.0, np.inf, -np.inf, np.nan], count)
        else:
            whole[...] = self.random.integers(0, 2 if whole.dtype.kind == "b" else 100, whole.shape)
        whole = whole.transpose(np.argsort(order))
        return whole[tuple(slice(0, None, n) for n in steps)] if shape else whole

    def elementwise(self):
        shape = self.shape(self.pick(range(5)))
        function = self.pick((*self.unary, *self.binary, *self.comparing, np.isfinite))
        out = self.array(shape, "bool" if function in (*self.comparing, np.isfinite) else None)
        if function is np.isfinite:  # NumPy 2.4 is wrong for strided outputs
            out = np.empty(shape, "bool")
        inputs = [np.broadcast_to(self.array(self.smaller(shape)), shape) if self.chance(0.5)
                  else self.array(self.smaller(shape)) for _ in range(function.nin)]
        if function.nin == 2 and self.chance(0.2):
            inputs[1] = np.dtype(self.dtype).type(self.random.standard_normal())
        if out.dtype == self.dtype and self.chance(0.3):
            inputs[0] = out
        return partial(function, *inputs, out=out), out

    def reduction(self):
        shape = self.pick([self.shape(self.pick([1, 2, 3, 4])), (int(self.random.integers(1, 20_000)), 3),
                           (3, int(self.random.integers(1, 20_000)))])
        axes = tuple(sorted(int(a) for a in self.random.choice(len(shape), self.random.integers(1, len(shape) + 1),
                                                               replace=False)))
        x = np.broadcast_to(self.array(self.smaller(shape)), shape) if self.chance(0.3) else self.array(shape)
        out = self.array(tuple(1 if a in axes else n for a, n in enumerate(shape)))
        return partial(self.pick((np.add, np.maximum)).reduce, x, axis=axes, out=out, keepdims=True), out

    def product(self):
        lead, (m, k, n) = self.shape(self.pick([0, 0, 1, 2]), 300), self.shape(3, 1 << 30)
        a, b = self.array((*lead, m, k), special=False), self.array((*lead, k, n), special=False)
        if not lead and self.chance(0.15):
            b, n = a.T, m
        out = self.array((*lead, m, n))
        if not lead and a.flags.forc and b.flags.forc and out.flags.c_contiguous:
            return partial(np.dot, a, b, out), out
        return partial(np.matmul, a, b, out=out), out

    def copy(self):
        shape, dtype = self.shape(self.pick(range(5))), self.pick([self.dtype, "int64", "bool", "int32", "uint64"])
        out = self.array(shape, dtype)
        return partial(np.copyto, out, self.array(self.smaller(shape), dtype)), out

    def fill(self):
        out = self.array(self.shape(self.pick(range(5))))
        return partial(out.fill, self.pick([0.0, 1.0, -0.0, 3.5])), out


def differs(seed):
    """(whether a random call has a native form, whether its bits differ)."""
    draw = Draw(seed)
    thunk, out = draw.pick([draw.elementwise, draw.elementwise, draw.reduction, draw.product, draw.copy, draw.fill])()
    try:
        native = calls.convert(thunk)
    except calls.Unknown:
        return False, False
    before = out.copy()
    with np.errstate(all="ignore"):
        thunk()
    expected = bits(out)
    np.copyto(out, before)
    for call in native:
        assert FUNCTION(call.address)(call.block) == 0
    return True, bits(out) != expected


@pytest.mark.parametrize("count", [600, pytest.param(20_000, marks=pytest.mark.campaign)])
def test_native_forms_of_numpys_functions_have_their_bits(count):
    known, wrong = 0, []
    for seed in range(count):
        native, different = differs(seed)
        known += native
        wrong += [seed] * different
    assert not wrong, f"bits differ for seeds {wrong[:10]}"
    assert known > 0.85 * count


def test_the_maximum_of_one_number_reads_it_when_the_step_runs():
    x, out = np.zeros(()), np.zeros(())
    native = calls.convert(partial(np.maximum.reduce, x, axis=(), out=out, keepdims=True))
    x[...] = 3
    for call in native:
        FUNCTION(call.address)(call.block)
    assert out == 3


def every_kind_of_argument(x, tall, pair, half, single, whole, flag, seed, out):
    n, (small, more) = pair
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            total = x[i, j] * half + single * tall[j, 0, i % 2] + n - more[1] * whole
            if flag and seed > np.uint64(1) << np.uint64(63):
                total += small
            out[i, j] = total


@pytest.mark.parametrize("flag", [False, True])
def test_every_kind_of_argument_reaches_a_loop(flag):
    random = np.random.default_rng(0)
    x = random.standard_normal((6, 5)).T[:, ::2]
    out = np.empty((5, 3))
    thunk = loop(every_kind_of_argument, x, random.standard_normal((3, 4, 2)).astype(np.float32)[:, ::2],
                 (7, (np.int32(-3), (0.5, 1.25))), 0.375, np.float32(1.5), -2, flag, np.uint64(2**64 - 5), out)
    thunk()
    expected = bits(out)
    out[...] = 0
    (call,) = calls.convert(thunk)
    assert FUNCTION(call.address)(call.block) == 0
    assert bits(out) == expected


def many_arrays(arrays, out):
    for a in arrays:
        out[0] += a[0, 0, 0]


@pytest.mark.few(2)
@pytest.mark.parametrize("count", [1, 2, 5, 10, 30])
def test_loops_of_many_arguments_have_a_native_form_or_none(count):
    arrays, out = tuple(np.full((1, 1, 1), 2.0 ** i) for i in range(count)), np.zeros(1)
    thunk = loop(many_arrays, arrays, out)
    if count == 30:
        with pytest.raises(calls.Unknown):
            calls.convert(thunk)
        return
    (call,) = calls.convert(thunk)
    assert FUNCTION(call.address)(call.block) == 0
    assert out[0] == 2 ** count - 1


@pytest.mark.parametrize("make", [
    lambda a, b: partial(np.add, a[:-1], b[1:], out=a[1:]),  # overlaps: NumPy copies first
    lambda a, b: partial(np.add, a, 1.0, out=b),  # NumPy chooses the type of a Python number
    lambda a, b: partial(np.add, a, np.ones(8, bool), out=b),
    lambda a, b: partial(np.add, a, b, out=b, where=a > 0),
    lambda a, b: partial(np.add, a[::-1], a, out=b),
    lambda a, b: partial(np.copyto, b, a.astype(np.float32)),
    lambda a, b: partial(np.add.reduce, a, axis=0, out=b[:1], keepdims=True, dtype=np.float64),
    lambda a, b: partial(np.dot, a, b), lambda a, b: partial(sorted, a), lambda a, b: a.copy,
], ids=range(10))
def test_calls_without_a_native_form_are_unknown(make):
    with pytest.raises(calls.Unknown):
        calls.convert(make(np.arange(8.0), np.ones(8)))


# ---------------------------------------------------------------------------------------------------- whole steps
# (tests/fuzz runs random steps on them)
@pytest.fixture
def made():
    """Lanes of (task, calls), which end with the test."""
    with ExitStack() as all_of_them:
        yield lambda *lanes, **waits: all_of_them.enter_context(closing(NativeLanes(work_of(*lanes, **waits))))


def native(graph, streams=1, trace=False):
    """An executor of a random schedule on native lanes."""
    return StreamExecutor(graph, random_schedule(graph, streams, np.random.default_rng(streams)),
                          device=device_with("native"), trace=trace)


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("streams", [1, 2, 3])
def test_many_steps_have_the_oracles_bits(streams, trace):
    assert SMALL.trained(lambda g: native(g, streams, trace), 20) == SMALL.trained(SequentialExecutor, 20)


@pytest.mark.parametrize("streams", [1, 2])
def test_a_step_is_one_native_call(streams, monkeypatch):
    run = native(recorded(), streams)
    lanes, compiled = run._body[0].lanes, []
    step = lanes._step
    monkeypatch.setattr(lanes, "_step", lambda *a: compiled.append(a) or step(*a))
    for _ in range(2):
        run(*VALUES)
    assert compiled.count((-1,)) == 2  # and some to go on, where a lane waited long
    run.close()


@pytest.mark.parametrize("ticks", [False, True])
def test_stamps_are_in_order_and_on_the_hosts_clock(ticks, monkeypatch):
    monkeypatch.setattr(stamps, "counts_ticks", lambda: ticks)
    run = native(recorded(), 2, trace=True)
    begin = time.perf_counter()
    run(*VALUES)
    end = time.perf_counter()
    for found in run._body[0].lanes.stamps():
        moments = found.reshape(-1)
        assert (np.diff(moments) >= 0).all()
        assert begin <= moments[0] <= moments[-1] <= end
    run.timeline.report()
    run.close()


def test_lanes_agree_on_the_order_of_moments_if_looks_at_the_clock_are_disturbed(monkeypatch):
    monkeypatch.setattr(stamps, "counts_ticks", lambda: True)
    late, both = iter(range(0, 10**9, 10**6)), code.both

    def disturbed(block):
        both(block)
        ctypes.c_int64.from_address(block + 8).value += next(late)  # nanoseconds

    monkeypatch.setattr(code, "both", disturbed)
    graph = recorded()
    run = native(graph, 3, trace=True)
    run(*VALUES)
    tasks = run.timeline.tasks
    start, end = (dict(zip(run.timeline.key[tasks].tolist(), x[tasks].tolist(), strict=True))
                  for x in (run.timeline.start, run.timeline.end))
    assert len(run.waits)
    for waiter, source in graph.keys[run.waits].tolist():
        assert start[waiter] >= end[source]
    run.close()


# ---------------------------------------------------------------------------------------------------- lanes alone
def work_of(*lanes, waits=()):
    """Work whose tasks are numbered calls: lanes of (task, calls)."""
    found = {task: thunks for lane in lanes for task, thunks in lane}
    return Work([f"l{i}" for i in range(len(lanes))], [0] * len(lanes), [[t for t, _ in lane] for lane in lanes], waits,
                lambda task, stream: found[task], str)


def spin(x, n):
    for i in range(n):
        x[0] = x[0] * 1.0000001 + i


def slow(x):
    """A call of compiled code of about a millisecond."""
    return loop(spin, x, 400_000)


def test_a_lane_waits_for_another(made):
    order: list[int] = []
    x = np.ones(1)
    lanes = made([(0, [partial(order.append, 0)]), (3, [partial(order.append, 3)])],
                                [(1, [slow(x)] * 3), (2, [partial(order.append, 2)])], waits=[(3, 2), (1, 0)])
    with deadline():
        for _ in range(50):
            order.clear()
            lanes.run()
            assert order == [0, 2, 3]


def fails(x):
    if x[0] > 0:
        raise ValueError("not this one")


def test_an_exception_of_a_compiled_loop_reaches_the_caller(made):
    x, y = np.zeros(1), np.ones(1)
    lanes = made([(0, [slow(y)])], [(1, [slow(y)]), (2, [slow(y), loop(fails, x)])])
    assert lanes.by_python == {}
    with deadline():
        for _ in range(3):
            lanes.run()
            x[0] = 1
            with pytest.raises(LaneError, match="not this one") as caught:
                lanes.run()
            assert (caught.value.task, caught.value.lane) == (2, 1)
            assert isinstance(caught.value.error, ValueError)
            x[0] = 0


def interrupted(seconds, call):
    """The call gets an interrupt after so long, and ends with it."""
    timer = threading.Timer(seconds, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with deadline(), pytest.raises(KeyboardInterrupt):
            timer.start()  # inside: a busy machine may come back here late
            call()
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.few(1)
@pytest.mark.parametrize("waiting", [False, True])
def test_an_interrupt_falls_between_two_compiled_calls(made, waiting):
    """Both where the caller computes, and where it waits for another lane."""
    x, counts = np.ones(1), np.zeros(1)
    busy = [(0, [slow(x), partial(np.add, counts, 1.0, out=counts)] * 2_000)]
    lanes = made([], busy) if waiting else made(busy)
    for _ in range(2):
        interrupted(0.05, lanes.run)
        assert counts[0] < 2_000, "it came at the end"
        counts[0] = 0


def test_a_run_that_comes_back_to_python_in_between_makes_every_call_once(made):
    """As it does in a long run, so that signals are handled; also after a run that was interrupted."""
    place, total = np.array([3.0]), np.zeros(1)
    lanes = made([(0, [partial(np.copyto, total, place), *[slow(total)] * 40])],
                                [(1, [slow(np.ones(1))])])
    step, calls = lanes._step, []
    lanes._step = lambda *a: calls.append(a) or step(*a)
    wanted = np.array([3.0])
    for _ in range(40):
        slow(wanted)()
    for _ in range(2):
        calls.clear()
        lanes.run()
        assert total == wanted
        assert len(calls) > 1
        interrupted(0.01, lambda: [lanes.run() for _ in range(1000)])


def test_any_thread_can_end_a_run(made):
    x = np.ones(1)
    lanes = made([(0, [slow(x)] * 2_000)], [(1, [slow(x)] * 2_000)])
    with deadline():
        timer = threading.Timer(0.05, lambda: lanes.give_up(Stop(TimeoutError("enough"))))
        timer.start()
        with pytest.raises(TimeoutError, match="enough"):
            lanes.run()


def test_two_executors_run_at_once():
    runs = [native(recorded(), 2) for _ in range(2)]
    with deadline(), ThreadPoolExecutor(2) as threads:
        losses = [*threads.map(lambda run: [bits(*run(*VALUES)) for _ in range(30)], runs)]
    for run in runs:
        run.close()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", [SequentialExecutor, native])
def test_a_child_process_may_run_one_lane(kind):
    run = kind(recorded())
    run(*VALUES)
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if all(np.isfinite(t.numpy()).all() for t in run(*VALUES)) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    getattr(run, "close", int)()


def test_what_python_calls_is_told(capsys, monkeypatch):
    monkeypatch.setenv("MINIDL_DEBUG", "1")
    run = native(recorded())
    assert "native lanes, " in capsys.readouterr().err
    assert "check" in run._body[0].lanes.by_python
    run.close()


def test_an_output_may_have_gaps():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for output in (lambda x: x * 2.0, lambda x: (x * 2.0).T):
        run = native(ml.record(output, x))
        np.testing.assert_array_equal(run(x).numpy(), output(x))
        assert "by Python: none" in str(run._body[0].lanes)
        run.close()


def test_native_lanes_are_refused_where_there_are_none(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(devices.DeviceError, match="native lanes need Linux on x86-64 or aarch64, not Linux on riscv64"):
        device_with("native")
    monkeypatch.setenv("MINIDL_LANES", "native")
    with pytest.raises(devices.DeviceError, match="riscv64"):
        devices.default_lanes()
    monkeypatch.setenv("MINIDL_LANES", "steel")
    with pytest.raises(ValueError, match="MINIDL_LANES is 'steel'; it must be native or python"):
        devices.default_lanes()
    with pytest.raises(ValueError, match="unknown lanes 'steel'"):
        device_with("steel")


@contextmanager
def running(what):
    """A call that runs native lanes with a compiled call and one by Python; or a whole step, on one or two lanes."""
    if what == "calls":
        x = np.ones(4, np.float32)
        run = NativeLanes(work_of([(0, [partial(np.add, x, x, out=np.empty(4, np.float32))]), (1, [int])]), trace=True)
        call = run.run
    else:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        graph = recorded_classifier(model, optim.SGD(model.parameters(), 0.01, momentum=0.9), 2, 4)
        run = native(graph, 2 if what == "two lanes" else 1, trace=what == "two lanes")
        call = partial(run, np.ones((2, 4), np.float32), np.array([0, 1]))
    gc.disable()  # what a step makes goes without the collector
    try:
        yield call
    finally:
        gc.enable()
        run.close()


@pytest.mark.few(2)
@pytest.mark.parametrize("what", ["calls", "a step", "two lanes"])
def test_steps_do_not_take_memory(what):
    steps = 2000

    def runs():
        for _ in range(steps):
            call()

    with running(what) as call, deadline():  # other threads of the process may allocate once, not each time
        assert min(bytes_allocated(runs) for _ in range(3)) < 8 * steps, "a word a step"


@pytest.mark.campaign
@pytest.mark.parametrize("what", ["calls", "a step", "two lanes"])
def test_a_million_steps_do_not_take_memory(what):
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    with running(what) as call:
        for _ in range(1000):
            call()
        before = resident()
        for _ in range(1_000_000):
            call()
        assert resident() - before < 8 << 20, "eight bytes a step"
