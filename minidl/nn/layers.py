"""Layers of any network: linear, activations, dropout, flatten."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .. import ops
from ..autograd import random
from ..autograd.arguments import Float, Rate, Size
from ..autograd.initial import constant
from ..autograd.tensor import Parameter, Tensor
from ..ops.shape import axis_of
from .module import Module


class Linear(Module):
    """x (..., inputs) -> (..., outputs); weight (outputs, inputs), uniform in +-1/sqrt(inputs) as in torch."""

    def __init__(self, in_features: Size, out_features: Size, bias: bool = True, *, dtype: Float = "float32") -> None:
        bound = 1 / math.sqrt(in_features)
        self.weight = Parameter(random.uniform(bound, (out_features, in_features), dtype))
        if bias:
            self.bias = Parameter(random.uniform(bound, out_features, dtype))

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, getattr(self, "bias", None))


class Dropout(Module):
    """Drops elements with probability `p` while training."""

    def __init__(self, p: Rate = 0.5) -> None:
        self.rate = p

    def forward(self, x: Tensor) -> Tensor:
        return ops.dropout(x, self.rate) if self.training else x


class Flatten(Module):
    """(n, ...) -> (n, the product of the other lengths)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.flatten(x, 1)


class Hardtanh(Module):
    """x, at least `min_val` and at most `max_val`."""

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0) -> None:
        if min_val > max_val:
            raise ValueError(f"Hardtanh: min_val {min_val} is above max_val {max_val}")
        self.bounds = min_val, max_val

    def forward(self, x: Tensor) -> Tensor:
        return ops.clamp(x, *self.bounds)


class Identity(Module):
    """x; whatever arguments it is made with."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return x


class PReLU(Module):
    """x above 0, a parameter times x below: one for all, or one for each of the channels, which are last."""

    def __init__(self, num_parameters: Size = 1, init: float = 0.25, *, dtype: Float = "float32") -> None:
        self.weight = Parameter(constant(init, num_parameters, dtype))

    def forward(self, x: Tensor) -> Tensor:
        return ops.prelu(x, self.weight)


class Unflatten(Module):
    """The axis `dim` as several axes of these lengths, of which one may be -1."""

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        self.dim, self.sizes = dim, tuple(unflattened_size)

    def forward(self, x: Tensor) -> Tensor:
        dim = axis_of(x, self.dim, "Unflatten")
        return ops.reshape(x, (*x.shape[:dim], *self.sizes, *x.shape[dim + 1 :]))
