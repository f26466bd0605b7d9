"""The CUDA forms of batch norm and layer norm, run on the CPU, against their references in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from covering import pairs
from cuda_agree import DTYPES, agree, draw, sums_of
from cuda_on_cpu import run_kernel
from forms import blank, on_cpu, reference
from hypothesis import given
from hypothesis import strategies as st

from minidl.kernels import KERNELS, columns, cuda


def window(x: Any, room: int, before: int) -> Any:
    """x as a window of a slab that has `room` more channels, `before` of them to its left."""
    slab = np.full((*x.shape[:-1], x.shape[-1] + room), np.nan, x.dtype)
    view = slab[..., before : before + x.shape[-1]]
    view[...] = x
    return view


def statistics(channels: int, dtype: str) -> list[Any]:
    """Running mean, variance and count of batches, for elements of this type."""
    return [draw(channels, 5, sums_of(dtype)), np.abs(draw(channels, 6, sums_of(dtype))) + 1, np.array(3, np.int64)]


OF_CHANNELS = (1, 2, 3, 4)  #: outputs of batch norm


# ------------------------------------------------------------------------------------------------------------ geometry
@given(st.integers(0, 10**7) | st.integers(0, 5000), st.integers(1, 70) | st.integers(1, 20_000))
def test_blocks_cover_all_rows_and_columns_once(rows: int, width: int) -> None:
    for blocks in (132, 264):
        for grid in (columns.sums(rows, width, blocks), columns.spread(rows, width, blocks)):
            (tiles, shares), (across, down) = grid.blocks, grid.threads
            assert 4 * (tiles - 1) * across < width <= 4 * tiles * across
            assert (shares - 1) * grid.share < max(rows, 1) <= max(shares * grid.share, 1)
            assert 1 <= across * down <= 256
            assert shares <= 65535
            assert tiles * (shares - 1) <= blocks + tiles or shares == 1
        assert columns.sums_work(rows, width, blocks)[0][0][0] <= 264


def test_few_tiles_have_more_shares() -> None:
    """So that there is work for all multiprocessors: 16 channels of 32 images of 112 x 112 pixels, as well as 960."""
    for channels in (16, 24, 64, 960):
        for grid in (columns.sums(401408, channels), columns.spread(401408, channels)):
            assert grid.blocks[0] * grid.blocks[1] >= 264


# ------------------------------------------------------------------------------------------------ loads of four columns
def calls_of(name: str, reads: list[Any], writes: list[Any], **constants: Any) -> list[cuda.Grid]:
    kernel = KERNELS[name]
    work = [np.empty(shape, t) for shape, t in kernel.cuda_work(reads, writes, **constants)] if kernel.cuda_work else []
    return kernel.cuda_calls(reads, writes, work, constants)


@pytest.mark.parametrize(("channels", "room", "before", "four"),
                         [(12, 0, 0, True), (12, 4, 4, True), (12, 4, 1, False), (12, 3, 0, False), (10, 0, 0, False)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_four_columns_are_one_access_where_memory_allows(channels: int, room: int, before: int, four: bool,
                                                         dtype: str) -> None:
    """Every array of a launch counts: its address, how far apart its rows begin, how many columns it has."""
    slab, y = np.zeros((2100, channels + room), dtype), np.empty((2100, channels), dtype)
    assert slab.ctypes.data % 16 == y.ctypes.data % 16 == 0
    x, c = slab[:, before : before + channels], np.ones(channels, sums_of(dtype))
    statistics = [c, c, c, c, np.array(0)]
    found = [*calls_of("batch_norm", [x, *statistics], [y, *(c.copy() for _ in range(4)), np.array(0)], eps=1.0,
                       momentum=0.1), *calls_of("batch_norm_weight_grad", [x, c, c, y], [c.copy(), c.copy()]),
             *calls_of("batch_norm_input_grad", [x, c, c, c, c, c, y], [y])]
    said = [call.kernel.partition(", ")[2] for call in found if "end" not in call.kernel]
    assert said == [f"{str(four).lower()}>"] * 4


# ----------------------------------------------------------------------------------------------------------- batch norm
SHAPES = [(5, 1), (8, 3), (31, 33), (257, 5), (3, 5, 7, 36), (2049, 2), (2500, 33), (2500, 40), (9000, 3)]


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norm(shape: tuple[int, ...], dtype: str) -> None:
    channels = shape[-1]
    x, w, b = draw(shape, 1, dtype, 2), draw(channels, 2, sums_of(dtype), 1), draw(channels, 3, sums_of(dtype))
    reads = [x, w, b, *statistics(channels, dtype)]
    y, mean, rstd, *_ = agree("batch_norm", reads, eps=1e-5, momentum=0.1, in_sums=OF_CHANNELS)
    in_place = agree("batch_norm", reads, {3: 3, 4: 4, 5: 5}, eps=1e-5, momentum=0.1, in_sums=OF_CHANNELS)
    assert in_place[0].tobytes() == y.tobytes()
    given = [np.zeros_like(v) for v in reads[3:]]
    own = agree("batch_norm", [x, w, b, *given], eps=1e-5, momentum=1.0, in_sums=OF_CHANNELS)
    moved = agree("batch_norm_move", [*own[3:5], *reads[3:]], {0: 2, 1: 3, 2: 4}, momentum=0.1)
    assert [v.tobytes() for v in moved] == [v.tobytes() for v in in_place[3:]]
    dy = draw(shape, 4, dtype, 0.5)
    dw, db = agree("batch_norm_weight_grad", [x, mean, rstd, dy], times=3, in_sums=(0, 1))
    agree("batch_norm_input_grad", [x, mean, rstd, w, dw, db, dy], times=2)
    agree("batch_norm_eval", [x, w, b, *reads[3:5]], eps=1e-5, in_sums=(1,))
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
    """A mean a hundred times the spread costs nothing; a first row that is like no other a few units
    of float64 a row."""
    x = draw((rows, 3), 1, dtype, 100)
    x[0] += first
    writes = [np.empty_like(x), *np.empty((4, 3), dtype), np.array(0)]
    run_kernel("batch_norm", [x, *np.ones((2, 3), dtype), *np.zeros((2, 3), dtype), np.array(0)], writes,
               eps=0.0, momentum=1.0)
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
        assert len(run_kernel("batch_norm", [x, c, c, c, c, np.array(0)], [x.copy(), *np.ones((4, 4)), np.array(0)],
                              eps=1.0, momentum=0.1)) == (launches)
        assert len(run_kernel("batch_norm_weight_grad", [x, c, c, x], [c.copy(), c.copy()])) == launches
        assert len(run_kernel("batch_norm_input_grad", [x, c, c, c, c, c, x], [x.copy()])) == 1


def test_empty_batches() -> None:
    """No rows: sums are zero and 1 / std is still made."""
    x, c, row, none = np.ones((0, 3)), np.ones(3), np.ones((0, 40)), np.ones(0)
    agree("batch_norm_weight_grad", [x, c, c, x])
    agree("batch_norm_eval", [x, c, c, c, 3 * c], eps=1.0)
    agree("layer_norm_weight_grad", [row, none, none, row], bias=True)
    dw, db = c.copy(), c.copy()
    run_kernel("batch_norm_grad", [x, c, c, c, c, x], [dw, db, x.copy()], act="none", kept=False, add=False)
    assert not dw.any()
    assert not db.any()


def test_infinities_and_nan_are_seen() -> None:
    """A channel with a NaN or an infinity has no number as its variance, and its neighbours do not notice."""
    for bad in (np.nan, np.inf):
        x = draw((2100, 3), 1, "float32")
        x[1200, 1] = bad
        writes = [np.empty_like(x), *np.empty((4, 3), "f"), np.array(0)]
        run_kernel("batch_norm", [x, *np.ones((2, 3), "f"), *np.zeros((2, 3), "f"), np.array(0)], writes,
                   eps=1e-5, momentum=0.1)
        for y in (writes[0], *(v[None] for v in writes[1:5])):
            assert np.isnan(y[:, 1]).sum() >= len(y) - 1 - (bad == np.inf)
            assert np.isfinite(y[:, [0, 2]]).all()


# --------------------------------------------------------------------------------------------------- with an activation
def fused(x: Any, parameters: list[Any], z: list[Any], dy: Any, act: str, seed: int = 0) -> dict[str, Any]:
    """What a graph with fused launches makes, on CUDA."""
    w, b, *running = parameters
    c, out = np.zeros_like(w), {"y": np.empty(x.shape, x.dtype), "mean": w.copy(), "rstd": w.copy(), "after": w.copy(),
                                "var": w.copy(), "tracked": np.array(0)}
    run_kernel("batch_norm_act", [x, w, b, *running, *z], list(out.values()), seed, eps=1e-3, momentum=0.1, act=act)
    sums, kept = [c.copy(), c.copy(), *(np.empty(x.shape, x.dtype) for _ in z)], [x, out["mean"], out["rstd"], w]
    run_kernel("batch_norm_act_weight_grad", [*kept, b, dy, *([out["y"]] if z else [])], sums, seed, act=act)
    dx = np.empty(x.shape, x.dtype)
    if z:
        run_kernel("batch_norm_input_grad", [*kept, *sums], [dx], seed)
    else:
        run_kernel("batch_norm_act_input_grad", [*kept, b, *sums[:2], dy], [dx], seed, act=act)
    return out | dict(zip(("dw", "db", "ds"), sums, strict=False)) | {"dx": dx}


def apart(x: Any, parameters: list[Any], z: list[Any], dy: Any, act: str, seed: int = 0) -> dict[str, Any]:
    """The same by the launches that they take the place of; what stands beside them by NumPy."""
    w, b, *running = parameters
    s, ds, dx = (np.empty(x.shape, x.dtype) for _ in range(3))
    out = {"mean": w.copy(), "rstd": w.copy(), "after": w.copy(), "var": w.copy(), "tracked": np.array(0)}
    run_kernel("batch_norm", [x, w, b, *running], [s, *out.values()], seed, eps=1e-3, momentum=0.1)
    s = s + z[0] if z else s
    y = KERNELS[act].reference(np, s)
    ds[...] = KERNELS[f"{act}_grad"].reference(np, s if act == "hardswish" else y, dy)
    sums, kept = [w.copy(), w.copy()], [x, out["mean"], out["rstd"]]
    run_kernel("batch_norm_weight_grad", [*kept, ds], sums, seed)
    run_kernel("batch_norm_input_grad", [*kept, w, *sums, ds], [dx], seed)
    return {"y": y} | out | {"dw": sums[0], "db": sums[1]} | ({"ds": ds} if z else {}) | {"dx": dx}


@pytest.mark.parametrize(*pairs(shape=[(9, 3), (2, 5, 7, 36), (2100, 4)], dtype=["float32", "float64"], of=[
    ("relu", False), ("relu", True), ("relu6", False), ("relu6", True), ("hardswish", False)]))
def test_fusion_changes_no_bits(shape: tuple[int, ...], of: tuple[str, bool], dtype: str) -> None:
    act, residual = of
    x, dy = window(draw(shape, 1, dtype, 2), 5, 2), draw(shape, 4, dtype, 0.5)
    parameters = [4 * draw(shape[-1], 2, dtype, 1), draw(shape[-1], 3, dtype), *statistics(shape[-1], dtype)]
    z = [draw(shape, 5, dtype)] if residual else []
    one, many = fused(x, parameters, z, dy, act, seed=4), apart(x, parameters, z, dy, act, seed=7)
    for key, value in many.items():
        if act != "hardswish" or key in ("mean", "rstd", "after", "var", "tracked"):
            assert one[key].tobytes() == value.tobytes(), key
        tolerance = 1e-6 if dtype == "float32" else 1e-14
        np.testing.assert_allclose(one[key], value, rtol=tolerance, atol=np.abs(value).max() * tolerance, err_msg=key)


@pytest.mark.parametrize(*pairs(shape=[(31, 5), (2070, 3)], act=["none", "relu", "relu6", "hardswish"], dtype=DTYPES))
def test_batch_norm_with_an_activation(shape: tuple[int, int], act: str, dtype: str) -> None:
    channels = shape[1]
    x, w, b = draw(shape, 1, dtype, 2), 4 * draw(channels, 2, sums_of(dtype), 1), draw(channels, 3, sums_of(dtype))
    z, dy, running = draw(shape, 4, dtype), draw(shape, 5, dtype, 1), statistics(channels, dtype)
    y, mean, rstd, *_ = agree("batch_norm_act", [x, w, b, *running], eps=1e-5, momentum=0.1, act=act,
                              in_sums=OF_CHANNELS)
    y, mean, rstd, *_ = agree("batch_norm_act", [x, w, b, *running, z], {3: 3, 4: 4, 5: 5}, eps=1e-5, momentum=0.1,
                              act=act, in_sums=OF_CHANNELS)
    if act == "none":
        return
    if act != "hardswish":
        agree("batch_norm_act_weight_grad", [x, mean, rstd, w, b, dy, y], act=act, times=3, in_sums=(0, 1))
    if dtype == "float16":
        return  # the slope of a kink's two sides: float64 may see the other one
    dw, db = agree("batch_norm_act_weight_grad", [x, mean, rstd, w, b, dy], act=act, times=3)
    agree("batch_norm_act_input_grad", [x, mean, rstd, w, b, dw, db, dy], act=act, times=2)


@pytest.mark.few(2)
@pytest.mark.parametrize(("act", "residual"),
                         [("none", True), ("relu", False), ("relu", True), ("relu6", True), ("hardswish", False)])
def test_cpu_forms_with_an_activation(act: str, residual: bool) -> None:
    """Each against its reference, into arrays full of NaN."""
    x, w, b = window(draw((2, 5, 4, 3), 1, "float64", 2), 4, 1), 4 * draw(3, 2, "float64", 1), draw(3, 3, "float64")
    z, dy = [draw(x.shape, 4, "float64")] * residual, draw(x.shape, 5, "float64")

    def run(name: str, reads: list[Any], **constants: Any) -> list[Any]:
        expected = reference(name, reads, **constants)
        writes = on_cpu(name, reads, blank(expected), **constants)
        for found, wanted in zip(writes, expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
        return writes

    y, mean, rstd, *_ = run("batch_norm_act", [x, w, b, *statistics(3, "float64"), *z], eps=1e-5, momentum=0.1, act=act)
    if act != "none":
        dw, db, *ds = run("batch_norm_act_weight_grad", [x, mean, rstd, w, b, dy, *([y] if z else [])], act=act)
        assert len(ds) == residual
    if act != "none" and not residual:
        run("batch_norm_act_input_grad", [x, mean, rstd, w, b, dw, db, dy], act=act)
    kept = residual and act != "none"
    for more in ([], [draw(x.shape, 6, "float64")]):
        run("batch_norm_grad", [x, mean, rstd, w, b, dy, *([y] if kept else []), *more], act=act, kept=kept,
            add=bool(more))


def test_gradients_that_cannot_be_fused() -> None:
    x, c = np.ones((4, 3)), np.ones(3)
    for act, kept, message in (("none", [], "none"), ("gelu", [], "gelu"),
                               ("hardswish", [x], "hardswish and a residual")):
        with pytest.raises(ValueError, match=f"fused with {message} has no gradient"):
            run_kernel("batch_norm_act_weight_grad", [x, c, c, c, c, x, *kept],
                       [c.copy(), c.copy(), *(x.copy() for _ in kept)], act=act)


# ----------------------------------------------------------------------------------------------- both gradients at once
@given(st.integers(2049, 10**7), st.integers(1, 70) | st.integers(1, 20_000))
def test_a_block_adds_up_parts_as_the_separate_launch_does(rows: int, width: int) -> None:
    first, second = columns.sums(rows, width), columns.spread(rows, width, 2 * columns.MULTIPROCESSORS)
    if first.blocks[1] > 1:
        assert (first.blocks[0], first.threads) == (second.blocks[0], second.threads)


@pytest.mark.parametrize(*pairs(shape=[(9, 3), (2, 5, 7, 36), (2100, 4)], dtype=DTYPES,
                                act=["none", "relu", "relu6", "hardswish"]))
def test_both_gradients_have_the_bits_of_separate_launches(shape: tuple[int, ...], act: str, dtype: str) -> None:
    """With and without another gradient that is added, which lies in a slab. One activation keeps its gradient."""
    kept = act == "relu6"
    c, sums = shape[-1], sums_of(dtype)
    x, dy = window(draw(shape, 1, dtype, 2), 5, 2), draw(shape, 4, dtype, 0.5)
    mean, rstd, w, b = (draw(c, 5, sums, 2), np.abs(draw(c, 6, sums)) + 1, draw(c, 2, sums, 1), draw(c, 3, sums))
    y, more = [draw(shape, 7, dtype)] * kept, window(draw(shape, 8, dtype), 4, 4)
    dw, db, ds, dx = w.copy(), b.copy(), [np.empty(shape, dtype)] * kept, np.empty(shape, dtype)
    middle, flags = ("", {}) if act == "none" else ("act_", {"act": act})
    own = [] if act == "none" else [w, b]
    run_kernel(f"batch_norm_{middle}weight_grad", [x, mean, rstd, *own, dy, *y], [dw, db, *ds], **flags)
    if kept:
        run_kernel("batch_norm_input_grad", [x, mean, rstd, w, dw, db, *ds], [dx])
    else:
        run_kernel(f"batch_norm_{middle}input_grad", [x, mean, rstd, *(own or [w]), dw, db, dy], [dx], **flags)
    wanted = [dw, db, *ds, dx]
    for add in (False, True):
        found = [np.full_like(v, np.nan) for v in wanted]
        calls = run_kernel("batch_norm_grad", [x, mean, rstd, w, b, dy, *y, *([more] if add else [])], found, 5,
                           act=act, kept=kept, add=add)
        assert len(calls) == (1 if len(x.reshape(-1, c)) <= 2048 else 2)
        if add and dtype == "float16":
            np.testing.assert_allclose(found.pop(), wanted.pop() + more, rtol=4e-3, atol=4e-3)
        elif add:
            wanted[-1] = wanted[-1] + more
        assert [v.tobytes() for v in found] == [v.tobytes() for v in wanted[: len(found)]]


# ----------------------------------------------------------------------------------------------------------- layer norm
@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "affine"), [((1, 3), 2), ((8, 31), 0), ((8, 31), 1), ((33, 33), 2), ((3, 257), 2),
                                               ((2, 1025), 1), ((2100, 5), 2)], ids=str)
def test_layer_norm(shape: tuple[int, int], affine: int, dtype: str) -> None:
    x, dy = draw(shape, 1, dtype, 2), draw(shape, 2, dtype, 0.5)
    given = [draw(shape[1], 3, sums_of(dtype), 1), draw(shape[1], 4, sums_of(dtype))][:affine]
    _, mean, scale = agree("layer_norm", [x, *given], eps=1e-5, times=2, in_sums=(1, 2))
    agree("layer_norm_input_grad", [x, mean, scale, dy, *given[:1]], times=3)
    agree("layer_norm_weight_grad", [x, mean, scale, dy], bias=affine > 1, times=2, in_sums=(0, 1))


@pytest.mark.parametrize("width", [40, 3000])
def test_layer_norm_far_from_zero(width: int) -> None:
    """A mean a hundred times the spread is lost by no more than its rounding."""
    x = draw((5, width), 1, "float32", 100)
    y, mean, scale = np.empty_like(x), np.empty(5, "f"), np.empty(5, "f")
    run_kernel("layer_norm", [x], [y, mean, scale], eps=0.0)
    wide = x.astype("float64")
    np.testing.assert_allclose(mean, wide.mean(1), rtol=1e-7)
    np.testing.assert_allclose(scale, 1 / wide.std(1), rtol=3e-7)


def test_layer_norm_launches() -> None:
    x = np.ones((2049, 40))
    assert len(run_kernel("layer_norm_weight_grad", [x, *np.ones((2, 2049)), x], [np.ones(40)], bias=False)) == 2
