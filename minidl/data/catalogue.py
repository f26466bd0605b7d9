"""Data by name or path, and the substitutes for missing files.

It does not know how a file is read or a batch is made.
"""

from __future__ import annotations

import difflib
import functools
import os
import sys
from pathlib import Path

import numpy as np

from . import builtin, formats
from .dataset import DataError, Dataset, Images, Note
from .loader import Loader, check_seed

NAMES = ("digits", "mnist", "cifar10", "cifar100", "imagenet", "iwslt", "mnli", "mrpc", "openwebtext", "pydoc",
         "synthetic")  # fmt: skip
UNSUPPORTED = ("imagenet", "iwslt", "mnli", "mrpc", "openwebtext")
ROOT = Path("data")  #: the default of `root`


@functools.cache  # once in a process
def _say(line: str) -> None:
    print(line, file=sys.stderr)


def digits(batch_size: int = 64, *, split: str = "train", seed: int = 0, dtype: str = "float32") -> Loader:
    """The embedded digits: x (B, 8, 8, 1) of `dtype`, mean 0 and variance 1 over the training part; y (B,) int64 in
    0..9. 1,438 samples for training, 359 for testing."""
    return load("digits", batch_size=batch_size, split=split, seed=seed, dtype=dtype)


def load(
    name_or_path: str | os.PathLike[str], *, batch_size: int, root: str | os.PathLike[str] | None = None,
    split: str = "train", seed: int = 0, strict: bool = False, image_size: int | None = None,
    channels: int | None = None, classes: int | None = None, sequence_length: int | None = None,
    dtype: str = "float32", note: Note = _say,
) -> Loader:  # fmt: skip
    """A loader of a data set by name (`NAMES`) or path: a `.npz` file, or a folder of MNIST idx or CIFAR python files.

    Images: x (B, H, W, C) of `dtype`, standardised per channel to mean 0 and variance 1 over the training part (of
    MNIST and CIFAR by the published numbers), then resized to `image_size` and repeated to `channels`; y (B,) int64.
    Text (`pydoc`, bytes; `synthetic` with a `sequence_length`): x and y (B, sequence_length) int64, y the tokens that
    follow. `classes`: how many classes, or tokens, the model knows; None takes the data's own number.

    `split`: train (shuffled anew each epoch, last incomplete batch dropped) or test (stored order, nothing dropped).
    Files of named data are looked for in `root`, by default ./data. Where none of them is found, the embedded digits
    are used instead, in the size that was asked for; or synthetic images, where the digits have the wrong number of
    classes. `note` gets one line that says so, and one for resizing. With `strict` a missing file is an error; a
    missing path or `root` always is. Nothing is ever downloaded.

    Raises DataError, with one line, for arguments that do not fit, an unknown name, a damaged file, a label out of
    range.
    """
    if split not in ("train", "test"):
        raise DataError(f"the split is {split!r}; it must be train or test")
    try:
        if np.dtype(dtype).kind != "f":
            raise TypeError
    except TypeError:
        raise DataError(f"the dtype of images is {dtype!r}; it must be a float type that NumPy has") from None
    check_seed(seed)
    sizes = {"image_size": image_size, "channels": channels, "classes": classes, "sequence_length": sequence_length}
    for key, value in sizes.items():
        if value is not None and (not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1):
            raise DataError(f"{key} is {value!r}; it must be a whole number > 0")
    if root is not None and not Path(root).is_dir():
        raise DataError(f"{root}: the folder for data does not exist")
    try:
        dataset = _named(name_or_path, ROOT if root is None else Path(root), split, seed, strict, dtype, note, **sizes)
    except OSError as error:
        raise DataError(f"{name_or_path}: {error.strerror}") from error
    except MemoryError as error:
        raise DataError(f"{name_or_path}: does not fit in memory") from error
    return Loader(dataset, batch_size, seed=seed, training=split == "train")


def _named(name: str | os.PathLike[str], root: Path, split: str, seed: int, strict: bool, dtype: str, note: Note,
           image_size: int | None, channels: int | None, classes: int | None, sequence_length: int | None) -> Dataset:
    text = name == "pydoc" or (name == "synthetic" and sequence_length is not None)
    if text and (image_size or channels):
        raise DataError(f"{name}: image_size and channels are for images, not for tokens")
    if sequence_length is not None and not text:
        raise DataError(f"{name}: sequence_length is for tokens, not for images")
    if name in UNSUPPORTED:
        known = ", ".join(known for known in NAMES if known not in UNSUPPORTED)
        raise DataError(f"{name} is not supported yet; there are {known}, or a path")
    if name == "pydoc":
        return builtin.pydoc(split, sequence_length or 64, classes)
    if name == "synthetic" and sequence_length is not None:
        return builtin.tokens(split, sequence_length, classes or 256, seed)
    if name == "synthetic":
        return builtin.images(split, image_size or 32, channels or 3, classes or 10, seed, dtype)
    if name == "digits":
        return builtin.digits(split, classes).dataset(image_size, channels, dtype, note)
    stored = next((stored for stored in formats.STORED if stored.name == name), None)
    if stored is None:
        return _from_path(_path(name), split, classes).dataset(image_size, channels, dtype, note)
    folder = stored.find(root)
    if folder is not None:
        return stored.load(folder, split, classes).dataset(image_size, channels, dtype, note)
    looked = f"{stored.files[split][0]} in {root} and its {', '.join(stored.folders[1:])}"
    wanted = classes or stored.classes
    image_size, channels = image_size or stored.shape[0], channels or stored.shape[2]
    instead = "digits" if wanted == 10 else "synthetic"
    missing = f"{name}: not found (looked for {looked})"
    if strict:
        raise DataError(f"{missing}; nothing is downloaded and strict forbids a substitute")
    note(f"{missing}; {'the embedded digits are' if instead == 'digits' else 'synthetic images are'} used instead")
    return _named(instead, root, split, seed, strict, dtype, note, image_size, channels, wanted, None)


def _path(name: str | os.PathLike[str]) -> Path:
    """The path, which must exist. Raises DataError, which treats a bare word as a misspelt name."""
    path = Path(name)
    if path.exists():
        return path
    if isinstance(name, str) and os.sep not in name and not path.suffix:
        near = difflib.get_close_matches(name, NAMES, 1)
        hint = f"did you mean {near[0]}?" if near else f"known names: {', '.join(NAMES)}"
        raise DataError(f"{name[:100]!r} is neither the name of a data set nor a path; {hint}")
    raise DataError(f"{path.absolute()}: no such file or folder")


def _from_path(path: Path, split: str, classes: int | None) -> Images:
    for stored in formats.STORED:
        folder = stored.find(path)
        if folder is not None:
            return stored.load(folder, split, classes)
    if path.is_dir():
        raise DataError(f"{path}: has none of the files of {', '.join(stored.name for stored in formats.STORED)}")
    if path.suffix != ".npz":
        raise DataError(f"{path}: is neither a folder nor a .npz file")
    return formats.load_npz(path, split, classes)
