"""Several iterations in one graph, and the edges that second buffers take away."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import SMALL, edge_pairs, network, planned_graphs, recorded
from hypothesis import given
from hypothesis import strategies as st

import minidl as ml
from minidl.core.graph import GraphBuilder
from minidl.core.tasks import GraphError


def named_edges(graph):
    return {(graph.name(a), graph.name(b)) for a, b in edge_pairs(graph)}


def test_renaming_takes_the_write_after_read_edges_between_iterations_away():
    graph = network(2)
    between = {(a, b) for a, b in named_edges(ml.unroll(graph, 2)) if ("#" in a) != ("#" in b)}
    assert {("0U0", "0F0#1"), ("1U0", "1F0#1")} <= between, "U -> F"
    # a1 is read by 1F0 and 1W0 and written again by 0F0 of the next iteration
    assert ("1W0", "0F0#1") in between, "W(t) -> F(t+1)"
    after = {(a, b) for a, b in named_edges(ml.rename(ml.unroll(graph, 2))) if ("#" in a) != ("#" in b)}
    assert ("0U0", "0F0#1") in after
    assert {a for a, _ in after} == {"0U0", "1U0"}, "only parameters carry over"
    # with two copies the third iteration meets the first again
    thrice = named_edges(ml.rename(ml.unroll(graph, 3)))
    assert ("1W0", "0F0#2") in thrice
    assert ("1W0", "0F0#1") not in thrice
    assert ("1W0", "0F0#2") not in named_edges(ml.rename(ml.unroll(graph, 3), 3))


def test_inputs_and_outputs_are_separate_in_each_iteration_and_the_rest_is_shared():
    graph = recorded()
    thrice = ml.unroll(graph, 3)
    assert len(thrice.inputs) == 3 * len(graph.inputs)
    assert len(thrice.outputs) == 3 * len(graph.outputs)
    assert (len({v.storage for v in (*thrice.inputs, *thrice.outputs)}) == 3
            * len({v.storage for v in (*graph.inputs, *graph.outputs)}))
    extra = len(thrice.storages) - len(graph.storages)
    assert extra == 2 * len({v.storage for v in (*graph.inputs, *graph.outputs)})
    assert (thrice.flops.sum(), thrice.bytes.sum()) == (3 * graph.flops.sum(), 3 * graph.bytes.sum())
    twice = ml.rename(thrice)
    assert sum(s.role.persistent for s in twice.storages) == sum(s.role.persistent for s in graph.storages)


def test_a_parameter_that_the_step_returns_still_carries_over():
    w = ml.Parameter(np.ones(2, np.float32))
    opt = ml.optim.SGD([w], 0.5)

    def step(x):
        (x * w).sum().backward()
        opt.step()
        return w

    x = np.ones(2, np.float32)
    graph = ml.unroll(ml.record(step, x), 3)
    assert ("0U0", "0F0#1") in named_edges(graph)
    ml.SequentialExecutor(graph)(x, x, x)
    assert w.numpy().tolist() == [-0.5, -0.5]


@given(planned_graphs(tasks=8, buffers=4), st.integers(1, 4))
def test_an_unrolled_graph_is_the_tasks_in_a_row(graph, iterations):
    """Its edges are those of the same tasks written one after the other on the same buffers."""
    unrolled = ml.unroll(graph, iterations)
    builder = GraphBuilder()
    for b in range(len(graph.buffer_bytes)):
        builder.buffer(f"b{b}", 1)
    for t in range(iterations):
        for task in graph:
            builder.task(task.unit, task.kind, task.micro_batch, iteration=t, reads=graph.reads[task.index].tolist(),
                         writes=graph.writes[task.index].tolist())
    assert named_edges(unrolled) == named_edges(builder.build())
    assert unrolled.reads.ptr.tolist() == builder.build().reads.ptr.tolist()
    assert ml.rename(unrolled, 1).edges == unrolled.edges


@given(planned_graphs(tasks=8, buffers=4), st.integers(1, 4), st.integers(1, 3))
def test_renaming_only_takes_edges_between_iterations_away(graph, iterations, copies):
    unrolled = ml.unroll(graph, iterations)
    renamed = ml.rename(unrolled, copies)
    before, after = named_edges(unrolled), named_edges(renamed)
    same = {(a, b) for a, b in before if a.partition("#")[2] == b.partition("#")[2]}
    assert same <= after
    assert {(a, b) for a, b in after if a.partition("#")[2] == b.partition("#")[2]} == same


@pytest.mark.parametrize(("call", "why"), [
    (lambda g: ml.unroll(g, 0), "over 0 iterations; at least 1"), (lambda g: ml.unroll(g, -1), "over -1 iterations"),
    (lambda g: ml.rename(g, 0), "to 0 copies; at least 1"), (lambda g: ml.rename(g, -1), "to -1 copies"),
    (lambda g: ml.unroll(ml.unroll(g, 2), 2), "unrolled already"),
    (lambda g: ml.unroll(g, 2**8 + 1).keys, "iteration 256 is too large")])
def test_too_few_iterations_or_copies_or_too_many(call, why):
    with pytest.raises(GraphError, match=why):
        call(network(1))


def test_one_iteration_changes_nothing():
    graph = recorded()
    same = ml.rename(ml.unroll(graph, 1))
    assert named_edges(same) == named_edges(graph)
    assert len(same.storages) == len(graph.storages)
    assert (same.inputs, same.outputs) == (graph.inputs, graph.outputs)
    assert SMALL.trained(lambda g: ml.SequentialExecutor(ml.rename(ml.unroll(g, 1)))) == SMALL.trained(None)
