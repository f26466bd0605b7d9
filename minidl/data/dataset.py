"""A data set: a number of samples, and a function from sample indices to a batch.

It knows nothing of order, batch sizes or files. Every computation on images is element-wise, so that a sample's bits
never depend on the other samples of its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Rows = Callable[..., tuple[Array, Array]]
Note = Callable[[str], None]

IGNORED = -100  #: in y: a sample, or a position of tokens, that does not count, as in torch
ENDLESS = 1 << 62  #: the number of samples of data without end
MOST = 1 << 20  #: the most classes or tokens
PIECE = 4 << 20  #: how many numbers of images are read at a time
FLOAT32 = float(np.finfo(np.float32).max)
LENGTH = 64  #: tokens of a sample, by default
PREPARED_BYTES = 256 << 20  #: an image set up to this size is standardised and resized once, not per batch


class DataError(ValueError):
    """Data are missing, damaged, hostile, or unfit. The message is one line: the file or set, and what is wrong."""


class LabelError(DataError):
    """A label, or a token, is larger than the network knows."""


@dataclass(frozen=True)
class Scaling:
    """Standardising: the mean and the standard deviation of each feature (features,) or channel (channels,) over the
    training part, float64, in stored units."""

    mean: Array
    std: Array

    def images(self, x: Array) -> Array:
        """Images (B, H, W, C) as stored, with mean 0 and variance 1, float32."""
        x = np.subtract(x, self.mean.astype(np.float32), dtype=np.float32)
        x *= (1.0 / self.std).astype(np.float32)
        return x

    def check(self, x: Array, name: object) -> None:
        """Raises DataError for another number of features or channels, and for numbers that standardise nothing."""
        if self.mean.shape != x.shape[-1:] or self.std.shape != x.shape[-1:]:
            raise DataError(f"{name}: a sample has {x.shape[-1]} features or channels, and the mean and deviation of "
                            f"the weights' training data have {self.mean.size}")
        if not np.isfinite(self.mean).all() or not ((self.std > 0) & np.isfinite(self.std)).all():
            raise DataError(f"{name}: nothing can be standardised by the weights' mean and deviation: they are not "
                            f"finite, or a deviation is not above 0")


Standardize = bool | Scaling  #: whether to standardise data of one's own, or by which mean and deviation


@dataclass(frozen=True)
class Wanted:
    """The data that a network needs, see `minidl.data.load`."""

    split: str
    seed: int = 0
    dtype: str = "float32"
    note: Note = lambda line: None
    image_size: int | None = None
    channels: int | None = None
    classes: int | None = None
    sequence_length: int | None = None
    tokenizer: str = "bytes"
    workers: int | None = None
    standardize: Standardize = False

    @property
    def length(self) -> int:
        return self.sequence_length or LENGTH


@dataclass(frozen=True)
class Dataset:
    """`samples`: how many. `rows(indices)`: new arrays (x, y) of the samples at int64 `indices` (B,).

    Images: x (B, H, W, C) of a float dtype, y (B,) int64 in 0..classes-1. Tokens: x and y (B, T) int64; `classes` is
    the size of the vocabulary. `shape`: the shape of one sample of x.

    `serves`: the objectives that a network can be trained for with it. `random`: rows are made by random choices, and
    `rows(indices, draws)` takes a random number for each sample, uint64 (B,), as well. For text: `bytes_per_token`, the
    mean number of bytes in a token; `mask`, the token that hides another one. `vocabulary`: how many different tokens x
    may have; 0 if x has none. `tokenizer`: text that makes its tokenizer again, see data/tokens.py; empty if tokens
    come from no text. `scaling`: by which mean and deviation numbers or images of the user's own were standardised;
    None if they are as stored, and for named data, whose scale is published. `slow`: reading a batch takes long, so the
    next ones are read ahead; `faster`: a way to make it faster, for the report. `uneven`: samples have different
    numbers of predictions, labels or positions of y that are not IGNORED; micro-batches and ranks then weigh as many as
    they make. `references`: of translations, the text of each sample's.
    """

    name: str
    samples: int
    shape: tuple[int, ...]
    classes: int
    rows: Rows
    serves: tuple[str, ...] = ("classification",)
    random: bool = False
    slow: bool = False
    uneven: bool = False
    references: tuple[str, ...] = ()
    faster: str = ""
    tokenizer: str = ""
    vocabulary: int = 0
    bytes_per_token: float | None = None
    mask: int | None = None
    scaling: Scaling | None = None


def of_images(name: str, x: Array, y: Array, classes: int, scaling: Scaling | None, wanted: Wanted) -> Dataset:
    """Stored images x (N, H, W, C) with classes y (N,) int64, standardised per channel if they have a scaling, then
    resized and repeated.

    Standardised ones are computed in float32 for every type, so that runs of another precision get the same numbers.
    """
    stored = x.shape[1:]
    shape = (wanted.image_size or stored[0], wanted.image_size or stored[1], wanted.channels or stored[2])
    if shape != stored:
        wanted.note(f"{name}: images of {'x'.join(map(str, stored))} are resized and repeated to "
                    f"{'x'.join(map(str, shape))}")

    def prepare(x: Array) -> Array:
        x = x if scaling is None else scaling.images(x)
        return adapt(x, wanted.image_size, wanted.channels).astype(wanted.dtype, copy=False)

    images, finish = x, prepare
    if len(x) * np.prod(shape) * np.dtype(wanted.dtype).itemsize <= PREPARED_BYTES:
        images, finish = np.concatenate([prepare(piece) for piece in pieces(x)]), lambda x: x

    def rows(indices: NDArray[np.int64]) -> tuple[Array, Array]:
        return finish(np.take(images, indices, axis=0)), np.take(y, indices)

    return Dataset(name, len(images), shape, classes, rows)


def pieces(x: Array) -> Iterator[Array]:
    """Numbers x (N, ...) in pieces, so that computations on them need little memory."""
    step = max(1, PIECE // max(1, math.prod(x.shape[1:])))
    for begin in range(0, len(x), step):
        yield x[begin : begin + step]


def statistics(x: Array) -> Scaling:
    """Mean and standard deviation of each feature or channel, the last axis of x; a constant one has 1."""
    axes, count = tuple(range(x.ndim - 1)), math.prod(x.shape[:-1])
    total, squares = np.zeros(x.shape[-1]), np.zeros(x.shape[-1])
    for piece in pieces(x):
        total += piece.sum(axis=axes, dtype=np.float64)
    mean = total / count
    with np.errstate(over="ignore", invalid="ignore"):  # a check of ranges tells
        for piece in pieces(x):
            squares += np.square(piece - mean).sum(axis=axes)
    std = np.sqrt(squares / count)
    return Scaling(mean, np.where(std > 0, std, 1.0))


def adapt(x: Array, image_size: int | None, channels: int | None) -> Array:
    """Images x (B, H, W, C) as (B, image_size, image_size, channels), of x's dtype if that is a float, else float32.

    Resizing is bilinear between pixel centres (no smoothing when shrinking). Channels are repeated in turn; a single
    channel is the mean of all. None keeps the size or channels. If nothing changes, x itself is returned.
    """
    if not np.issubdtype(x.dtype, np.floating):
        x = x.astype(np.float32)
    if image_size is not None:
        x = _resize(_resize(x, 1, image_size), 2, image_size)
    if channels is None or channels == x.shape[3]:
        return x
    if channels == 1:
        return np.asarray(x.mean(axis=3, keepdims=True))
    return np.asarray(np.take(x, np.arange(channels) % x.shape[3], axis=3))


def _resize(x: Array, axis: int, size: int) -> Array:
    """x with `axis` resized to `size`. It gathers and multiplies; the bits of a matmul could depend on the batch."""
    old = x.shape[axis]
    if old == size:
        return x
    at = np.clip((np.arange(size) + 0.5) * (old / size) - 0.5, 0, old - 1)
    low = at.astype(np.int64)
    share = (at - low).astype(x.dtype).reshape([-1 if d == axis else 1 for d in range(x.ndim)])
    return np.asarray(np.take(x, low, axis) * (1 - share) + np.take(x, np.minimum(low + 1, old - 1), axis) * share)


def check_labels(y: Array, classes: int, where: object, ignored: bool = False) -> None:
    """Raises LabelError naming the first sample whose label is not in 0..classes-1, nor IGNORED if that is `ignored`.
    y: (N,) or (N, T) integers."""
    if classes < 1 and (y == IGNORED).all():
        raise DataError(f"{where}: every label is {IGNORED}, so there are no classes")
    bad = ((y < 0) & ~(ignored & (y == IGNORED))) | (y >= classes)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        if y[first] < 0:
            raise DataError(f"{where}: sample {first[0]} has label {y[first]}; labels are whole numbers from 0 on")
        raise LabelError(f"{where}: sample {first[0]} has label {y[first]}; with {classes} classes it must be "
                         f"0 to {classes - 1}")
    if y.size and int(y.max()) >= MOST:
        raise DataError(f"{where}: a label is {int(y.max())}; the largest that a network is made for is {MOST - 1}")


def check_vocabulary(tokens: int, known: int | None, where: object) -> int:
    """The size of the network's vocabulary, `known`, or the data's if None. Raises LabelError if it is too small."""
    if known is not None and tokens > known:
        raise LabelError(f"{where}: has a vocabulary of {tokens} tokens, and the network one of {known}")
    return known or tokens
