"""Attention over long sequences keeps no probabilities; it computes them again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from any_order import same_in_any_order

import minidl as ml
from minidl import models, nn, ops, optim, schedulers
from minidl.core.tasks import Kind
from minidl.devices.device import CPU
from minidl.kernels import flash_attention


def kernels(graph: Any, kind: Kind) -> set[str]:
    return {launch.kernel for task in graph if task.kind == kind for launch in task.launches}


def results(shapes: tuple[tuple[int, ...], ...], causal: bool, dropout: float, masked: bool = False,
            offset: int = 0) -> list[Any]:
    """The output and the gradients toward query, key and value, in float64."""
    ml.seed(0)
    rng = np.random.default_rng(0)
    q, k, v = (nn.Parameter(rng.standard_normal(shape)) for shape in shapes)
    mask = None
    if masked:  # all of the first sample's keys are padding
        mask = rng.integers(0, 2, k.shape[::2])
        mask[:1] = 0
    y = ops.attention(q, k, v, None if mask is None else ml.array(mask), causal=causal, dropout=dropout, offset=offset)
    (y * ml.array(rng.standard_normal(y.shape))).sum().backward()
    return [y.numpy(), *(t.grad.numpy() for t in (q, k, v))]


PLAIN = (((2, 3, 9, 4), (2, 3, 8, 4), (2, 3, 8, 5)), ((1, 2, 9, 3), (1, 2, 4, 3), (1, 2, 4, 3)),
         ((2, 1, 5, 3), (2, 1, 12, 3), (2, 1, 12, 1)), ((0, 2, 9, 3),) * 3)
MASKED = ((3, 3, 9, 4), (3, 3, 12, 4), (3, 3, 12, 5))
#: shapes, whether it is causal, whether keys are masked, and the offset
CASES = [*((shapes, causal, False, 0) for shapes in PLAIN for causal in (False, True)),
         (MASKED, False, True, 0), (MASKED, True, True, 0), (MASKED, True, False, 3), (MASKED, True, True, 2)]


@pytest.mark.few(2)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(("shapes", "causal", "masked", "offset"), CASES)
def test_it_equals_attention_that_keeps_its_probabilities(shapes, causal, masked, offset, dropout, monkeypatch):
    """The same elements are dropped; a query that sees no key has zeros."""
    kept = results(shapes, causal, dropout, masked, offset)
    assert not masked or not kept[0][0].any()
    monkeypatch.setattr(CPU, "most_scores", 0)
    monkeypatch.setattr(flash_attention, "BLOCK", 4)
    for found, wanted in zip(results(shapes, causal, dropout, masked, offset), kept, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-13)


def made(length: int = 300) -> Any:
    ml.seed(0)
    model = models.create("gpt", vocabulary=16, length=length, width=16, heads=2, layers=2)
    opt = optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any, y: Any) -> Any:
        loss = nn.cross_entropy(model(x).reshape(-1, 16), y.reshape(-1))
        loss.backward()
        opt.step()
        return loss

    return step, model.parameters()


def tokens(length: int) -> list[Any]:
    return [np.random.default_rng(1).integers(0, 16, (1, length))] * 2


def test_every_order_has_the_bits_of_the_eager_step():
    assert "flash_attention" in kernels(ml.record(made()[0], *tokens(300)), Kind.F)
    same_in_any_order(made, [tokens(300)], [0])


def test_the_planned_peak_grows_with_the_length_and_not_with_its_square():
    peaks = []
    for length in (1024, 2048):
        peaks.append(schedulers.plan(ml.record(made(length)[0], *tokens(length)), "in_order").peak_bytes[0])
    assert peaks[1] < 2.2 * peaks[0]


def test_what_it_does_not_serve_keeps_its_probabilities(monkeypatch):
    monkeypatch.setattr(CPU, "most_scores", 0)

    def step(x: Any) -> Any:
        return ops.attention(x, x, x, causal=True, dropout=0.5)

    graph = ml.record(step, np.ones((1, 1, 5, 2), np.float32))
    assert not any("flash" in name for name in kernels(graph, Kind.F))
