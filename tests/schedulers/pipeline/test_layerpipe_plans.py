"""LayerPipe's plans: weight versions proved by the graph, the steady state that the simulator confirms, memory."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import place, plan

from minidl.core.schedule import ScheduleError
from minidl.core.tasks import Kind, unpack
from minidl.pricing.simulation import times
from minidl.schedulers.partition import LayerCosts, assign
from minidl.schedulers.pipeline import PipelineError, costs, price, prove
from minidl.schedulers.pipeline.ticks import Ticks

TIME = st.one_of(st.integers(1, 5).map(float), st.floats(0.2, 5))


def per_stage(data, stages):
    return [data.draw(st.lists(TIME, min_size=stages, max_size=stages)) for _ in range(3)]


def simulated_period(name, ranks, batches, cost, **options):
    """Time per batch between the ends of a long run and one `batches` longer."""
    ends = []
    for count in (batches, 2 * batches):
        made = plan(name, ranks, count, cost, **options)
        _, end, _ = times(made.graph, made.schedule, made.cost)
        ends.append(end.max())
    return (ends[1] - ends[0]) / batches


@settings(max_examples=drawn(15))
@given(data=st.data(), ranks=st.integers(1, 4), chunks=st.integers(1, 2), latency=st.sampled_from([0, 0.3, 4]))
def test_the_steady_state_is_what_a_long_run_shows(data, ranks, chunks, latency):
    name = data.draw(st.sampled_from(["layerpipe", "layerpipe2"]))
    cost = costs(place(name, ranks, chunks), *per_stage(data, ranks * chunks), latency=latency)
    made = plan(name, ranks, 60, cost, chunks=chunks)
    assert simulated_period(name, ranks, 60, cost, chunks=chunks) == pytest.approx(made.steady, rel=0.02)
    assert price(made).period == made.steady


@settings(max_examples=drawn(15))
@given(data=st.data(), ranks=st.integers(1, 5), chunks=st.integers(1, 2), method=st.sampled_from(["intra", "inter"]))
def test_without_latency_layerpipe_runs_at_the_period_of_its_partition(data, ranks, chunks, method):
    values = per_stage(data, ranks * chunks)
    cost = costs(place("layerpipe", ranks, chunks), *values)
    made = plan("layerpipe", ranks, 3, cost, chunks=chunks, method=method)
    partition = assign(LayerCosts.given(*values), ranks, method)
    assert made.steady == pytest.approx(partition.period)
    slowest = max(sum(values[k][s] for k in range(3) for s in range(r * chunks, (r + 1) * chunks))
                  for r in range(ranks))
    assert made.steady <= slowest * (1 + 1e-9)
    measured = price(made)
    assert measured.bubble_rate == pytest.approx(1 - partition.loads.max() / made.steady, abs=1e-9)


def test_no_bubble_is_not_less_than_none():
    for each in ([3.0, 6.0, 4.0, 2.0], [0.1, 0.7, 0.3, 0.2]):
        cost = costs(place("layerpipe", 4), each, each, each)
        assert 0 <= price(plan("layerpipe", 4, 8, cost)).bubble_rate < 1


@settings(max_examples=drawn(20))
@given(data=st.data(), ranks=st.integers(1, 4), chunks=st.integers(1, 3), batches=st.integers(1, 12))
def test_layerpipe2_reads_weights_of_2s_updates_ago(data, ranks, chunks, batches):
    cost = costs(place("layerpipe2", ranks, chunks), *per_stage(data, ranks * chunks))
    made = plan("layerpipe2", ranks, batches, cost, chunks=chunks)
    stage, batch = unpack(made.schedule.keys).unit, unpack(made.schedule.keys).micro_batch
    delay = 2 * (ranks - 1 - np.arange(ranks * chunks) // chunks)
    assert (made.versions.read == np.maximum(0, batch - delay[stage])).all()
    # every forward reads the newest version there is on its rank
    lane = made.schedule.lane_of_each()
    for r in range(ranks):
        own = made.schedule.order(r)
        done = np.cumsum(unpack(own).kind == Kind.W) // chunks
        forward = unpack(own).kind == Kind.F
        assert (made.versions.read[lane == r][forward] == done[forward]).all()


def test_one_version_too_old_or_too_new_is_refused():
    made = plan("layerpipe2", 3, 8)
    entry = int(np.flatnonzero(made.versions.read == 3)[0])
    for change in (1, -1):
        wrong = made.versions.read.copy()
        wrong[entry] += change
        with pytest.raises(ScheduleError, match="version"):
            prove(replace(made, versions=replace(made.versions, read=wrong)))


@settings(max_examples=drawn(20))
@given(data=st.data(), ranks=st.integers(1, 4), chunks=st.integers(1, 2))
def test_rings_hold_every_version_that_is_still_read(data, ranks, chunks):
    cost = costs(place("layerpipe", ranks, chunks), *per_stage(data, ranks * chunks))
    made = plan("layerpipe", ranks, 12, cost, chunks=chunks)
    reads_what_it_should(made, made.graph)
    ticks = Ticks(ranks * chunks, assign(LayerCosts.given(*(cost.kinds[k] for k in "FOW")), ranks).parts, 0.0)
    for layer in range(ranks * chunks):
        together = len({p.processor for p in ticks.parts if p.layer == layer}) == 1
        ring = sum(name.startswith(f"weights {layer},") for name in made.graph.buffer_names)
        assert ring == ticks.delays[layer] + 1 if together else ring > ticks.delays[layer]


def reads_what_it_should(made, graph):
    """The weights that each F and O of `graph` reads are those whose version the plan states."""
    version = dict(zip(made.schedule.keys.tolist(), made.versions.read.tolist(), strict=True))
    stages = made.placement.stages
    for task in graph:
        if task.kind in (Kind.F, Kind.O):
            read, layer = version[int(graph.keys[task.index])], task.unit % stages
            assert writer(graph, task, layer) == (f"{layer}W{read - 1}" if read else "")


def writer(graph, task, layer):
    """Who wrote the weights that a task reads."""
    weights = {b.index for b in task.reads if b.name.startswith(f"weights {layer},")}
    wrote = [graph.name(p) for p in graph.preds[task.index].tolist()
             if weights & {b.index for b in graph[p].writes}]
    return wrote[0] if wrote else ""


def test_a_cut_output_gradient_is_two_tasks():
    cost = costs(place("layerpipe", 2), [1, 1], [4, 1], [1, 1])
    made = plan("layerpipe", 2, 4, cost)
    assert made.steady == pytest.approx(4.5)
    assert ("0O0" in made.schedule.names(0), "0O0/1" in made.schedule.names(1)) == (True, True)
    assert price(made).period == pytest.approx(4.5)
    with pytest.raises(PipelineError, match=r"rank \d holds 1 activations; the cap is 0.5"):
        plan("layerpipe", 2, 4, cost, activation_cap=0.5)
