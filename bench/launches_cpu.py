"""Launches on the CPU: calls in the caller's thread, hand-over to another lane, the cost over the number of tasks.

A lane of minidl is a thread that runs a program, a list of calls in Python or in compiled code. For comparison: the
standard library's ways to hand over one call, and the calls of other packages.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from launches import CHAINS, Bench, Missing, Row, Samples, entered, nothing_of, pieces

from minidl import device as devices
from minidl.devices.lanes import Event, Stream, Threads, Work

Call = Callable[[], Any]
SIZES = {4: "4 B", 4 << 10: "4 KiB", 1 << 20: "1 MiB", 64 << 20: "64 MiB"}
INNER = 1000  #: calls of a native lane that are one step


# -------------------------------------------------------------------------------------------------------- ways to time
@contextmanager
def _held(least: int = 2) -> Iterator[Callable[[], None]]:
    """A call that holds this thread, and those begun within, to a core each, in turns: else the system puts two lanes
    on one core now and then, and hands over itself. Raises Missing if there are fewer cores than `least`."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < least:
        raise Missing("two lanes that take turns need two cores")
    before = set(threading.enumerate())

    def hold() -> None:
        begun = [thread for thread in threading.enumerate() if thread not in before]
        for i, thread in enumerate([None, *begun]):
            os.sched_setaffinity(0 if thread is None else thread.native_id or 0, [cores[i % len(cores)]])

    try:
        yield hold
    finally:
        os.sched_setaffinity(0, cores)


def timed(way: Callable[[Bench, Call], list[float]]) -> Callable[..., Callable[[Bench], Samples]]:
    """A way to time what `make(...)` returns, which makes `per` calls."""
    def row(make: Callable[..., Any], *arguments: Any, per: int = 1) -> Callable[[Bench], Samples]:
        def how(bench: Bench) -> Samples:
            with entered(make(*arguments)) as call:
                call()
                return {"host": [s / per for s in way(bench, call)]}

        return how

    return row


called, alone = timed(Bench.bursts), timed(Bench.singles)


def handed(make: Callable[[], Any]) -> Callable[[Bench], Samples]:
    """Single hand-overs to a thread that sleeps: `make` yields how to start one, how to wait for its end, and when its
    first instruction ran."""
    def how(bench: Bench) -> Samples:
        found: dict[str, list[float]] = {"host": [], "first": [], "done": []}
        with _held() as hold, make() as (start, finish, first):
            finish(start())
            hold()
            first()
            for _ in bench.rounds(50, 20_000):
                begin = perf_counter()
                handle = start()
                issued = perf_counter()
                finish(handle)
                for kind, at in (("done", perf_counter()), ("host", issued), ("first", first())):
                    found[kind].append((at - begin) * 1e6)
        return {kind: samples[1:] for kind, samples in found.items()}

    return how


def by_length(make: Callable[..., Any], *arguments: Any) -> Callable[[Bench], Samples]:
    """From the launch of n small calls to the end of them all, over n."""
    def samples(bench: Bench, n: int) -> Samples:
        with _held(1) as hold, make(n, *arguments) as call:
            hold()
            call()
            return {"done": bench.singles(call, least=4, most=100)}

    return lambda bench: bench.over(partial(samples, bench))


# ---------------------------------------------------------------------------------------------------- a call by itself
def _ufunc() -> Call:
    x, y, z = np.ones((3, 1024), np.float32)
    return lambda: np.add(x, y, out=z)


def _prebuilt() -> Call:
    """On arrays of its own."""
    return partial(np.add, *np.ones((2, 1024), np.float32), out=np.ones(1024, np.float32))


def _product() -> Call:
    return partial(np.dot, *np.ones((2, 64, 64), np.float32), np.ones((64, 64), np.float32))


def _numba(count: int) -> Call:
    """A compiled function of so many arrays."""
    import numba

    return partial(numba.njit(nogil=True)(nothing_of(count)), *[np.ones(1024, np.float32)] * count)


def _torch() -> Call:
    import torch

    t = torch.zeros(1024)
    return lambda: torch.add(t, 1.0, out=t)


def _jax(wait: bool) -> Call:
    import jax

    add, x = jax.jit(lambda x: x + 1.0), jax.numpy.ones(1024, "float32", device=jax.devices("cpu")[0])
    return (lambda: add(x).block_until_ready()) if wait else lambda: add(x)


def _copy(size: int) -> Call:
    source, out = np.ones((2, size), np.uint8)
    return partial(np.copyto, out, source)


# --------------------------------------------------------------------------------------------------------------- lanes
def native_lanes(work: Work, *given: Any, **options: Any) -> Any:
    if why := devices.no_native_lanes():
        raise Missing(why)
    from minidl.devices.native.lanes import NativeLanes

    return NativeLanes(work, *given, **options)


def work_of(lanes: list[list[int]], waits: list[tuple[int, int]], call: Callable[[int], list[Call]]) -> Work:
    """Lanes of tasks, each with the calls that `call(task)` returns."""
    return Work([f"bench {i}" for i in range(len(lanes))], [0] * len(lanes), lanes, waits,
                lambda task, stream: call(task), str)


@contextmanager
def _lanes(make: Callable[[Work], Any], lanes: list[list[int]], waits: list[tuple[int, int]],
           call: Callable[[int], list[Call]]) -> Iterator[Call]:
    with closing(make(work_of(lanes, waits, call))) as made:
        yield made.run


def _native_call(count: int) -> Any:
    calls = [_prebuilt()] * count
    return _lanes(native_lanes, [[0]], [], lambda task: calls)


def _chain(n: int, branches: int, make: Callable[[Work], Any]) -> Any:
    """n small calls on `branches` lanes at the same time; 0: on two lanes in turn, with a wait between any two."""
    small = [_prebuilt() for _ in range(branches or 2)]
    waits = [] if branches else [(t + 1, t) for t in range(n - 1)]
    return _lanes(make, pieces(n, branches or 2), waits, lambda task: [small[task % len(small)]])


@contextmanager
def _queued(n: int) -> Iterator[Call]:
    """n small calls, each put into the queue of a worker, then all answers."""
    call = _prebuilt()
    with _served() as (put, get):
        yield lambda: ([put(call) for _ in range(n)], [get() for _ in range(n)])


@contextmanager
def _step(kind: str) -> Iterator[Call]:
    """A whole recorded training step of an MLP of 16 x 64, batch 8."""
    from common import recorded_step

    import minidl as ml
    from minidl import models, schedulers

    if kind == "native" and (why := devices.no_native_lanes()):
        raise Missing(why)
    graph, x, y = recorded_step(models.mlp(*[64] * 17, 10), 8)
    device = devices.CPU()
    device.set_lanes(kind)
    with closing(ml.StreamExecutor(graph, schedulers.in_order(graph), device=device)) as run:
        yield lambda: run(x, y)


def hand_over(make: Callable[[Work], Any], turns: int = INNER) -> Callable[[Bench], Samples]:
    """Two lanes take turns, and do nothing else: from a record to the end of its wait."""
    def how(bench: Bench) -> Samples:
        order = list(range(turns))
        work = work_of([order[::2], order[1::2]], [(t + 1, t) for t in order[:-1]], lambda task: [])
        with _held() as hold, closing(make(work)) as lanes:
            hold()
            return {"host": [s / max(turns, 1) for s in bench.bursts(lanes.run)]}

    return how


# ----------------------------------------------------------------------------------------------------------- hand-over
@contextmanager
def _stream() -> Iterator[Any]:
    seen: list[float] = [0.0]
    with closing(Stream("bench")) as stream:
        yield (lambda: stream.start([lambda: seen.__setitem__(0, perf_counter())]), lambda _: stream.join(),
               lambda: seen[0])


@contextmanager
def _native_lane() -> Iterator[Any]:
    """The caller's lane is empty, the other one makes one call; its stamps say when."""
    call = _prebuilt()
    with closing(native_lanes(work_of([[], [0]], [], lambda task: [call]), True)) as lanes:
        yield lanes.run, lambda _: None, lambda: float(lanes.stamps()[1][0, 1])


@contextmanager
def _served() -> Iterator[tuple[Callable[[Any], None], Callable[[], Any]]]:
    """`put(call)` to a worker, and `get()` for the answers in their order."""
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        while (call := calls.get()) is not None:
            answers.put(call())

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        yield calls.put, answers.get
    finally:
        calls.put(None)
        worker.join()


@contextmanager
def _queue() -> Iterator[Any]:
    seen: list[float] = []
    with _served() as (put, get):
        yield lambda: put(perf_counter), lambda _: seen.append(get()), lambda: seen.pop()


@contextmanager
def _pool() -> Iterator[Any]:
    seen: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        yield (lambda: pool.submit(perf_counter), lambda future: seen.append(future.result()), lambda: seen.pop())


@contextmanager
def _fork(count: int) -> Iterator[Call]:
    """A program without calls for each of so many streams, until all have been joined."""
    with ExitStack() as stack:
        streams = [stack.enter_context(closing(Stream(f"bench {i}"))) for i in range(count)]
        yield lambda: ([stream.start([]) for stream in streams], [stream.join() for stream in streams])


def _event() -> Call:
    event = Event()
    return lambda: (event.record(), event.wait())


# ---------------------------------------------------------------------------------------------------------------- rows
CALL, HAND_OVER, LATENCY, SINGLE, TASKS = (
    "a call in the caller's thread", "between two lanes", "one launch on a sleeping thread",
    "single calls and their percentiles", "n small calls in one launch")
ADD = "np.add(x, y, out=z) of 1024 numbers"

ROWS = (
    Row(CALL, "Python function", "what calling anything costs at least", called(nothing_of, 0)),
    Row(CALL, "NumPy ufunc", f"{ADD}; the arguments are looked up at each call", called(_ufunc)),
    Row(CALL, "NumPy ufunc, prebuilt", "bound to its arrays beforehand, as minidl's tasks are", called(_prebuilt)),
    Row(CALL, "native lane of one call", "the same, from Python into compiled code and back", called(_native_call, 1)),
    Row(CALL, "native lane of 1000 calls", "the same within compiled code, per call",
        called(_native_call, INNER, per=INNER)),
    Row(CALL, "NumPy product", "np.dot of 64 x 64 matrices into a third", called(_product)),
    *(Row(CALL, f"numba loop, {count} arrays", "a compiled function that does nothing: the cost of its arguments",
          called(_numba, count), {"arguments": count}) for count in (0, 1, 4, 16)),
    Row(CALL, "torch op", "torch.add(t, 1, out=t) of 1024 numbers, no gradient", called(_torch)),
    Row(CALL, "JAX jit call", "x + 1 of 1024 numbers, not waited for", called(_jax, False)),

    Row(LATENCY, "minidl stream", "a program of one call", handed(_stream)),
    Row(LATENCY, "native lane", "host: until all has ended, since the caller runs a lane itself", handed(_native_lane)),
    Row(LATENCY, "SimpleQueue", "a call put into a queue, its answer taken from another", handed(_queue)),
    Row(LATENCY, "ThreadPoolExecutor", "a call submitted to a pool of one thread", handed(_pool)),

    Row(HAND_OVER, "record to wait, by lock", "Python lanes; the waiting one sleeps on a lock of the interpreter",
        hand_over(Threads)),
    Row(HAND_OVER, "record to wait, idle lane", "native lanes; the waiting one sleeps until the system wakes it",
        hand_over(partial(native_lanes, spins=1))),
    Row(HAND_OVER, "record to wait, busy lane", "native lanes; the waiting one looks at a word of memory",
        hand_over(partial(native_lanes, spins=1 << 20))),
    Row(HAND_OVER, "native step without calls", "from the host's call until both lanes have ended",
        hand_over(native_lanes, 0)),
    Row(HAND_OVER, "event, one thread", "recorded and waited for by one thread: nobody has to wake", called(_event)),
    *(Row(HAND_OVER, f"fork and join, {count} streams", "a program without calls for each, until all are joined",
          called(_fork, count), {"streams": count}) for count in (1, 2, 4, 8)),

    Row(SINGLE, "one NumPy ufunc", ADD, alone(_ufunc)),
    Row(SINGLE, "one numba call", "of four arrays", alone(_numba, 4)),
    Row(SINGLE, "one torch op", "as above", alone(_torch)),
    Row(SINGLE, "one JAX jit call", "until its result is there", alone(_jax, True)),
    Row(SINGLE, "one native lane", "of one call", alone(_native_call, 1)),
    Row(SINGLE, "whole step, Python lanes", "training step of an MLP 16 x 64, batch 8", alone(_step, "python")),
    Row(SINGLE, "whole step, native lanes", "the same as one native call", alone(_step, "native")),

    Row(TASKS, "SimpleQueue, one by one", "each put into a worker's queue", by_length(_queued), {"by": "queue"}),
    *(Row(TASKS, f"{by}, {shape}", f"np.add, {words}", by_length(_chain, branches, make),
          {"by": by, "branches": branches})
      for by, words, make in (("Python lanes", "a program for each lane", Threads),
                              ("native lanes", "one call of compiled code", native_lanes))
      for branches, shape in CHAINS.items()),

    *(Row("a copy", f"copy of {said}", "np.copyto, from memory to memory", called(_copy, size), {"bytes": size})
      for size, said in SIZES.items()),
)
