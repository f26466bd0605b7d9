"""Offload on CUDA, without a GPU: activations and optimizer states go to pinned memory of the host and come back, on
streams of their own and in captured graphs, and leave the bits of the plain run, whatever order streams run in."""

from __future__ import annotations

import gc
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import cuda_runtime
import numpy as np
import pytest
from covering import pairs
from helpers import drawn
from test_offload import Net, batches, recorded

import minidl as ml
from minidl import optim
from minidl.autograd.tape import Tape, use
from minidl.cli import main
from minidl.core.graph import View
from minidl.core.tasks import Kind
from minidl.devices import DeviceError
from minidl.devices.cuda import device as devices
from minidl.devices.cuda import lanes
from minidl.devices.cuda.device import Cuda
from minidl.devices.far import OnHost
from minidl.measuring.far import measure_far
from minidl.runtime.checking import random_schedule
from minidl.runtime.executors import CheckingExecutor, GraphExecutor, SequentialExecutor, StreamExecutor

KINDS = {"streams": StreamExecutor, "captured": GraphExecutor}
WHATS = "activations", "states", "all"
OPTIMIZERS = {"adam": optim.Adam, "adamw": optim.AdamW,
              "momentum": lambda parameters, lr: optim.SGD(parameters, lr, momentum=0.9)}


def trained(device: Any, kind: Any = SequentialExecutor, optimizer: Any = optim.Adam, order: Any = None,
            **options: Any) -> tuple[list[bytes], dict[str, bytes], Any]:
    """Losses, everything that outlives the steps, and the plan. `order`: from the plan's graph to another order."""
    with use(Tape(device)):
        ml.seed(0)
        model = Net()
        graph = recorded(model, optimizer=optimizer)
        plan = ml.plan(graph, options.pop("policy", "in_order"), **options)
        run = (SequentialExecutor(graph, device) if kind is SequentialExecutor
               else kind(plan.graph, order(plan.graph) if order else plan.schedule, device=device))
        losses = [run(*batch) for batch in batches()]
        return ([loss.numpy().tobytes() for loss in losses],
                {name: a.tobytes() for name, a in model.state_dict().items()}, plan)


@cache
def plainly(optimizer: str = "adam") -> Any:
    """What plain steps leave, on a device of their own."""
    return trained(cuda_runtime.device(), optimizer=OPTIMIZERS[optimizer])[:2]


@pytest.mark.parametrize(*pairs(what=WHATS, kind=[*KINDS], optimizer=[*OPTIMIZERS],
                                policy=["in_order", "multi_stream"]))
def test_bits_are_those_of_the_plain_step(there, policy, optimizer, kind, what):
    """With dropout and batch norm."""
    again = trained(there(1), KINDS[kind], OPTIMIZERS[optimizer], policy=policy, offload=what)
    assert again[:2] == plainly(optimizer)
    assert {Kind.D, Kind.H} <= {t.kind for t in again[2].graph}


@pytest.mark.parametrize(("kind", "seed"), [
    (StreamExecutor, 0), *(pytest.param(kind, seed, marks=pytest.mark.wide) for seed in range(drawn(8))
                           for kind in (*KINDS.values(), CheckingExecutor))])
def test_any_legal_order_of_the_copies_leaves_the_bits(there, kind, seed):
    def order(graph: Any) -> Any:
        return random_schedule(graph, 2 + seed % 3, np.random.default_rng(seed))

    found = trained(there(seed), kind, order=order, policy="multi_stream", offload=("all", *WHATS)[seed % 4])
    assert found[:2] == plainly()


def test_a_missing_wait_shows(there, monkeypatch):
    """Without the events around what is copied out, some order gives other numbers; labels stay where they are."""
    wanted = plainly()

    def lost(self: Any, work: Any, trace: bool = False) -> Any:
        out = {*work.tasks[work.names.index("0/out")]}
        return lanes.Streams(self, replace(work, waits=[w for w in work.waits if out.isdisjoint(w)]), trace)

    monkeypatch.setattr(Cuda, "lanes", lost)
    assert any(trained(there(seed), StreamExecutor, offload="all")[:2] != wanted for seed in range(8))


def test_the_planned_peak_is_allocated_to_the_byte(there):
    device = there()
    with use(Tape(device)):
        plan = ml.plan(recorded(Net()), "in_order", offload="all")
        run = GraphExecutor(plan.graph, plan.schedule, device=device)
    bound = run._body[0].bound
    pieces = {id(memory): memory for memory in (bound.arena, *bound.persistent)}.values()
    near = [memory for memory in pieces if not isinstance(memory, OnHost)]
    assert sum(map(len, near)) == plan.peak_bytes[0]
    assert len(near) < len(pieces)
    assert all(device.driver.owns(memory) for memory in pieces)


def test_states_stay_far_are_read_written_and_train_on(there):
    """Also single numbers, which a launch would set elsewhere."""
    device, left = there(2), plainly()[1]
    with use(Tape(device)):
        ml.seed(0)
        model = Net()
        graph = recorded(model)
        plan = ml.plan(graph, "in_order", offload="states")
        for batch, kind in zip(batches(), KINDS.values(), strict=False):
            kind(plan.graph, plan.schedule, device=device)(*batch)
        SequentialExecutor(graph, device)(*batches()[2])
        assert {name: a.tobytes() for name, a in model.state_dict().items()} == left
        away = [s.live for s in plan.graph.storages if s.role == "far"]
        assert away
        assert all(isinstance(live.data, OnHost) for live in away)
    memory = device.far(8)
    for offset in (0, 1):
        device.write(device.array(memory, View(0, (1,), (1,), offset, "float32")), 1.5)
    copy = device.duplicate(memory)
    assert devices.owner(copy) is device
    assert device.read(device.array(copy, View(0, (2,), (1,), 0, "float32"))).tolist() == [1.5, 1.5]


def test_threads_make_executors_at_once(there):
    device = there()
    with use(Tape(device)):
        plans = [ml.plan(recorded(Net()), "multi_stream", offload=what) for what in ("all", "none", "activations")]

        def make(plan: Any) -> Any:
            return GraphExecutor(plan.graph, plan.schedule, device=device)

        with ThreadPoolExecutor(3) as pool:
            runs = list(pool.map(make, plans, timeout=60))
        for run in runs:
            run(*batches()[0]).numpy()


@pytest.mark.parametrize("what", WHATS)
def test_a_capture_pins_no_second_far_memory(there, monkeypatch, what):
    device, pinned, far = there(), list[int](), Cuda.far
    with use(Tape(device)):
        plan = ml.plan(recorded(Net()), "in_order", offload=what)
        monkeypatch.setattr(Cuda, "far", lambda self, n, rank=0: pinned.append(n) or far(self, n, rank))
        GraphExecutor(plan.graph, plan.schedule, device=device)
    assert len(pinned) == 1  # one piece for all that is far


@pytest.mark.parametrize("kind", KINDS.values())
def test_an_executor_that_is_dropped_gives_its_memory_back_after_its_work(there, kind):
    device = there()
    with use(Tape(device)):
        plan = ml.plan(recorded(Net()), "in_order", offload="all")
        for _ in range(2):
            kind(plan.graph, plan.schedule, device=device)(*batches()[0])
            gc.collect()
        device.synchronize()


def test_the_link_to_the_host_is_measured(there):
    assert measure_far(there()).bandwidth > 0


def test_memory_that_cannot_be_pinned_is_one_line(there, monkeypatch, capsys):
    def refuse(self: Any, nbytes: int) -> Any:
        if nbytes < 5000:
            return original(self, nbytes)
        raise RuntimeError("cudaErrorMemoryAllocation: out of memory")

    original = cuda_runtime.Runtime.pinned
    monkeypatch.setattr(cuda_runtime.Runtime, "pinned", refuse)
    device = there()
    with pytest.raises(DeviceError, match=r"cuda:0 cannot pin 5,000 bytes of the host's memory: cudaErrorMemoryAlloc"
                                          r"ation: out of memory; offload less, or leave --offload out"):
        device.far(5000)
    assert main(["train", *JOB, "--offload", "all"]) == 2
    assert re.fullmatch(r"minidl: cuda:0 cannot pin [\d,]+ bytes of .*", capsys.readouterr().err.splitlines()[-1])


JOB = ("--model", "mlp", "--model-arg", "hidden=16", "--batch-size", "16", "--steps", "6", "--costs", "analytic",
       "--device", "cuda")


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_runs_go_on_from_checkpoints_with_and_without_offloading(there, command, tmp_path, optimizer):
    there()
    job, saved = ("train", *JOB, "--optimizer", optimizer), ("--checkpoint", str(tmp_path))
    wanted = command(*job)["params_sha256"]
    assert command(*job, "--offload", "all")["params_sha256"] == wanted
    command(*job, "--steps", "2", "--offload", "all", *saved)
    command(*job, "--steps", "4", "--resume", *saved)
    assert command(*job, "--resume", "--scheduler", "in_order", "--offload", "states",
                   *saved)["params_sha256"] == wanted


@pytest.mark.slow
def test_a_limit_alone_chooses_what_leaves(there, command):
    there()
    whole = command("plan", *JOB[:6], *JOB[8:], "--optimizer", "adam")
    limit = ("--memory-limit", str(int(whole["peak_bytes"] * 0.9)))
    least = command("plan", *JOB[:6], *JOB[8:], "--optimizer", "adam", *limit)
    assert least["peak_bytes"] <= int(limit[1])


def test_a_file_is_for_the_cpu(there, capsys):
    there()
    assert main(["train", *JOB, "--offload", "all", "--offload-to", "x"]) == 2
    assert "--offload-to has no effect here; it goes with --device cpu" in capsys.readouterr().err
