"""Launches of several blocks that are small enough for real threads. Run by `test_cuda_sanitizers` alone, which keeps
them; what they compute is tested elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_cpu import run, run_kernel
from helpers import random_array
from kernel_examples import arrays, examples

from minidl.kernels import KERNELS, cuda
from minidl.kernels.conv import Geometry
from minidl.kernels.small_product import small_product


# the second: no four neighbours at once, and more than two blocks
@pytest.mark.parametrize("sizes", [(3, 4), (37, 31)])
def test_examples(sizes):
    for example in examples(*sizes):
        if KERNELS[example.kernel]._cuda is not None:
            for dtype in ("float32", "float64"):
                run_kernel(example.kernel, *arrays(example, dtype), constants=example.constants)


def test_reductions_to_many():
    x = random_array((3, 500), 1, "float32")
    out = np.empty((1, 500), "float32")
    run_kernel("sum", [x], [out], axes=(0,), factor=1.0)
    run_kernel("max", [x], [out], axes=(0,))
    run_kernel("max_grad", [x, out, out], [x.copy()], axes=(0,))


def test_pools():
    x, window = random_array((2, 8, 8, 17), 1, "float32"), {"window": (3, 3), "stride": (2, 2), "padding": (1, 1)}
    y, tap = np.empty((2, 4, 4, 17), "float32"), np.empty((2, 4, 4, 17), np.int32)
    run_kernel("max_pool2d", [x], [y, tap], **window)
    run_kernel("avg_pool2d", [x], [y], **window)


@pytest.mark.parametrize("taps", [3, 5, 2])
def test_depthwise_convolutions(taps):
    geometry = Geometry((1, 1), (taps // 2, taps // 2), (1, 1), 33)
    x, w = random_array((1, 5, 6, 33), 1, "float32"), random_array((33, taps, taps, 1), 2, "float32")
    y = np.empty((1, *geometry.output(x.shape[1:3], w.shape[1:3]), 33), "float32")
    run_kernel("conv2d", [x, w], [y], geometry=geometry)
    run_kernel("conv2d_input_grad", [y, w], [x.copy()], size=x.shape[1:3], geometry=geometry)
    run_kernel("conv2d_weight_grad", [x, y], [w.copy()], taps=w.shape[1:3], bias=False, geometry=geometry)


def test_casts():
    for rows in (3, 37):
        x, y = random_array((rows, 31), 1, "float32"), np.empty((rows, 31), "float16")
        run_kernel("cast", [x], [y], dtype="float16")
        run_kernel("cast_many", [x, x[:2]], [y, y[:2].copy()], dtype="float16")


def test_small_products():
    """Of several tiles, slices and matrices, with all that may be inside."""
    a, b = random_array((3, 20, 70), 1, "float32"), random_array((3, 70, 33), 2, "float32")
    run(small_product(cuda.Product(a, b, np.empty((3, 20, 33), "float32"))))
    out, bias, sums = np.zeros((20, 33), "float32"), random_array((33,), 3, "float32"), np.empty(20, "float32")
    run(small_product(cuda.Product(a[0], b[0], out, bias, True, "relu", sums)))
    run(small_product(cuda.Product(a[0, :5, :9], b[0, :9, :4], out[:5, :4], sums=sums[:5])))
