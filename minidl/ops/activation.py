"""Activations beside the usual ones."""

from __future__ import annotations

from ..autograd.tensor import Tensor
from .elementwise import _Unary, exp, tanh
from .masks import clamp, where
from .pair_loss import softplus


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


class SiLU(_Unary):
    name = "silu"

    def saved(self) -> list[Tensor]:
        return [self.x]


class LeakyReLU(_Unary):
    name = "leaky_relu"

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


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), also called swish."""
    return SiLU()(x)


def leaky_relu(x: Tensor, slope: float = 0.01) -> Tensor:
    """x where it is above 0, `slope` times x elsewhere."""
    return LeakyReLU(slope=float(slope))(x)


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x where it is above 0, alpha (exp(x) - 1) elsewhere."""
    return where(x > 0, x, (exp(clamp(x, max=0.0)) - 1.0) * alpha)


def logsigmoid(x: Tensor) -> Tensor:
    """log(sigmoid(x)), for any x."""
    return -softplus(-x)


def mish(x: Tensor) -> Tensor:
    """x tanh(softplus(x))."""
    return x * tanh(softplus(x))
