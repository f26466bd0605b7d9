"""Images from local files: MNIST's idx (also gzipped), CIFAR's python pickles, `.npz`.

Every file is taken for foreign or hostile until its sizes agree: what a header declares is checked against the bytes
that are there before memory is taken, and nothing in a file is executed. It knows nothing of substitutes.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy

from . import pickles
from .dataset import Array, DataError, Images, check_labels, statistics
from .loader import permutation

DEFLATE_RATIO = 1040  #: no deflated byte yields more
PICKLE_BYTES = 256 << 20  #: CIFAR-100's larger file has 155 MB
NPZ_KEYS = {
    "train": (("x_train", "y_train"), ("train_images", "train_labels"), ("x", "y"), ("images", "labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels"), ("x", "y"), ("images", "labels")),
}


@dataclass(frozen=True)
class Stored:
    """A data set that is published as files: where they lie below a root, what each split consists of, how they are
    read, and its published mean and standard deviation per channel (pixels of 0..255)."""

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
        """The images of `split`. Raises DataError where one of its files is missing or bad."""
        found = []
        for name in self.files[split]:
            file = self._file(folder, name)
            if file is None:
                raise DataError(f"{folder}: holds {self.name} but not its {name}, which {split} needs")
            found.append(file)
        x, y = self.read(found, self.classes)
        check_labels(y, classes or self.classes, self.name)
        mean, std = np.array(self.mean) * 255, np.array(self.std) * 255
        return Images(self.name, x, y, classes or self.classes, mean, std)

    def _file(self, folder: Path, name: str) -> Path | None:
        paths = (folder / (spelling + suffix) for spelling in (name, name.replace("-idx", ".idx"))
                 for suffix in self.suffixes)  # fmt: skip
        return next((path for path in paths if path.exists() and not path.is_dir()), None)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns whatever a bad file makes its reader raise into one line that names the file."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: not a regular file")
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # parsers of foreign bytes raise nearly anything
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
            need, there = math.prod(shape), path.stat().st_size - (0 if packed else 4 + 4 * magic[3])
            if need > there * (DEFLATE_RATIO if packed else 1):
                raise ValueError(f"truncated: its header declares {shape}, {need} bytes; the file has {there}")
            content = _exactly(file, need)
            if file.read(1):  # reads on to the checksum of a gzipped file
                raise ValueError(f"holds more than the {need} bytes that its header declares")
        return np.frombuffer(content, np.uint8).reshape(shape)


def _exactly(file: BinaryIO | gzip.GzipFile, size: int) -> bytes:
    content = file.read(size)
    if len(content) != size:
        raise ValueError(f"truncated: {size} bytes were to follow, {len(content)} do")
    return content


def _mnist(paths: list[Path], classes: int) -> tuple[Array, Array]:
    images, labels = (read_idx(path) for path in paths)
    if images.ndim != 3 or 0 in images.shape:
        raise DataError(f"{paths[0]}: holds {images.shape}; images are (samples, height, width)")
    if labels.shape != images.shape[:1]:
        raise DataError(f"{paths[1]}: holds {labels.shape} labels for the {len(images)} images of {paths[0].name}")
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
            raise ValueError("not a CIFAR file: it holds no dict")
        batch = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in content.items()}
        labels, pixels = batch.get("fine_labels", batch.get("labels")), batch.get("data")
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072:
            raise ValueError("not a CIFAR file: 'data' is no (samples, 3072) array of bytes")
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


def read_npz(path: Path, keys: list[str]) -> dict[str, Array]:
    """Those of the arrays `keys` that the file has. Raises DataError."""
    with _reading(path), zipfile.ZipFile(path) as archive:
        members = {info.filename: info for info in archive.infolist()}
        if any(info.header_offset + info.compress_size > path.stat().st_size for info in members.values()):
            raise ValueError("truncated: its index declares more than the file has")
        return {key: _member(archive, members[f"{key}.npy"]) for key in keys if f"{key}.npy" in members}


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{info.filename} is compressed in another way than NumPy does it")
    with archive.open(info) as file:
        version = npy.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{info.filename} is of npy version {version}, which holds no plain numbers")
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, column_major, dtype = read_header(file)
        if dtype.kind not in "biuf":
            raise ValueError(f"{info.filename} holds {dtype}, not numbers; pickled objects are never read")
        need, there = math.prod(shape) * dtype.itemsize, info.file_size - file.tell()
        if min(shape, default=0) < 0 or need != there or info.file_size > info.compress_size * DEFLATE_RATIO:
            raise ValueError(f"{info.filename} declares {shape} of {dtype}, {need} bytes, but holds {there}")
        content = file.read(need)
        if len(content) != need or file.read(1):
            raise ValueError(f"{info.filename} is truncated")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if column_major else "C")


def load_npz(path: Path, split: str, classes: int | None) -> Images:
    """The images of `split`: x_train, y_train, x_test, y_test; train_images, train_labels, test_images, test_labels;
    or x, y or images, labels, of which a fixed random fifth is the test part. Raises DataError."""
    arrays = read_npz(path, [key for split in NPZ_KEYS.values() for pair in split for key in pair])
    pairs = {part: next((pair for pair in NPZ_KEYS[part] if arrays.keys() >= set(pair)), None) for part in NPZ_KEYS}
    wanted, training = pairs[split], pairs["train"]
    if wanted is None or training is None:
        raise DataError(f"{path}: no arrays for {split}; they are x_{split} and y_{split}, {split}_images and "
                        f"{split}_labels, x and y, or images and labels")
    labelled = {pair: _checked(path, arrays, pair) for pair in {wanted, training}}
    x, y = labelled[wanted]
    seen = labelled[training][0]
    if classes is None:
        classes = 1 + max(int(labels.max()) for _, labels in labelled.values())
    for pair in sorted(labelled):
        check_labels(labelled[pair][1], classes, f"{path}, {pair[1]}")
    if wanted == training and wanted[0] in ("x", "images"):
        seen = seen[fifth(len(seen), "train")]
        rows = fifth(len(x), split)
        x, y = x[rows], y[rows]
    if x.shape[1:] != seen.shape[1:] or not len(seen):
        raise DataError(f"{path}: {wanted[0]} has images of {x.shape[1:]}, {training[0]} of {seen.shape[1:]}, "
                        f"{len(seen)} of them")
    return Images(path.name, x, y, classes, *statistics(seen))


def _checked(path: Path, arrays: Mapping[str, Array], pair: tuple[str, str]) -> tuple[Array, Array]:
    """(images (N, H, W, C), labels (N,) int64) of one pair of arrays."""
    x, y = (arrays[key] for key in pair)
    where = f"{path}, {pair[0]}"
    x = x[..., None] if x.ndim == 3 else x
    if x.ndim != 4 or 0 in x.shape or x.shape[3] > 4:
        raise DataError(f"{where}: has shape {x.shape}; images are (samples, height, width) or, channels last, "
                        "(samples, height, width, 1 to 4)")
    if y.dtype.kind not in "iu" or y.shape not in (x.shape[:1], (len(x), 1)):
        raise DataError(f"{path}, {pair[1]}: {y.dtype} of shape {y.shape}; one whole number is needed for each of "
                        f"the {len(x)} images")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise DataError(f"{where}: sample {np.argwhere(~np.isfinite(x))[0][0]} holds a number that is not finite")
    return x, y.reshape(-1).astype(np.int64)


def fifth(samples: int, split: str) -> Array:
    """Which of `samples` samples are of `split`: test is the last 20 % (rounded down) of one fixed random order."""
    order, test = permutation(samples, "split", seed=0), samples // 5
    return order[samples - test :] if split == "test" else order[: samples - test]


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
