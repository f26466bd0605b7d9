"""Data that need no files: the embedded digits, generated images and tokens, and Python's own manual.

All are deterministic. The manual is that of the running Python, so its bytes differ between Python versions.
"""

from __future__ import annotations

import functools
import gzip
import importlib
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from ..autograd.random import generator
from .dataset import Array, DataError, Dataset, Images, adapt, check_labels, statistics
from .formats import fifth

MEANS, NOISE, DRAW, FOLLOWERS, TOKENS = range(5)  #: purposes of the random numbers of synthetic data
TEXT = ("next_token", "masked_token")  #: what running text can be used for
UNUSED = 255  #: a byte that no UTF-8 text has
SAMPLES = {"train": 4096, "test": 1024}  #: how many samples synthetic data have
NOISES = 251  #: how many noise images samples draw from, so that the whole set is never in memory


@functools.cache
def _digits() -> tuple[Array, Array]:
    lines = gzip.decompress(files(__package__).joinpath("optdigits.csv.gz").read_bytes()).decode().splitlines()
    table = np.loadtxt(lines, np.int64, delimiter=",")
    return table[:, :-1].astype(np.uint8).reshape(-1, 8, 8, 1), table[:, -1].copy()


def digits(split: str, classes: int | None) -> Images:
    """1,797 handwritten digits, 8x8x1, pixels 0..16; `fifth` chooses the 359 of the test part. Their origin is in
    README.md in this folder."""
    x, y = _digits()
    check_labels(y, classes or 10, "digits")
    rows = fifth(len(x), split)
    return Images("digits", x[rows], y[rows], classes or 10, *statistics(x[fifth(len(x), "train")]))


def images(split: str, image_size: int, channels: int, classes: int, seed: int, dtype: str) -> Dataset:
    """Learnable images: sample i has class i mod `classes` and is the smooth random mean image of its class plus one of
    `NOISES` images of unit noise. Train and test share the means; their noise differs."""
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
        return x.astype(dtype, copy=False), labels

    return Dataset("synthetic", SAMPLES[split], shape, classes, rows)


def tokens(split: str, length: int, vocabulary: int, seed: int) -> Dataset:
    """Learnable tokens: nine times out of ten a random permutation gives the next token, else it is drawn uniformly."""
    follower = generator("synthetic", FOLLOWERS, 0, seed=seed).permutation(vocabulary)
    count = SAMPLES[split] * 16 + length
    drawn = generator("synthetic", TOKENS, list(SAMPLES).index(split), seed=seed)
    any_token, surprise = drawn.integers(0, vocabulary, count), drawn.random(count) < 0.1
    text = [int(any_token[0])]
    for i in range(1, count):
        text.append(int(any_token[i]) if surprise[i] else int(follower[text[-1]]))
    return windows("synthetic", np.array(text, np.int64), length, vocabulary)


def pydoc(split: str, length: int, classes: int | None) -> Dataset:
    """The topics of Python's manual as UTF-8 bytes, in the order of their names; test is the last fifth."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise DataError("pydoc: this Python lacks pydoc_data.topics; use synthetic or a path") from error
    text = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    check_labels(text, classes or 256, "pydoc")
    cut = len(text) - len(text) // 5
    return windows("pydoc", text[cut:] if split == "test" else text[:cut], length, classes or 256,
                   bytes_per_token=1.0, mask=UNUSED)


def windows(name: str, text: Array, length: int, vocabulary: int, *, bytes_per_token: float | None = None,
            mask: int | None = None) -> Dataset:
    """A data set of windows: in sample i, x is tokens i*length to (i+1)*length and y the same shifted by one; both (B,
    length) int64. Raises DataError where the text is too short."""
    if len(text) <= length:
        raise DataError(f"{name}: {len(text)} tokens are too few for a window of {length} and the token after it")
    steps = np.arange(length + 1)

    def rows(indices: NDArray[np.int64]) -> tuple[Array, Array]:
        window = np.take(text, indices[:, None] * length + steps).astype(np.int64, copy=False)
        return window[:, :-1].copy(), window[:, 1:].copy()

    return Dataset(name, (len(text) - 1) // length, (length,), vocabulary, rows,
                   TEXT if mask is not None else TEXT[:1], bytes_per_token=bytes_per_token, mask=mask)
