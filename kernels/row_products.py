"""Small products on CUDA of two matrices that lie row by row, as the gradients of weights are: a^T b, with the sums of
a's rows. The matrices may have any steps. Many rows are cut into shares, which a second launch adds in order.

The form depends on shapes alone, so bits are equal by itself and in a group (`minidl.passes.group`).
"""

from __future__ import annotations

from typing import Any

from .cuda import Call, Grid, c_type
from .registry import flat
from .sums import cuda_row_sums

SHARE = 512  #: rows that a block adds at most
TILE = 32


def cuda_row_products_work(rows: int, m: int, n: int, bias: bool) -> list[Any]:
    """The scratch array of the shares; one share needs none of it."""
    shares = -(-rows // SHARE)
    return [((shares, m * (n + bias)) if shares > 1 else (1, 1), "float64")]


def cuda_row_products(a: Any, b: Any, out: Any, bias: Any, part: Any) -> list[Call]:
    """out (m, n) = a^T b of a (rows, m) and b (rows, n); bias (m,), unless it is None, the sums of a's rows."""
    (rows, m), n, out, shares = a.shape, b.shape[1], flat(out), len(part)
    tiles = -(-(n + (bias is not None)) // TILE), -(-m // TILE), shares
    steps = [s // x.dtype.itemsize for x in (a, b) for s in x.strides]
    call = Grid("row_products.cu", f"row_products<{c_type(out)}>", tiles, (TILE * TILE // 4,),
                (a, b, out, out if bias is None else bias, part, rows, *steps, -(-rows // shares), m, n,
                 int(bias is not None), 0))
    sums = [(part[:, : m * n], out), *([] if bias is None else [(part[:, m * n :], bias)])] if shares > 1 else []
    return [call, *(one for source, to in sums for one in cuda_row_sums(source, to))]
