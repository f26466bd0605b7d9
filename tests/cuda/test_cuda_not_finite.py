"""Gradients that are not finite, on CUDA without a GPU: who is told, of which step, and that nobody waits for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cuda_runtime
import numpy as np
import pytest
from helpers import late_schedule

import minidl as ml
from minidl import nn, optim, schedulers
from minidl.autograd.tape import Tape, use
from minidl.core.schedule import Lane, Schedule
from minidl.passes.boundary import must_stay, with_late
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import GraphExecutor, SequentialExecutor, StreamExecutor, TaskError
from minidl.training.job import Job
from minidl.training.rank_trainer import RankTrainer
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer, TrainingError, interleaved

HUGE = 3e38


# ----------------------------------------------------------------------------------------------------------- one device
class Step:
    """y = x w, a loss whose gradient is x / 3, and an update."""

    def __init__(self, device: Any) -> None:
        self.device = device
        with use(Tape(device)):
            self.w = ml.Parameter(np.ones((4, 3), np.float32))
            self.opt = optim.SGD([self.w], 0.01)
            self.graph = ml.record(self, np.zeros((2, 4), np.float32))

    def __call__(self, x: Any) -> Any:
        loss = (x @ self.w).mean()
        loss.backward()
        self.opt.step()
        return loss


def ones(bad: float = 1.0) -> Any:
    x = np.ones((2, 4), np.float32)
    x[1, 2] = bad
    return x


@pytest.mark.few(1)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", [StreamExecutor, GraphExecutor, SequentialExecutor, "eager"])
def test_a_device_tells_once(there, kind, bad):
    device = there(4)
    step = Step(device)
    if kind == "eager":
        def run(x: Any) -> None:
            with use(Tape(device)):
                step(ml.array(x))
    else:
        run = (SequentialExecutor(step.graph, device) if kind is SequentialExecutor
               else kind(step.graph, schedulers.multi_stream(step.graph), device=device))
    assert device.not_finite() is False
    run(ones())
    assert device.not_finite() is False
    run(ones(bad))
    run(ones())
    assert device.not_finite() is True
    assert device.not_finite() is False


def test_each_answer_is_of_what_was_issued_before_it(there):
    device = there(5)
    step = Step(device)
    run = StreamExecutor(step.graph, schedulers.multi_stream(step.graph), device=device)
    answers = []
    for bad in (1, np.nan, 1, 1, np.inf, 1, np.nan):
        run(ones(bad))
        answers.append(device.fetch_not_finite())
    assert [answer() for answer in reversed(answers)] == [True, False, True, False, False, True, False]
    assert [answer() for answer in answers] == [False, True, False, False, True, False, True]


@pytest.mark.parametrize("before", [False, True])
def test_capturing_leaves_the_flag_as_it_was(there, before):
    """A step that divides by its input has no finite gradient when it is tried on zeros."""
    device = there(6)
    step = Step(device)
    with use(Tape(device)):
        bad = ml.record(lambda x: step(x / x), np.zeros((2, 4), np.float32))
    if before:
        SequentialExecutor(step.graph, device)(ones(np.nan))
    run = GraphExecutor(bad, schedulers.in_order(bad), device=device)
    assert device.not_finite() is before
    run(np.zeros((2, 4), np.float32))
    assert device.not_finite() is True


def test_the_cpu_does_not_look():
    step = Step(ml.device.cpu())
    SequentialExecutor(step.graph)(ones(np.nan))
    assert ml.device.cpu().not_finite() is None
    assert ml.device.cpu().fetch_not_finite()() is None


# ----------------------------------------------------------------------------------------------------------------- runs
class Overflow:
    """A job's batches, of which one makes a gradient overflow while its loss stays finite.

    One pixel is 0 in all others, and the weights behind it are 0: the value there counts in their gradient alone.
    """

    def __init__(self, recorded: Recorded, at: int | None, value: float = HUGE) -> None:
        self.recorded, self.at, self.value, self.count = recorded, at, value, 0
        self.split, recorded._split = recorded._split, self
        first, *_, last = (p for p in recorded.model.parameters() if len(p.shape) == 2)
        weights = np.array(first.numpy())  # a row for each unit
        weights[:, 0] = 0
        first.assign(weights)
        last.assign(last.numpy() * 500)

    def __call__(self, x: Any, y: Any) -> Any:
        self.count += 1
        x = x.copy()
        x.reshape(len(x), -1)[:, 0] = self.value if self.count == self.at else 0
        return self.split(x, y)


JOB = Job(model="mlp", model_args={"hidden": 16}, device="cuda", batch_size=16, lr=1e-5)


def trainer_of(at: int | None, **more: Any) -> Trainer:
    recorded = Recorded(replace(JOB, **more))
    Overflow(recorded, at)
    return Trainer(recorded, ml.CostModel.analytic())


def steps(trainer: Trainer, count: int = 12) -> None:
    for _ in range(count):
        trainer.step()
    trainer.settle()


ARGUMENTS = [{}, {"optimizer": "adamw", "scheduler": "multi_stream"}, {"scheduler": "multi_region", "fusion": ()},
             {"micro_batches": 2}]


@pytest.mark.few(1)
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("at", [1, 4, 11])
def test_a_gradient_that_overflows_is_told_with_its_step(there, arguments, at):
    there(at)
    trainer = trainer_of(at, **arguments)
    with pytest.raises(TrainingError, match=rf"^a gradient is not finite at step {at} of mlp with lr 1e-05; try .* "
                                            rf"\(MINIDL_DEBUG=1 names the layer\)$"):
        steps(trainer)
    assert len(trainer.losses) == at
    assert np.isfinite(trainer.losses).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("ends", [Trainer.settle, lambda trainer: interleaved([trainer], 0)],
                         ids=["settle", "interleaved"])
def test_a_late_gradient_of_the_very_last_step_is_told_too(there, ends):
    there(3)
    recorded = Recorded(JOB)
    Overflow(recorded, 4)
    stay = must_stay(recorded.graph)
    crossing = np.flatnonzero(~stay)
    schedule = with_late(Schedule.of(recorded.graph, {Lane(0): [*crossing, *np.flatnonzero(stay)]}),
                         recorded.graph, crossing)
    trainer = Trainer(recorded, ml.CostModel.analytic(), schedule=schedule)
    for _ in range(4):
        trainer.step()
    trainer.collect()
    with pytest.raises(TrainingError, match="^a gradient is not finite at step 4 "):
        ends(trainer)


@pytest.mark.few(1)
@pytest.mark.parametrize("arguments", [*ARGUMENTS, {"dtype": "bf16"}], ids=str)
def test_a_run_that_is_well_is_told_nothing(there, arguments):
    there(2)
    trainer = trainer_of(None, **arguments)
    steps(trainer)
    assert len(trainer.losses) == 12


@pytest.mark.slow
def test_a_step_that_loss_scaling_skips_is_no_failure(there):
    device = there(3)
    trainer = trainer_of(None, dtype="fp16")
    scaler = trainer.recorded.optimizer.scaler
    scaler._scale.assign(np.float32(2.0**40))
    steps(trainer)
    assert scaler._scale.numpy()[0] < 2.0**40
    assert not device.not_finite()


def test_the_next_run_in_the_process_starts_afresh(there):
    device = there(1)
    with pytest.raises(TrainingError, match="at step 2 "):
        steps(trainer_of(2))
    steps(trainer_of(None))
    step = Step(device)
    SequentialExecutor(step.graph, device)(ones(np.nan))
    steps(trainer_of(None))


def test_the_next_run_does_not_finish_the_last_one(there):
    """Updates that an executor still owes are made before a run begins, not in its first step."""
    device = there(2)
    last, following = Recorded(JOB), Recorded(JOB)
    batches = Overflow(last, 1), Overflow(following, None)
    stay = must_stay(last.graph)
    late = [t for t in range(len(last.graph)) if not stay[t]]
    owing = StreamExecutor(last.graph, late_schedule(last.graph, late, schedulers.in_order), device=device)
    owing(*batches[0](*next(last.train_data)))
    steps(Trainer(following, ml.CostModel.analytic()))


def test_runs_in_turn_are_told_of_their_own_steps(there):
    there(7)
    bad, good = trainer_of(3), trainer_of(None)
    with pytest.raises(TrainingError, match="at step 3 "):
        interleaved([good, bad], 12)
    good.collect()
    assert len(good.losses) >= 11


def test_nobody_waits_for_the_device_in_a_step(there, monkeypatch):
    """But for the slot of two steps ago, which then gives losses and flags away; a step of training is one launch."""
    device = there(8)
    trainer = trainer_of(None)
    assert trainer.run is not None  # which draws the weights and binds the step
    waited: list[Any] = []
    machine = device.driver.machine
    original = machine.synchronize_event

    def refuse(self: Any, *stream: Any) -> None:
        raise AssertionError("the host waits for a stream")

    monkeypatch.setattr(cuda_runtime.Runtime, "synchronize", refuse)
    monkeypatch.setattr(cuda_runtime.Runtime, "synchronize_device", refuse)
    monkeypatch.setattr(machine, "synchronize_event", lambda event: waited.append(event) or original(event))
    issued = []
    for n in range(1, 13):
        before = device.driver.issued
        trainer.step()
        issued.append(device.driver.issued - before)
        assert len(waited) == n
    assert {*issued} == {1}


def of_rank(communicator: Any, at: int, device: str = "cuda") -> Any:
    """A data-parallel rank's trainer; a gradient of rank 1 overflows in step `at`."""
    rank = communicator.rank
    recorded = Recorded(replace(JOB, device=f"cuda:{rank}" if device == "cuda" else device, scheduler="priority",
                                parallel="data"), rank, 2)
    Overflow(recorded, at if rank else None)
    return RankTrainer(recorded, ml.CostModel.analytic(), communicator, (50.0, 1e-3))


@pytest.mark.few(1)
@pytest.mark.parametrize("at", [1, 3, 6])
def test_ranks_are_told_of_the_same_step(there, at):
    """Of the one whose gradients they are, although updates are made in the next call, those of the last step when the
    run is finished. One rank's gradient is everybody's."""
    for rank in (0, 1):
        there(rank, rank)

    def work(communicator: Any) -> str:
        trainer = of_rank(communicator, at)
        with pytest.raises(TrainingError) as found:
            for _ in range(6):
                trainer.step()
            trainer.finish()
        return str(found.value)

    messages = run_ranks(2, work)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"a gradient is not finite at step {at} of mlp")


# ------------------------------------------------------------------------------------------------------------ debugging
@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", [StreamExecutor, GraphExecutor])
def test_debugging_names_the_task(there, monkeypatch, kind, seed):
    """On any stream, also where a step would be replayed: here the weight gradient of the first layer
    overflows alone."""
    monkeypatch.setenv("MINIDL_DEBUG", "1")
    device = there(seed)
    with use(Tape(device)):
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        weights = np.ones((5, 4), np.float32)
        weights[:, 2] = 0
        model.parameters()[0].assign(weights)
        model.parameters()[2].assign(np.ones((3, 5), np.float32))
        opt = optim.SGD(model.parameters(), 1e-6)

        def step(x: Any) -> Any:
            loss = model(x).mean() * 1000
            loss.backward()
            opt.step()
            return loss

        graph = ml.record(step, ones())
    run = kind(graph, schedulers.multi_stream(graph), device=device)
    x = ones()
    x[:, 2] = 0
    assert np.isfinite(float(run(x)))
    x[:, 2] = HUGE
    with pytest.raises(TaskError,
                       match=r"task 0W0 \(.*\) on lane 0/sub failed: FloatingPointError: .* not finite") as found:
        run(x)
    assert found.value.task == "0W0"


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_debugging_names_the_task_and_the_rank(there, monkeypatch, name):
    """In the second step, and in the fourth, which would be replayed."""
    monkeypatch.setenv("MINIDL_DEBUG", "1")
    for rank in (0, 1):
        there(rank, rank)
    for at in (2, 4):
        reached = [0, 0]

        def work(communicator: Any, at: int = at, reached: list[int] = reached) -> None:
            trainer = of_rank(communicator, at, name)
            for _ in range(6):
                reached[communicator.rank] += 1
                trainer.step()

        with pytest.raises(TaskError,
                           match=r"task 1W0 \(mlp/layer0/linear\) on rank 1 failed: FloatingPointError: .* not finite"):
            run_ranks(2, work)
        assert reached[1] == at
