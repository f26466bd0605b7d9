"""Which weight versions tasks read, how many of them a rank keeps, and what stands for old ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pipelines
import pytest
from helpers import drawn, refuses
from hypothesis import given, settings
from hypothesis import strategies as st
from stale_runs import (
    COST,
    MICRO_BATCHES,
    MIXED,
    POLICIES,
    STEPS,
    drawn_versions,
    heavy,
    planned,
    ran,
    recorded,
    run,
    update_every,
)

import minidl as ml
from minidl import models
from minidl.core.graph import Role
from minidl.core.placement import DECAYS
from minidl.core.schedule import ScheduleError
from minidl.core.tasks import Kind, as_recorded, repack, unpack
from minidl.data import builtin
from minidl.kernels import KERNELS
from minidl.runtime.version_log import drift, staleness
from minidl.schedulers import pipeline
from minidl.schedulers.ordered import Ordered
from minidl.schedulers.pipeline import PipelineError
from minidl.schedulers.pipeline.flush import one_f_one_b
from minidl.schedulers.pipeline.layerpipe import layerpipe


def test_a_loss_that_would_come_a_step_late_is_refused():
    """With a loss scale, backward passes follow each other, so many ranks need more than a step."""
    with pytest.raises(PipelineError, match="3F7@1 makes what the step returns, one step late; leave the loss scale"):
        ml.plan(recorded(1, "adamw, scaled")[1], "pipedream", COST, ml.Machine(4))


def test_an_update_that_waits_too_long_is_refused():
    def older(problem):
        made = layerpipe(problem)
        return replace(made, versions=replace(made.versions, read=np.maximum(0, made.versions.read - 9)))

    with pytest.raises(PipelineError, match="older: 0U5 waits for all stages until the step after the next one"):
        ml.plan(recorded(1, "sgd, clipped", network=heavy)[1], pipeline.Policy(older, "contiguous", stale=True), COST,
                ml.Machine(3))


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "late"), [
    ("pipedream", [3, 2, 1, 0]), ("pipedream, averaged", [3, 2, 1, 0]), ("pipedream_2bw", [1, 1, 1, 1]),
    ("pipedream_2bw, whole", [1, 1, 1, 1]), ("paci", [2, 1, 1, 0]), ("paci, whole", [1, 1, 1, 0]),
    ("layerpipe2", [6, 4, 2, 0]), ("layerpipe2, averaged", [6, 4, 2, 0])])
def test_the_log_says_what_was_published(name, late):
    _, _, log, plan = ran(name, 4)
    found = staleness(log)
    assert [int(found[s].max()) for s in range(4)] == late
    policy, told = POLICIES[name]
    many = ({"mini_batches": STEPS * told.get("mini_batches", 1)} if policy in ("pipedream_2bw", "paci") else {})
    made = pipelines.plan(policy, 4, update_every(name) if many else STEPS * MICRO_BATCHES, **told | many)
    expected = dict(zip(made.schedule.keys.tolist(), made.versions.read.tolist(), strict=True))
    for e in log:  # all steps as if the policy had ordered them in one
        key = int(repack(e.key, micro_batch=e.step * MICRO_BATCHES + unpack(e.key).micro_batch))
        assert e.version == expected.get(key, e.version)
    assert len(log) > STEPS * 4 * MICRO_BATCHES
    assert plan.peak_bytes


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "copies"), [
    ("pipedream", [2, 1, 0]), ("pipedream", [5, 2, 1, 0]), ("pipedream, averaged", [1, 1, 1, 0]),
    ("pipedream_2bw", [1, 1, 1, 1]), ("pipedream_2bw, whole", [1, 1, 1, 1]), ("paci", [0, 0, 0, 0]),
    ("layerpipe2", [4, 2, 0]),
    ("layerpipe2, averaged", [1, 1, 0])])
def test_a_rank_keeps_as_many_copies_as_are_read_at_a_time(name, copies):
    """Beside the parameters themselves: places for a weight's older versions. As many as are alive at a time, if their
    number divides the micro-batches of a step; each must return to its place in the next step."""
    programs = planned(name, len(copies)).programs
    for program, expected in zip(programs, copies, strict=True):
        memory, storages = program.body[0].memory, program.graph.storages
        weights = [s.name for s in storages if s.role == Role.PARAMETER and s.name.endswith(".weight")]
        assert weights
        for weight in weights:
            kept = [i for i, s in enumerate(storages) if s.name.startswith(f"{weight}, ")]
            assert len({int(memory.offset[i]) if memory.offset[i] >= 0 else f"own {i}" for i in kept}) == expected


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["pipedream", "layerpipe2"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_an_average_stands_for_old_versions_after_the_first(name, ranks):
    """The log says where an average stood for a version; before the first update it is the weights."""
    *_, log, _ = run(f"{name}, averaged", ranks)
    exact = ran(name, ranks)[2]
    assert [(e.step, e.key, e.version) for e in log] == [(e.step, e.key, e.version) for e in exact]
    each = {"pipedream": 1, "layerpipe2": 2}[name]
    for e in log:
        task = unpack(e.key)
        age = each * (ranks - 1 - task.unit)
        old = age > 0 and task.kind not in (Kind.F, Kind.U) and (e.step, task.micro_batch) > (0, 0)
        assert e.average == (age if old else 0)
    assert any(e.average for e in log)


def rebuilt(weights, age, decay):
    """What an average gives after each update in place of the weights of `age` updates ago."""
    past, found = KERNELS["past"].reference, weights[0]
    for t, (before, after) in enumerate(pairwise(weights)):
        kept = past(np, before, found, np.array([t]), age=age, decay=DECAYS[decay](age), done=False)
        found = past(np, after, kept, np.array([t + 1]), age=age, decay=DECAYS[decay](age), done=True)
        yield found


@pytest.mark.parametrize("decay", DECAYS)
def test_an_average_of_weights_that_move_evenly_is_exact(decay):
    change = np.random.default_rng(0).standard_normal(3)
    weights = [k * change for k in range(30)]
    for age in (2, 4, 9):
        for t, found in enumerate(rebuilt(weights, age, decay), 1):
            np.testing.assert_allclose(found, weights[max(0, t - age)], atol=1e-12)


def trajectory(rate, momentum, steps=400):
    """All weights of a network of one hidden layer of 128 after each step on the digits, in NumPy."""
    random, (images, labels) = np.random.default_rng(0), builtin.raw_digits()
    train = builtin.fifth(len(images), "train")
    x, labels = images[train].reshape(-1, 64) / 16, labels[train]
    w = [random.standard_normal((64, 128)) / 8, np.zeros(128), random.standard_normal((128, 10)) / 11, np.zeros(10)]
    v = [0 * a for a in w]
    for _ in range(steps):
        yield np.concatenate([a.ravel() for a in w])
        i = random.integers(0, len(x), 16)
        h = np.maximum(x[i] @ w[0] + w[1], 0)
        p = np.exp(h @ w[2] + w[3])
        p = (p / p.sum(1, keepdims=True) - np.eye(10)[labels[i]]) / 16
        inner = (p @ w[2].T) * (h > 0)
        v = [momentum * a + g for a, g in zip(v, (x[i].T @ inner, inner.sum(0), h.T @ p, p.sum(0)), strict=True)]
        w = [a - rate * b for a, b in zip(w, v, strict=True)]


@pytest.mark.few(1)
@pytest.mark.parametrize(("rate", "momentum", "near", "expected"), [
    (0.02, 0.9, 0.05, {"age": (0.121, 0.230, 0.341, 0.397), "window": (0.073, 0.131, 0.268, 0.416)}),
    (0.1, 0.0, 0.13, {"age": (0.518, 0.509, 0.471, 0.410), "window": (0.650, 0.650, 0.601, 0.498)})])
def test_errors_of_rebuilt_weights_are_near_those_of_another_run(rate, momentum, near, expected):
    """Relative to the error of the newest weights, for ages of 2, 4, 8 and 16. The window's lag is better if updates
    are smooth, and worse for plain SGD."""
    weights, found = [*trajectory(rate, momentum)], {}
    for decay, figures in expected.items():
        found[decay] = [np.mean([np.linalg.norm(w - weights[t - age]) / np.linalg.norm(weights[t] - weights[t - age])
                                 for t, w in enumerate(rebuilt(weights, age, decay), 1) if t >= 50])
                        for age in (2, 4, 8, 16)]
        np.testing.assert_allclose(found[decay], figures, atol=near)
    better = np.less(found["window"], found["age"])[:3]
    assert better.all() if momentum else not better.any()


@pytest.mark.few(1)
@pytest.mark.parametrize("decay", ["age", "window"])
def test_an_average_of_one_update_has_the_bits_of_the_old_weights(decay, monkeypatch):
    monkeypatch.setitem(POLICIES, "one", ("pipedream", {"history": "average", "decay": decay}))
    assert run("one", 2)[:2] == ran("pipedream", 2)[:2]


@settings(max_examples=drawn(40), deadline=None)
@given(ranks=st.integers(1, 9), every=st.integers(1, 8), updates_=st.integers(1, 6))
def test_accumulation_bounds_the_drift_of_paci(ranks, every, updates_):
    """ceil((N - 1) / a) for N stages and a micro-batches an update, on rank s with p - s in the place of N."""
    made = pipelines.plan("paci", ranks, every, mini_batches=updates_)
    own = unpack(made.schedule.keys)
    read = np.zeros((2, ranks, every * updates_), np.int64)
    read[(own.kind == Kind.F).astype(int), own.unit, own.micro_batch] = made.versions.read
    late = (read[0] - read[1]).max(axis=1)
    bound = -(-(ranks - 1 - np.arange(ranks)) // every)
    assert (late >= 0).all()
    assert (late <= bound).all()
    if updates_ * every >= 2 * (ranks + every):  # long enough to fill
        assert (late == bound).all()
    assert made.peaks == tuple(min(ranks - s, every * updates_) for s in range(ranks))


def test_the_log_of_paci_shows_its_drift():
    for name, most in (("paci", [2, 1, 1, 0]), ("pipedream", [0, 0, 0, 0]), ("layerpipe2, averaged", [0, 0, 0, 0])):
        found = drift(ran(name, 4)[2])
        assert [int(found[s].max()) for s in range(4)] == most
    assert POLICIES["paci"][1]["mini_batches"] * 2 == MICRO_BATCHES, "a = 2, so at most ceil(3 / 2) on the first rank"


def test_what_keeps_nothing_reads_nothing_old():
    made = pipelines.plan("paci", 3, 2, mini_batches=3)
    entry = int(np.flatnonzero(made.versions.read == 1)[-1])
    wrong = made.versions.read.copy()
    wrong[entry] = 0
    with pytest.raises(ScheduleError, match="reads weight version 0, but then the newest one of stage . is 1, and no "
                                            "other is kept"):
        pipeline.prove(replace(made, versions=replace(made.versions, read=wrong)))


def test_an_average_rebuilds_one_age_only():
    with pytest.raises(PipelineError, match="reads weights . updates old, but other tasks of its stage read weights . "
                                            "updates old; a moving average gives only one age"):
        ml.plan(recorded(1)[1], drawn_versions(0, "average"), COST, ml.Machine(3))


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_of_layers_read_what_the_plan_says(ranks):
    """On every rank that has a copy of a layer's weights, also where F, O and W are on three."""
    *_, log, plan = run("layerpipe", ranks, network=heavy)
    version = dict(zip(as_recorded(plan.schedule.keys).tolist(), plan.versions.read.tolist(), strict=True))
    for e in log:
        task = unpack(e.key)
        made = task.kind == Kind.U
        assert e.version == max(0, e.step * MICRO_BATCHES + (task.micro_batch + 1 if made else version[e.key]))
    copies = {(unpack(e.key).unit, unpack(e.key).part) for e in log}
    assert max(part for _, part in copies) == min(ranks, 3) - 1
    assert any(found.max() for found in staleness(log).values())


@pytest.mark.few(4)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_waits_between_steps(name, ranks):
    """The predicted step is that of the steady state: the busiest rank's work."""
    policy, told = POLICIES[name]
    graph = recorded(update_every(name))[1]
    linear = np.isin(np.arange(int(graph.unit.max()) + 1), graph.unit[graph.kind == Kind.W]).astype(float)
    each = {kind: linear.tolist() for kind in "FOW"} | {"U": 0.0}
    made = ml.plan(graph, policy, ml.CostModel(kinds=each, link=ml.Link(0.0)), ml.Machine(ranks), **told)
    assert made.step == pytest.approx(3 * MICRO_BATCHES * 8 / ranks)


def test_too_few_micro_batches_are_refused():
    for name, told, ranks in (("pipedream", {}, 9), ("layerpipe2", {}, 5)):
        with pytest.raises(PipelineError, match="take more micro-batches"):
            graph = recorded(1, network=lambda *_: models.mlp(12, *[16] * 11, 5))[1]
            ml.plan(graph, name, COST, ml.Machine(ranks), **told)

    def once(problem):
        schedule = one_f_one_b(problem)
        micro_batch = unpack(schedule.keys).micro_batch
        return Ordered(schedule, versions=pipeline.Versions(
            np.where(micro_batch == 4, 0, np.maximum(0, micro_batch - 3))))

    with pytest.raises(PipelineError, match="once does not repeat on rank 0"):
        ml.plan(recorded(1)[1], pipeline.Policy(once, "contiguous", stale=True), COST, ml.Machine(2))
    with pytest.raises(PipelineError, match="one_f_one_b never drains, so it must give the weight versions"):
        ml.plan(recorded(1)[1], pipeline.Policy(one_f_one_b, "contiguous", stale=True), COST, ml.Machine(2))


def test_a_step_with_other_updates_is_refused():
    def planned(updates, policy, ranks, network=None, **told):
        return lambda: ml.plan(recorded(updates, **(network or {}))[1], policy, COST, ml.Machine(ranks), **told)

    def ordered(policy, **told):
        return lambda: pipelines.plan(policy, 3, 4, **told)

    def every(mini_batches):
        return lambda: pipelines.policy("paci").update_every(8, mini_batches)

    refuses(
        (planned(2, "pipedream", 2),
         "pipedream: it updates after every 1 of 8 micro-batches, but this step was recorded with other updates"),
        (planned(1, "layerpipe", 5, MIXED), "are on different ranks and both need .*, which outlives a step"),
        (planned(1, "layerpipe", 3, {"network": heavy}, method="inter"),
         "the output gradient of stage 1 cannot be cut between two layers"),
        (ordered("layerpipe2", history="none"), "history is 'none'; it must be 'exact' or 'average' or 'predicted'"),
        (ordered("layerpipe2", history="average", decay="short"),
         "decay is 'short'; it must be 'last' or 'age' or 'window' or 'pipemare'"),
        (ordered("pipedream", decay="age"),
         "decay has no effect if old weights are kept; give history=average or predicted too$"),
        *((every(wrong), rf"paci updates .*mini_batches={wrong}\) must divide .*-batches 8\)")
          for wrong in (0, 3, "two")), error=PipelineError)
