"""Launches on the CPU: calls in the caller's thread, hand-over to a worker thread, chains of small calls on workers.

A CPU stream of minidl is a thread that gets a program, a list of calls. For comparison: the standard library's ways to
hand over one call.
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
from launches import CHAINS, Missing, Row, Samples, bursts, pieces

from minidl import device as devices
from minidl.devices.lanes import Event, Stream, Threads, Work

SIZES = {4: "4 B", 4 << 10: "4 KiB", 1 << 20: "1 MiB", 64 << 20: "64 MiB"}


def rows(quick: bool) -> Iterator[Row]:
    """All rows for the CPU; `quick`: few samples and short chains."""
    calls, rounds = (50, 5) if quick else (1000, 40)
    group = "a call in the caller's thread"

    def plain(call: Callable[[], Any]) -> Samples:
        return {"host": bursts(call, calls, rounds)}

    x, y, z = np.ones((3, 1024), np.float32)
    a, b = np.ones((2, 64, 64), np.float32)
    yield Row(group, "Python function", "what calling anything costs at least", lambda: plain(_nothing))
    yield Row(group, "NumPy ufunc", "np.add(x, y, out=z) of 1024 numbers", lambda: plain(lambda: np.add(x, y, out=z)))
    yield Row(group, "NumPy ufunc, prebuilt", "the same bound to its arrays beforehand, as minidl's tasks are",
              lambda: plain(partial(np.add, x, y, out=z)))
    yield Row(group, "NumPy product", "np.dot of 64 x 64 matrices into a third",
              lambda: plain(partial(np.dot, a, a, b)))
    for count in (0, 1, 4, 16):
        yield Row(group, f"numba loop, {count} arrays",
                  "a compiled function that does nothing: the cost of its arguments",
                  partial(_numba, count, calls, rounds), {"arguments": count})
    yield Row(group, "torch op", "torch.add(t, 1, out=t) of 1024 numbers, no gradient", lambda: plain(_torch()))
    for size, said in SIZES.items():
        yield Row("a copy", f"copy of {said}", "np.copyto, from memory to memory",
                  partial(_copy, size, max(1, min(calls, (64 << 20) // size)), rounds), {"bytes": size})

    group = "the rungs of a small call"
    for rung, words in RUNGS.items():
        yield Row(group, rung, words, partial(_rung, rung, calls, rounds), {"rung": rung})
    group = "hand-over between two lanes"
    for how, words in HAND_OVERS.items():
        yield Row(group, f"by {how}", words, partial(_hand_over, how, calls, rounds), {"hand_over": how})
    yield Row(group, "a native step without calls", "two lanes: from the host's call until both have ended",
              partial(_empty_step, calls, rounds))

    group = "hand-over to a worker thread"
    event = Event()
    yield Row(group, "minidl event, one thread",
              "recorded and waited for by one thread: the cost when nobody has to wake",
              lambda: {"host": bursts(lambda: (event.record(), event.wait()), calls, rounds)})
    yield Row(group, "minidl stream", "a program without calls; device: until it has been joined",
              lambda: _streams(1, calls, rounds))
    yield Row(group, "SimpleQueue",
              "a call is put into a queue; device: until the worker's answer is taken from another",
              lambda: _queue(calls, rounds))
    yield Row(group, "ThreadPoolExecutor",
              "a call is submitted to a pool of one thread; device: until its result is there",
              lambda: _pool(calls, rounds))
    for count in (2, 4, 8):
        yield Row(group, f"fork and join, {count} streams",
                  "a program without calls for each; device: until all have been joined",
                  partial(_streams, count, calls // 5, rounds), {"streams": count})

    lengths = (10, 100) if quick else (10, 100, 1000, 10_000)
    for n in lengths:
        yield Row("a chain of small calls, one by one", f"{n} calls, SimpleQueue",
                  "np.add of 1024 numbers, each put into a worker's queue",
                  partial(_chain_by_queue, n, _repeats(n, quick)), {"kernels": n, "branches": 1, "by": "queue"})
    for n in lengths:
        for branches, said in CHAINS.items():
            yield Row("a chain of small calls, as programs", f"{n} calls, {said}",
                      "the same, one program for each stream; host: the hand-over, shared by all calls",
                      partial(_chain, n, branches, _repeats(n, quick)),
                      {"kernels": n, "branches": branches, "by": "program"})
    for n in lengths:
        for branches, said in CHAINS.items():
            yield Row("a chain of small calls, as native lanes", f"{n} calls, {said}, native",
                      "the same as one call of compiled code for each stream",
                      partial(_native_chain, n, branches, _repeats(n, quick)),
                      {"kernels": n, "branches": branches, "by": "native lanes"})


# ------------------------------------------------------------------------------------------------------- native lanes
#: np.add of 1024 numbers, by ever less of the interpreter
RUNGS = {"Python call": "the arguments are looked up at each call",
         "prebuilt call": "bound to its arrays beforehand, and called by the interpreter",
         "native call": "a native lane of this one call: from Python into compiled code and back",
         "native graph": "a native lane of 1000 such calls, per call"}
#: between two cores, to which the two lanes are held
HAND_OVERS = {"lock": "two Python lanes take turns, each waits for a lock of the interpreter",
              "futex": "two native lanes, each sleeps at once until the kernel of the system wakes it",
              "spin": "two native lanes, each looks at a word of memory until the other has changed it"}


def native_lanes(work: Work, **options: Any) -> Any:
    if why := devices.no_native_lanes():
        raise Missing(why)
    from minidl.devices.native.lanes import NativeLanes

    return NativeLanes(work, **options)


def work_of(lanes: list[list[int]], waits: list[tuple[int, int]],
            call: Callable[[int], list[Callable[[], Any]]]) -> Work:
    """Lanes of tasks, each with the calls that `call(task)` returns."""
    return Work([f"bench {i}" for i in range(len(lanes))], [0] * len(lanes), lanes, waits,
                lambda task, stream: call(task), str)


def _rung(rung: str, calls: int, rounds: int) -> Samples:
    x, y, z = np.ones((3, 1024), np.float32)
    prebuilt = partial(np.add, x, y, out=z)
    if rung == "Python call":
        return {"host": bursts(lambda: np.add(x, y, out=z), calls, rounds)}
    if rung == "prebuilt call":
        return {"host": bursts(prebuilt, calls, rounds)}
    count = 1 if rung == "native call" else 1000
    with closing(native_lanes(work_of([[0]], [], lambda task: [prebuilt] * count))) as lanes:
        samples = bursts(lanes.run, max(1, calls // count), rounds)
    return {"host": [s / count for s in samples]}


@contextmanager
def _on_two_cores(make: Callable[[], Any]) -> Iterator[Any]:
    """Two lanes, each held to a core of its own: on one core, the system would hand over, and not the lanes."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise Missing("two lanes that take turns need two cores")
    before = set(threading.enumerate())
    with closing(make()) as lanes:
        try:
            (other,) = set(threading.enumerate()) - before
            os.sched_setaffinity(other.native_id or 0, cores[1:2])
            os.sched_setaffinity(0, cores[:1])
            yield lanes
        finally:
            os.sched_setaffinity(0, cores)


def _hand_over(how: str, calls: int, rounds: int) -> Samples:
    """Two lanes take turns, and do nothing else."""
    turns = list(range(calls))
    work = work_of([turns[::2], turns[1::2]], [(t + 1, t) for t in turns[:-1]], lambda task: [])
    make = Threads if how == "lock" else partial(native_lanes, spins=0 if how == "futex" else 1 << 20)
    with _on_two_cores(partial(make, work)) as lanes:
        return {"host": [s / calls for s in bursts(lanes.run, 1, rounds)]}


def _empty_step(calls: int, rounds: int) -> Samples:
    with _on_two_cores(partial(native_lanes, work_of([[], []], [], lambda task: []))) as lanes:
        return {"host": bursts(lanes.run, calls, rounds)}


def _native_chain(n: int, branches: int, issues: int) -> Samples:
    """As `_chain`."""
    small = _small(branches or 2)
    lanes = pieces(n, branches or 2)
    waits = [] if branches else [(t + 1, t) for t in range(n - 1)]
    with closing(native_lanes(work_of(lanes, waits, lambda task: [small[task % len(small)]]))) as native:
        return _per_kernel({kind: bursts(native.run, issues, 10) for kind in ("host", "device")}, n)


def _repeats(n: int, quick: bool) -> int:
    """How often a chain is run in each round."""
    return max(1, min(200, 20_000 // n) // (10 if quick else 1))


def _nothing() -> None:
    pass


def _numba(count: int, calls: int, rounds: int) -> Samples:
    """A compiled function of so many arrays."""
    import numba

    space: dict[str, Any] = {}
    exec(f"def nothing({', '.join(f'a{i}' for i in range(count))}):\n    pass\n", space)
    call = partial(numba.njit(nogil=True)(space["nothing"]), *[np.ones(1024, np.float32)] * count)
    call()  # compiles
    return {"host": bursts(call, calls, rounds)}


def _copy(size: int, calls: int, rounds: int) -> Samples:
    source, out = np.ones((2, size), np.uint8)
    return {"host": bursts(partial(np.copyto, out, source), calls, rounds)}


def _torch() -> Callable[[], Any]:
    import torch

    t = torch.zeros(1024)
    return lambda: torch.add(t, 1.0, out=t)


# ------------------------------------------------------------------------------------------------------------ hand-over
def _both(start: Callable[[], Any], finish: Callable[[Any], Any], calls: int, rounds: int) -> Samples:
    """`host`: the start alone; `device`: from the start to the end of `finish`, which gets what the start returned."""
    host, device = [], []
    for _ in range(rounds + 1):
        issuing = total = 0.0
        for _ in range(calls):
            begin = perf_counter()
            handle = start()
            issued = perf_counter()
            finish(handle)
            total += perf_counter() - begin
            issuing += issued - begin
        host.append(issuing / calls * 1e6)
        device.append(total / calls * 1e6)
    return {"host": host[1:], "device": device[1:]}


@contextmanager
def _workers(count: int) -> Iterator[list[Stream]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Stream(f"bench {i}"))) for i in range(count)]


def _run(streams: list[Stream], programs: list[list[Callable[[], Any]]], calls: int, rounds: int) -> Samples:
    def start() -> None:
        for stream, program in zip(streams, programs, strict=True):
            stream.start(program)

    def finish(_: Any) -> None:
        for stop in [stream.join() for stream in streams]:
            if stop.error is not None:
                raise stop.error

    return _both(start, finish, calls, rounds)


def _streams(count: int, calls: int, rounds: int) -> Samples:
    with _workers(count) as streams:
        return _run(streams, [[] for _ in streams], calls, rounds)


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


def _queue(calls: int, rounds: int) -> Samples:
    with _served() as (put, get):
        return _both(lambda: put(_nothing), lambda _: get(), calls, rounds)


def _pool(calls: int, rounds: int) -> Samples:
    with ThreadPoolExecutor(1) as pool:
        return _both(lambda: pool.submit(_nothing), lambda future: future.result(), calls, rounds)


# --------------------------------------------------------------------------------------------------------------- chains
def _small(branches: int) -> list[Callable[[], Any]]:
    """A small call for each branch, on its own arrays."""
    return [partial(np.add, *np.ones((2, 1024), np.float32), out=np.ones(1024, np.float32)) for _ in range(branches)]


def _per_kernel(whole: Samples, kernels: int) -> Samples:
    return {**{kind: [s / kernels for s in samples] for kind, samples in whole.items()}, "whole": whole["device"]}


def _chain_by_queue(n: int, issues: int) -> Samples:
    (call,) = _small(1)
    with _served() as (put, get):
        return _per_kernel(_both(lambda: [put(call) for _ in range(n)],
                                 lambda _: [get() for _ in range(n)], issues, 10), n)


def _chain(n: int, branches: int, issues: int) -> Samples:
    """`branches` streams at the same time; 0: two streams in turn, with an event between any two calls."""
    if branches:
        programs = [[call] * len(piece) for call, piece in zip(_small(branches), pieces(n, branches), strict=True)]
    else:
        events, calls = [Event() for _ in range(n - 1)], _small(2)
        programs = [[], []]
        for i in range(n):
            programs[i % 2] += [*([events[i - 1].wait] if i else []), calls[i % 2],
                                *([events[i].record] if i < n - 1 else [])]
    with _workers(len(programs)) as streams:
        return _per_kernel(_run(streams, programs, issues, 10), n)
