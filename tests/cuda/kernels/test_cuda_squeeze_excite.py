"""Squeeze and excite: the CUDA form on the CPU against the reference in float64, and the launches
whose place it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_agree import DTYPES, agree, draw
from cuda_on_cpu import run_kernel
from forms import blank, on_cpu
from helpers import bits

from minidl.kernels import squeeze_excite as family
from minidl.kernels.conv import Geometry

PLAIN = Geometry((1, 1), (0, 0), (1, 1), 1)
#: (n, h, w, c), squeezed channels, launches, samples of a block, where there are to be so many blocks
CASES = [((1, 1, 1, 1), 1, 1, 1, 264), ((3, 4, 3, 5), 2, 1, 1, 264), ((2, 1, 1, 257), 31, 1, 1, 264),
         ((2, 13, 9, 33), 72, 1, 1, 264), ((1, 23, 17, 72), 24, 2, 1, 264), ((1, 2, 3, 1100), 33, 2, 1, 264),
         ((7, 3, 1, 600), 41, 2, 4, 20), ((5, 2, 1, 7), 3, 1, 2, 3)]


def operands(shape: tuple[int, ...], squeezed: int, dtype: str) -> list[Any]:
    """x, w1, b1, w2, b2. Gates are small, large and between."""
    c = shape[3]
    w1, w2 = (draw((squeezed, 1, 1, c), 2, "float64") / c**0.5,
              3 * draw((c, 1, 1, squeezed), 4, "float64") / squeezed**0.5)
    return [draw(shape, 1, dtype, 0.5), w1.astype(dtype), draw(squeezed, 3, dtype), w2.astype(dtype), draw(c, 5, dtype)]


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "squeezed", "launches", "group", "blocks"), CASES, ids=str)
def test_both_are_the_reference(shape: tuple[int, ...], squeezed: int, launches: int, group: int, blocks: int,
                                dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "BLOCKS", blocks)
    x, w1, b1, w2, b2 = operands(shape, squeezed, dtype)
    assert family._plan(x, w1, 4).group == group
    made = agree("squeeze_excite", [x, w1, b1, w2, b2], times=2)
    assert len(run_kernel("squeeze_excite", [x, w1, b1, w2, b2], made)) == launches
    *_, hidden, pre = made
    if dtype == "float16":
        pre[np.abs(np.abs(pre) - 3) < 0.1] = 0  # the slope of a kink's two sides
    reads = [draw(shape, 6, dtype), x, w1, w2, hidden, pre]
    made = agree("squeeze_excite_input_grad", reads, times=4)
    assert len(run_kernel("squeeze_excite_input_grad", reads, made)) == launches


def test_plans() -> None:
    """Several samples share a block where there are enough of them; never more than shared memory holds."""
    def plan(samples: int, pixels: int, channels: int, squeezed: int, size: int = 4) -> Any:
        return family._plan(np.empty((samples, 1, pixels, channels), bool),
                            np.empty((squeezed, 1, 1, channels), bool), size)

    assert [plan(n, 49, 960, 240)[:3] for n in (32, 64, 128)] == [(1, 64, 15), (2, 64, 15), (4, 64, 15)]
    assert plan(32, 1, 240, 64)[:3] == (1, 256, 1)
    assert plan(32, 784, 72, 24)[:3] == (1, 32, 3)
    assert [plan(4096, 4, 2048, 512, size).group for size in (4, 8)] == [4, 4]
    assert [plan(4096, 4, 4096, 1024, size).group for size in (4, 8)] == [4, 2]


def parts(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, dy: Any) -> dict[str, Any]:
    """Everything by the launches that stand in the kernels' docstring."""
    c, s = x.shape[3], len(w1)
    full = {k: np.full_like(x, np.nan) for k in ("y", "direct", "product", "dx")}
    wide = {k: np.full((len(x), 1, 1, c), np.nan, x.dtype) for k in ("mean", "pre", "gate", "dgate", "dpre", "dmean")}
    narrow = {k: np.full((len(x), 1, 1, s), np.nan, x.dtype) for k in ("r", "hidden", "dh", "dhidden")}
    a = {"x": x, "w1": w1, "b1": b1, "w2": w2, "b2": b2, "dy": dy, **full, **wide, **narrow}
    share, one = 1.0 / (x.shape[1] * x.shape[2]), {"size": (1, 1), "geometry": PLAIN}
    for kernel, reads, write, constants in (
            ("sum", "x", "mean", {"axes": (1, 2), "factor": share}), ("conv2d", "mean w1 b1", "r", {"geometry": PLAIN}),
            ("relu", "r", "hidden", {}), ("conv2d", "hidden w2 b2", "pre", {"geometry": PLAIN}),
            ("hardsigmoid", "pre", "gate", {}), ("mul", "x gate", "y", {}), ("mul", "dy gate", "direct", {}),
            ("mul", "dy x", "product", {}), ("sum", "product", "dgate", {"axes": (1, 2)}),
            ("hardsigmoid_grad", "pre dgate", "dpre", {}), ("conv2d_input_grad", "dpre w2", "dh", one),
            ("relu_grad", "hidden dh", "dhidden", {}), ("conv2d_input_grad", "dhidden w1", "dmean", one),
            ("spread", "dmean x", "dx", {"factor": share}), ("add", "direct dx", "dx", {})):
        on_cpu(kernel, [a[k] for k in reads.split()], [a[write]], **constants)
    return a


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(3, 4, 3, 5), (2, 7, 7, 72), (5, 3, 3, 40)], ids=str)
def test_the_cpu_form_has_the_bits_of_its_parts(shape: tuple[int, ...], dtype: str) -> None:
    x, w1, b1, w2, b2, dy = given = [*operands(shape, 11, dtype), draw(shape, 6, dtype)]
    many = parts(*given)
    for kernel, reads, names in (("squeeze_excite", [x, w1, b1, w2, b2], ("y", "mean", "hidden", "pre")),
                                 ("squeeze_excite_input_grad", [dy, x, w1, w2, many["hidden"], many["pre"]],
                                  ("dx", "dpre", "dhidden"))):
        for name, found in zip(names, on_cpu(kernel, reads, blank([many[n] for n in names])), strict=True):
            assert bits(found) == bits(many[name]), name


def test_nan_of_one_sample_stays_there() -> None:
    x, *rest = operands((3, 2, 2, 40), 6, "float32")
    x[1, 0, 1, 7] = np.nan
    writes = [np.empty_like(x), *(np.empty((3, 1, 1, n), "float32") for n in (40, 6, 40))]
    run_kernel("squeeze_excite", [x, *rest], writes)
    assert [bool(np.isnan(w[1]).any()) for w in writes] == [True] * 4
    assert np.isfinite(writes[0][[0, 2]]).all()
    assert np.isnan(writes[0][1]).all()


def test_no_samples_and_too_many_channels() -> None:
    assert not family.fits(np.empty((0, 2, 2, 5)), np.empty((3, 1, 1, 5)))
    assert family.fits(np.empty((1, 1, 1, 960)), np.empty((240, 1, 1, 960)))
    assert not family.fits(np.empty((1, 1, 1, 960)), np.empty((9600, 1, 1, 960)))
