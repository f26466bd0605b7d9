"""Data from a function of the user's own: a Dataset, arrays, or batches. Batches without end are taken as they come,
and there are no epochs: the first HEAD batches show shapes and classes. If the function has no test part of its own,
they are it, and training begins after them. Batches that end after all, but are too many to keep, begin anew. The
function is called anew only for a run that goes on or a rank that is far behind the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..system.loading import by_name, function_of, line_of
from .arrays import part_of
from .dataset import ENDLESS, IGNORED, Array, DataError, Dataset, LabelError, Note, Rows, Wanted, check_labels

HEAD = 100  #: how many batches show what the others are like
MOST_BATCHES = 50_000  #: a function that gives more, or more than MOST_BYTES, is taken as one without end
MOST_BYTES = 1 << 30
RECENT = 64  #: how many batches are kept
PATIENCE = 5.0  #: seconds of reading from one line about it to the next
SERVES = ("classification", "regression", "next_token", "masked_token", "translation")  #: the objectives
Batch = tuple[Array, Array]
A_BATCH = "; a batch is (x, y), arrays with a row for each sample"
END: Any = object()  #: after the last batch


def load_own(name: str, wanted: Wanted) -> Dataset:
    """The data set of a user's function, `file.py:function`, which returns a Dataset, arrays (x, y), or an iterable of
    batches (x, y), which is read to its end, or taken as it comes if it has none. It may take `split` and `seed`;
    without `split`, a fifth is the test part. Raises DataError."""
    split = wanted.split
    try:
        takes = by_name(function := function_of(name))
    except ValueError as error:
        raise DataError(f"{name}: {error}") from None
    told = {key: value for key, value in {"split": split, "seed": wanted.seed}.items() if key in takes}
    parts = ("train", "test") if split == "test" and "split" in takes else (split,)
    made = [_called(name, function, told | ({"split": part} if "split" in takes else {})) for part in parts]
    if isinstance(made[-1], Dataset):
        _check_fields(name, made[-1])
        if wanted.classes and made[-1].classes > wanted.classes:
            raise LabelError(f"{name}: has {made[-1].classes} classes, the network {wanted.classes}")
        # nobody knows how long its rows take, and what y has
        return replace(made[-1], rows=_checked(name, made[-1], wanted.dtype), slow=True,
                       uneven=made[-1].uneven or bool({"next_token", "translation"} & {*made[-1].serves}))
    found = [_arrays(name, part, wanted.note) for part in made]
    (arrays, ends), (tests, _) = found[0], found[-1]
    short = name.rpartition("/")[2]
    if ends:
        return part_of(short, *arrays, tests if "split" in takes else None, wanted)
    if wanted.standardize is True:
        raise DataError(f"{name}: --standardize needs all numbers, and its batches have no end; scale them in the "
                        f"function")
    head = part_of(short, *arrays, tests, wanted)
    if split == "test":
        return head
    alike = replace(wanted, classes=wanted.classes or head.classes, note=lambda line: None)
    return stream(short, head, lambda: _called(name, function, told), 0 if "split" in takes else HEAD,
                  lambda x, y: part_of(short, x, y, (x, y), alike))


def _check_fields(name: str, made: Dataset) -> None:
    """Raises DataError for a field of a Dataset of the user's own that cannot be used."""
    for field in ("samples", "classes", "vocabulary"):
        value = getattr(made, field)
        least = 0 if field == "vocabulary" else 1
        if not isinstance(value, int | np.integer) or not least <= value:
            raise DataError(f"{name}: the {field} of its Dataset are {value!r}; it must be a whole number of at least "
                            f"{least}")
    if not isinstance(made.shape, tuple) or not all(isinstance(n, int | np.integer) and n > 0 for n in made.shape):
        raise DataError(f"{name}: the shape of its Dataset is {made.shape!r}; it must be a tuple of whole numbers, as "
                        f"in (28, 28, 1)")
    if not isinstance(made.serves, tuple) or not {*made.serves} <= {*SERVES}:
        raise DataError(f"{name}: its Dataset serves {made.serves!r}; it must be a tuple of {', '.join(SERVES)}")


def _checked(name: str, made: Dataset, dtype: str) -> Rows:
    """The rows of a user's Dataset, x as `dtype` unless it is tokens; they raise DataError if not as it says."""
    labels = not {"regression", "next_token", "masked_token", "translation"} & {*made.serves}

    def rows(indices: NDArray[np.int64], *numbers: Any) -> tuple[Array, Array]:
        x, y = _called(name, lambda: tuple(map(np.asarray, made.rows(indices, *numbers))), {})
        if x.shape != (len(indices), *made.shape) or len(y) != len(indices):
            raise DataError(f"{name}: its rows of {len(indices)} samples are x {x.shape} and y {y.shape}; x must be "
                            f"{(len(indices), *made.shape)}, as its shape says, and y have {len(indices)} rows")
        if labels:
            if y.dtype.kind not in "iu" or y.ndim != 1:
                raise DataError(f"{name}: y of its rows is {y.dtype} {y.shape}; it must be one whole number for each "
                                f"sample, its class")
            if not made.uneven and (y == IGNORED).any():
                raise DataError(f"{name}: a label of its rows is {IGNORED}, which does not count; make its Dataset "
                                f"with uneven=True, so that the parts of a batch weigh as many labels as they have")
            check_labels(y, made.classes, name, ignored=True)
        return x if made.vocabulary or x.dtype.kind in "iu" else x.astype(dtype, copy=False), y

    return rows


def _called(name: str, function: Callable[..., Any], told: dict[str, Any]) -> Any:
    """The result of the user's function of this name. Raises DataError with the place of an error that arises in it."""
    with _users(name):
        return function(**told)


@contextmanager
def _users(name: str, says: str = "") -> Iterator[None]:
    try:
        yield
    except (DataError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        place = f" ({found})" if (found := line_of(error)) else ""
        raise DataError(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}{place}{says}") from error


def _batches(name: str, made: Iterable[Any]) -> Iterator[Batch]:
    """The batches as arrays. Raises DataError that says which one fails."""
    more, number = iter(made), 0
    while True:
        with _users(f"{name}: batch {number}", A_BATCH):
            if (batch := next(more, END)) is END:
                return
            x, y = map(np.asarray, batch)
        yield x, y
        number += 1


def _arrays(name: str, made: Any, note: Note) -> tuple[Batch, bool]:
    """The arrays (x, y) that a function has returned, and whether they are all: of endless batches, the first HEAD."""
    if isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, np.ndarray) for part in made):
        return made, True
    batches = (all(isinstance(part, list | tuple) and len(part) == 2 for part in made) if isinstance(made, list | tuple)
               else isinstance(made, Iterable) and not isinstance(made, np.ndarray | str | bytes | dict))
    if not batches:
        parts_of = f" of {' and '.join(type(p).__name__ for p in made[:3])}" if isinstance(made, list | tuple) else ""
        raise DataError(f"{name}: returned {type(made).__name__}{parts_of}; it must return a Dataset, NumPy arrays "
                        f"(x, y), or an iterable of batches (x, y)")
    parts, size, ends, late = list[Batch](), 0, True, monotonic() + PATIENCE
    for x, y in _batches(name, made):
        size += x.nbytes + y.nbytes
        if parts and (x.shape[1:] != parts[0][0].shape[1:] or y.shape[1:] != parts[0][1].shape[1:]):
            raise DataError(f"{name}: batch {len(parts)} has x {x.shape} and y {y.shape}, batch 0 {parts[0][0].shape} "
                            f"and {parts[0][1].shape}")
        parts.append((x, y))
        if monotonic() > late:
            late += PATIENCE
            note(f"{name}: its batches are read to their end before training begins, or to the first {MOST_BATCHES:,}, "
                 f"or {MOST_BYTES >> 30} GiB: {len(parts):,} so far")
        if size > MOST_BYTES or len(parts) > MOST_BATCHES:
            parts, ends = parts[:HEAD], False
            break
    if not parts:
        raise DataError(f"{name}: it gives no batches")
    with _users(name, A_BATCH):
        x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
    return (x, y), ends


class _Rows:
    """The samples of a stream by their number; `begin` starts it again."""

    def __init__(self, name: str, begin: Callable[[], Iterator[Batch]]) -> None:
        self._name, self._begin, self._lock = name, begin, Lock()
        self._restart()

    def _restart(self) -> None:
        self._batches, self._recent, self._end = self._begin(), list[tuple[int, Batch]](), 0

    def _next(self) -> Batch:
        """The next batch; after the last one, the first. Raises DataError."""
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
        for number, (x, y) in enumerate(_batches(name, begin())):
            if number < skip:
                continue
            part = read(x, y)
            if part.uneven and not head.uneven:
                raise DataError(f"{name}: batch {number} has labels of {IGNORED}, its first batches had none; give one "
                                f"of these to begin with")
            if part.shape != head.shape or part.serves != head.serves:
                raise DataError(f"{name}: batch {number} has samples of shape {part.shape}, batch 0 {head.shape}")
            yield part.rows(np.arange(part.samples))

    return replace(head, samples=ENDLESS, rows=_Rows(name, batches), slow=True,
                   uneven=head.uneven or bool({"next_token", "translation"} & {*head.serves}))
