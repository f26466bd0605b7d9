"""Convolution's CUDA forms, run on the CPU, against the references in float64: every way, and which way is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_agree import written
from forms import blank, exact
from helpers import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.kernels import KERNELS, conv_cuda, cuda, depthwise
from minidl.kernels.conv import Geometry

#: norm of the error, relative to the norm of the same sums of absolute values; rounding alone is up to
#: 5e-4, 6e-8, 1e-16
TOLERANCE = {"float16": 5e-4, "float32": 2e-7, "float64": 1e-15}
OTHERS = 10  #: times that for products and convolutions, which on a device are made by libraries in ways of their own
NAMES = ("conv2d", "conv2d_input_grad", "conv2d_weight_grad")


def like_the_reference(name: str, reads: list[Any], **constants: Any) -> list[cuda.Call]:
    """Runs the CUDA form with two orders of threads: the same bits, and the reference's values. Returns its calls."""
    dtype, expected = reads[0].dtype, exact(name, reads, **constants)
    found, calls = written(name, reads, blank(expected, dtype), **constants)
    tolerance = TOLERANCE[str(dtype)] * (OTHERS if {"Product", "Convolution"} & {*kinds(calls)} else 1)
    for y, e, s in zip(found, expected, exact(name, [np.abs(r) for r in reads], **constants), strict=True):
        assert np.linalg.norm(y - e) <= tolerance * np.linalg.norm(s)
    return calls


def all_three(x: Any, w: Any, geometry: Geometry, dtype: str, bias: bool, seed: int = 0) -> list[list[cuda.Call]]:
    """Forward and both gradients on random arrays of these shapes."""
    rng = np.random.default_rng(seed)
    x, w, b = (rng.standard_normal(s).astype(dtype) for s in (x, w, w[0]))
    dy = rng.standard_normal((x.shape[0], *geometry.output(x.shape[1:3], w.shape[1:3]), w.shape[0])).astype(dtype)
    return [like_the_reference("conv2d", [x, w, *([b] if bias else [])], geometry=geometry),
            like_the_reference("conv2d_input_grad", [dy, w], size=x.shape[1:3], geometry=geometry),
            like_the_reference("conv2d_weight_grad", [x, dy], taps=w.shape[1:3], bias=bias, geometry=geometry)]


def kinds(calls: list[cuda.Call]) -> list[str]:
    return [c.kernel.partition("<")[0] if isinstance(c, cuda.Grid) else type(c).__name__ for c in calls]


@st.composite
def windows(draw: Any) -> Any:
    """Taps, stride, padding, dilation, and an image that has room for them."""
    taps, padding = (draw(st.tuples(st.integers(least, 5), st.integers(least, 5))) for least in (1, 0))
    stride, dilation = (draw(st.tuples(st.integers(1, 3), st.integers(1, 2))) for _ in range(2))
    reach = [dilation[a] * (taps[a] - 1) + 1 - 2 * padding[a] for a in (0, 1)]
    return taps, stride, padding, dilation, [max(1, r) + draw(st.sampled_from([0, 1, 2, 9])) for r in reach]


@st.composite
def square_windows(draw: Any) -> Any:
    """Those that there are depthwise kernels of their own for."""
    k, s = draw(st.sampled_from([3, 5])), draw(st.sampled_from([1, 2]))
    padding = draw(st.tuples(st.integers(0, k), st.integers(0, k)))
    return (k, k), (s, s), padding, (1, 1), [max(1, k - 2 * p) + draw(st.sampled_from([0, 1, 2, 3, 9, 14]))
                                             for p in padding]


@settings(max_examples=drawn(50), deadline=None)
@given(windows() | square_windows(), st.integers(1, 3), st.sampled_from([2, 3, 31, 64, 65, 130]),
       st.sampled_from(list(TOLERANCE)), st.booleans(), st.integers(0, 1000))
def test_depthwise(window: Any, n: int, channels: int, dtype: str, bias: bool, seed: int) -> None:
    taps, stride, padding, dilation, size = window
    geometry = Geometry(stride, padding, dilation, channels)
    calls = all_three((n, *size, channels), (channels, *taps, 1), geometry, dtype, bias, seed)
    own = str(taps[0]) if taps in ((3, 3), (5, 5)) and stride in ((1, 1), (2, 2)) and dilation == (1, 1) else ""
    assert [kinds(c)[0] for c in calls] == [f"depthwise{own}", f"depthwise{own}_input_grad",
                                            f"depthwise{own}_weight_grad"]


@pytest.mark.few(1)
@pytest.mark.parametrize(("taps", "kernel"), [((3, 3), "depthwise3"), ((5, 5), "depthwise5"), ((2, 3), "depthwise")])
def test_depthwise_with_more_pixels_than_threads(taps: tuple[int, int], kernel: str) -> None:
    """Threads go round several times, and the weight gradient is summed over several blocks: as on a
    device of 16 blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(depthwise, "FILL", 16)
        forward, back, weights = all_three((3, 21, 38, 70), (70, *taps, 1),
                                           Geometry((1, 1), (1, 2), (1, 1), 70), "float32", False)
    assert kinds([*forward, *back, *weights]) == [kernel, f"{kernel}_input_grad", f"{kernel}_weight_grad", "row_sums"]
    assert weights[0].blocks[:2] == (2, 4)
    if kernel != "depthwise":
        assert forward[0].blocks == back[0].blocks == (2, 8)


@settings(max_examples=drawn(40), deadline=None)
@given(windows(), st.integers(0, 3), st.sampled_from([1, 1, 2, 3]), st.sampled_from([1, 2, 17]),
       st.sampled_from([1, 2]), st.booleans(), st.integers(1, 3), st.integers(0, 1000))
def test_lowered(window: Any, n: int, groups: int, each: int, outputs: int, bias: bool,
                 samples: int, seed: int) -> None:
    """Also in parts of `samples` samples."""
    taps, stride, padding, dilation, size = window
    if each == outputs == 1 < groups:
        outputs = 2  # else it is depthwise
    geometry, x, w = (Geometry(stride, padding, dilation, groups), (n, *size, groups * each),
                      (groups * outputs, *taps, each))
    oh, ow = geometry.output(size, taps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_cuda, "PATCHES", samples * oh * ow * taps[0] * taps[1] * groups * each * 8)
        all_three(x, w, geometry, "float64", bias, seed)


def test_lowered_in_parts() -> None:
    geometry, x, w = Geometry((1, 1), (1, 1), (1, 1), 1), (5, 4, 4, 2), (3, 3, 3, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_cuda, "PATCHES", 2 * 16 * 18 * 8 + 100)
        forward, back, weights = all_three(x, w, geometry, "float64", True)
        reads = [np.empty(x), np.empty(w)]
        assert (KERNELS["conv2d"].cuda_work(reads, [np.empty((5, 4, 4, 3))], geometry=geometry)
                == [((2 * 16 * 18,), np.float64)])
    assert kinds(forward) == [*["im2col", "Product"] * 3, "add"]
    assert kinds(back) == ["Product", "col2im"] * 3
    assert kinds(weights) == [*["im2col", "Product"] * 3, "row_sums"]
    assert [c.accumulate for c in weights[1:6:2]] == [False, True, True]


@settings(max_examples=drawn(15), deadline=None)
@given(windows(), st.integers(0, 2), st.sampled_from([1, 2]), st.sampled_from([1, 3]),
       st.sampled_from(["float16", "float32"]), st.booleans())
def test_library(window: Any, n: int, groups: int, each: int, dtype: str, bias: bool) -> None:
    """One call, and the bias after it."""
    taps, stride, padding, dilation, size = window
    geometry = Geometry(stride, padding, dilation, groups)
    forward, back, weights = all_three((n, *size, groups * each), (2 * groups, *taps, each), geometry, dtype, bias)
    if n and (taps, stride, padding, groups) != ((1, 1), (1, 1), (0, 0), 1):
        assert kinds(forward) == ["Convolution", *(["add"] if bias else [])]
        assert kinds(back) == ["Convolution"]
        assert kinds(weights) == ["Convolution", *(["row_sums"] if bias else [])]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("bias", [False, True])
def test_pointwise_is_one_product(dtype: str, bias: bool) -> None:
    forward, back, weights = all_three((3, 5, 7, 31), (33, 1, 1, 31), Geometry((1, 1), (0, 0), (2, 2), 1), dtype, bias)
    assert kinds(forward) == ["Product"]
    assert kinds(back) == ["Product"]
    assert kinds(weights) == ["row_products"]


ONE, NONE = (1, 1), (0, 0)
WAYS = [
    ("pointwise", (8, 1, 1, 4), Geometry(ONE, NONE, ONE, 1), "float32"),
    ("pointwise", (8, 1, 1, 4), Geometry(ONE, NONE, (2, 2), 1), "float64"),
    ("library", (8, 1, 1, 4), Geometry((2, 2), NONE, ONE, 1), "float32"),
    ("library", (8, 1, 1, 4), Geometry(ONE, ONE, ONE, 1), "bfloat16"),
    ("library", (8, 1, 1, 2), Geometry(ONE, NONE, ONE, 2), "float16"),
    ("lowered", (8, 1, 1, 2), Geometry(ONE, NONE, ONE, 2), "float64"),
    ("depthwise", (4, 3, 3, 1), Geometry(ONE, ONE, ONE, 4), "float64"),
    ("depthwise", (4, 1, 1, 1), Geometry(ONE, NONE, ONE, 4), "float16"),
    ("library", (8, 3, 3, 1), Geometry(ONE, ONE, ONE, 4), "float32"),  # two filters for each channel
    ("library", (8, 3, 3, 4), Geometry(ONE, ONE, ONE, 1), "float32"),
    ("lowered", (8, 3, 3, 4), Geometry(ONE, ONE, ONE, 1), "float64"),
    ("library", (1, 3, 3, 1), Geometry(ONE, ONE, ONE, 1), "float32"),  # one channel is no depthwise convolution
]


class Shape:
    """What is known of an array when scratch arrays are planned."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype


@pytest.mark.parametrize(("way", "w", "geometry", "dtype"), WAYS)
def test_the_way_depends_on_shapes_type_and_geometry(way: str, w: Any, geometry: Geometry, dtype: str) -> None:
    x = Shape((2, 5, 5, w[3] * geometry.groups), dtype)
    assert conv_cuda.way(x, Shape(w, dtype), geometry) == way


def test_patches_stay_within_their_limit() -> None:
    x, w, y = Shape((64, 56, 56, 64), "float64"), Shape((64, 3, 3, 64), "float64"), Shape((64, 56, 56, 64), "float64")
    ((size,), dtype), = KERNELS["conv2d"].cuda_work([x, w], [y], geometry=Geometry(ONE, ONE, ONE, 1))
    assert dtype == "float64"
    assert 0.9 * conv_cuda.PATCHES < size * 8 <= conv_cuda.PATCHES
    assert size % (56 * 56 * 9 * 64) == 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("x", "w", "groups"), [((0, 4, 4, 4), (4, 3, 3, 1), 4), ((0, 4, 4, 4), (2, 1, 1, 4), 1),
                                                ((0, 4, 4, 4), (2, 3, 3, 4), 1), ((2, 0, 3, 2), (2, 3, 3, 2), 1),
                                                ((2, 0, 3, 2), (2, 3, 3, 1), 2)])
def test_nothing_to_sum_gives_zeros(x: Any, w: Any, groups: int, dtype: str) -> None:
    """No samples; no lines but padding."""
    forward, back, weights = all_three(x, w, Geometry(ONE, (2, 2), ONE, groups), dtype, True)
    assert {*kinds(forward), *kinds(back)} <= {"Zeros", "add"}
    assert {*kinds(weights)} <= {"Zeros", "row_sums"}
