"""Loss scaling on ranks: every rank skips the steps whose gradients are not finite, as one process does."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from helpers import deadline, drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pipeline_ranks import MICRO_BATCHES, OPTIMIZERS, SHARE, STEPS, batches

import minidl as ml
from minidl import models, nn, ops, optim
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import DistributedExecutor, SequentialExecutor
from minidl.schedulers.pipeline import PipelineError
from minidl.training.job import Job
from minidl.training.recorded import Recorded

SCHEDULERS = [("gpipe", 2), ("zb_h1", 3), ("one_f_one_b", 4), ("interleaved", 2), ("zb_v", 2)]


def recorded(optimizer="sgd", clip=None, scaled=True, micro_batches=MICRO_BATCHES):
    ml.seed(1)
    model = models.mlp(12, *[16] * 7, 5)
    model.optimizer = opt = OPTIMIZERS[optimizer](model.parameters(), clip)
    opt.scaler = optim.GradScaler(8.0, growth_interval=2) if scaled else None

    def step(*parts):
        total = None
        for i in range(micro_batches):
            with ml.micro_batch(i, i * SHARE):
                loss = nn.cross_entropy(model(parts[2 * i]), parts[2 * i + 1]) * (1 / micro_batches)
                loss.backward(opt.scaler.scale if scaled else None)
                total = loss.detach() if total is None else ops.add(total, loss.detach())
        opt.step()
        return total

    return model, ml.record(step, *batches()[0][: 2 * micro_batches])


def data(bad):
    """The batches of a run; in steps `bad` a sample of one micro-batch is infinite."""
    found = batches()
    for step in bad:
        found[step][2 * (step % MICRO_BATCHES)][0, 0] = np.inf
    return found


def state(model):
    """Every parameter, state and scalar by name."""
    return {**{name: p.numpy().tobytes() for name, p in model.named_parameters()},
            **{name: t.numpy().tobytes() for name, t in model.optimizer.named_tensors()}}


@functools.cache
def alone(bad, **options):
    """Losses and state of one process."""
    model, graph = recorded(**options)
    run = SequentialExecutor(graph)
    losses = [run(*parts).numpy().tobytes() for parts in data(bad)]
    return losses, state(model)


def on_ranks(name, ranks, bad, **options):
    """Losses as the rank with the last stage has them; each part of the state as the ranks that hold it have it."""
    own = []
    for _ in range(ranks):
        model, graph = recorded(**options)
        plan = ml.plan(graph, name, ml.CostModel.analytic(), ml.Machine(ranks))
        own.append((model, *plan.with_messages))

    def work(communicator):
        model, graph, schedule = own[communicator.rank]
        run = DistributedExecutor(graph, schedule, communicator)
        losses = [run(*parts) for parts in data(bad)]
        run.close()
        held = {id(s.live) for s in run.program.graph.storages if s.live is not None}
        named = dict([*model.named_parameters(), *model.optimizer.named_tensors()])
        return losses, {name: bits for name, bits in state(model).items() if id(named[name].storage) in held}

    with deadline():
        found = run_ranks(ranks, work)
    (losses,) = ([value.numpy().tobytes() for value in values] for values, _ in found if values[0] is not None)
    held: dict[str, set[bytes]] = {}
    for _, parts in found:
        for key, bits in parts.items():
            held.setdefault(key, set()).add(bits)
    return losses, held


def check(name, ranks, bad=(), **options):
    losses, held = on_ranks(name, ranks, bad, **options)
    wanted, whole = alone(bad, **options)
    assert losses == wanted
    assert held == {key: {bits} for key, bits in whole.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("name", "ranks"), SCHEDULERS)
def test_all_ranks_skip_the_steps_that_one_process_skips(name, ranks, optimizer, clip):
    for bad in ((), (0,), (1, 2), (STEPS - 1,)):
        check(name, ranks, bad, optimizer=optimizer, clip=clip)
    assert alone((1, 2), optimizer=optimizer, clip=clip) != alone((), optimizer=optimizer, clip=clip)
    assert alone((0, 1, 2, 3), optimizer=optimizer, clip=clip)[1]["scale"] == np.float32(0.5).tobytes()


@pytest.mark.wide
@given(schedule=st.sampled_from(SCHEDULERS), bad=st.sets(st.integers(0, STEPS - 1)),
       optimizer=st.sampled_from(sorted(OPTIMIZERS)), clip=st.sampled_from([None, 0.05, 0.2, 1.0]))
@settings(max_examples=drawn(15), deadline=None)
def test_any_steps_may_be_skipped(schedule, bad, optimizer, clip):
    check(*schedule, tuple(sorted(bad)), optimizer=optimizer, clip=clip)


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

    graph = ml.record(step, *batches()[0][:2])
    with pytest.raises(PipelineError, match="scales its loss for several optimizers"):
        ml.plan(graph, "gpipe", ml.CostModel.analytic(), ml.Machine(2))


@pytest.mark.few(2)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["barrier", "buckets", "priority", "reverse_first_k", "dear"])
def test_replicas_skip_the_same_steps(name, optimizer, clip):
    """A gradient that is not finite on one rank is so in the mean of all."""
    own = [recorded(optimizer, clip, micro_batches=2) for _ in range(2)]

    def work(communicator):
        model, graph = own[communicator.rank]
        plan = ml.plan(graph, name, ml.CostModel.analytic(), ml.Machine(2))
        run = DistributedExecutor(plan.graph, plan.schedule, communicator)
        begin = 4 * communicator.rank
        scales = []
        for parts in data((1,)):  # a sample of micro-batch 1: of rank 0
            run(*parts[begin : begin + 4])
            run.settle()
            scales.append(model.optimizer.scaler.scale.item())
        run.close()
        return scales, state(model)

    with deadline():
        first, second = run_ranks(2, work)
    assert first == second
    assert first[0] == [8.0, 4.0, 4.0, 8.0]
    assert all(np.isfinite(p.numpy()).all() for p in own[0][0].parameters())


def test_the_updates_of_a_pipeline_are_not_one_launch():
    """They are of several stages."""
    job = Job(model_args={"preset": "tiny"}, batch_size=16, micro_batches=4, parallel="pipeline", scheduler="gpipe",
              fusion=("updates",))
    made = Recorded(job).plan(ml.CostModel.analytic(), ml.Machine(2))
    assert all(np.isfinite(p) for p in made.peaks)
    assert not any(launch.kernel == "sgd_many" for own in made.graph.launches for launch in own)
