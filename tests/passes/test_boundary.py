"""Weight gradients across the border: after any step, whoever looks finds what synchronous training would have left."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from helpers import bits, drawn, late_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl import models, nn, optim, schedulers
from minidl.autograd import tape
from minidl.core.graph import Role
from minidl.core.tasks import GraphError, Kind
from minidl.devices.device import cpu
from minidl.passes.boundary import cross_boundary, must_stay
from minidl.runtime.checking import CheckingExecutor, random_schedule

SIZES, BATCH, STEPS = (12, 16, 16, 4), 8, 7
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((STEPS, BATCH, SIZES[0]), np.float32), RANDOM.integers(0, SIZES[-1], (STEPS, BATCH))


def recorded(optimizer, micro_batches=1, **options):
    ml.seed(3)
    model = models.mlp(*SIZES)
    opt = optimizer(model.parameters(), lr=0.05, **options)

    def step(x, y):
        for i in range(micro_batches):
            with ml.micro_batch(i):
                loss = nn.cross_entropy(model(nn.dropout(x, 0.2)), y)
                loss.backward()
        opt.step()
        return loss

    return model, opt, ml.record(step, X[0], Y[0])


def late_ones(graph):
    """All W and U that can be late."""
    return [t for t in np.flatnonzero(~must_stay(graph)).tolist() if graph.kind[t] in (Kind.W, Kind.U)]


def streams(graph, late, schedule=schedulers.multi_stream):
    return ml.StreamExecutor(graph, late_schedule(graph, late, schedule))


@cache
def synchronous(optimizer, **options):
    model, opt, graph = recorded(optimizer, **options)
    run, seen = ml.SequentialExecutor(graph), []
    for i in range(STEPS):
        opt.lr = 0.05 / (i + 1)
        loss = float(run(X[i], Y[i]))
        seen.append((loss, bits(*model.parameters())))
    return seen


def follows(run, model, opt, expected, looks=()):
    """Each step has the synchronous loss; after the steps of `looks` and the last one somebody looks at parameters."""
    for i, (loss, left) in enumerate(expected):
        opt.lr = 0.05 / (i + 1)
        assert float(run(X[i], Y[i])) == loss
        if i in looks or i == STEPS - 1:
            assert bits(*model.parameters()) == left
    run.close()


#: with micro-batches a gradient is written on both sides of the border
OPTIMIZERS = [(optim.SGD, {}), (optim.SGD, {"momentum": 0.9}), (optim.Adam, {}), (optim.AdamW, {"weight_decay": 0.1}),
              (optim.SGD, {"momentum": 0.9, "micro_batches": 3})]


@pytest.mark.few(1)
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
@settings(max_examples=drawn(12))
@given(st.data())
def test_any_delay_any_schedule_and_any_moment_of_looking_give_the_synchronous_bits(optimizer, options, data):
    expected = synchronous(optimizer, **options)
    model, opt, graph = recorded(optimizer, **options)
    chosen = set(data.draw(st.lists(st.sampled_from(np.flatnonzero(~must_stay(graph)).tolist()), unique=True)))
    for t in sorted(chosen):  # closed under what needs them
        stack = [t]
        while stack:
            for s in graph.succs[stack.pop()].tolist():
                if s not in chosen:
                    chosen.add(s)
                    stack.append(s)
    seed = data.draw(st.integers(0, 99))
    run = streams(graph, chosen, lambda g: random_schedule(g, 2, np.random.default_rng(seed)))
    follows(run, model, opt, expected, data.draw(st.sets(st.integers(0, STEPS - 1))))


def with_memory(graph):
    """A graph of a loop whose lasting storages have memory, as they have in a run."""
    def own(spec):
        memory = cpu().allocate(max(spec.bytes, 1))
        return replace(spec, live=tape.Storage(spec.name, spec.shape, spec.dtype, Role.STATE, memory))

    return replace(graph,
                   storages=tuple(own(s) if s.role == Role.STATE and s.live is None else s for s in graph.storages))


def test_every_graph_of_the_border_survives_random_legal_orders_with_versions_checked():
    _, _, graph = recorded(optim.SGD, momentum=0.9)
    border = cross_boundary(graph, [t for t in late_ones(graph)
                                    if "dropout counter" not in graph.unit_names[graph[t].unit]])
    for part in (*border.prologue, *border.body, *border.epilogue):
        graph = with_memory(part)
        for seed in range(5):
            inputs = (X[0], Y[0]) if graph.inputs else ()
            CheckingExecutor(graph, random_schedule(graph, 3, np.random.default_rng(seed)), seed=seed)(*inputs)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_step_with_late_tasks_returns_what_it_was_given_and_what_it_made_within(lanes):
    """Late tasks read these from the copies of their step, and so does the caller."""

    def made():
        ml.seed(3)
        model = models.mlp(*SIZES)
        opt = optim.SGD(model.parameters(), lr=0.05)

        def step(x, y):
            hidden = nn.relu(model.layer0(x))
            loss = nn.cross_entropy(model.layer2(model.layer1(hidden)), y)
            loss.backward()
            opt.step()
            return loss, x, y, hidden, hidden[:, 2:5], model.layer1.weight.grad

        return step

    step = made()
    expected = [[t.numpy().copy() for t in step(ml.array(X[i]), ml.array(Y[i]))] for i in range(STEPS)]
    graph = ml.record(made(), X[0], Y[0])
    run = streams(graph, late_ones(graph), lambda g: random_schedule(g, lanes, np.random.default_rng(5)))
    for i in range(STEPS):
        for found, value in zip(run(X[i], Y[i]), expected[i], strict=True):
            np.testing.assert_array_equal(found.numpy(), value)
    run.close()


def test_looking_settles_for_eager_ops_and_other_executors_too():
    expected = synchronous(optim.SGD, momentum=0.9)
    model, opt, graph = recorded(optim.SGD, momentum=0.9)
    run = streams(graph, late_ones(graph))
    with ml.no_grad():
        forward = ml.SequentialExecutor(ml.record(lambda x: model(x), X[0]))
    for i in range(3):
        opt.lr = 0.05 / (i + 1)
        run(X[i], Y[i])
    other = forward(X[0]).numpy()
    eager = model(X[0]).numpy()
    assert bits(*model.parameters()) == expected[2][1]
    np.testing.assert_array_equal(other, eager)
    run.close()


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Adam])
def test_the_last_micro_batch_crosses_alone(optimizer):
    """The others add to the same gradients within their own step."""
    model, opt, graph = recorded(optimizer, micro_batches=2)
    run = streams(graph, [t for t in late_ones(graph) if graph.kind[t] == Kind.U or graph.micro_batch[t] == 1])
    follows(run, model, opt, synchronous(optimizer, micro_batches=2), looks=(0, 3))


@pytest.mark.parametrize(("late", "clip", "why"), [
    (["1F0"], None, "1F0 cannot cross"), (["5W0"], None, "5W0 cannot cross the iteration boundary alone: 5U0"),
    (["5W0", "5U0"], 1.0, "cannot cross the iteration boundary alone")])
def test_a_task_that_its_own_step_needs_cannot_cross(late, clip, why):
    """With clipping by the global norm, every update crosses or none."""
    graph = recorded(optim.SGD, momentum=0.9, max_norm=clip)[2]
    with pytest.raises(GraphError, match=why):
        cross_boundary(graph, [graph.index(name) for name in late])


def test_reading_losses_and_setting_the_learning_rate_do_not_settle():
    """Both happen after every step; neither is a parameter."""
    expected = synchronous(optim.SGD, momentum=0.9)
    model, opt, graph = recorded(optim.SGD, momentum=0.9)
    run = streams(graph, late_ones(graph))
    for i in range(STEPS):
        opt.lr = 0.05 / (i + 1)
        assert (run in tape.unsettled) == (i > 0)
        assert float(run(X[i], Y[i])) == expected[i][0]
        assert run in tape.unsettled
    assert bits(*model.parameters()) == expected[-1][1]
    assert run not in tape.unsettled
    run.close()
