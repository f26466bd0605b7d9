"""Data as a stream, for training on values that change slowly: a ring in which one sample is new in each step, or
batches that are held for several steps."""

from __future__ import annotations

import re
from typing import Any

from .dataset import DataError
from .loader import Loader


class Feed(Loader):
    """A loader's samples in their order, as a stream. `hold`: how many steps read the same batch; 0 for a ring as long
    as the batch, in which each step replaces the oldest sample by the next one."""

    def __init__(self, loader: Loader, hold: int) -> None:
        super().__init__(loader.dataset, loader.batch_size, seed=loader.seed, training=loader.training)
        self.hold = hold

    def read(self, begin: int) -> tuple[Any, Any]:
        """The rows of the batch at a position. Raises DataError for samples that cannot be read."""
        step, n = divmod(begin, self.batch_size)[0], self.batch_size
        if self.hold:
            return super().read(step // self.hold * n)
        newest = step + n - 1  # row j has the newest sample whose number is j modulo n
        return self._rows([part for j in range(n) for at in [newest - (newest - j) % n]
                           for part in self._parts(at, at + 1)])


def fed(loader: Loader, feed: str) -> Loader:
    """The loader as `feed` says: batches (as it is), ring, or hold=K. Raises DataError for anything else."""
    hold = re.fullmatch(r"hold=([1-9]\d{0,8})", feed)
    if feed not in ("batches", "ring") and hold is None:
        raise DataError(f"data cannot be fed as {feed[:40]!r}; known: batches, ring, hold=K")
    return loader if feed == "batches" else Feed(loader, int(hold[1]) if hold else 0)
