"""Pipelines on ranks: their memory, failures and timelines, and the command line; bits are in test_same_bits."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from command_line import refusal, reported
from helpers import deadline, replace_call, together
from launcher import under_mpi
from rank_runs import MICRO_BATCHES, WIDTH, batches, command, prepared, recorded

import minidl as ml
from minidl import models, nn, optim
from minidl.core.schedule import Lane, ScheduleError
from minidl.core.tasks import Kind, What, parse_task
from minidl.core.timeline import Timeline
from minidl.plans.program import lower
from minidl.runtime.comm import RankError
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import DistributedExecutor, TaskError
from minidl.schedulers.pipeline import PipelineError, add_communication
from minidl.training.job import Job
from minidl.training.recorded import Recorded


def plain(name: str, ranks: int, **more: Any) -> dict[str, Any]:
    return {"loss": True, "network": "mlp", "scheduler": name, "ranks": ranks, **more}


def wide(*_: bool) -> Any:
    return models.mlp(WIDTH, *[64] * 7, 5)


def test_each_rank_plans_memory_for_its_own_part_alone():
    plan = prepared(plain("one_f_one_b", 4, network=wide))[0][1]
    graph = recorded(network=wide)[1]
    whole = lower(graph, ml.schedulers.in_order(graph))
    assert max(p.peak_bytes for p in plan.programs) < whole.peak_bytes / 2
    assert sum(len(p.graph) for p in plan.programs) == len(plan.with_messages[0])
    assert plan.programs[0].takes == tuple(range(0, 2 * MICRO_BATCHES, 2)), "the first rank takes the inputs"
    assert plan.programs[3].takes == tuple(range(1, 2 * MICRO_BATCHES, 2)), "the last one the targets"


def test_a_result_that_no_message_carries_is_refused():
    _, graph = recorded()
    plan = ml.plan(graph, "gpipe", ml.CostModel.analytic(), ml.Machine(2))
    with pytest.raises(ScheduleError, match=r"on rank 1 reads what \S+ makes on rank 0, and no message carries it"):
        lower(plan.graph, plan.schedule, ranks=2, rank=0)
    talking = add_communication(plan.graph, plan.schedule)
    with pytest.raises(ScheduleError, match="the schedule has 2 ranks; this run has 3"):
        lower(*talking, ranks=3)


@pytest.mark.parametrize(("settings", "failing", "kind", "others"), [
    (plain("one_f_one_b", 3), 1, Kind.F, (0, 2)), (plain("one_f_one_b", 2, replicas=2), 3, Kind.B, (1,)),
    pytest.param(plain("one_f_one_b", 2, replicas=2), 3, Kind.U, (1,), marks=pytest.mark.wide)])
def test_a_task_that_fails_is_named_and_ends_all_ranks(settings, failing, kind, others):
    """Others wait for its rank: neighbours in the pipeline, or the other rank of the group that sums."""
    own, seen = prepared(settings), {}

    def boom():
        raise ArithmeticError("no luck")

    def work(communicator):
        run = DistributedExecutor(*own[communicator.rank][1].with_messages, communicator)
        if communicator.rank == failing:
            task = [t.index for t in run.program.graph if t.kind == kind][-1]
            replace_call(run._body[0].lanes, boom, task)
        try:
            for _ in range(2):  # an update may fail when all sums of its step have ended: others wait in the next one
                run(*batches(0)[0])
        except Exception as error:
            seen[communicator.rank] = error
            raise
        finally:
            run.close()

    says = rf"task \d{kind.name}\d .* on rank {failing} failed: ArithmeticError: no luck"
    with deadline(), pytest.raises(TaskError, match=says):
        run_ranks(len(own), work)
    assert all(isinstance(error, RankError) for rank, error in seen.items() if rank != failing)
    assert seen.keys() >= {failing, *others}


def test_a_loss_scale_of_several_optimizers_is_refused():
    scaler = optim.GradScaler(8.0)
    first, second = models.mlp(12, 8, 8), models.mlp(8, 8, 5)
    both = [optim.SGD(m.parameters(), 0.1, scaler=scaler) for m in (first, second)]

    def step(x, y):
        loss = nn.cross_entropy(second(first(x)), y)
        loss.backward(scaler.scale)
        for opt in both:
            opt.step()
        return loss

    graph = ml.record(step, *batches(0)[0][:2])
    with pytest.raises(PipelineError, match="scales its loss for several optimizers"):
        ml.plan(graph, "gpipe", ml.CostModel.analytic(), ml.Machine(2))


def test_the_updates_of_a_pipeline_are_not_one_launch():
    """They are of several stages."""
    job = Job(model_args={"preset": "tiny"}, batch_size=16, micro_batches=4, parallel="pipeline", scheduler="gpipe",
              fusion=("updates",))
    made = Recorded(job).plan(ml.CostModel.analytic(), ml.Machine(2))
    assert all(np.isfinite(p) for p in made.peaks)
    assert not any(launch.kernel == "sgd_many" for own in made.graph.launches for launch in own)


# ---------------------------------------------------------------------------------------------------------- the command
COMMAND = ["--model", "mlp", "--parallel", "pipeline", "--micro-batches", "4", "--steps", "3"]


@pytest.mark.parametrize(("flags", "line"), [
    (["--scheduler", "layerpipe", "--optimizer", "adam", "--scheduler-arg", "method=outer"],
     "unknown method 'outer'; known: pipedream, intra, inter"),
    (["--scheduler", "zb_h7"], "unknown scheduler 'zb_h7' for a pipeline"),
    (["--scheduler", "gpipe", "--streams", "2"], "--streams has no effect on a network cut into a pipeline"),
    (["--scheduler", "gpipe", "--batch-size", "10"], "a batch of 10 does not divide into 4 micro-batches")])
def test_what_cannot_run_is_one_line(flags, line, capsys):
    assert line in refusal(capsys, "train", *COMMAND, "--ranks", "4", *flags)


@under_mpi
def test_what_no_rank_can_plan_is_one_line_of_one_of_them():
    few = ["--model-arg", "layers=1", "--micro-batches", "1"]
    code, record, errors = command(3, *COMMAND, *few, "--scheduler", "gpipe")
    assert (code, record, len(errors.splitlines())) == (2, None, 1), errors
    assert "stages are asked for, but the model has only" in errors


# ------------------------------------------------------------------------------------------------------------ timelines
def traced(settings):
    own = prepared(settings)

    def work(communicator):
        run = DistributedExecutor(*own[communicator.rank][1].with_messages, communicator, trace=True)
        for parts in batches(0):
            run(*parts)
        alone, together = run.timeline, run.timeline_of_all()
        run.close()
        return alone, together

    return own[0][1].with_messages, together(len(own), work)


@pytest.mark.parametrize("name", ["zb_h1", "interleaved"])
def test_timelines_of_all_ranks_are_one(name):
    (graph, schedule), found = traced(plain(name, 2))
    whole = found[0][1]
    tasks = whole.tasks
    assert sorted(whole.name(i) for i in tasks) == sorted(t.name for t in graph), "every task of every rank once"
    assert {str(lane) for lane in whole.lanes} == {str(lane) for lane in schedule.lanes}
    record = {whole.name(i): i for i in tasks.tolist()}
    for t in np.flatnonzero(np.isin(graph.kind, (Kind.RF, Kind.RO))).tolist():
        send = next(p for p in graph.preds[t].tolist() if graph.kind[p] in (Kind.SF, Kind.SO))
        assert whole.start[record[graph.name(t)]] >= whole.start[record[graph.name(send)]], (
            "nothing is on its way before it is sent")
        assert [record[graph.name(send)], record[graph.name(t)]] in whole.edges.tolist()
    stood = whole.what != What.TASK
    for rank, (alone, _) in enumerate(found):
        here = stood & (np.array([lane.rank for lane in whole.lanes])[whole.lane] == rank)
        waits = alone.what != What.TASK
        np.testing.assert_allclose((whole.end - whole.start)[here].sum(),
                                   (alone.end - alone.start)[waits].sum(), atol=1e-3)
    assert (whole.what == What.TRANSFER).any()
    assert whole.report()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["zb_h1", "interleaved"])
def test_a_timeline_has_every_task_of_all_replicas(name):
    (graph, _), found = traced(plain(name, 2, replicas=2))
    whole = found[0][1]
    assert {str(lane) for lane in whole.lanes} == {f"{rank}/{lane}" for rank in range(4) for lane in (
        "main", "comm", *(f"{way}{rank ^ 1}" for way in ("send->", "recv<-")))}
    rank = np.array([lane.rank for lane in whole.lanes])[whole.lane]
    for first in (0, 2):
        tasks = [i for i in whole.tasks.tolist() if first <= rank[i] < first + 2]
        assert (sorted(whole.name(i).replace(">3", ">1").replace(">2", ">0") for i in tasks)
                == sorted(t.name for t in graph))
    for sent, got in whole.edges.tolist():
        if int(rank[sent]) != int(rank[got]):
            assert rank[sent] // 2 == rank[got] // 2, "messages stay in their replica"
            assert whole.start[got] >= whole.start[sent]
    for i, lane in enumerate(whole.lanes):
        if lane.name == "comm":
            ends = whole.end[[j for j in whole.tasks.tolist() if whole.lane[j] == i]]
            assert len(ends)
            assert all(a <= b for a, b in pairwise(ends))
    assert parse_task("0A0") in whole.key


def one_rank(lane, key, start, end, begin, waits=()):
    """A rank's own timeline: its tasks in a row on `main` and one message on `lane`; waits as (task, from, to)."""
    keys = np.array([parse_task(k) for k in [*key, *(w[0] for w in waits)]])
    lanes = np.array([1 if "S" in k or "R" in k else 0 for k in key] + [0] * len(waits))
    start, end = (np.array([*a, *(w[i] for w in waits)], float) for i, a in ((1, start), (2, end)))
    what = np.array([What.TASK] * len(key) + [What.WAIT] * len(waits))
    edges = np.array([[1, 0]] if "R" in key[1] else [[0, 1]])
    return Timeline(lane, what, keys, lanes, start, start, end, np.zeros(len(keys), int), edges=edges,
                    meta={"begin_s": begin})


def test_a_wait_becomes_a_transfer_when_what_is_awaited_is_sent():
    """Rank 1's clock is 5 s ahead. It stands still from 0 to 100; rank 0 computes to 70 and sends until 100."""
    first = one_rank((Lane(0), Lane(0, "send->1")), ["0F0", "0SF0>1"], [0, 70], [70, 100], 3.0)
    second = one_rank((Lane(1), Lane(1, "recv<-0")), ["1F0", "0RF0>1"], [100, 0], [120, 98], 8.0, [("1F0", 0, 100)])
    whole = Timeline.of_ranks([first, second], [0.0, 5.0], [{parse_task("0SF0>1"): 4}, {parse_task("0RF0>1"): 4}])
    records = {(whole.name(i), What(whole.what[i]).name): (whole.start[i], whole.end[i]) for i in range(len(whole))}
    assert {k: tuple(np.round(v, 3)) for k, v in records.items()} == ({
        ("0F0", "TASK"): (0, 70), ("0SF0>1", "TASK"): (70, 100), ("1F0", "TASK"): (100, 120),
        ("0RF0>1", "TASK"): (70, 98), ("1F0", "WAIT"): (0, 70), ("1F0", "TRANSFER"): (70, 100)})


def test_what_was_sent_in_the_step_before_says_nothing_of_a_transfer_of_this_one():
    """The receive, one step late, is of the message before the one that is sent here."""
    first = one_rank((Lane(0), Lane(0, "send->1")), ["0F0", "0SF0>1"], [0, 70], [70, 100], 3.0)
    second = one_rank((Lane(1), Lane(1, "recv<-0")), ["1F0", "0RF0>1@1"], [10, 0], [30, 8], 3.0)
    whole = Timeline.of_ranks([first, second], [0.0, 0.0], [{parse_task("0SF0>1"): 4}, {parse_task("0RF0>1@1"): 4}])
    assert [(whole.start[i], whole.end[i]) for i in whole.tasks.tolist() if whole.name(i) == "0RF0>1@1"] == [(0, 8)]


def test_clocks_that_differ_are_noticed(monkeypatch):
    ahead = [0.0, 7.5, -2.0]
    real = time.perf_counter

    class Shifted:
        @staticmethod
        def perf_counter():
            return real() + ahead[int(threading.current_thread().name.split()[1])]

        monotonic, sleep = time.monotonic, time.sleep

    with deadline():
        assert run_ranks(3, lambda c: c.clocks_ahead(4))[0] == [0.0, 0.0, 0.0], "the same clock"
        monkeypatch.setattr("minidl.runtime.comm.time", Shifted)
        for found in run_ranks(3, lambda c: c.clocks_ahead()):
            np.testing.assert_allclose(found, ahead, atol=0.5)


def test_a_trace_of_ranks_has_all_their_lanes(tmp_path, capsys):
    reported(capsys, "train", *COMMAND, "--ranks", "2", "--scheduler", "one_f_one_b", "--costs", "analytic", "--trace",
             str(tmp_path / "trace.json"))
    found = Timeline.load(tmp_path / "trace.json")
    assert {str(lane) for lane in found.lanes} == {"0/main", "0/send->1", "0/recv<-1", "1/main",
                                                   "1/send->0", "1/recv<-0"}
    assert {What.WAIT, What.TRANSFER} <= set(found.what.tolist())
