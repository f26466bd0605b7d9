"""Experts: the CUDA forms, run on the CPU, against their references in float64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from cuda_agree import near, written
from forms import blank, exact

import minidl as ml
from minidl import models, nn, optim
from minidl.autograd.tape import Tape, use
from minidl.runtime.executors import GraphExecutor, StreamExecutor

RTOL = {"float16": 4e-3, "float32": 3e-6, "float64": 1e-13}


def check(name: str, dtype: str, *reads: Any, **constants: Any) -> list[Any]:
    """The reference's numbers, and the same bits in another order of threads. Returns what the reference makes."""
    wanted = [np.ascontiguousarray(w) for w in exact(name, reads, **constants)]
    found, _ = written(name, [r.astype(dtype) if r.dtype.kind == "f" else r for r in reads], blank(wanted, dtype),
                       **constants)
    near(found, wanted, RTOL[dtype])
    return wanted


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", list(RTOL))
@pytest.mark.parametrize(("tokens", "experts", "k", "capacity", "width"), [
    (70, 4, 2, 0, 40), (70, 4, 2, 20, 3), (1, 1, 1, 0, 8), (5, 40, 3, 1, 1100), (0, 2, 1, 0, 4)])
def test_cuda_forms(tokens: int, experts: int, k: int, capacity: int, width: int, dtype: str) -> None:
    rng = np.random.default_rng(tokens)
    p = np.float16(rng.integers(1, 9, (tokens, experts)) / 8)  # with ties
    bias = np.float16(rng.integers(0, 3, experts) / 8)
    for more in ([], [bias]):
        gate, choice, place, counts, load = check("route", dtype, p, *more, top_k=k, capacity=capacity,
                                                  normalize=bool(more))
        check("route_grad", dtype, p, gate, choice, np.float16(rng.standard_normal(gate.shape)), normalize=bool(more))
    check("count_load", dtype, load, counts, np.ones((2, experts), np.int64))
    check("move_bias", dtype, load, np.float16(bias), rate=0.125)
    x = np.float16(rng.standard_normal((tokens, width)))
    rows, = check("dispatch", dtype, x, place)
    check("dispatch", dtype, x, place, np.float16(gate))
    check("combine", dtype, rows, place)
    check("combine", dtype, rows, place, np.float16(gate))
    check("gate_grad", dtype, x, rows, place)


@pytest.mark.parametrize("dtype", list(RTOL))
@pytest.mark.parametrize(("inputs", "outputs"), [(40, 70), (3, 5), (64, 32)])
@pytest.mark.parametrize("counts", [[[40, 0, 3, 1]], [[5, 0, 33], [0, 0, 2], [1, 64, 0]], [[0, 0]], [[9]]])
def test_grouped_products(counts: list[list[int]], inputs: int, outputs: int, dtype: str) -> None:
    """Rows after the last one are read by nobody: here they are infinite."""
    rng, many = np.random.default_rng(0), np.array(counts, np.int64)
    x, dy = (rng.integers(-2, 3, (many.sum() + 3, n)) / 4 for n in (inputs, outputs))
    x[many.sum() :] = dy[many.sum() :] = np.inf
    w, b = rng.integers(-2, 3, (many.shape[1], outputs, inputs)) / 4, rng.integers(-2, 3, (many.shape[1], outputs)) / 4
    check("grouped_linear", dtype, many, x, w, b)
    check("grouped_linear", dtype, many, x, w)
    check("grouped_linear", dtype, many, x, w, b, gelu=True)
    check("grouped_linear_input_grad", dtype, many, dy, w)
    check("grouped_linear_input_grad", dtype, many, dy, w, x)
    check("grouped_linear_weight_grad", dtype, many, x, dy, bias=True)
    check("grouped_linear_weight_grad", dtype, many, x, dy, bias=False)


def losses(capacity: int, low: str | None, captured: bool = False) -> list[float]:
    """The losses of a few steps on the tape's device."""
    ml.seed(0)
    more = {"capacity": capacity} if capacity else {}
    model = models.create("moe_gpt", preset="tiny", dropout=0.0, layers=1, **more)
    opt = optim.SGD(model.parameters(), 0.1)
    ids = np.random.default_rng(0).integers(1, 256, (2, 17))

    def step(x: Any, y: Any) -> Any:
        logits = model(x)
        loss = model.loss(nn.cross_entropy(logits.reshape(-1, 256), y.reshape(-1)), logits)
        loss.backward()
        opt.step()
        return loss

    with ml.autocast(low) if low else nullcontext():
        graph = ml.record(step, ids[:, :-1], ids[:, 1:])
    run = (GraphExecutor if captured else StreamExecutor)(graph, ml.plan(graph, "multi_stream").schedule)
    found = [float(run(ids[:, :-1], ids[:, 1:])) for _ in range(3)]
    run.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("captured", "capacity"), [(False, 0), (True, 12)])
def test_a_network_trains_on_streams_and_in_a_graph(there: Any, captured: bool, capacity: int) -> None:
    """The CPU's numbers, nearly so in 16 bits. No launch depends on how many rows an expert has."""
    wanted = losses(capacity, None)
    for low, apart in ((None, 1e-5), ("bfloat16", 0.05), ("float16", 0.01)):
        with use(Tape(there(1))):
            np.testing.assert_allclose(losses(capacity, low, captured), wanted, rtol=apart)


def test_scores_that_are_not_numbers_set_the_flag(there: Any) -> None:
    device = there(1)
    with use(Tape(device)), ml.no_grad():
        layer, x = nn.MoE(4, 8, 2, 1), np.ones((3, 4), np.float32)
        graph = ml.record(layer, x)
        run = StreamExecutor(graph, ml.plan(graph, "in_order").schedule)
        for value, bad in ((1.0, False), (np.nan, True)):
            run(x * np.float32(value))
            assert device.not_finite() == bad
