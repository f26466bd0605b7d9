"""Spiking networks: the neuron by hand, SLTT against BPTT in bits, memory over time steps, chosen time steps, ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from command_line import refusal, run_json
from helpers import random_array

import minidl as ml
from minidl import models, nn, ops
from minidl.core.tasks import Kind
from minidl.plans.program import lower
from minidl.pricing.cost import CostModel
from minidl.training.job import Job
from minidl.training.recorded import Recorded
from minidl.training.trainer import Trainer


@pytest.mark.parametrize("surrogate", nn.spiking.SURROGATES)
@pytest.mark.parametrize("stop", [True, False])
def test_the_neuron_and_its_gradients_follow_the_published_rule(surrogate: str, stop: bool) -> None:
    steps, tau = 4, 1.6
    x = [random_array((3, 5), t, "float64", low=-0.5) + 0.7 for t in range(steps)]
    weight = [random_array((3, 5), 10 + t, "float64") for t in range(steps)]
    inputs = [ml.Parameter(a) for a in x]
    neuron, past = nn.LIF(tau, surrogate), nn.Potentials(stop)
    out = [neuron(a, past) for a in inputs]
    loss = sum(((s * ml.array(w)).sum() for s, w in zip(out, weight, strict=True)), ml.array(np.zeros(())))
    loss.backward()
    u, v = [], np.zeros((3, 5))
    for t in range(steps):  # by hand
        u.append((1 - 1 / tau) * v + x[t] if t else x[t])
        spikes = (u[t] >= 1).astype(float)
        assert np.allclose(out[t].numpy(), spikes)
        v = u[t] - spikes
    later = np.zeros((3, 5))
    for t in reversed(range(steps)):
        away = np.abs(u[t] - 1)
        slope = (away <= 0.5) * 1.0 if surrogate == "rectangle" else np.maximum(0, 1 - away)
        gradient = weight[t] * slope + later * (1 - slope)
        np.testing.assert_allclose(inputs[t].grad.numpy(), gradient, rtol=1e-12, atol=1e-12)
        later = np.zeros((3, 5)) if stop else (1 - 1 / tau) * gradient


def trained(steps: int = 3, micro_batches: int = 1, scheduler: str = "in_order", runs: int = 3,
            **told: Any) -> tuple[Recorded, str]:
    """The recorded step, and the hash of the parameters after some steps."""
    recorded = Recorded(Job(model="snn", model_args={"layers": 3, "hidden": 12, "steps": steps, **told}, batch_size=32,
                            micro_batches=micro_batches, momentum=0.9, scheduler=scheduler))
    trainer = Trainer(recorded, CostModel.analytic())
    for _ in range(runs):
        trainer.step()
    trainer.settle()
    return recorded, trainer.params_sha256()


@pytest.mark.parametrize("told", [{"steps": 1}, {"steps": 2, "tau": 1.0}], ids=["one time step", "no memory"])
def test_without_gradients_through_time_to_drop_sltt_has_the_bits_of_bptt(told: dict[str, Any]) -> None:
    """Two steps without memory: the sums of two gradients do not depend on their order."""
    assert trained(backward="sltt", **told)[1] == trained(backward="bptt", **told)[1]
    assert trained(backward="sltt", steps=3)[1] != trained(backward="bptt", steps=3)[1]


def test_all_time_steps_chosen_is_sltt_in_bits() -> None:
    assert trained(steps=3, chosen=3)[1] == trained(steps=3)[1] != trained(steps=3, chosen=2)[1]


@pytest.mark.parametrize("scheduler", ["multi_stream", "multi_region"])
@pytest.mark.parametrize("backward", ["sltt", "bptt"])
def test_every_order_has_equal_bits(backward: str, scheduler: str) -> None:
    assert trained(backward=backward, scheduler=scheduler)[1] == trained(backward=backward)[1]


def test_no_task_of_sltt_needs_the_gradient_of_a_later_step() -> None:
    for backward, crosses in (("sltt", False), ("bptt", True)):
        graph = trained(backward=backward, runs=0)[0].graph
        source, target = graph.preds.ids, graph.preds.row_of_each()
        o = graph.kind == Kind.O
        across = o[source] & o[target] & (graph.micro_batch[source] != graph.micro_batch[target])
        assert across.any() == crosses
        states = (graph.kind[source] == Kind.F) & (graph.kind[target] == Kind.F)
        assert (states & (graph.micro_batch[source] + 1 == graph.micro_batch[target])).any()


def test_backward_tasks_are_those_of_the_chosen_time_steps() -> None:
    whole, some = (trained(steps=6, chosen=k, runs=0)[0].graph for k in (6, 2))
    for kind in (Kind.O, Kind.W):
        assert 3 * (some.kind == kind).sum() == (whole.kind == kind).sum() > 0
    assert (some.kind == Kind.F).sum() == (whole.kind == Kind.F).sum()
    drawn = {tuple(models.create("snn", chosen=2).with_backward(i)) for i in range(40)}
    assert len(drawn) > 8
    assert all(len(set(steps)) == 2 and max(steps) < 6 for steps in drawn)


def test_memory_does_not_grow_with_time_steps() -> None:
    """Planned, and allocated: the arena that the run makes. BPTT's grows."""
    peaks = {}
    for backward in ("sltt", "bptt"):
        for steps in (4, 12):
            recorded = trained(steps=steps, backward=backward, runs=0)[0]
            program = lower(recorded.graph, ml.schedulers.in_order(recorded.graph))
            peaks[backward, steps] = max(part.memory.activation_bytes for part in program.parts)
            run = ml.StreamExecutor(recorded.graph, ml.schedulers.in_order(recorded.graph))
            assert run.program.peak_bytes == program.peak_bytes
            run.close()
    assert peaks["sltt", 12] == peaks["sltt", 4]
    assert peaks["bptt", 12] > 2.5 * peaks["bptt", 4]


def test_the_prediction_is_the_sum_over_time_steps() -> None:
    ml.seed(2)
    network, x = models.create("snn", hidden=9, steps=3), ml.array(random_array((4, 8, 8, 1), 0, "float32"))
    past = network.past()
    outs = [network(x, past).numpy() for _ in range(3)]
    assert np.array_equal(network(x).numpy(), outs[0] + outs[1] + outs[2])
    loss, out = ml.array(np.float64(2.0)), ml.array(np.full((2, 3), 3.0))
    assert network.loss(loss, out).numpy() == pytest.approx(0.95 * 2 + 0.05 * 4)


FLAGS = ("train", "--model", "snn", "--model-arg", "preset=tiny", "--batch-size", "24", "--steps", "3", "--costs",
         "analytic", "--model-arg", "chosen=2")


def test_ranks_choose_the_same_time_steps_and_have_equal_bits(capsys: Any) -> None:
    job = Job(model="snn", model_args={"preset": "tiny", "chosen": 2}, batch_size=24, micro_batches=2, parallel="data")
    first, second = (Recorded(job, rank, 2).graph for rank in range(2))
    assert np.array_equal(first.kind, second.kind)
    assert np.array_equal(first.micro_batch, second.micro_batch)
    found = [run_json(capsys, *FLAGS, "--parallel", "data", "--ranks", "2", "--micro-batches", "2", "--scheduler", name)
             for name in ("priority", "barrier")]
    assert len({run["params_sha256"] for _, run in found}) == 1


def test_what_a_spiking_network_cannot_do_is_one_line(capsys: Any) -> None:
    assert "do not know time steps" in refusal(capsys, *FLAGS, "--parallel", "pipeline", "--ranks", "2",
                                               "--micro-batches", "2")
    assert "chosen is 4" in refusal(capsys, *FLAGS[:-1], "chosen=4")
    assert "with backward=sltt" in refusal(capsys, *FLAGS, "--model-arg", "backward=bptt")
    assert "sltt or bptt" in refusal(capsys, *FLAGS, "--model-arg", "backward=all")
    with pytest.raises(ValueError, match="tau must be at least 1"):
        nn.LIF(0.5)
    with pytest.raises(ValueError, match="known surrogates: triangle, rectangle"):
        nn.LIF(surrogate="sigmoid")


def test_spikes_carry_what_is_no_number() -> None:
    found = ops.spike(ml.array(np.array([0.5, 1.0, np.nan, np.inf]))).numpy()
    assert np.array_equal(found, [0, 1, np.nan, 1], equal_nan=True)
