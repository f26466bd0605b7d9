"""Ranks in one process: every schedule gives the same bits on every rank, those of one process with a larger batch;
failures end every rank with one error; reading parameters shows what synchronous training leaves."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from helpers import bits, deadline, drawn, replace_call, replicas
from hypothesis import given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl import models, nn, ops, optim
from minidl.autograd import tape
from minidl.core.schedule import Lane as ScheduleLane
from minidl.core.schedule import Schedule, ScheduleError
from minidl.core.tasks import Kind
from minidl.passes.rewrite import gradients
from minidl.runtime.comm import SLOTS, Communicator, Host, RankError
from minidl.runtime.comm.flight import Entry, Flight
from minidl.runtime.comm.loopback import LoopBack, run_ranks
from minidl.runtime.executors import DistributedExecutor, SequentialExecutor, TaskError
from minidl.schedulers import names

SHARE, STEPS = 6, 4
OPTIMIZERS = {"sgd": lambda p: optim.SGD(p, 0.05, momentum=0.9), "adam": lambda p: optim.Adam(p, 0.01),
              "clipped": lambda p: optim.SGD(p, 0.05, max_norm=0.5),
              "normalised": lambda p: optim.SGD(p, 0.05)}


def batches(ranks, seed=3):
    random = np.random.default_rng(seed)
    return random.normal(size=(STEPS, ranks, SHARE, 12)).astype("f"), random.integers(0, 5, (STEPS, ranks, SHARE))


class Normalised(nn.Module):
    """A convolution with batch norm over each share of a batch."""

    def __init__(self):
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(nn.relu(self.norm(self.conv(x.reshape(-1, 2, 2, 3)))).flatten(1))


def network(optimizer="sgd"):
    ml.seed(1)
    model = Normalised() if optimizer == "normalised" else models.mlp(12, 16, 16, 16, 5)
    return model, OPTIMIZERS[optimizer](model.parameters())


def prepared(name, ranks, optimizer="sgd", k=None, optimizers=None):
    """For each rank its model and its plan, made one after the other as processes would; fills the
    list of optimizers."""
    found = []
    for rank in range(ranks):
        model, opt = network(optimizer)

        def step(x, y, model=model, opt=opt, rank=rank):
            with ml.micro_batch(0, rank * SHARE):
                loss = nn.cross_entropy(model(nn.dropout(x, 0.2)), y)
                loss.backward()
            opt.step()
            return loss

        x, y = batches(ranks)
        found.append((model, replicas(ml.record(step, x[0, 0], y[0, 0]), name, None, lambda sizes: 1
                                      + sum(sizes.values()) / 100, ranks, buckets=2, part_bytes=300, k=k)))
        if optimizers is not None:
            optimizers.append(opt)
    return found


def trained(name, ranks, optimizer="sgd", k=None):
    """Losses and parameters of every rank."""
    own = prepared(name, ranks, optimizer, k)
    x, y = batches(ranks)

    def work(communicator):
        model, found = own[communicator.rank]
        run = DistributedExecutor(found.graph, found.schedule, communicator)
        losses = [float(run(x[t, communicator.rank], y[t, communicator.rank])) for t in range(STEPS)]
        run.close()
        return losses, bits(*model.parameters())

    with deadline():
        return run_ranks(ranks, work)


def alone(ranks, optimizer="sgd"):
    """The parameters that one process leaves which takes the ranks' shares as micro-batches."""
    model, opt = network(optimizer)

    def step(*parts):
        total = None
        for r in range(ranks):
            with ml.micro_batch(r, r * SHARE):
                loss = nn.cross_entropy(model(nn.dropout(parts[2 * r], 0.2)), parts[2 * r + 1]) * (1 / ranks)
                loss.backward()
            total = loss
        opt.step()
        return total

    x, y = batches(ranks)
    shares = [[part for r in range(ranks) for part in (x[t, r], y[t, r])] for t in range(STEPS)]
    run = SequentialExecutor(ml.record(step, *shares[0]))
    for share in shares:
        run(*share)
    return model


# --------------------------------------------------------------------------------------------------------------- bits
@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_schedule_gives_the_bits_of_one_process_with_the_whole_batch(ranks, optimizer):
    wanted = bits(*alone(ranks, optimizer).parameters())
    for name in names("data", exact=True):
        results = trained(name, ranks, optimizer, 2 if name == "reverse_first_k" else None)
        assert {parameters for _, parameters in results} == {wanted}, name


@pytest.mark.parametrize("name", ["barrier", "priority"])
def test_both_kinds_of_lanes_leave_the_same_bits_on_ranks(name, both_lanes):
    wanted = bits(*alone(2, "sgd").parameters())
    assert {parameters for _, parameters in trained(name, 2, "sgd", None)} == {wanted}


def test_three_ranks_equal_one_process_to_rounding():
    model, own = alone(3), prepared("priority", 3)
    x, y = batches(3)

    def work(communicator):
        net, found = own[communicator.rank]
        run = DistributedExecutor(found.graph, found.schedule, communicator)
        for t in range(STEPS):
            run(x[t, communicator.rank], y[t, communicator.rank])
        run.close()
        return [p.numpy().copy() for p in net.parameters()]

    for mine, whole in zip(run_ranks(3, work)[0], model.parameters(), strict=True):
        np.testing.assert_allclose(mine, whole.numpy(), rtol=2e-5, atol=1e-6)


def test_after_any_step_settled_parameters_are_those_of_synchronous_training():
    own, oracle = prepared("reverse_first_k", 2, k=3), prepared("no_overlap", 2)
    x, y = batches(2)

    def work(plans, settle):
        def on_rank(communicator):
            model, found = plans[communicator.rank]
            run = DistributedExecutor(found.graph, found.schedule, communicator)
            seen = []
            for t in range(STEPS):
                run(x[t, communicator.rank], y[t, communicator.rank])
                if t in settle:
                    run.settle()
                    seen.append(bits(*model.parameters()))
            run.close()
            return seen, bits(*model.parameters())

        return on_rank

    always = run_ranks(2, work(oracle, range(STEPS)))[0]
    some = run_ranks(2, work(own, (1,)))[0]
    assert some[0] == [always[0][1]]
    assert some[1] == always[1]
    assert len(set(always[0])) == STEPS


def test_programs_that_take_turns_keep_their_sums_apart():
    """The sums of a step may still be in flight when another program begins its own."""
    own = {optimizer: prepared("reverse_first_k", 2, optimizer, k=2) for optimizer in ("sgd", "normalised")}
    x, y = batches(2)

    def work(communicator):
        rank = communicator.rank
        runs = {name: DistributedExecutor(plans[rank][1].graph, plans[rank][1].schedule, communicator)
                for name, plans in own.items()}
        for t in range(STEPS):
            for run in runs.values():
                run(x[t, rank], y[t, rank])
        for run in runs.values():
            run.close()
        return {name: bits(*plans[rank][0].parameters()) for name, plans in own.items()}

    with deadline():
        found = run_ranks(2, work)
    for name in own:
        assert [f[name] for f in found] == [parameters for _, parameters in trained("reverse_first_k", 2, name, 2)]


def test_reading_a_parameter_settles_where_a_rank_has_a_process_of_its_own():
    (model, found), = prepared("priority", 1)
    run = DistributedExecutor(found.graph, found.schedule, _Own.ranks(1)[0])
    x, y = batches(1)
    run(ml.array(x[0, 0]), ml.array(y[0, 0]))
    assert run in tape.unsettled
    with pytest.raises(ml.ShapeError):
        run(x[0, 0, :1], y[0, 0])
    assert run in tape.unsettled, "an input that does not fit changes nothing"
    seen = bits(*model.parameters())
    assert run not in tape.unsettled
    run.close()
    assert bits(*model.parameters()) == seen


class _Own(LoopBack):
    own_process = True


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["no_overlap", "reverse_first_k"])
def test_a_learning_rate_may_be_set_before_every_step(name):
    """Late updates use that of their own step, and setting it settles nothing."""
    rates = [0.05, 0.02, 0.2, 0.01]
    x, y = batches(2)

    def with_rates(settles):
        optimizers = []
        own = prepared(name, 2, optimizers=optimizers)

        def work(communicator):
            rank = communicator.rank
            model, found = own[rank]
            run = DistributedExecutor(found.graph, found.schedule, communicator)
            for t in range(STEPS):
                optimizers[rank].lr = rates[t]
                run(x[t, rank], y[t, rank])
                if settles:
                    run.settle()
            run.close()
            return bits(*model.parameters())

        return run_ranks(2, work)

    wanted = with_rates(True)
    assert with_rates(False) == wanted
    assert wanted[0] != trained(name, 2)[0][1]


def test_setting_a_learning_rate_settles_nothing():
    model, opt = network()

    def step(x, y):
        loss = nn.cross_entropy(model(x), y)
        loss.backward()
        opt.step()

    x, y = batches(1)
    plan = replicas(ml.record(step, x[0, 0], y[0, 0]), "priority")
    run = DistributedExecutor(plan.graph, plan.schedule, _Own.ranks(1)[0])
    run(x[0, 0], y[0, 0])
    opt.lr = 0.5
    assert run in tape.unsettled
    run.close()


@settings(max_examples=drawn(15), deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4), ranks=st.integers(1, 5),
       credit=st.sampled_from([1, 100, 10**6]), scatter=st.booleans())
def test_a_sum_is_taken_in_rank_order_however_it_is_cut(sizes, ranks, credit, scatter):
    values = np.random.default_rng(sum(sizes)).normal(size=(ranks, sum(sizes))).astype("f") * 1e3
    wanted = values[0].copy()
    for row in values[1:]:
        wanted += row
    wanted = wanted * np.float32(1 / ranks)
    ends = np.cumsum([0, *sizes])

    def work(communicator):
        mine = values[communicator.rank].copy()
        windows = [mine[i:j] for i, j in zip(ends[:-1], ends[1:], strict=True)]
        groups = [windows[:2], *([w] for w in windows[2:])]
        flight, ended = Flight(communicator, credit), []
        places = [Host(communicator, group) for group in groups]
        for kind in (Kind.AS, Kind.AG) if scatter else (Kind.A,):
            for i, place in enumerate(places):
                transfer = communicator.bind(kind, place, i % SLOTS)
                flight.submit(Entry(i, transfer, i % SLOTS, place.whole.nbytes, done=[lambda i=i: ended.append(i)]))
            flight.drain()
        assert sorted(set(ended)) == list(range(len(groups)))
        return mine

    with deadline():
        for result in run_ranks(ranks, work):
            np.testing.assert_array_equal(result, wanted)


def test_a_credit_bounds_what_is_in_flight():
    most = []

    class Counting(Flight):
        def _advance(self):
            most.append(sum(entry.nbytes for _, entry in self._flight.values()))
            return super()._advance()

    def work(communicator):
        flight = Counting(communicator, 100)
        arrays = [np.ones(10, "f") for _ in range(12)]
        for i, array in enumerate(arrays):
            flight.submit(Entry(i, communicator.bind(Kind.A, Host(communicator, [array]), i % SLOTS), i % SLOTS, 40))
        flight.drain()

    with deadline():
        run_ranks(2, work)
    assert 40 <= max(most) <= 100


def test_gather_is_in_rank_order():
    assert run_ranks(3, lambda c: (c.gather(c.rank * 2), c.gather("x"))) == [([0, 2, 4], ["x"] * 3)] * 3


# ----------------------------------------------------------------------------------------------------------- failures
class Boom(Exception):
    pass


@pytest.mark.parametrize("name", ["no_overlap", "barrier", "reverse_first_k", "dear"])
@pytest.mark.parametrize("step", [0, 2])
def test_a_rank_that_raises_ends_the_others_with_its_rank_and_error(name, step):
    own = prepared(name, 3)
    x, y = batches(3)
    seen = {}

    def work(communicator):
        _, found = own[communicator.rank]
        run = DistributedExecutor(found.graph, found.schedule, communicator)
        try:
            for t in range(STEPS):
                if communicator.rank == 1 and t == step:
                    raise Boom("out of patience")
                run(x[t, communicator.rank], y[t, communicator.rank])
            run.settle()
        except Exception as error:
            seen[communicator.rank] = error
            with pytest.raises(type(error)):
                raise error
            raise
        finally:
            run.close()

    with deadline(), pytest.raises(Boom):
        run_ranks(3, work)
    for rank in (0, 2):
        assert isinstance(seen[rank], RankError)
        assert "rank 1 failed: Boom: out of patience" in str(seen[rank])


@pytest.mark.parametrize("kind", [Kind.F, Kind.W, Kind.U])
def test_a_task_that_fails_is_named_with_its_rank_and_ends_the_executor(kind, both_lanes):
    own = prepared("priority", 2)
    x, y = batches(2)
    errors = {}

    def work(communicator):
        _, found = own[communicator.rank]
        run = DistributedExecutor(found.graph, found.schedule, communicator)
        if communicator.rank == 0:
            task = next(t for t in found.graph if t.kind == kind and t.launches)
            # in a body updates stand one step late
            for part in {id(p): p for p in (*run._body, *run._epilogue)}.values():
                names = [t.label for t in part.part.graph]
                if task.label not in [n.replace("@1", "") for n in names]:
                    continue
                here = [n.replace("@1", "") for n in names].index(task.label)
                replace_call(part.lanes, _raise, here)
        try:
            for t in range(STEPS):
                run(x[t, communicator.rank], y[t, communicator.rank])
            run.settle()
        except Exception as error:
            errors[communicator.rank] = error
            with pytest.raises(type(error)):
                run(x[0, communicator.rank], y[0, communicator.rank])
            raise
        finally:
            run.close()

    with deadline(), pytest.raises(TaskError, match=rf"task \d+{kind.name}0(@1)? .*on rank 0 failed: Boom"):
        run_ranks(2, work)
    assert isinstance(errors[1], RankError)
    assert errors[1].rank == 0


def _raise():
    raise Boom("no")


def test_threads_end_when_executors_close(both_lanes):
    before = set(threading.enumerate())
    trained("priority", 2)
    assert set(threading.enumerate()) <= before


def test_a_trace_has_every_task_of_a_step_once():
    own = prepared("reverse_first_k", 2, k=2)
    x, y = batches(2)

    def work(communicator):
        _, found = own[communicator.rank]
        run = DistributedExecutor(found.graph, found.schedule, communicator, trace=True)
        for t in range(STEPS):
            run(x[t, communicator.rank], y[t, communicator.rank])
        run.close()
        return run

    for rank, run in enumerate(run_ranks(2, work)):
        timeline = run.timeline
        assert sorted(timeline.key[timeline.tasks].tolist()) == sorted(run.schedule.keys.tolist())
        assert {lane.rank for lane in timeline.lanes} == {rank}
        assert timeline.makespan > 0
        assert run.peak_bytes == run.program.peak_bytes > 0


def test_what_is_no_data_parallel_schedule_is_refused():
    (_, found), = prepared("priority", 1)
    graph, communicator = found.graph, LoopBack.ranks(1)[0]
    names = {lane: found.schedule.names(i) for i, lane in enumerate(found.schedule.lanes)}
    with pytest.raises(ScheduleError, match="2 ranks; one device can run only one"):
        DistributedExecutor(graph, Schedule.from_names({ScheduleLane(0, "main"): names[ScheduleLane(0)],
                                                        ScheduleLane(1, "comm"): []}), communicator)
    with pytest.raises(ScheduleError, match="missing"):
        DistributedExecutor(graph,
                            Schedule.from_names({**names, ScheduleLane(0): names[ScheduleLane(0)][:-1]}), communicator)


def test_the_gradient_of_a_parameter_that_is_used_as_a_view_is_summed_too():
    """It is a copy that is made on the way."""
    x = np.random.default_rng(1).normal(size=(3, 2, 4, 3)).astype("f")

    def made():
        w = ml.Parameter(np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3))
        opt = optim.SGD([w], 0.1)

        def step(*parts):
            for r, part in enumerate(parts):
                with ml.micro_batch(r):
                    loss = (ops.tanh(w.reshape(3, 4).T) * part).sum() * (1 / len(parts))
                    loss.backward()
            opt.step()

        return w, step

    w, step = made()
    for both in x:
        step(*map(ml.array, both))
    own = []
    for r in range(2):
        v, step = made()
        plan = replicas(ml.record(lambda part, step=step: step(part), x[0, r]), "fifo", None, lambda sizes: 1.0)
        assert [len(b) for b in gradients(plan.graph).values()] == [1]
        own.append((v, plan))

    def work(communicator):
        v, found = own[communicator.rank]
        run = DistributedExecutor(found.graph, found.schedule, communicator)
        for both in x:
            run(both[communicator.rank])
        run.close()
        return bits(v)

    with deadline():
        assert run_ranks(2, work) == [bits(w)] * 2


def test_weight_gradients_on_a_second_stream_of_each_rank_leave_the_same_bits():
    own, x, y = prepared("priority", 2), *batches(2)

    def work(communicator):
        model, found = own[communicator.rank]
        main, comm = (found.schedule.names(i) for i in range(2))
        lanes = {ScheduleLane(0): [n for n in main if "W" not in n],
                 ScheduleLane(0, "sub"): [n for n in main if "W" in n], ScheduleLane(0, "comm"): comm}
        run = DistributedExecutor(found.graph, Schedule.from_names(lanes), communicator)
        for t in range(STEPS):
            run(x[t, communicator.rank], y[t, communicator.rank])
        run.close()
        return bits(*model.parameters())

    with deadline():
        assert set(run_ranks(2, work)) == {trained("priority", 2)[0][1]}


def test_the_interface_says_what_a_transport_must_give():
    bare = Communicator()
    for call in (bare.check, lambda: bare.fail(ValueError()), lambda: bare._exchange(0, 0, [], 0),
                 lambda: bare._share(0)):
        with pytest.raises(NotImplementedError):
            call()
