"""A product that is added to a matrix, as cuBLASLt does at no cost: another launch would read and write all of it."""

from __future__ import annotations

from typing import Any

from .cuda import Copy, pointer
from .linear import gemm_add, product
from .registry import kernel


@kernel("matmul_add", axes="mk,ko,mo->mo", flops=lambda reads, writes: 2.0 * writes[0].size * reads[0].shape[-1],
        work=lambda reads, writes: [(writes[0].shape, writes[0].dtype)])
def matmul_add(xp: Any, a: Any, b: Any, more: Any) -> Any:
    """more (m, n) + a (m, k) @ b (k, n). The result may lie where `more` lies. On CUDA it is rounded once."""
    return more + xp.matmul(a, b)


@matmul_add.cpu
def _(a: Any, b: Any, more: Any, y: Any, work: Any) -> Any:
    return gemm_add(a, b, more, y, work)


@matmul_add.cuda()
def _(a: Any, b: Any, more: Any, y: Any) -> Any:
    if not y.size:
        return []
    return [*([] if pointer(more) == pointer(y) else [Copy(more, y)]), *product(a, b, y, accumulate=True)]
