"""The order of samples, and batches in that order: seeded, resumable, and the same for every number of ranks.

It does not know what a sample is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from ..autograd.random import generator
from . import draws
from .dataset import ENDLESS, Array, DataError, Dataset

DEPTH = 2  #: how many batches are read ahead, where reading takes long


def permutation(samples: int, purpose: str, *place: int, seed: int) -> NDArray[np.int64]:
    """A random order of 0..samples-1, int64 (samples,). It is made from raw bits, which no NumPy release changes."""
    return np.argsort(generator(purpose, *place, seed=seed).bit_generator.random_raw(samples), kind="stable")


def fifth(samples: int, split: str) -> Array:
    """The samples of `split` among `samples`: test is the last 20 % (rounded down) of one fixed random order."""
    order, test = permutation(samples, "split", seed=0), samples // 5
    return order[samples - test :] if split == "test" else order[: samples - test]


class Loader:
    """Batches (x, y) of a data set. In training the epochs, each in an order of its own, follow each other without a
    gap, and are cut into batches of equal size: a batch may hold the end of one epoch and the start of the next one, so
    that each sample comes exactly once an epoch. Otherwise the stored order is kept, and an epoch's last batch may be
    short.

    `next(loader)` goes on for ever. `for x, y in loader` runs through all batches that begin in the present epoch, even
    if some of them have been taken before.

    With ranks, each rank gets its own equal, contiguous rows of every global batch; `batch_size`, `position` and
    `state` refer to global batches and are the same for every layout.
    """

    def __init__(self, dataset: Dataset, batch_size: int, *, seed: int = 0, training: bool = True,
                 rank: int = 0, ranks: int = 1) -> None:
        self.dataset, self.batch_size, self.seed, self.training = dataset, batch_size, seed, training
        self.rank, self.ranks = rank, ranks
        name, samples = dataset.name, dataset.samples
        self.name, self.samples, self.classes, self.scaling = name, samples, dataset.classes, dataset.scaling
        self.position = 0  #: how many samples come before the next global batch, including all earlier epochs
        self._ahead = _Ahead(self) if dataset.slow else None
        # of an epoch, kept for two of them, since a batch may span both
        self._order = lru_cache(2)(lambda epoch: permutation(samples, "order", epoch, seed=seed) if training else
                                   np.arange(samples))
        self._draws = lru_cache(2)(lambda epoch: draws.of_epoch(samples, epoch, seed))
        if not whole(batch_size) or batch_size < 1:
            raise DataError(f"{name}: the batch size is {batch_size!r}; it must be a whole number > 0")
        check_seed(seed)
        if not whole(ranks) or not whole(rank) or not 0 <= rank < ranks:
            raise DataError(f"{name}: there is no rank {rank!r} among {ranks!r} ranks")
        if samples < (batch_size if training else 1):
            raise DataError(f"{name}: {samples} samples are too few for one batch of {batch_size}")
        for rows in (batch_size, 0 if training else samples % batch_size):
            if rows % ranks:
                raise DataError(f"{name}: a batch of {rows} rows cannot be divided equally among {ranks} ranks")

    @property
    def epoch(self) -> int:
        """The epoch in which the next batch begins."""
        return self.position // self.samples

    @property
    def ended(self) -> bool:
        """Whether an epoch ends in the last batch."""
        return self.position > 0 and self.position % self.samples < (self.batch_size if self.training else 1)

    def steps(self, epochs: int = 1) -> int:
        """How many batches it takes until so many epochs have ended. Raises DataError for data without end."""
        if self.samples == ENDLESS:
            raise DataError(f"{self.name}: its batches have no end, so there is no epoch; say how many steps to train "
                            f"(--steps N)")
        if self.training:
            return -(-epochs * self.samples // self.batch_size)
        return epochs * -(-self.samples // self.batch_size)

    def _parts(self, begin: int, end: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(epoch, its samples in order) from position `begin` up to `end`."""
        if self.samples == ENDLESS:
            yield 0, np.arange(begin, end)
            return
        while begin < end:
            epoch, first = divmod(begin, self.samples)
            count = min(end - begin, self.samples - first)
            yield epoch, self._order(epoch)[first : first + count]
            begin += count

    def read(self, begin: int) -> tuple[Array, Array]:
        """This rank's rows of the global batch at a position. Raises DataError for samples that cannot be read."""
        share = (self.after(begin) - begin) // self.ranks
        first = begin + self.rank * share
        return self._rows(list(self._parts(first, first + share)))

    def _rows(self, parts: Sequence[tuple[int, NDArray[np.int64]]]) -> tuple[Array, Array]:
        """The samples of these epochs, with the choices that are theirs there."""
        own = np.concatenate([rows for _, rows in parts])
        if not self.dataset.random:
            return self.dataset.rows(own)
        numbers = [self._draws(epoch if self.training else 0)[rows] for epoch, rows in parts]
        return self.dataset.rows(own, np.concatenate(numbers))

    def after(self, begin: int) -> int:
        """The position after the global batch at this one."""
        end = begin + self.batch_size
        return end if self.training else min(end, (begin // self.samples + 1) * self.samples)

    def __next__(self) -> tuple[Array, Array]:
        batch = self._ahead.get(self.position) if self._ahead else self.read(self.position)
        self.position = self.after(self.position)
        return batch

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        epoch = self.epoch
        self.position = self.steps(epoch) * self.batch_size if self.training and epoch else epoch * self.samples
        while self.epoch == epoch:
            yield next(self)

    def shard(self, rank: int, ranks: int) -> Loader:
        """A loader of rank `rank`'s rows of each global batch, at the same place. Raises DataError if a batch,
        including the last one, cannot be divided equally."""
        part = Loader(self.dataset, self.batch_size, seed=self.seed, training=self.training, rank=rank, ranks=ranks)
        part.restore(self.state())
        return part

    def state(self) -> dict[str, int]:
        """The place of the next global batch: {"position"}."""
        return {"position": self.position}

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes to a place that `state` has returned. Raises DataError, before anything changes, for any other."""
        position = state.get("position", -1)
        known = whole(position) and 0 <= position < 2**63
        if not known or (position if self.training else position % self.samples) % self.batch_size:
            raise DataError(f"{self.name}: {dict(state)} is not a place in the order: no batch of {self.batch_size} of "
                            f"{self.samples} samples begins there")
        self.position = int(position)


class _Ahead:
    """Reads the next DEPTH batches of a loader in a thread of its own, while the present one is used."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._thread: ThreadPoolExecutor | None = None
        self._coming: deque[tuple[int, Future[tuple[Array, Array]]]] = deque()

    def get(self, place: int) -> tuple[Array, Array]:
        """The batch at this position; what was read ahead for another one is dropped."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "data")
        while self._coming and self._coming[0][0] != place:
            self._coming.popleft()[1].cancel()
        following = self._loader.after(self._coming[-1][0]) if self._coming else place
        while len(self._coming) <= DEPTH:
            self._coming.append((following, self._thread.submit(self._loader.read, following)))
            following = self._loader.after(following)
        return self._coming.popleft()[1].result()


def check_seed(seed: object) -> None:
    """Raises DataError unless it is a whole number from 0 to 2**64 - 1."""
    if not whole(seed) or not 0 <= seed < 2**64:
        raise DataError(f"the seed is {seed!r}; it must be a whole number from 0 to 2**64 - 1")


def whole(value: object) -> TypeGuard[int]:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
