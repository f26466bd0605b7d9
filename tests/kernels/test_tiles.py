"""Products by tiles are close to the exact ones, and bit-identical to a part of a larger product."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from forms import blank, exact, on_cpu
from helpers import bits

from minidl.kernels import KERNELS, linear, tiles, vectors

pytestmark = [pytest.mark.may_skip, pytest.mark.skipif(not tiles.AVX2, reason="this processor has no AVX2")]


@pytest.fixture(autouse=True)
def all_products_may_have_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AVX2 alone, products of some shapes are the library's; here all have tiles."""
    monkeypatch.setattr(tiles, "_way", tiles._way if tiles.WIDE else tiles._way_zen)
    monkeypatch.setattr(tiles, "WIDE", True)


def matrices(m: int, k: int, n: int) -> Any:
    """Operands of the three products of a layer: rows times rows, rows times columns, columns times columns."""
    random = np.random.default_rng(m * k + n)
    a, b = (random.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
    yield a, np.ascontiguousarray(b.T).T
    yield a, b
    yield np.ascontiguousarray(a.T).T, b


def bound(a: Any, b: Any, y: Any, more: Any = None, low: float = -np.inf) -> Any:
    return tiles._bound(tiles._steps(a, b, y, more), a, b, y, more, low, tiles.NONE, -1, 0, 0, False)


def made(a: Any, b: Any, **given: Any) -> Any:
    y = np.full((len(a), b.shape[1]), np.nan, np.float32)
    call = tiles.product(a, b, y, **given)
    assert call is not None
    call()
    return y


@pytest.mark.parametrize("shape", [(64, 128, 300), (65, 384, 97), (16, 130, 1100), (1100, 67, 48), (133, 16, 1009),
                                   (600, 200, 18)])
def test_products_are_close_to_exact_ones_and_keep_their_borders(shape: tuple[int, int, int]):
    for a, b in matrices(*shape):
        bias = np.linspace(-1, 1, b.shape[1], dtype=np.float32)
        exact = a.astype(float) @ b.astype(float)
        wide = np.full((len(a) + 1, b.shape[1] + 5), np.nan, np.float32)
        call = tiles.product(a, b, wide[:-1, :-5])
        assert call is not None
        call()
        assert np.abs(wide[:-1, :-5] - exact).max() < 1e-5 * np.abs(exact).max()
        assert np.isnan(wide[-1]).all()
        assert np.isnan(wide[:, -5:]).all()
        assert np.allclose(made(a, b, more=bias, low=0.0), np.maximum(exact + bias, 0), atol=1e-5 * np.abs(exact).max())


def test_more_products_than_a_tile_adds_up_are_added_in_blocks():
    for a, b in (*matrices(70, 1000, 100),)[:2]:
        exact = a.astype(float) @ b.astype(float)
        assert np.linalg.norm(made(a, b) - exact) < 1e-6 * np.linalg.norm(exact)


def test_any_rows_and_columns_have_the_bits_of_the_whole():
    for a, b in matrices(200, 300, 210):
        whole = made(a, b)
        assert (made(a[30:141], b) == whole[30:141]).all()
        assert (made(a[:61], b[:, 7:180]) == whole[:61, 7:180]).all()


WAYS = tiles.TILED, tiles.STREAMED, tiles.TURNED, tiles.PACKED


@pytest.mark.parametrize("shape", [(40, 900, 700), (700, 900, 40), (64, 400, 1024), (130, 130, 130), (30, 50, 2300),
                                   (600, 900, 30)])
def test_all_ways_of_a_product_have_the_same_bits(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch):
    for a, b in matrices(*shape):
        bias, whole = np.linspace(-1, 1, b.shape[1], dtype=np.float32), np.random.default_rng(0).random(
            (len(a), b.shape[1]), np.float32)
        found = []
        for way in WAYS:
            with monkeypatch.context() as patch:
                patch.setattr(tiles, "_way", lambda *_, way=way: way)
                wide = np.full((len(a) + 1, b.shape[1] + 5), np.nan, np.float32)
                for given in ({}, {"more": bias, "low": 0.0}, {"more": whole}):
                    bound(a, b, wide[:-1, :-5], **given)()
                    found.append(wide.copy())
        for n, one in enumerate(found):
            assert np.array_equal(one, found[n % 3], equal_nan=True)
            assert np.isnan(one[-1]).all()
            assert np.isnan(one[:, -5:]).all()


@pytest.mark.parametrize("rule", [tiles._way_zen, tiles._way_intel, tiles._way_avx2])
def test_ways_are_those_that_a_product_has(rule: Callable[..., int]):
    random = np.random.default_rng(0)
    for m, k, n in random.choice([1, 16, 32, 100, 784, 2048, 5000, 9000], (500, 3)).tolist():
        for steps in ((k, 1, n, 1), (k, 1, 1, k), (1, m, n, 1)):
            assert rule(steps, m, k, n, False) != tiles.TURNED
            assert rule(steps, m, k, n, True) != tiles.TURNED or k <= tiles.LONGEST
        assert rule((k, 1, 0, 0), m, k, n, False) in (tiles.STREAMED, tiles.PACKED)


def test_with_avx2_alone_the_products_that_have_tiles_are_those_that_the_rule_knows(monkeypatch: pytest.MonkeyPatch):
    """Either b stays in the cache, or the product is turned; of columns of a, only short sums have tiles."""
    monkeypatch.setattr(tiles, "WIDE", False)
    random, found = np.random.default_rng(0), set()
    for m, k, n in random.choice([16, 32, 64, 100, 784, 2048], (500, 3)).tolist():
        for steps, one, other in (((k, 1, 1, k), k, m), ((k, 1, n, 1), k, m), ((1, m, n, 1), m, k)):
            way = tiles._way_avx2(steps, m, k, n, True)
            if other in tiles._sizes(one, n, *steps[1:3]):
                assert k <= 512 if steps[1] > 1 else k * n <= tiles.KEPT or way == tiles.TURNED
                found.add(way)
            elif m * k * n >= tiles.LEAST and min(one, n) >= tiles.LANES <= other:
                assert way != tiles.TURNED
    assert found == {tiles.TILED, tiles.STREAMED, tiles.TURNED}


def guarded(rows: int, columns: int, turned: bool) -> Any:
    """A matrix, by rows or turned, that ends where a page begins that nobody may touch, as one before it."""
    size, count = mmap.PAGESIZE, 4 * rows * columns
    pages = -(-count // size)
    raw = mmap.mmap(-1, (pages + 2) * size)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(raw))
    for page in (0, pages + 1):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin + page * size), size, 0) == 0
    x = np.frombuffer(raw, np.float32, rows * columns, (pages + 1) * size - count)
    x[:] = np.random.default_rng(count).standard_normal(x.size)
    return x.reshape(columns, rows).T if turned else x.reshape(rows, columns)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected by a call of Linux")
@pytest.mark.parametrize("way", WAYS)
def test_a_product_touches_its_matrices_alone(way: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "_way", lambda steps, *_: way if steps[2] or way == tiles.PACKED else tiles.STREAMED)
    for m, k, n in [(71, 32, 87), (14, 231, 51), (26, 296, 67), (51, 90, 23), (1, 400, 500), (300, 400, 1)]:
        for turned in ((False, False), (False, True), (True, False)):
            a, b = guarded(m, k, turned[0]), guarded(k, n, turned[1])
            y, more = guarded(m, n, False), guarded(m, n, False)
            bound(a, b, y, more)()
            assert np.allclose(y, a.astype(float) @ b + more, atol=1e-3)
            (shape, dtype), = linear.again_work(5, b)
            work = guarded(1, *shape, False)[0].astype(dtype, copy=False)
            tiles.loop(tiles._packed, tiles.memory(b), *(s // 4 for s in b.strides), *b.shape, work)()
            tiles._bound((*(s // 4 for s in a.strides), 0, 0), a, work, y, None, -np.inf, tiles.NONE, -1, 0, 0, False)()
            assert np.allclose(y, a.astype(float) @ b, atol=1e-3)


def test_products_of_heads_have_the_bits_of_each_and_are_added_in_place():
    x = np.random.default_rng(0).standard_normal((2, 3, 70, 3 * 64)).astype(np.float32)
    a, b, y = x[..., :64], x[..., 64:128].swapaxes(-1, -2), np.ones((2, 3, 70, 70), np.float32)
    wanted = [[made(*two) + 1 for two in zip(*three, strict=True)] for three in zip(a, b, strict=True)]
    linear.gemm_add(a, b, y, y, np.empty_like(y))[0]()
    assert (y == wanted).all()


@pytest.mark.parametrize("shape", [
    (64, 128, 300), (65, 1000, 97), (16, 130, 600), (600, 67, 48), (28, 7000, 64), pytest.param((
        16, 130, 160), marks=pytest.mark.skipif(not vectors.WIDE, reason="with AVX2 the library's has other bits"))])
def test_a_matrix_that_is_packed_once_gives_the_bits_of_each_product(shape: tuple[int, int, int]):
    for a, b in matrices(*shape):
        (shape_of_work, dtype), = linear.again_work(5, b)
        work = np.full(shape_of_work, np.nan, dtype)
        prepared, times = linear.gemm_again(len(a), b, [work])
        wide = np.full((2, len(a) + 1, b.shape[1] + 5), np.nan, np.float32)
        for call in (*prepared, times(a, wide[0, :-1, :-5]), times(-a, wide[1, :-1, :-5])):
            call()
        whole = np.empty_like(wide[0, :-1, :-5])
        bound(a, b, whole)()
        assert (wide[:, :-1, :-5] == [whole, -whole]).all()
        assert np.isnan(wide[:, -1]).all()
        assert np.isnan(wide[:, :, -5:]).all()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("name", "d"), [("rnn", 128), ("rnn_grad", 128), ("gru", 96), ("gru_grad", 96), ("lstm", 96),
                                         ("lstm_grad", 64)])
def test_recurrent_layers_are_close_to_exact_ones_and_half_of_the_samples_has_the_same_bits(name, d, reverse):
    kernel, random, n = KERNELS[name], np.random.default_rng(0), 128
    sizes = {"T": 6, "U": 7, "V": 7, "n": n, "D": d,
             "G": {"r": 1, "g": 3, "l": 4}[name[0]] * d, "K": 4 * d}
    labels, results = (part.split(",") for part in kernel.axes.split("->"))
    reads = [random.uniform(-0.1, 0.1, [sizes[one] for one in label]).astype(np.float32) for label in labels]
    constants = {"reverse": reverse, **({"relu": False} if name.startswith("rnn") else {})}
    wanted = exact(name, reads, **constants)
    whole = on_cpu(name, reads, blank(wanted, np.float32), **constants)
    for a, b in zip(whole, wanted, strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)

    def half(arrays: Any, every: list[str]) -> list[Any]:
        return [a[(slice(None),) * label.index("n") + (slice(n // 2),)] if "n" in label else a
                for a, label in zip(arrays, every, strict=True)]

    part = on_cpu(name, half(reads, labels), blank(half(wanted, results), np.float32), **constants)
    assert bits(*part) == bits(*half(whole, results))


def test_turned_products_of_heads_have_the_bits_of_each(monkeypatch: pytest.MonkeyPatch):
    random = np.random.default_rng(0)
    a, b = (random.random((2, 3, *shape), np.float32) for shape in ((20, 200), (200, 300)))
    y = random.random((2, 3, 20, 300), np.float32)
    wanted = y.copy()
    for one in np.ndindex(2, 3):
        bound(a[one], b[one], wanted[one], wanted[one])()
    monkeypatch.setattr(tiles, "_way", lambda *_: tiles.TURNED)
    bound(a, b, y, y)()
    assert (y == wanted).all()


def test_what_is_added_may_lie_anyhow():
    """A bias that is a column of a matrix, the same number again and again, or reversed; a matrix that is turned."""
    x, w, m = np.random.default_rng(0).standard_normal((3, 256, 256)).astype(np.float32)
    for bias in (m[:, 0], m[0, ::-1], np.broadcast_to(m[0, :1], 256)):
        assert np.allclose(on_cpu("linear", [x, w, bias], [np.empty_like(x)])[0], x @ w.T + bias, atol=1e-3)
    for more in (m.T, m[::-1], m[:, ::-1], np.broadcast_to(m[:, :1], m.shape), np.repeat(m, 2, 1)[:, ::2]):
        assert np.allclose(on_cpu("matmul_add", [x, w, more], [np.empty_like(x)])[0], more + x @ w, atol=1e-3)


def test_a_value_that_is_not_a_number_stays_one():
    a, b = np.full((64, 256), np.nan, np.float32), np.ones((256, 256), np.float32)
    assert np.isnan(made(a, b, low=0.0)).all()


def test_small_products_other_types_and_several_threads_have_the_library(monkeypatch: pytest.MonkeyPatch):
    def own(a: Any) -> bool:
        return linear._tiles(a, a, np.empty_like(a)) is not None

    large = np.ones((256, 256), np.float32)
    assert own(large)
    assert not own(large[:15, :15])
    assert not own(large.astype(float))
    assert not own(large[:, ::-1])
    monkeypatch.setattr(linear, "one_thread", False)
    assert not own(large)
