"""The batches and results of several steps that one launch runs, side by side in memory: here on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class Ring:
    """Room for `count` steps. Before step i its inputs are copied from row i of `ins` to the places where a step reads
    them, and after it its outputs to row i of `outs`. All places are contiguous."""

    def __init__(self, inputs: Sequence[Any], outputs: Sequence[Any], count: int) -> None:
        self.count = count
        self.ins, self.outs = ([np.empty((count, *a.shape), a.dtype) for a in arrays] for arrays in (inputs, outputs))
        self.takes, self.gives = [*zip(self.ins, inputs, strict=True)], [*zip(self.outs, outputs, strict=True)]

    def put(self, step: int, values: Sequence[Any]) -> None:
        """Puts a step's inputs at its place."""
        for own, value in zip(self.ins, values, strict=True):
            own[step] = value

    def take(self, step: int) -> None:
        for own, place in self.takes:
            place[...] = own[step]

    def give(self, step: int) -> None:
        for own, place in self.gives:
            own[step] = place

    def results(self, steps: int) -> Callable[[], list[tuple[Any, ...]]]:
        """A function that returns the outputs of each step of the last launch."""
        found = [tuple(own[i].copy() for own in self.outs) for i in range(steps)]
        return lambda: found
