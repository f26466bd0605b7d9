"""Images as they are published: MNIST's idx (also gzipped) and CIFAR's python pickles.

No file is trusted: the sizes that a header declares are checked against the file's bytes before memory is allocated,
and nothing in a file is executed. Reading takes at most twice the bytes of the images and labels, plus `SPARE`.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from . import pickles
from .archives import reading
from .arrays import LARGEST, PACKED, SMALL
from .dataset import Array, DataError, Dataset, Scaling, Wanted, check_labels, of_images

SPARE = 1 << 30  #: for a pickle, whose small objects take more than their bytes; other files need a quarter of it
PICKLE_BYTES = 256 << 20  #: CIFAR-100's larger file has 155 MB


@dataclass(frozen=True)
class Stored:
    """A data set that is published as files: their folders below a root, the files of each split, the function that
    reads them, and its published mean and standard deviation per channel (pixels of 0..255)."""

    name: str
    folders: tuple[str, ...]
    files: Mapping[str, tuple[str, ...]]
    suffixes: tuple[str, ...]  #: each file may end in any of them
    read: Callable[[list[Path], int], tuple[Array, Array]]  #: (files, classes) -> x, y
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def find(self, root: Path) -> Path | None:
        """The first folder below `root` that holds any of the files; None if there is none."""
        names = [name for split in self.files for name in self.files[split]]
        folders = (root / folder for folder in self.folders)
        return next((folder for folder in folders if any(self._file(folder, name) for name in names)), None)

    def load(self, folder: Path, wanted: Wanted) -> Dataset:
        """The images of a split. Raises DataError if one of its files is missing or bad."""
        files = {name: self._file(folder, name) for name in self.files[wanted.split]}
        if lacks := next((name for name, file in files.items() if file is None), None):
            raise DataError(f"{folder}: has {self.name} but not its {lacks}, which {wanted.split} needs")
        x, y = self.read([*filter(None, files.values())], self.classes)
        classes = wanted.classes or self.classes
        check_labels(y, classes, self.name)
        scaling = Scaling(np.array(self.mean) * 255, np.array(self.std) * 255)
        return of_images(self.name, x, y, classes, scaling, wanted)

    def _file(self, folder: Path, name: str) -> Path | None:
        paths = (folder / (spelling + suffix) for spelling in (name, name.replace("-idx", ".idx"))
                 for suffix in self.suffixes)  # fmt: skip
        return next((path for path in paths if path.exists() and not path.is_dir()), None)


# ---- idx


def read_idx(path: Path) -> Array:
    """An idx file of bytes as uint8, of the shape that its header declares. Raises DataError."""
    with reading(path), open(path, "rb") as stored:
        packed = stored.peek(2)[:2] == b"\x1f\x8b"  # a browser may have unpacked it, and kept its name
        file = gzip.GzipFile(fileobj=stored) if packed else stored
        magic = _exactly(file, 4)
        if magic[:3] != b"\0\0\x08" or not 1 <= magic[3] <= 4:
            raise ValueError("not an idx file of bytes (its first bytes are not 00 00 08 and 1 to 4 dimensions)")
        shape = tuple(int(size) for size in np.frombuffer(_exactly(file, 4 * magic[3]), ">u4"))
        need, size = math.prod(shape), path.stat().st_size
        if need > min(LARGEST, max(SMALL, size * PACKED) if packed else size - file.tell()):
            raise ValueError(f"truncated, or compressed more than images can be: its header declares {shape}, {need} "
                             f"bytes, and the file has {size}")
        content = _exactly(file, need)
        if file.read(1):  # reads on to the checksum of a gzipped file
            raise ValueError(f"holds more than the {need} bytes that its header declares")
        return np.frombuffer(content, np.uint8).reshape(shape)


def _exactly(file: IO[bytes] | gzip.GzipFile, size: int) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise ValueError(f"truncated: {size} bytes should follow, but only {len(content)} do")
    return content


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
    with reading(path):
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


STORED = (
    Stored("mnist", (".", "mnist", "MNIST", "MNIST/raw"),
           {"train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
            "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")},
           ("", ".gz"), _mnist, 10, (0.1307,), (0.3081,)),
    Stored("cifar10", (".", "cifar-10-batches-py", "cifar10", "cifar10/cifar-10-batches-py"),
           {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
           ("",), _cifar, 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    Stored("cifar100", (".", "cifar-100-python", "cifar100", "cifar100/cifar-100-python"),
           {"train": ("train",), "test": ("test",)},
           ("",), _cifar, 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
)  # fmt: skip
