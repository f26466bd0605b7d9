"""One step gives the same bits however it is run."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import SMALL, Case, bits, cases, deadline, drawn, recorded
from hypothesis import given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl import nn, ops, optim, schedulers
from minidl.core.tasks import Kind
from minidl.runtime.checking import random_schedule
from minidl.runtime.executors import CheckingExecutor, SequentialExecutor, StreamExecutor


@settings(max_examples=drawn(40))
@given(case=cases(), lanes=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_a_random_network_trains_alike_eagerly_recorded_streamed_and_checked(case, lanes, seed):
    def arranged(graph):
        return random_schedule(graph, lanes, np.random.default_rng(seed))

    oracle = case.trained(SequentialExecutor)
    assert oracle == case.trained(None), "eager and recorded differ"
    with deadline():
        assert oracle == case.trained(lambda g: StreamExecutor(g, arranged(g)))
    assert oracle == case.trained(lambda g: CheckingExecutor(g, arranged(g), seed=seed))


ARMS = {"in_order": schedulers.in_order, "multi_stream": schedulers.multi_stream,
        "multi_stream of 3": lambda graph: schedulers.multi_stream(graph, streams=3),
        **{f"random {seed}": lambda graph, seed=seed: random_schedule(graph, 3, np.random.default_rng(seed))
           for seed in range(2)}}


@pytest.mark.few(1)
@pytest.mark.parametrize("arm", ARMS)
def test_fifty_legal_orders_of_a_schedule_give_the_oracles_bits(arm):
    case = Case(("linear", "relu", "tied", "dropout", "linear", "residual", "tied", "gain"), width=6, micro_batches=2)
    oracle, orders = case.trained(SequentialExecutor, steps=50), set()

    def checked(graph):
        run = CheckingExecutor(graph, ARMS[arm](graph))

        def step(*values):
            out = run(*values)
            orders.add(tuple(run.order))
            return out

        return step

    assert case.trained(checked, steps=50) == oracle
    assert len(orders) > 25 or arm == "in_order", "the orders are hardly random"
    with deadline():
        assert case.trained(lambda g: StreamExecutor(g, ARMS[arm](g)), steps=50) == oracle


def test_multi_stream_keeps_the_chain_on_main_and_the_rest_beside_it():
    graph = recorded()
    schedule = schedulers.multi_stream(graph)
    assert [str(lane) for lane in schedule.lanes] == ["0/main", "0/sub"]
    assert schedule.names(0) == [t.name for t in graph if t.kind in (Kind.F, Kind.O)]
    assert sorted(schedule.names(1)) == sorted(t.name for t in graph if t.kind in (Kind.W, Kind.U))
    assert schedulers.in_order(graph).ids(graph).tolist() == [t.index for t in graph]
    for streams in (1, 10**20):
        with pytest.raises(ValueError, match=f"2 to 1024 streams, not {str(streams)[:2]}"):
            schedulers.multi_stream(graph, streams=streams)
    with pytest.raises(ValueError, match=r"unknown scheduler 'multi_streem'; similar names: multi_stream"):
        ml.plan(graph, "multi_streem")


def test_dropout_of_micro_batches_is_that_of_the_whole_batch():
    x = np.ones((6, 5), np.float32)

    def whole(x):
        return ops.dropout(x, 0.5)

    def parts(a, b):
        outs = []
        for m, v in enumerate((a, b)):
            with ml.micro_batch(m, 3 * m):
                outs.append(ops.dropout(v, 0.5))
        return tuple(outs)

    ml.seed(3)
    (y,) = [SequentialExecutor(ml.record(whole, x))(x).numpy()]
    ml.seed(3)
    a, b = SequentialExecutor(ml.record(parts, x[:3], x[3:]))(x[:3], x[3:])
    assert np.array_equal(y, np.concatenate([a.numpy(), b.numpy()]))
    assert 0 < (y == 0).sum() < y.size


def test_dropouts_before_and_within_micro_batches_differ():
    def step(x):
        before = ops.dropout(x, 0.5)
        with ml.micro_batch(0):
            first = ops.dropout(x, 0.5)
        with ml.micro_batch(1):
            second = ops.dropout(x, 0.5)
        return before, first, second, ops.dropout(x, 0.5)

    x = np.ones((6, 5), np.float32)
    ml.seed(3)
    before, first, second, after = (t.numpy() for t in SequentialExecutor(ml.record(step, x))(x))
    assert np.array_equal(first, second)  # the same samples of the same batch
    assert len({y.tobytes() for y in (before, first, after)}) == 3


def test_dropout_without_an_update_is_another_each_time_and_the_one_of_eager_runs():
    x = np.ones((4, 6), np.float32)

    def predict(x):
        return ops.dropout(x, 0.5)

    def parts(x):
        total = None
        for m in range(2):
            with ml.micro_batch(m, 4 * m):
                y = ops.dropout(ops.dropout(x, 0.2), 0.5)
            total = y if total is None else total + y
        return total

    def train(x):
        loss = (ops.dropout(x, 0.3) * w).sum()
        loss.backward()
        opt.step()
        return w.grad

    steps = (predict, predict, parts, train, predict, parts, parts, train)
    runs = {}
    for kind in ("eager", "recorded", "by turns"):
        ml.seed(3)
        w = ml.Parameter(np.ones(6, np.float32))
        opt = optim.SGD([w], 0.1)
        recorded = {step: SequentialExecutor(ml.record(step, x)) for step in (predict, parts, train)}
        runs[kind] = [bits(step(ml.array(x)) if kind == "eager" or (kind == "by turns" and i % 3 == 1)
                           else recorded[step](x)) for i, step in enumerate(steps)]
    assert len(set(runs["eager"])) == len(steps)
    assert runs["recorded"] == runs["eager"]
    assert runs["by turns"] == runs["eager"]


@pytest.mark.parametrize("recorded", [False, True])
def test_the_gradient_of_a_dropout_has_its_mask_also_after_an_update(recorded):
    ml.seed(3)
    x = np.ones((4, 6), np.float32)
    v, w = ml.Parameter(np.ones(6, np.float32)), ml.Parameter(np.ones(6, np.float32))
    first, second = optim.SGD([v], 0.1), optim.SGD([w], 0.1)

    def step(x):
        y = ops.dropout(x * w, 0.5)
        ops.dropout(x * v, 0.5).sum().backward()
        first.step()
        y.sum().backward()
        second.step()
        return y, w.grad

    y, g = SequentialExecutor(ml.record(step, x))(x) if recorded else step(ml.array(x))
    np.testing.assert_array_equal(g.numpy(), y.numpy().sum(axis=0))


@pytest.mark.parametrize(("updates", "micro_batches", "twice", "some"), [
    (1, 1, False, ["1U0 (0/linear)", "3U0 (2/linear)", "7U0 (0/linear (2))", "8U0 (2/linear (2))"]),
    (1, 1, True, ["8W0 (2/linear (2))", "8O0 (2/linear (2))", "9O0 (1/tanh (2))", "10W0 (0/linear (2))"]),
    (2, 1, False, ["1U0 (0/linear)", "7U0 (0/linear (2))", "9W0 (0/linear)", "9U0 (0/linear)"]),
    (1, 2, True, ["0F0 (scale)", "1F0 (0/linear)", "10W0 (0/linear (2))", "1F1 (0/linear)", "10W1 (0/linear (2))"])])
def test_every_task_of_a_step_has_a_name_of_its_own(updates, micro_batches, twice, some):
    """Weights and biases in two optimizers, several backward passes and updates, ops beside micro-batches."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    weights, biases = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
    optimizers = optim.SGD(weights, 0.1, 0.9, weight_decay=0.1), optim.Adam(biases, 0.1)

    def step(x):
        x = x * 2.0
        for _ in range(updates):
            total = None
            for m in range(micro_batches):
                with ml.micro_batch(m):
                    loss = model(x).sum()
                    if twice:
                        (loss * loss).backward(retain_graph=True)
                    loss.backward()
                total = loss if total is None else total + loss
            for optimizer in optimizers:
                optimizer.step()
        return total * 0.5

    graph = ml.record(step, np.zeros((2, 3), np.float32))
    assert len({task.name for task in graph}) == len(graph)
    assert [label for task in graph if (label := task.label.replace("sequential/", "")) in some] == some


def test_a_step_that_leaves_a_gradient_to_its_next_run_is_refused():
    v, w = ml.Parameter(np.ones(3, np.float32)), ml.Parameter(np.ones(3, np.float32))
    first, second = optim.SGD([v], 0.1), optim.SGD([w], 0.1)

    def step(x, drop):
        (v * x).sum().backward()
        first.step()
        ops.tanh(v * w * x).sum().backward()
        second.step()
        if drop:
            v.grad = None

    x = np.ones(3, np.float32)
    with pytest.raises(RuntimeError, match=r"the step ends with a gradient of parameter \(3,\) that was computed "
                                           r"after its update.*grad = None"):
        ml.record(lambda x: step(x, False), x)
    assert v.grad is w.grad is None
    SequentialExecutor(ml.record(lambda x: step(x, True), x))(x)


@pytest.mark.parametrize("drop", ["first", "late"])
def test_a_step_that_drops_its_gradients_first_may_end_with_some_as_two_networks_against_each_other_do(drop):
    def make():
        v, w = (ml.Parameter(np.arange(1, 4, dtype=np.float32)) for _ in range(2))
        first, second = optim.SGD([v], 0.1, momentum=0.9), optim.SGD([w], 0.1)

        def step(x):
            first.zero_grad() if drop == "first" else None
            hidden = ops.tanh(w * x)
            (v * hidden.detach()).sum().backward()
            first.zero_grad() if drop == "late" else None
            (v * x).sum().backward()
            first.step()
            second.zero_grad()
            loss = (v * hidden).sum()
            loss.backward()
            second.step()
            return loss, v, w

        return step

    x, eager = np.ones(3, np.float32), make()
    if drop == "late":  # what is dropped is a gradient of the step's own: the next eager step adds to the last one
        with pytest.raises(RuntimeError, match=r"grad = None, or zero_grad\(\) before the first backward"):
            ml.record(eager, x)
        return
    run = SequentialExecutor(ml.record(make(), x))
    for _ in range(3):
        assert [t.tolist() for t in run(x)] == [t.numpy().tolist() for t in eager(ml.array(x))]


def test_a_step_may_return_nothing_an_input_or_a_view_and_what_it_returns_is_the_callers_own():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for step, expected in ((lambda x: None, None), (lambda x: x, x), (lambda x: (x + 1.0).T, (x + 1).T)):
        graph = ml.record(step, x)
        schedule = schedulers.in_order(graph)
        for run in (SequentialExecutor(graph), StreamExecutor(graph, schedule), CheckingExecutor(graph, schedule)):
            out = run(x)
            run(x + 7)
            assert (out is None) if expected is None else np.array_equal(out.numpy(), expected)


@pytest.mark.parametrize(("early", "kept"), [(2e-7, True), (1e-3, False)])
def test_a_start_that_is_read_too_early_is_not_before_what_it_waits_for(early, kept, monkeypatch):
    """A counter of ticks is not exact; a start that is far too early is not hidden."""
    (values,), graph = SMALL.batches(1), recorded()
    run = StreamExecutor(graph, random_schedule(graph, 2, np.random.default_rng(3)), trace=True)
    with deadline():
        run(*values)
    (ready,), (a, b) = run._body, run.waits[0].tolist()
    exact = ready.lanes.stamps()
    where = {task: (lane, i) for lane in range(2) for i, task in enumerate(ready.part.lane_tasks(lane))}
    found, ended = [moments.copy() for moments in exact], exact[where[b][0]][where[b][1], 2]
    found[where[a][0]][where[a][1], 1] = ended - early
    monkeypatch.setattr(ready.lanes, "stamps", lambda: found)
    timeline = ready.timeline()
    start, end = (dict(zip(timeline.key[timeline.tasks].tolist(), x[timeline.tasks].tolist(), strict=True))
                  for x in (timeline.start, timeline.end))
    assert (start[int(graph.keys[a])] >= end[int(graph.keys[b])]) == kept
    run.close()


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_traced_step_records_each_task_once_in_lane_order(lanes):
    (values,) = SMALL.batches(1)
    graph = recorded()
    schedule = random_schedule(graph, lanes, np.random.default_rng(3))
    run = StreamExecutor(graph, schedule, trace=True)
    assert run.timeline is None
    with deadline():
        for _ in range(2):
            run(*values)
            timeline = run.timeline
            assert len(timeline.tasks) == len(graph)
            assert timeline.key[timeline.tasks].tolist() == schedule.keys.tolist()
            assert (timeline.issued <= timeline.start).all()
            assert (timeline.start <= timeline.end).all()
            waits = timeline.what == ml.core.timeline.What.WAIT
            assert set(timeline.key[waits].tolist()) == {int(graph.keys[t]) for t in run.waits[:, 0]}
            start, end = (dict(zip(timeline.key[timeline.tasks].tolist(), x[timeline.tasks].tolist(), strict=True))
                          for x in (timeline.start, timeline.end))
            for a, b in run.waits.tolist():
                assert start[int(graph.keys[a])] >= end[int(graph.keys[b])]
    run.close()
