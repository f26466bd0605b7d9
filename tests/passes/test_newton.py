"""DeepPCR's forward pass: Newton's iterations over all layers at once equal the chain, up to rounding."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from command_line import refusal, run_json
from test_sweeps import MLP, POLICIES, RESIDUAL, Mixing, Rows, X, Y, close, compared, depth, recorded

import minidl as ml
from minidl import models, nn, ops
from minidl.core.placement import Refused
from minidl.passes.deeppcr import deeppcr
from minidl.passes.draft import Draft
from minidl.passes.newton import newton

WIDTHS = (12, 8, 6, 8, 7, 8, 8, 5, 8, 6, 4)


class Chain(nn.Module):
    def __init__(self, act: Any = ops.tanh, widths: tuple[int, ...] = WIDTHS) -> None:
        self.layers, self.act = nn.ModuleList([nn.Linear(*pair) for pair in pairwise(widths)]), act

    def forward(self, x: Any) -> Any:
        found = [self.layers[0](x)]
        for layer in [*self.layers][1:]:
            found.append(layer(self.act(found[-1])))
        self.found = found
        return found[-1]


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [Chain, lambda: models.mlp(*WIDTHS)], ids=["tanh", "relu"])
def test_as_many_iterations_as_layers_are_the_chain_up_to_rounding(make: Any, policy: str) -> None:
    expected, found, remark = compared(lambda draft: newton(draft, 7), make, policy)
    assert remark == "activations are inexact in their last bits: 7 Newton iterations over all layers"
    assert close(found, expected, 1e-12)


def activations(iterations: int, act: Any = ops.tanh) -> tuple[Any, list[Any]]:
    """A network, and the outputs of all its layers after so many iterations; 0: of the chain."""
    ml.seed(0)
    model = Chain(act).astype("float64")

    def step(x: Any, y: Any) -> Any:
        nn.cross_entropy(model(x), y).backward()
        return model.found

    graph = ml.record(step, X, Y)
    graph = newton(Draft.of(graph), iterations)[0].graph if iterations else graph
    return model, [z.numpy() for z in ml.SequentialExecutor(graph)(X, Y)]


@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_iterations_follow_newtons_rule(iterations: int) -> None:
    """Against NumPy, which goes from layer to layer; each iteration makes one more layer exact."""
    model, found = activations(iterations)
    weights = [(layer.weight.numpy(), layer.bias.numpy()) for layer in model.layers]
    z = [X @ weights[0][0].T + weights[0][1], *(np.zeros((4, n)) for n in WIDTHS[2:-2])]
    for _ in range(iterations):
        new = z[:1]
        for before, (w, b) in zip(z, weights[1:-2], strict=False):
            step = new[-1] - before
            new.append((np.tanh(before) + (1 - np.tanh(before) ** 2) * step) @ w.T + b)
        z = new
    z = z[:1] + [np.tanh(a) @ w.T + b for a, (w, b) in zip(z, weights[1:-1], strict=True)]
    _, exact = activations(0)
    for mine, wanted in zip(found, z, strict=False):
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-13)
    errors = [float(np.abs(a - b).max()) for a, b in zip(found, exact, strict=True)]
    assert max(errors[: iterations + 2]) < 1e-13
    assert iterations > 1 or errors[3] > 1e-4


def test_linear_layers_need_one_iteration() -> None:
    for mine, wanted in zip(activations(1, lambda x: x)[1], activations(0, lambda x: x)[1], strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("iterations", [1, 3])
def test_on_unlimited_lanes_an_iteration_takes_log2_of_the_layers(iterations: int) -> None:
    _, graph = recorded(lambda: models.mlp(12, *[8] * 18, 4))
    found = newton(Draft.of(graph), iterations)[0].graph
    products, matrices = ([t.name for t in found if f"({what} " in t.label] for what in ("product", "Jacobians"))
    assert depth(found, [*products, *matrices]) == 4 * iterations  # 16 unknown layers
    assert len(products) == iterations * sum(16 - (1 << level) for level in range(4))


def test_micro_batches_have_iterations_of_their_own() -> None:
    expected, found, _ = compared(lambda draft: newton(draft, 3), MLP, micro_batches=2)
    assert close(found, expected, 1e-12)


class Dropping(nn.Module):
    def __init__(self) -> None:
        self.first, self.layers = nn.Linear(12, 8), nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Any) -> Any:
        x = kept = self.first(x)
        for layer in self.layers:
            x = layer(nn.relu(x)) + kept * 0.5
        return x


WIDE = "a layer has 65 units, and products of Jacobians pay only up to 64"


@pytest.mark.parametrize(("make", "why"), [
    (lambda: models.mlp(12, 65, 65, 65, 4), WIDE), (Mixing, "mixes samples"), (RESIDUAL, "not a chain"),
    (Rows, "not a chain"), (Dropping, "not a chain"), (lambda: models.mlp(12, 4), "not a chain")],
    ids=["wide", "sums", "norms", "rows", "skips", "one layer"])
@pytest.mark.parametrize("way", [deeppcr, lambda draft: newton(draft, 2)], ids=["deeppcr", "newton"])
def test_other_networks_are_refused_in_one_line(way: Any, make: Any, why: str) -> None:
    with pytest.raises(Refused, match=why) as caught:
        way(Draft.of(recorded(make)[1]))
    assert "\n" not in str(caught.value)


def test_more_iterations_than_layers_are_refused() -> None:
    """A graph has a task for each, so no number may make it grow without end."""
    with pytest.raises(Refused, match="newton: .*0 unknown layers leave 2 iterations nothing to solve"):
        newton(Draft.of(recorded(lambda: models.mlp(12, 8, 8, 4))[1]), 2)
    for iterations in (0, 4, 10**9):
        with pytest.raises(Refused, match=f"2 unknown layers leave {iterations} iterations nothing to solve"):
            newton(Draft.of(recorded(MLP)[1]), iterations)
    assert newton(Draft.of(recorded(MLP)[1]), 3)[1]


def test_the_command_line_takes_iterations_beside_a_backward_pass(capsys: Any) -> None:
    told = ["train", "--model", "mlp", "--model-arg", "layers=6", "--model-arg", "hidden=8", "--batch-size", "8",
            "--steps", "2", "--costs", "analytic"]
    losses = []
    for more in ([], ["--newton", "4"], ["--newton", "4", "--backward", "deeppcr"], ["--newton", "1"]):
        losses.append((found := run_json(capsys, *told, *more)[1])["loss_last"])
        assert len(found["remarks"]) == len(more) // 2
    np.testing.assert_allclose(losses[1:3], losses[0], rtol=1e-5)
    assert losses[3] != losses[0]
    assert "newton: " in refusal(capsys, "plan", "--model", "gpt", "--newton", "2")
