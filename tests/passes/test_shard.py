"""Sharded updates: the bits of ranks that update everything, less memory, whole checkpoints, refusals of one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import one_line, run, run_json
from helpers import deadline

import minidl as ml
from minidl.autograd.tape import use
from minidl.runtime.comm.loopback import run_ranks
from minidl.training import checkpoint
from minidl.training.rank_trainer import RankTrainer
from minidl.training.trainer import Job, Recorded

SMALL = {"model": "mlp", "model_args": {"layers": 3, "hidden": 13}, "batch_size": 24}
GPT = {"model": "gpt", "model_args": {"preset": "tiny"}, "batch_size": 12}


def trained(ranks: int, steps: int, job: dict[str, Any], load: Path | None = None, save: Path | None = None
            ) -> list[tuple[str, dict[str, bytes], int]]:
    """Of each rank the parameters' hash, rank 0's whole states, and the bytes that it has allocated."""
    task = Job(**{"optimizer": "adamw", "scheduler": "barrier", **job}, parallel="data")
    every = [Recorded(task, rank, ranks) for rank in range(ranks)]

    def work(communicator: Any) -> tuple[str, dict[str, bytes], int]:
        recorded = every[communicator.rank]
        if load is not None:
            with use(recorded.tape):
                checkpoint.load(load, recorded.model, recorded.optimizer, loader=recorded.train_data)
        trainer = RankTrainer(recorded, ml.CostModel.analytic(), communicator, (1.0, 0.001))
        for step in range(steps):
            trainer.step()
            if step == 0:
                trainer.share()  # in the midst
        trainer.finish()
        if save is not None and communicator.rank == 0:
            checkpoint.save(save, recorded.model, recorded.optimizer, step=steps, loader=recorded.train_data)
        held = sum(len(m) for m in [trainer.run._body[0].bound.arena, *trainer.run._body[0].bound.persistent])
        assert held == trainer.program.peak_bytes
        states = {}
        if communicator.rank == 0:
            with use(recorded.tape):
                states = {name: t.numpy().tobytes() for name, t in recorded.optimizer.named_tensors()}
        return trainer.params_sha256(), states, held

    with deadline():
        return run_ranks(ranks, work)


@pytest.mark.parametrize(("ranks", "job"), [
    (2, {}), (3, {}), (2, {"optimizer": "sgd"}), (2, {"optimizer": "rmsprop"}), (2, {"scheduler": "buckets"}),
    (2, {"scheduler": "no_overlap", "recompute": "all"}), (3, {"micro_batches": 2}), (2, {"dtype": "float64"}),
    (2, GPT), (3, {**GPT, "model_args": {"preset": "tiny", "dropout": 0.1}, "scheduler": "buckets"})], ids=str)
def test_bits_and_states_are_those_of_ranks_that_update_everything(ranks: int, job: dict[str, Any]):
    plain, own = (trained(ranks, 3, {**SMALL, **job, "shard": level}) for level in (0, 1))
    assert {sha for sha, *_ in own} == {plain[0][0]}
    assert own[0][1] == plain[0][1]


def test_states_take_the_share_of_a_rank():
    """Each of three ranks has a third of Adam's two states, up to an element a parameter."""
    task = {**SMALL, "optimizer": "adam", "scheduler": "barrier", "parallel": "data"}
    machine = ml.Machine(3, collective=lambda sizes: 1.0)

    def states(level: int) -> int:
        recorded = Recorded(Job(**task, shard=level), 0, 3)
        graph = recorded.plan(ml.CostModel.analytic(), machine).graph
        return sum(s.bytes for s in graph.storages if s.role == ml.Role.STATE)

    whole, own = states(0), states(1)
    assert whole / 3 <= own <= whole / 3 + 2 * 4 * 6


def test_a_checkpoint_is_whole_and_loads_on_any_number_of_ranks_and_level(tmp_path: Path):
    first, again = tmp_path / "first", tmp_path / "again"
    trained(2, 2, {**SMALL, "shard": 1}, save=first)
    whole = trained(2, 4, {**SMALL, "shard": 0})
    for level in (0, 1):
        assert trained(2, 2, {**SMALL, "shard": level}, load=first)[0][:2] == whole[0][:2]
    trained(3, 1, {**SMALL, "shard": 1}, load=first, save=again)
    assert again.exists()


@pytest.mark.parametrize(("flags", "why"), [
    (["--scheduler", "priority"], "priority updates beside"), (["--scheduler", "fifo"], "fifo updates beside the next"),
    (["--scheduler", "dear"], "dear cuts its sums"), (["--scheduler", "barrier", "--clip", "1"], "as clipping by norm"),
    (["--scheduler", "barrier", "--ranks", "1"], "at least 2 ranks")])
def test_a_step_that_cannot_be_sharded_is_one_line(capsys: Any, flags: list[str], why: str):
    base = ["plan", "--model", "mlp", "--model-arg", "preset=tiny", "--costs", "analytic", "--parallel", "data",
            "--ranks", "2", "--shard", "1"]
    code, out, err = run(capsys, *base, *flags)
    assert (code, out) == (2, "")
    assert why in one_line(err)


def test_shard_without_ranks_is_one_line(capsys: Any):
    code, out, err = run(capsys, "plan", "--model", "mlp", "--costs", "analytic", "--shard", "1")
    assert (code, out) == (2, "")
    assert "--shard has no effect on a network's step on one device" in one_line(err)


def test_a_sharded_plan_says_its_tasks_and_its_lower_peak(capsys: Any):
    base = ["plan", "--model", "mlp", "--costs", "analytic", "--parallel", "data", "--ranks", "4", "--scheduler",
            "barrier", "--optimizer", "adam"]
    plain, own = (run_json(capsys, *base, "--shard", level)[1] for level in "01")
    assert own["peak_bytes"] < plain["peak_bytes"]
    assert own["tasks"] > plain["tasks"]
    assert "AG0" in run(capsys, *base, "--shard", "1")[1]


def test_shares_of_arrays_of_any_size_meet_again():
    """Of arrays of odd sizes, also of fewer elements than ranks."""
    from minidl.core.tasks import Kind
    from minidl.runtime.comm.places import Shares

    random = np.random.default_rng(0)
    values = [[random.normal(size=n).astype("f") for n in (1, 2, 7, 12)] for _ in range(3)]

    def work(communicator: Any) -> list[np.ndarray]:
        own = [a.copy() for a in values[communicator.rank]]
        shares = [np.full(-(-a.size // 3), np.nan, "f") for a in own]
        for kind, place in ((Kind.AS, Shares(communicator, own, shares)), (Kind.AG, Shares(communicator, own, shares))):
            for _ in communicator.bind(kind, place, 0)():
                pass
        return own

    wanted = [(a + b + c) * np.float32(1 / 3) for a, b, c in zip(*values, strict=True)]
    with deadline():
        for found in run_ranks(3, work):
            for a, b in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(a, b)


def test_a_saved_order_is_checked_planned_and_says_that_it_is_sharded(capsys: Any, tmp_path: Path):
    file = str(tmp_path / "plan.csv")
    more = ["--model", "mlp", "--costs", "analytic", "--parallel", "data", "--ranks", "2"]
    known = run_json(capsys, "plan", *more, "--scheduler", "barrier", "--shard", "1", "--save", file)[1]
    code, checked = run_json(capsys, "check", file, *more, "--scheduler", "barrier", "--shard", "1")
    assert (code, checked["peak_bytes"]) == (0, known["peak_bytes"])
    again = run_json(capsys, "plan", *more, "--scheduler", file)[1]
    assert [again[key] for key in ("tasks", "waits", "peak_bytes", "period")] == [
        known[key] for key in ("tasks", "waits", "peak_bytes", "period")]


def test_whole_gradients_are_free_once_they_are_scattered():
    """This is all that ZeRO 2 adds for one micro-batch."""
    task = Job(**SMALL, optimizer="adam", scheduler="barrier", parallel="data", shard=1)
    graph = Recorded(task, 0, 2).plan(ml.CostModel.analytic(), ml.Machine(2, collective=lambda sizes: 1.0)).graph
    for t in graph:
        if t.kind == ml.Kind.AS:
            gone = {b.index for b in t.reads if b.role == ml.Role.GRADIENT}
            assert gone
            assert not any(gone & {b.index for b in (*u.reads, *u.writes)} for u in list(graph)[t.index + 1 :])
