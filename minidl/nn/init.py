"""Values for parameters, with torch's names: `nn.init.kaiming_normal_(layer.weight)`. Each changes the parameter and
returns it. The numbers follow from the seed and the order of calls, as layers' values do; they are not torch's."""

from __future__ import annotations

import math

from ..autograd import random
from ..autograd.initial import constant
from ..autograd.tensor import Parameter
from .module import state_shape

GAINS = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5 / 3, "relu": math.sqrt(2), "selu": 0.75}


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """The factor for a layer before this activation; `param`: leaky_relu's slope, or 0.01. Raises ValueError."""
    if nonlinearity == "leaky_relu":
        return math.sqrt(2 / (1 + (0.01 if param is None else param) ** 2))
    if nonlinearity not in GAINS:
        raise ValueError(f"unknown nonlinearity {nonlinearity!r}; known: {', '.join([*GAINS, 'leaky_relu'])}")
    return GAINS[nonlinearity]


def constant_(tensor: Parameter, val: float) -> Parameter:
    """All elements are `val`."""
    tensor.assign(constant(val, tensor.shape, tensor.dtype))
    return tensor


def zeros_(tensor: Parameter) -> Parameter:
    return constant_(tensor, 0.0)


def ones_(tensor: Parameter) -> Parameter:
    return constant_(tensor, 1.0)


def uniform_(tensor: Parameter, a: float = 0.0, b: float = 1.0) -> Parameter:
    """Uniform in [a, b)."""
    middle, half = (a + b) / 2, (b - a) / 2
    tensor.assign(random.uniform(half, tensor.shape, tensor.dtype, middle))
    return tensor


def normal_(tensor: Parameter, mean: float = 0.0, std: float = 1.0) -> Parameter:
    """Normal."""
    tensor.assign(random.normal(std, tensor.shape, tensor.dtype, mean))
    return tensor


def _fans(tensor: Parameter) -> tuple[int, int]:
    """Of a weight (outputs, inputs, taps...) in its published order: how many inputs an output has, and outputs an
    input. Raises ValueError for fewer axes."""
    shape = state_shape(tensor)
    if len(shape) < 2:
        raise ValueError(f"a parameter of shape {tensor.shape} has no inputs and outputs; give it values with normal_, "
                         f"uniform_ or zeros_")
    taps = math.prod(shape[2:])
    return shape[1] * taps, shape[0] * taps


def xavier_uniform_(tensor: Parameter, gain: float = 1.0) -> Parameter:
    """Uniform in +-gain sqrt(6 / (inputs + outputs)) (Glorot, Bengio 2010)."""
    bound = gain * math.sqrt(6 / sum(_fans(tensor)))
    return uniform_(tensor, -bound, bound)


def xavier_normal_(tensor: Parameter, gain: float = 1.0) -> Parameter:
    """Normal with deviation gain sqrt(2 / (inputs + outputs))."""
    return normal_(tensor, 0.0, gain * math.sqrt(2 / sum(_fans(tensor))))


def _kaiming(tensor: Parameter, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"the mode is {mode!r}; it must be fan_in or fan_out")
    return calculate_gain(nonlinearity, a) / math.sqrt(_fans(tensor)[mode == "fan_out"])


def kaiming_uniform_(tensor: Parameter, a: float = 0.0, mode: str = "fan_in",
                     nonlinearity: str = "leaky_relu") -> Parameter:
    """Uniform with deviation gain / sqrt(fan) (He and others 2015). `a`: the slope of leaky_relu."""
    bound = math.sqrt(3) * _kaiming(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound)


def kaiming_normal_(tensor: Parameter, a: float = 0.0, mode: str = "fan_in",
                     nonlinearity: str = "leaky_relu") -> Parameter:
    """Normal with deviation gain / sqrt(fan)."""
    return normal_(tensor, 0.0, _kaiming(tensor, a, mode, nonlinearity))
