"""The CUDA forms of batch norm and layer norm, run on the CPU, against their references in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_agree import DTYPES, agree, draw
from cuda_on_cpu import run_kernel
from hypothesis import given
from hypothesis import strategies as st

from minidl.kernels import columns


def window(x: Any, room: int, before: int) -> Any:
    """x as a window of a slab that has `room` more channels, `before` of them to its left."""
    slab = np.full((*x.shape[:-1], x.shape[-1] + room), np.nan, x.dtype)
    view = slab[..., before : before + x.shape[-1]]
    view[...] = x
    return view


def statistics(channels: int, dtype: str) -> list[Any]:
    """Running mean, variance and count of batches."""
    return [draw(channels, 5, dtype), np.abs(draw(channels, 6, dtype)) + 1, np.array(3, np.int64)]


# ------------------------------------------------------------------------------------------------------------ geometry
@given(st.integers(0, 10**7) | st.integers(0, 5000), st.integers(1, 70) | st.integers(1, 20_000))
def test_blocks_cover_all_rows_and_columns_once(rows: int, width: int) -> None:
    for grid in (columns.sums(rows, width), columns.spread(rows, width), columns.spread(rows, width, 264)):
        tiles, shares = grid.blocks
        assert (tiles - 1) * grid.threads[0] < width <= tiles * grid.threads[0]
        assert (shares - 1) * grid.share < max(rows, 1) <= max(shares * grid.share, 1)
        assert 1 <= grid.threads[0] * grid.threads[1] <= 512
        assert shares <= 65535
    assert columns.sums_work(rows, width)[0][0][0] <= 128


# ------------------------------------------------------------------------------------------------------------ batch norm
SHAPES = [(5, 1), (8, 3), (31, 33), (257, 5), (3, 5, 7, 36), (2049, 2), (2500, 33), (9000, 3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norm(shape: tuple[int, ...], dtype: str) -> None:
    channels = shape[-1]
    x, w, b = draw(shape, 1, dtype, 2), draw(channels, 2, dtype, 1), draw(channels, 3, dtype)
    reads = [x, w, b, *statistics(channels, dtype)]
    y, mean, rstd, *_ = agree("batch_norm", reads, eps=1e-5, momentum=0.1)
    in_place = agree("batch_norm", reads, {3: 3, 4: 4, 5: 5}, eps=1e-5, momentum=0.1)
    assert in_place[0].tobytes() == y.tobytes()
    dy = draw(shape, 4, dtype, 0.5)
    dw, db = agree("batch_norm_weight_grad", [x, mean, rstd, dy], times=3)
    agree("batch_norm_input_grad", [x, mean, rstd, w, dw, db, dy], times=2)
    agree("batch_norm_eval", [x, w, b, *reads[3:5]], eps=1e-5)
    agree("batch_norm_eval_input_grad", [dy, w, rstd])


@pytest.mark.parametrize("rows", [(4, 5, 6), (2100,)], ids=str)
@pytest.mark.parametrize("channels", [1, 7, 40])
def test_batch_norm_of_a_window(rows: tuple[int, ...], channels: int) -> None:
    """x may lie among other channels: the bits are those of a dense x, and nothing beside it is read."""
    x, w, b = draw((*rows, channels), 1, "float32"), draw(channels, 2, "float32", 1), draw(channels, 3, "float32")
    running, dy = statistics(channels, "float32"), draw((*rows, channels), 4, "float32")
    for calls in ((x, window(x, 9, 4)), (x[:1], window(x, 9, 4)[:1])):
        found = []
        for view in calls:
            at = slice(None) if len(view) == len(x) else slice(1)
            if view.size > channels:
                y, mean, rstd, *_ = agree("batch_norm", [view, w, b, *running], eps=1e-5, momentum=0.1)
                dw, db = agree("batch_norm_weight_grad", [view, mean, rstd, dy[at]], times=3)
                dx, = agree("batch_norm_input_grad", [view, mean, rstd, w, dw, db, dy[at]], times=2)
                found.append([y, mean, rstd, dw, db, dx])
            found.append(agree("batch_norm_eval", [view, w, b, *running[:2]], eps=1e-5))
        half = len(found) // 2
        for dense, other in zip(found[:half], found[half:], strict=True):
            assert [v.tobytes() for v in dense] == [v.tobytes() for v in other]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", [8, 500, 2500, 40_000])
@pytest.mark.parametrize("first", [0.0, 1e4])
def test_statistics_far_from_zero(rows: int, dtype: str, first: float) -> None:
    """A mean a hundred times the spread costs nothing; a first row that is like no other a few units of float64 a row."""
    x = draw((rows, 3), 1, dtype, 100)
    x[0] += first
    writes = [np.empty_like(x), *np.empty((4, 3), dtype), np.array(0)]
    run_kernel("batch_norm", [x, *np.ones((2, 3), dtype), *np.zeros((2, 3), dtype), np.array(0)], writes, eps=0.0, momentum=1.0)
    _, mean, rstd, _, var, _ = writes
    wide = x.astype("float64")
    rtol = 3e-7 if dtype == "float32" else max(1e-13, bool(first) * rows * 1e-15)
    np.testing.assert_allclose(mean, wide.mean(0), rtol=rtol)
    np.testing.assert_allclose(rstd, 1 / wide.std(0), rtol=rtol)
    np.testing.assert_allclose(var, wide.var(0, ddof=1), rtol=rtol)


def test_batch_norm_launches() -> None:
    """One launch for few rows, two for many; the gradient toward the input needs one."""
    for rows, launches in ((2048, 1), (2049, 2)):
        x, c = np.ones((rows, 4)), np.ones(4)
        assert len(run_kernel("batch_norm", [x, c, c, c, c, np.array(0)], [x.copy(), *np.ones((4, 4)), np.array(0)], eps=1.0,
                              momentum=0.1)) == launches
        assert len(run_kernel("batch_norm_weight_grad", [x, c, c, x], [c.copy(), c.copy()])) == launches
        assert len(run_kernel("batch_norm_input_grad", [x, c, c, c, c, c, x], [x.copy()])) == 1


def test_empty_batches() -> None:
    """No rows: sums are zero and 1 / std is still made."""
    x, c = np.ones((0, 3)), np.ones(3)
    agree("batch_norm_weight_grad", [x, c, c, x])
    agree("batch_norm_eval", [x, c, c, c, 3 * c], eps=1.0)
    assert run_kernel("batch_norm_input_grad", [x, c, c, c, c, c, x], [x.copy()]) == []
    assert run_kernel("batch_norm_eval_input_grad", [x, c, c], [x.copy()]) == []


def test_infinities_and_nan_are_seen() -> None:
    """A channel with a NaN or an infinity has no number as its variance, and its neighbours do not notice."""
    for bad in (np.nan, np.inf):
        x = draw((2100, 3), 1, "float32")
        x[1200, 1] = bad
        writes = [np.empty_like(x), *np.empty((4, 3), "f"), np.array(0)]
        run_kernel("batch_norm", [x, *np.ones((2, 3), "f"), *np.zeros((2, 3), "f"), np.array(0)], writes, eps=1e-5, momentum=0.1)
        for y in (writes[0], *(v[None] for v in writes[1:5])):
            assert np.isnan(y[:, 1]).sum() >= len(y) - 1 - (bad == np.inf)
            assert np.isfinite(y[:, [0, 2]]).all()


# ------------------------------------------------------------------------------------------------------------ layer norm
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("affine", [0, 1, 2])
@pytest.mark.parametrize("shape", [(1, 3), (8, 31), (33, 33), (3, 257), (2, 1025), (2100, 5)], ids=str)
def test_layer_norm(shape: tuple[int, int], affine: int, dtype: str) -> None:
    x, dy = draw(shape, 1, dtype, 2), draw(shape, 2, dtype, 0.5)
    given = [draw(shape[1], 3, dtype, 1), draw(shape[1], 4, dtype)][:affine]
    _, mean, scale = agree("layer_norm", [x, *given], eps=1e-5, times=2)
    agree("layer_norm_input_grad", [x, mean, scale, dy, *given[:1]], times=3)
    agree("layer_norm_weight_grad", [x, mean, scale, dy], bias=affine > 1, times=2)


@pytest.mark.parametrize("width", [40, 3000])
def test_layer_norm_far_from_zero(width: int) -> None:
    """A mean a hundred times the spread is lost by no more than its rounding."""
    x = draw((5, width), 1, "float32", 100)
    y, mean, scale = np.empty_like(x), np.empty(5, "f"), np.empty(5, "f")
    run_kernel("layer_norm", [x], [y, mean, scale], eps=0.0)
    wide = x.astype("float64")
    np.testing.assert_allclose(mean, wide.mean(1), rtol=1e-7)
    np.testing.assert_allclose(scale, 1 / wide.std(1), rtol=3e-7)


def test_layer_norm_without_rows() -> None:
    """Gradients of parameters are zero."""
    x, row, none = np.ones((0, 40)), np.ones(40), np.ones(0)
    assert run_kernel("layer_norm", [x], [x.copy(), none, none], eps=1.0) == []
    assert run_kernel("layer_norm_input_grad", [x, none, none, x], [x.copy()]) == []
    agree("layer_norm_weight_grad", [x, none, none, x], bias=True)
    assert len(run_kernel("layer_norm_weight_grad", [np.ones((2049, 40)), *np.ones((2, 2049)), np.ones((2049, 40))], [row.copy()], bias=False)) == 2
