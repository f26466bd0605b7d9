"""Data by name, path or function.

It does not know how a file is read or a batch is made.
"""

from __future__ import annotations

import difflib
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from . import arrays, builtin, formats, pictures, sentences, text
from .dataset import DataError, Dataset, Images, Note, Standardize
from .loader import Loader, check_seed

NAMES = ("digits", "mnist", "cifar10", "cifar100", "imagenet", "iwslt", "mnli", "mrpc", "openwebtext", "pydoc",
         "synthetic")  #: names of data sets
STORED = ("mnist", "cifar10", "cifar100", "imagenet", "iwslt", "mnli", "mrpc", "openwebtext")  #: those in files
ROOT = Path("data")  #: the default of `root`
LENGTH = 64  #: tokens of a sample, by default


@functools.cache  # once in a process
def _say(line: str) -> None:
    """Prints a note about data to standard error."""
    print(line, file=sys.stderr)


@dataclass(frozen=True)
class Wanted:
    """The data that a network needs, see `load`."""

    split: str
    seed: int
    dtype: str
    note: Note
    image_size: int | None
    channels: int | None
    classes: int | None
    sequence_length: int | None
    tokenizer: str
    workers: int | None
    standardize: Standardize

    @property
    def length(self) -> int:
        return self.sequence_length or LENGTH

    @property
    def sizes(self) -> dict[str, Any]:
        """The options of `from_arrays`."""
        return {"classes": self.classes, "image_size": self.image_size, "channels": self.channels, "dtype": self.dtype,
                "standardize": self.standardize, "note": self.note}


def digits(batch_size: int = 64, *, split: str = "train", seed: int = 0, dtype: str = "float32") -> Loader:
    """The embedded digits: x (B, 8, 8, 1) of `dtype`, mean 0 and variance 1 over the training part; y (B,) int64 in
    0..9. 1,438 samples for training, 359 for testing."""
    return load("digits", batch_size=batch_size, split=split, seed=seed, dtype=dtype)


def load(
    name_or_path: str | os.PathLike[str], *, batch_size: int, root: str | os.PathLike[str] | None = None,
    split: str = "train", seed: int = 0, image_size: int | None = None,
    channels: int | None = None, classes: int | None = None, sequence_length: int | None = None,
    dtype: str = "float32", tokenizer: str = "bytes", workers: int | None = None, standardize: Standardize = False,
    note: Note = _say,
) -> Loader:  # fmt: skip
    """A loader of a data set by name (`NAMES`), by path, or of a function of one's own (`file.py:function`); see
    docs/data.md.

    Images: x (B, H, W, C) of `dtype`, resized to `image_size` and repeated to `channels`; y (B,) int64. Images of named
    sets are standardised before, per channel: digits to mean 0 and variance 1 over the training part, MNIST, CIFAR and
    pictures by the published numbers. Arrays of one's own, images or numbers x (B, features), stay as they are, unless
    `standardize` is True, or a `Scaling` to standardise them by; `Dataset.scaling` then says how.

    Running text: x and y (B, sequence_length) int64, y the tokens that follow. Pairs of sentences: x (B,
    sequence_length) int64; y (B,), or of translations (B, sequence_length). `classes`: how many classes, or tokens, the
    model knows; None takes the data's own number. `tokenizer`: bytes, a number of tokens, or a file, see
    data/tokens.py. `workers`: processes that decode pictures; None: one for each core but one.

    `split`: train (each epoch in an order of its own, without a gap between them, see `Loader`) or test (stored
    order). Files of named data are looked for in `root`, by default ./data; nothing is ever downloaded. `note` gets a
    line if images are resized.

    Raises DataError, with one line, for arguments that do not fit, an unknown name, a missing or damaged file, a label
    out of range.
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
    wanted = Wanted(split, seed, dtype, note, image_size, channels, classes, sequence_length, tokenizer, workers,
                    standardize)
    try:
        dataset = _named(name_or_path, ROOT if root is None else Path(root), wanted)
    except OSError as error:
        raise DataError(f"{name_or_path}: {error.strerror}") from error
    except MemoryError as error:
        raise DataError(f"{name_or_path}: does not fit in memory") from error
    if workers is not None and not dataset.faster:
        raise DataError(f"--workers has no effect on {dataset.name}: it is for pictures, which are decoded")
    if tokenizer != "bytes" and not dataset.tokenizer:
        raise DataError(f"--tokenizer has no effect on {dataset.name}: it is for text")
    if dataset.scaling is not None:
        note(f"{dataset.name}: standardised by the mean and deviation of "
             + ("its training part" if standardize is True else "the data on which its weights were trained")
             + "; checkpoints and exported weights carry them")
    elif standardize is True:
        raise DataError(f"--standardize has no effect on {dataset.name}: it is for arrays of your own, of numbers or "
                        f"images (.npz, .npy, .csv, or a function that returns arrays)")
    return Loader(dataset, batch_size, seed=seed, training=split == "train")


def _named(name: str | os.PathLike[str], root: Path, wanted: Wanted) -> Dataset:
    if name == "pydoc":
        return _of_text("pydoc", lambda: text.running("pydoc", *text.pydoc_text(), wanted.split, wanted.length,
                                                      wanted.classes, wanted.tokenizer), wanted)
    if name == "synthetic" and wanted.sequence_length is not None:
        return _of_text("synthetic", lambda: builtin.tokens(wanted.split, wanted.length, wanted.classes or 256,
                                                            wanted.seed), wanted)
    if name == "synthetic":
        return builtin.images(wanted.split, wanted.image_size or 32, wanted.channels or 3, wanted.classes or 10,
                              wanted.seed, wanted.dtype)
    if name == "digits":
        return _of_images("digits", lambda: builtin.digits(wanted.split, wanted.classes), wanted)
    if name not in STORED:
        if isinstance(name, str) and ":" in name and not Path(name).exists():
            return arrays.load_own(name, wanted.split, wanted.seed, **wanted.sizes)
        if str(name).endswith(".py"):
            raise DataError(f"{name}: name its function as well: {name}:FUNCTION")
        path = _path(name)
        for kind in KINDS:
            if (found := kind.find(path)) is not None:
                return kind.load(found, wanted)
        raise DataError(f"{path}: has none of the files that are known: {'; '.join(kind.what for kind in KINDS)}")
    assert isinstance(name, str)
    for kind in KINDS:
        if kind.name == name and (found := kind.find(root / name) or kind.find(root)) is not None:
            return kind.load(found, wanted)
    raise _missing(name, root, wanted.split)


def _missing(name: str, root: Path, split: str) -> DataError:
    """The error for a named data set without files: where they were looked for, and data that need none."""
    looked = LOOKED.get(name, "").replace("ROOT", str(root))
    stored = next((s for s in formats.STORED if s.name == name), None)
    if stored is not None:
        looked = f"{stored.files[split][0]} in {root} and its {', '.join(stored.folders[1:])}"
    other = {"mnist": "digits", "cifar10": "digits", "openwebtext": "pydoc"}.get(name, "synthetic")
    return DataError(f"{name}: not found (looked for {looked}); nothing is downloaded: say where its files are "
                     f"(--root DIR), or give --data {other}")


def _of_text(name: str, make: Callable[[], Dataset], wanted: Wanted) -> Dataset:
    if wanted.image_size or wanted.channels:
        raise DataError(f"{name} has tokens, not images; use digits, synthetic, or files of images")
    return make()


def _of_images(name: str | Path, make: Callable[[], Any], wanted: Wanted) -> Dataset:
    """The data set that `make` returns, whole or as images."""
    if wanted.sequence_length is not None:
        raise DataError(f"{name} has images, not tokens; use pydoc, synthetic, or files of text")
    made: Images | Dataset = make()
    return made if isinstance(made, Dataset) else made.dataset(wanted.image_size, wanted.channels, wanted.dtype,
                                                               wanted.note)


# --------------------------------------------------------------------------------------------------------------- files
@dataclass(frozen=True)
class Kind:
    """A kind of files: the data set's name, or "" if it has none; the file or folder at or below a path that has it, or
    None; and its reader. `what`: the thing looked for, in words."""

    name: str
    find: Callable[[Path], Path | None]
    load: Callable[[Path, Wanted], Dataset]
    what: str


def _tokens_of(load: Callable[..., Dataset]) -> Callable[[Path, Wanted], Dataset]:
    """A reader of text, which takes (path, split, length, classes, tokenizer)."""
    return lambda path, wanted: _of_text(path.name, lambda: load(path, wanted.split, wanted.length, wanted.classes,
                                                                 wanted.tokenizer), wanted)


def _load_npz(path: Path, wanted: Wanted) -> Dataset:
    found = formats.load_npz(path, wanted.split, classes=wanted.classes, dtype=wanted.dtype,
                             standardize=wanted.standardize, note=wanted.note)
    if isinstance(found, Dataset):
        return found
    return replace(_of_images(path.name, lambda: found, wanted), scaling=found.scaling)


def _suffix(suffix: str) -> Callable[[Path], Path | None]:
    return lambda path: path if path.suffix == suffix and not path.is_dir() else None


#: the kinds of files in the order in which a path is tried
KINDS = (
    *(Kind(s.name, lambda path, s=s: s.find(path) if path.is_dir() else None,  # type: ignore[misc]
           lambda folder, wanted, s=s: _of_images(  # type: ignore[misc]
               s.name, lambda: s.load(folder, wanted.split, wanted.classes), wanted),
           f"the files of {s.name}") for s in formats.STORED),
    *(Kind(glue.name, glue.find, _tokens_of(functools.partial(sentences.load_glue, glue)),
           f"{glue.files['train'][0]} of {glue.name}") for glue in sentences.GLUE),
    Kind("iwslt", sentences.find_parallel, _tokens_of(sentences.load_parallel), "parallel text"),
    Kind("", lambda folder: folder if any((folder / f"{x}.npy").is_file() for x in ("x", "x_train")) else None,
         lambda folder, wanted: arrays.load_npy(folder, wanted.split, **wanted.sizes), "x.npy and y.npy"),
    Kind("imagenet", pictures.find, lambda folder, wanted: _of_images(folder, lambda: pictures.load_pictures(
        folder, wanted.split, wanted.image_size, wanted.channels, wanted.classes, wanted.dtype, wanted.workers,
        wanted.note), wanted), "folders of classes, or shards, with pictures"),
    Kind("", _suffix(".npz"), _load_npz, "a .npz file"),
    Kind("", _suffix(".csv"), lambda path, wanted: arrays.load_csv(path, wanted.split, **wanted.sizes), "a .csv file"),
    Kind("openwebtext", text.find, _tokens_of(text.load_text), "text or tokens (.txt, .xz, .tar, .bin)"),
)  # fmt: skip
#: the files to look for if a named data set has no published names of files
LOOKED = {"imagenet": "imagenet/train with folders of classes, or imagenet/train-*.tar, in ROOT",
          "openwebtext": "openwebtext with .xz, .tar, .txt, or train.bin and val.bin in ROOT",
          "iwslt": "iwslt with train.tags.de-en.de and .en, or train.de and train.en, in ROOT",
          **{glue.name: f"{glue.name} with {' or '.join(glue.files['train'])} in ROOT" for glue in sentences.GLUE}}


def _path(name: str | os.PathLike[str]) -> Path:
    """The path, which must exist. Raises DataError, which treats a bare word as a misspelt name."""
    path = Path(name)
    if path.exists():
        return path if path.name else path.resolve()  # "." is named after its folder
    if isinstance(name, str) and os.sep not in name and not path.suffix:
        near = difflib.get_close_matches(name, NAMES, 1)
        hint = f"did you mean {near[0]}?" if near else f"known names: {', '.join(NAMES)}"
        raise DataError(f"{name[:100]!r} is neither the name of a data set nor a path; {hint}")
    raise DataError(f"{path.absolute()}: no such file or folder")
