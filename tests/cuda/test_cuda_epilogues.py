"""Epilogues of products on CUDA without a GPU: the gradient of a bias beside a weight's, slopes of activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cuda_runtime
import ml_dtypes
import numpy as np
import pytest
from helpers import bits, classified, kernels

import minidl as ml
from minidl import nn, optim
from minidl.autograd.tape import Tape, use
from minidl.core.graph import View
from minidl.devices.cuda import products
from minidl.fusion import RULES, fused
from minidl.kernels import KERNELS, cuda
from minidl.kernels.linear import apart, inside, product
from minidl.kernels.small_product import LARGEST
from minidl.runtime.checking import random_schedule
from minidl.runtime.executors import GraphExecutor, StreamExecutor

TYPES = {"float32": 1e-5, "bfloat16": 2e-2}
M, K, N = 48, 40, 56


def on_device(device: Any, values: Any) -> tuple[Any, Any]:
    """(memory, array) with these values."""
    memory = device.allocate(max(values.nbytes, 1))
    array = device.array(memory, View(0, values.shape, tuple(s // values.itemsize for s in values.strides), 0,
                                      str(values.dtype)))
    device.write(array, values)
    return memory, array


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("act", ["sums", "gelu_tanh_grad"])
def test_an_epilogue_of_the_library_is_what_launches_would_do(act: str, dtype: str) -> None:
    rng, device = np.random.default_rng(0), cuda_runtime.device(1)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    values = [rng.standard_normal(s).astype(kind) for s in ((M, K), (K, N), (M, N), (M,), (M, N))]
    held = [on_device(device, v) for v in values]
    a, b, out, sums, seen = (array for _, array in held)
    p = cuda.Product(a, b, out, sums=sums) if act == "sums" else cuda.Product(a, b, out, act=act, seen=seen)
    assert inside(p)
    library = device._products()
    names = library._wholes(p, True)
    assert len(names) == products.EPILOGUED
    wide = [v.astype("float64") for v in values]
    expected = wide[0] @ wide[1]
    expected = expected if act == "sums" else KERNELS[act].reference(np, wide[4], expected)
    for name in names:
        library._call(p, library._problem(apart(p)[0], True), name, device.main, True)()
        np.testing.assert_allclose(device.read(out).astype("float64"), expected, rtol=TYPES[dtype],
                                   atol=TYPES[dtype] * np.abs(expected).max())
        if act == "sums":
            np.testing.assert_allclose(device.read(sums).astype("float64"), wide[0].sum(1), rtol=TYPES[dtype],
                                       atol=TYPES[dtype] * 10)


def test_where_the_library_has_none() -> None:
    a, b, out = (np.zeros(s, "f") for s in ((M, K), (K, N), (M, N)))
    sums, seen = np.zeros(M, "f"), np.zeros((M, N), "f")
    assert inside(cuda.Product(a, b, out, sums=sums))
    assert not inside(cuda.Product(a, b, out, sums=sums, bias=np.zeros(N, "f")))
    assert not inside(cuda.Product(*(x.astype("float64") for x in (a, b, out)), sums=sums.astype("float64")))
    assert not inside(cuda.Product(a, b, out, act="relu_grad", seen=seen))
    assert not inside(cuda.Product(a, b[:, :50], out[:, :50], act="gelu_tanh_grad", seen=seen[:, :50]))
    device = cuda_runtime.device()
    gelu = cuda.Product(a, b, out, act="gelu_tanh_grad", seen=seen)
    library = device._products()
    assert library._within(gelu, True)
    assert not library._within(gelu, False), "strict float32 takes our own GELU"


def test_an_algorithm_that_the_library_refuses_is_left_out(monkeypatch) -> None:
    device = cuda_runtime.device()
    library = device._products()
    held = [on_device(device, np.zeros(s, "f")) for s in ((M, K), (K, N), (M, N), (M,))]
    p = cuda.Product(*(array for _, array in held[:3]), sums=held[3][1])
    named = library._named

    def refuse(problem: Any) -> Any:
        if "BGRADB" in problem.key:
            raise RuntimeError("cuBLASLt refuses it")
        return named(problem)

    monkeypatch.setattr(library, "_named", refuse)
    assert library._wholes(p, False) == []
    library.bind(replace(p), device.main, False)()


def test_large_products_stay_whole() -> None:
    rows, columns = 256, LARGEST // 128
    a, b, out = (np.zeros(s, "f") for s in ((rows, 64), (64, columns), (rows, columns)))
    (call,) = product(a, b, out, sums=np.zeros(rows, "f"))
    assert call.sums is not None


@pytest.mark.few(1)
@pytest.mark.parametrize("tf32", [False, True])
def test_slopes_are_in_products_and_all_orders_have_the_same_bits(tf32: bool) -> None:
    """Linear layers with relu and GELU between them, of sizes that the library's epilogues take."""
    found, rng = [], np.random.default_rng(0)
    batches = [(rng.standard_normal((8, 12)).astype("f"), rng.integers(0, 3, 8)) for _ in range(3)]
    for seed, rules in ((0, ()), (1, RULES), (2, RULES)):
        device = cuda_runtime.device(seed)
        device.tf32 = tf32
        with use(Tape(device)):
            ml.seed(0)
            model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 16), nn.GELU("tanh"), nn.Linear(16, 3))
            step = classified(model, optim.SGD(model.parameters(), 0.1))
            graph = fused(ml.record(step, *batches[0]), device, rules)
        count = kernels(graph)
        assert count["matmul_slope"] == (2 if rules else 0)
        assert bool(rules) != bool(count["relu_grad"] + count["gelu_tanh_grad"])
        run = (StreamExecutor if seed == 1 else GraphExecutor)(
            graph, random_schedule(graph, 2, np.random.default_rng(seed)), device=device)
        losses = [float(run(*batch)) for batch in batches]
        found.append((losses, bits(*model.parameters())))
    assert found[1] == found[2]
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
