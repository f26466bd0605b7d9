"""Delayed updates and ACCO: the published rules in NumPy, equal bits however tasks interleave, on ranks as well."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from command_line import run, run_json
from helpers import together
from replays import replay_together

import minidl as ml
from minidl import models, nn, optim
from minidl.core.placement import Refused
from minidl.core.tasks import Kind
from minidl.runtime.executors import DistributedExecutor
from minidl.schedulers.beside import lasting_updates
from minidl.testing.replay import Replay

SIZES, HALF, STEPS, RATE, MOMENTUM = (6, 8, 7, 5), 3, 6, 0.1, 0.9
COST = ml.CostModel.analytic()
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: optim.SGD(p, RATE, momentum=MOMENTUM), "adamw": lambda p: optim.AdamW(p, 0.01),
    "sgd, clipped": lambda p: optim.SGD(p, RATE, momentum=MOMENTUM, max_norm=0.1),
    "nadamw": lambda p: optim.NAdamW(p, 0.01)}


def recorded(optimizer: str = "sgd", micro_batches: int = 2) -> tuple[Any, Any]:
    """Model and graph of a step, in float64."""
    ml.seed(4)
    model = models.mlp(*SIZES).astype("float64")
    opt = OPTIMIZERS[optimizer](model.parameters())

    def step(*parts: Any) -> Any:
        total = None
        for i in range(micro_batches):
            with ml.micro_batch(i, i * HALF):
                loss = nn.cross_entropy(model(parts[2 * i]), parts[2 * i + 1]) * (1 / micro_batches)
                loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
        opt.step()
        return total

    return model, ml.record(step, *batch(0, micro_batches))


def batch(number: int, micro_batches: int = 2) -> list[Any]:
    random = np.random.default_rng(number)
    return [part for _ in range(micro_batches) for part in (random.normal(size=(HALF, SIZES[0])),
                                                            random.integers(0, SIZES[-1], HALF))]


def test_every_update_of_a_parameter_runs_beside_the_next_step() -> None:
    """And what it needs, such as the norm of all gradients."""
    for optimizer in OPTIMIZERS:
        _, graph = recorded(optimizer)
        live = {b for b, s in enumerate(graph.buffer_storage.tolist()) if graph.storages[s].live is not None}
        found = lasting_updates(graph).tolist()
        writes = {b for t in found for b in graph.writes[t].tolist()}
        assert writes >= {b for t in np.flatnonzero(graph.kind == Kind.U) for b in graph.writes[t].tolist()} & live
        for t in found:
            makers = graph.preds[t][graph.kind[graph.preds[t]] == Kind.U].tolist()
            assert {*makers} <= {*found}, graph.name(t)


def ran(policy: str, ranks: int, optimizer: str = "sgd", micro_batches: int = 2, alone: bool = False) -> Any:
    """Parameters as bytes and the logs of all ranks; `alone`: on one lane, in the order of the graph."""
    own = []
    for _ in range(ranks):
        model, graph = recorded(optimizer, micro_batches)
        plan = ml.plan(graph, policy, COST, ml.Machine(ranks))
        own.append((model, plan))

    def work(communicator: Any) -> Any:
        model, plan = own[communicator.rank]
        schedule = ml.schedulers.in_order(plan.graph) if alone else plan.schedule
        run = DistributedExecutor(plan.graph, schedule, communicator, logged=plan.stale)
        for k in range(STEPS):
            run(*batch(ranks * k + communicator.rank, micro_batches))
        run.settle()
        run.close()
        return [p.numpy().tobytes() for p in model.parameters()], run.log.entries if run.log else []

    found = together(ranks, work)
    assert all(f[0] == found[0][0] for f in found)
    return found[0][0], [f[1] for f in found]


# -------------------------------------------------------------------------------------------------------- the reference
def gradient(w: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Of the mean cross entropy of an MLP, by hand."""
    inputs, h = [], x
    for i in range(0, len(w), 2):
        inputs.append(h)
        h = h @ w[i].T + w[i + 1]
        h = np.maximum(h, 0) if i < len(w) - 2 else h
    p = np.exp(h - h.max(1, keepdims=True))
    g, found = (p / p.sum(1, keepdims=True) - np.eye(SIZES[-1])[y]) / len(y), []
    for i in range(len(w) - 2, -1, -2):
        found[:0] = [g.T @ inputs[i // 2], g.sum(0)]
        g = (g @ w[i]) * (inputs[i // 2] > 0)
    return found


def optimized(w: list[np.ndarray], v: list[np.ndarray], g: list[np.ndarray]) -> tuple[Any, Any]:
    v = [MOMENTUM * a + b for a, b in zip(v, g, strict=True)]
    return [a - RATE * b for a, b in zip(w, v, strict=True)], v


def by_hand(policy: str, ranks: int) -> list[np.ndarray]:
    def mean(weights: list[np.ndarray], k: int, half: int) -> list[np.ndarray]:
        each = [gradient(weights, *batch(ranks * k + r)[2 * half : 2 * half + 2]) for r in range(ranks)]
        return [sum(g) / ranks for g in zip(*each, strict=True)]  # type: ignore[misc]

    w = [np.array(p.numpy()) for p in recorded()[0].parameters()]
    v, other = [np.zeros_like(a) for a in w], w
    for k in range(STEPS):
        first, second = mean(other, k, 0), mean(w if policy == "acco" else other, k, 1)
        other = optimized(w, v, first)[0] if policy == "acco" else w
        w, v = optimized(w, v, [(a + b) / 2 for a, b in zip(first, second, strict=True)])
    return w


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("policy", ["delayed_update", "acco"])
def test_training_follows_the_published_rule(policy: str, ranks: int) -> None:
    found = [np.frombuffer(p) for p in ran(policy, ranks)[0]]
    for mine, wanted in zip(found, by_hand(policy, ranks), strict=True):
        assert np.abs(mine - wanted.ravel()).max() < 1e-13
    other = by_hand({"acco": "delayed_update"}.get(policy, "acco"), ranks)
    assert np.abs(found[0] - other[0].ravel()).max() > 1e-4, "another rule leaves other weights"


@pytest.mark.few(1)
@pytest.mark.parametrize(("policy", "optimizer"), [*zip(["delayed_update", "acco"] * 2, OPTIMIZERS, strict=True)])
def test_bits_are_those_of_one_lane_and_repeat(policy: str, optimizer: str) -> None:
    wanted = ran(policy, 2, optimizer, alone=True)[0]
    assert ran(policy, 2, optimizer)[0] == wanted == ran(policy, 2, optimizer)[0]
    assert ran(policy, 2, optimizer, 4)[0] == ran(policy, 2, optimizer, 4, alone=True)[0]


def replayed(log: Any, ranks: int, optimizer: str, micro_batches: int = 2) -> list[bytes]:
    """The parameters that the log of delayed updates leaves in one process."""
    own = [recorded(optimizer, micro_batches) for _ in range(ranks)]
    replicas = [Replay(graph, np.arange(graph.unit.max() + 1)) for _, graph in own]
    for k in range(STEPS):
        replay_together(replicas, [tuple(batch(ranks * k + r, micro_batches)) for r in range(ranks)],
                        [e for e in log if e.step == k])
    return [p.numpy().tobytes() for p in own[0][0].parameters()]


@pytest.mark.few(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_log_of_delayed_updates_replays_in_bits(ranks: int, optimizer: str) -> None:
    found, logs = ran("delayed_update", ranks, optimizer)
    for e in logs[0]:
        assert e.version == (e.step + 1 if ml.core.tasks.unpack(e.key).kind == Kind.U else max(0, e.step - 1))
    assert replayed(logs[0], ranks, optimizer) == found


@pytest.mark.campaign
def test_many_configurations_repeat_and_replay() -> None:
    for seed in range(200):
        random = np.random.default_rng(seed)
        policy, optimizer = ("delayed_update", "acco")[seed % 2], str(random.choice([*OPTIMIZERS]))
        told = (int(random.integers(1, 5)), optimizer, 2 * int(random.integers(1, 4)))
        found, logs = ran(policy, *told)
        assert ran(policy, *told)[0] == found == ran(policy, *told, alone=True)[0], seed
        assert policy == "acco" or replayed(logs[0], *told) == found, seed


def step_time(policy: str, talk: float) -> float:
    """Per step; F, O and W of a layer take 1 each in each micro-batch."""
    _, graph = recorded()
    cost = ml.CostModel(kinds={"F": 1.0, "O": 1.0, "W": 1.0, "U": 0.1})
    return ml.plan(graph, policy, cost, ml.Machine(4, collective=lambda sizes: talk)).period


def test_long_communication_costs_less_than_under_ddp() -> None:
    for talk in (1.0, 2.0, 5.0):  # of each of three layers, once a step, with ACCO twice
        acco, late, ddp = (step_time(policy, talk) for policy in ("acco", "delayed_update", "barrier"))
        assert late == pytest.approx(acco)
        assert ddp > acco + talk - 1
    assert step_time("acco", 10.0) > step_time("delayed_update", 10.0) + 20, "whose sums take the whole step"


@pytest.mark.parametrize("policy", ["delayed_update", "acco"])
def test_early_updates_are_refused(policy: str) -> None:
    def step(x: Any, y: Any) -> Any:
        for _ in range(2):
            loss = nn.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
        return loss

    model = models.mlp(*SIZES).astype("float64")
    opt = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(Refused, match="the updates of a step must be its last tasks; update once"):
        ml.plan(ml.record(step, *batch(0)[:2]), policy, COST, ml.Machine(2))


@pytest.mark.slow
def test_ranks_learn_the_digits(capsys: Any) -> None:
    flags = ["--model", "mlp", "--parallel", "data", "--ranks", "2", "--micro-batches", "2", "--costs", "analytic"]
    found = run_json(capsys, "compare", *flags, "--schedulers", "barrier,delayed_update,acco,priority", "--epochs", "3",
                     "--lr", "0.2", "--momentum", "0")[1]
    assert found["bit_identical"] is True
    exact, delayed, acco, again = found["arms"]
    assert exact["params_sha256"] == again["params_sha256"]
    assert len({arm["params_sha256"] for arm in (exact, delayed, acco)}) == 3
    assert delayed["accuracy"] > 0.85
    assert acco["accuracy"] > 0.85


def test_a_saved_order_of_delayed_updates_is_checked_and_trained(capsys: Any, tmp_path: Any) -> None:
    name, common = str(tmp_path / "late.csv"), ["--model", "mlp", "--parallel", "data", "--ranks", "2"]
    assert run(capsys, "plan", "--scheduler", "delayed_update", "--costs", "analytic", "--save", name, *common)[0] == 0
    code, out, _ = run(capsys, "check", "--scheduler", "delayed_update", name, *common)
    assert code == 0
    assert "\nvalid: " in out
    own, read = (run_json(capsys, "train", "--scheduler", policy, "--costs", "analytic", "--steps", "3", *common)[1]
                 for policy in ("delayed_update", name))
    assert read["params_sha256"] == own["params_sha256"]
