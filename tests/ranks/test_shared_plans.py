"""Ranks of one process share a recording and a plan, and nothing that they train."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from command_line import reported

import minidl as ml
from minidl import schedulers
from minidl.autograd.tape import Storage
from minidl.core.graph import Role
from minidl.core.machine import Machine
from minidl.plans import program
from minidl.pricing.cost import CostModel, Link
from minidl.runtime.comm.loopback import run_ranks
from minidl.training import recorded as recording
from minidl.training.job import Job
from minidl.training.pipeline_trainer import PipelineTrainer
from minidl.training.rank_trainer import RankTrainer
from minidl.training.recorded import Recorded

JOB = Job(model="mlp", model_args={"hidden": 8}, batch_size=8, micro_batches=4, scheduler="one_f_one_b",
          parallel="pipeline")


@pytest.mark.parametrize(("flags", "planned"), [
    (["--parallel", "pipeline", "--ranks", "4", "--scheduler", "one_f_one_b"], {"plan": 1, "lowered": 4}),
    (["--parallel", "pipeline", "--ranks", "2", "--scheduler", "one_f_one_b", "--replicas", "2"],
     {"plan": 1, "lowered": 4}),
    (["--parallel", "data", "--ranks", "3", "--scheduler", "reverse_first_k"], {})])  # it plans for each k
def test_a_dry_run_records_and_plans_once_and_draws_nothing(monkeypatch, capsys, flags, planned):
    """And each rank lowers its own part of the plan."""
    counts, allocate, got = Counter(), Storage.allocate, list[Storage]()

    def counted(name, function):
        return lambda *args, **kwargs: counts.update([name]) or function(*args, **kwargs)

    def remembered(storage, device):
        got.append(storage)
        allocate(storage, device)

    monkeypatch.setattr(recording, "record", counted("record", recording.record))
    monkeypatch.setattr(schedulers, "plan", counted("plan", schedulers.plan))
    monkeypatch.setattr(program.Division, "program", counted("lowered", program.Division.program))
    monkeypatch.setattr(Storage, "allocate", remembered)
    reported(capsys, "train", "--model", "mlp", "--model-arg", "hidden=8", "--batch-size", "24", "--micro-batches", "4",
             "--costs", "analytic", "--steps", "1", "--dry-run", *flags)
    assert counts["record"] == 1
    assert counts | planned == counts
    assert not [s.name for s in got if s.role == Role.PARAMETER or s.name.startswith("momentum")]


def test_a_copy_of_a_recording_has_weights_and_states_of_its_own():
    recorded = Recorded(JOB)
    copy = recorded.copy(0)
    own, theirs = (dict(r.model.named_parameters()) for r in (recorded, copy))
    for name, p in own.items():
        assert p.storage is not theirs[name].storage
        assert np.array_equal(p.numpy(), theirs[name].numpy())
    next(iter(own.values())).assign(np.zeros(next(iter(own.values())).shape, np.float32))
    assert next(iter(theirs.values())).numpy().any()
    live, others = ([spec.live for spec in r.graph.storages if spec.live is not None] for r in (recorded, copy))
    assert len(live) == len(others)
    assert not {*map(id, live)} & {*map(id, others)}
    trained = {id(p.storage) for p in copy.optimizer.parameters}
    assert trained == {id(p.storage) for p in theirs.values()} <= {*map(id, others)}


def test_a_program_on_other_objects_keeps_its_waits_and_its_memory_plan():
    recorded = Recorded(JOB)
    copy = recorded.copy(0)
    plan = recorded.plan(CostModel.analytic(), Machine(2))
    mine = plan.program(1)
    memory = mine.body[0].memory
    live = {id(a.live): b.live for a, b in zip(recorded.graph.storages, copy.graph.storages, strict=True)}
    other = mine.with_live(live)
    assert other.body[0].memory is memory
    assert other.prologue is not mine.prologue
    assert [s.live for s in other.graph.storages] == [live[id(s.live)] if s.live else None for s in mine.graph.storages]


def test_each_program_of_a_plan_is_lowered_once():
    plan = Recorded(JOB).plan(CostModel.analytic(), Machine(2))
    assert plan.program(1) is plan.programs[1] is plan.distinct_programs[1]
    assert plan.with_known(scheduler="another").program(1) is plan.program(1)
    assert replace(plan, limit=1).program(1) is not plan.program(1)
    with pytest.raises(ml.MemoryLimitError, match="more than the limit of 1"):
        replace(plan, limit=1).divided()


def test_data_parallel_ranks_of_a_process_share_one_recording_and_plan_with_dropout_of_their_own(monkeypatch):
    """The bits are those of ranks that record and plan by themselves."""
    job = Job(model="gpt", model_args={"preset": "tiny", "dropout": 0.5}, batch_size=8, scheduler="reverse_first_k",
              parallel="data")
    plans = []
    made = schedulers.plan
    monkeypatch.setattr(schedulers, "plan", lambda *args, **kwargs: plans.append(1) or made(*args, **kwargs))

    def trained(own, alone):
        def work(communicator):
            rank = communicator.rank
            one = RankTrainer(own[rank], CostModel.analytic(), communicator, (1.0, 1e-3), k=1)
            if alone:
                one._of, plan = own[rank], own[rank].plan(one._base, one._machine, k=1)
                one._use(plan)
            for _ in range(2):
                one.step()
            one.finish()
            return one.losses, one.params_sha256()

        return run_ranks(2, work)

    apart = trained([Recorded(job, rank, 2) for rank in range(2)], True)
    plans.clear()
    first = Recorded(job, 0, 2)
    assert trained([first.copy(rank) for rank in range(2)], False) == apart
    assert len(plans) == 1


def test_a_rank_of_a_pipeline_draws_its_own_stages_alone():
    first = Recorded(JOB)

    def work(communicator):
        own = first.copy(0)
        one = PipelineTrainer(own, CostModel.analytic(), communicator, Link(50.0, 1e3))
        before = {name for name, p in own.model.named_parameters() if p.storage.initial is None}
        one.step()
        drawn = {name for name, p in own.model.named_parameters() if p.storage.initial is None}
        one.finish()
        return before, drawn, one.params_sha256()

    (before, mine, sha), (other, theirs, same) = run_ranks(2, work)
    assert before == other == set()
    assert mine | theirs == {name for name, _ in first.model.named_parameters()}
    assert not mine & theirs
    assert sha == same
