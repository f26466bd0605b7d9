"""Dropout."""

from __future__ import annotations

from ..autograd import random
from ..autograd import tape as tapes
from ..autograd.op import Op, same_dtype
from ..autograd.tensor import Tensor


class Dropout(Op):
    """Zero with probability `rate`, else scaled up. The gradient draws the same random bits again."""

    name = "dropout"

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        dtype = same_dtype(self, x)
        if not x.ndim:
            raise self.error("the input must have a batch axis, not be a scalar")
        self.x = self.dense(x)
        self.counter, key = next_draw()
        self.constants = {"rate": self.rate, **key}
        return self.out_by("dropout", [self.x, self.counter], x.shape, dtype, **self.constants)

    def input_grad(self, i: int, dy: Tensor) -> Tensor:
        return self.grad_by("dropout", [self.dense(dy), self.counter], self.x, **self.constants)


def next_draw() -> tuple[Tensor, dict[str, int]]:
    """The counter and the constants that key the next draw: of a dropout, or of random numbers."""
    tape = tapes.current()
    counter, draw = tape.draw(Tensor(random.dropout_counter()))
    return counter, {"seed": random.current_seed() & (2**64 - 1), "draw": draw, "sample": tape.place.sample}


def check_rate(rate: float) -> None:
    """Raises ValueError for a rate that is not in [0, 1)."""
    if not 0 <= rate < 1:
        raise ValueError(f"the dropout rate is {rate}; it must be at least 0 and below 1")


def dropout(x: Tensor, rate: float = 0.5) -> Tensor:
    """x (n, ...): elements dropped with probability `rate` in [0, 1), the rest times 1 / (1 - rate)."""
    check_rate(rate)
    return Dropout(rate)(x) if rate else x
