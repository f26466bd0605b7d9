"""LayUp: ranks without messages are runs of SGD, shares are conserved, and a log repeats a run of all ranks."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
from command_line import refusal, reported
from launcher import under_mpi
from rank_runs import command

import minidl as ml
from minidl.core.machine import PlanError
from minidl.core.tasks import Kind, unpack
from minidl.runtime.clocks import real_time
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.replica import Replica, replay
from minidl.runtime.version_log import VersionRead, as_lines, from_lines
from minidl.schedulers.layup import batches_of, moments
from minidl.training.gossip_trainer import GossipTrainer
from minidl.training.job import Job
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer

COST, LINK, STEPS = ml.CostModel.analytic(), (1.0, 1e-4), 3


def job(ranks: int, batches: int, momentum: float = 0.9, hidden: int = 12, **options: Any) -> Job:
    return Job(model="mlp", model_args={"layers": 3, "hidden": hidden}, batch_size=4 * batches * ranks, lr=0.05,
               micro_batches=batches, update_every=1, momentum=momentum, scheduler="layup", parallel="data",
               scheduler_args=options)


def weights(recorded: Recorded) -> list[bytes]:
    return [p.numpy().tobytes() for p in recorded.model.parameters()]


def ran(task: Job, ranks: int,
        log: list[VersionRead] | None = None) -> tuple[list[GossipTrainer], list[list[bytes]], list[Any]]:
    """The trainers of all ranks, the weights of each rank after the last step, and all inputs. `log`: to replay."""
    first = Recorded(task, 0, ranks)
    own = [first.copy(rank) for rank in range(ranks)]
    inputs: list[list[Any]] = [[] for _ in own]

    def part(communicator: Any) -> Any:
        trainer = GossipTrainer(own[communicator.rank], COST, communicator, LINK)
        trainer.replays = None if log is None else (log, "log")
        taken, read = inputs[communicator.rank], trainer._inputs
        trainer._inputs = lambda: taken.append(read()) or taken[-1]  # type: ignore[func-returns-value]
        for _ in range(STEPS):
            trainer.step()
        alone = weights(trainer.recorded)
        trainer.finish()
        return trainer, alone

    found = run_ranks(ranks, part)
    return [trainer for trainer, _ in found], [alone for _, alone in found], inputs


def replayed(task: Job, ranks: int, log: list[VersionRead], inputs: list[Any]) -> list[list[bytes]]:
    first = Recorded(task, 0, ranks)
    own = [first.copy(rank) for rank in range(ranks)]
    replicas, versions = [Replica(r.graph) for r in own], Counter[tuple[int, int]]()
    log = from_lines(as_lines(sorted(log, key=lambda e: (e.key, e.version))), "log")
    for step in range(STEPS):
        replay(replicas, [tuple(each[step]) for each in inputs], [e for e in log if e.step == step], versions)
    return [weights(r) for r in own]


def check_repeats(seed: int) -> None:
    """Random ranks, batches, links and slow ranks: two runs and a replay have equal bits; shares sum to the number of
    ranks; the log has the versions of the moments."""
    random = np.random.default_rng(seed)
    ranks, batches = int(random.integers(1, 5)), int(random.integers(1, 5))
    slow = ((int(random.integers(ranks)), float(random.uniform(1, batches))),) if random.random() < 0.7 else ()
    task = job(ranks, batches, float(random.choice([0.0, 0.9])), int(random.integers(3, 20)), slow=slow,
               message=float(random.choice([0.0, 0.3, 5.0, 40.0])), share=float(random.choice([1.0, 0.6])))
    trainers, found, inputs = ran(task, ranks)
    again, same, _ = ran(task, ranks)
    assert found == same, seed
    log = trainers[0].log
    assert log == again[0].log, seed
    assert replayed(task, ranks, log, inputs) == found, seed
    for layer in trainers[0].run.replica.share:
        assert sum(t.run.replica.share[layer] for t in trainers) == pytest.approx(ranks, rel=1e-12), seed
    check_versions(trainers[0], task, log, ranks)
    assert len({t.params_sha256() for t in trainers}) == 1, seed


def check_versions(trainer: GossipTrainer, task: Job, log: list[VersionRead], ranks: int) -> None:
    """Every entry of the log follows from the moments and from the peers to which layers were sent."""
    graph = trainer.run.graph
    clock = moments(graph, trainer.cost, trainer._machine, task.scheduler_args["slow"], task.scheduler_args["message"])
    said = {(e.step, e.rank, e.key, e.source): e for e in log}
    versions, seen = Counter[tuple[int, int]](), 0
    for step in range(STEPS):
        for rank, t, arrives in clock:
            key = int(graph.keys[t])
            if not arrives:
                reads = [e for e in log if (e.step, e.rank, e.key, e.source) == (step, rank, key, -1)]
                for e in reads:
                    versions[rank, e.stage] += unpack(key).kind == Kind.U
                    assert e.version == versions[rank, e.stage]
                    seen += 1
            elif (to := said[step, rank, key, -1].to) >= 0:
                e = said[step, to, key, rank]
                versions[to, e.stage] += 1
                assert e.version == versions[to, e.stage]
                seen += 1
    assert seen == len(log)


def test_random_configurations_repeat_and_replay() -> None:
    for seed in range(2):
        check_repeats(seed)


def test_every_layer_is_sent() -> None:
    """Also the first one; here it has weights."""
    trainers, _, _ = ran(Job(model="lenet", batch_size=8, micro_batches=2, update_every=1, scheduler="layup",
                             parallel="data"), 2)
    layers = sorted(trainers[0].run.replica.weights)
    assert layers[0] == 0
    assert sorted({e.stage for e in trainers[0].log if e.source >= 0}) == layers


@pytest.mark.campaign
def test_many_configurations_repeat_and_replay() -> None:
    for seed in range(2, 202):
        check_repeats(seed)


def test_a_run_on_the_real_clock_repeats_from_its_log() -> None:
    """Time decides which version a task reads; the log alone says the bits. The replay writes the same log, and finds
    the same weights as a replay that knows versions alone."""
    task = job(3, 4, clock="real")
    trainers, found, inputs = ran(task, 3)
    log = from_lines(as_lines(trainers[0].log), "log")
    assert log == trainers[0].log
    assert replayed(task, 3, log, inputs) == found
    again, same, _ = ran(job(3, 4), 3, log)
    assert same == found
    assert again[0].log == log
    for layer in trainers[0].run.replica.share:
        assert sum(t.run.replica.share[layer] for t in trainers) == pytest.approx(3, rel=1e-12)


def test_real_time_mixes_a_layer_after_the_task_during_which_it_has_come() -> None:
    events = [(0, -1), (5, 1), (1, -1), (6, 2), (2, -1), (7, 1)]
    comes = iter([[(7, 1)], [], [(5, 1)]])
    assert [*real_time(0, events, lambda: next(comes))] == [(0, -1), (7, 1), (1, -1), (2, -1), (5, 1), (6, 2)]


def test_without_messages_ranks_are_runs_of_sgd_in_bits() -> None:
    """Also one rank, which has nobody to send to."""
    for ranks, options in ((3, {"share": 0.0}), (1, {})):
        task = job(ranks, 2, **options)
        _, found, inputs = ran(task, ranks)
        first = Recorded(task, 0, ranks)
        for rank in range(ranks):
            own = first.copy(rank)
            alone = ml.SequentialExecutor(own.graph)
            for parts in inputs[rank]:
                alone(*parts)
            assert found[rank] == weights(own)


def test_one_rank_is_the_sequential_run_in_losses_too() -> None:
    task = job(1, 2)
    trainer = ran(task, 1)[0][0]
    other = Trainer(Recorded(Job(**{**vars(task), "scheduler": "in_order", "parallel": "none", "scheduler_args": {}})),
                    COST)
    for _ in range(STEPS):
        other.step()
    other.settle()
    assert trainer.losses == other.losses


def test_a_slow_rank_runs_as_many_whole_batches_as_fit() -> None:
    assert batches_of(4, 4, ((0, 4.0),)) == [1, 4, 4, 4]
    assert batches_of(2, 5, ((0, 0.5), (1, 1.0))) == [5, 2]
    with pytest.raises(PlanError, match="ends no batch in a step of 2; take at least --micro-batches 4"):
        batches_of(4, 2, ((0, 4.0),))
    with pytest.raises(PlanError, match="ranks are 0 to 3"):
        batches_of(4, 2, ((4, 2.0),))
    with pytest.raises(PlanError, match="above 0 and finite"):
        batches_of(2, 4, ((0, float("inf")), (1, float("inf"))))


FLAGS = ["train", "--model", "mlp", "--model-arg", "preset=tiny", "--batch-size", "16", "--micro-batches", "4",
         "--steps", "3", "--costs", "analytic", "--parallel", "data", "--scheduler", "layup"]


@pytest.mark.parametrize("slow", [(), ((1, 2.5),)])
def test_moments_are_in_the_order_of_the_ranks_clocks(slow: tuple[tuple[int, float], ...]) -> None:
    graph, wait = Recorded(job(2, 4), 0, 2).graph, 3.0
    time, update, factor = COST.durations(graph), graph.kind == Kind.U, {0: 1.0, 1: 1.0} | dict(slow)
    clock, ended, times = {0: 0.0, 1: 0.0}, dict[tuple[int, int], float](), list[float]()
    for rank, task, arrives in moments(graph, COST, ml.Machine(2), slow, wait):
        if arrives:
            times.append(ended[rank, task] + wait)
            continue
        begin = clock[rank]
        clock[rank] = ended[rank, task] = begin + time[task] * factor[rank]
        times.append(clock[rank] if update[task] else begin)
    assert np.diff(times).min() > -1e-9 * max(times)


def test_the_command_line_trains_and_refuses_in_one_line(capsys: Any, tmp_path: Any) -> None:
    log = tmp_path / "log.jsonl"
    record = reported(capsys, *FLAGS, "--ranks", "2", "--slow", "0=4", "--log-versions", str(log))
    assert record["ranks"] == 2
    entries = from_lines(log.read_text().splitlines(), "log")
    updates = Counter(e.rank for e in entries if unpack(e.key).kind == Kind.U and e.source < 0)
    assert updates[1] == 4 * updates[0]
    assert sum(e.to >= 0 for e in entries) == sum(e.source >= 0 for e in entries) > 0
    again = tmp_path / "again.jsonl"
    found = reported(capsys, *FLAGS, "--ranks", "2", "--slow", "0=4", "--replay", str(log), "--log-versions",
                     str(again))
    assert found["params_sha256"] == record["params_sha256"]
    assert again.read_text() == log.read_text()

    refused = partial(refusal, capsys, *FLAGS, "--ranks", "2")
    assert "ends no batch in a step of 4" in refused("--slow", "0=8")
    assert "ranks are 0 to 1" in refused("--slow", "7=2")
    assert "share is 1.5; it must be between 0 and 1" in refused("--scheduler-arg", "share=1.5")
    assert "message is -1; a time must be at least 0" in refused("--scheduler-arg", "message=-1")
    assert "step 1 has other tasks or messages" in refused("--slow", "0=2", "--replay", str(log))
    assert "step 4 has other tasks or messages" in refused("--slow", "0=4", "--replay", str(log), "--steps", "4")
    log.write_text(log.read_text().replace('"version": 0', '"version": 1', 1))
    assert "it has other versions" in refused("--slow", "0=4", "--replay", str(log))
    log.write_text("{}")
    assert "line 1: no entry of a version log" in refused("--replay", str(log))
    assert "nothing is slower than it is" in refused("--scheduler-arg", "clock=real", "--slow", "0=4")
    assert "is simulated or real, not 'sun'" in refused("--scheduler-arg", "clock=sun")
    assert "RANK=FACTOR" in refused("--slow", "two")
    assert "without split, dither and lag" in refused("--dither", "1")
    assert "in one part" in refused("--split", "2"), "each part would send a layer that is updated in part"
    assert "it goes with --scheduler layup" in refused("--scheduler", "fifo", "--slow", "0=4")
    assert "keeps no checkpoint" in refused("--checkpoint", str(tmp_path / "saved"))
    assert "records no timeline" in refused("--trace", str(tmp_path / "trace.json"))


@pytest.mark.parametrize("told", ["share=0", "message=0", "clock=real"])
def test_a_saved_plan_keeps_its_options(told: str, capsys: Any, tmp_path: Any) -> None:
    ranks, plan = ("--ranks", "2", "--scheduler-arg", told), str(tmp_path / "plan.csv")
    reported(capsys, "plan", *(flag for flag in FLAGS[1:] if flag not in ("--steps", "3")), *ranks, "--save", plan)
    log, real = str(tmp_path / "log.jsonl"), told == "clock=real"  # whose runs differ
    wanted = reported(capsys, *FLAGS, *ranks, *(("--log-versions", log) if real else ()))
    found = reported(capsys, *FLAGS, "--ranks", "2", "--scheduler", plan, *(("--replay", log) if real else ()))
    assert found["params_sha256"] == wanted["params_sha256"]


@pytest.mark.parametrize("more", [("--offload", "activations"), ("--scheduler-arg", "lag=0")], ids=str)
def test_memory_that_leaves_and_bounds_keep_the_bits_of_these_moments(more: tuple[str, ...], capsys: Any) -> None:
    found = [reported(capsys, *FLAGS, "--ranks", "2", *own) for own in ((), more)]
    assert found[0]["params_sha256"] == found[1]["params_sha256"]


@under_mpi
def test_ranks_under_mpi_have_the_bits_of_threads(capsys: Any) -> None:
    wanted = reported(capsys, *FLAGS, "--ranks", "2", "--slow", "0=4")
    code, found, errors = command(2, *FLAGS[1:], "--slow", "0=4")
    assert code == 0, errors
    assert found["params_sha256"] == wanted["params_sha256"]


@pytest.mark.slow
@under_mpi
def test_threads_repeat_a_run_on_the_real_clock_under_mpi(capsys: Any, tmp_path: Any) -> None:
    log = str(tmp_path / "log.jsonl")
    code, found, errors = command(3, *FLAGS[1:], "--batch-size", "48", "--scheduler-arg", "clock=real",
                                  "--log-versions", log)
    assert code == 0, errors
    again = reported(capsys, *FLAGS, "--batch-size", "48", "--ranks", "3", "--replay", log)
    assert again["params_sha256"] == found["params_sha256"]


def test_a_rank_says_which_layer_it_waits_for_and_what_it_has_sent() -> None:
    trainers, _, _ = ran(job(2, 2), 2)
    for rank, trainer in enumerate(trainers):
        doing = trainer.run.doing()
        assert doing.lanes == ()
        moved = {t.kind: t for t in doing.traffic}
        entries = trainer.run.log
        assert doing.step - 1 == len({e.step for e in entries})  # as many have ended
        assert moved["sent"].count == sum(e.to >= 0 for e in entries)
        assert moved["received"].count == sum(e.source >= 0 for e in entries)
        assert {t.peers for t in doing.traffic} == {(1 - rank,)}
        assert moved["sent"].bytes == sum(trainer.run.replica.payload(e.stage).nbytes for e in entries if e.to >= 0)
