"""Pooling's CUDA kernels, run on the CPU, against the references in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_agree import written
from cuda_on_cpu import run_kernel
from forms import blank, exact, on_cpu, reference
from helpers import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

ROUNDING = {"float16": 1e-3, "float32": 2e-7, "float64": 1e-15}  # of one operation, and a few more


def like_the_reference(name: str, reads: list[Any], dtype: str, **constants: Any) -> list[Any]:
    """Runs the CUDA form with two orders of threads: the same bits, and the reference's values. Returns these."""
    expected = exact(name, reads, **constants)
    found, _ = written(name, reads, blank(expected, dtype), **constants)
    for y, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, e, rtol=4 * ROUNDING[dtype], atol=4 * ROUNDING[dtype])
    return found


@st.composite
def pools(draw: Any) -> Any:
    window = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    padding = tuple(draw(st.integers(0, w // 2)) for w in window)
    stride = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    size = [max(1, w - 2 * p) + draw(st.sampled_from([0, 1, 2, 6])) for w, p in zip(window, padding, strict=True)]
    shape = (draw(st.integers(0, 3)), *size, draw(st.sampled_from([1, 3, 31, 33])))
    return shape, {"window": window, "stride": stride, "padding": padding}, draw(st.booleans())


@settings(max_examples=drawn(40), deadline=None)
@given(pools(), st.sampled_from(list(ROUNDING)), st.booleans(), st.integers(0, 1000))
def test_pools_are_like_the_reference(case: Any, dtype: str, ties: bool, seed: int) -> None:
    shape, geometry, ceil = case
    rng = np.random.default_rng(seed)
    x = (rng.integers(0, 3, shape) if ties else rng.standard_normal(shape)).astype(dtype)
    if x.size:
        x.flat[rng.integers(x.size)] = np.nan
    y, tap = like_the_reference("max_pool2d", [x], dtype, **geometry, ceil=ceil)
    dy = rng.standard_normal(y.shape).astype(dtype)
    like_the_reference("max_pool2d_grad", [tap, dy], dtype, size=shape[1:3], **geometry)
    like_the_reference("avg_pool2d", [np.nan_to_num(x)], dtype, **geometry, ceil=ceil)
    like_the_reference("avg_pool2d_grad", [dy], dtype, size=shape[1:3], **geometry)


@pytest.mark.wide
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["max_pool2d", "avg_pool2d"])
def test_many_elements_for_each_thread(name: str) -> None:
    """More elements than a launch has threads."""
    rng = np.random.default_rng(5)
    x, geometry = (rng.standard_normal((2, 96, 101, 31)).astype(np.float32),
                   {"window": (3, 2), "stride": (1, 1), "padding": (1, 0)})
    y, *tap = like_the_reference(name, [x], "float32", **geometry)
    assert y.size > 132 * 16 * 256
    like_the_reference(f"{name}_grad", [*tap, y], "float32", size=x.shape[1:3], **geometry)


@pytest.mark.parametrize("form", ["reference", "cpu", "cuda"])
def test_a_window_of_minus_infinity_has_its_maximum_inside_the_image(form: str) -> None:
    """The gradient of the corner's window goes to the corner, not to the padding."""
    x, geometry = np.full((1, 3, 3, 1), -np.inf), {"window": (3, 3), "stride": (2, 2), "padding": (1, 1)}
    y, tap, dx = np.empty((1, 2, 2, 1)), np.empty((1, 2, 2, 1), np.int32), np.empty_like(x)
    dy = np.array([1.0, 2.0, 3.0, 4.0]).reshape(y.shape)
    if form == "reference":
        y, tap = reference("max_pool2d", [x], **geometry)
        (dx,) = reference("max_pool2d_grad", [tap, dy], size=(3, 3), **geometry)
    else:
        run = on_cpu if form == "cpu" else run_kernel
        run("max_pool2d", [x], [y, tap], **geometry)
        run("max_pool2d_grad", [tap, dy], [dx], size=(3, 3), **geometry)
    assert tap.ravel().tolist() == [4, 3, 1, 0]
    assert dx[0, :, :, 0].tolist() == [[1, 2, 0], [3, 4, 0], [0, 0, 0]]
