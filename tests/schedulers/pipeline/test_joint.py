"""Cut, placement and order chosen together: never slower than interleaved 1F1B, valid, within caps and limits."""

from __future__ import annotations

import numpy as np
import pipelines
import pytest
from helpers import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_runs import trained

import minidl as ml
from minidl.cli import main
from minidl.pricing.cost import CostModel, Link
from minidl.schedulers import pipeline
from minidl.schedulers.pipeline import PipelineError, joint
from minidl.training.job import Job
from minidl.training.recorded import Recorded

#: per layer: an embedding whose weight gradient is large, 14 equal blocks, a loss of four blocks' arithmetic
FORWARD, OUTPUT_GRAD, WEIGHT_GRAD = [[first, *[1.0] * 14, 4.0] for first in (0.5, 0.1, 2.0)]


@pytest.fixture(autouse=True)
def little_effort(monkeypatch):
    pipelines.little_effort(monkeypatch)
    monkeypatch.setattr(joint, "EFFORT", 20_000)


def planned(name, p, m, times=(FORWARD, OUTPUT_GRAD, WEIGHT_GRAD), c=0.0, **options):
    layers = len(times[0])
    cost = pipeline.costs(pipelines.place(name, p, layers // p), *times, c)
    return pipelines.plan(name, p, m, cost, layers // p, **options)


def interleaved(p, m, chunks, times, c=0.0):
    """1F1B over equal numbers of layers."""
    summed = [np.reshape(t, (p * chunks, -1)).sum(1).tolist() for t in times]
    cost = pipeline.costs(pipelines.place("interleaved", p, chunks), *summed, c)
    return pipeline.price(pipelines.plan("interleaved", p, m, cost, chunks)).makespan


@pytest.mark.few(1)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
def test_an_embedding_and_a_loss_are_cut_around(p, m):
    plan = planned("joint", p, m, c=0.05)
    said = plan.notes["joint"]
    assert said["makespan"] == pytest.approx(pipeline.price(plan).makespan, rel=1e-5)
    assert sum(said["layers"]) == 16
    assert min(said["layers"]) >= 1
    assert said["layers"][-1] < 16 / plan.placement.stages, "the stage with the loss has fewer layers"
    plain = min(interleaved(p, m, chunks, (FORWARD, OUTPUT_GRAD, WEIGHT_GRAD), 0.05)
                for chunks in (1, 2, 4, 8) if chunks * p <= 16)
    assert plain / said["makespan"] > 1.1
    assert said["interleaved"] <= plain + 1e-6


@settings(max_examples=drawn(15))
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.just(0.0) | st.floats(1e-3, 1),
       st.integers(0, 2**31))
def test_it_never_loses_to_interleaved_1f1b(p, rounds, v, latency, seed):
    """Whatever layers take, and for every number of chunks; its plans are proved again from their text."""
    random, m = np.random.default_rng(seed), p * rounds
    times = random.uniform(0.1, 3, (3, p * v))
    times[:, [0, -1]] *= random.uniform(0.2, 6, (3, 2))
    plan = planned("joint", p, m, times.tolist(), latency)
    found = pipeline.price(plan).makespan
    for chunks in range(1, v + 1):
        if v % chunks == 0:
            assert found <= interleaved(p, m, chunks, times.tolist(), latency) + 1e-6
    assert found >= m * times.sum() / p - 1e-6
    again = pipelines.read_plan(pipeline.read_schedule(plan.schedule.to_csv()), p, m, plan.placement.chunks)
    assert again.peaks == plan.peaks


def test_links_between_two_ranks_have_their_price():
    """All pairs have links of their own, which take as long as others, or longer."""
    def steps(link: Link) -> list[float]:
        pairs = {f"{a}->{b}": link for a in range(3) for b in range(3) if a != b}
        return [ml.plan(ml.Pipeline(4, latency=0.5, bandwidth=2.0, message_bytes=3, links=links), "joint",
                        machine=ml.Machine(3)).step for links in ({}, pairs)]

    same, longer = steps(Link(0.5, 2.0)), steps(Link(9.0, 2.0))
    assert same[0] == same[1] == longer[0] < longer[1]


def test_a_cap_is_kept():
    free = planned("joint", 4, 8)
    cap = max(free.peaks) - 1
    capped = planned("joint", 4, 8, activation_cap=cap)
    assert max(capped.peaks) <= cap
    assert pipeline.price(capped).makespan >= pipeline.price(free).makespan
    with pytest.raises(PipelineError, match="joint: .*cap"):
        planned("joint", 4, 8, activation_cap=0.1)


def test_the_command_says_what_was_picked(capsys, tmp_path):
    numbers = ["--ranks", "2", "--micro-batches", "4"]
    flags = ["--scheduler", "joint", *numbers, "--chunks", "2", "--forward", "1,1,1,4"]
    assert main(["plan", *flags, "--save", str(tmp_path / "plan.csv")]) == 0
    assert "arrangements by simulation" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "plan.csv"), *numbers]) == 0
    assert main(["check", str(tmp_path / "plan.csv"), "--scheduler", "joint", *numbers]) == 0


def job(scheduler):
    return Job(model="mlp", model_args={"layers": 9, "hidden": 32}, batch_size=16, micro_batches=4, lr=0.05,
               scheduler=scheduler, parallel="none" if scheduler == "in_order" else "pipeline")


def test_a_network_is_cut_within_the_limits_of_its_machine():
    recorded = Recorded(job("joint"))
    free = recorded.plan(CostModel.analytic(), ml.Machine(2))
    assert sum(free.notes["joint"]["layers"]) == 8
    limit = max(free.peak_bytes) - 1
    fits = recorded.plan(CostModel.analytic(), ml.Machine(2, limit))
    assert max(fits.peak_bytes) <= limit
    capped = recorded.plan(CostModel.analytic(), ml.Machine(2, None, max(free.peaks) - 0.5))
    assert max(capped.peaks) <= max(free.peaks) - 0.5
    with pytest.raises(PipelineError, match="joint: no arrangement is possible; the fastest: .*limit of 1,000"):
        recorded.plan(CostModel.analytic(), ml.Machine(2, 1000))
    with pytest.raises(PipelineError, match="40 stages are asked for"):
        recorded.plan(CostModel.analytic(), ml.Machine(2), chunks=20)


def test_it_leaves_the_bits_of_one_process():
    assert trained(job("joint"), 2) == trained(job("in_order")) * 2
    assert trained(job("joint"), 2, result=lambda trainer: trainer.plan.scheduler) == ["joint"] * 2
