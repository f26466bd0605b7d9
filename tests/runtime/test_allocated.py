"""The planned peak is what a run allocates, to the byte, on every rank; and a step makes no arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import Case, arrays_left, bytes_allocated, deadline, python_calls, sgd_momentum
from rank_runs import check

import minidl as ml
from minidl.devices.device import CPU
from minidl.runtime.checking import random_schedule
from minidl.runtime.executors import Runtime, StreamExecutor, runtime
from minidl.training.job import Job
from minidl.training.recorded import Recorded

GPT = {"model": "gpt", "model_args": {"preset": "tiny", "layers": 4}, "batch_size": 8}
RESNET = {"model": "resnet20", "batch_size": 4}
MLP = {"model": "mlp", "model_args": {"preset": "tiny"}, "batch_size": 16}


def allocated(run: Runtime) -> int:
    """Bytes of all the memory that the tasks of a run use; each piece is what one call of `allocate` returned."""
    pieces: dict[int, Any] = {}
    for part in (*run._body, *run._prologue, *run._epilogue):
        pieces |= {id(memory): memory for memory in (part.bound.arena, *part.bound.persistent)}
    return sum(len(memory) for memory in pieces.values())


def step(run: Runtime, recorded: Recorded) -> None:
    run(*recorded._split(*next(recorded.train_data)))


@pytest.mark.few(1)
@pytest.mark.parametrize("recompute", ["none", "sqrt", "all"])
@pytest.mark.parametrize("scheduler", ["in_order", "multi_region"])
@pytest.mark.parametrize("job", [GPT, RESNET], ids=["gpt", "resnet20"])
def test_one_device_allocates_its_planned_peak(job: dict[str, Any], scheduler: str, recompute: str,
                                               monkeypatch: pytest.MonkeyPatch):
    recorded = Recorded(Job(**job, optimizer="adam", scheduler=scheduler, recompute=recompute))
    plan = recorded.plan(ml.CostModel.analytic())
    run = runtime(plan.program(), device=recorded.device)
    assert allocated(run) == plan.peak_bytes[0]
    asked: list[int] = []
    for name in ("allocate", "arena", "lasting"):
        monkeypatch.setattr(CPU, name, lambda self, nbytes: asked.append(nbytes))
    step(run, recorded)
    assert not asked
    run.close()


@pytest.mark.skipif(ml.device.cpu().lanes_used != "native", reason="no native lanes")
def test_a_step_is_few_calls_of_python():
    mine = Recorded(Job(**MLP))
    run = runtime(mine.plan(ml.CostModel.analytic()).program(), device=mine.device)
    inputs = mine._split(*next(mine.train_data))
    run(*inputs)
    assert len(python_calls(lambda: run(*inputs))) <= 13


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", [
    *({"scheduler": name, "ranks": 1, "replicas": 2, "micro_batches": 1, "recompute": again} for name, again in (
        ("barrier", "sqrt"), ("reverse_first_k", "all"), ("dear", "none"))),
    *({"scheduler": name, "recompute": again} for name, again in (
        ("one_f_one_b", "none"), ("zb_h1", "all"), ("zb_v", "sqrt"))),
    {"scheduler": "pipedream_2bw", "every": 4, "recompute": "all"}], ids=lambda settings: settings["scheduler"])
def test_each_rank_allocates_its_planned_peak(settings: dict[str, Any]):
    """Which `check` asserts of every run, with the bits of one process."""
    check({**settings, "optimizer": "adam", "norm": True, "drop": True})


@pytest.mark.parametrize("lanes", [1, 3])
def test_no_array_data_is_allocated_in_a_step(lanes):
    case = Case(("linear", "relu", "tied", "dropout", "tied", "gain", "residual", "norm", "maximum", "softmax"),
                width=256, batch=512, optimizer=sgd_momentum)
    _, _, step = case.make()
    (values,) = case.batches(1)
    graph = ml.record(step, *values)
    run = StreamExecutor(graph, random_schedule(graph, lanes, np.random.default_rng(2)))
    with deadline():
        assert arrays_left(lambda: run(*values)) <= 16, "the outputs, two numbers, are all that a call may leave"
        # nor for a while: activations have 512 KiB; NumPy itself goes through broadcast operands in pieces of 8192
        assert bytes_allocated(lambda: run(*values)) < 150_000
    run.close()
