"""Images from local files: MNIST's idx (also gzipped), CIFAR's python pickles, `.npz`.

No file is trusted: the sizes that a header declares are checked against the file's bytes before memory is allocated,
and nothing in a file is executed. Reading takes at most twice the bytes of the images and labels, which are at most
`LARGEST`, plus `SPARE`.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from . import pickles
from .arrays import check_range, from_arrays, scaling_of
from .dataset import (FLOAT32, Array, DataError, Dataset, Images, Note, Scaling, Standardize, check_labels,
                      ignores, pieces)
from .loader import fifth

LARGEST = 4 << 30  #: the most bytes of images and labels that are read; CIFAR has 180 MB
SPARE = 1 << 30  #: for a pickle, whose small objects take more than their bytes; other files need a quarter of it
PACKED = 100  #: the largest compression ratio of a packed file whose content is more than SMALL; images reach about 5
SMALL = 16 << 20
PICKLE_BYTES = 256 << 20  #: CIFAR-100's larger file has 155 MB
INDEX_BYTES = 1 << 18  #: the largest index of a .npz file
Pair = tuple[str, str]
WHOLE = ("x", "images")  #: arrays without a test part of their own
NPZ_KEYS: dict[str, tuple[Pair, ...]] = {
    "train": (("x_train", "y_train"), ("train_images", "train_labels"), ("x", "y"), ("images", "labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels"), ("x", "y"), ("images", "labels")),
}


@dataclass(frozen=True)
class Stored:
    """A data set that is published as files: their folders below a root, the files of each split, the function that
    reads them, and its published mean and standard deviation per channel (pixels of 0..255)."""

    name: str
    folders: tuple[str, ...]
    files: Mapping[str, tuple[str, ...]]
    suffixes: tuple[str, ...]  #: each file may end in any of them
    read: Callable[[list[Path], int], tuple[Array, Array]]  #: (files, classes) -> x, y
    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def find(self, root: Path) -> Path | None:
        """The first folder below `root` that holds any of the files; None if there is none."""
        names = [name for split in self.files for name in self.files[split]]
        folders = (root / folder for folder in self.folders)
        return next((folder for folder in folders if any(self._file(folder, name) for name in names)), None)

    def load(self, folder: Path, split: str, classes: int | None) -> Images:
        """The images of `split`. Raises DataError if one of its files is missing or bad."""
        found = []
        for name in self.files[split]:
            file = self._file(folder, name)
            if file is None:
                raise DataError(f"{folder}: has {self.name} but not its {name}, which {split} needs")
            found.append(file)
        x, y = self.read(found, self.classes)
        check_labels(y, classes or self.classes, self.name)
        scaling = Scaling(np.array(self.mean) * 255, np.array(self.std) * 255)
        return Images(self.name, x, y, classes or self.classes, scaling)

    def _file(self, folder: Path, name: str) -> Path | None:
        paths = (folder / (spelling + suffix) for spelling in (name, name.replace("-idx", ".idx"))
                 for suffix in self.suffixes)  # fmt: skip
        return next((path for path in paths if path.exists() and not path.is_dir()), None)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns any error that a reader raises for a bad file into a DataError: one line that names the file."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: not a regular file")
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:  # a parser may raise nearly any error on a bad file
        what = " ".join(str(error).split())[:300]
        raise DataError(f"{path}: {what if type(error) is ValueError else f'damaged ({type(error).__name__}: {what})'}"
                        ) from error  # fmt: skip


# ---- idx


def read_idx(path: Path) -> Array:
    """An idx file of bytes as uint8, of the shape that its header declares. Raises DataError."""
    with _reading(path):
        packed = path.suffix == ".gz"
        with gzip.open(path) if packed else open(path, "rb") as file:
            magic = _exactly(file, 4)
            if magic[:3] != b"\0\0\x08" or not 1 <= magic[3] <= 4:
                raise ValueError("not an idx file of bytes (its first bytes are not 00 00 08 and 1 to 4 dimensions)")
            shape = tuple(int(size) for size in np.frombuffer(_exactly(file, 4 * magic[3]), ">u4"))
            need, present = math.prod(shape), path.stat().st_size - (0 if packed else file.tell())
            if need > present and not packed:
                raise ValueError(f"truncated: its header declares {shape}, {need} bytes; the file has {present}")
            _check_packed(f"its header declares {shape}", need, present)
            content = _content(file, need)
            if file.read(1):  # reads on to the checksum of a gzipped file
                raise ValueError(f"holds more than the {need} bytes that its header declares")
        return content.reshape(shape)


def _check_packed(what: str, need: int, size: int) -> None:
    """Raises ValueError if `need` bytes cannot, or should not, be packed in a file of `size` bytes."""
    if need > max(SMALL, size * PACKED):
        raise ValueError(f"truncated, or compressed more than images can be: {what}, {need} bytes, but has {size}; "
                         f"unpack it first")
    if need > LARGEST:
        raise ValueError(f"{what}, {need} bytes; the limit is {LARGEST >> 30} GiB")


def _content(file: IO[bytes] | gzip.GzipFile, need: int) -> Array:
    """The next `need` bytes, (need,) uint8, without a second copy in memory."""
    content, place = np.empty(need, np.uint8), 0
    while place < need:
        part = file.read(min(need - place, 1 << 20))
        if not part:
            raise ValueError(f"truncated: {need} bytes should follow, but only {place} do")
        content[place : place + len(part)] = np.frombuffer(part, np.uint8)
        place += len(part)
    return content


def _exactly(file: IO[bytes] | gzip.GzipFile, size: int) -> bytes:
    return _content(file, size).tobytes()


def _mnist(paths: list[Path], classes: int) -> tuple[Array, Array]:
    images, labels = (read_idx(path) for path in paths)
    if images.ndim != 3 or 0 in images.shape:
        raise DataError(f"{paths[0]}: has shape {images.shape}; images must be (samples, height, width)")
    if labels.shape != images.shape[:1]:
        raise DataError(f"{paths[1]}: has labels of shape {labels.shape} for {len(images)} images of {paths[0].name}")
    check_labels(labels, classes, paths[1])
    return images[..., None], labels.astype(np.int64)


# ---- CIFAR


def read_cifar(path: Path, classes: int) -> tuple[Array, Array]:
    """A CIFAR python pickle: (images (N, 32, 32, 3) uint8, labels (N,) int64; of CIFAR-100 the fine ones). Raises
    DataError, also for a label that is not in 0..classes-1."""
    with _reading(path):
        if path.stat().st_size > PICKLE_BYTES:
            raise ValueError("larger than any CIFAR file")
        content = pickles.read(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("not a CIFAR file: it is not a pickled dict")
        batch = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in content.items()}
        labels, pixels = batch.get("fine_labels", batch.get("labels")), batch.get("data")
        if (not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 2
            or pixels.shape[1] != 3072):
            raise ValueError("not a CIFAR file: 'data' is not a (samples, 3072) array of bytes")
        if not isinstance(labels, list) or len(labels) != len(pixels) or not len(pixels):
            raise ValueError(f"'labels' or 'fine_labels' is not a list of {len(pixels)} labels, at least one")
        if not all(type(label) is int for label in labels):
            raise ValueError("a label is not a whole number")
        y = np.array(labels, np.int64)
        check_labels(y, classes, path)
        return np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), y


def _cifar(paths: list[Path], classes: int) -> tuple[Array, Array]:
    images, labels = zip(*(read_cifar(path, classes) for path in paths), strict=True)
    return np.concatenate(images), np.concatenate(labels)


# ---- npz


def read_npz(path: Path, pairs: Mapping[str, Sequence[Pair]]) -> dict[Pair, tuple[Array, Array]]:
    """For each split, the first of its pairs of names that the file has, with its arrays; each pair is read once.
    Raises DataError, before any array is read, if a split has none of its pairs, or a pair is not images and labels."""
    with _reading(path):
        _check_index(path)
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: info for info in archive.infolist()}
            if any(info.header_offset + info.compress_size > path.stat().st_size for info in members.values()):
                raise ValueError("truncated: its index declares more than the file has")
            found: dict[Pair, None] = {}
            for split, known in pairs.items():
                pair = next((pair for pair in known if all(f"{name}.npy" in members for name in pair)), None)
                if pair is None:
                    raise ValueError(f"no arrays for {split}; name them x_{split} and y_{split}, {split}_images and "
                                     f"{split}_labels, x and y, or images and labels")
                found[pair] = None
            for images, labels in found:
                _check_pair(images, labels, *(_header(archive, members[f"{name}.npy"]) for name in (images, labels)))
            total = sum(members[f"{name}.npy"].file_size for pair in found for name in pair)
            if total > LARGEST:
                raise ValueError(f"has {total} bytes of images and labels; the limit is {LARGEST >> 30} GiB")
            return {(x, y): (_member(archive, members[f"{x}.npy"]), _member(archive, members[f"{y}.npy"]))
                    for x, y in found}


def _check_index(path: Path) -> None:
    """Raises ValueError for an index (at the end of the file) that is too large. Its last record has its size."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(max(0, size - (1 << 16) - 64))
        end = file.read((1 << 16) + 64)
    at = end.rfind(b"PK\x05\x06")
    if at < 0 or len(end) - at < 22:
        raise ValueError("damaged: it does not end as a .npz file does")
    if (int.from_bytes(end[at + 12 : at + 16], "little") > INDEX_BYTES
        or end[max(0, at - 20) : at].startswith(b"PK\x06\x07")):
        raise ValueError("its index is too large for a few arrays")


@dataclass(frozen=True)
class _Header:
    """The header of one array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Header:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{info.filename} is compressed by a method that NumPy does not use")
    with archive.open(info) as file:
        version = npy.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"{info.filename} has npy version {version}, which is not for plain numbers")
        try:
            shape, _, dtype = npy.read_array_header_1_0(file)
        except (MemoryError, RecursionError):  # the parser fails so on thousands of brackets or signs
            raise ValueError(f"the header of {info.filename} is damaged") from None
        need, size = math.prod(shape) * dtype.itemsize, info.file_size - file.tell()
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise ValueError(f"{info.filename} holds {dtype}, not numbers; pickled objects are never read")
        if min(shape, default=0) < 0 or need != size:
            raise ValueError(f"{info.filename} declares {shape} of {dtype}, {need} bytes, but holds {size}")
        _check_packed(f"{info.filename} declares {shape} of {dtype}", need, info.compress_size)
        return _Header(shape, dtype)


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    """An array whose header was checked."""
    with archive.open(info) as file:
        array: Array = npy.read_array(file, allow_pickle=False)
        if file.read(1):  # reads on to the checksum
            raise ValueError(f"{info.filename} is truncated")
    return array


def _check_pair(images: str, labels: str, x: _Header, y: _Header) -> None:
    if len(x.shape) == 2 and 0 not in x.shape and len(y.shape) in (1, 2) and y.shape[0] == x.shape[0]:
        return
    shape = (*x.shape, 1) if len(x.shape) == 3 else x.shape
    if len(shape) != 4 or 0 in shape or shape[3] > 4:
        hint = ""
        if len(shape) == 4 and shape[1] <= 4 < shape[3]:
            hint = f"; these look like channels first: save {images}.transpose(0, 2, 3, 1)"
        raise ValueError(f"{images} has shape {shape}; images must be (samples, height, width) or, channels last, "
                         f"(samples, height, width, 1 to 4){hint}")
    if y.dtype.kind not in "iu" or y.shape not in (shape[:1], (shape[0], 1)):
        raise ValueError(f"{labels} is {y.dtype} of shape {y.shape}; it needs one whole number for "
                         f"each of the {shape[0]} images")


def load_npz(path: Path, split: str, *, classes: int | None = None, dtype: str = "float32",
             standardize: Standardize = False, note: Note = lambda line: None) -> Images | Dataset:
    """The samples of `split`: x_train, y_train, x_test, y_test; train_images, train_labels, test_images, test_labels;
    or x, y or images, labels, of which a fixed random fifth is the test part. Images, or the data set that
    `from_arrays` makes of rows of numbers or tokens. Raises DataError."""
    read = read_npz(path, {s: NPZ_KEYS[s] for s in (split, "train")})
    if all(x.ndim == 2 for x, _ in read.values()):
        first, test = next(reversed(read)), None
        if first[0] not in WHOLE:  # both parts for each: the tokens of both make the vocabulary
            (test,) = read_npz(path, {"test": NPZ_KEYS["test"]}).values()
        return from_arrays(path.name, *read[first], split, test=test, classes=classes, dtype=dtype,
                           standardize=standardize, note=note)
    found = {pair: _checked(path, pair, *arrays) for pair, arrays in read.items()}
    wanted, training = next(iter(found)), next(reversed(found))
    if classes is None:
        classes = 1 + max(int(y.max()) for _, y in found.values())
    uneven = False
    for pair in sorted(found):
        check_labels(found[pair][1], classes, f"{path}, {pair[1]}", ignored=True)
        uneven |= ignores(found[pair][1], f"{path}, {pair[1]}", note)
    (x, y), (seen, _) = found.pop(wanted), found.get(training, (None, None))
    rows = fifth(len(x), "train") if wanted[0] in WHOLE else None
    seen = x if seen is None else seen
    if x.shape[1:] != seen.shape[1:] or (rows is not None and not len(rows)):
        raise DataError(f"{path}: {wanted[0]} has images of {x.shape[1:]}, {training[0]} of {seen.shape[1:]}, "
                        f"{len(seen)} of them")
    scaling = scaling_of(f"{path}, {wanted[0]}", seen, rows, standardize)
    if rows is not None:
        rows = rows if split == "train" else fifth(len(x), split)
        x, y = x[rows], y[rows]
    check_range(f"{path}, {wanted[0]}", x, scaling, dtype, note)
    return Images(path.name, x, y.astype(np.int64), classes, scaling, uneven)


def _checked(path: Path, pair: tuple[str, str], x: Array, y: Array) -> tuple[Array, Array]:
    """(images (N, H, W, C), labels (N,)) of one pair of arrays."""
    x = x[..., None] if x.ndim == 3 else x
    done = 0
    for piece in pieces(x) if x.dtype.kind == "f" else ():
        wide = np.abs(piece, dtype=np.float64)
        if not (wide <= FLOAT32).all():
            bad = np.argwhere(~(wide <= FLOAT32))[0]
            number = wide[tuple(bad)]
            what = (f"{number:g}, which is out of the range of float32" if np.isfinite(number)
                    else "a number that is not finite")
            raise DataError(f"{path}, {pair[0]}: sample {done + bad[0]} holds {what}")
        done += len(piece)
    return x, y.reshape(-1)


STORED = (
    Stored("mnist", (".", "mnist", "MNIST", "MNIST/raw"),
           {"train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
            "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")},
           ("", ".gz"), _mnist, (28, 28, 1), 10, (0.1307,), (0.3081,)),
    Stored("cifar10", (".", "cifar-10-batches-py", "cifar10", "cifar10/cifar-10-batches-py"),
           {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
           ("",), _cifar, (32, 32, 3), 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    Stored("cifar100", (".", "cifar-100-python", "cifar100", "cifar100/cifar-100-python"),
           {"train": ("train",), "test": ("test",)},
           ("",), _cifar, (32, 32, 3), 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
)  # fmt: skip
