"""The resources that a plan may use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .schedule import MOST_LANES


def shorten(value: Any) -> str:
    """A value as one short line of a message."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def is_whole(value: Any, least: int = 1) -> bool:
    """Whether it is a whole number of at least `least`."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and value == value  # no NaN


class PlanError(ValueError):
    """No plan can satisfy the request. The message says what is wrong with it."""


@dataclass(frozen=True)
class Machine:
    """The resources of a plan. `ranks`: processes that train together; the cost model has the link between them.
    `replicas`: the number of pipelines with `ranks` ranks each that train together, each on its share of every batch.

    `memory_limit`: the most bytes per rank. `activation_cap`: the most live activations per rank of a pipeline, in
    units of a full stage. `collective`: from {unit: bytes that travel} to the time of their sum over the ranks, in the
    costs' unit; None if the costs already include it. Raises PlanError for values that no machine has.
    """

    ranks: int = 1
    memory_limit: int | None = None
    activation_cap: float | None = None
    collective: Callable[[Mapping[int, int]], float] | None = None
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks", "replicas"):
            value = getattr(self, name)
            if not is_whole(value) or value > MOST_LANES:
                raise PlanError(f"{name} is {shorten(value)}; it must be a whole number from 1 to {MOST_LANES}")
        if self.size > MOST_LANES:
            raise PlanError(f"{self.replicas} replicas of {self.ranks} ranks are more than {MOST_LANES} ranks")
        for name in ("memory_limit", "activation_cap"):
            value = getattr(self, name)
            if value is not None and not is_number(value):
                raise PlanError(f"{name} is {shorten(value)}; it must be a number, or None")
        if self.collective is not None and not callable(self.collective):
            raise PlanError(f"collective is {shorten(self.collective)}; it must be a function, or None")

    @property
    def size(self) -> int:
        """The ranks of all replicas."""
        return self.ranks * self.replicas
