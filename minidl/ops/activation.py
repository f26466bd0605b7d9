"""Piecewise activations of mobile networks."""

from __future__ import annotations

from ..autograd.tensor import Tensor
from .elementwise import _Unary


class Relu6(_Unary):
    name = "relu6"


class HardSigmoid(_Unary):
    name = "hardsigmoid"

    def saved(self) -> list[Tensor]:
        return [self.x]


class HardSwish(_Unary):
    name = "hardswish"

    def saved(self) -> list[Tensor]:
        return [self.x]


def relu6(x: Tensor) -> Tensor:
    """min(max(x, 0), 6)."""
    return Relu6()(x)


def hardsigmoid(x: Tensor) -> Tensor:
    """min(max(x + 3, 0), 6) / 6."""
    return HardSigmoid()(x)


def hardswish(x: Tensor) -> Tensor:
    """x min(max(x + 3, 0), 6) / 6."""
    return HardSwish()(x)
