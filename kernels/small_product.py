"""Products of small matrices as one launch of a kernel of ours: bias, relu and the gradient of a bias are inside.

A library's product of 64 x 64 takes a few microseconds that have little to do with its size. This kernel is one more
candidate there, see `minidl/devices/cuda/products.py`. Sums are made in `sum_type`, in an order that only the shape
decides.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .cuda import Grid, Product, Struct, c_type

LARGEST, DEEPEST = 1 << 15, 1024  #: elements of a result, as many as 128 x 256; products of each
ACTS = ("", "relu", "relu_grad", "gelu_tanh_grad")  #: as small_product.cu numbers them
TILE, THREADS = 16, 256  #: of a block
#: `SmallProduct` of small_product.cu
PROBLEM = np.dtype([*((name, np.int32) for name in ("m", "n", "k", "count")),
                    *((name, np.int64) for name in ("a_row", "a_k", "a_next", "b_column", "b_k", "b_next", "out_row",
                                                    "out_next")),
                    *((name, np.int32) for name in ("accumulate", "act", "biased", "summed"))], align=True)


def fits(p: Product) -> bool:
    """Whether the kernel can compute this product."""
    *lead, m, n = p.out.shape
    arrays = [x for x in (p.a, p.b, p.out, p.bias, p.sums, p.seen) if x is not None]
    return (p.out.size > 0 and m * n <= LARGEST and 0 < p.a.shape[-1] <= DEEPEST
            and len({x.dtype for x in arrays}) == 1 and p.out.dtype.kind not in "iu"
            and (n == 1 or p.out.strides[-1] == p.out.itemsize)
            and (p.bias is None or n == 1 or p.bias.strides[0] == p.bias.itemsize)
            and (p.sums is None or not lead)
            and p.act in ACTS and (p.seen is None or p.seen.strides == p.out.strides))


def small_product(p: Product) -> Grid:
    """The launch of a product that `fits`. Leading axes have one step from matrix to matrix, as for a BLAS."""
    *lead, m, n = p.out.shape
    count = int(np.prod(lead, dtype=np.int64))

    def steps(x: Any) -> tuple[int, int, int]:
        """From row to row, from column to column, and from matrix to matrix."""
        *outer, row, column = (s // x.itemsize for s in x.strides)
        return row, column, next((s for s, k in zip(reversed(outer), reversed(x.shape[:-2]), strict=True) if k > 1), 0)

    (a_row, a_k, a_next), (b_k, b_column, b_next), (out_row, _, out_next) = map(steps, (p.a, p.b, p.out))
    values = (m, n, p.a.shape[-1], count, a_row, a_k, a_next, b_column, b_k, b_next, out_row, out_next,
              p.accumulate, ACTS.index(p.act), p.bias is not None, p.sums is not None)
    bias, sums, seen = (p.out if x is None else x for x in (p.bias, p.sums, p.seen))  # the kernel leaves it alone
    return Grid("small_product.cu", f"small_product<{c_type(p.out)}>",
                (-(-n // TILE), -(-m // TILE), min(count, 65535)), (THREADS,),
                (p.a, p.b, p.out, bias, sums, seen, Struct("SmallProduct", np.array(values, PROBLEM).tobytes())))
