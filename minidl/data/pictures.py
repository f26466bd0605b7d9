"""Pictures in files: folders of classes and tar shards, as ImageNet has. Pillow decodes them in worker processes.

For training a picture is cropped to a random part of 8 to 100 % of its area with a ratio of 3/4 to 4/3 (Szegedy et al.
2015) and flipped half of the time; for testing its shorter side becomes 8/7 of the size, and the middle is cut out. The
channels are scaled by the mean and deviation of ImageNet. docs/data.md says which pixels can be read.
"""

from __future__ import annotations

import atexit
import functools
import io
import math
import os
import re
import signal
import sys
import tarfile
from collections.abc import Iterable, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import draws
from .archives import HIDDEN, files, reading
from .dataset import MOST, Array, DataError, Dataset, Scaling, Wanted, check_labels
from .loader import fifth

#: of files, in any case: torchvision's, and .gif
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
PIXELS = 1 << 28  #: the most pixels of a picture
FILE = 256 << 20  #: the largest file of a picture
MEAN, STD = np.array([0.485, 0.456, 0.406]) * 255, np.array([0.229, 0.224, 0.225]) * 255
TRIES = 10  #: for a crop that fits
TESTS = ("val", "test", "valid", "validation")
SIZE = 224  #: where the network does not say


@dataclass(frozen=True)
class Picture:
    """A picture's file, or its place in an archive: `begin` and `size` in bytes; the whole file where size is 0."""

    file: str
    begin: int = 0
    size: int = 0
    name: str = ""

    def __str__(self) -> str:
        return f"{self.file}, {self.name}" if self.name else self.file


# -------------------------------------------------------------------------------------------------------- what there is
@dataclass(frozen=True)
class Listing:
    """The pictures of one split with their labels (n,), and the names of the classes; () where classes are numbers."""

    pictures: list[Picture]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]


def find(root: Path) -> Path | None:
    """The folder, if it has folders of classes or shards."""
    return root if root.is_dir() and (_has(_train_of(root)) or _shards(root, "train")) else None


def _train_of(root: Path) -> Path:
    return root / "train" if (root / "train").is_dir() else root


def _has(folder: Path) -> bool:
    """Whether folders or archives of classes with pictures are here; in `train`, pictures may lie deeper."""
    if folder.name == "train" and any(entry.suffix == ".tar" for entry in _entries(folder)):
        return True
    return any(_is_picture(str(f.relative_to(entry))) for entry in _entries(folder) if entry.is_dir()
               for f in (entry.rglob("*") if folder.name == "train" else entry.iterdir()))


def _entries(folder: Path) -> list[Path]:
    return sorted(e for e in folder.iterdir() if not HIDDEN.search(e.name))


def _is_picture(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not HIDDEN.search(name)


def _shards(root: Path, split: str) -> list[Path]:
    """The shards of a split: train-000.tar or train/000.tar with a class (.cls) for each picture."""
    found = ([f for f in _entries(root) if re.search(rf"(?<![a-z]){name}", f.name) and f.suffix == ".tar"]
             for name in (("train",) if split == "train" else TESTS))
    return next(filter(None, found), [])


def listing(root: Path, split: str) -> Listing:
    """The pictures of a split. Raises DataError for an empty class, one that training lacks, and a damaged archive."""
    if _shards(root, "train"):
        if not (found := _shards(root, split)):
            raise DataError(f"{root}: has shards for training but none for {split}, such as val-0000.tar")
        return _of_shards(found)
    train = _train_of(root)
    names = tuple(_classes(train).values())
    test = next((root / name for name in TESTS if (root / name).is_dir()), None) if train != root else None
    if test is not None:
        return _of_classes(train if split == "train" else test, names)
    whole = _of_classes(train, names)
    kept = fifth(len(whole.pictures), split)
    return Listing([whole.pictures[i] for i in kept], whole.labels[kept], names)


def _classes(folder: Path) -> dict[Path, str]:
    """The folders and archives of classes, and the name of each."""
    return {e: e.name.removesuffix(".tar") for e in _entries(folder) if e.is_dir() or e.suffix == ".tar"}


def _of_classes(folder: Path, names: tuple[str, ...]) -> Listing:
    if loose := [e for e in _entries(folder) if _is_picture(e.name)]:
        raise DataError(f"{loose[0]}: a picture must be in the folder of its class")
    pictures, labels = list[Picture](), list[int]()
    for entry, name in _classes(folder).items():
        if name not in names:
            raise DataError(f"{entry}: a class that the training part does not have")
        own = ([Picture(f) for f in map(str, sorted(entry.rglob("*"))) if _is_picture(f[len(str(entry)) :])]
               if entry.is_dir() else [Picture(str(entry), begin, size, member)
                                       for member, begin, size in _members(entry) if _is_picture(member)])
        if not own:
            raise DataError(f"{entry}: a class without pictures; add some, or remove it")
        pictures += own
        labels += [names.index(name)] * len(own)
    return Listing(pictures, np.array(labels, np.int64), names)


def _members(archive: Path) -> Iterable[tuple[str, int, int]]:
    """(name, first byte, size) of the files of an archive. Raises DataError for a damaged or truncated one."""
    size = archive.stat().st_size
    with reading(archive), tarfile.open(archive, "r:") as content:
        for member in files(content, archive):
            if member.offset_data + member.size > size:
                raise ValueError(f"truncated: {member.name} ends after the file")
            yield member.name, member.offset_data, member.size


def _of_shards(shards: Sequence[Path]) -> Listing:
    pictures, labels = list[Picture](), list[int]()
    for shard in shards:
        own: dict[str, Picture] = {}
        classes: dict[str, int] = {}
        for name, begin, size in _members(shard):
            key, _, suffix = name.rpartition(".")
            if _is_picture(name):
                own[key] = Picture(str(shard), begin, size, name)
            elif suffix == "cls":
                with open(shard, "rb") as file:
                    file.seek(begin)
                    text = file.read(min(size, 20)).decode("ascii", "replace").strip()
                if not text.isdigit() or int(text) >= MOST:
                    raise DataError(f"{shard}, {name}: {text!r} is not the number of a class, 0 to {MOST - 1}")
                classes[key] = int(text)
        apart = sorted(own.keys() ^ classes.keys())
        if apart or not own:
            what = f"{apart[0]} has no {'class' if apart[0] in own else 'picture'}" if apart else "it has no pictures"
            raise DataError(f"{shard}: {what}; a shard has a picture and its class, KEY.jpg and KEY.cls")
        pictures += own.values()
        labels += [classes[key] for key in own]
    return Listing(pictures, np.array(labels, np.int64), ())


# ------------------------------------------------------------------------------------------------------------ decoding
def load_pictures(root: Path, wanted: Wanted) -> Dataset:
    """x (B, image_size, image_size, channels), y (B,). Raises DataError, also when a damaged picture is read. A note
    says so if a folder that is called by a number is another class."""
    found, size, channels = listing(root, wanted.split), wanted.image_size or SIZE, wanted.channels or 3
    if other := next((c for c in enumerate(found.classes) if c[1].isdecimal() and c[1] != str(c[0])), None):
        wanted.note(f"{root}: folders are classes in the order of their names as text: {other[1]} is class {other[0]}")
    classes = wanted.classes or len(found.classes) or 1 + int(listing(root, "train").labels.max())
    check_labels(found.labels, classes, root)
    if channels not in (1, 3):
        raise DataError(f"{root}: pictures have 1 or 3 channels, not {channels}")
    _pillow()
    scaling = Scaling(*(v.mean(keepdims=True) if channels == 1 else v for v in (MEAN, STD)))

    def rows(indices: NDArray[np.int64], numbers: draws.Draws) -> tuple[Array, Array]:
        jobs = [(found.pictures[i], int(n) if wanted.split == "train" else None)
                for i, n in zip(indices, numbers, strict=True)]
        x = scaling.images(_decoded(jobs, size, channels, wanted.workers))
        return x.astype(wanted.dtype, copy=False), found.labels[indices]

    return Dataset(root.name, len(found.pictures), (size, size, channels), classes, rows, random=True, slow=True,
                   faster="give more --workers")


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError:
        raise DataError("pictures need Pillow: pip install 'minidl[data]'") from None
    return PIL.Image


def _decoded(jobs: Sequence[tuple[Picture, int | None]], size: int, channels: int, workers: int | None) -> Array:
    """(n, size, size, channels) uint8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2  # macOS lacks it
    count = max(1, cores - 1) if workers is None else workers
    if not count or len(jobs) < 2:
        return decode(jobs, size, channels)
    step = -(-len(jobs) // count)
    parts = [jobs[i : i + step] for i in range(0, len(jobs), step)]
    try:
        return np.concatenate(list(_pool(count).map(decode, parts, [size] * len(parts), [channels] * len(parts))))
    except BrokenExecutor:
        _pool.cache_clear()
        raise DataError("a worker process that decodes pictures has ended; is there enough memory?") from None


@functools.cache
def _pool(workers: int) -> Executor:
    # an interrupt of the terminal is the main process's to handle
    pool = ProcessPoolExecutor(workers, _Context(), signal.signal, (signal.SIGINT, signal.SIG_IGN))
    atexit.register(pool.shutdown, cancel_futures=True)
    return pool


class _Worker(SpawnProcess):
    """A process that does not run the user's script once more, which multiprocessing does to know its names."""

    def start(self) -> None:
        script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = script


class _Context(SpawnContext):
    Process = _Worker


def decode(jobs: Sequence[tuple[Picture, int | None]], size: int, channels: int) -> Array:
    """These pictures, each with the number that its random choices follow from, or None for the middle: (n, size, size,
    channels) uint8. Raises DataError that names the picture."""
    image = _pillow()
    found = np.empty((len(jobs), size, size, channels), np.uint8)
    for i, (picture, number) in enumerate(jobs):
        try:
            with image.open(io.BytesIO(_bytes(picture))) as opened:
                if opened.width * opened.height > PIXELS:
                    raise ValueError(f"{opened.width} x {opened.height} pixels, more than {PIXELS:,}")
                shown = _shown(opened, "L" if channels == 1 else "RGB")
            found[i] = np.asarray(_cut(shown, size, number)).reshape(size, size, channels)
        except MemoryError:
            raise
        except DataError as error:
            raise DataError(f"{picture}: {error}") from None
        except Exception as error:  # a decoder may raise nearly any error on a damaged file
            raise DataError(f"{picture}: not a picture, or damaged ({' '.join(str(error).split())[:200]})") from None
    return found


def _shown(picture: Any, mode: str) -> Any:
    """The picture in bytes of gray (L) or colours (RGB). Raises DataError if that would lose more than bits."""
    if picture.mode[0] in "IF":  # Pillow cuts numbers above 255 to 255
        if picture.mode == "F" or (picture.mode == "I" and picture.format not in ("PNG", "PPM")):
            raise DataError("its pixels have 32 bits, and what is white is not known; save it with 8 or 16 bits")
        picture = _pillow().fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.has_transparency_data and picture.convert("RGBA").getextrema()[3][0] < 255:
        raise DataError("one can see through it; save it on a background, as RGB")
    return picture.convert(mode)


def _bytes(picture: Picture) -> bytes:
    with open(picture.file, "rb") as file:
        file.seek(picture.begin)
        content = file.read(picture.size or FILE + 1)
    if len(content) > FILE or (picture.size and len(content) < picture.size):
        raise ValueError(f"larger than {FILE >> 20} MiB" if len(content) > FILE else "truncated")
    return content


def _cut(shown: Any, size: int, number: int | None) -> Any:
    """The random part, flipped or not; or the middle."""
    bilinear = 2  # Pillow's number
    if number is None:
        side = size / (size * 8 / 7 / min(shown.size))
        left, top = (shown.width - side) / 2, (shown.height - side) / 2
        return shown.resize((size, size), bilinear, (left, top, left + side, top + side))
    chance = draws.uniform(draws.more(np.array([number], np.uint64), 4 * TRIES + 1))[0]
    width, height, left, top = shown.width, shown.height, 0.0, 0.0
    for area, ratio, across, down in chance[:-1].reshape(TRIES, 4):
        target, aspect = (0.08 + 0.92 * area) * width * height, math.exp((2 * ratio - 1) * math.log(4 / 3))
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= shown.width and 0 < h <= shown.height:
            width, height = w, h
            left, top = int(across * (shown.width - w + 1)), int(down * (shown.height - h + 1))
            break
    part = shown.resize((size, size), bilinear, (left, top, left + width, top + height))
    return part.transpose(0) if chance[-1] < 0.5 else part  # 0: left and right exchanged
