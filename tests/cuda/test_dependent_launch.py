"""Dependent launch: in a captured step, a kernel of ours may start before the kernel before it has ended, and waits for
it. The GPU that is not there lets it start in every second case, as drawn."""

from __future__ import annotations

import re
from typing import Any

import cuda_runtime
import numpy as np
import pytest
from cuda_on_cpu import run_packed, sources
from gpu_steps import Run, equal, trained
from helpers import drawn

from minidl import schedulers
from minidl.core.graph import View
from minidl.devices import DeviceError
from minidl.devices.cuda.device import Cuda
from minidl.devices.cuda.lanes import capture
from minidl.kernels import cuda
from minidl.runtime.executors import GraphExecutor, StreamExecutor

WAITS = "begin_kernel(); "


def device(seed: int = 0) -> Cuda:
    made = cuda_runtime.device(seed)
    made.dependent_launch = True
    return made


def edges(graph: Any, machine: Any) -> list[tuple[int, int]]:
    return sorted(machine.graphs[graph.captured].early.items())


# -------------------------------------------------------------------------------------------------------------- sources
@pytest.mark.parametrize("source", sorted(p.name for p in cuda.SOURCES.glob("*.cu")))
def test_every_kernel_begins_with_its_wait(source):
    plain = re.sub(r"//[^\n]*|/\*.*?\*/", "", cuda.text(source), flags=re.DOTALL)
    bodies = re.findall(r"__global__[^{;]*\{\s*(.{16})", plain)
    assert len(bodies) == len(cuda.kernels_of(source))
    assert set(bodies) == {WAITS}


# ----------------------------------------------------------------------------------------------------------- what waits
CHAIN = """
#include "common.cuh"
__global__ void first(int* x) { %s x[threadIdx.x] = 7; }
__global__ void then(const int* x, int* y) {
    __shared__ int held[4];
    held[threadIdx.x] = threadIdx.x;  // before its wait, in memory of its own
    %s
    __syncthreads();
    y[threadIdx.x] = x[threadIdx.x] + held[3 - threadIdx.x];
}
"""


def chained(waits: str, seed: int) -> tuple[Any, Any]:
    """What a captured chain of the two kernels writes, and the programmatic edges of its graph."""
    name = "chain.cu" if waits else "hasty_chain.cu"
    with sources({name: CHAIN % (WAITS, waits)}):
        made = device(seed)
        driver, memory, launches = made.driver, made.allocate(64), []
        x, y = (made.array(memory, View(4 * i, (4,), (1,), 0, "int32")) for i in range(2))
        # handles of a source that is not in the folder
        driver._function = lambda source, kernel, dependent: {"first": 1, "then": 2}[kernel]
        driver.machine.functions |= {1: (name, "first"), 2: (name, "then")}
        for kernel, arguments in (("first", (x,)), ("then", (x, y))):
            launches.append(driver.launch(cuda.Grid(name, kernel, (1,), (4,), arguments), made.main))
        for launch in launches:
            launch()
        driver.zeros(x, made.main)()
        graph = capture(driver, made.main, lambda: [launch() for launch in launches])
        driver.replay(graph, made.main)()
        return made.read(y).tolist(), edges(graph, driver.machine)


def test_a_kernel_that_waits_reads_what_is_written_before_it():
    for seed in range(drawn(6)):
        assert chained(WAITS, seed) == ([10, 9, 8, 7], [(0, 1)])


def test_a_kernel_without_its_wait_is_found():
    """By name, in the cases in which it starts early."""

    def outcome(seed: int) -> str:
        try:
            return str(chained("", seed)[0])
        except AssertionError as error:
            return str(error)

    assert {outcome(seed) for seed in range(8)} == {
        "[10, 9, 8, 7]", "then: it was started before the launch before it had ended, and does not wait for that"}


def test_an_error_of_the_kernel_that_is_awaited_is_its_own():
    def broken() -> None:
        raise ZeroDivisionError

    with sources({"chain.cu": CHAIN % (WAITS, WAITS)}), pytest.raises(ZeroDivisionError):
        x = np.zeros(4, np.int32)
        packed = cuda.Packed(cuda.Grid("chain.cu", "then", (1,), (4,), (x, x.copy())))
        run_packed("chain.cu", "then", (1,), (4,), 0, [bytes(v) for v in packed.values], 0, broken)


# ---------------------------------------------------------------------------------------------------------------- edges
def fills(made: Cuda, *streams: Any) -> list[Any]:
    memory, found = made.allocate(1024), []
    made.kept = memory  # as long as what is captured
    for i, stream in enumerate(streams):
        array = made.array(memory, View(32 * i, (8,), (1,), 0, "float32"))
        found += made.calls("fill", [array], [array], stream, value=float(i))
    for call in found:
        call()
    made.synchronize()
    return found


def test_only_edges_between_two_kernels_of_one_stream_are_programmatic():
    """Behind a memset, a copy, a product of cuBLASLt, an event or on another stream, a kernel waits for all of it."""
    made = device()
    driver, (one, other) = made.driver, made.streams((0, 1))
    a, b, c, d, e = fills(made, one, one, other, one, one)
    memory = made.allocate(64)
    zero = driver.zeros(made.array(memory, View(0, (4,), (1,), 0, "float32")), one)
    fork, join = driver.event(), driver.event()

    def fill() -> None:
        for call in (a, b, zero, driver.record(fork, one), driver.wait(other, fork), c, d, driver.record(join, other),
                     driver.wait(one, join), e):
            call()

    graph = capture(driver, one, fill)
    # nodes: a 0, b 1, zero 2, c 3, d 4, e 5
    assert edges(graph, driver.machine) == [(0, 1)]
    nodes, pairs = driver.dependencies(graph)
    assert sorted(pairs) == [(0, 1), (1, 2), (2, 3), (2, 4), (3, 5), (4, 5)]


def test_nothing_is_early_outside_of_a_capture_or_without_being_asked_for():
    made = device()
    assert len(fills(made, made.main, made.main)) == 2  # issued: the machine refuses a launch that may start early
    made.dependent_launch = False
    calls = fills(made, made.main, made.main)
    graph = capture(made.driver, made.main, lambda: [call() for call in calls])
    assert edges(graph, made.driver.machine) == []


def test_an_older_gpu_says_that_it_cannot():
    made = cuda_runtime.device()
    made.driver.architecture = 80
    made.dependent_launch = False
    with pytest.raises(DeviceError, match=r"needs a GPU of compute capability 9\.0 \(Hopper\) or later; cuda:0 has 8"):
        made.dependent_launch = True


# ---------------------------------------------------------------------------------------------------------------- steps
@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
def test_steps_have_the_bits_of_the_sequential_run(seed):
    wanted, made = trained(cuda_runtime.device(seed), steps=3), device(seed)
    run, order = Run(made), (schedulers.in_order, schedulers.multi_stream)[seed % 2]
    step = run.executor(GraphExecutor, order)
    assert equal(run.train(step, 3), wanted)
    early = [pair for graph in step._body[0].lanes.graphs for pair in edges(graph, made.driver.machine)]
    assert len(early) > 4
    assert equal(trained(made, StreamExecutor, order, 3), wanted)
