"""No barrier at the optimizer: updates that are validated within the next step leave the bits of those that wait."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import IMPORTABLE, PATIENCE, ROOT, deadline, drawn, replace_call
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher import MPIEXEC

import minidl as ml
from minidl import models, nn, ops, optim
from minidl.core.schedule import ScheduleError
from minidl.core.tasks import Kind
from minidl.devices.device import DeviceError
from minidl.passes.boundary import VERDICT
from minidl.plans.memory import MemoryLimitError
from minidl.pricing.cost import Link
from minidl.runtime.comm import RankError
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import DistributedExecutor, SequentialExecutor, TaskError
from minidl.schedulers import pipeline
from minidl.training.trainer import Job, Recorded

MICRO_BATCHES, SHARE, STEPS = 4, 8, 5
POLICIES = [("zb_h1", 2), ("zb_h2", 2), ("zb_auto", 3), ("zb_v", 2), ("zb_h1", 4), ("one_f_one_b", 3), ("gpipe", 2),
            ("interleaved", 2), ("dualpipe_v", 2), ("fast_forward", 4)]
OPTIMIZERS = {"sgd": lambda parameters, **more: optim.SGD(parameters, 0.05, momentum=0.9, **more),
              "adam": lambda parameters, **more: optim.Adam(parameters, 0.01, **more),
              "adamw": lambda parameters, **more: optim.AdamW(parameters, 0.01, **more)}
CLIP = 1.0  #: between the norms of common steps and those of large ones


def batches(large=(), bad=()):
    """Of each step. Gradients of the steps `large` exceed the clip, those of the steps `bad` are not finite."""
    random, found = np.random.default_rng(0), []
    for step in range(STEPS):
        x = random.standard_normal((MICRO_BATCHES, SHARE, 12)).astype("f")
        y = random.integers(0, 5, (MICRO_BATCHES, SHARE))
        if step in bad:
            x[step % MICRO_BATCHES, 0, 0] = np.inf
        weight = np.full((), 100 if step in large else 1, np.float32)
        found.append([*(part for i in range(MICRO_BATCHES) for part in (x[i], y[i])), weight])
    return found


class Tied(nn.Module):
    """The first layer's weight is the last one's, transposed."""

    def __init__(self, width):
        self.layers = nn.ModuleList([nn.Linear(12, width), *(nn.Linear(width, width) for _ in range(6))])

    def forward(self, x):
        for layer in self.layers:
            x = ops.tanh(layer(x))
        return ops.matmul(x, self.layers[0].weight)


def recorded(optimizer="sgd", clip=CLIP, scaled=False, width=16, tied=False):
    ml.seed(1)
    model = Tied(width) if tied else models.mlp(12, *[width] * 7, 5)
    scaler = optim.GradScaler(8.0, growth_interval=2) if scaled else None
    model.optimizer = opt = OPTIMIZERS[optimizer](model.parameters(), max_norm=clip, scaler=scaler)

    def step(*parts):
        total = None
        for i in range(MICRO_BATCHES):
            with ml.micro_batch(i, i * SHARE):
                loss = nn.cross_entropy(model(parts[2 * i]), parts[2 * i + 1]) * (1 / MICRO_BATCHES) * parts[-1]
                loss.backward(scaler.scale if scaler else None)
                total = loss.detach() if total is None else ops.add(total, loss.detach())
        opt.step()
        return total

    return model, ml.record(step, *batches()[0])


def state(model):
    """Every parameter, state and scalar by name."""
    return {name: t.numpy().tobytes() for name, t in (*model.named_parameters(), *model.optimizer.named_tensors())}


@functools.cache
def alone(large=(), bad=(), **options):
    """Losses, state and norms of one process."""
    model, graph = recorded(**options)
    run, losses, norms = SequentialExecutor(graph), [], []
    for parts in batches(large, bad):
        losses.append(run(*parts).numpy().tobytes())
        norms.append(model.optimizer.norm)
    return losses, state(model), norms


def planned(name, ranks, barrier=False, **options):
    model, graph = recorded(**options)
    return model, ml.plan(graph, name, ml.CostModel.analytic(), ml.Machine(ranks), barrier=barrier)


def counted(run, into):
    """Counts how often the head of a step runs again."""
    if run._body[0].after:
        lanes = run._body[0].after[0].lanes
        once = lanes.run
        lanes.run = lambda: (into.append(1), once())


def trained(own, data, settled=(), replicas=1):
    """Losses as the rank with the last stage has them; each part of the state as the ranks that hold it have it; how
    often each rank ran the head of a step again. After steps `settled` all ranks settle. With replicas, `data` has the
    batches of each."""

    def work(communicator):
        model, plan = own[communicator.rank]
        run, again = DistributedExecutor(*plan.with_messages, communicator), []
        counted(run, again)
        losses = []
        for step, parts in enumerate(data[communicator.rank * replicas // len(own)] if replicas > 1 else data):
            losses.append(run(*parts))
            if step in settled:
                run.settle()
        run.close()
        held = {id(s.live) for s in run.program.graph.storages if s.live is not None}
        named = dict([*model.named_parameters(), *model.optimizer.named_tensors()])
        return losses, {name: b for name, b in state(model).items() if id(named[name].storage) in held}, len(again)

    with deadline():
        found = run_ranks(len(own), work)
    losses, *_ = ([value.numpy().tobytes() for value in values] for values, *_ in found if values[0] is not None)
    held: dict[str, set[bytes]] = {}
    for _, parts, _ in found:
        for key, bits in parts.items():
            held.setdefault(key, set()).add(bits)
    (again,) = {count for *_, count in found}
    return losses, held, again


def check(name, ranks, large=(), bad=(), settled=(), **options):
    """Equal to one process; the head runs again after each step whose verdict was bad, unless ranks settled."""
    wanted, whole, norms = alone(large, bad, **options)
    losses, held, again = trained([planned(name, ranks, **options) for _ in range(ranks)], batches(large, bad), settled)
    assert losses == wanted
    assert held == {key: {bits} for key, bits in whole.items()}
    clip = options.get("clip", CLIP)
    fails = [step for step, norm in enumerate(norms) if step in bad or (clip is not None and not norm <= clip - 1e-6)]
    assert again == len([step for step in fails if step not in (*settled, STEPS - 1)])
    return fails


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("name", "ranks"), POLICIES)
def test_steps_that_are_clipped_have_the_bits_of_the_barrier(name, ranks, optimizer):
    """On no step, on all, the first, the last, some."""
    for large in ((), (0,), (STEPS - 1,), (1, 2), tuple(range(STEPS))):
        assert check(name, ranks, large, optimizer=optimizer) == list(large)
    losses, held, again = trained([planned(name, ranks, barrier=True, optimizer=optimizer) for _ in range(ranks)],
                                  batches((1, 2)))
    assert (losses, again) == (alone((1, 2), optimizer=optimizer)[0], 0)
    assert held == {key: {bits} for key, bits in alone((1, 2), optimizer=optimizer)[1].items()}
    assert alone((1, 2), optimizer=optimizer) != alone((), optimizer=optimizer)


@pytest.mark.few(1)
@pytest.mark.parametrize("clip", [None, CLIP])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("name", "ranks"), POLICIES[:5])
def test_steps_that_are_not_finite_are_skipped(name, ranks, optimizer, clip):
    for bad in ((), (0,), (STEPS - 1,), (1, 2), tuple(range(STEPS))):
        large = () if clip is None else (2, 3)
        assert set(check(name, ranks, large, bad, optimizer=optimizer, clip=clip, scaled=True)) >= {*bad}


@pytest.mark.wide
@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "ranks", "optimizer", "tied"), [
    ("zb_h1", 2, "adamw", False), ("zb_v", 2, "sgd", False), ("zb_h1", 2, "adam", True), ("zb_v", 2, "adamw", True)])
def test_replicas_have_one_verdict(name, ranks, optimizer, tied):
    """Each replica judges what all have summed, so it has the bits of the barrier; also where the gradients of only one
    are not finite."""
    for large, bad in (((1, 2), ()), ((0, 3), (2,))):
        options = {"optimizer": optimizer, "scaled": bool(bad), "tied": tied}
        data = batches(large, bad), batches(large)[::-1]
        found = {}
        for barrier in (True, False):
            own = []
            for _ in range(2 * ranks):
                model, graph = recorded(**options)
                own.append((model, ml.plan(graph, name, ml.CostModel.analytic(), ml.Machine(ranks, replicas=2),
                                           barrier=barrier)))
            found[barrier] = trained(own, data, replicas=2)
        assert found[False][:2] == found[True][:2]
        assert all(len(bits) == 1 for bits in found[True][1].values())
        fails = {*large, *(STEPS - 1 - step for step in large), *bad} - {STEPS - 1}
        assert found[False][2] == len(fails), "a step is clipped if it is large in either replica"


STEP_SETS = st.sets(st.integers(0, STEPS - 1)).map(lambda found: tuple(sorted(found)))


@pytest.mark.slow
@given(policy=st.sampled_from(POLICIES), large=STEP_SETS, bad=STEP_SETS, settled=STEP_SETS, scaled=st.booleans(),
       optimizer=st.sampled_from(sorted(OPTIMIZERS)), clip=st.floats(0.01, 20.0))
@settings(max_examples=drawn(25), deadline=None)
def test_any_threshold(policy, large, bad, settled, scaled, optimizer, clip):
    check(*policy, large, bad if scaled else (), settled, optimizer=optimizer, clip=clip, scaled=scaled)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["lenet", "resnet20", "densenet121", "mobilenet_v3_large"])
def test_networks(name):
    """Dropout, batch norms and results that many layers read: what a step runs again it can run again."""
    sizes = {"batch_size": 8, "micro_batches": 4, "model": name, "lr": 0.05, "clip": 0.02,
             "model_args": {} if name == "lenet" else {"preset": "tiny"}}

    def losses_of(run, made):
        found = []
        for _ in range(3):
            found.append(run(*made._split(*next(made.train_data))))
        return found

    made = Recorded(Job(**sizes))
    run = SequentialExecutor(made.graph)
    wanted = [loss.numpy().tobytes() for loss in losses_of(run, made)], made
    own = [Recorded(Job(**sizes, scheduler="zb_h1", parallel="pipeline")) for _ in range(2)]

    def work(communicator):
        mine = own[communicator.rank]
        plan = mine.plan(ml.CostModel.analytic(), ml.Machine(2), barrier=False)
        run, again = DistributedExecutor(*plan.with_messages, communicator), []
        counted(run, again)
        losses = losses_of(run, mine)
        run.close()
        held = {id(s.live) for s in run.program.graph.storages if s.live is not None}
        return losses, {n: p.numpy().tobytes() for n, p in mine.model.named_parameters()
                        if id(p.storage) in held}, len(again)

    with deadline():
        (_, first, again), (losses, second, _) = run_ranks(2, work)
    assert again, "a test of nothing"
    assert [loss.numpy().tobytes() for loss in losses] == wanted[0]
    assert {**first, **second} == {n: p.numpy().tobytes() for n, p in made.model.named_parameters()}


def large_step(samples, clip=CLIP):
    """A step to plan: of few samples, updates take the longer part of it."""
    ml.seed(1)
    model = models.mlp(256, *[256] * 7, 256)
    opt = optim.SGD(model.parameters(), 0.05, momentum=0.9, max_norm=clip)

    def step(*parts):
        for i in range(8):
            with ml.micro_batch(i, i * samples):
                nn.cross_entropy(model(parts[2 * i]), parts[2 * i + 1]).backward()
        opt.step()

    return ml.record(step, *[np.zeros((samples, 256), "f"), np.zeros(samples, np.int64)] * 8)


COST = replace(ml.CostModel.analytic(), link=Link(50.0))


def periods(graph, name, ranks):
    """By default, with and without a barrier."""
    return [ml.plan(graph, name, COST, ml.Machine(ranks), barrier=barrier) for barrier in (None, True, False)]


@pytest.mark.few(3)
@pytest.mark.parametrize("samples", [1, 64])
@pytest.mark.parametrize(("name", "ranks"), [("zb_h1", 2), ("zb_h1", 4), ("zb_h2", 4), ("zb_auto", 4), ("zb_v", 2)])
def test_policies_that_mean_it_have_no_barrier_where_that_is_shorter(name, ranks, samples):
    chosen, with_barrier, without = periods(large_step(samples), name, ranks)
    assert chosen.period == min(with_barrier.period, without.period)
    validates = without.period < with_barrier.period
    assert chosen.graph.late.any() == validates
    assert all((program.verdict is not None) == validates for program in chosen.programs)
    assert chosen.step == min(with_barrier.step, without.step)
    if samples == 64 and ranks == 4:
        assert validates, "the copies take less than the barrier"


def test_where_copies_take_longer_than_the_barrier_it_stays():
    cost = ml.CostModel.analytic()
    chosen, with_barrier = (ml.plan(large_step(1), "zb_h1", cost, ml.Machine(4), barrier=b) for b in (None, True))
    assert chosen.period == with_barrier.period
    assert not chosen.graph.late.any()


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "fast_forward_greedy"])
def test_other_policies_have_one_unless_told(name):
    chosen, with_barrier, without = periods(large_step(64), name, 4)
    assert chosen.period == with_barrier.period
    assert (without.period < with_barrier.period) == (name == "fast_forward_greedy")
    updates = [f"{s}U0" for s in range(4)]
    copies = [without.cost.tasks[u] - with_barrier.cost.tasks[u] for u in updates]
    assert all(c > 0 for c in copies)
    assert without.period <= with_barrier.period + max(copies) + 1e-6, "it costs the copies at most"


def test_a_choice_without_effect_is_refused():
    with pytest.raises(pipeline.PipelineError, match="barrier has no effect"):
        ml.plan(large_step(1, None), "zb_h1", COST, ml.Machine(2), barrier=True)
    assert not ml.plan(large_step(64, None), "zb_h1", COST, ml.Machine(2)).graph.late.any()


def test_a_rank_without_parameters_is_refused():
    _, graph = recorded()
    units = int(graph.unit.max()) + 1
    last = max(t.unit for t in graph if t.kind == Kind.F)
    with pytest.raises(pipeline.PipelineError, match="rank 1 updates nothing"):
        ml.plan(graph, "zb_h1", ml.CostModel.analytic(), ml.Machine(2), barrier=False,
                stage_of_unit=np.where(np.arange(units) == last, 1, 0))


def test_memory_of_the_copies_is_planned():
    """Parameters and states once more, and gradients that outlive the step."""
    (_, with_barrier), (_, without) = (planned("zb_h1", 2, barrier, optimizer="adam", width=64)
                                       for barrier in (True, False))
    for rank, program in enumerate(without.programs):
        graph = program.graph
        own = sum(spec.bytes for spec in graph.storages
                  if spec.live is not None and spec.role in ("parameter", "state"))
        kept = sum(spec.bytes for spec in graph.storages if spec.name.endswith(", kept"))
        assert kept >= own > 4 * 3 * 64 * 64
        assert without.peak_bytes[rank] == program.peak_bytes
        lasting, usual = (p.programs[rank].body[0].memory.persistent_bytes for p in (without, with_barrier))
        assert lasting >= usual + own
    limit = max(with_barrier.peak_bytes)
    with pytest.raises(MemoryLimitError, match="more than the limit"):
        ml.plan(recorded("adam", width=64)[1], "zb_h1", ml.CostModel.analytic(), ml.Machine(2, limit),
                barrier=False)


def test_the_verdict_comes_before_anything_that_cannot_run_again():
    _, plan = planned("zb_h2", 2)
    for program in plan.programs:
        graph = program.graph
        names = [graph.name(t) for t in program.body[0].lane_tasks(0)]
        late = max(i for i, name in enumerate(names) if name.endswith("@1"))
        first = min(i for i, t in enumerate(program.body[0].lane_tasks(0)) if graph.kind[t] in (Kind.O, Kind.W, Kind.B))
        assert late < first
        assert graph.storages[program.verdict].name == VERDICT
    graph, schedule = plan.graph, plan.schedule
    lane = schedule.names(0)
    amended = next(name for name in lane if name.endswith("@1") and lane.index(name) > 1)
    backward = next(name for name in lane if "O0" in name)
    with pytest.raises(ScheduleError, match="comes before"):
        pipeline.swap(schedule, amended, backward).validate(graph)


def test_a_failure_in_what_runs_again_ends_all_ranks():
    own, seen = [planned("zb_h1", 3) for _ in range(3)], {}

    def boom():
        raise ArithmeticError("no luck")

    def work(communicator):
        run = DistributedExecutor(*own[communicator.rank][1].with_messages, communicator)
        if communicator.rank == 1:
            replace_call(run._body[0].after[0].lanes, boom)
        try:
            for parts in batches((0,)):
                run(*parts)
        except Exception as error:
            seen[communicator.rank] = error
            raise
        finally:
            run.close()

    with deadline(), pytest.raises(TaskError, match=r"on rank 1 failed: ArithmeticError: no luck"):
        run_ranks(3, work)
    assert isinstance(seen[0], RankError)
    assert isinstance(seen[2], RankError)


def test_a_trace_of_a_validated_step_has_all_its_tasks():
    own = [planned("zb_h1", 2) for _ in range(2)]

    def work(communicator):
        run = DistributedExecutor(*own[communicator.rank][1].with_messages, communicator, trace=True)
        for parts in batches((1,))[:3]:
            run(*parts)
        found = run.timeline_of_all()
        run.close()
        return found

    with deadline():
        whole = run_ranks(2, work)[0]
    assert sorted(whole.name(i) for i in whole.tasks) == sorted(t.name for t in own[0][1].with_messages[0])
    assert any(whole.name(i).endswith("@1") for i in whole.tasks)


UNDER_MPI = """
import test_post_validation as t
from minidl.runtime.comm.mpi import MPI
from minidl.runtime.executors import DistributedExecutor

comm = MPI()
for name, options in (("zb_h1", {}), ("zb_h2", {"optimizer": "adam", "scaled": True}),
                      ("gpipe", {"optimizer": "adamw"})):
    bad = (3,) if options.get("scaled") else ()
    options = options | {"width": 1024}  # messages of 32 KiB
    model, plan = t.planned(name, comm.size, **options)
    run, again = DistributedExecutor(*plan.with_messages, comm), []
    t.counted(run, again)
    for parts in t.batches((0, 2), bad):
        run(*parts)
    run.close()
    held = {id(s.live) for s in run.program.graph.storages if s.live is not None}
    mine = {n: p.numpy().tobytes() for n, p in model.named_parameters() if id(p.storage) in held}
    everywhere = comm.gather(mine)
    if comm.rank == 0:
        _, wanted, norms = t.alone((0, 2), bad, **options)
        found = {n: bits for own in everywhere for n, bits in own.items()}
        assert found == {n: wanted[n] for n, _ in model.named_parameters()}, name
        assert len(again) == sum(not norm <= t.CLIP for norm in norms[:-1]) >= 2
        print(name, "equal", flush=True)
comm.gather(None)
comm.close()
"""


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")
def test_ranks_of_mpi_leave_the_same_bits():
    done = subprocess.run([MPIEXEC, "-n", "2", sys.executable, "-c", UNDER_MPI], capture_output=True, text=True,
                          timeout=PATIENCE, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": IMPORTABLE})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "zb_h1 equal\nzb_h2 equal\ngpipe equal\n"


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")
def test_a_clipped_run_is_settled_before_a_checkpoint(tmp_path):
    from test_pipeline_ranks import command

    flags = ["--model", "mlp", "--optimizer", "adamw", "--lr", "0.001", "--clip", "0.5", "--micro-batches", "4"]
    wanted = command(1, *flags, "--steps", "6")[1]["params_sha256"]
    kept = [*flags, "--checkpoint", str(tmp_path / "run"), "--parallel", "pipeline", "--scheduler"]
    code, found, errors = command(2, *kept, "zb_h1", "--steps", "4")
    assert code == 0, errors
    assert command(2, *kept, "zb_h2", "--steps", "6", "--resume", "--scheduler-arg",
                   "barrier=False")[1]["params_sha256"] == wanted
    assert found is not None


@pytest.mark.wide
@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "ranks", "optimizer"), [("zb_h1", 2, "sgd"), ("zb_h1", 4, "adamw"),
                                                          ("one_f_one_b", 3, "adam")])
def test_weights_that_ranks_share_are_brought_after_the_verdict(name, ranks, optimizer):
    """The rank that updates them sends what is left after the verdict, so nobody computes on weights taken back."""
    for large, bad in (((), ()), ((1, 2), ()), ((0, 3), (2,))):
        options = {"optimizer": optimizer, "scaled": bool(bad), "tied": True}
        assert set(check(name, ranks, large, bad, **options)) == {*large, *bad}
    plan = planned(name, ranks, tied=True)[1]
    last = [plan.schedule.names(i) for i in range(ranks)][-1]
    late = [task.endswith("@1") for task in last]
    assert late == sorted(late, reverse=True), "the last stage's forwards read the copy"


def test_ranks_with_a_gpu_have_a_barrier():
    class Gpu:
        name, captures = "cuda:0", True

    job = Job(batch_size=16, micro_batches=4, scheduler="zb_h2", parallel="pipeline", clip=0.5)
    made = Recorded(job)
    made.device = Gpu()
    assert not made.plan(COST, ml.Machine(2)).graph.late.any()
    made = Recorded(replace(job, scheduler_args={"barrier": False}))
    made.device = Gpu()
    plan = made.plan(COST, ml.Machine(2))
    assert plan.graph.late.any()
    with pytest.raises(DeviceError, match="cuda:0 does not yet; plan it with barrier=True"):
        DistributedExecutor(*plan.with_messages, SimpleNamespace(rank=0, size=2), device=Gpu())
