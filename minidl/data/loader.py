"""The order of samples, and batches in that order: seeded, resumable, and the same for every number of ranks.

It does not know what a sample is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from ..autograd.random import generator
from . import draws
from .dataset import Array, DataError, Dataset

DEPTH = 2  #: how many batches are read ahead, where reading takes long


def permutation(samples: int, purpose: str, *place: int, seed: int) -> NDArray[np.int64]:
    """A random order of 0..samples-1, int64 (samples,). It is made from raw bits, which no NumPy release changes."""
    return np.argsort(generator(purpose, *place, seed=seed).bit_generator.random_raw(samples), kind="stable")


def fifth(samples: int, split: str) -> Array:
    """The samples of `split` among `samples`: test is the last 20 % (rounded down) of one fixed random order."""
    order, test = permutation(samples, "split", seed=0), samples // 5
    return order[samples - test :] if split == "test" else order[: samples - test]


class Loader:
    """Batches (x, y) of a data set. In training each epoch has its own order, and an incomplete last batch is dropped;
    otherwise the stored order is kept, and the last batch too, however short.

    `next(loader)` goes on for ever, from epoch to epoch. `for x, y in loader` runs through one whole epoch: the present
    one, from its start, even if some of its batches have been taken before. To continue in the middle of an epoch,
    after `restore`, use `next`.

    With ranks, each rank gets its own equal, contiguous rows of every global batch; `batch_size`, `steps_per_epoch` and
    `state` refer to global batches and are the same for every layout.
    """

    def __init__(self, dataset: Dataset, batch_size: int, *, seed: int = 0, training: bool = True,
                 rank: int = 0, ranks: int = 1) -> None:
        self.dataset, self.batch_size, self.seed, self.training = dataset, batch_size, seed, training
        self.rank, self.ranks = rank, ranks
        self.epoch = self.batch = 0  #: the place of the next global batch
        self._order: tuple[int, NDArray[np.int64]] | None = None
        self._draws: tuple[int, draws.Draws] | None = None
        self._ahead = _Ahead(self) if dataset.slow else None
        name, samples = dataset.name, dataset.samples
        if not _whole(batch_size) or batch_size < 1:
            raise DataError(f"{name}: the batch size is {batch_size!r}; it must be a whole number > 0")
        check_seed(seed)
        if not _whole(ranks) or not _whole(rank) or not 0 <= rank < ranks:
            raise DataError(f"{name}: there is no rank {rank!r} among {ranks!r} ranks")
        if samples < (batch_size if training else 1):
            raise DataError(f"{name}: {samples} samples are too few for one batch of {batch_size}")
        rest = 0 if training else samples % batch_size
        for rows in (batch_size, rest):
            if rows % ranks:
                raise DataError(f"{name}: a batch of {rows} rows cannot be divided equally among {ranks} ranks")

    @property
    def name(self) -> str:
        """The name of the data in use, which may be a substitute."""
        return self.dataset.name

    @property
    def classes(self) -> int:
        """The number of classes; for tokens, the size of the vocabulary."""
        return self.dataset.classes

    @property
    def steps_per_epoch(self) -> int:
        """How many batches an epoch has."""
        return self.dataset.samples // self.batch_size if self.training else -(-self.dataset.samples // self.batch_size)

    def indices(self, epoch: int, batch: int) -> NDArray[np.int64]:
        """The samples of a global batch in order, int64 (B,)."""
        if self._order is None or self._order[0] != epoch:
            samples = self.dataset.samples
            order = permutation(samples, "order", epoch, seed=self.seed) if self.training else np.arange(samples)
            self._order = epoch, order
        return self._order[1][batch * self.batch_size : (batch + 1) * self.batch_size]

    def _drawn(self, epoch: int, rows: NDArray[np.int64]) -> draws.Draws:
        """The random numbers of these samples in this epoch; outside of training, always those of the first."""
        epoch = epoch if self.training else 0
        if self._draws is None or self._draws[0] != epoch:
            self._draws = epoch, draws.of_epoch(self.dataset.samples, epoch, self.seed)
        return self._draws[1][rows]

    def read(self, epoch: int, batch: int) -> tuple[Array, Array]:
        """This rank's rows of a global batch. Raises DataError for samples that cannot be read."""
        rows = self.indices(epoch, batch)
        share = len(rows) // self.ranks
        own = rows[self.rank * share : (self.rank + 1) * share]
        return self.dataset.rows(own, self._drawn(epoch, own)) if self.dataset.random else self.dataset.rows(own)

    def after(self, epoch: int, batch: int) -> tuple[int, int]:
        """The place of the batch after this one."""
        return (epoch, batch + 1) if batch + 1 < self.steps_per_epoch else (epoch + 1, 0)

    def __next__(self) -> tuple[Array, Array]:
        place = self.epoch, self.batch
        batch = self._ahead.get(place) if self._ahead else self.read(*place)
        self.epoch, self.batch = self.after(*place)
        return batch

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        self.batch = 0
        epoch = self.epoch
        while self.epoch == epoch:
            yield next(self)

    def shard(self, rank: int, ranks: int) -> Loader:
        """A loader of rank `rank`'s rows of each global batch, at the same place. Raises DataError where a batch,
        including the last one, cannot be divided equally."""
        part = Loader(self.dataset, self.batch_size, seed=self.seed, training=self.training, rank=rank, ranks=ranks)
        part.restore(self.state())
        return part

    def of(self, dataset: Dataset) -> Loader:
        """A loader of this data set instead, with the same batch size, seed and order."""
        return Loader(dataset, self.batch_size, seed=self.seed, training=self.training)

    def state(self) -> dict[str, int]:
        """The place of the next global batch: {"epoch", "batch"}."""
        return {"epoch": self.epoch, "batch": self.batch}

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes to a place that `state` has returned. Raises DataError, before anything changes, for any other."""
        epoch, batch = (state.get(key, -1) for key in ("epoch", "batch"))
        if not (_whole(epoch) and _whole(batch) and 0 <= epoch < 2**64 and 0 <= batch < self.steps_per_epoch):
            raise DataError(f"{self.name}: {dict(state)} is not a place in the order; epoch must be >= 0, batch from 0 "
                            f"to {self.steps_per_epoch - 1}")
        self.epoch, self.batch = int(epoch), int(batch)


class _Ahead:
    """Reads the next DEPTH batches of a loader in a thread of its own, while the present one is used."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._thread: ThreadPoolExecutor | None = None
        self._coming: deque[tuple[tuple[int, int], Future[tuple[Array, Array]]]] = deque()

    def get(self, place: tuple[int, int]) -> tuple[Array, Array]:
        """The batch at this place; what was read ahead for another one is dropped."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "data")
        while self._coming and self._coming[0][0] != place:
            self._coming.popleft()[1].cancel()
        following = self._loader.after(*self._coming[-1][0]) if self._coming else place
        while len(self._coming) <= DEPTH:
            self._coming.append((following, self._thread.submit(self._loader.read, *following)))
            following = self._loader.after(*following)
        return self._coming.popleft()[1].result()


def check_seed(seed: object) -> None:
    """Raises DataError unless it is a whole number from 0 to 2**64 - 1."""
    if not _whole(seed) or not 0 <= seed < 2**64:
        raise DataError(f"the seed is {seed!r}; it must be a whole number from 0 to 2**64 - 1")


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
