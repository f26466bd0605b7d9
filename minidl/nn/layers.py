"""Layers of any network: linear, activations, dropout, flatten."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .. import ops
from ..autograd import random
from ..autograd.tensor import Parameter, Tensor
from .module import Module


class Linear(Module):
    """x (..., inputs) -> (..., outputs); weight (outputs, inputs), uniform in +-1/sqrt(inputs) as in torch."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, dtype: str = "float32") -> None:
        if in_features < 1 or out_features < 1:
            raise ValueError(f"Linear({in_features}, {out_features}): both sizes must be at least 1")
        bound = 1 / math.sqrt(in_features)
        self.weight = Parameter(random.uniform(bound, (out_features, in_features), dtype))
        if bias:
            self.bias = Parameter(random.uniform(bound, out_features, dtype))

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, getattr(self, "bias", None))


class Dropout(Module):
    """Drops elements with probability `p` while training."""

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p < 1:
            raise ValueError(f"the dropout rate is {p}; it must be at least 0 and below 1")
        self.rate = p

    def forward(self, x: Tensor) -> Tensor:
        return ops.dropout(x, self.rate) if self.training else x


class Flatten(Module):
    """(n, ...) -> (n, the product of the other lengths)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.flatten(x, 1)


class ReLU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.relu(x)


class GELU(Module):
    """x Phi(x); `approximate`: "none", or "tanh" for the form with tanh."""

    def __init__(self, approximate: str = "none") -> None:
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return ops.gelu(x, self.approximate)


class SiLU(Module):
    """x sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.silu(x)


class ELU(Module):
    """x above 0, alpha (exp(x) - 1) below."""

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        return ops.elu(x, self.alpha)


class Softplus(Module):
    """log(1 + exp(x))."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.softplus(x)


class LogSigmoid(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.logsigmoid(x)


class Mish(Module):
    """x tanh(softplus(x))."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.mish(x)


class Hardtanh(Module):
    """x, at least `min_val` and at most `max_val`."""

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0) -> None:
        self.bounds = min_val, max_val

    def forward(self, x: Tensor) -> Tensor:
        return ops.clamp(x, *self.bounds)


class Identity(Module):
    """x; whatever arguments it is made with."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return x


class LeakyReLU(Module):
    """x above 0, `negative_slope` times x below."""

    def __init__(self, negative_slope: float = 0.01) -> None:
        self.slope = negative_slope

    def forward(self, x: Tensor) -> Tensor:
        return ops.leaky_relu(x, self.slope)


class Softmax(Module):
    """Over the axis `dim`."""

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return ops.softmax(x, self.dim)


class LogSoftmax(Module):
    """Over the axis `dim`."""

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return ops.log_softmax(x, self.dim)


class Sigmoid(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.sigmoid(x)


class Tanh(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.tanh(x)


class SELU(Module):
    """`elu` with the slope and scale that keep mean and variance."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.selu(x)


class CELU(Module):
    """x above 0, alpha (exp(x / alpha) - 1) below."""

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        return ops.celu(x, self.alpha)


class Softsign(Module):
    """x / (1 + abs(x))."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.softsign(x)


class PReLU(Module):
    """x above 0, a parameter times x below: one for all, or one for each of the channels, which are last."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25, dtype: str = "float32") -> None:
        if num_parameters < 1:
            raise ValueError(f"PReLU({num_parameters}): at least one parameter is needed")
        self.weight = Parameter(np.full(num_parameters, init, dtype))

    def forward(self, x: Tensor) -> Tensor:
        return ops.prelu(x, self.weight)


class GLU(Module):
    """The first half along the axis `dim` times the sigmoid of the second."""

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return ops.glu(x, self.dim)


class Unflatten(Module):
    """The axis `dim` as several axes of these lengths, of which one may be -1."""

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        self.dim, self.sizes = dim, tuple(unflattened_size)

    def forward(self, x: Tensor) -> Tensor:
        dim = self.dim % x.ndim
        return ops.reshape(x, (*x.shape[:dim], *self.sizes, *x.shape[dim + 1 :]))
