"""Stale pipelines run: each task on the weights that the policy says, as the run's own log has it, with the bits of one
process that replays the log."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import stale_runs
from covering import covering
from helpers import bits, together
from rank_runs import STEPS, Run, batches, check
from stale_runs import (
    COST,
    IN_HALVES,
    MICRO_BATCHES,
    MIXED,
    NORMED,
    OPTIMIZERS,
    POLICIES,
    Drawn,
    bare,
    drawn_versions,
    heavy,
    ran,
    recorded,
    replayed,
    run,
    settings_of,
    update_every,
)

import minidl as ml
from minidl import models, nn, optim
from minidl.core.placement import Refused
from minidl.core.tasks import Kind, as_recorded, pack, unpack
from minidl.runtime.executors import DistributedExecutor, SequentialExecutor
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline.stale import how_kept


def stale(name, ranks=3, **options):
    return {"name": name, "ranks": ranks, **options}


#: of all these, some that have each pair of choices
CASES = covering(
    [stale(name, ranks) for name in POLICIES for ranks in (1, 2, 3, 4)]
    + [stale(name, optimizer=optimizer) for optimizer in ("adamw", "nadamw", "muon") for name in POLICIES]
    + [stale(name, optimizer="adamw", **(NORMED if name == "layerpipe" else MIXED)) for name in POLICIES]
    + [stale(name, network=bare) for name in POLICIES]
    + [stale("layerpipe", 2 + seed % 3, network=Drawn(seed)) for seed in range(6)]
    # two stages of one rank update at different times, each with powers of its own
    + [stale("layerpipe", network=network, optimizer="adamw") for network in (Drawn(11), "everywhere")]
    + [stale(name, 4, network="transposed", optimizer="adamw") for name in POLICIES]
    + [stale(name, 2, network="transposed", optimizer="adamw") for name in ("pipedream", "layerpipe")]
    + [stale(name, 1 + (i + 1) % 4, network="everywhere") for i, name in enumerate(POLICIES)]
    + [stale(name, ranks, optimizer="sgd, clipped") for name in POLICIES for ranks in (2, 4)]
    + [stale(name, ranks, optimizer="adamw, scaled") for name, ranks in [
        *((name, 2) for name in POLICIES), ("pipedream, averaged", 3), ("pipedream_2bw", 4), ("layerpipe", 4)]]
    + [stale(name, network="transposed", optimizer="adamw, clipped") for name in POLICIES]
    + [stale("layerpipe", ranks, network=heavy, optimizer=optimizer)
       for ranks in (2, 3, 4) for optimizer in ("sgd", "adamw, clipped")]
    + [stale(IN_HALVES, 2, network=heavy)]
    + [stale(IN_HALVES, network=Drawn(seed), optimizer="adamw, clipped") for seed in (4, 7)])


def label(case):
    return "-".join(str(getattr(value, "__name__", value)) for value in case.values())


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_a_run_leaves_the_bits_of_its_log_replayed(case):
    losses, parameters, log, plan = run(**case)
    assert (losses, parameters) == replayed(**case, log=log)
    assert bool(plan.placement.halves) == (case["name"] == IN_HALVES)


@pytest.mark.parametrize("name", ["pipedream", "layerpipe2", "paci"])
def test_a_stage_without_parameters_reads_no_version(name):
    plan = stale_runs.planned(name, 3, network=bare)
    graph = plan.graph
    assert {*graph.unit[graph.kind == Kind.U].tolist()} == {0, 2}


def test_halves_of_two_ranks_share_no_loss_scale():
    graph = recorded(1, "adamw, scaled", network=heavy)[1]
    with pytest.raises(Refused, match="1O0 and 1U7 are on different ranks and both need loss scale"):
        ml.plan(graph, "layerpipe", COST, ml.Machine(2), method="inter")


def test_a_loss_scale_that_cannot_be_waited_for_is_named():
    plain, scaled = (recorded(1, optimizer, network=Drawn(4))[1] for optimizer in ("adamw", "adamw, scaled"))
    ml.plan(plain, "layerpipe", COST, ml.Machine(3), method="inter")
    with pytest.raises(Refused, match="leave the loss scale out, for which backward passes wait on all stages"):
        ml.plan(scaled, "layerpipe", COST, ml.Machine(3), method="inter")


def test_an_output_gradient_in_two_halves_evens_the_ranks():
    """The upper layers' gradients on one rank, the lower ones' on the next, which then has as much to do."""
    graph = recorded(1, network=heavy)[1]
    whole, halves = (ml.plan(graph, "layerpipe", COST, ml.Machine(2), method=m) for m in ("intra", "inter"))
    assert halves.step < whole.step
    first, second = (halves.schedule.names(i) for i in (0, 1))
    assert "1O0" in first
    assert "1O0/1" in second


def test_a_rank_for_which_nothing_is_left_is_named():
    """Eight equal layers on seven ranks: one rank has two of them, so six ranks that have as much have them all."""
    model = models.mlp(*[8] * 8, 10)
    opt = optim.SGD(model.parameters(), 0.1)

    def step(x, y):
        for i in range(8):
            with ml.micro_batch(i, 2 * i):
                loss = nn.cross_entropy(model(x[2 * i : 2 * i + 2]), y[2 * i : 2 * i + 2])
                loss.backward()
                opt.step()
        return loss

    graph = ml.record(step, np.zeros((16, 8), np.float32), np.zeros(16, np.int64))
    even = ml.CostModel(kinds={"F": 1.0, "O": 1.0, "W": 1.0, "U": 0.0})
    with pytest.raises(pipeline.PipelineError, match="^layerpipe leaves rank 6 without a task; take fewer ranks$"):
        ml.plan(graph, "layerpipe", even, ml.Machine(7))


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "ranks", "options"), [
    ("pipedream", 2, {}), ("pipedream_2bw", 2, {}), ("paci", 2, {}), ("layerpipe2", 2, {}),
    ("pipedream, averaged", 3, {}), ("layerpipe", 3, {}), ("pipedream", 2, {"network": "transposed"}),
    ("paci, whole", 3, {"network": "everywhere"}), ("pipedream", 3, {"optimizer": "adamw, clipped"}),
    ("pipedream_2bw, whole", 2, {"optimizer": "adamw, scaled"}), ("layerpipe", 3, {"optimizer": "adamw, clipped"})])
def test_replicas_make_the_same_versions(name, ranks, options):
    """Each replica reads the versions that the log of one says, and all leave the bits of that log, replayed with the
    mean of their gradients before each update."""
    check(settings_of(name, ranks, **{"optimizer": "adamw", "replicas": 2, **options}))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [  # PACI and predictions read the newest ones
    name for name in POLICIES if "paci" not in name and "predicted" not in name])
def test_if_updates_wait_for_a_norm_a_micro_batch_reads_one_version_on_all_stages(name):
    """So its norm is that of a gradient at one point; and no micro-batch reads a newer version than without."""
    _, parameters, log, plan = run(name, 4, optimizer="sgd, clipped")
    assert parameters != ran(name, 4)[1]
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
@pytest.mark.parametrize(("name", "ranks"), [
    ("paci", 3), *((name, 2) for name in ("pipedream", "pipedream_2bw", "layerpipe", "layerpipe2, averaged", "adl",
                                          "pipedream, predicted"))])
def test_a_mini_batch_whose_gradients_are_not_finite_changes_no_weights_on_any_stage(name, ranks):
    with np.errstate(invalid="ignore"):
        found = check(settings_of(name, ranks, optimizer="adamw, scaled", bad=(1,)))
    assert [bool(np.isnan(np.frombuffer(loss, np.float32))) for loss in found.losses[0]] == [False, True, False]
    assert all(np.isfinite(np.frombuffer(bits, np.float32)).all() for name, bits in found.tensors.items()
               if name not in ("good_steps", "powers"))


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
                losses[key].append(runs[key](*batches(0, MICRO_BATCHES)[len(losses[key]) % STEPS]))
                communicator.gather(None)
            for own_run in runs.values():
                own_run.close()
            return losses, {key: bits(*(p for p in model.parameters()
                                        if id(p.storage) in {id(s.live) for s in runs[key].program.graph.storages}))
                            for key, (model, _) in own[communicator.rank].items()}

        return together(ranks, work)

    keys = [(name, i) for i, name in enumerate(names)]
    mixed = trained(names, [keys[i] for i in np.random.default_rng(1).permutation(len(keys) * 6) % len(keys)])
    for key in keys:
        padded = (*("gpipe",) * key[1], key[0])  # numbered alike, so that its model is the same
        for both, alone in zip(mixed, trained(padded, [key] * 6), strict=True):
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
        for parts in batches(0, MICRO_BATCHES):
            loss = run(*parts)
            if trace:
                timeline = run.timeline_of_all()
                assert communicator.rank or (timeline.end >= timeline.start).all()
                assert communicator.rank or {lane.rank for lane in timeline.lanes} == {0, 1, 2}
            every.append(communicator.gather(None if loss is None else float(loss)))
        run.settle()
        run.close()
        return [np.float32(next(loss for loss in losses if loss is not None)).tobytes() for losses in every]

    assert together(3, work)[0] == run(name, 3)[0]


def test_adl_with_one_micro_batch_has_the_bits_of_layerpipe2(monkeypatch):
    monkeypatch.setitem(POLICIES, "one", ("adl", {"mini_batches": MICRO_BATCHES}))
    assert run("one", 3)[:3] == ran("layerpipe2", 3)[:3]


def check_older_versions(seed, monkeypatch):
    ranks, policy = 2 + seed % 3, drawn_versions(seed)
    monkeypatch.setitem(POLICIES, "drawn", (policy, {}))
    monkeypatch.setattr(stale_runs, "update_every", lambda name: 1)
    losses, parameters, log, plan = run("drawn", ranks)
    version = dict(zip(as_recorded(plan.schedule.keys).tolist(), plan.versions.read.tolist(), strict=True))
    assert all(e.version == max(0, e.step * MICRO_BATCHES + version[e.key])
               for e in log if unpack(e.key).kind != Kind.U)
    assert (losses, parameters) == replayed("drawn", ranks, log)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(4))
def test_any_older_versions_run_and_replay(seed, monkeypatch):
    check_older_versions(seed, monkeypatch)


@pytest.mark.campaign
def test_many_older_versions_run_and_replay(monkeypatch):
    for seed in range(4, 204):
        check_older_versions(seed, monkeypatch)


@pytest.mark.slow
def test_a_replay_of_another_log_leaves_other_bits():
    losses, parameters, log, _ = run("pipedream", 3)
    first = next(e for e in log if e.step == 1 and unpack(e.key).kind == Kind.F and e.version % MICRO_BATCHES > 2)
    other = [replace(e, version=e.version - 1) if e == first else e for e in log]
    assert replayed("pipedream", 3, other) != (losses, parameters)


PREDICTED = ["pipedream", *(name for name in POLICIES if "predicted" in name)]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "optimizer"), [*zip(itertools.cycle(PREDICTED), [
    name for name in OPTIMIZERS if "scaled" not in name], strict=False)])  # a scale needs two ranks
def test_one_rank_is_synchronous(name, optimizer):
    """On one rank no weights are late, so no share and no average predicts anything."""
    one = Run(settings_of(name, 1, optimizer=optimizer))
    alone = SequentialExecutor(one.recorded())
    losses = [np.asarray(alone(*parts)).tobytes() for parts in one.batches()]
    assert run(name, 1, optimizer=optimizer)[:2] == (losses, one.tensors())


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["pipedream", "layerpipe2"])
def test_a_share_of_a_prediction_is_from_none_to_four_times(policy):
    for p in (0, 0.5, 1, 4):
        assert how_kept("predicted", None, p)["p"] == p
        graph = recorded(1)[1]
        assert ml.plan(graph, policy, COST, ml.Machine(3), history="predicted", p=p).versions.p == p
    for p in (-1e-9, 4.001, float("nan"), float("inf")):
        with pytest.raises(pipeline.PipelineError, match=f"^p is {p:g}; it must be from 0 to 4"):
            ml.plan(recorded(1)[1], policy, COST, ml.Machine(3), history="predicted", p=p)
    for history in ("exact", "average"):
        with pytest.raises(pipeline.PipelineError, match=r"^p is 0\.5; it must .* goes with history=predicted$"):
            ml.plan(recorded(1)[1], policy, COST, ml.Machine(3), history=history, p=0.5)


def test_a_share_of_none_predicts_nothing_and_another_share_moves_weights(monkeypatch):
    found = []
    for p, decay in ((0, "last"), (0, "age"), (1, "last"), (4, "last")):
        monkeypatch.setitem(POLICIES, "share", ("layerpipe2", {"history": "predicted", "p": p, "decay": decay}))
        found.append(run("share", 3, optimizer="muon")[0])
    assert found[0] == found[1]
    assert len({tuple(losses) for losses in found}) == 3
