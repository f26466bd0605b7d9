"""Data that need no files: the embedded digits, and generated images and tokens. All are deterministic."""

from __future__ import annotations

import functools
import gzip
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from ..autograd.random import generator
from .dataset import Array, DataError, Dataset, Wanted, adapt, check_labels, of_images, statistics
from .loader import fifth
from .text import windows

MEANS, NOISE, DRAW, FOLLOWERS, TOKENS = range(5)  #: purposes of the random numbers of synthetic data
SAMPLES = {"train": 4096, "test": 1024}  #: how many samples synthetic data have
NOISES = 251  #: how many noise images samples draw from, so that the whole set is never in memory


@functools.cache
def raw_digits() -> tuple[Array, Array]:
    """Pixels (1797, 8, 8, 1), 0 to 16, and labels, as the file has them."""
    lines = gzip.decompress(files(__package__).joinpath("optdigits.csv.gz").read_bytes()).decode().splitlines()
    table = np.loadtxt(lines, np.int64, delimiter=",")
    return table[:, :-1].astype(np.uint8).reshape(-1, 8, 8, 1), table[:, -1].copy()


def digits(wanted: Wanted) -> Dataset:
    """1,797 handwritten digits, 8x8x1, pixels 0..16; `fifth` chooses the 359 of the test part. Their origin is in
    README.md in this folder."""
    x, y = raw_digits()
    classes = wanted.classes or 10
    check_labels(y, classes, "digits")
    rows = fifth(len(x), wanted.split)
    return of_images("digits", x[rows], y[rows], classes, statistics(x[fifth(len(x), "train")]), wanted)


def synthetic(wanted: Wanted) -> Dataset:
    """Generated tokens for a network that takes them, else generated images."""
    if wanted.sequence_length is None:
        return images(wanted)
    if wanted.image_size or wanted.channels:
        raise DataError("synthetic has tokens, not images, with a sequence length")
    return tokens(wanted)


def images(wanted: Wanted) -> Dataset:
    """Learnable images: sample i has class i mod `classes` and is the smooth random mean image of its class plus one of
    `NOISES` images of unit noise. Train and test share the means; their noise differs."""
    split, seed, image_size = wanted.split, wanted.seed, wanted.image_size or 32
    channels, classes = wanted.channels or 3, wanted.classes or 10
    part = list(SAMPLES).index(split)
    coarse = generator("synthetic", MEANS, 0, seed=seed).standard_normal((classes, 4, 4, channels), np.float32)
    means = adapt(coarse, image_size, None)
    shape = (image_size, image_size, channels)
    noises = generator("synthetic", NOISE, part, seed=seed).standard_normal((NOISES, *shape), np.float32)
    drawn = generator("synthetic", DRAW, part, seed=seed).integers(0, NOISES, SAMPLES[split])

    def rows(indices: NDArray[np.int64]) -> tuple[Array, Array]:
        labels = indices % classes
        x = np.take(means, labels, axis=0)
        x += np.take(noises, np.take(drawn, indices), axis=0)
        return x.astype(wanted.dtype, copy=False), labels

    return Dataset("synthetic", SAMPLES[split], shape, classes, rows)


def tokens(wanted: Wanted) -> Dataset:
    """Learnable tokens: nine times out of ten a random permutation gives the next token, else it is drawn uniformly."""
    split, seed, length, vocabulary = wanted.split, wanted.seed, wanted.length, wanted.classes or 256
    follower = generator("synthetic", FOLLOWERS, 0, seed=seed).permutation(vocabulary)
    count = SAMPLES[split] * 16 + length
    drawn = generator("synthetic", TOKENS, list(SAMPLES).index(split), seed=seed)
    any_token, surprise = drawn.integers(0, vocabulary, count), drawn.random(count) < 0.1
    text = [int(any_token[0])]
    for i in range(1, count):
        text.append(int(any_token[i]) if surprise[i] else int(follower[text[-1]]))
    return windows("synthetic", np.array(text, np.int64), length, vocabulary)
