"""Products by tiles are close to the exact ones, and bit-identical to a part of a larger product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_agree import on_cpu

from minidl.kernels import KERNELS, linear, tiles

pytestmark = pytest.mark.skipif(not tiles.WIDE, reason="this processor has no AVX-512")


def matrices(m: int, k: int, n: int) -> Any:
    """Operands of the three products of a layer: rows times rows, rows times columns, columns times columns."""
    random = np.random.default_rng(m * k + n)
    a, b = (random.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
    yield a, np.ascontiguousarray(b.T).T
    yield a, b
    yield np.ascontiguousarray(a.T).T, b


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


def test_products_of_heads_have_the_bits_of_each_and_are_added_in_place():
    x = np.random.default_rng(0).standard_normal((2, 3, 70, 3 * 64)).astype(np.float32)
    a, b, y = x[..., :64], x[..., 64:128].swapaxes(-1, -2), np.ones((2, 3, 70, 70), np.float32)
    wanted = [[made(*two) + 1 for two in zip(*three, strict=True)] for three in zip(a, b, strict=True)]
    linear.gemm_add(a, b, y, y, np.empty_like(y))[0]()
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
