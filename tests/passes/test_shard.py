"""Sharded updates: the bits of ranks that update everything, less memory, whole checkpoints, refusals of one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import refusal, run, run_json
from helpers import together
from rank_runs import CLASSES, WIDTH, check

import minidl as ml
from minidl import nn, ops
from minidl.autograd.tape import use
from minidl.plans.memory import MemoryLimitError, lifetimes
from minidl.training import checkpoint
from minidl.training.job import Job
from minidl.training.rank_trainer import RankTrainer
from minidl.training.recorded import Recorded

SMALL = {"model": "mlp", "model_args": {"layers": 3, "hidden": 13}, "batch_size": 24}
CONV = {"model": "resnet20", "model_args": {"width": 2}, "batch_size": 4, "optimizer": "sgd"}
GPT = {"model": "gpt", "model_args": {"preset": "tiny"}, "batch_size": 12}


def run_to_the_end(trainer: RankTrainer, steps: int, save: Path | None) -> None:
    """Trains, shares states in the midst of it, and saves a checkpoint on rank 0."""
    for step in range(steps):
        trainer.step()
        if step == 0:
            trainer.share()
    trainer.finish()
    recorded = trainer.recorded
    if save is not None and trainer.communicator.rank == 0:
        checkpoint.save(save, recorded.model, recorded.optimizer, step=steps, loader=recorded.train_data)


def trained(ranks: int, steps: int, job: dict[str, Any], load: Path | None = None, save: Path | None = None
            ) -> list[tuple[str, dict[str, bytes], int]]:
    """Of each rank the parameters' hash, rank 0's whole states, and the bytes that it has allocated. States are shared
    in the midst of the training, and rank 0 saves a checkpoint."""
    task = Job(**{"optimizer": "adamw", "scheduler": "barrier", **job}, parallel="data")
    every = [Recorded(task, rank, ranks) for rank in range(ranks)]

    def work(communicator: Any) -> tuple[str, dict[str, bytes], int]:
        recorded = every[communicator.rank]
        if load is not None:
            with use(recorded.tape):
                checkpoint.load(load, recorded.model, recorded.optimizer, loader=recorded.train_data)
        trainer = RankTrainer(recorded, ml.CostModel.analytic(), communicator, (1.0, 0.001))
        run_to_the_end(trainer, steps, save)
        held = sum(len(m) for m in [trainer.run._body[0].bound.arena, *trainer.run._body[0].bound.persistent])
        assert held == trainer.program.peak_bytes
        states = {}
        if communicator.rank == 0:
            with use(recorded.tape):
                states = {name: t.numpy().tobytes() for name, t in recorded.optimizer.named_tensors()}
        return trainer.params_sha256(), states, held

    return together(ranks, work)


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "job"), [
    (3, {}), (2, {"optimizer": "rmsprop", "clip": 0.5}),
    (2, {"scheduler": "buckets"}), (2, {"scheduler": "no_overlap", "recompute": "all", "clip": 0.5}),
    (3, {"micro_batches": 2, "clip": 0.5}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (2, {"optimizer": "sgd"}), (2, {"dtype": "float64"}), (2, CONV),
        (4, {**GPT, "model_args": {"preset": "tiny", "dropout": 0.1}, "scheduler": "buckets", "micro_batches": 3,
             "recompute": "all", "clip": 0.5})))], ids=str)
def test_bits_and_states_are_those_of_ranks_that_update_everything(ranks: int, job: dict[str, Any]):
    plain = trained(ranks, 2, {**SMALL, **job})
    for shard in (1, "2,prefetch=0", "3,prefetch=0,keep=none", "3,prefetch=1,keep=1"):
        own = trained(ranks, 2, {**SMALL, **job, "shard": shard})
        assert {sha for sha, *_ in own} == {plain[0][0]}, shard
        assert own[0][1] == plain[0][1], shard


def test_a_checkpoint_is_whole_and_loads_on_any_number_of_ranks_and_level(tmp_path: Path):
    whole = trained(2, 4, SMALL)[0][:2]
    for saved, loaded in ((1, 0), (0, 3), (3, 1)):
        file = tmp_path / f"{saved} {loaded}"
        trained(2, 2, {**SMALL, "shard": saved}, save=file)
        assert trained(2, 2, {**SMALL, "shard": loaded}, load=file)[0][:2] == whole
    other = trained(3, 1, {**SMALL, "shard": 0}, load=file)[0][:2]
    assert trained(3, 1, {**SMALL, "shard": 3}, load=file)[0][:2] == other


DATA = ["--parallel", "data", "--ranks", "2", "--scheduler", "barrier", "--shard", "1"]


@pytest.mark.parametrize(("flags", "why"), [
    (["--scheduler", "priority"], "priority updates beside"), (["--scheduler", "fifo"], "fifo updates beside the next"),
    (["--scheduler", "dear"], "dear cuts its sums"), (["--ranks", "1"], "at least 2 ranks"),
    (["--shard", "3,keep=99"], "no sum of gradients 99A0"), (["--shard", "4"], "shard is '4'; it must be 1 (states)"),
    (["--shard", "2,prefetch=10000000"], "2 or 3 with ,prefetch=N"), (["--shard", "1,prefetch=2"], "2 or 3 with ,pre"),
    (["--shard", "3,prefetch=auto"], "all alike have one distance"), (["--shard", "2,prefetch=1+2"], "all alike have"),
    (["--parallel", "none", "--scheduler", "in_order", "--ranks", "1"], "--shard has no effect on a network's step")])
def test_a_step_that_cannot_be_sharded_is_one_line(capsys: Any, flags: list[str], why: str):
    more = [] if "none" in flags else DATA
    told = ["--shard", "1"] if "none" in flags else flags
    assert why in refusal(capsys, "plan", "--model", "mlp", "--costs", "analytic", *more, *told)


def test_a_sharded_plan_says_its_tasks_and_its_lower_peak(capsys: Any):
    """Each of four ranks has a quarter of Adam's two states, up to an element a parameter."""
    base = ["plan", "--model", "mlp", "--costs", "analytic", "--parallel", "data", "--ranks", "4", "--scheduler",
            "barrier", "--optimizer", "adam"]
    plain, own = (run_json(capsys, *base, "--shard", level)[1] for level in "01")
    assert own["peak_bytes"] < plain["peak_bytes"]
    assert own["tasks"] > plain["tasks"]
    assert "AG0" in run(capsys, *base, "--shard", "1")[1]
    job, machine = Job(**SMALL, optimizer="adam", scheduler="barrier", parallel="data"), ml.Machine(4)
    states = [sum(s.bytes for s in Recorded(replace(job, shard=level), 0, 4).plan(
        ml.CostModel.analytic(), machine).graph.storages if s.role == ml.Role.STATE) for level in (0, 1)]
    assert states[0] / 4 <= states[1] <= states[0] / 4 + 2 * 4 * 6


def test_shares_of_arrays_of_any_size_meet_again():
    """Of arrays of odd sizes, also of fewer elements than ranks."""
    from minidl.core.tasks import Kind
    from minidl.runtime.comm.places import Share

    random = np.random.default_rng(0)
    values = [[random.normal(size=n).astype("f") for n in (1, 2, 7, 12)] for _ in range(3)]

    def work(communicator: Any) -> list[np.ndarray]:
        own = [a.copy() for a in values[communicator.rank]]
        shares = [np.full(-(-a.size // 3), np.nan, "f") for a in own]
        for kind in (Kind.AS, Kind.AG):
            for array, share in zip(own, shares, strict=True):
                for _ in communicator.bind(kind, Share(communicator, array, share, np.empty(3 * share.size, "f")), 0)():
                    pass
        return own

    wanted = [(a + b + c) * np.float32(1 / 3) for a, b, c in zip(*values, strict=True)]
    for found in together(3, work):
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.few(1)
@pytest.mark.parametrize("flags", [
    ["barrier", "--shard", "1"],
    ["barrier", "--recompute", "all", "--shard", "3,prefetch=1,keep=none"], ["barrier", "--offload", "activations"],
    ["priority", "--recompute", "all"], ["buckets", "--recompute", "sqrt", "--offload", "all", "--shard", "2"]],
    ids=str)
def test_a_saved_order_says_all_that_a_check_needs(capsys: Any, tmp_path: Path, flags: list[str]):
    """Its notes say how ranks sum, what they share out and what leaves, also if the policy is named."""
    file = str(tmp_path / "plan.csv")
    more = ["--model", "gpt", "--model-arg", "preset=tiny", "--batch-size", "16", "--costs", "analytic",
            "--parallel", "data", "--ranks", "2"]
    known = run_json(capsys, "plan", *more, "--scheduler", *flags, "--save", file)[1]
    for named in ([], ["--scheduler", flags[0]]):
        code, checked = run_json(capsys, "check", file, *more, *named)
        assert code == 0, checked
        assert [checked[key] for key in ("tasks", "peak_bytes", "predicted_step_ms")] == [
            known[key] for key in ("tasks", "peak_bytes", "predicted_step_ms")]
    again = run_json(capsys, "plan", *more, "--scheduler", file)[1]
    assert [again[key] for key in ("tasks", "waits", "peak_bytes", "period")] == [
        known[key] for key in ("tasks", "waits", "peak_bytes", "period")]
    told = refusal(capsys, "check", file, *more[:-2], "--scheduler", flags[0])
    assert told == "minidl: the number of ranks is missing; give --ranks P\n"


def prefetching(shard: str, clip: float | None = None) -> tuple[dict[str, str], dict[str, str], int, int]:
    """Of five equal layers 1, 3 .. 9 on two ranks: for each all-gather the task for which it waits, for each weight
    gradient the scatter for which it waits, the most layers that are whole at one time, and the peak.

        1F 2F 3F .. 9F 10F   10O 9W 9O 8O .. 3W 3O 2O 1W   11U 1U 3U .. 9U
    """
    job = Job(model="mlp", model_args={"layers": 5, "hidden": 64}, batch_size=8, optimizer="adam", scheduler="barrier",
              parallel="data", shard=shard, clip=clip)
    plan = Recorded(job, 0, 2).plan(ml.CostModel.analytic(), ml.Machine(2, collective=lambda sizes: 1.0))
    graph = plan.graph
    waits = {t.name: [graph.name(p) for p in sorted(graph.preds[t.index].tolist())] for t in graph}
    gathers = [(t, {b.index for b in t.writes}) for t in graph if t.kind == ml.Kind.AG]
    while_whole = [(g.index, max(t.index for t in graph if own & {b.index for b in t.reads})) for g, own in gathers]
    return ({g.name: waits[g.name][-1] if waits[g.name] else "" for g, _ in gathers},
            {name: before for name, found in waits.items() if "W" in name for before in found if "AS" in before},
            max(sum(a <= g.index <= b for a, b in while_whole) for g, _ in gathers), plan.peak_bytes[0])


@pytest.mark.parametrize(("shard", "waits", "whole"), [
    ("3,prefetch=0,keep=none", {"1AG0": "", "3AG0": "1F0", "5AG0": "3F0", "7AG0": "5F0", "9AG0": "7F0",
                                "7AG0/1": "9O0", "5AG0/1": "7O0", "3AG0/1": "5O0"}, 1),
    ("3,prefetch=1,keep=none", {"1AG0": "", "3AG0": "", "5AG0": "1F0", "7AG0": "3F0", "9AG0": "5F0",
                                "5AG0/1": "9O0", "3AG0/1": "7O0"}, 2),
    ("3,prefetch=2,keep=none", {"1AG0": "", "3AG0": "", "5AG0": "", "7AG0": "1F0", "9AG0": "3F0",
                                "3AG0/1": "9O0"}, 3),
    ("3,prefetch=4,keep=none", {"1AG0": "", "3AG0": "", "5AG0": "", "7AG0": "", "9AG0": ""}, 5),
    ("3,prefetch=9,keep=none", {"1AG0": "", "3AG0": "", "5AG0": "", "7AG0": "", "9AG0": ""}, 5),
    ("3,prefetch=0,keep=5", {"1AG0": "", "3AG0": "1F0", "5AG0": "3F0", "7AG0": "5F0", "9AG0": "7F0",
                             "7AG0/1": "9O0", "3AG0/1": "7O0"}, 2),
    ("3,prefetch=1,keep=9", {"1AG0": "", "3AG0": "", "5AG0": "1F0", "7AG0": "3F0", "9AG0": "5F0",
                             "5AG0/1": "9O0", "3AG0/1": "7O0"}, 2)])
def test_gathers_run_ahead_as_far_as_told(shard: str, waits: dict[str, str], whole: int):
    assert prefetching(shard)[::2] == (waits, whole)


@pytest.mark.few(1)
@pytest.mark.parametrize("level", ["2,prefetch={}", "3,prefetch={},keep=none"])
def test_so_many_gradients_may_be_whole_besides_one(level: str):
    order = ["9", "7", "5", "3", "1"]
    for ahead in range(6):
        assert prefetching(level.format(ahead))[1] == {
            f"{then}W0": f"{one}AS0" for one, then in zip(order, order[1 + ahead :], strict=False)}
    assert prefetching("1")[1] == {}


def test_each_layer_ahead_takes_memory():
    """Up to where the peak is elsewhere: at the end of the backward pass two layers are left."""
    for level, clip in (("3,prefetch={},keep=none", None), ("2,prefetch={}", 0.5)):
        peaks = [prefetching(level.format(ahead), clip)[3] for ahead in range(3)]
        assert peaks[0] < peaks[1] <= peaks[2], level


@pytest.mark.parametrize(("ahead", "waits"), [(0, ["1AS0", "13U0", "15U0", "17U0", "19U0"]),
                                              (1, ["1AS0", "3AS0", "13U0", "15U0", "17U0"]),
                                              (4, ["1AS0", "3AS0", "5AS0", "7AS0", "9AS0"])])
def test_whole_gradients_for_their_norms_come_one_after_the_other(ahead: int, waits: list[str]):
    found = prefetching(f"2,prefetch={ahead}", clip=0.5)[0]
    assert [found[f"{layer}AG0"] for layer in (1, 3, 5, 7, 9)] == waits


def test_whole_gradients_are_free_once_they_are_scattered():
    """This is all that ZeRO 2 adds for one micro-batch."""
    task = Job(**SMALL, optimizer="adam", scheduler="barrier", parallel="data", shard=1)
    graph = Recorded(task, 0, 2).plan(ml.CostModel.analytic(), ml.Machine(2, collective=lambda sizes: 1.0)).graph
    for t in graph:
        if t.kind == ml.Kind.AS:
            gone = {b.index for b in t.reads if b.role == ml.Role.GRADIENT}
            assert gone
            assert not any(gone & {b.index for b in (*u.reads, *u.writes)} for u in list(graph)[t.index + 1 :])


def holds(graph: Any, schedule: Any) -> tuple[int, int]:
    """The most bytes of parameters, states and gradients at one time, shares and whole ones; and the bytes of the
    largest layer."""
    sums = [t for t in graph if t.kind in (ml.Kind.A, ml.Kind.AS, ml.Kind.AG)]
    moved = {v.storage for t in sums for launch in t.launches for v in (*launch.reads, *launch.writes)}
    lasting = sum(s.bytes for s in graph.storages if s.role in (ml.Role.PARAMETER, ml.Role.STATE))
    lives, size = lifetimes(graph, schedule), np.array([s.bytes for s in graph.storages])
    own = [s for s in moved if not graph.storages[s].role.persistent]
    when = np.argsort([*lives.leave[own], *lives.enter[own]], kind="stable")
    at_once = np.cumsum(np.concatenate([-size[own], size[own]])[when]).max(initial=0)
    return lasting + int(at_once), max(sum(b.bytes for b in t.reads) for t in sums)


def test_shards_of_parameters_on_four_ranks_hold_a_quarter_and_a_layer():
    """Of a GPT's parameters, gradients and Adam's states."""
    job = Job(model="gpt", model_args={"preset": "small"}, batch_size=4, optimizer="adam", scheduler="barrier",
              parallel="data", shard="3,prefetch=0,keep=none")
    machine = ml.Machine(4, collective=lambda sizes: 1.0)
    plans = [Recorded(replace(job, shard=shard), 0, 4).plan(ml.CostModel.analytic(), machine)
             for shard in (0, job.shard)]
    (whole, layer), (own, _) = (holds(plan.program().graph, plan.program().schedule) for plan in plans)
    assert own <= 0.27 * whole + 2 * layer  # its parameters and its gradients


class Saturated(nn.Module):
    """Of an infinite number, one row of the gradient is not finite, which is in one rank's share."""

    def __init__(self, *_: bool) -> None:
        self.weight = nn.Parameter(np.linspace(-1, 1, WIDTH * CLASSES, dtype="f").reshape(WIDTH, CLASSES))

    def forward(self, x: Any) -> Any:
        return ops.tanh(ops.matmul(x, self.weight))


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("shard", [0, 1, "2,prefetch=0", "3,prefetch=0,keep=none"])
def test_ranks_skip_the_steps_whose_gradients_are_not_finite(shard: Any, clip: float | None):
    check({"scheduler": "barrier", "ranks": 1, "replicas": 3, "micro_batches": 1, "optimizer": "adamw", "clip": clip,
           "scaled": True, "bad": (1,), "shard": shard, "network": Saturated})


def test_the_search_finds_the_fastest_plan_within_the_limit():
    job = Job(model="mlp", model_args={"layers": 6, "hidden": 64}, batch_size=24, scheduler="barrier", parallel="data")
    recorded, cost = Recorded(job, 0, 4), ml.CostModel.analytic()

    def plan(shard: Any, limit: int | None = None) -> Any:
        recorded.job = replace(job, shard=shard)
        return recorded.plan(cost, ml.Machine(4, limit, collective=lambda sizes: 20.0))

    tried = [plan(f"3,prefetch={d},keep={keep}") for d in (0, 1, 4) for keep in ("none", "7+9+11", "1+3+5+7+9+11")]
    free = plan(3)
    assert free.period == pytest.approx(min(one.period for one in tried), rel=1e-8)
    assert free.remarks == (f"shards: {free.schedule.notes['shards']} is the fastest predicted",)
    least = min(one.peak_bytes[0] for one in tried)
    assert least < free.peak_bytes[0]
    tight = plan(3, least)
    assert tight.peak_bytes[0] == least
    assert tight.period > free.period
    with pytest.raises(MemoryLimitError):
        plan(3, least - 1)
