"""Pipelines on ranks: every synchronous order leaves the bits of one process that accumulates in the graph's order."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from helpers import IMPORTABLE, PATIENCE, ROOT, deadline, replace_call
from launcher import MPIEXEC, printed

import minidl as ml
from minidl import models, nn, ops, optim
from minidl.core.schedule import Lane, ScheduleError
from minidl.core.tasks import Kind, What, parse_task
from minidl.core.timeline import Timeline
from minidl.plans.program import lower
from minidl.runtime.comm import RankError
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import DistributedExecutor, SequentialExecutor, TaskError
from minidl.schedulers.pipeline import add_communication

MICRO_BATCHES, SHARE, STEPS = 4, 8, 4
SYNCHRONOUS = ["gpipe", "one_f_one_b", "zb_h1", "zb_h2", "zb_auto", "fast_forward", "interleaved", "modulo",
               "looped_bfs", "zb_v", "hanayo"]


def batches(seed=0):
    random = np.random.default_rng(seed)
    x = random.standard_normal((STEPS, MICRO_BATCHES, SHARE, 12)).astype("f")
    y = random.integers(0, 5, (STEPS, MICRO_BATCHES, SHARE))
    return [[part for i in range(MICRO_BATCHES) for part in (x[t, i], y[t, i])] for t in range(STEPS)]


OPTIMIZERS = {"sgd": lambda parameters, clip: optim.SGD(parameters, 0.05, momentum=0.9, max_norm=clip),
              "adam": lambda parameters, clip: optim.Adam(parameters, 0.01, max_norm=clip)}


def recorded(width=16, optimizer="sgd", clip=None):
    ml.seed(1)
    model = models.mlp(12, *[width] * 7, 5)
    opt = OPTIMIZERS[optimizer](model.parameters(), clip)

    def step(*parts):
        total = None
        for i in range(MICRO_BATCHES):
            with ml.micro_batch(i, i * SHARE):
                loss = nn.cross_entropy(model(parts[2 * i]), parts[2 * i + 1]) * (1 / MICRO_BATCHES)
                loss.backward()
                total = loss.detach() if total is None else ops.add(total, loss.detach())
        opt.step()
        return total

    model.optimizer = opt
    return model, ml.record(step, *batches()[0])


@functools.cache
def alone(**options):
    """Losses and parameters of one process."""
    model, graph = recorded(**options)
    run = SequentialExecutor(graph)
    return [float(run(*parts)) for parts in batches()], [p.numpy().tobytes() for p in model.parameters()]


def planned(name, ranks, **options):
    """For each rank its model, and the graph and schedule of all with messages."""
    found = []
    for _ in range(ranks):
        model, graph = recorded(**options)
        plan = ml.plan(graph, name, ml.CostModel.analytic(), ml.Machine(ranks))
        found.append((model, *add_communication(plan.graph, plan.schedule)))
    return found


def trained(own):
    """Losses, and each parameter as the rank that holds it left it."""

    def work(communicator):
        model, graph, schedule = own[communicator.rank]
        run = DistributedExecutor(graph, schedule, communicator)
        losses = [run(*parts) for parts in batches()]
        run.close()
        held = {id(s.live) for s in run.program.graph.storages if s.live is not None}
        return losses, [p.numpy().tobytes() if id(p.storage) in held else None for p in model.parameters()]

    with deadline():
        found = run_ranks(len(own), work)
    losses = [[float(value) for value in values if value is not None]
              for values in zip(*(l for l, _ in found), strict=True)]
    parameters = [[bits for bits in copies if bits is not None] for copies in zip(*(p for _, p in found), strict=True)]
    return losses, parameters


def works(name, ranks):
    """Whether the policy can work with these numbers."""
    return (not (name == "zb_h2" and 2 * ranks > MICRO_BATCHES + 1)
            and not (name == "interleaved" and MICRO_BATCHES % ranks))


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "ranks"), [(n, p) for n in SYNCHRONOUS for p in (2, 3, 4) if works(n, p)])
def test_every_order_leaves_the_bits_of_one_process(name, ranks):
    losses, parameters = trained(planned(name, ranks))
    assert losses == [[value] for value in alone()[0]], "one rank has the loss"
    assert parameters == [[bits] for bits in alone()[1]], "each parameter is on one rank"


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1"])
def test_both_kinds_of_lanes_poll_transfers_between_their_calls(name, both_lanes):
    losses, parameters = trained(planned(name, 2))
    assert (losses, parameters) == ([[value] for value in alone()[0]], [[bits] for bits in alone()[1]])


def norms(optimizer):
    """The global norm of each step's gradients, and between which of them a clip triggers on some steps
    and not on others."""
    model, graph = recorded(optimizer=optimizer, clip=1e9)
    run, found = SequentialExecutor(graph), []
    for parts in batches():
        run(*parts)
        found.append(model.optimizer.norm)
    return sorted(found)


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("name", "ranks"), [("gpipe", 2), ("one_f_one_b", 4), ("zb_h1", 3), ("zb_h1", 4),
                                             ("interleaved", 2), ("modulo", 2), ("zb_v", 3), ("hanayo", 2)])
def test_gradients_are_clipped_by_their_norm_on_all_ranks(name, ranks, optimizer):
    """Also where a rank has several stages, which count Adam's steps once."""
    each = norms(optimizer)
    for clip in (each[0] / 2, (each[1] + each[2]) / 2, None):  # on all steps, on some, on none
        options = {"optimizer": optimizer, "clip": clip}
        losses, parameters = trained(planned(name, ranks, **options))
        assert losses == [[value] for value in alone(**options)[0]]
        assert parameters == [[bits] for bits in alone(**options)[1]]
    assert alone(**options)[1] != alone(optimizer=optimizer, clip=each[0] / 2)[1]


def test_each_rank_plans_memory_for_its_own_part_alone():
    (_, graph, schedule), *_ = planned("one_f_one_b", 4, width=64)
    programs = [lower(graph, schedule, ranks=4, rank=r) for r in range(4)]
    whole = lower(recorded(64)[1], ml.schedulers.in_order(recorded(64)[1]))
    assert max(p.peak_bytes for p in programs) < whole.peak_bytes / 2
    assert sum(len(p.graph) for p in programs) == len(graph)
    assert programs[0].takes == tuple(range(0, 2 * MICRO_BATCHES, 2)), "the first rank takes the inputs"
    assert programs[3].takes == tuple(range(1, 2 * MICRO_BATCHES, 2)), "the last one the targets"


def test_a_result_that_no_message_carries_is_refused():
    _, graph = recorded()
    plan = ml.plan(graph, "gpipe", ml.CostModel.analytic(), ml.Machine(2))
    with pytest.raises(ScheduleError, match=r"on rank 1 reads what \S+ makes on rank 0, and no message carries it"):
        lower(plan.graph, plan.schedule, ranks=2, rank=0)
    talking = add_communication(plan.graph, plan.schedule)
    with pytest.raises(ScheduleError, match="the schedule has 2 ranks; this run has 3"):
        lower(*talking, ranks=3)


def test_a_task_that_fails_is_named_and_ends_all_ranks():
    own, seen = planned("one_f_one_b", 3), {}

    def boom():
        raise ArithmeticError("no luck")

    def work(communicator):
        _, graph, schedule = own[communicator.rank]
        run = DistributedExecutor(graph, schedule, communicator)
        if communicator.rank == 1:
            task = next(t.index for t in run.program.graph if t.kind == Kind.F and t.micro_batch == 2)
            replace_call(run._body[0].lanes, boom, task)
        try:
            run(*batches()[0])
        except Exception as error:
            seen[communicator.rank] = error
            raise
        finally:
            run.close()

    with deadline(), pytest.raises(TaskError, match=r"task 1F2 .* on rank 1 failed: ArithmeticError: no luck"):
        run_ranks(3, work)
    assert isinstance(seen[0], RankError)
    assert isinstance(seen[2], RankError)


UNDER_MPI = """
import test_pipeline_ranks as t
from minidl.runtime.comm.mpi import MPI
from minidl.runtime.executors import DistributedExecutor

comm = MPI()
_, wanted = t.alone() if comm.rank == 0 else (None, None)
for name in ("gpipe", "one_f_one_b", "zb_h1"):
    model, graph, schedule = t.planned(name, comm.size)[comm.rank]
    run = DistributedExecutor(graph, schedule, comm)
    for parts in t.batches():
        run(*parts)
    run.close()
    held = {id(s.live) for s in run.program.graph.storages if s.live is not None}
    mine = [p.numpy().tobytes() if id(p.storage) in held else None for p in model.parameters()]
    everywhere = comm.gather(mine)
    if comm.rank == 0:
        found = [next(bits for bits in copies if bits is not None) for copies in zip(*everywhere)]
        assert found == wanted, name
        print(name, "equal", flush=True)
comm.gather(None)
comm.close()
"""


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_mpi_leave_the_same_bits(ranks):
    done = subprocess.run([MPIEXEC, "-n", str(ranks), sys.executable, "-c", UNDER_MPI], capture_output=True, text=True,
                          timeout=PATIENCE, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": IMPORTABLE})
    assert (done.returncode, done.stdout) == (0, "gpipe equal\none_f_one_b equal\nzb_h1 equal\n"), done.stderr


# ---------------------------------------------------------------------------------------------------------- the command
def command(ranks, *flags):
    """Runs `train --json` on so many ranks; its exit code, its record (None without one) and its errors."""
    launch = [MPIEXEC, "-n", str(ranks)] if ranks > 1 else []
    done = subprocess.run([*launch, sys.executable, "-m", "minidl", "train", *flags, "--json", "--costs", "analytic"],
                          capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    said = printed(done)
    return done.returncode, json.loads(said) if said else None, done.stderr


NETWORKS = {"mlp, adam": ["--model", "mlp", "--optimizer", "adam", "--lr", "0.001", "--clip", "0.05"],
            "lenet": ["--model", "lenet", "--lr", "0.01"],
            "concatenated": ["--model", "densenet121", "--model-arg", "preset=tiny"],
            "normalised, skips": ["--model", "resnet20", "--model-arg", "preset=tiny"]}


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")
@pytest.mark.parametrize("name", NETWORKS)
def test_training_on_ranks_is_training_in_one_process(name):
    flags = [*NETWORKS[name], "--batch-size", "16", "--micro-batches", "4", "--steps", "3"]
    _, wanted, _ = command(1, *flags)
    code, found, errors = command(2, *flags, "--parallel", "pipeline", "--scheduler", "zb_h1")
    assert code == 0, errors
    assert {key: found[key] for key in ("params_sha256", "loss_first", "loss_last", "accuracy")} \
        == {key: wanted[key] for key in ("params_sha256", "loss_first", "loss_last", "accuracy")}
    assert found["ranks"] == 2


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")
def test_a_run_goes_on_on_another_number_of_ranks(tmp_path):
    flags = ["--model", "mlp", "--micro-batches", "4", "--checkpoint", str(tmp_path / "run")]
    wanted = command(1, *flags[:-2], "--steps", "6")[1]["params_sha256"]
    assert command(2, *flags, "--parallel", "pipeline", "--scheduler", "gpipe", "--steps", "4")[0] == 0
    assert command(3, *flags, "--parallel", "pipeline", "--scheduler", "zb_h1", "--steps", "6",
                   "--resume")[1]["params_sha256"] == (wanted)


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")
@pytest.mark.parametrize(("flags", "line"), [
    (["--scheduler", "layerpipe", "--optimizer", "adam", "--scheduler-arg", "method=outer"],
     "unknown method 'outer'; known: pipedream, intra, inter"),
    (["--scheduler", "zb_h7"], "unknown scheduler 'zb_h7' for a pipeline"),
    (["--scheduler", "gpipe", "--streams", "2"], "--streams has no effect on a network cut into a pipeline"),
    (["--scheduler", "gpipe", "--batch-size", "10", "--micro-batches", "4"],
     "a batch of 10 does not divide into 4 micro-batches"),
    (["--scheduler", "gpipe", "--model-arg", "layers=1"], "stages are asked for, but the model has only")])
def test_what_cannot_run_is_one_line(flags, line):
    code, record, errors = command(4, "--model", "mlp", "--parallel", "pipeline", "--steps", "2", *flags)
    assert (code, record) == (2, None)
    assert line in errors
    assert len(errors.splitlines()) == 1


# ------------------------------------------------------------------------------------------------------------ timelines
def traced(name, ranks):
    own = planned(name, ranks)

    def work(communicator):
        _, graph, schedule = own[communicator.rank]
        run = DistributedExecutor(graph, schedule, communicator, trace=True)
        for parts in batches():
            run(*parts)
        alone, together = run.timeline, run.timeline_of_all()
        run.close()
        return alone, together

    with deadline():
        return own[0], run_ranks(ranks, work)


@pytest.mark.parametrize("name", ["zb_h1", "interleaved"])
def test_timelines_of_all_ranks_are_one(name):
    (_, graph, schedule), found = traced(name, 2)
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


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")
def test_a_trace_of_ranks_has_all_their_lanes(tmp_path):
    code, _, errors = command(2, "--model", "mlp", "--parallel", "pipeline", "--scheduler", "one_f_one_b",
                              "--micro-batches", "4", "--steps", "3", "--trace", str(tmp_path / "trace.json"))
    assert code == 0, errors
    found = Timeline.load(tmp_path / "trace.json")
    assert {str(lane) for lane in found.lanes} == {"0/main", "0/send->1", "0/recv<-1", "1/main",
                                                   "1/send->0", "1/recv<-0"}
    assert {What.WAIT, What.TRANSFER} <= set(found.what.tolist())
