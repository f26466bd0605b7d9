"""Replays of several replicas from one log of versions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from minidl.runtime.version_log import VersionRead
from minidl.testing.replay import Replay


def replay_together(replicas: Sequence[Replay], inputs: Sequence[tuple[Any, ...]],
                    entries: Sequence[VersionRead]) -> list[Any]:
    """The results of replicas, each on its own inputs, which update with the mean of their gradients, added in their
    order; all have the same log."""
    runs = [replay.steps(own, entries) for replay, own in zip(replicas, inputs, strict=True)]
    for gradients_of_each in zip(*runs, strict=True):
        for arrays in zip(*gradients_of_each, strict=True):
            mean = functools.reduce(np.add, arrays)
            mean *= mean.dtype.type(1 / len(arrays))
            for array in arrays:
                np.copyto(array, mean)
    return [replay.results() for replay in replicas]
