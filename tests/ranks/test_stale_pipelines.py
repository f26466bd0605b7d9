"""Stale pipelines run: each task on the weights that the policy says, as the run's own log has it, with the bits of one
process that replays the log."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pipelines
import pytest
from command_line import run_json
from helpers import bits, deadline, drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher import MPIEXEC
from replays import replay_together
from test_pipeline_ranks import command

import minidl as ml
from minidl import models, nn, ops, optim
from minidl.core.graph import Role
from minidl.core.placement import DECAYS
from minidl.core.schedule import ScheduleError
from minidl.core.tasks import Kind, as_recorded, pack, repack, unpack
from minidl.data import builtin
from minidl.kernels import KERNELS
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.executors import DistributedExecutor, SequentialExecutor
from minidl.runtime.version_log import Replay, drift, staleness
from minidl.schedulers import pipeline
from minidl.schedulers.ordered import Ordered
from minidl.schedulers.pipeline import PipelineError, add_communication
from minidl.schedulers.pipeline.flush import one_f_one_b
from minidl.schedulers.pipeline.layerpipe import layerpipe

MICRO_BATCHES, SHARE, STEPS = 8, 4, 3
COST = ml.CostModel.analytic()
OPTIMIZERS = {"sgd": lambda p: optim.SGD(p, 0.02, momentum=0.9), "adamw": lambda p: optim.AdamW(p, 0.003),
              "nadamw": lambda p: optim.NAdamW(p, 0.003),
              "sgd, clipped": lambda p: optim.SGD(p, 0.02, momentum=0.9, max_norm=0.1),
              "adamw, clipped": lambda p: optim.AdamW(p, 0.003, max_norm=0.1),
              "adamw, scaled": lambda p: optim.AdamW(p, 0.003, max_norm=0.1,
                                                     scaler=optim.GradScaler(8.0, growth_interval=2))}
POLICIES = {"pipedream": ("pipedream", {}), "pipedream, averaged": ("pipedream", {"history": "average"}),
            "pipedream_2bw": ("pipedream_2bw", {"mini_batches": 2}), "paci": ("paci", {"mini_batches": 4}),
            "pipedream_2bw, whole": ("pipedream_2bw", {}), "paci, whole": ("paci", {}),
            "layerpipe": ("layerpipe", {}), "layerpipe2": ("layerpipe2", {}),
            "layerpipe2, averaged": ("layerpipe2", {"history": "average"}),
            "adl": ("adl", {"mini_batches": 4}), "adl, whole": ("adl", {}),
            "pipedream, predicted": ("pipedream", {"history": "predicted"}),
            "layerpipe2, predicted": ("layerpipe2", {"history": "predicted"})}
IN_HALVES = "layerpipe, in halves"
CUT = {IN_HALVES: ("layerpipe", {"method": "inter"})}


class Mixed(nn.Module):
    """Batch norm, dropout, and layers with parameters of their own, over several blocks."""

    def __init__(self):
        self.layers = nn.ModuleList([nn.Linear(12, 16), *(nn.Linear(16, 16) for _ in range(5)), nn.Linear(16, 5)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(16) for _ in range(6)])
        self.drop = nn.Dropout(0.25)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = self.drop(ops.relu(ops.reshape(norm(ops.reshape(layer(x), (SHARE, 1, 1, 16))), (SHARE, 16))))
        return self.layers[len(self.layers) - 1](x)


class Normed(Mixed):
    """The same without dropout, whose count LayerPipe cannot keep on two ranks."""

    def __init__(self):
        super().__init__()
        self.drop = lambda x: x


def heavy():
    """A layer in the middle that costs more than the others together: its F, O and W are on a rank each of three."""
    return models.mlp(12, 16, 256, 256, 16, 5)


class Tied(nn.Module):
    """The first layer's weight is the last one's, transposed; or is used in half of all layers, another in two more."""

    def __init__(self, everywhere=False):
        one, two = nn.Linear(12, 12), nn.Linear(12, 12)
        uses = {3: one, 4: two, 5: one, 6: two, 7: one} if everywhere else {}
        self.layers = nn.ModuleList([one, *(nn.Linear(12, 12) for _ in range(7))])
        for i, used in uses.items():
            self.layers[i].weight = used.weight
        self.back = not everywhere

    def forward(self, x):
        for layer in self.layers:
            x = ops.tanh(layer(x))
        return ops.matmul(x, self.layers[0].weight) if self.back else x


def everywhere():
    return Tied(True)


class Drawn:
    """Layers of random widths."""

    def __init__(self, seed):
        self.widths, self.__name__ = np.random.default_rng(seed).integers(4, 80, 6).tolist(), f"drawn {seed}"

    def __call__(self):
        return models.mlp(12, *self.widths, 5)


def batches():
    random = np.random.default_rng(3)
    return [[part for _ in range(MICRO_BATCHES) for part in (random.standard_normal((SHARE, 12)).astype("f"),
                                                             random.integers(0, 5, SHARE))] for _ in range(STEPS)]


def recorded(every, optimizer="sgd", network=lambda: models.mlp(12, *[16] * 7, 5)):
    ml.seed(1)
    model = network()
    opt = OPTIMIZERS[optimizer](model.parameters())

    def step(*parts):
        total = None
        for i in range(MICRO_BATCHES):
            with ml.micro_batch(i, i * SHARE):
                loss = nn.cross_entropy(model(parts[2 * i]), parts[2 * i + 1]) * (1 / every)
                loss.backward(opt.scaler and opt.scaler.scale)
                part = loss.detach() * (every / MICRO_BATCHES)
                total = part if total is None else ops.add(total, part)
                if every < MICRO_BATCHES and (i + 1) % every == 0:
                    opt.step()
        if every == MICRO_BATCHES:
            opt.step()
        return total

    return model, ml.record(step, *batches()[0])


def update_every(name):
    policy, told = (POLICIES | CUT)[name]
    return pipelines.policy(policy).update_every(MICRO_BATCHES, told.get("mini_batches", 1))


def run(name, ranks, **options):
    """Of a stale run on ranks: losses, each parameter as its rank left it, the log of all ranks, and the plan."""
    policy, told = (POLICIES | CUT)[name]
    every = update_every(name)
    own = []
    for _ in range(ranks):
        model, graph = recorded(every, **options)
        plan = ml.plan(graph, policy, COST, ml.Machine(ranks), **told)
        own.append((model, *add_communication(plan.graph, plan.schedule)))

    def work(communicator):
        model, graph, schedule = own[communicator.rank]
        run = DistributedExecutor(graph, schedule, communicator, logged=True)
        losses = [run(*parts) for parts in batches()]
        run.close()
        held = {id(s.live) for s in run.program.graph.storages if s.live is not None}
        return losses, [p.numpy().tobytes() if id(p.storage) in held else None
                        for p in model.parameters()], run.log.entries

    with deadline():
        found = run_ranks(ranks, work)
    losses = [float(value) for value in next(f[0] for f in found if f[0][0] is not None)]
    return losses, [next(b for b in bits if b is not None)
                    for bits in zip(*(f[1] for f in found), strict=True)], [e for f in found for e in f[2]], plan


def replayed(name, ranks, log, **options):
    """Losses and parameters of one process that does what the log says."""
    model, graph = recorded(update_every(name), **options)
    replay = Replay(graph, pipeline.balanced(graph, COST, ranks))
    losses = [float(replay(tuple(parts), [e for e in log if e.step == i])) for i, parts in enumerate(batches())]
    return losses, [p.numpy().tobytes() for p in model.parameters()]


CASES = ([(name, ranks, {}) for name in POLICIES for ranks in (1, 2, 3, 4)]
         + [(name, 3, {"optimizer": optimizer}) for optimizer in ("adamw", "nadamw") for name in POLICIES]
         + [(name, 3, {"network": Normed if name == "layerpipe" else Mixed, "optimizer": "adamw"})
            for name in POLICIES]
         + [("layerpipe", ranks, {"network": heavy}) for ranks in (2, 3, 4)]
         + [("layerpipe", 2 + seed % 3, {"network": Drawn(seed)}) for seed in range(6)]
         # two stages of one rank update at different times, each with powers of its own
         + [("layerpipe", 3, {"network": Drawn(11), "optimizer": "adamw"}),
            ("layerpipe", 3, {"network": everywhere, "optimizer": "adamw"})]
         + [(name, ranks, {"network": Tied, "optimizer": "adamw"}) for name, ranks in [
             *((name, 4) for name in POLICIES), ("pipedream", 2), ("layerpipe", 2)]]
         + [(name, 1 + (i + 1) % 4, {"network": everywhere}) for i, name in enumerate(POLICIES)]
         + [(name, ranks, {"optimizer": "sgd, clipped"}) for name in POLICIES for ranks in (2, 4)]
         + [(name, ranks, {"optimizer": "adamw, scaled"}) for name, ranks in [
             *((name, 2) for name in POLICIES), ("pipedream, averaged", 3), ("pipedream_2bw", 4), ("layerpipe", 4)]]
         + [(name, 3, {"network": Tied, "optimizer": "adamw, clipped"}) for name in POLICIES]
         + [("layerpipe", ranks, {"network": heavy, "optimizer": "adamw, clipped"}) for ranks in (2, 3, 4)]
         + [(IN_HALVES, 2, {"network": heavy}), (IN_HALVES, 3, {"network": Drawn(4), "optimizer": "adamw, clipped"}),
            (IN_HALVES, 3, {"network": Drawn(7), "optimizer": "adamw, scaled"})])


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "ranks", "options"), CASES,
                         ids=lambda x: "-".join(f"{v if isinstance(v, str) else v.__name__}" for v in x.values())
                                       if isinstance(x, dict) else str(x))
def test_a_run_leaves_the_bits_of_its_log_replayed(name, ranks, options):
    losses, parameters, log, plan = run(name, ranks, **options)
    assert (losses, parameters) == replayed(name, ranks, log, **options)
    assert bool(plan.placement.halves) == (name == IN_HALVES)


def test_an_output_gradient_in_two_halves_evens_the_ranks():
    """The upper layers' gradients on one rank, the lower ones' on the next, which then has as much to do."""
    graph = recorded(1, network=heavy)[1]
    whole, halves = (ml.plan(graph, "layerpipe", COST, ml.Machine(2), method=m) for m in ("intra", "inter"))
    assert halves.step < whole.step
    first, second = (halves.schedule.names(i) for i in (0, 1))
    assert "1O0" in first
    assert "1O0/1" in second


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "ranks", "options"), [
    ("pipedream", 2, {}), ("pipedream_2bw", 2, {}), ("paci", 2, {}), ("layerpipe2", 2, {}),
    ("pipedream, averaged", 3, {}), ("layerpipe", 3, {}), ("pipedream", 2, {"network": Tied}),
    ("paci, whole", 3, {"network": everywhere}), ("pipedream", 3, {"optimizer": "adamw, clipped"}),
    ("pipedream_2bw, whole", 2, {"optimizer": "adamw, scaled"}), ("layerpipe", 3, {"optimizer": "adamw, clipped"})])
def test_replicas_make_the_same_versions(name, ranks, options):
    """Each replica reads the versions that the log of one says, and all leave the bits of that log, replayed with the
    mean of their gradients before each update."""
    policy, told = POLICIES[name]
    own, data, options = [], (batches(), batches()[::-1]), {"optimizer": "adamw"} | options
    for _ in range(2 * ranks):
        model, graph = recorded(update_every(name), **options)
        own.append((model, ml.plan(graph, policy, COST, ml.Machine(ranks, replicas=2), **told)))

    def work(communicator):
        model, plan = own[communicator.rank]
        run = DistributedExecutor(*plan.with_messages, communicator, logged=True)
        for parts in data[communicator.rank // ranks]:
            run(*parts)
        run.close()
        held = {id(s.live) for s in run.program.graph.storages if s.live is not None}
        return {i: p.numpy().tobytes() for i, p in enumerate(model.parameters()) if id(p.storage) in held}, run.log

    with deadline():
        found = run_ranks(2 * ranks, work)
    (bits, log), (others, same) = ((functools.reduce(dict.__or__, (f[0] for f in mine)),
                                    [e for f in mine for e in f[1].entries]) for mine in (found[:ranks], found[ranks:]))
    assert (bits, log) == (others, same)
    alone = [recorded(update_every(name), **options) for _ in data]
    replays = [Replay(graph, pipeline.balanced(graph, COST, ranks)) for _, graph in alone]
    for step, parts in enumerate(zip(*data, strict=True)):
        replay_together(replays, [tuple(p) for p in parts], [e for e in log if e.step == step])
    for model, _ in alone:
        assert {i: p.numpy().tobytes() for i, p in enumerate(model.parameters())} == bits


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [  # PACI and predictions read the newest ones
    name for name in POLICIES if "paci" not in name and "predicted" not in name])
def test_if_updates_wait_for_a_norm_a_micro_batch_reads_one_version_on_all_stages(name):
    """So its norm is that of a gradient at one point; and no micro-batch reads a newer version than without."""
    _, parameters, log, plan = run(name, 4, optimizer="sgd, clipped")
    assert parameters != run(name, 4)[1]
    forward = {}
    for e in log:
        if unpack(e.key).kind == Kind.F:
            forward.setdefault((e.step, unpack(e.key).micro_batch), set()).add(e.version)
    assert max(map(len, forward.values())) == 1
    policy, told = POLICIES[name]
    before = ml.plan(recorded(update_every(name))[1], policy, COST, ml.Machine(4), **told)
    found, wanted = ({key: read for key, read in zip(
        as_recorded(made.schedule.keys).tolist(), made.versions.read.tolist(), strict=True)
        if unpack(key).kind == Kind.F} for made in (plan, before))
    assert all(found[key] <= wanted[key] for key in wanted)
    assert [found[int(pack(0, Kind.F, i))] for i in range(MICRO_BATCHES)] == [
        wanted[int(pack(0, Kind.F, i))] for i in range(MICRO_BATCHES)]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in POLICIES), ("pipedream", 3), ("paci", 3)])
def test_a_mini_batch_whose_gradients_are_not_finite_changes_no_weights_on_any_stage(name, ranks, monkeypatch):
    data = batches()
    data[1][4][0, 0] = np.inf
    monkeypatch.setitem(globals(), "batches", lambda: data)
    losses, parameters, log, _ = run(name, ranks, optimizer="adamw, scaled")
    with np.errstate(invalid="ignore"):
        wanted, alone = replayed(name, ranks, log, optimizer="adamw, scaled")
    assert np.isnan(losses).tolist() == [False, True, False]
    assert np.array_equal(losses, wanted, equal_nan=True)
    assert parameters == alone
    assert all(np.isfinite(np.frombuffer(bits, np.float32)).all() for bits in parameters)


def test_a_loss_that_would_come_a_step_late_is_refused():
    """With a loss scale, backward passes follow each other, so many ranks need more than a step."""
    with pytest.raises(PipelineError, match="3F7@1 makes what the step returns, one step late; return .*take fewer"):
        ml.plan(recorded(1, "adamw, scaled")[1], "pipedream", COST, ml.Machine(4))


def test_an_update_that_waits_too_long_is_refused():
    def older(problem):
        made = layerpipe(problem)
        return replace(made, versions=replace(made.versions, read=np.maximum(0, made.versions.read - 9)))

    with pytest.raises(PipelineError, match="older: 0U5 waits for all stages until the step after the next one"):
        ml.plan(recorded(1, "sgd, clipped", heavy)[1], pipeline.Policy(older, "contiguous", stale=True), COST,
                ml.Machine(3))


def prepared(names, ranks):
    """For each rank, a model and a plan by name. Models differ: a message that another program gets shows."""
    found = []
    for _ in range(ranks):
        own = {}
        for i, name in enumerate(names):
            policy, told = POLICIES.get(name, (name, {}))
            every = update_every(name) if name in POLICIES else MICRO_BATCHES
            model, graph = recorded(every, network=Drawn(i % 2))
            own[name, i] = model, ml.plan(graph, policy, COST, ml.Machine(ranks), **told).with_messages
        found.append(own)
    return found


@pytest.mark.wide
@pytest.mark.few(1)
@pytest.mark.parametrize(("names", "ranks"), [
    (("pipedream", "gpipe"), 2), (("pipedream", "pipedream"), 2), (("pipedream_2bw", "layerpipe2", "zb_h1"), 3)])
def test_programs_that_take_turns_keep_their_messages_apart(names, ranks):
    """A stale run leaves messages on their way when its step ends. Another program on the same ranks, whose messages
    have the same numbers, gets none of them: all leave the bits that they leave alone."""
    def trained(names, order):
        own = prepared(names, ranks)

        def work(communicator):
            runs = {key: DistributedExecutor(*talking, communicator)
                    for key, (_, talking) in own[communicator.rank].items()}
            losses = {key: [] for key in runs}
            for key in order:
                losses[key].append(runs[key](*batches()[len(losses[key]) % STEPS]))
                communicator.gather(None)
            for run in runs.values():
                run.close()
            return losses, {key: bits(*(p for p in model.parameters()
                                        if id(p.storage) in {id(s.live) for s in runs[key].program.graph.storages}))
                            for key, (model, _) in own[communicator.rank].items()}

        with deadline():
            return run_ranks(ranks, work)

    keys = [(name, i) for i, name in enumerate(names)]
    together = trained(names, [keys[i] for i in np.random.default_rng(1).permutation(len(keys) * 6) % len(keys)])
    for key in keys:
        padded = (*("gpipe",) * key[1], key[0])  # numbered alike, so that its model is the same
        for both, alone in zip(together, trained(padded, [key] * 6), strict=True):
            assert (both[0][key], both[1][key]) == (alone[0][key], alone[1][key])


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("name", ["pipedream", "layerpipe2"])
def test_ranks_may_talk_between_steps(name, trace):
    """A send that is received in the next step may outlive its own: ranks that ask each other for a loss, for a
    timeline, or whether to stop, have not begun that step. Loop-back sends end when they are received."""
    policy, told = POLICIES[name]
    own = [ml.plan(recorded(1)[1], policy, COST, ml.Machine(3), **told) for _ in range(3)]

    def work(communicator):
        run, every = DistributedExecutor(*own[communicator.rank].with_messages, communicator, trace=trace), []
        for parts in batches():
            loss = run(*parts)
            if trace:
                timeline = run.timeline_of_all()
                assert communicator.rank or (timeline.end >= timeline.start).all()
                assert communicator.rank or {lane.rank for lane in timeline.lanes} == {0, 1, 2}
            every.append(communicator.gather(None if loss is None else float(loss)))
        run.settle()
        run.close()
        return [next(loss for loss in losses if loss is not None) for losses in every]

    with deadline():
        assert run_ranks(3, work)[0] == run(name, 3)[0]


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")
def test_replicas_train_on_stale_weights(capsys):
    """Over MPI, and as threads of one process, with the same bits."""
    flags = [*FLAGS, "--scheduler", "pipedream_2bw", "--scheduler-arg", "mini_batches=2", "--replicas", "2",
             "--costs", "analytic", "--steps", "4"]
    code, found, errors = command(4, *flags)
    assert code == 0, errors
    assert found["staleness"]["most_of_stages"] == [1, 1]
    assert run_json(capsys, "train", *flags, "--ranks", "2")[1]["params_sha256"] == found["params_sha256"]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "late"), [
    ("pipedream", [3, 2, 1, 0]), ("pipedream, averaged", [3, 2, 1, 0]), ("pipedream_2bw", [1, 1, 1, 1]),
    ("pipedream_2bw, whole", [1, 1, 1, 1]), ("paci", [2, 1, 1, 0]), ("paci, whole", [1, 1, 1, 0]),
    ("layerpipe2", [6, 4, 2, 0]), ("layerpipe2, averaged", [6, 4, 2, 0])])
def test_the_log_says_what_was_published(name, late):
    _, _, log, plan = run(name, 4)
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


def planned(name, ranks, **options):
    policy, told = POLICIES[name]
    return ml.plan(recorded(update_every(name), **options)[1], policy, COST, ml.Machine(ranks), **told)


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
    exact = run(name, ranks)[2]
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
    random, of = np.random.default_rng(0), builtin.digits("train", None)
    x, labels = of.x.reshape(len(of.x), 64) / 16, of.y
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


def test_adl_with_one_micro_batch_has_the_bits_of_layerpipe2(monkeypatch):
    monkeypatch.setitem(POLICIES, "one", ("adl", {"mini_batches": MICRO_BATCHES}))
    assert run("one", 3)[:3] == run("layerpipe2", 3)[:3]


@pytest.mark.few(3)
@pytest.mark.parametrize("decay", ["age", "window"])
def test_an_average_of_one_update_has_the_bits_of_the_old_weights(decay, monkeypatch):
    monkeypatch.setitem(POLICIES, "one", ("pipedream", {"history": "average", "decay": decay}))
    assert run("one", 2)[:2] == run("pipedream", 2)[:2]


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
        found = drift(run(name, 4)[2])
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


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "replicas"), [*((name, 1) for name in POLICIES), ("pipedream", 2), ("layerpipe", 2)])
def test_a_saved_plan_of_a_network_is_checked_and_priced(name, replicas, tmp_path, capsys):
    """Also an edited one, whose culprit is a version that is not there."""
    from minidl.cli import main

    policy, told = POLICIES[name]
    flags = ["--model", "mlp", "--model-arg", "layers=4", "--ranks", "3", "--micro-batches", "8", "--scheduler", policy,
             *(f for k, v in told.items() for f in ("--scheduler-arg", f"{k}={v}"))]
    flags += ["--replicas", str(replicas)] if replicas > 1 else []
    path = tmp_path / "plan.csv"
    costs = ["--costs", "analytic", "--json"]
    assert main(["plan", *flags, *costs, "--save", str(path)]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["check", str(path), *flags, *costs]) == 0
    checked = json.loads(capsys.readouterr().out)
    for key in ("tasks", "waits", "peak_bytes", "predicted_step_ms"):
        assert checked[key] == planned[key], key
    assert main(["check", str(path), *flags]) == 0
    lines = path.read_text().splitlines(True)
    path.write_text("".join(line for line in lines if "0F3" not in line) + "0,main,0F3\n")
    assert main(["check", str(path), *flags]) == 1
    assert "0F3" in capsys.readouterr().out


def drawn_versions(seed, history="exact"):
    """A policy that takes any older version for each stage and micro-batch, in the order of 1F1B."""
    def older(problem):
        schedule = one_f_one_b(problem)
        own = unpack(schedule.keys)
        newest = own.micro_batch - (problem.stages - own.unit) + 1
        back = np.random.default_rng(seed).integers(0, 4, (problem.stages, MICRO_BATCHES))
        return Ordered(schedule, versions=pipeline.Versions(
            np.maximum(0, newest - back[own.unit, own.micro_batch % MICRO_BATCHES]), history=history))

    return pipeline.Policy(older, "contiguous", stale=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
def test_any_older_versions_run_and_replay(seed, monkeypatch):
    ranks, policy = 2 + seed % 3, drawn_versions(seed)
    monkeypatch.setitem(POLICIES, "drawn", (policy, {}))
    monkeypatch.setattr(sys.modules[__name__], "update_every", lambda name: 1)
    losses, parameters, log, plan = run("drawn", ranks)
    version = dict(zip(as_recorded(plan.schedule.keys).tolist(), plan.versions.read.tolist(), strict=True))
    assert all(e.version == max(0, e.step * MICRO_BATCHES + version[e.key])
               for e in log if unpack(e.key).kind != Kind.U)
    assert (losses, parameters) == replayed("drawn", ranks, log)


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


@pytest.mark.slow
def test_a_replay_of_another_log_leaves_other_bits():
    losses, parameters, log, _ = run("pipedream", 3)
    first = next(e for e in log if e.step == 1 and unpack(e.key).kind == Kind.F and e.version % MICRO_BATCHES > 2)
    other = [replace(e, version=e.version - 1) if e == first else e for e in log]
    assert replayed("pipedream", 3, other) != (losses, parameters)


def test_one_rank_is_synchronous():
    model, graph = recorded(1)
    alone = SequentialExecutor(graph)
    losses = [float(alone(*parts)) for parts in batches()]
    assert run("pipedream", 1)[:2] == (losses, [p.numpy().tobytes() for p in model.parameters()])


def test_a_network_is_planned_with_the_updates_of_the_policy(capsys):
    from minidl.cli import main

    flags = ["--model", "mlp", "--model-arg", "layers=4", "--ranks", "2", "--micro-batches", "4", "--costs",
             "analytic", "--json"]
    assert main(["plan", *flags, "--scheduler", "pipedream"]) == 0
    stale = json.loads(capsys.readouterr().out)["tasks"]
    assert main(["plan", *flags, "--scheduler", "one_f_one_b"]) == 0
    assert stale == json.loads(capsys.readouterr().out)["tasks"] + 2 * 3, "an update for each micro-batch"


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
        network = functools.partial(models.mlp, 12, *[16] * 11, 5)
        network.__name__ = "deep"
        with pytest.raises(PipelineError, match="take more micro-batches"):
            ml.plan(recorded(1, network=network)[1], name, COST, ml.Machine(ranks), **told)

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
    _, graph = recorded(2)
    with pytest.raises(PipelineError, match="pipedream: it updates after every 1 of 8 micro-batches, but this step was "
                                            "recorded with other updates"):
        ml.plan(graph, "pipedream", COST, ml.Machine(2))
    with pytest.raises(PipelineError, match="history is 'none'; it must be 'exact' or 'average' or 'predicted'"):
        pipelines.plan("layerpipe2", 3, 4, history="none")
    with pytest.raises(PipelineError, match="decay is 'short'; it must be 'age' or 'window' or 'pipemare'"):
        pipelines.plan("layerpipe2", 3, 4, history="average", decay="short")
    with pytest.raises(PipelineError, match="decay has no effect if old weights are kept; give history=average too"):
        pipelines.plan("pipedream", 3, 4, decay="age")
    for wrong in (0, 3, "two"):
        with pytest.raises(PipelineError, match=rf"paci updates .*mini_batches={wrong}\) must divide .*-batches 8\)"):
            pipelines.policy("paci").update_every(8, wrong)
    with pytest.raises(PipelineError, match="are on different ranks and both need .*, which outlives a step"):
        ml.plan(recorded(1, network=Mixed)[1], "layerpipe", COST, ml.Machine(3))
    with pytest.raises(PipelineError, match="the output gradient of stage 1 cannot be cut between two layers"):
        ml.plan(recorded(1, network=heavy)[1], "layerpipe", COST, ml.Machine(3), method="inter")


# ---------------------------------------------------------------------------------------------------------- the command
FLAGS = ["--model", "mlp", "--model-arg", "layers=4", "--lr", "0.01", "--parallel", "pipeline", "--micro-batches", "8"]


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")
def test_training_on_stale_weights_learns_and_says_how_stale(tmp_path):
    code, found, errors = command(2, *FLAGS, "--scheduler", "pipedream", "--epochs", "3", "--log-versions",
                                  str(tmp_path / "log.jsonl"))
    assert code == 0, errors
    assert found["staleness"] == {"mean": 0.4972, "most": 1, "most_of_stages": [1, 0], "drift": 0}
    assert found["steps"] == 68, "and a run settles once in an epoch: 541 of 544 micro-batches are late on rank 0"
    assert found["accuracy"] > 0.8
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {"step": 1, "task": "0F1", "version": 0} in lines
    assert {"step": 2, "task": "1F7", "version": 15} in lines
    assert max(line["step"] for line in lines) == found["steps"]


OWN = """
import numpy as np
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline.flush import one_f_one_b
from minidl.schedulers.pipeline.layerpipe import layerpipe
from minidl.schedulers.ordered import Ordered
from minidl.core.tasks import unpack


def weights_of_one_update_ago(problem):
    \"\"\"Weights of one more update ago than need be.\"\"\"
    schedule = one_f_one_b(problem)
    read = np.maximum(0, unpack(schedule.keys).micro_batch // 2 - problem.stages)
    return Ordered(schedule, versions=pipeline.Versions(read, 2))


older = pipeline.Policy(weights_of_one_update_ago, "contiguous", stale=True)
newest = pipeline.Policy(one_f_one_b, "contiguous")
"""


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")
def test_a_stale_scheduler_of_ones_own_has_a_log(tmp_path):
    file, log = tmp_path / "own.py", tmp_path / "log.jsonl"
    file.write_text(OWN)
    flags = [*FLAGS, "--scheduler", f"{file}:older", "--log-versions", str(log), "--steps", "2"]
    code, found, errors = command(2, *flags, "--update-every", "2")
    assert code == 0, errors
    assert found["staleness"] == {"mean": 1.625, "most": 2, "most_of_stages": [2, 2], "drift": 0}
    assert '{"step": 2, "task": "0F7", "version": 5}' in log.read_text().splitlines()
    for wrong, says in ((flags, "with other updates; record it so (a scheduler of your own needs --update-every 2)"),
                        ([*FLAGS, "--scheduler", f"{file}:newest", "--log-versions", str(log), "--steps", "2"],
                         "own.py:newest trains on the newest weights"),
                        ([*FLAGS, "--scheduler", "paci", "--update-every", "2"],
                         "--update-every has no effect here; it goes with a scheduler of your own")):
        code, _, errors = command(2, *wrong)
        assert code == 2
        assert len(errors.splitlines()) == 1
        assert says in errors


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")
@pytest.mark.parametrize(("scheduler", "told", "stale"), [
    ("paci", ["mini_batches=4"], {"mean": 0.2472, "most": 1, "most_of_stages": [1, 0], "drift": 1}),
    ("layerpipe2", ["history=average"], {"mean": 0.9917, "most": 2, "most_of_stages": [2, 0], "drift": 0})])
def test_training_without_old_weights_learns(scheduler, told, stale):
    code, found, errors = command(2, *FLAGS, "--scheduler", scheduler, "--epochs", "3",
                                  *(f for option in told for f in ("--scheduler-arg", option)))
    assert code == 0, errors
    assert found["staleness"] == stale
    assert found["accuracy"] > 0.8


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")
def test_weights_follow_to_other_ranks_over_mpi(tmp_path):
    log = tmp_path / "log.jsonl"
    code, found, errors = command(2, *FLAGS, "--model-arg", "layers=3", "--costs", "analytic", "--scheduler",
                                  "layerpipe", "--epochs", "2", "--log-versions", str(log))
    assert code == 0, errors
    assert found["accuracy"] > 0.8
    assert any("U7/1" in line for line in log.read_text().splitlines())


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")
def test_a_stale_run_goes_on_where_it_was(tmp_path):
    """A run settles at the end of an epoch, whether it saves or not."""
    flags = [*FLAGS, "--scheduler", "pipedream_2bw", "--scheduler-arg", "mini_batches=2", "--optimizer", "adam"]
    wanted = command(2, *flags, "--epochs", "2")[1]["params_sha256"]
    assert command(2, *flags, "--epochs", "1", "--checkpoint", str(tmp_path / "run"))[0] == 0
    assert command(2, *flags, "--epochs", "2", "--checkpoint", str(tmp_path / "run"),
                   "--resume")[1]["params_sha256"] == wanted


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")
@pytest.mark.parametrize(("flags", "line"), [
    (["--scheduler", "pipedream_2bw", "--scheduler-arg", "mini_batches=3"],
     "pipedream_2bw updates after each mini-batch, so the number of mini-batches"),
    (["--scheduler", "gpipe", "--log-versions", "x.jsonl"],
     "--log-versions has no effect here; it goes with a scheduler that trains on older weights")])
def test_what_cannot_be_stale_is_one_line(flags, line):
    code, record, errors = command(2, *FLAGS, "--steps", "2", *flags)
    assert (code, record, len(errors.splitlines())) == (2, None, 1)
    assert line in errors
