"""Random choices of a sample: how it is cropped, flipped or masked.

Each epoch gives every sample one number, which depends on seed, epoch and sample alone; all its choices are made from
that number. So a run that resumes, or has other ranks, makes the same ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..autograd.random import generator

Draws = NDArray[np.uint64]
GOLDEN, FIRST, SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def of_epoch(samples: int, epoch: int, seed: int) -> Draws:
    """The number of each sample, (samples,)."""
    return generator("augment", epoch, seed=seed).bit_generator.random_raw(samples)


def more(draws: Draws, count: int) -> Draws:
    """`count` numbers from each, (n, count): SplitMix64 (Steele, Lea, Flood 2014)."""
    z = draws[:, None] + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN
    z = (z ^ (z >> np.uint64(30))) * FIRST
    z = (z ^ (z >> np.uint64(27))) * SECOND
    return z ^ (z >> np.uint64(31))


def uniform(bits: Draws) -> NDArray[np.float64]:
    """Numbers from 0 up to 1, of the same shape."""
    return np.asarray((bits >> np.uint64(11)) * 2.0**-53, np.float64)
