"""A product that is added to a matrix, on CUDA and on the CPU, against its reference in float64."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_agree import agree, draw
from cuda_on_cpu import run_kernel
from forms import on_cpu


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 5, 3), (33, 16, 8)], ids=str)
def test_a_product_that_is_added(shape: tuple[int, int, int], dtype: str) -> None:
    """To another array and in place, with the same bits; also without columns or rows."""
    m, k, n = shape
    a, b, more = draw((m, k), 1, dtype), draw((k, n), 2, dtype), draw((m, n), 3, dtype)
    (y,) = agree("matmul_add", [a, b, more], times=4)
    (in_place,) = agree("matmul_add", [a, b, more], {0: 2}, times=4)
    assert in_place.tobytes() == y.tobytes()
    if dtype != "float16":
        (on_host,) = on_cpu("matmul_add", [a, b, more], [np.full_like(more, np.nan)])
        np.testing.assert_allclose(on_host, y, rtol=1e-5, atol=1e-6)
    kept = more.copy()
    run_kernel("matmul_add", [a[:, :0], b[:0], more], [more])
    assert more.tobytes() == kept.tobytes()
    assert run_kernel("matmul_add", [a[:0], b, more[:0]], [more[:0]]) == []
