"""Ranks in one process: every schedule leaves the bits of one process; failures end every rank with one error."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from helpers import bits, drawn, replace_call, together
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_runs import CLASSES, STEPS, WIDTH, check, prepared

import minidl as ml
from minidl import nn, ops, schedulers
from minidl.autograd import tape
from minidl.core.schedule import Lane as ScheduleLane
from minidl.core.schedule import Schedule
from minidl.core.tasks import Kind
from minidl.passes.rewrite import gradients
from minidl.runtime.comm import SLOTS, Host, RankError
from minidl.runtime.comm.flight import Entry, Flight
from minidl.runtime.comm.loopback import LoopBack
from minidl.runtime.executors import DistributedExecutor, TaskError


def of(name, ranks=2, **more):
    """Settings of `rank_runs`: a network with dropout, whose gradients are summed in several parts."""
    options = schedulers.find(name).known(buckets=2, part_bytes=300, k=2)
    return {"scheduler": name, "ranks": 1, "replicas": ranks, "micro_batches": 1, "drop": True, "options": options,
            **more}


def nothing(t, rank, run):
    pass


def on_ranks(own, before=nothing, after=nothing, *, schedule=None, trace=False, errors=None):
    """Trains on every rank; `before(t, rank, run)` and `after(t, rank, run)` come around each step. Returns for each
    rank the bits of its parameters, and the executor, which is closed. `errors` gets each rank's error and executor."""

    def work(communicator):
        rank, (network, plan) = communicator.rank, own[communicator.rank]
        graph, planned = plan.with_messages
        run = DistributedExecutor(graph, schedule or planned, communicator, trace=trace)
        try:
            for t, parts in enumerate(network.batches()):
                before(t, rank, run)
                run(*parts)
                after(t, rank, run)
            run.settle()
        except Exception as error:
            if errors is not None:
                errors[rank] = error, run
            raise
        finally:
            run.close()
        return bits(*network.model.parameters()), run

    return together(len(own), work)


def trained(*arguments, **more):
    """The bits of the parameters on every rank; arguments as of `of`."""
    return [found for found, _ in on_ranks(prepared(of(*arguments, **more)))]


# --------------------------------------------------------------------------------------------------------------- bits
@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "more"), [
    (2, {"optimizer": "adam"}), (1, {}), (2, {"norm": True}), (3, {"clip": 0.05}), (4, {"optimizer": "adam"})], ids=str)
def test_every_schedule_gives_the_bits_of_one_process_with_the_whole_batch(ranks, more):
    for name in schedulers.names("data", exact=True):
        check(of(name, ranks, **more))


@pytest.mark.parametrize("name", ["barrier", "priority"])
def test_both_kinds_of_lanes_leave_the_same_bits_on_ranks_and_no_thread(name, both_lanes):
    before = set(threading.enumerate())
    check(of(name))
    assert set(threading.enumerate()) <= before


def test_after_any_step_settled_parameters_are_those_of_synchronous_training():
    def left(name, steps):
        """The bits after these steps, when each of them is settled, and at the end."""
        own, seen = prepared(of(name)), []

        def settle(t, rank, run):
            if t in steps:
                run.settle()
                seen.extend([bits(*own[0][0].model.parameters())] * (rank == 0))

        return seen, on_ranks(own, after=settle)[0][0]

    always, last = left("no_overlap", range(STEPS))
    assert left("reverse_first_k", (1,)) == ([always[1]], last)
    assert len(set(always)) == STEPS


def test_programs_that_take_turns_keep_their_sums_apart():
    """The sums of a step may still be in flight when another program begins its own."""
    own = {norm: prepared(of("reverse_first_k", norm=norm)) for norm in (False, True)}

    def work(communicator):
        mine = {norm: every[communicator.rank] for norm, every in own.items()}
        runs = {norm: DistributedExecutor(*plan.with_messages, communicator) for norm, (_, plan) in mine.items()}
        for parts in mine[False][0].batches():
            for run in runs.values():
                run(*parts)
        for run in runs.values():
            run.close()
        return {norm: bits(*network.model.parameters()) for norm, (network, _) in mine.items()}

    found = together(2, work)
    for norm in own:
        assert [f[norm] for f in found] == trained("reverse_first_k", norm=norm)


class _Own(LoopBack):
    own_process = True


def test_reading_a_parameter_settles_where_a_rank_has_a_process_of_its_own_and_nothing_else_does():
    (network, plan), = prepared(of("priority", 1))
    run = DistributedExecutor(*plan.with_messages, _Own.ranks(1)[0])
    x, y = network.batches()[0]
    run(ml.array(x), ml.array(y))
    network.optimizer.lr = 0.5
    assert run in tape.unsettled
    with pytest.raises(ml.ShapeError):
        run(x[:1], y)
    assert run in tape.unsettled, "an input that does not fit changes nothing"
    seen = bits(*network.model.parameters())
    assert run not in tape.unsettled
    run.close()
    assert bits(*network.model.parameters()) == seen


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["no_overlap", "reverse_first_k"])
def test_a_learning_rate_may_be_set_before_every_step(name):
    """Late updates use that of their own step."""
    def with_rates(after):
        own = prepared(of(name))

        def rate(t, rank, run):
            own[rank][0].optimizer.lr = (0.05, 0.2, 0.01)[t]

        return [found for found, _ in on_ranks(own, rate, after)]

    wanted = with_rates(lambda t, rank, run: run.settle())
    assert with_rates(nothing) == wanted
    assert wanted != trained(name)


@settings(max_examples=drawn(15))
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

    for result in together(ranks, work):
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

    together(2, work)
    assert 40 <= max(most) <= 100


def test_gather_is_in_rank_order():
    assert together(3, lambda c: (c.gather(c.rank * 2), c.gather("x"))) == [([0, 2, 4], ["x"] * 3)] * 3


# ----------------------------------------------------------------------------------------------------------- failures
class Boom(Exception):
    pass


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["no_overlap", "barrier", "reverse_first_k", "dear"])
@pytest.mark.parametrize("step", [0, 2])
def test_a_rank_that_raises_ends_the_others_with_its_rank_and_error(name, step):
    seen = {}

    def before(t, rank, run):
        if (rank, t) == (1, step):
            raise Boom("out of patience")

    with pytest.raises(Boom):
        on_ranks(prepared(of(name, 3)), before, errors=seen)
    for rank in (0, 2):
        assert isinstance(seen[rank][0], RankError)
        assert "rank 1 failed: Boom: out of patience" in str(seen[rank][0])


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [Kind.F, Kind.W, Kind.U])
def test_a_task_that_fails_is_named_with_its_rank_and_ends_the_executor(kind, both_lanes):
    own, errors = prepared(of("priority")), {}
    label = next(t.label for t in own[0][1].graph if t.kind == kind and t.launches)

    def before(t, rank, run):
        if t or rank:
            return
        for part in {id(p): p for p in (*run._body, *run._epilogue)}.values():
            names = [t.label.replace("@1", "") for t in part.part.graph]  # in a body updates stand one step late
            if label in names:
                replace_call(part.lanes, _raise, names.index(label))

    with pytest.raises(TaskError, match=rf"task \d+{kind.name}0(@1)? .*on rank 0 failed: Boom"):
        on_ranks(own, before, errors=errors)
    assert isinstance(errors[1][0], RankError)
    assert errors[1][0].rank == 0
    for error, run in errors.values():
        with pytest.raises(type(error)):
            run(np.zeros(1))


def _raise():
    raise Boom("no")


def test_a_trace_has_every_task_of_a_step_once():
    for rank, (_, run) in enumerate(on_ranks(prepared(of("reverse_first_k")), trace=True)):
        timeline = run.timeline
        assert sorted(timeline.key[timeline.tasks].tolist()) == sorted(run.schedule.keys.tolist())
        assert {lane.rank for lane in timeline.lanes} == {rank}
        assert timeline.makespan > 0
        assert run.peak_bytes == run.program.peak_bytes > 0


class Turned(nn.Module):
    """A layer whose weight is used as a view, so that its gradient is a copy that is made on the way."""

    def __init__(self, *_):
        self.weight = ml.Parameter(np.linspace(-1, 1, WIDTH * CLASSES, dtype="f").reshape(WIDTH, CLASSES))

    def forward(self, x):
        return ops.matmul(x, ops.tanh(self.weight.reshape(CLASSES, WIDTH).T))


def test_the_gradient_of_a_parameter_that_is_used_as_a_view_is_summed_too():
    assert [len(b) for b in gradients(prepared(of("fifo", network=Turned))[0][1].graph).values()] == [1]
    check(of("fifo", network=Turned))


def test_weight_gradients_on_a_second_stream_of_each_rank_leave_the_same_bits():
    own = prepared(of("priority"))
    main, comm = (own[0][1].schedule.names(i) for i in range(2))
    lanes = {ScheduleLane(0): [n for n in main if "W" not in n],
             ScheduleLane(0, "sub"): [n for n in main if "W" in n], ScheduleLane(0, "comm"): comm}
    assert {found for found, _ in on_ranks(own, schedule=Schedule.from_names(lanes))} == {*trained("priority")}
