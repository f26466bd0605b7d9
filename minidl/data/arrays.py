"""Arrays as data sets: of .npz and .npy files, of a table of numbers (CSV), and of functions of the user's own.

The meaning of x and y follows from their shapes and types, and where these leave a doubt, a note says it. x: images
(n, h, w, c) or (n, h, w); numbers (n, features); tokens (n, length), whole numbers. y: classes (n,), tokens (n,
length), or, for regression, floats (n,) or (n, k). In a table, the way that a label is written is its type: 1 is whole,
1.0 is a float. A label of -100 does not count.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..system.loading import by_name, function_of
from .dataset import (IGNORED, MOST, Array, DataError, Dataset, Images, LabelError, Note, Rows, Scaling, Standardize,
                      check_labels, check_scaled, ignores, pieces, statistics)
from .loader import fifth
from .streams import HEAD, MOST_BATCHES, MOST_BYTES, owners_code, stream

LARGEST = 4 << 30  #: the most bytes of arrays
LARGE = 16.0  #: numbers above it are large for a network, and the run says how to standardise them
LABELS = ("label", "class", "target", "species", "y")  #: names of the label column of a table, the first that it has
#: the numbers of a table; Python's own also have underscores, other scripts' digits, nan and inf
NUMBER, WHOLE = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII), re.compile(r"[+-]?\d+", re.ASCII)
ABSENT = ("nan", "na", "n/a", "null", "none", "?", "-", "inf", "+inf", "-inf")  #: no words, in a column with numbers


def from_arrays(name: str, x: Any, y: Any, split: str = "train", *, test: tuple[Any, Any] | None = None,
                classes: int | None = None, image_size: int | None = None, channels: int | None = None,
                dtype: str = "float32", standardize: Standardize = False, note: Note = lambda line: None) -> Dataset:
    """A part of the samples (x, y): train or test. Without `test`, the samples of the test part, a fixed random fifth
    of them is the test part. Images and numbers stay as they are, or with `standardize` get mean 0 and variance 1 over
    the training part; or they are standardised by a given `Scaling`. Raises DataError."""
    x, y = _paired(name, x, y)
    if test is None:
        rows = fifth(len(x), "train")
        kept = fifth(len(x), split)
        own, targets, seen, every, labels = x[kept], y[kept], x[rows], [x], [y]
    else:
        u, v = _paired(f"{name} (test)", *test)
        if u.shape[1:] != x.shape[1:] or v.shape[1:] != y.shape[1:] or v.dtype.kind != y.dtype.kind:
            raise DataError(f"{name}: training has x {x.shape[1:]} and y {y.dtype} {y.shape[1:]} a sample, test "
                            f"{u.shape[1:]} and {v.dtype} {v.shape[1:]}")
        own, targets = (u, v) if split == "test" else (x, y)
        seen, every, labels = x, [x, u], [y, v]
    if not len(seen) or not len(own):
        raise DataError(f"{name}: {len(x)} samples are too few for a training and a test part")
    whole = y.dtype.kind in "iu"
    known, uneven = 0, False
    if whole:
        known = 1 + max(int(part.max()) for part in (y, targets))
        check_labels(targets, classes or known, name, ignored=True)
        uneven = any(ignores(part, name, note) for part in labels)
    if x.ndim == 4:
        if not whole or y.ndim != 1:
            raise DataError(f"{name}: images need one class each, whole numbers (n,), not {y.dtype} {y.shape}")
        scaling = scaling_of(name, seen, None, standardize)
        check_range(name, own, scaling, dtype, note)
        images = Images(name, own, targets.astype(np.int64), classes or known, scaling, uneven)
        return replace(images.dataset(image_size, channels, dtype, note), scaling=scaling)
    if x.dtype.kind in "iu" and whole:
        vocabulary = 1 + max(int(part.max()) for part in every if part.size)
        note(f"{name}: x holds whole numbers, so they are tokens, of a vocabulary of {vocabulary:,}; save x as floats "
             f"if they are numbers")
        return replace(_tokens(name, own, targets, vocabulary, classes or known, classes), uneven=uneven)
    if whole and y.ndim == 2:
        raise DataError(f"{name}: y is {y.dtype} {y.shape}; a class is one whole number for each sample, (n,), and for "
                        f"regression y holds floats; of rows with a single 1, y.argmax(1) is the class")
    if not whole and (y == np.rint(y)).all():
        note(f"{name}: y holds floats, though none has a fraction: it is for regression; save whole numbers if they "
             f"are classes")
    scaling = scaling_of(name, _as_pixels(seen), None, standardize)
    check_range(name, _as_pixels(own), scaling, dtype, note)
    return replace(_numbers(name, own, targets, scaling, classes or known, dtype), uneven=uneven)


def _as_pixels(x: Array) -> Array:
    """Rows of numbers (n, features) as images of one pixel (n, 1, 1, features)."""
    return x[:, None, None]


def scaling_of(name: str, seen: Array, rows: Array | None, standardize: Standardize) -> Scaling | None:
    """How images are standardised: by the training part, `seen` or these rows of it; or as is given. Raises DataError
    if that does not fit."""
    if isinstance(standardize, Scaling):
        standardize.check(seen, name)
        return standardize
    return statistics(seen, rows) if standardize else None


def check_range(name: str, x: Array, scaling: Scaling | None, dtype: str, note: Note) -> None:
    """Raises DataError if images are out of the range of their type; notes it if they are large and stay so."""
    if scaling is not None:
        check_scaled(x, scaling, name)
        return
    largest = max(abs(float(end)) for piece in pieces(x) for end in (piece.min(), piece.max()))
    if largest > float(np.finfo(dtype).max):
        raise DataError(f"{name}: its numbers reach {largest:g}, which is out of the range of {dtype}")
    if largest > LARGE:
        note(f"{name}: its numbers stay as they are, above {LARGE:g}; --standardize scales them to mean 0 and "
             f"variance 1")


def _tokens(name: str, x: Array, y: Array, vocabulary: int, classes: int, told: int | None) -> Dataset:
    """The data set of rows of tokens. `told`: the vocabulary of the network, if it predicts tokens."""
    if x.min() < 0:
        raise DataError(f"{name}: a token is {x.min()}; tokens are 0 or more")
    if y.ndim == 2 and y.shape != x.shape:
        raise DataError(f"{name}: x is {x.shape} and y {y.shape}; the y of tokens is one class for each row, (n,), or "
                        f"one token for each of x")
    if vocabulary > MOST:
        raise DataError(f"{name}: a token is {vocabulary - 1}; the largest that a network is made for is {MOST - 1}; "
                        f"if x holds numbers and no tokens, save it as floats")
    tokens, labels = x.astype(np.int64), y.astype(np.int64)
    if y.ndim == 2:
        classes = told or max(classes, vocabulary)
        check_labels(tokens, classes, name)
    return Dataset(name, len(x), x.shape[1:], classes,
                   lambda i: (np.take(tokens, i, axis=0), np.take(labels, i, axis=0)),
                   ("next_token",) if y.ndim == 2 else ("classification",), vocabulary=vocabulary)


def _numbers(name: str, x: Array, y: Array, scaling: Scaling | None, classes: int, dtype: str) -> Dataset:
    """The data set of vectors."""
    values = (x if scaling is None else (x - scaling.mean) / scaling.std).astype(dtype)
    if y.dtype.kind in "iu":
        targets: Array = y.astype(np.int64)
        serves: tuple[str, ...] = ("classification",)
    else:
        with np.errstate(over="ignore"):
            targets, serves = (y[:, None] if y.ndim == 1 else y).astype(dtype), ("regression",)
        if not np.isfinite(targets).all():
            raise DataError(f"{name}: y has numbers that are out of the range of {dtype}")
        classes = targets.shape[1]
    return Dataset(name, len(x), x.shape[1:], classes,
                   lambda i: (np.take(values, i, axis=0), np.take(targets, i, axis=0)), serves, scaling=scaling)


def _paired(name: str, x: Any, y: Any) -> tuple[Array, Array]:
    """x and y, checked. Raises DataError."""
    x, y = np.asarray(x), np.asarray(y)
    for what, values in (("x", x), ("y", y)):
        if values.dtype.kind not in "biuf":
            raise DataError(f"{name}: {what} holds {values.dtype}, not numbers")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            at = int(np.argwhere(~np.isfinite(values))[0][0])
            raise DataError(f"{name}: sample {at} of {what} holds a number that is not finite")
    if x.ndim == 3 and not (x.dtype.kind == "f" and y.ndim == 2):
        x = x[..., None]
    if x.ndim not in (2, 4) or y.ndim not in (1, 2) or len(x) != len(y):
        raise DataError(f"{name}: x is {x.shape} and y {y.shape}; x must be images (n, h, w, c), numbers (n, features) "
                        f"or tokens (n, length), and y must be (n,) or (n, k)")
    if not all(x.shape[1:]):
        raise DataError(f"{name}: x is {x.shape}; a sample has no numbers")
    if y.ndim == 2 and y.shape[1] == 1 and y.dtype.kind in "iu":
        y = y[:, 0]
    return x, y.astype(np.int64) if y.dtype.kind == "b" else y


# ---------------------------------------------------------------------------------------------------------- npy and csv
def read_npy(path: Path) -> Array:
    """The array of a .npy file. Raises DataError, also for pickled objects, which are never read."""
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"larger than {LARGEST >> 30} GiB")
        return np.asarray(np.load(path, allow_pickle=False))
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path}: not an array of numbers ({' '.join(str(error).split())[:200]})") from None


def load_npy(folder: Path, split: str, **sizes: Any) -> Dataset:
    """A folder with x.npy and y.npy, or x_train.npy, y_train.npy, x_test.npy and y_test.npy. Raises DataError."""
    own = (folder / "x_train.npy").is_file()
    names = ["x_train", "y_train", "x_test", "y_test"] if own else ["x", "y"]
    for name in names:
        if not (folder / f"{name}.npy").is_file():
            raise DataError(f"{folder}: has {names[0]}.npy but not {name}.npy")
    x, y, *test = (read_npy(folder / f"{name}.npy") for name in names)
    return from_arrays(folder.name, x, y, split, test=(test[0], test[1]) if test else None, **sizes)


def load_csv(path: Path, split: str, **sizes: Any) -> Dataset:
    """A table of numbers with a first line of names. The label is the column called label, class, target, species or
    y, else the last one: words or whole numbers are classes, numbers with a point or an exponent are for regression; a
    note says which. Raises DataError that names line and column, also for a number with more digits than a float
    holds."""
    if not path.is_file() or path.stat().st_size > LARGEST:
        raise DataError(f"{path}: not a regular file, or larger than {LARGEST >> 30} GiB")
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            head, *lines = [(reader.line_num, row) for reader in [csv.reader(file)] for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a table of commas in UTF-8 ({str(error)[:100]})") from None
    except ValueError:
        raise DataError(f"{path}: is empty") from None
    names = [name.strip() for name in head[1]]
    if comment := next((at for at, row in (head, *lines) if row[0].lstrip().startswith("#")), 0):
        raise DataError(f"{path}, line {comment}: is a comment; the first line must name the columns, and no line "
                        f"may be a comment")
    if len(names) == 1 and (other := next((s for s in (";", "\t", "|") if s in names[0]), None)):
        word = {";": "semicolons", "\t": "tabs", "|": "bars"}[other]
        raise DataError(f"{path}: its columns are separated by {word}; save it with commas")
    if "" in names:
        raise DataError(f"{path}: its column {names.index('') + 1} has no name; if these are pandas' numbers of lines, "
                        f"save it with index=False")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"{path}: two of its columns are called {twice}")
    if all(_number(name) is not None for name in names):
        raise DataError(f"{path}: its first line must name the columns; it has numbers")
    at = next((i for label in LABELS for i, name in enumerate(names) if name.lower() == label), len(names) - 1)
    if len(names) < 2 or not lines:
        raise DataError(f"{path}: needs at least two columns and a line of numbers")
    values = np.empty((len(lines), len(names) - 1))
    labels = []
    for i, (number, row) in enumerate(lines):
        if len(row) != len(names):
            raise DataError(f"{path}, line {number}: has {len(row)} columns, its first line {len(names)}")
        labels.append(row[at].strip())
        for j, cell in enumerate(row[:at] + row[at + 1 :]):
            found = _number(cell)
            if found is None or (abs(found) >= 1 << 53 and WHOLE.fullmatch(cell.strip()) and Decimal(cell) != found):
                column = (names[:at] + names[at + 1 :])[j]
                raise DataError(f"{path}, line {number}, column {column}: {cell[:40]!r} " + (
                    "is not a finite number" if found is None else "has more digits than a float64 holds"))
            values[i, j] = found
    y, how = _classes(path, names[at], labels, [n for n, _ in lines])
    sizes["note"](f"{path.name}: the label is the column {names[at]}, {how}; the others are numbers")
    return from_arrays(path.name, values, y, split, **sizes)


def _number(text: str) -> float | None:
    value = float(text) if NUMBER.fullmatch(text.strip()) else math.inf
    return value if math.isfinite(value) else None


def _classes(path: Path, column: str, labels: list[str], lines: list[int]) -> tuple[Array, str]:
    """The labels as classes, int64, or as floats; and how they were read. Whole numbers from 0 on are classes as they
    are; other whole numbers, and words, in order. IGNORED stays. Raises DataError for a label that is no number among
    numbers."""
    numbers, whole = [_number(label) for label in labels], [bool(WHOLE.fullmatch(label)) for label in labels]
    fraction = any(n is not None and not w for n, w in zip(numbers, whole, strict=True))
    for label, line, number, is_whole in zip(labels, lines, numbers, whole, strict=True):
        where = f"{path}, line {line}, column {column}: {label[:40]!r}"
        if not label:
            raise DataError(f"{path}, line {line}: the label is empty")
        if number is None and not is_whole and (fraction or (label.lower() in ABSENT and any(whole))):
            raise DataError(f"{where} is not a finite number, and other labels are numbers")
        if re.fullmatch(r"[+-]?\d+,\d+", label):
            raise DataError(f"{where} has a comma; write a decimal point")
    if fraction:
        return np.array(numbers, np.float64), "numbers for regression"
    values: list[Any] = [Decimal(label) for label in labels] if all(whole) else labels  # exact, however long
    kept = sorted({*values} - {IGNORED})
    index = {value: i for i, value in enumerate(kept)}
    y = np.array([index.get(value, IGNORED) for value in values], np.int64)
    if kept == [*range(len(kept))]:
        return y, "whole numbers, which are its classes"
    shown = ", ".join(f"{i} is {str(value)[:40]}" for i, value in enumerate(kept[:3]))
    return y, (f"of {len(kept):,} {'whole numbers' if all(whole) else 'words'}, which are classes in their order: "
               + shown + (" ..." if len(kept) > 3 else ""))


# --------------------------------------------------------------------------------------------------------------- yours
def load_own(name: str, split: str, seed: int, **sizes: Any) -> Dataset:
    """The data set of a user's function, `file.py:function`, which returns a Dataset, arrays (x, y), or an iterable of
    batches (x, y), which is read to its end, or taken as it comes if it has none. It may take `split` and `seed`;
    without `split`, a fifth is the test part. Raises DataError."""
    try:
        function = function_of(name)
    except ValueError as error:
        raise DataError(str(error)) from None
    try:
        takes = by_name(function)
    except ValueError as error:
        raise DataError(f"{name}: {error}") from None
    told = {key: value for key, value in {"split": split, "seed": seed}.items() if key in takes}
    parts = ("train", "test") if split == "test" and "split" in takes else (split,)
    made = [_called(name, function, told | ({"split": part} if "split" in takes else {})) for part in parts]
    if isinstance(made[-1], Dataset):
        _check_fields(name, made[-1])
        if sizes.get("classes") and made[-1].classes > sizes["classes"]:
            raise LabelError(f"{name}: has {made[-1].classes} classes, the network {sizes['classes']}")
        tokens = {"next_token", "translation"} & {*made[-1].serves}
        # nobody knows how long its rows take, and what y has
        return replace(made[-1], rows=_checked(name, made[-1], sizes["dtype"]), slow=True,
                       uneven=made[-1].uneven or bool(tokens))
    found = [_arrays(name, part) for part in made]
    (arrays, ends), (tests, _) = found[0], found[-1]
    short = name.rpartition("/")[2]
    if ends:
        return from_arrays(short, *arrays, split, test=tests if "split" in takes else None, **sizes)
    if sizes["standardize"] is True:
        raise DataError(f"{name}: --standardize needs all numbers, and its batches have no end; scale them in the "
                        f"function")
    head = from_arrays(short, *arrays, split, test=tests, **sizes)
    if split == "test":
        return head
    alike = sizes | {"classes": sizes["classes"] or head.classes, "note": lambda line: None}
    return stream(short, head, lambda: _called(name, function, told), 0 if "split" in takes else HEAD,
                  lambda x, y: from_arrays(short, x, y, test=(x, y), **alike))


SERVES = ("classification", "regression", "next_token", "masked_token", "translation")  #: the objectives


def _check_fields(name: str, made: Dataset) -> None:
    """Raises DataError for a field of a Dataset of the user's own that cannot be used."""
    whole = {"samples": made.samples, "classes": made.classes, "vocabulary": made.vocabulary}
    for field, value in whole.items():
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
    """The rows of a Dataset of the user's own, x as `dtype` unless it is tokens; they raise DataError if they fail or
    are not what the Dataset says."""
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
    with owners_code(name):
        return function(**told)


def _arrays(name: str, made: Any) -> tuple[tuple[Array, Array], bool]:
    """The arrays (x, y) of what a function has returned, and whether they are all: of batches without end, they are the
    first HEAD."""
    if isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, np.ndarray) for part in made):
        return made, True
    batches = isinstance(made, Iterable) and not isinstance(made, np.ndarray | str | bytes | dict)
    if isinstance(made, list | tuple):
        batches = all(isinstance(part, list | tuple) and len(part) == 2 for part in made)
    if not batches:
        parts_of = f" of {' and '.join(type(p).__name__ for p in made[:3])}" if isinstance(made, list | tuple) else ""
        raise DataError(f"{name}: returned {type(made).__name__}{parts_of}; it must return a Dataset, NumPy arrays "
                        f"(x, y), or an iterable of batches (x, y)")
    parts: list[tuple[NDArray[Any], NDArray[Any]]] = []
    size, ends = 0, True
    try:
        for batch in made:
            x, y = (np.asarray(part) for part in batch)
            size += x.nbytes + y.nbytes
            if parts and (x.shape[1:] != parts[0][0].shape[1:] or y.shape[1:] != parts[0][1].shape[1:]):
                raise DataError(f"{name}: batch {len(parts)} has x {x.shape} and y {y.shape}, batch 0 "
                                f"{parts[0][0].shape} and {parts[0][1].shape}")
            parts.append((x, y))
            if size > MOST_BYTES or len(parts) > MOST_BATCHES:
                parts, ends = parts[:HEAD], False
                break
        if not parts:
            raise DataError(f"{name}: it gives no batches")
        x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{name}: batch {len(parts)}: {type(error).__name__}: {' '.join(str(error).split())[:300]}; a "
                        f"batch is (x, y), arrays with a row for each sample") from error
    return (x, y), ends
