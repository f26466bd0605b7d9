"""Dithered gradients: their distribution, their bits under every schedule and on ranks, and who is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from command_line import reported
from forms import on_cpu, reference
from helpers import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

import minidl as ml
from minidl import models, nn, optim
from minidl.core.tasks import Kind, parse_task, task_name
from minidl.kernels import KERNELS
from minidl.passes.rewrite import coarsen

CELLS = 4096  #: values of u, in the middle of equal parts of [0, 1): means over them are exact to 1 / CELLS


def rounded(delta: np.ndarray, s: float) -> tuple[np.ndarray, float]:
    """q (elements, CELLS) of each element for each u, and the step."""
    u = np.broadcast_to((np.arange(CELLS) + 0.5) / CELLS, (len(delta), CELLS))
    x = np.repeat(delta[:, None], CELLS, axis=1)
    return KERNELS["dither"].reference(np, x, u, s=s), s * float(x.std())


@settings(max_examples=drawn(40), deadline=None)
@given(st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=9), st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0]))
def test_the_mean_is_the_gradient_and_the_variance_as_published(values: list[float], s: float) -> None:
    delta = np.array(values)
    q, step = rounded(delta, s)
    if step < 1e-6:
        return
    share = delta / step - np.floor(delta / step)
    assert np.abs(q.mean(1) - delta).max() <= step / CELLS * 1.01
    assert np.abs(q.var(1) - step**2 * share * (1 - share)).max() <= 3 * step**2 / CELLS
    assert np.abs((q == 0).mean(1) - np.maximum(0, 1 - np.abs(delta) / step)).max() <= 1.01 / CELLS
    assert np.abs(q / step - np.round(q / step)).max() < 1e-6


@pytest.mark.parametrize(("s", "zeros"), [(1, 0.369), (2, 0.610), (4, 0.801), (8, 0.900)])
def test_a_gaussian_gradient_has_the_published_share_of_zeros(s: float, zeros: float) -> None:
    random = np.random.default_rng(0)
    q = KERNELS["dither"].reference(np, random.standard_normal(400_000), random.random(400_000), s=float(s))
    assert (q == 0).mean() == pytest.approx(zeros, abs=0.004)


def test_equal_elements_have_no_spread_and_stay() -> None:
    x, u = np.full((3, 2), 0.75), np.random.default_rng(0).random((3, 2))
    for (q,) in (on_cpu("dither", [x, u], [np.zeros((3, 2))], s=4.0), reference("dither", [x, u], s=4.0)):
        assert np.array_equal(q, x)


def trained(s: float, policy: str = "in_order", parts: int = 2) -> tuple[Any, bytes]:
    """The graph, and the bits of losses and parameters after three steps."""
    ml.seed(3)
    model, random = models.mlp(12, 16, 16, 5), np.random.default_rng(0)
    opt = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(*inputs: Any) -> Any:
        for i in range(parts):
            with ml.micro_batch(i, 4 * i):
                loss = nn.cross_entropy(nn.dropout(model(inputs[2 * i]), 0.2), inputs[2 * i + 1])
                with ml.dither(s):
                    loss.backward()
        opt.step()
        return loss

    def batch() -> list[Any]:
        return [a for _ in range(parts) for a in (random.normal(size=(4, 12)).astype("f"), random.integers(0, 5, 4))]

    graph = ml.record(step, *batch())
    run = ml.StreamExecutor(graph, ml.plan(graph, policy).schedule)
    losses = [run(*batch()).numpy().tobytes() for _ in range(3)]
    run.close()
    return graph, b"".join([*losses, *(p.numpy().tobytes() for p in model.parameters())])


def test_no_step_is_backprop_in_bits_and_has_no_task() -> None:
    graph, bits = trained(0.0)
    assert not (graph.kind == Kind.Q).any()
    with ml.dither(5.0):  # an inner context has the last word
        assert trained(0.0)[1] == bits != trained(2.0)[1]


@pytest.mark.parametrize("policy", ["multi_stream", "multi_region"])
def test_every_order_rounds_alike(policy: str) -> None:
    assert trained(2.0, policy)[1] == trained(2.0)[1]


def test_q_lies_between_the_gradient_and_its_readers() -> None:
    graph = trained(2.0)[0]
    for i in range(2):
        readers = {graph.name(t) for t in graph.succs[graph[f"2Q{i}"].index].tolist()}
        assert {f"2O{i}", f"2W{i}"} <= readers
        assert graph[f"0Q{i}"].writes
    assert task_name(parse_task("4Q0")) == "4Q0"
    coarse, group = coarsen(graph, np.minimum(graph.unit // 4, 1))
    kinds = {graph.name(t): Kind(coarse.kind[group[t]]) for t in np.flatnonzero(graph.kind == Kind.Q).tolist()}
    assert kinds["4Q0"] == Kind.O  # its stage passes a gradient on, which reads it
    assert kinds["0Q0"] == Kind.W  # only its W reads it


FLAGS = ("--model", "mlp", "--model-arg", "preset=tiny", "--batch-size", "16", "--steps", "3", "--costs", "analytic",
         "--dither", "2")


def test_ranks_round_as_one_process(capsys: Any) -> None:
    def found(*flags: str) -> dict[str, Any]:
        return reported(capsys, "train", *FLAGS, *flags)

    alone = found("--micro-batches", "4")
    for more in (("--scheduler", "multi_stream"), ("--parallel", "pipeline", "--ranks", "2", "--scheduler", "zb_h1"),
                 ("--parallel", "pipeline", "--ranks", "4", "--scheduler", "one_f_one_b")):
        assert found("--micro-batches", "4", *more)["params_sha256"] == alone["params_sha256"]
    data = [found("--micro-batches", "2", "--parallel", "data", "--ranks", "2", "--scheduler", name)
            for name in ("priority", "barrier")]
    grid = found("--micro-batches", "2", "--parallel", "pipeline", "--ranks", "2", "--scheduler", "zb_h1", "--replicas",
                 "2")
    assert len({run["params_sha256"] for run in (*data, grid)}) == 1
    assert 0 < alone["dither"]["zeros_before"] < alone["dither"]["zeros"] < 1
    assert 0 < alone["dither"]["skipped_before"] < alone["dither"]["skipped"] < 1
    assert grid["dither"]["layers"]


def test_an_eager_pass_counts_zeros_and_multiply_adds() -> None:
    ml.seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), ml.array(np.eye(4, 6, dtype="f"))
    with ml.dither(4.0) as found:
        nn.cross_entropy(model(x), ml.array(np.arange(4) % 3)).backward()
    last, first = found.layers
    assert (last["elements"], last["multiply_adds"]) == (12, 2 * 4 * 8 * 3)  # O and W
    assert (first["elements"], first["multiply_adds"]) == (32, 4 * 6 * 8)  # W alone
    both = found.as_json()
    assert both["zeros"] == round((last["zeros"] + first["zeros"]) / 44, 4)
    assert both["skipped"] == round((last["zeros"] * 16 + first["zeros"] * 6) / (192 + 192), 4)
    assert both["zeros_before"] < both["zeros"]


@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
def test_a_recurrent_layer_is_refused(cell: str) -> None:
    net = getattr(nn, cell)(4, 5)
    out = net(ml.array(np.zeros((2, 3, 4), "f")))
    with ml.dither(1.0), pytest.raises(RuntimeError, match="within one kernel.*without dither"):
        (out[0] if isinstance(out, tuple) else out).sum().backward()


@pytest.mark.parametrize("s", [-1.0, float("inf"), float("nan"), "2", None, True])
def test_a_step_is_a_number_of_at_least_0(s: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"dither is {s!r};")), ml.dither(s):
        pass
