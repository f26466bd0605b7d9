"""The parts that GPT and BERT share."""

from __future__ import annotations

from typing import Any

from .. import nn
from ..autograd import random
from ..autograd.initial import constant
from ..autograd.tensor import Parameter

DEVIATION = 0.02  #: the standard deviation of new weights


class Linear(nn.Linear):
    """A linear layer with normal weights and at first without a bias. `transposed`: a state dict has its weight as
    (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int, deviation: float = DEVIATION, transposed: bool = False) -> None:
        values = random.normal(deviation, (outputs, inputs), "float32")
        self.weight = Parameter(values, axes=(1, 0) if transposed else None)
        self.bias = Parameter(constant(0, outputs, "float32"))


class Embedding(nn.Embedding):
    """Rows with normal weights of a small deviation."""

    def __init__(self, rows: int, width: int) -> None:
        self.weight = Parameter(random.normal(DEVIATION, (rows, width), "float32"))


def check_heads(name: str, width: int, heads: int) -> None:
    """Raises ValueError if the heads do not divide the width."""
    if width % heads:
        raise ValueError(f"{name}: {heads} heads do not divide the width {width}")


def check_length(name: str, ids: Any, positions: nn.Embedding, begin: int = 0) -> None:
    """Raises ValueError if ids are not (n, t) with t at most the number of positions from `begin` on."""
    longest = positions.weight.shape[0] - begin
    if ids.ndim != 2 or not 1 <= ids.shape[1] <= longest:
        raise ValueError(f"{name}: tokens {ids.shape}; expected (n, t) with t from 1 to {longest}")
