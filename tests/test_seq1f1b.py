"""Seq1F1B: slices of sequences go through the pipeline one by one, forwards in order, backwards in reverse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl import models, nn, optim
from minidl.cli import main
from minidl.schedule import ScheduleError
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline import PipelineError
from minidl.schedulers.pipeline.slices import sliced_graph

numbers = st.integers(1, 6)


def planned(p, m, q, f=1.0, o=1.0, w=1.0, **options):
    return pipeline.plan("seq1f1b", p, m, pipeline.costs(pipeline.place("seq1f1b", p), f, o, w), slices=q, **options)


@settings(deadline=None, max_examples=60)
@given(numbers, numbers, numbers, st.tuples(numbers, numbers, numbers))
def test_bubble_and_peak(p, m, q, times):
    """The bubble and the activations of 1F1B shrink with the slices."""
    price = pipeline.price(planned(p, m, q, *times))
    assert price.makespan == pytest.approx((m + (p - 1) / q) * sum(times))
    assert price.peak_activations == pytest.approx([min(p - s - 1 + q, m * q) / q for s in range(p)])
    assert max(price.peak_activations) == pytest.approx(min((p + q - 1) / q, m))


@settings(deadline=None, max_examples=30)
@given(numbers, numbers, st.tuples(numbers, numbers, numbers))
def test_one_slice_is_1f1b(p, m, times):
    classic = pipeline.plan("one_f_one_b", p, m, pipeline.costs(pipeline.place("one_f_one_b", p), *times))
    assert (planned(p, m, 1).schedule.keys == classic.schedule.keys).all()


@given(numbers, numbers, numbers)
@settings(deadline=None, max_examples=30)
def test_slices_wait_for_those_before_and_their_gradients_for_those_after(s, m, q):
    graph = sliced_graph(s, m, q)
    edges = {(graph.name(int(p)), graph.name(t)) for t in range(len(graph)) for p in graph.preds[t]}
    for i in range(m):
        for j in range(q):
            n = i * q + j
            for u in range(s):
                assert (f"{u}F{n}", f"{u}B{n}") in edges
                assert ((f"{u}F{n - 1}", f"{u}F{n}") in edges) == (j > 0)
                assert ((f"{u}B{n + 1}", f"{u}B{n}") in edges) == (j < q - 1)
                if u:
                    assert {(f"{u - 1}F{n}", f"{u}F{n}"), (f"{u}B{n}", f"{u - 1}B{n}")} <= edges


def test_an_order_that_takes_slices_the_other_way_is_refused():
    plan = planned(2, 2, 2)
    text = plan.schedule.to_csv()
    assert pipeline.read_plan(pipeline.read_schedule(text), 2, 2, like=plan).peaks == plan.peaks
    for a, b in (("1B1", "1B0"), ("0F0", "0F1")):
        wrong = pipeline.swap(plan.schedule, a, b)
        with pytest.raises(ScheduleError, match=f"{b} stands before {a}|deadlock"):
            pipeline.read_plan(wrong, 2, 2, like=plan)


def test_a_cap_counts_slices():
    assert max(planned(4, 8, 4, activation_cap=1.75).peaks) == 1.75
    with pytest.raises(PipelineError, match=r"seq1f1b: .*the cap is 1.5 \(this plan needs 1.75\)"):
        planned(4, 8, 4, activation_cap=1.5)


@pytest.mark.parametrize("slices", [0, -1])
def test_there_is_at_least_one_slice(slices):
    with pytest.raises(PipelineError, match="a micro-batch has at least 1"):
        planned(2, 2, slices)


def test_a_network_that_was_recorded_without_slices_is_refused():
    model = models.mlp(8, 16, 16, 4)
    opt = optim.SGD(model.parameters(), 0.1)

    def step(x, y):
        nn.cross_entropy(model(x), y).backward()
        opt.step()

    graph = ml.record(step, np.zeros((4, 8), "f"), np.zeros(4, int))
    with pytest.raises(PipelineError, match="orders slices of sequences, but this step was recorded with whole"):
        ml.plan(graph, "seq1f1b", ml.CostModel.analytic(), ml.Machine(2))


def test_what_is_saved_is_proved_again(tmp_path, capsys):
    flags = ["--scheduler", "seq1f1b", "--scheduler-arg", "slices=3", "--ranks", "3", "--micro-batches", "2"]
    assert main(["plan", *flags, "--save", str(tmp_path / "plan.csv")]) == 0
    assert main(["check", str(tmp_path / "plan.csv"), *flags]) == 0
    assert "valid on 3 ranks" in capsys.readouterr().out
