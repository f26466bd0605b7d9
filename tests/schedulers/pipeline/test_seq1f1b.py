"""Seq1F1B: slices of sequences go through the pipeline one by one, forwards in order, backwards in reverse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pipelines
import pytest
from command_line import run, run_json
from helpers import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher import under_mpi
from rank_runs import check_under_mpi, trained

import minidl as ml
from minidl.core.machine import Machine
from minidl.core.schedule import ScheduleError
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline import PipelineError
from minidl.schedulers.pipeline.slices import sliced_graph
from minidl.training.job import Job
from minidl.training.recorded import Recorded

numbers = st.integers(1, 6)


def planned(p, m, q, f=1.0, o=1.0, w=1.0, **options):
    return pipelines.plan("seq1f1b", p, m, pipeline.costs(pipelines.place("seq1f1b", p), f, o, w), slices=q, **options)


@settings(max_examples=drawn(60))
@given(numbers, numbers, numbers, st.tuples(numbers, numbers, numbers))
def test_bubble_and_peak(p, m, q, times):
    """The bubble and the activations of 1F1B shrink with the slices."""
    price = pipeline.price(planned(p, m, q, *times))
    assert price.makespan == pytest.approx((m + (p - 1) / q) * sum(times))
    assert price.peak_activations == pytest.approx([min(p - s - 1 + q, m * q) / q for s in range(p)])
    assert max(price.peak_activations) == pytest.approx(min((p + q - 1) / q, m))


@settings(max_examples=drawn(30))
@given(numbers, numbers, st.tuples(numbers, numbers, numbers))
def test_one_slice_is_1f1b(p, m, times):
    classic = pipelines.plan("one_f_one_b", p, m, pipeline.costs(pipelines.place("one_f_one_b", p), *times))
    assert (planned(p, m, 1).schedule.keys == classic.schedule.keys).all()


@given(numbers, numbers, numbers)
@settings(max_examples=drawn(30))
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
    assert pipelines.read_plan(pipeline.read_schedule(text), 2, 2, like=plan).peaks == plan.peaks
    for a, b in (("1B1", "1B0"), ("0F0", "0F1")):
        wrong = pipelines.swapped(plan.schedule, a, b)
        with pytest.raises(ScheduleError, match=f"{b} comes before {a}|deadlock"):
            pipelines.read_plan(wrong, 2, 2, like=plan)


def test_a_cap_counts_slices():
    assert max(planned(4, 8, 4, activation_cap=1.75).peaks) == 1.75
    with pytest.raises(PipelineError, match=r"seq1f1b: .*the cap is 1.5 \(this plan needs 1.75\)"):
        planned(4, 8, 4, activation_cap=1.5)


# ------------------------------------------------------------------------------------------------------------- networks
COST = ml.CostModel.analytic()
GPT = Job(model="gpt", model_args={"preset": "tiny", "layers": 4}, data="pydoc", batch_size=8, micro_batches=2,
          slices=2, optimizer="adamw", lr=0.001, clip=0.5)


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "slices", "model"), [(2, 4, "gpt"), (4, 2, "rnn"), (4, 2, "gpt"), (3, 1, "gpt"),
                                                        (3, 4, "rnn")])
def test_ranks_leave_the_bits_of_one_process(ranks, slices, model):
    """With dropout, AdamW and clipping; the embedding on the first rank, the logits on the last."""
    job = replace(GPT, model=model, slices=slices)
    staged = replace(job, scheduler="seq1f1b", parallel="pipeline")
    assert trained(staged, ranks) == trained(job) * ranks
    plan = Recorded(staged).plan(COST, Machine(ranks))
    assert plan.slices == slices
    assert plan.peaks == pytest.approx([min(2, (ranks - s - 1 + slices) / slices) for s in range(ranks)])


@pytest.mark.slow
def test_replicas_sum_the_gradients_of_all_slices():
    job = replace(GPT, clip=None)
    found = trained(replace(job, scheduler="seq1f1b", parallel="pipeline"), 2, replicas=2)
    assert found == [found[0]] * 4
    np.testing.assert_allclose(found[0][0], trained(job)[0][0], rtol=1e-5)


def test_memory_shrinks_with_the_slices():
    """The first rank holds fewer activations: with 4 slices on 3 ranks one and a half stages, not 3."""
    jobs = [replace(GPT, slices=q, micro_batches=4, parallel="pipeline", scheduler=name)
            for q, name in ((1, "one_f_one_b"), (2, "seq1f1b"), (4, "seq1f1b"))]
    whole, two, four = (Recorded(job).plan(COST, Machine(3)) for job in jobs)
    assert [plan.peaks[0] for plan in (whole, two, four)] == [3, 2, 1.5]
    assert whole.peak_bytes[0] > two.peak_bytes[0] > four.peak_bytes[0]


def test_a_network_in_slices_is_not_for_orders_of_whole_micro_batches():
    graph = Recorded(GPT).graph
    with pytest.raises(PipelineError, match="one_f_one_b: it orders whole micro-batches, but this step was "):
        ml.plan(graph, "one_f_one_b", COST, Machine(2))
    with pytest.raises(PipelineError, match="seq1f1b: 4 slices are asked for, but this step was recorded with 2"):
        ml.plan(graph, "seq1f1b", COST, Machine(2), slices=4)
    assert ml.plan(graph, "seq1f1b", COST, Machine(2)).slices == 2


# ---------------------------------------------------------------------------------------------------------- the command
FLAGS = ["--model", "gpt", "--model-arg", "preset=tiny", "--data", "pydoc", "--batch-size", "8", "--micro-batches", "2",
         "--costs", "analytic"]


@pytest.mark.slow
def test_plan_check_explain_and_runs_of_a_saved_plan(tmp_path, capsys):
    file = str(tmp_path / "plan.csv")
    mine = [*FLAGS, "--ranks", "2", "--scheduler", "seq1f1b"]
    def said(*argv):
        code, out, _ = run(capsys, *argv, *mine)
        assert code == 0
        return out

    assert max(run_json(capsys, "plan", *mine, "--save", file)[1]["peak_activations"]) == 1.5
    assert "valid on 2 ranks" in said("check", file)
    assert "needs       0F0, 0B1" in said("explain", "0B0")
    assert "1.250  live full stages" in said("simulate", "--scheduler-arg", "slices=4")
    run_of = ["train", *mine, "--parallel", "pipeline", "--steps", "1"]
    shas = {run_json(capsys, *run_of, "--scheduler", name)[1]["params_sha256"] for name in ("seq1f1b", file)}
    assert len(shas) == 1


@pytest.mark.slow
@under_mpi
def test_ranks_of_mpi_leave_the_bits_of_one_process():
    check_under_mpi(2, {"scheduler": "seq1f1b", "slices": 2, "drop": True})


def test_what_is_saved_is_proved_again(tmp_path, capsys):
    flags = ["--scheduler", "seq1f1b", "--scheduler-arg", "slices=3", "--ranks", "3", "--micro-batches", "2"]
    assert run(capsys, "plan", *flags, "--save", str(tmp_path / "plan.csv"))[0] == 0
    assert "valid on 3 ranks" in run(capsys, "check", str(tmp_path / "plan.csv"), *flags)[1]
