"""Data by name, path or function.

It does not know how a file is read or a batch is made.
"""

from __future__ import annotations

import difflib
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from . import arrays, builtin, formats, own, pictures, sentences, text
from .dataset import DataError, Dataset, Note, Scaling, Standardize, Wanted
from .loader import Loader, check_seed, whole

STORED = ("mnist", "cifar10", "cifar100", "imagenet", "iwslt", "mnli", "mrpc", "openwebtext")  #: data sets in files
NAMES = ("digits", *STORED, "pydoc", "synthetic")  #: names of data sets
ROOT = Path("data")  #: the default of `root`


@functools.cache  # once in a process
def say(line: str) -> None:
    """Prints a note about data to standard error."""
    print(line, file=sys.stderr)


def digits(batch_size: int = 64, *, split: str = "train", seed: int = 0, dtype: str = "float32") -> Loader:
    """The embedded digits: x (B, 8, 8, 1) of `dtype`, mean 0 and variance 1 over the training part; y (B,) int64 in
    0..9. 1,438 samples for training, 359 for testing."""
    return load("digits", batch_size=batch_size, split=split, seed=seed, dtype=dtype)


def load(
    name_or_path: str | os.PathLike[str], *, batch_size: int, root: str | os.PathLike[str] | None = None,
    split: str = "train", seed: int = 0, image_size: int | None = None, channels: int | None = None,
    classes: int | None = None, sequence_length: int | None = None, dtype: str = "float32",
    tokenizer: str | int | os.PathLike[str] = "bytes", workers: int | None = None, standardize: Standardize = False,
    note: Note = say,
) -> Loader:  # fmt: skip
    """A loader of a data set by name (`NAMES`), by path, or of a function of one's own (`file.py:function`); see
    docs/data.md for files, scales and tokens.

    Images: x (B, H, W, C) of `dtype`, resized to `image_size` and repeated to `channels`; y (B,) int64. Arrays of one's
    own, images or numbers x (B, features), stay as they are, unless `standardize` is True, or a `Scaling` to scale them
    by. Running text: x and y (B, sequence_length) int64, y the tokens that follow. Pairs of sentences: x (B,
    sequence_length) int64; y (B,), or of translations (B, sequence_length).

    `split`: train or test, see `Loader`. `root`: the folder of named data's files, by default ./data. `classes`: how
    many classes, or tokens, the model knows; None takes the data's own number. `tokenizer`: bytes, a number of tokens,
    or a file. `workers`: processes that decode pictures; None: one for each core but one. `note` gets lines for the
    user. Raises DataError, with one line.
    """
    if split not in ("train", "test"):
        raise DataError(f"the split is {split!r}; it must be train or test")
    try:
        if np.dtype(dtype).kind != "f":
            raise TypeError
    except TypeError:
        raise DataError(f"the dtype of images is {dtype!r}; it must be a float type that NumPy has") from None
    check_seed(seed)
    sizes = {"image_size": image_size, "channels": channels, "classes": classes, "sequence_length": sequence_length,
             "workers": workers}
    for key, value in sizes.items():
        if value is not None and (not whole(value) or value < (key != "workers")):
            raise DataError(f"{key} is {value!r}; it must be a whole number {'>=' if key == 'workers' else '>'} 0")
    if root is not None and not Path(root).is_dir():
        raise DataError(f"{root}: the folder for data does not exist")
    standardize = standardize if isinstance(standardize, Scaling) else bool(standardize)
    wanted = Wanted(split, seed, dtype, note, image_size, channels, classes, sequence_length, str(tokenizer),
                    workers, standardize)
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
    if name in BUILT_IN:
        holds, load = BUILT_IN[name]
        return _checked(name, wanted, holds, load)
    if name in STORED:
        for kind in KINDS:
            if kind.name == name and (found := kind.find(root / name) or kind.find(root)) is not None:
                return _checked(name, wanted, kind.holds, partial(kind.load, found))
        other = {"mnist": "digits", "cifar10": "digits", "openwebtext": "pydoc"}.get(name, "synthetic")
        looked = " or ".join(kind.what for kind in KINDS if kind.name == name)
        raise DataError(f"{name}: not found (looked for {looked} in {root}); nothing is downloaded: say where its "
                        f"files are (--root DIR), or give --data {other}")
    if isinstance(name, str) and ":" in name and not Path(name).exists():
        return own.load_own(name, wanted)
    if str(name).endswith(".py"):
        raise DataError(f"{name}: name its function as well: {name}:FUNCTION")
    path = _path(name)
    for kind in KINDS:
        if (found := kind.find(path)) is not None:
            return _checked(path, wanted, kind.holds, partial(kind.load, found))
    raise DataError(f"{path}: has none of the files that are known: {'; '.join(kind.what for kind in KINDS)}")


def _checked(name: object, wanted: Wanted, holds: str, load: Callable[[Wanted], Dataset]) -> Dataset:
    """The data set that `load` makes. Raises DataError if the sizes that are wanted are not for what it holds."""
    if holds == "tokens" and (wanted.image_size or wanted.channels):
        raise DataError(f"{name} has tokens, not images; use digits, synthetic, or files of images"
                        + "; a folder of shards is given by itself" * (Path(str(name)).suffix == ".tar"))
    if holds == "images" and wanted.sequence_length is not None:
        raise DataError(f"{name} has images, not tokens; use pydoc, synthetic, or files of text")
    return load(wanted)


#: what data that need no files hold, and how they are made
BUILT_IN: dict[Any, tuple[str, Callable[[Wanted], Dataset]]] = {
    "digits": ("images", builtin.digits), "synthetic": ("", builtin.synthetic),
    "pydoc": ("tokens", lambda wanted: text.running("pydoc", *text.pydoc_text(), wanted))}


# --------------------------------------------------------------------------------------------------------------- files
@dataclass(frozen=True)
class Kind:
    """A kind of files: the data set's name, or "" if it has none; what is looked for, in words; whether it `holds`
    tokens or images, "" if either; the file or folder at or below a path that has it, or None; and its reader."""

    name: str
    what: str
    holds: str
    find: Callable[[Path], Path | None]
    load: Callable[[Path, Wanted], Dataset]


def _suffix(suffix: str) -> Callable[[Path], Path | None]:
    return lambda path: path if path.suffix.lower() == suffix and not path.is_dir() else None


#: the kinds of files in the order in which a path is tried
KINDS = (
    *(Kind(s.name, f"{s.files['train'][0]} of {s.name}", "images", s.find, s.load) for s in formats.STORED),
    *(Kind(g.name, f"{' or '.join(g.files['train'])} of {g.name}", "tokens", g.find, partial(sentences.load_glue, g))
      for g in sentences.GLUE),
    Kind("iwslt", "train.tags.de-en.de and .en, or train.de and train.en", "tokens", sentences.find_parallel,
         sentences.load_parallel),
    Kind("", "x.npy and y.npy", "", lambda path: path if any(
        (path / f"{names[0]}.npy").is_file() for names in arrays.ARRAYS) else None, arrays.load_arrays),
    Kind("imagenet", "imagenet/train with folders of classes, or imagenet/train-*.tar", "images", pictures.find,
         pictures.load_pictures),
    Kind("", "a .npz file", "", _suffix(".npz"), arrays.load_arrays),
    Kind("", "a .csv file", "", _suffix(".csv"), arrays.load_csv),
    Kind("openwebtext", "text (.txt, .xz, .tar), or tokens in train.bin and val.bin", "tokens", text.find,
         text.load_text),
)  # fmt: skip


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
