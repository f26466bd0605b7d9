"""The kernel for small products against NumPy in float64, run on the CPU; and among the candidates of the tuner."""

from __future__ import annotations

import cuda_runtime
import ml_dtypes
import numpy as np
import pytest
from cuda_on_cpu import run
from gpu_steps import equal, trained
from helpers import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.core.graph import View
from minidl.devices.cuda import clock, products
from minidl.devices.cuda.tuner import Tuner
from minidl.kernels import KERNELS, cuda
from minidl.kernels.linear import apart, product
from minidl.kernels.small_product import ACTS, DEEPEST, LARGEST, fits, small_product
from minidl.runtime.executors import GraphExecutor, SequentialExecutor, StreamExecutor

DTYPES = {"float32": 2e-6, "float64": 1e-14, "float16": 2e-3, "bfloat16": 1e-2}


def operand(draw, rng, lead, r, c, dtype):
    """A matrix, or several, with rows or columns in one piece, gaps between them, steps of two, or repeated."""
    gap = draw(st.integers(0, 3))
    x = rng.standard_normal((*lead, r + gap, c + gap)).astype(dtype)[..., :r, :c]
    if draw(st.booleans()):
        x = rng.standard_normal((*lead, c + gap, r + gap)).astype(dtype)[..., :c, :r].swapaxes(-1, -2)
    if draw(st.integers(0, 4)) == 0:
        x = np.repeat(x, 2, axis=-1)[..., ::2]
    if lead and draw(st.booleans()):
        x = np.broadcast_to(x[:1], x.shape)
    return x


@settings(max_examples=drawn(60), deadline=None)
@given(st.data())
def test_small_products_of_all_layouts(data):
    """Edges of tiles, gaps, strides, batches, types, and everything inside; in two orders of threads with equal
    bits."""
    draw = data.draw
    dtype = np.dtype(ml_dtypes.bfloat16 if (name := draw(st.sampled_from(list(DTYPES)))) == "bfloat16"
                     else name)
    m, n, k = (draw(st.sampled_from([1, 2, 15, 16, 17, 33, 40])) for _ in range(3))
    k = draw(st.sampled_from([k, 63, 64, 65, 130]))
    lead = draw(st.sampled_from([(), (), (3,), (2, 2)]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    a, b = operand(draw, rng, lead, m, k, dtype), operand(draw, rng, lead, k, n, dtype)
    if len(lead) == 2:
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)  # one step from matrix to matrix
    bias = rng.standard_normal(2 * n).astype(dtype)[:n] if draw(st.booleans()) else None
    sums = np.full(m, np.nan, dtype) if not lead and draw(st.booleans()) else None
    accumulate, act = draw(st.booleans()), draw(st.sampled_from(ACTS))
    seen = rng.standard_normal((*lead, m, n + 2)).astype(dtype)[..., :n] if act.endswith("_grad") else None
    before = rng.standard_normal((*lead, m, n + 2)).astype(dtype)
    found = []
    for seed in (0, 7):
        whole = before.copy()
        p = cuda.Product(a, b, whole[..., :n], bias, accumulate, act, sums, seen=seen)
        assert fits(p)
        run(small_product(p), seed)
        found.append(whole.tobytes() + (b"" if sums is None else sums.tobytes()))
        assert whole[..., n:].tobytes() == before[..., n:].tobytes(), "beside the result"
    wide = [x.astype("float64") for x in (a, b)]
    expected = wide[0] @ wide[1] + (0 if bias is None else bias.astype("float64"))
    expected = expected + (before[..., :n].astype("float64") if accumulate else 0)
    expected = np.maximum(expected, 0) if act == "relu" else expected
    expected = expected if seen is None else KERNELS[act].reference(np, seen.astype("float64"), expected)
    terms = np.abs(wide[0]) @ np.abs(wide[1]) + 5
    assert (np.abs(whole[..., :n].astype("float64") - expected) <= DTYPES[name] * terms).all()
    if sums is not None:
        assert (np.abs(sums.astype("float64") - wide[0].sum(-1)) <= DTYPES[name] * (np.abs(wide[0]).sum(-1) + 1)).all()
    assert found[0] == found[1]


def test_what_is_not_finite_stays_where_it_is():
    """Beyond the edges of a and b nothing is read; relu lets NaN pass."""
    a, b = np.ones((18, 70), "float32"), np.ones((70, 20), "float32")
    a[17, 69], b[3, 19] = np.nan, -np.inf
    out = np.empty((18, 20), "float32")
    run(small_product(cuda.Product(a, b, out, act="relu")))
    expected = np.full((18, 20), 70.0)
    expected[:, 19], expected[17] = 0, np.nan
    np.testing.assert_array_equal(out, expected)


def test_which_products_are_small():
    def of(m, n, k, lead=(), **more):
        return cuda.Product(np.empty((*lead, m, k)), np.empty((*lead, k, n)), np.empty((*lead, m, n)), **more)

    assert fits(of(128, 128, DEEPEST))
    assert fits(of(LARGEST, 1, 1))
    assert not fits(of(128, LARGEST // 128 + 1, 4))
    assert not fits(of(4, 4, DEEPEST + 1))
    assert not fits(of(4, 4, 0))
    assert not fits(of(0, 4, 4))
    assert fits(of(4, 4, 4, (70000,)))
    assert small_product(of(4, 4, 4, (70000,))).blocks == (1, 1, 65535)
    assert not fits(of(4, 4, 4, (2,), sums=np.empty(4))), "of several matrices"
    assert not fits(of(4, 4, 4, bias=np.empty(4, "float32")))
    assert not fits(cuda.Product(np.empty((4, 4)), np.empty((4, 4)), np.empty((4, 4)).T)), "a result by columns"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_small_product_is_whole_and_a_large_one_is_taken_apart(dtype):
    """With equal numbers."""
    rng = np.random.default_rng(0)
    for m, n, k in ((5, 6, 7), (300, 200, 3)):
        a, b, bias = (rng.standard_normal(s).astype(dtype) for s in ((m, k), (k, n), (n,)))
        outs = []
        for taken in (lambda calls: calls, lambda calls: [c for call in calls for c in (
                apart(call) if isinstance(call, cuda.Product) else [call])]):
            out, sums = np.empty((m, n), dtype), np.full(m, np.nan, dtype)
            calls = product(a, b, out, bias, act="relu", sums=sums)
            assert (len(calls) == 1) == (m == 5)
            for call in taken(calls):
                run(call)
            outs.append(np.append(out, sums))
        np.testing.assert_allclose(*outs, rtol=1e-5)


@pytest.fixture
def device(cache):
    return cuda_runtime.device()


def arrays(device, dtype="float32", m=5, n=6, k=7, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for shape in ((m, k), (k, n), (m, n), (n,), (m,)):
        size = int(np.prod(shape))
        memory = device.allocate(size * np.dtype(dtype).itemsize)
        array = device.array(memory, View(0, shape, (*shape[1:], 1), 0, dtype))
        array.memory = memory
        device.write(array, rng.standard_normal(shape).astype(dtype))
        found.append(array)
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("choice", [products.OURS, "cuBLASLt"])
def test_whichever_is_chosen_computes_all_of_it(device, monkeypatch, choice, dtype):
    """Bias, relu and the sums, by one launch of ours, or by cuBLASLt's and others."""
    library = device._products()

    def choose(key, candidates, usable):
        names = [name for name, _ in candidates()]
        assert names[1] == products.OURS
        assert usable(products.OURS)
        return products.OURS if choice == products.OURS else names[0]

    monkeypatch.setattr(library.tuner, "choose", choose)
    a, b, out, bias, sums = arrays(device, dtype)
    call = device._thunk(cuda.Product(a, b, out, bias, act="relu", sums=sums), device.main)
    issued = device.driver.issued
    call()
    launches = device.driver.issued - issued
    assert (launches == 1) == (choice == products.OURS)
    a, b, bias = (device.read(x).astype("float64") for x in (a, b, bias))
    np.testing.assert_allclose(device.read(out), np.maximum(a @ b + bias, 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(device.read(sums), a.sum(1), rtol=1e-5, atol=1e-6)


def test_our_kernel_is_timed_beside_the_librarys_and_kept(device, monkeypatch):
    """Under a key of its own, so that a choice among cuBLASLt's alone stays as it was."""
    library, keys = device._products(), []
    choose = library.tuner.choose
    monkeypatch.setattr(library.tuner, "choose", lambda key, *rest: keys.append(key) or choose(key, *rest))
    a, b, out, bias, sums = arrays(device)
    whole = cuda.Product(a, b, out, bias, sums=sums)
    monkeypatch.setattr(clock, "side_by_side", lambda driver, stream, calls: [2.0, 1.0, *(3.0 for _ in calls[2:])])
    for small in (True, False, True):
        device.small_products = small
        device._thunk(whole, device.main)
    assert len(keys) == 2, "one choice for each"
    assert keys[0][: len(keys[1])] == keys[1]
    assert library._chosen[keys[0]] == products.OURS
    assert library._chosen[keys[1]] != products.OURS, "the second of cuBLASLt's"
    other = cuda_runtime.device(1)
    a, b, out, bias, sums = arrays(other)
    monkeypatch.setattr(other._products().tuner, "_time", lambda *_: pytest.fail("it is chosen again"))
    other._thunk(cuda.Product(a, b, out, bias, sums=sums), other.main)()
    np.testing.assert_allclose(other.read(sums), other.read(a).sum(1), rtol=1e-5)


def test_steps_of_our_kernel_have_equal_bits_in_every_executor(device, monkeypatch):
    """Where it is chosen for each product for which it can be."""

    def choose(self, key, candidates, usable):
        names = [name for name, _ in candidates()]
        return products.OURS if products.OURS in names else names[0]

    monkeypatch.setattr(Tuner, "choose", choose)
    found = [trained(device, kind, steps=3) for kind in (SequentialExecutor, StreamExecutor, GraphExecutor)]
    assert products.OURS in device._products()._chosen.values()
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])
