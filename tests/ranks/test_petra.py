"""PETRA: reversible stages without old weights or activations equal the rule in NumPy, and repeat from their log."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from command_line import refusal, run_json
from helpers import together

import minidl as ml
from minidl import models, nn, optim
from minidl.core.placement import Refused
from minidl.core.tasks import Kind
from minidl.passes.draft import Draft
from minidl.passes.reverse import reverse
from minidl.runtime.executors import DistributedExecutor
from minidl.runtime.version_log import VersionRead, as_lines, drift, from_lines, staleness
from minidl.schedulers import pipeline
from minidl.testing.replay import Replay

BLOCKS, HIDDEN, SHARE, RATE, MOMENTUM, INPUTS, CLASSES = 4, 6, 3, 0.05, 0.9, 5, 4
COST = ml.CostModel.analytic()


def examples(steps: int, micro_batches: int, seed: int = 5) -> list[list[Any]]:
    random = np.random.default_rng(seed)
    return [[part for _ in range(micro_batches) for part in (random.standard_normal((SHARE, INPUTS)),
                                                             random.standard_normal((SHARE, CLASSES)))]
            for _ in range(steps)]


def recorded(micro_batches: int = 8, blocks: int = BLOCKS, hidden: int = HIDDEN, once: bool = False) -> tuple[Any, Any]:
    """A reversible network in float64 and its step; `once`: with one update, not one for each micro-batch."""
    ml.seed(2)
    model = models.create("revnet", features=INPUTS, classes=CLASSES, blocks=blocks, hidden=hidden).astype("float64")
    opt = optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)

    def step(*parts: Any) -> None:
        for i in range(micro_batches):
            with ml.micro_batch(i, i * SHARE):
                nn.MSELoss()(model(parts[2 * i]), parts[2 * i + 1]).backward()
                if not once or i + 1 == micro_batches:
                    opt.step()

    return model, ml.record(step, *examples(1, micro_batches)[0])


def stages_of(graph: Any, ranks: int, blocks: int) -> list[int]:
    """The stage of each unit; a block goes where its sum is."""
    found = pipeline.balanced(graph, COST, ranks).tolist()
    for k in range(blocks):
        found[2 + 4 * k : 6 + 4 * k] = [found[5 + 4 * k]] * 4
    return found


def trained(data: list[list[Any]], ranks: int = 3, **told: Any) -> tuple[list[Any], list[VersionRead]]:
    """The parameters after training on thread ranks, and the log."""
    own = []
    for _ in range(ranks):
        model, graph = recorded(**told)
        plan = ml.plan(graph, "petra", COST, ml.Machine(ranks))
        own.append((model, plan))

    def work(communicator: Any) -> Any:
        model, plan = own[communicator.rank]
        execute = DistributedExecutor(*plan.with_messages, communicator, logged=True)
        for batch in data:
            execute(*batch)
        execute.close()
        held = {id(s.live) for s in execute.program.graph.storages if s.live is not None}
        return {i: p.numpy() for i, p in enumerate(model.parameters()) if id(p.storage) in held}, execute.log.entries

    found = together(ranks, work)
    values = {i: value for own, _ in found for i, value in own.items()}
    return [values[i] for i in sorted(values)], [e for _, entries in found for e in entries]


def check_repeats(seed: int) -> None:
    """Two runs on random ranks, and a replay of the log: equal bits, and the delays of the rule."""
    random = np.random.default_rng(seed)
    ranks = int(random.integers(2, 4))
    told = {"blocks": int(random.integers(ranks + 1, 6)), "hidden": int(random.integers(4, 12)),
            "micro_batches": int(random.integers(2 * ranks, 10))}
    data = examples(3, told["micro_batches"], seed)
    first, log = trained(data, ranks, **told)
    again, _ = trained(data, ranks, **told)
    model, graph = recorded(**told)
    replay = Replay(reverse(replace(Draft.of(graph), reverses=True)).graph,
                    np.array(stages_of(graph, ranks, told["blocks"])))
    for step, batch in enumerate(data):
        replay(tuple(batch), [e for e in from_lines(as_lines(log), "log") if e.step == step])
    for a, b, p in zip(first, again, model.parameters(), strict=True):
        assert a.tobytes() == b.tobytes() == p.numpy().tobytes(), seed
    late = {stage: 2 * (ranks - 1 - stage) for stage in range(ranks)}
    assert {stage: int(found.max()) for stage, found in staleness(log).items()} == late
    assert {stage: int(found.max()) for stage, found in drift(log).items()} == late


def test_runs_repeat_and_replay() -> None:
    check_repeats(0)


@pytest.mark.campaign
def test_many_runs_repeat_and_replay() -> None:
    for seed in range(1, 201):
        check_repeats(seed)


def reference(weights: list[Any], data: list[list[Any]], stage_of: list[int], ranks: int) -> list[Any]:
    """The rule: in each tick every stage runs F of a micro-batch and, on the same weights, the backward of one that is
    2 S ticks older, which computes activations from those that came down; then it updates."""
    values, speed = [w.copy() for w in weights], [np.zeros_like(w) for w in weights]
    batches = [(x, y) for step in data for x, y in zip(step[::2], step[1::2], strict=True)]
    blocks = [[k for k in range(len(stage_of)) if stage_of[k] == s] for s in range(ranks)]
    up: dict[tuple[int, int], Any] = {}
    down: dict[tuple[int, int], Any] = {}
    at = lambda k: 4 + 4 * k  # noqa: E731  the first parameter of a block

    for tick in range(len(batches) + 2 * ranks):
        for s in range(ranks):  # forwards on the weights before this tick's updates
            if 0 <= (i := tick - s) < len(batches):
                x = batches[i][0]
                a, b = up.pop((s, i)) if s else (x @ values[0].T + values[1], x @ values[2].T + values[3])
                for k in blocks[s]:
                    w1, b1, w2, b2 = values[at(k) : at(k) + 4]
                    a, b = b, a + np.maximum(b @ w1.T + b1, 0) @ w2.T + b2
                up[s + 1, i] = a, b
        for s in range(ranks):
            if not 0 <= (i := tick - 2 * (ranks - 1) + s) < len(batches):
                continue
            x, y = batches[i]
            grads: dict[int, Any] = {}
            if s == ranks - 1:
                a, b = up.pop((ranks, i))
                h = np.maximum(a + b, 0)
                out = 2 * (h @ values[-2].T + values[-1] - y) / y.size
                grads |= {len(values) - 2: out.T @ h, len(values) - 1: out.sum(0)}
                da = db = (out @ values[-2]) * (h > 0)
            else:
                a, b, da, db = down.pop((s, i, tick - 1))
            for k in reversed(blocks[s]):
                w1, b1, w2, b2 = values[at(k) : at(k) + 4]
                h = np.maximum(a @ w1.T + b1, 0)
                inner = (db @ w2) * (h > 0)
                grads |= {at(k): inner.T @ a, at(k) + 1: inner.sum(0), at(k) + 2: db.T @ h, at(k) + 3: db.sum(0)}
                a, b, da, db = b - (h @ w2.T + b2), a, db, da + inner @ w1
            if s:
                down[s - 1, i, tick] = a, b, da, db
            else:
                grads |= {0: da.T @ x, 1: da.sum(0), 2: db.T @ x, 3: db.sum(0)}
            for p, g in grads.items():
                speed[p] = MOMENTUM * speed[p] + g
                values[p] = values[p] - RATE * speed[p]
    assert not down
    return values


def test_training_equals_the_papers_rule() -> None:
    data = examples(3, 8)
    model, graph = recorded()
    stage_of = [stages_of(graph, 3, BLOCKS)[5 + 4 * k] for k in range(BLOCKS)]
    assert {*stage_of} == {0, 1, 2}
    found, _ = trained(data)
    before = [p.numpy() for p in model.parameters()]
    for a, b in zip(found, reference(before, data, stage_of, 3), strict=True):
        assert np.abs(a - b).max() <= 1e-12 * np.abs(b).max()
    plain, graph = recorded()
    for batch in data:
        ml.SequentialExecutor(graph)(*batch)
    assert max(np.abs(a - p.numpy()).max() for a, p in zip(found, plain.parameters(), strict=True)) > 1e-5


@pytest.mark.parametrize("once", [False, True])
def test_on_one_stage_it_is_plain_training(once: bool) -> None:
    data = examples(2, 4)
    plain, graph = recorded(4, once=once)
    for batch in data:
        ml.SequentialExecutor(graph)(*batch)
    if once:
        model, graph = recorded(4, once=True)
        execute = ml.SequentialExecutor(reverse(replace(Draft.of(graph), reverses=True)).graph)
        for batch in data:
            execute(*batch)
        found = [p.numpy() for p in model.parameters()]
    else:
        found, _ = trained(data, 1, micro_batches=4)
    for a, p in zip(found, plain.parameters(), strict=True):
        np.testing.assert_allclose(a, p.numpy(), rtol=0, atol=1e-13)


def test_no_stage_keeps_activations_of_its_blocks() -> None:
    _, graph = recorded(once=True, micro_batches=1, blocks=3, hidden=32)
    _, more = recorded(once=True, micro_batches=1, blocks=9, hidden=32)

    def live(graph: Any) -> int:
        """The bytes of activations that a forward makes and a task of the backward pass reads."""
        forward = {b for t in graph if t.kind == Kind.F for b in graph.writes[t.index].tolist()}
        return sum(int(graph.buffer_bytes[b]) for b in forward & {
            b for t in graph if t.kind != Kind.F for b in graph.reads[t.index].tolist()})

    short, long = (live(reverse(replace(Draft.of(g), reverses=True)).graph) for g in (graph, more))
    assert short == long < live(graph) < live(more)
    deep = recorded(8, blocks=9, hidden=32)[1]
    petra, layerpipe2 = (ml.plan(deep, name, COST, ml.Machine(3)).peak_bytes for name in ("petra", "layerpipe2"))
    assert all(a < b for a, b in zip(petra[:2], layerpipe2[:2], strict=True))


def test_what_it_cannot_serve_is_refused_in_one_line(capsys: Any) -> None:
    with pytest.raises(Refused, match="no two reversible blocks in a row"):
        ml.plan(recorded(8, blocks=1)[1], "petra", COST, ml.Machine(2))
    flags = ("train", "--model", "revnet", "--model-arg", "preset=tiny", "--parallel", "pipeline", "--batch-size", "32",
             "--micro-batches", "8", "--steps", "2", "--costs", "analytic", "--scheduler", "petra")
    assert run_json(capsys, *flags, "--ranks", "2")[0] == 0

    refused = partial(refusal, capsys, *flags)
    assert "reversible blocks" in refused("--ranks", "2", "--model", "mlp", "--model-arg", "preset=tiny")
    assert "stages are too many" in refused("--ranks", "7")
