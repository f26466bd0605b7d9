"""A share of the GPU for the second lane: what lanes get, what libraries are told, and that no bits depend on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cuda_runtime
import pytest
from gpu_steps import Run, equal, trained

import minidl as ml
from minidl import schedulers
from minidl.cli import main
from minidl.core.graph import Launch, View
from minidl.core.schedule import SIDE, Schedule
from minidl.devices import DeviceError
from minidl.kernels import cuda
from minidl.measuring import sms as measuring
from minidl.pricing.sms import Sms
from minidl.runtime.executors import GraphExecutor, StreamExecutor


def used(device: Any, stream: Any) -> range:
    """The multiprocessors that a stream's work uses."""
    found = device.driver.machine.queues[stream.ptr].sms
    return range(132) if found is None else found


# -------------------------------------------------------------------------------------------------------------- streams
@pytest.mark.parametrize("side", [8, 40, 120])
def test_lanes_have_multiprocessors_of_their_own(side):
    """All lanes but the first share theirs; priorities stay; the same streams are given again."""
    device = cuda_runtime.device()
    first, second, third = streams = device.streams((0, 1, 1), side)
    assert device.main not in streams
    assert [stream.sms for stream in streams] == [132 - side, side, side]
    assert [len(used(device, stream)) for stream in streams] == [132 - side, side, side]
    assert not set(used(device, first)) & set(used(device, second))
    assert used(device, second) == used(device, third)
    assert second is not third
    priorities = [device.driver.machine.queues[stream.ptr].priority for stream in streams]
    assert priorities == [-1, 0, 0]
    assert device.streams((0, 1, 1), side) == streams
    assert device.streams((0, 1))[0] is device.main
    assert device.streams((0, 1))[1] is not second


def test_what_the_gpu_cannot_divide_is_one_line():
    device = cuda_runtime.device()
    for side in (12, 132, 200):
        with pytest.raises(DeviceError, match=rf"the SMs of the GPU cannot be divided into {132 - side} and {side}: .*;"
                                              rf" it needs a driver of CUDA 12.4 or later, and steps of 8 SMs"):
            device.streams((0, 1), side)
    device.driver.extended.cuGreenCtxCreate = None
    del device.driver.extended.cuGreenCtxCreate  # bindings of an older CUDA
    with pytest.raises(DeviceError, match="has no attribute 'cuGreenCtxCreate'"):
        device.streams((0, 1), 32)


# ------------------------------------------------------------------------------------------------------------ libraries
def test_libraries_are_told_of_their_share_and_keep_their_algorithm(cache):
    """cuBLASLt by an attribute, cuDNN by its plan's; the choice is the one of all multiprocessors."""
    device = cuda_runtime.device()
    device.small_products = False
    side = device.streams((0, 1), 32)[1]
    memory = device.allocate(1 << 16)
    a, b, out = (device.array(memory, View(256 * i, (4, 4), (4, 1), 0, "float32")) for i in range(3))
    x, w, y = (device.array(memory, View(1024 * (i + 1), shape, (64, 16, 4, 1), 0, "float32"))
               for i, shape in enumerate(((1, 4, 4, 4), (1, 2, 2, 4), (1, 3, 3, 1))))
    conv = cuda.Convolution("forward", x, w, y, (1, 1), (0, 0), (1, 1), 1)
    products, dnn = device._products(), device._dnn()
    whole = device._thunk(cuda.Product(a, b, out), device.main)
    share = device._thunk(cuda.Product(a, b, out), side)
    descriptors = [products.lt.blas.objects[thunk.owners[1].operation] for thunk in (whole, share)]
    assert [d.get(15) for d in descriptors] == [None, 32]
    assert whole.owners[2].tobytes() == share.owners[2].tobytes()
    assert len(products._chosen) == 1
    graphs = [device._thunk(conv, stream).owners[1] for stream in (device.main, side)]
    assert [graph.options.get("sm_count") for graph in graphs] == [None, 32]
    assert len(dnn._told) == 1
    (key, (_, place)), (_, chosen) = next(iter(dnn._told.items())), next(iter(dnn._plans.values()))
    assert (key[1], graphs[1].get_plan_name_at_index(place)) == (32, graphs[0].get_plan_name_at_index(chosen))
    assert len(dnn._plans) == 1


# ---------------------------------------------------------------------------------------------------------------- steps
def divided(graph: Any, side: int = 32) -> Schedule:
    order = schedulers.multi_stream(graph)
    return replace(order, notes={**order.notes, SIDE: str(side)})


@pytest.mark.few(1)
@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_steps_with_a_share_have_the_bits_of_the_sequential_run(model, cache):
    """Issued call by call, and captured; every lane's work is on its part."""
    wanted = trained(cuda_runtime.device(), steps=2, model=model)
    for kind in (StreamExecutor, GraphExecutor):
        run = Run(cuda_runtime.device(1), model)
        step = run.executor(kind, divided)
        lanes = step._body[0].lanes
        assert [len(used(run.device, stream)) for stream in lanes.streams] == [100, 32]
        assert equal(run.train(step, 2), wanted)
        step.close()


def test_what_comes_before_and_after_the_loop_is_divided_alike(cache):
    """Of a plan in which weight gradients run one step late."""
    wanted, run = trained(cuda_runtime.device(), steps=3), Run(cuda_runtime.device(1))
    units = 1 + int(run.graph.unit.max())
    kinds = {kind: [time] * units for kind, time in (("F", 10.0), ("O", 1.0), ("W", 30.0), ("U", 10.0))}
    factors = {run.graph.name(t): (1.0,) for t in range(len(run.graph))}
    cost = ml.CostModel(kinds=kinds, sms=Sms(132, 8, (32,), factors))
    plan = schedulers.plan(run.graph, "multi_region", cost, side_sms=32)
    assert "@1" in plan.schedule.grid()
    step = GraphExecutor(run.graph, plan.schedule, device=run.device)
    assert len(step._prologue) > 0
    for part in (*step._prologue, *step._body, *step._epilogue):
        assert [stream.sms for stream in part.lanes.streams] == [100, 32][: len(part.lanes.streams)]
    assert equal(run.train(step, 3), wanted)
    step.close()


def test_a_share_on_the_cpu_is_one_line():
    run = Run(ml.device.get("cpu"))
    with pytest.raises(DeviceError, match="the plan gives its second lane 32 SMs of a GPU; cpu has none"):
        run.executor(StreamExecutor, divided)


# ---------------------------------------------------------------------------------------------------------------- costs
def test_times_are_measured_at_three_counts(monkeypatch):
    monkeypatch.setattr(measuring, "SIZE", 1 << 12)
    run = Run(cuda_runtime.device())
    sms = measuring.measure_sms(run.graph, run.device)
    assert (sms.total, sms.step, sms.counts) == (132, 8, [32, 64])
    assert sms.bandwidth > 0
    assert sms.slower.keys() == {run.graph.name(t) for t in range(len(run.graph))}
    assert all(len(factors) == 2 and min(factors) >= 1 for factors in sms.slower.values())


def test_what_groups_need_is_told_by_bytes_and_grids(monkeypatch):
    """A launch of our kernels by its threads, a library's by its result; copies from the host need nothing."""
    monkeypatch.setattr(measuring, "SIZE", 1 << 12)
    monkeypatch.setattr(measuring, "bandwidth", lambda device, size: 1e3)
    run = Run(cuda_runtime.device())
    names = [run.graph.name(t) for t in range(len(run.graph))]
    cost = ml.CostModel(tasks=dict.fromkeys(names, 10.0))
    found = measuring.needs(run.graph, cost, {name: name for name in names}, run.device)
    assert found.keys() == set(names)
    for task, name in enumerate(names):
        assert found[name][0] == pytest.approx(min(1.0, float(run.graph.bytes[task]) / 1e4))
        assert 0 <= found[name][1] <= 1
    device, memory = run.device, run.device.allocate(1 << 22)
    wide, few = (Launch("relu", (View(0, (n,), (1,), 0, "float32"),), (View(0, (n,), (1,), 0, "float32"),))
                 for n in (1 << 20, 1 << 10))
    whole, little = (device.filled(launch, lambda view: device.array(memory, view)) for launch in (wide, few))
    assert little < 0.05 < whole <= 1
    view = View(0, (128, 128), (128, 1), 0, "float32")
    product = Launch("matmul", (view, view), (view,))
    assert device.filled(product, lambda view: device.array(memory, view)) == pytest.approx(2 / 132)


@pytest.mark.slow
def test_a_run_with_a_share_says_it_and_has_equal_bits(there, cache, command, monkeypatch, capsys, tmp_path):
    """By the command line: auto, a number, one that cannot be; the plan's file has it."""
    monkeypatch.setattr(measuring, "SIZE", 1 << 12)
    there()
    common = ("--model", "mlp", "--model-arg", "hidden=16", "--batch-size", "8", "--device", "cuda", "--costs",
              "analytic", "--scheduler", "multi_region")

    shares = ((), ("--side-sms", "32"), ("--side-sms", "auto"))
    assert len({command("train", *common, "--steps", "3", *more)["params_sha256"] for more in shares}) == 1
    assert main(["train", *common, "--steps", "3", "--side-sms", "33"]) == 2
    assert "of 132 SMs the side lanes can have 8 to 124, in steps of 8" in capsys.readouterr().err
    plan = tmp_path / "plan.csv"
    assert main(["plan", *common, "--side-sms", "32", "--save", str(plan)]) == 0
    capsys.readouterr()
    assert ("# side SMs: 32" in plan.read_text()) == ("sub" in plan.read_text())
    assert command("compare", *common[:-2], "--steps", "2", "--schedulers", "in_order,multi_region", "--side-sms",
                   "32")["bit_identical"]
