"""Initial values: a rule for them, which is applied when somebody first asks for a tensor's data.

So a network that is only recorded or planned has shapes and types and takes no memory, and a rank draws only what it
trains. Each draw is keyed by its place among the draws since the seed, so the bits do not depend on when it happens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

PURPOSES = ("weights", "order", "augment", "dropout", "synthetic", "split", "tensors", "text", "time steps", "gossip")


def generator_of(seed: int, purpose: str, *index: int) -> np.random.Generator:
    """The generator of one seed, purpose and index. The same arguments always give the same numbers; different
    arguments give independent numbers."""
    # a spawn key, since SeedSequence([1, 2]) and SeedSequence([1, 2, 0]) are the same
    place = np.random.SeedSequence(seed, spawn_key=(PURPOSES.index(purpose), *index))
    return np.random.Generator(np.random.Philox(place))


@dataclass(frozen=True)
class Initial:
    """`middle` plus a draw: `scale` times normal numbers, or uniform ones in +-`scale`; `middle` alone for the law
    "constant". Draw number `number` since the seed. `types`: casts of the float64 values, one after the other.

    Equal rules give equal bits.
    """

    law: str
    shape: tuple[int, ...]
    types: tuple[str, ...]
    scale: float = 0.0
    middle: float = 0.0
    seed: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        if any(n < 0 for n in self.shape):
            raise ValueError(f"the shape {self.shape} has a negative length")

    @property
    def dtype(self) -> str:
        return self.types[-1]

    def astype(self, dtype: str, copy: bool = True) -> Initial:
        """The same values cast to this type."""
        return self if dtype == self.dtype else replace(self, types=(*self.types, str(np.dtype(dtype))))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        values: Any
        if self.law == "constant":
            values = np.full(self.shape, self.middle)
        else:
            draw = generator_of(self.seed, "weights", self.number)
            values = (draw.uniform(-self.scale, self.scale, self.shape) if self.law == "uniform"
                      else self.scale * draw.standard_normal(self.shape))
            if self.middle:
                values += self.middle
        for each in self.types:
            values = values.astype(each, copy=False)
        return np.asarray(values, dtype)


@dataclass(frozen=True)
class Elsewhere:
    """In place of values: that each rank has a share of them."""

    name: str

    def astype(self, dtype: str, copy: bool = True) -> Any:
        """Raises RuntimeError, as all uses of the values do."""
        return self.__array__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        raise RuntimeError(f"the values of {self.name} are in the shares of all ranks; RankTrainer.share brings them "
                           f"together on rank 0")


def constant(value: float, shape: Any, dtype: str) -> Initial:
    """The same number everywhere. `shape`: also the length of the one axis."""
    return Initial("constant", shape_of(shape), (str(np.dtype(dtype)),), middle=float(value))


def shape_of(shape: Any) -> tuple[int, ...]:
    """A shape, or the length of the one axis, as a shape."""
    return (int(shape),) if np.ndim(shape) == 0 else tuple(shape)
