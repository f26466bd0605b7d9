"""Arrays as data sets: of .npz and .npy files, and of a table of numbers (CSV).

The meaning of x and y follows from their shapes and types, and where these leave a doubt, a note says it. x: images
(n, h, w, c) or (n, h, w); numbers (n, features); tokens (n, length), whole numbers. y: classes (n,), tokens (n,
length), or, for regression, floats (n,) or (n, k). In a table, the way that a label is written is its type: 1 is whole,
1.0 is a float. A label of -100 does not count.
"""

from __future__ import annotations

import csv
import math
import re
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from .archives import reading
from .dataset import (FLOAT32, IGNORED, MOST, Array, DataError, Dataset, Note, Scaling, Wanted, check_labels, of_images,
                      pieces, statistics)
from .loader import fifth

LARGEST = 4 << 30  #: the most bytes of arrays
PACKED = 100  #: the largest compression ratio of arrays that take more than SMALL; images reach about 5
SMALL = 16 << 20
#: the names of arrays: of the training and the test part, or of both
ARRAYS = (("x_train", "y_train", "x_test", "y_test"), ("train_images", "train_labels", "test_images", "test_labels"),
          ("x", "y"), ("images", "labels"))
LARGE = 16.0  #: numbers above it are large for a network, and the run says how to standardise them
LABELS = ("label", "class", "target", "species", "y")  #: names of the label column of a table, the first that it has
MARKS = {";": "semicolons", "\t": "tabs", "|": "bars"}  #: between columns, in place of commas
#: the numbers of a table; Python's own also have underscores, other scripts' digits, nan and inf
NUMBER, WHOLE = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII), re.compile(r"[+-]?\d+", re.ASCII)
ABSENT = ("nan", "na", "n/a", "null", "none", "?", "-", "inf", "+inf", "-inf")  #: no words, in a column with numbers


def from_arrays(name: str, x: Any, y: Any, split: str = "train", *, test: tuple[Any, Any] | None = None, **wanted: Any
                ) -> Dataset:
    """A part of the samples (x, y): train or test. Without `test`, the samples of the test part, a fixed random fifth
    of them is the test part. `wanted`: `classes`, `image_size`, `channels`, `dtype`, `standardize` and `note`, as of
    `data.load`. Images and numbers stay as they are, or with `standardize` get mean 0 and variance 1 over the training
    part; or they are standardised by a given `Scaling`. Raises DataError."""
    return part_of(name, x, y, test, Wanted(split, **wanted))


def part_of(name: str, x: Any, y: Any, test: tuple[Any, Any] | None, wanted: Wanted) -> Dataset:
    """The data set that `from_arrays` returns."""
    classes, standardize, note = wanted.classes, wanted.standardize, wanted.note
    x, y = _paired(name, x, y)
    if test is None:
        parts = {part: (x[rows], y[rows]) for part in ("train", "test") for rows in [fifth(len(x), part)]}
    else:
        u, v = _paired(f"{name} (test)", *test)
        if u.shape[1:] != x.shape[1:] or v.shape[1:] != y.shape[1:] or v.dtype.kind != y.dtype.kind:
            raise DataError(f"{name}: training has x {x.shape[1:]} and y {y.dtype} {y.shape[1:]} a sample, test "
                            f"{u.shape[1:]} and {v.dtype} {v.shape[1:]}")
        parts = {"train": (x, y), "test": (u, v)}
    (seen, _), (own, targets) = parts["train"], parts[wanted.split]
    if not len(seen) or not len(own):
        raise DataError(f"{name}: {len(x)} samples are too few for a training and a test part")
    whole = y.dtype.kind in "iu"
    known = ignored = 0
    if whole:
        labels = np.concatenate([part.reshape(-1) for _, part in parts.values()])
        known = classes or 1 + int(labels.max())
        check_labels(targets, known, name, ignored=True)
        if ignored := int((labels == IGNORED).sum()):
            note(f"{name}: {ignored:,} of {labels.size:,} labels are {IGNORED}, which do not count")
    if x.dtype.kind in "iu" and x.ndim == 2 and whole:
        vocabulary = 1 + max(int(part.max()) for part, _ in parts.values() if part.size)
        note(f"{name}: x holds whole numbers, so they are tokens, of a vocabulary of {vocabulary:,}; save x as floats "
             f"if they are numbers")
        return replace(_tokens(name, own, targets, vocabulary, known, classes), uneven=ignored > 0)
    if x.ndim == 4 and (not whole or y.ndim != 1):
        raise DataError(f"{name}: images need one class each, whole numbers (n,), not {y.dtype} {y.shape}")
    if whole and y.ndim == 2:
        raise DataError(f"{name}: y is {y.dtype} {y.shape}; a class is one whole number for each sample, (n,), and for "
                        f"regression y holds floats; of rows with a single 1, y.argmax(1) is the class")
    if not whole and (y == np.rint(y)).all():
        note(f"{name}: y holds floats, though none has a fraction: it is for regression; save whole numbers if they "
             f"are classes")
    if isinstance(standardize, Scaling):
        standardize.check(seen, name)
    scaling = standardize if isinstance(standardize, Scaling) else statistics(seen) if standardize else None
    _check_range(name, own, scaling, wanted.dtype, note)
    found = (_numbers(name, own, targets, scaling, known, wanted.dtype) if x.ndim == 2 else
             of_images(name, own, targets.astype(np.int64), known, scaling, wanted))
    return replace(found, scaling=scaling, uneven=ignored > 0)


def _check_range(name: str, x: Array, scaling: Scaling | None, dtype: str, note: Note) -> None:
    """Raises DataError if numbers (n, ..., features), or what becomes of them by scaling, are out of the range of their
    type; notes it if they are large and stay so."""
    axes = tuple(range(x.ndim - 1))
    with np.errstate(all="ignore"):
        ends = [end(piece, axis=axes).astype(np.float64) for piece in pieces(x) for end in (np.min, np.max)]
        if scaling is None:
            largest = float(np.max(np.abs(ends)))
            if largest > float(np.finfo(dtype).max):
                raise DataError(f"{name}: its numbers reach {largest:g}, which is out of the range of {dtype}")
            if largest > LARGE:
                note(f"{name}: its numbers stay as they are, above {LARGE:g}; --standardize scales them to mean 0 and "
                     f"variance 1")
            return
        ends = [end - scaling.mean for end in ends]
        every = (scaling.mean, 1 / scaling.std, *ends, *(end / scaling.std for end in ends))
        if not all((np.abs(values) <= FLOAT32).all() for values in every):
            raise DataError(f"{name}: scaled to mean 0 and variance 1, its numbers are out of the range of float32")


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
    if y.ndim == 2:
        classes = told or max(classes, vocabulary)
        check_labels(x.astype(np.int64), classes, name)
    return replace(_rows(name, x.astype(np.int64), y.astype(np.int64), classes,
                         "next_token" if y.ndim == 2 else "classification"), vocabulary=vocabulary)


def _numbers(name: str, x: Array, y: Array, scaling: Scaling | None, classes: int, dtype: str) -> Dataset:
    """The data set of vectors."""
    values = (x if scaling is None else (x - scaling.mean) / scaling.std).astype(dtype)
    if y.dtype.kind in "iu":
        return _rows(name, values, y.astype(np.int64), classes, "classification")
    with np.errstate(over="ignore"):
        targets = y.reshape(len(y), -1).astype(dtype)
    if not np.isfinite(targets).all():
        raise DataError(f"{name}: y has numbers that are out of the range of {dtype}")
    return _rows(name, values, targets, targets.shape[1], "regression")


def _rows(name: str, x: Array, y: Array, classes: int, serves: str) -> Dataset:
    return Dataset(name, len(x), x.shape[1:], classes, lambda i: (np.take(x, i, axis=0), np.take(y, i, axis=0)),
                   (serves,))


def _paired(name: str, x: Any, y: Any) -> tuple[Array, Array]:
    """x and y, checked. Raises DataError."""
    if np.ma.is_masked(x) or np.ma.is_masked(y):
        raise DataError(f"{name}: some elements are masked; fill them first, as in x.filled(0)")
    x, y = np.asarray(x), np.asarray(y)
    for what, values in (("x", x), ("y", y)):
        if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8:
            raise DataError(f"{name}: {what} holds {values.dtype}, not numbers")
        if values.ndim and values.dtype.kind == "f" and not np.isfinite(values).all():
            at = int(np.argwhere(~np.isfinite(values))[0][0])
            raise DataError(f"{name}: sample {at} of {what} holds a number that is not finite")
    if y.ndim == 2 and y.shape[1] == 1 and y.dtype.kind in "iu":
        y = y[:, 0]
    if x.ndim == 3 and not (x.dtype.kind == "f" and y.ndim == 2):
        x = x[..., None]
    if x.ndim not in (2, 4) or y.ndim not in (1, 2) or len(x) != len(y):
        raise DataError(f"{name}: x is {x.shape} and y {y.shape}; x must be images, channels last, (n, h, w, c), "
                        f"numbers (n, features) or tokens (n, length), and y must be (n,) or (n, k)")
    if x.ndim == 4 and x.shape[1] <= 4 < min(x.shape[2:]):
        raise DataError(f"{name}: x is {x.shape}; these look like channels first: save x.transpose(0, 2, 3, 1)")
    if not all(x.shape[1:]):
        raise DataError(f"{name}: x is {x.shape}; a sample has no numbers")
    return x, y.astype(np.int64) if y.dtype.kind == "b" else y


# ---------------------------------------------------------------------------------------------------------- npy and csv
def load_arrays(path: Path, wanted: Wanted) -> Dataset:
    """A .npz file, or a folder of .npy files, with the arrays of one line of ARRAYS. Raises DataError, before memory is
    allocated for what a header or an index only declares; pickled objects are never read."""
    with reading(path), ExitStack() as stack:
        files: dict[str, tuple[int, Callable[[], Any]]]  # the bytes of a .npy file, and a function that opens it
        if path.is_dir():
            files = {f.stem: (f.stat().st_size, partial(open, f, "rb")) for f in path.glob("*.npy") if f.is_file()}
        else:
            archive = stack.enter_context(zipfile.ZipFile(path))
            files = {i.filename.removesuffix(".npy"): (i.file_size, partial(_unpacked, archive, i, path.stat().st_size))
                     for i in archive.infolist()}
        names = next((names for names in ARRAYS if names[0] in files), ARRAYS[0])
        if lacks := next((name for name in names if name not in files), None):
            raise ValueError(f"has no array {lacks}; name them {', or '.join(' and '.join(n) for n in ARRAYS)}")
        if (total := sum(files[name][0] for name in names)) > LARGEST:
            raise ValueError(f"has {total} bytes of arrays; the limit is {LARGEST >> 30} GiB")
        x, y, *test = (_array(path / f"{name}.npy", *files[name]) for name in names)
    return part_of(path.name, x, y, (test[0], test[1]) if test else None, wanted)


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo, size: int) -> Any:
    """A file of an archive of `size` bytes. Raises ValueError for one that holds much more than it is packed in."""
    packed = min(info.compress_size, size)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or (
            info.file_size > max(SMALL, packed * PACKED)):
        raise ValueError(f"truncated, or compressed more, or otherwise, than arrays are: {info.file_size} bytes in "
                         f"{packed}; unpack it first")
    return archive.open(info)


def _array(path: Path, size: int, opened: Callable[[], Any]) -> Array:
    """The array of a .npy file of `size` bytes. Raises DataError."""
    with reading(path), opened() as file:
        if (version := npy.read_magic(file)) != (1, 0):
            raise ValueError(f"has npy version {version}, which is not for plain numbers")
        shape, column_major, dtype = npy.read_array_header_1_0(file)
        need, content = math.prod(shape) * dtype.itemsize, file.read(size)
        if dtype.hasobject:
            raise ValueError("holds objects, which are pickled and never read")
        if need != len(content) or min(shape, default=0) < 0:
            raise ValueError(f"declares {shape} of {dtype}, {need} bytes, but holds {len(content)}")
        return np.frombuffer(content, dtype).reshape(shape, order="F" if column_major else "C")


def load_csv(path: Path, wanted: Wanted) -> Dataset:
    """A table of numbers with a first line of names. The label is the column called label, class, target, species or
    y, else the last one: words or whole numbers are classes, numbers with a point or an exponent are for regression; a
    note says which. Raises DataError that names line and column, also for a number with more digits than a float
    holds."""
    with reading(path):
        if path.stat().st_size > LARGEST:
            raise ValueError(f"larger than {LARGEST >> 30} GiB")
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = [(reader.line_num, row) for reader in [csv.reader(file)] for row in reader if row]
        if not rows:
            raise ValueError("is empty")
        names, lines = [" ".join(name.splitlines()).strip() for name in rows[0][1]], rows[1:]
        _check_names(names, rows)
        at = next((i for label in LABELS for i, name in enumerate(names) if name.lower() == label), len(names) - 1)
        if len(names) < 2 or not lines:
            raise ValueError("needs at least two columns and a line of numbers")
    values, labels = np.empty((len(lines), len(names) - 1)), list[str]()
    plain = re.compile(rf"(?:-?\d{{1,15}}(?:\.\d*)?,){{{len(names) - 1}}}", re.ASCII)  # nearly every row
    for i, (number, row) in enumerate(lines):
        if len(row) != len(names):
            raise DataError(f"{path}, line {number}: has {len(row)} columns, its first line {len(names)}")
        labels.append(row.pop(at).strip())
        for j, cell in enumerate(() if plain.fullmatch(",".join([*row, ""])) else row):
            found = _number(cell)
            if found is None or (abs(found) >= 1 << 53 and WHOLE.fullmatch(cell.strip()) and Decimal(cell) != found):
                raise DataError(f"{path}, line {number}, column {(names[:at] + names[at + 1 :])[j]}: {cell[:40]!r} " + (
                    "is not a finite number" if found is None else "has more digits than a float64 holds"))
        values[i] = [*map(float, row)]
    y, how = _classes(path, names[at], labels, [number for number, _ in lines])
    wanted.note(f"{path.name}: the label is the column {names[at]}, {how}; the others are numbers")
    return part_of(path.name, values, y, None, wanted)


def _check_names(names: list[str], rows: list[tuple[int, list[str]]]) -> None:
    """Raises ValueError if these are no names of a table's columns."""
    if comment := next((at for at, row in rows if row[0].lstrip().startswith("#")), 0):
        raise ValueError(f"line {comment}: is a comment; the first line must name the columns, and no line may be a "
                         f"comment")
    if len(names) == 1 and (other := next((mark for mark in MARKS if mark in names[0]), None)):
        raise ValueError(f"its columns are separated by {MARKS[other]}; save it with commas")
    if "" in names:
        raise ValueError(f"its column {names.index('') + 1} has no name; if these are pandas' numbers of lines, save "
                         f"it with index=False")
    if len({*names}) < len(names):
        raise ValueError(f"two of its columns are called {max(names, key=names.count)}")
    if all(_number(name) is not None or any(name == cell.strip() for _, row in rows[1:] for cell in row[i : i + 1])
           for i, name in enumerate(names)):
        raise ValueError("its first line must name the columns; it has values")


def _number(text: str) -> float | None:
    value = float(text) if NUMBER.fullmatch(text.strip()) else math.inf
    return value if math.isfinite(value) else None


def _classes(path: Path, column: str, labels: list[str], lines: list[int]) -> tuple[Array, str]:
    """The labels as classes, int64, or as floats; and how they were read. Whole numbers from 0 on are classes as they
    are; other whole numbers, and words, in order. IGNORED stays. Raises DataError for a label that is no number among
    numbers."""
    numbers, whole = [_number(label) for label in labels], [bool(WHOLE.fullmatch(label)) for label in labels]
    fraction, some = any(n is not None and not w for n, w in zip(numbers, whole, strict=True)), any(whole)
    for label, line, number, is_whole in zip(labels, lines, numbers, whole, strict=True):
        where = f"{path}, line {line}, column {column}: {label[:40]!r}"
        if not label:
            raise DataError(f"{path}, line {line}: the label is empty")
        if number is None and not is_whole and (fraction or (label.lower() in ABSENT and some)):
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
    shown = ", ".join(f"{i} is {' '.join(str(value).split())[:40]}" for i, value in enumerate(kept[:3]))
    return y, (f"of {len(kept):,} {'whole numbers' if all(whole) else 'words'}, which are classes in their order: "
               + shown + (" ..." if len(kept) > 3 else ""))
