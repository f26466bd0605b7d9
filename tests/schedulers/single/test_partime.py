"""PARTIME: one stage is online training, each tick equals a model by hand, and no stage waits for another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from command_line import run_json
from helpers import classified

import minidl as ml
from minidl import models, nn, optim
from minidl.core.placement import Refused
from minidl.core.tasks import Kind
from minidl.data.dataset import DataError
from minidl.data.feed import fed
from minidl.fusion import fused
from minidl.passes.draft import Draft
from minidl.passes.ticks import in_ticks
from minidl.schedulers.partime import stage_of
from minidl.training.job import Job
from minidl.training.recorded import Recorded

SIZES, BATCH = (6, 8, 8, 8, 5), 4
COST = ml.CostModel.analytic()


def recorded(lr: float = 0.1, momentum: float = 0.0, sizes: tuple[int, ...] = SIZES) -> tuple[Any, Any, Any]:
    """Model, optimizer and the graph of a step, in float64."""
    ml.seed(4)
    model = models.mlp(*sizes).astype("float64")
    opt = optim.SGD(model.parameters(), lr=lr, momentum=momentum)

    return model, opt, ml.record(classified(model, opt), np.zeros((BATCH, sizes[0])), np.zeros(BATCH, np.int64))


def stream(ticks: int, seed: int = 0) -> list[tuple[Any, Any]]:
    random = np.random.default_rng(seed)
    return [(random.normal(size=(BATCH, SIZES[0])), random.integers(0, 5, BATCH)) for _ in range(ticks)]


def ran(stages: int, data: list[tuple[Any, Any]], one_lane: bool = False,
        **told: Any) -> tuple[list[bytes], list[bytes], Any, Any]:
    """Losses, parameters, optimizer and plan after these ticks."""
    model, opt, graph = recorded(**told)
    plan = ml.plan(graph, "partime", COST, stages=stages)
    execute = ml.StreamExecutor(plan.graph, ml.schedulers.in_order(plan.graph) if one_lane else plan.schedule)
    losses = [execute(x, y).numpy().tobytes() for x, y in data]
    execute.close()
    return losses, [p.numpy().tobytes() for p in model.parameters()], opt, plan


def by_hand(stages: int, data: list[tuple[Any, Any]], lr: float) -> list[np.ndarray]:
    """The published rule: stage s at tick n has the batch of tick n - s, and the gradient that stage s + 1 made in the
    tick before; samples of ticks before the first are zeros with the label 0."""
    model, _, graph = recorded()
    w = [np.array(p.numpy()) for p in model.parameters()]
    units = 2 * (len(SIZES) - 1) - 1  # a linear layer is followed by its ReLU
    of = stage_of(graph, ml.plan(graph, "partime", COST, stages=stages).cost, stages)
    home = [int(of[graph[f"{i}F0"].index]) for i in range(units)]
    sent: list[Any] = [np.zeros((BATCH, SIZES[(home.index(s) + 1) // 2])) for s in range(stages)]
    last = [units - 1 - home[::-1].index(s) for s in range(stages)]
    back: list[Any] = [np.zeros((BATCH, SIZES[(u + 2) // 2])) for u in last]
    for n, (x, _) in enumerate(data):
        target = data[n - (stages - 1)][1] if n >= stages - 1 else np.zeros(BATCH, np.int64)
        following_sent, following_back = list(sent), list(back)
        for s in range(stages):
            mine = [i for i in range(units) if home[i] == s]
            h, inputs = x if s == 0 else sent[s], {}
            for i in mine:
                inputs[i] = h
                h = np.maximum(h, 0) if i % 2 else h @ w[i].T + w[i + 1]
            if s < stages - 1:
                following_sent[s + 1], g = h, back[s]
            else:
                p = np.exp(h - h.max(1, keepdims=True))
                g = (p / p.sum(1, keepdims=True) - np.eye(SIZES[-1])[target]) / BATCH
            for i in reversed(mine):
                if i % 2:
                    g = g * (inputs[i] > 0)
                    continue
                dw, db = g.T @ inputs[i], g.sum(0)
                g = g @ w[i]
                w[i], w[i + 1] = w[i] - lr * dw, w[i + 1] - lr * db
            if s:
                following_back[s - 1] = g
        sent, back = following_sent, following_back
    return w


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_tick_follows_the_published_rule(stages: int) -> None:
    """The gradient that meets a batch at stage s is of the batch 2 (S - 1 - s) ticks before."""
    data = stream(12)
    found = [np.frombuffer(p) for p in ran(stages, data)[1]]
    for mine, wanted in zip(found, by_hand(stages, data, 0.1), strict=True):
        np.testing.assert_allclose(mine, wanted.ravel(), rtol=1e-10, atol=1e-12)


def test_one_stage_is_online_training_in_bits() -> None:
    data = stream(6)
    model, _, graph = recorded()
    alone = ml.SequentialExecutor(graph)
    losses = [alone(x, y).numpy().tobytes() for x, y in data]
    assert ran(1, data)[:2] == (losses, [p.numpy().tobytes() for p in model.parameters()])


@pytest.mark.parametrize("stages", [2, 4])
def test_on_constant_data_without_updates_all_gradients_are_those_of_backprop_in_bits(stages: int) -> None:
    """With momentum 1e-300, which is 0 times any gradient here, the states are the gradients."""
    (x, y), = stream(1)

    def gradients(stages: int, ticks: int) -> list[bytes]:
        _, _, opt, _ = ran(stages, [(x, y)] * ticks, lr=0.0, momentum=1e-300)
        return [v.numpy().tobytes() for v in opt.states["momentum"]]

    whole, last = gradients(1, 1), 2 * (stages - 1)
    assert gradients(stages, last + 1) == whole == gradients(stages, last + 3)
    assert gradients(stages, last) != whole


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_stage_waits_for_another_and_a_tick_takes_as_long_as_the_longest(stages: int) -> None:
    plan = ran(stages, [], )[3]
    graph = plan.graph
    stage, work = stage_of(graph, plan.cost, stages), graph.kind != Kind.U
    source, target = graph.preds.ids, graph.preds.row_of_each()
    assert not ((stage[source] != stage[target]) & work[source] & work[target]).any()
    time = plan.cost.durations(graph)
    assert plan.timeline.makespan < 1.6 * max(time[stage == s].sum() for s in range(stages))
    assert plan.stale
    assert plan.notes["latency"] == stages


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.campaign)
                                             for seed in range(4, 204))])
def test_random_networks_repeat_and_replay(seed: int) -> None:
    """A random network and number of stages: two runs, and a replay on one lane."""
    random = np.random.default_rng(seed)
    sizes = (6, *random.integers(3, 40, random.integers(1, 6)).tolist(), 5)
    told = {"sizes": sizes, "momentum": float(random.choice([0.0, 0.9]))}
    stages, data = int(random.integers(1, len(sizes))), stream(6, seed)
    first = ran(stages, data, **told)[:2]
    assert ran(stages, data, **told)[:2] == first == ran(stages, data, one_lane=True, **told)[:2], seed


def test_a_ring_has_one_new_sample_in_each_step_and_a_held_batch_repeats() -> None:
    loader = Recorded(Job(model="mlp", model_args={"preset": "tiny"}, batch_size=8)).train_data
    ring, plain = fed(loader, "ring"), np.concatenate([loader.read(8 * i)[0] for i in range(4)])
    for tick in range(12):
        x, _ = ring.read(8 * tick)
        for j in range(8):
            newest = max(n for n in range(tick + 8) if n % 8 == j)
            assert np.array_equal(x[j], plain[newest])
    held = fed(loader, "hold=3")
    for tick in range(7):
        assert np.array_equal(held.read(8 * tick)[0], loader.read(8 * (tick // 3))[0])
    assert fed(loader, "batches") is loader
    with pytest.raises(DataError, match="known: batches, ring, hold=K"):
        fed(loader, "hold=0")


FLAGS = ("train", "--model", "mlp", "--model-arg", "preset=tiny", "--batch-size", "16", "--steps", "4", "--costs",
         "analytic", "--scheduler", "partime")


def test_the_command_line_trains(capsys: Any) -> None:
    code, record = run_json(capsys, *FLAGS, "--feed", "ring")
    assert code == 0
    assert "data must change slowly" in record["remarks"][0]


def test_a_weight_of_two_stages_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    opt = optim.SGD(model.parameters(), 0.1)

    def step(x: Any) -> Any:
        loss = model(x).sum()
        loss.backward()
        opt.step()
        return loss

    graph = ml.record(step, np.zeros((2, 6), np.float32))
    with pytest.raises(Refused, match="both use or add up .*take a network whose stages share nothing"):
        ml.plan(graph, "partime", COST, stages=2)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_value_that_another_stage_writes_over_is_refused(stages: int) -> None:
    graph = fused(recorded()[2], ml.device.cpu(), ["in_place"])
    with pytest.raises(Refused, match="both use or add up .*no --fusion"):
        ml.plan(graph, "partime", COST, stages=stages)


def test_joined_channels_of_two_stages_are_refused() -> None:
    graph = Recorded(Job(model="densenet121", model_args={"preset": "tiny"}, batch_size=4)).graph
    cut = [int(graph.unit[t]) for t in range(len(graph)) if graph.kind[t] == Kind.F
           and len({int(graph.buffer_storage[b]) for b in graph.reads[t]}) < len(graph.reads[t])][0]
    with pytest.raises(Refused, match="joins nothing across stages"):
        in_ticks(Draft.of(graph), (graph.unit >= cut).astype(np.int64))


def test_comparisons_keep_partime_apart(capsys: Any) -> None:
    code, record = run_json(capsys, "compare", *FLAGS[1:-2], "--schedulers", "in_order,multi_stream,partime")
    assert (code, record["bit_identical"]) == (0, True)
