"""A product with the slope of an activation behind it: the gradient toward the input of a layer whose input is an
activation's output."""

from __future__ import annotations

from typing import Any

from .linear import cpu_act, gemm, product
from .registry import KERNELS, kernel

SLOPES = ("relu_grad", "gelu_tanh_grad")  #: kernels (seen, dy) -> dx that a product may end with


@kernel("matmul_slope", axes="mk,ko,mo->mo", flops=lambda reads, writes: 2.0 * writes[0].size * reads[0].shape[-1])
def matmul_slope(xp: Any, a: Any, b: Any, seen: Any, *, act: str) -> Any:
    """The kernel `act` of seen (m, n) and a (m, k) @ b (k, n)."""
    return KERNELS[act].reference(xp, seen, xp.matmul(a, b))


@matmul_slope.cpu
def _(a: Any, b: Any, seen: Any, y: Any, *, act: str) -> Any:
    return [gemm(a, b, y), *cpu_act(act, seen, y)]


@matmul_slope.cuda()
def _(a: Any, b: Any, seen: Any, y: Any, *, act: str) -> Any:
    return product(a, b, y, act=act, seen=seen)
