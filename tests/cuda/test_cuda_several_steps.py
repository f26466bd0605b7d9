"""Several steps in one launch on CUDA without a GPU: a loop on the device, whose body is the captured step."""

from __future__ import annotations

import gc
from typing import Any

import cuda_machine
import cuda_runtime
import numpy as np
import pytest
import several
from several import BATCHES

from minidl import schedulers
from minidl.core.schedule import Schedule
from minidl.devices import DeviceError
from minidl.devices.cuda import device as devices
from minidl.devices.cuda import lanes
from minidl.pricing.cost import CostModel
from minidl.runtime.checking import random_schedule
from minidl.runtime.executors import GraphExecutor, StreamExecutor
from minidl.training.job import Job
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer, TrainingError


class Run(several.Recorded):
    """Its step returns the loss alone."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(cuda_runtime.device(seed))

    def step(self, x: Any, y: Any) -> Any:
        return super().step(x, y)[0]

    def executor(self, at_once: int = 1, schedule: Schedule | None = None, **more: Any) -> Any:
        return GraphExecutor(self.graph, schedule or schedulers.in_order(self.graph), device=self.device,
                             at_once=at_once, **more)


@pytest.fixture(scope="module")
def wanted():
    run = Run()
    step = run.executor()
    losses = [float(step(*batch)) for batch in BATCHES]
    return losses, run.weights()


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(4))
def test_bits_are_those_of_single_steps_in_any_order_of_the_devices_work(wanted, seed):
    """The host runs ahead: results are asked for after all launches."""
    run = Run(seed + 1)
    step = run.executor(3, random_schedule(run.graph, 1 + seed, np.random.default_rng(seed)))
    launches = [step.steps(BATCHES[first : first + 3]) for first in (0, 3, 6)]
    assert [float(loss) for launch in launches for (loss,) in launch()] == wanted[0]
    assert run.weights() == wanted[1]


def test_a_launch_is_one_call_whatever_the_number_of_steps():
    """Beside it, the batches' copy and its event, and the results' copy and its event."""
    run = Run()
    step = run.executor(7)
    for count in (7, 2):
        issued = run.device.driver.issued
        step.steps(BATCHES[:count])()
        assert run.device.driver.issued == issued + 3


@pytest.mark.parametrize("nodes", [0, devices.NODES])
def test_single_steps_and_launches_take_turns(wanted, nodes, monkeypatch):
    """Whether the graph of a single step uploads its inputs or not."""
    monkeypatch.setattr(devices, "NODES", nodes)
    run = Run(5)
    step = run.executor(3)
    losses = [float(step(*BATCHES[0])), *(float(loss) for (loss,) in step.steps(BATCHES[1:4])()),
              *(float(step(*batch)) for batch in BATCHES[4:])]
    assert losses == wanted[0]
    assert run.weights() == wanted[1]


def test_a_launch_ends_with_the_first_step_whose_gradient_is_not_finite(wanted):
    run = Run()
    step = run.executor(6)
    bad = (np.full((5, 6), np.nan, np.float32), BATCHES[2][1])
    found = step.steps([*BATCHES[:2], bad, *BATCHES[3:6]])()
    assert [float(loss) for (loss,) in found[:2]] == wanted[0][:2]
    assert len(found) == 3
    assert run.device.not_finite()
    assert len(step.steps(BATCHES[:6])()) <= 6  # and it runs again


def test_the_loops_graph_goes_with_its_executor():
    run = Run()
    machine = run.device.driver.machine
    step = run.executor(2)
    assert any(graph.body is not None for graph in machine.graphs.values())
    step.close()
    del step
    gc.collect()
    assert not machine.graphs


def test_an_error_while_the_body_is_captured_ends_the_capture(monkeypatch):
    run = Run()
    monkeypatch.setattr(lanes.Captured, "_check", lambda *_: (_ for _ in ()).throw(DeviceError("an edge is missing")))
    with pytest.raises(DeviceError, match="an edge"):
        run.executor(2)
    monkeypatch.undo()
    run.executor(2).steps(BATCHES[:2])()


def test_steps_that_are_issued_one_by_one_stay_single(wanted):
    run = Run()
    step = StreamExecutor(run.graph, schedulers.in_order(run.graph), device=run.device, at_once=4)
    assert [float(loss) for (loss,) in step.steps(BATCHES[:4])()] == wanted[0][:4]


def test_a_trace_needs_single_steps():
    with pytest.raises(ValueError, match="leave no trace of a captured step"):
        Run().executor(2, trace=True)


def test_a_run_in_launches_has_the_losses_and_bits_of_single_steps(there):
    found = []
    for at_once in (1, 4):
        there(at_once)
        job = Job(model="mlp", model_args={"preset": "tiny"}, batch_size=64, device="cuda", fusion=())
        trainer, done = Trainer(Recorded(job), CostModel.analytic(), at_once=at_once), 0
        while done < 6:
            done += trainer.several(min(at_once, 6 - done))
        trainer.settle()
        found.append((trainer.losses, trainer.params_sha256()))
    assert found[0] == found[1]
    assert len(found[0][0]) == 6


def test_the_step_that_is_to_blame_is_named(there):
    there(3)
    trainer = Trainer(Recorded(Job(model="mlp", model_args={"preset": "tiny"}, batch_size=64, device="cuda")),
                      CostModel.analytic(), at_once=5)
    inputs, read = trainer._inputs, []

    def spoilt() -> Any:
        read.append(1)
        x, *rest = inputs()
        return [x if len(read) != 3 else np.full_like(x, 3e38), *rest]

    trainer._inputs = spoilt  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="at step 3 of mlp"):
        trainer.several(5)
        trainer.settle()
    assert len(trainer.losses) == 3


# ------------------------------------------------------------------------------------------- what the stand-in refuses
def body_of(run: Run, fill: Any) -> Any:
    """A loop whose body is what `fill` issues."""
    driver = run.device.driver
    return lanes.capture(driver, run.device.main, fill, driver.loop())


def test_a_body_has_no_events():
    run = Run()
    stamp = run.device.driver.record_in_graph(run.device.driver.event(True), run.device.main)
    with pytest.raises(AssertionError, match="a body of a loop may have no events"):
        body_of(run, stamp)


def test_a_loop_that_nobody_ends_is_found(monkeypatch):
    monkeypatch.setattr(cuda_machine, "ENDLESS", 5)
    run = Run()
    memory = run.device.allocate(8)
    graph = body_of(run, lambda: run.device.zero(memory))
    run.device.driver.replay(graph, run.device.main)()
    with pytest.raises(AssertionError, match="a loop on the device does not end"):
        run.device.synchronize()
