"""Values for parameters, with torch's names: `nn.init.kaiming_normal_(layer.weight)`. Each changes the parameter and
returns it. The numbers follow from the seed and the order of calls, as those of layers do; they are not torch's."""

from __future__ import annotations

import math

import numpy as np

from ..autograd import random
from ..autograd.tensor import Parameter

GAINS = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5 / 3, "relu": math.sqrt(2), "selu": 0.75}


def calculate_gain(nonlinearity: str, slope: float = 0.01) -> float:
    """The factor for a layer before this activation; `slope` is that of leaky_relu. Raises ValueError for others."""
    if nonlinearity == "leaky_relu":
        return math.sqrt(2 / (1 + slope**2))
    if nonlinearity not in GAINS:
        raise ValueError(f"unknown nonlinearity {nonlinearity!r}; known: {', '.join([*GAINS, 'leaky_relu'])}")
    return GAINS[nonlinearity]


def constant_(p: Parameter, value: float) -> Parameter:
    """All elements are `value`."""
    p.assign(np.asarray(value, p.dtype))
    return p


def zeros_(p: Parameter) -> Parameter:
    return constant_(p, 0.0)


def ones_(p: Parameter) -> Parameter:
    return constant_(p, 1.0)


def uniform_(p: Parameter, low: float = 0.0, high: float = 1.0) -> Parameter:
    """Uniform in [low, high)."""
    middle, half = (low + high) / 2, (high - low) / 2
    p.assign((middle + random.uniform(half, p.shape, "float64")).astype(p.dtype))
    return p


def normal_(p: Parameter, mean: float = 0.0, std: float = 1.0) -> Parameter:
    """Normal."""
    p.assign((mean + random.normal(std, p.shape, "float64")).astype(p.dtype))
    return p


def _fans(p: Parameter) -> tuple[int, int]:
    """Of a weight (outputs, inputs, taps...) in its published order: how many inputs an output has, and outputs an
    input. Raises ValueError for fewer axes."""
    shape = [p.shape[a] for a in p.axes] if p.axes else list(p.shape)
    if len(shape) < 2:
        raise ValueError(f"a parameter of shape {p.shape} has no inputs and outputs; give it values with normal_, "
                         f"uniform_ or zeros_")
    taps = math.prod(shape[2:])
    return shape[1] * taps, shape[0] * taps


def xavier_uniform_(p: Parameter, gain: float = 1.0) -> Parameter:
    """Uniform in +-gain sqrt(6 / (inputs + outputs)) (Glorot, Bengio 2010)."""
    bound = gain * math.sqrt(6 / sum(_fans(p)))
    return uniform_(p, -bound, bound)


def xavier_normal_(p: Parameter, gain: float = 1.0) -> Parameter:
    """Normal with deviation gain sqrt(2 / (inputs + outputs))."""
    return normal_(p, 0.0, gain * math.sqrt(2 / sum(_fans(p))))


def _kaiming(p: Parameter, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"the mode is {mode!r}; it must be fan_in or fan_out")
    return calculate_gain(nonlinearity, a) / math.sqrt(_fans(p)[mode == "fan_out"])


def kaiming_uniform_(p: Parameter, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Parameter:
    """Uniform with deviation gain / sqrt(fan) (He and others 2015). `a`: the slope of leaky_relu."""
    bound = math.sqrt(3) * _kaiming(p, a, mode, nonlinearity)
    return uniform_(p, -bound, bound)


def kaiming_normal_(p: Parameter, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Parameter:
    """Normal with deviation gain / sqrt(fan)."""
    return normal_(p, 0.0, _kaiming(p, a, mode, nonlinearity))
