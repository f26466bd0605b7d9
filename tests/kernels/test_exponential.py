"""exp in loops, and rows of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minidl.kernels.exponential import exp, exps, largest
from minidl.kernels.registry import loop


def _exp(x, y):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        y[i] = exp(x[i])


def _rows(x, top, total, scale):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        top[i] = largest(x[i])
        _, total[i] = exps(x[i], scale)


def exponential(x: Any) -> Any:
    y = np.empty_like(x)
    loop(_exp, x, y)()
    return y


@pytest.mark.parametrize(("dtype", "low", "error"), [("float32", -87.0, 1e-7), ("float64", -708.0, 2.3e-16)])
def test_it_is_as_near_as_numpys(dtype, low, error):
    x = np.concatenate([np.linspace(low, 20, 20_001), np.linspace(-1, 1, 2_001)]).astype(dtype)
    wanted = np.exp(x.astype(np.longdouble))
    assert np.abs(exponential(x) / wanted - 1).max() < error


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_far_below_is_zero_and_no_number_stays(dtype):
    found = exponential(np.array([-np.inf, -1e30, -800, 0, np.nan, -np.nan], dtype))
    np.testing.assert_array_equal(found, [0, 0, 0, 1, np.nan, np.nan])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_number_has_its_bits_in_a_row_of_any_length(dtype):
    x = np.random.default_rng(0).uniform(-30, 3, 200).astype(dtype)
    whole = exponential(x)
    for cut in (1, 7, 33):
        parts = [exponential(x[i : i + cut]) for i in range(0, x.size, cut)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("width", [1, 5, 64, 100])
def test_rows(dtype, width):
    x = np.random.default_rng(width).standard_normal((4, width)).astype(dtype) * 50
    x[1] = -np.abs(x[1])
    x[2] = -np.inf
    x[3, 0] = np.nan
    rows, top, total = x.copy(), np.empty(4, dtype), np.empty(4, dtype)
    loop(_rows, rows, top, total, x.dtype.type(0.5))()
    np.testing.assert_array_equal(top[:3], x.max(axis=1)[:3])
    wanted = np.exp(((x[:2] - x[:2].max(axis=1, keepdims=True)) * x.dtype.type(0.5)).astype(np.float64))
    np.testing.assert_allclose(rows[:2], wanted, rtol=2e-7 if dtype == "float32" else 1e-15, atol=2e-38)
    np.testing.assert_allclose(total[:2], wanted.sum(axis=1), rtol=1e-6)
    assert not rows[2].any()
    assert total[2] == 0
    assert np.isnan(total[3])
