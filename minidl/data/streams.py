"""Batches without end, from a function of the user's: training takes them as they come, and there are no epochs.

The first HEAD batches show shapes and classes. If the function has no test part of its own, they are it, and training
begins after them. Batches that end after all, but are too many to keep, begin anew. A batch is made again, by calling
the function anew, only for a run that goes on or a rank that is far behind the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from ..system.loading import line_of
from .dataset import IGNORED, Array, DataError, Dataset

ENDLESS = 1 << 62  #: the number of samples of data without end
HEAD = 100  #: how many batches show what the others are like
MOST_BATCHES = 50_000  #: a function that gives more, or more than MOST_BYTES, is taken as one without end
MOST_BYTES = 1 << 30
RECENT = 64  #: how many batches are kept

Batch = tuple[Array, Array]


@contextmanager
def owners_code(name: str) -> Iterator[None]:
    """Turns an error that arises in the user's function of this name into a DataError with its place."""
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:
        place = f" ({found})" if (found := line_of(error)) else ""
        raise DataError(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}{place}") from error


class _Rows:
    """The samples of a stream by their number; `begin` starts it again."""

    def __init__(self, name: str, begin: Callable[[], Iterator[Batch]]) -> None:
        self._name, self._begin, self._lock = name, begin, Lock()
        self._restart()

    def _restart(self) -> None:
        self._batches, self._recent, self._end = self._begin(), list[tuple[int, Batch]](), 0

    def _next(self) -> Batch:
        """The next batch; after the last one, the first. Raises DataError."""
        with owners_code(self._name):
            for _ in range(2):
                for batch in self._batches:
                    return batch
                self._batches = self._begin()
        raise DataError(f"{self._name}: gave batches at first, and then none")

    def __call__(self, indices: NDArray[np.int64]) -> Batch:
        """The samples of consecutive numbers, which ranks ask for from threads of their own. Raises DataError."""
        first, last = int(indices[0]), int(indices[-1]) + 1
        with self._lock:
            if self._recent and first < self._recent[0][0]:
                self._restart()
            while self._end < last:
                batch = self._next()
                self._recent = [*self._recent[-RECENT:], (self._end, batch)]
                self._end += len(batch[0])
            parts = [(x[max(0, first - at) : last - at], y[max(0, first - at) : last - at])
                     for at, (x, y) in self._recent if at < last and first < at + len(x)]
        return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def stream(name: str, head: Dataset, begin: Callable[[], Iterable[Batch]], skip: int,
           read: Callable[[Array, Array], Dataset]) -> Dataset:
    """The training data that `begin` gives, after its first `skip` batches. `head`: the first batches as a data set;
    `read`: makes one of arrays. Raises DataError for batches of other shapes."""
    def batches() -> Iterator[Batch]:
        for number, batch in enumerate(begin()):
            try:
                x, y = (np.asarray(part) for part in batch)
            except (TypeError, ValueError):
                raise DataError(f"{name}: batch {number} is not (x, y), arrays with a row for each sample") from None
            if number >= skip:
                part = read(x, y)
                if part.uneven and not head.uneven:
                    raise DataError(f"{name}: batch {number} has labels of {IGNORED}, its first batches had none; give "
                                    f"one of these to begin with")
                if part.shape != head.shape or part.serves != head.serves:
                    raise DataError(f"{name}: batch {number} has samples of shape {part.shape}, batch 0 {head.shape}")
                yield part.rows(np.arange(part.samples))

    return replace(head, samples=ENDLESS, rows=_Rows(name, batches), slow=True,
                   uneven=head.uneven or bool({"next_token", "translation"} & {*head.serves}))
