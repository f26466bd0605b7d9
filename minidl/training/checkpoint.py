"""Checkpoints: everything that a run needs to resume bit-identically to an uninterrupted run.

One safetensors file holds as tensors the parameters and states of the model, the optimizer's states with learning rate
and Adam's powers, and the dropout counter; and as JSON the place in the data, seed and schedule. Ranks write a folder
of such files (`sharded.py`) instead: both are read by one process and by any number of ranks. A checkpoint is made
between two steps. A load changes nothing unless all of it fits and its digests are right; values are restored in place,
so recorded steps remain valid.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..autograd import random
from ..autograd.tensor import Tensor
from ..data import Loader
from ..nn import Module
from ..nn.module import put, state_array, state_shape
from ..optim import Optimizer
from ..system.files import claimed, sweep, write_atomic
from . import sharded
from .tensors import Slot, WeightsError, doing, header, serialized
from .weights import INDEX, STANDARDIZE

if TYPE_CHECKING:
    from .trainer import Trainer

NAME = "checkpoint.safetensors"  #: the file's name in a directory
STEP = re.compile(r"step-\d{8,}")  #: the name of a checkpoint that ranks have written
KEPT = re.compile(rf"({STEP.pattern}|best)\.safetensors|{STEP.pattern}")  #: of what a run keeps beside the newest one
FORMAT = 4
IDENTITY = ("name", "samples", "seed", "batch_size", "training")  #: attributes of a loader: its order of samples
CheckpointError = WeightsError  #: a checkpoint cannot be saved, read, or used here: one line, which says why


@dataclass(frozen=True)
class Checkpoint:
    """The content of a file besides its tensors: steps done, the seed, the optimizer's class, the place in the data,
    the schedule as CSV, and the name of the scheduler that made it; the metrics on test data, if they were known; and
    texts about the run by name."""

    step: int
    seed: int
    optimizer: str | None
    loader: dict[str, Any] | None
    schedule: str | None
    scheduler: str | None
    test: dict[str, float] | None = None
    about: Mapping[str, str] = field(default_factory=dict)


def save(path: str | Path, model: Module, optimizer: Optimizer | None = None, *, step: int = 0,
         loader: Loader | None = None, schedule: str | None = None, scheduler: str | None = None,
         test: Mapping[str, float] | None = None, about: Mapping[str, str] | None = None) -> Path:
    """Writes a checkpoint to the file `path` (`*.safetensors`) or into the directory `path`; returns the file.

    The file appears whole or not at all; on an error an earlier file stays. Raises CheckpointError.
    """
    file = file_of(path)
    texts = _texts(model, optimizer, step, loader, schedule, scheduler, test, about)
    arrays = {name: np.asarray(state_array(t), order="C") for name, t in _tensors(model, optimizer).items()}
    arrays |= _standardize(loader)
    content = serialized(arrays, texts | {"sha256": _digest(texts, sorted(arrays.items()))})
    with doing(f"save {file}", "; an earlier file is unchanged"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, content)
    return file


def save_together(path: str | Path, part: Trainer, model: Module, optimizer: Optimizer, *, step: int, loader: Loader,
                  test: Mapping[str, float] | None = None, about: Mapping[str, str] | None = None) -> Path:
    """Writes a checkpoint of all ranks, which call it together, into a folder `step-00000500` of the folder `path`;
    returns that folder. Raises Disagreement on all ranks; then there is no such folder."""
    folder = Path(path) / f"step-{step:08d}"
    if not any(part.gather((folder / INDEX).exists())):  # else this step is saved
        texts = _texts(model, optimizer, step, loader, None, None, test, about)
        tensors = {id(t): (name, t) for name, t in reversed(_tensors(model, optimizer).items())}
        sharded.save(folder, dict(tensors.values()), _standardize(loader), part, texts)
    return folder


def _texts(model: Module, optimizer: Optimizer | None, step: int, loader: Loader | None, schedule: str | None,
           scheduler: str | None, test: Mapping[str, float] | None, about: Mapping[str, str] | None) -> dict[str, str]:
    """The content of a checkpoint besides its tensors. Raises CheckpointError."""
    if waiting := [name for name, p in model.named_parameters() if p.grad is not None and not p.used]:
        raise CheckpointError(f"cannot save between backward and update: {waiting[0]} has a gradient that no update "
                              "has used")
    data = None if loader is None else {"state": loader.state(), **{key: getattr(loader, key) for key in IDENTITY}}
    place = {"format": FORMAT, "step": index(step), "seed": random.current_seed(), "loader": data,
             "optimizer": None if optimizer is None else type(optimizer).__name__,
             **({} if test is None else {"test": {name: float(value) for name, value in test.items()}})}
    texts = {"minidl": json.dumps(place, default=int), "schedule": schedule, "scheduler": scheduler,
             **{f"about {name}": text for name, text in (about or {}).items()}}
    if wrong := next((name for name, text in texts.items() if not isinstance(text, str | None)), None):
        raise CheckpointError(f"cannot save {wrong!r}, a {type(texts[wrong]).__name__}; it must be a text")
    return {name: text.encode(errors="replace").decode() for name, text in texts.items() if text is not None}


def load(path: str | Path, model: Module, optimizer: Optimizer | None = None, *,
         loader: Loader | None = None, part: tuple[int, int] = (0, 1)) -> Checkpoint:
    """Loads a checkpoint into model, optimizer, loader and the dropout counter, in place. Without an optimizer it loads
    only the model, from a run with any seed. Tensors that nobody has used yet stay in the file until somebody does.
    `part`: of so many ranks that load it, this is one; together they compare all digests. Raises CheckpointError,
    before anything changes, for a file that is missing, damaged or foreign, that is of another model, optimizer or
    order of data, or that was made with another seed than this run's (`minidl.seed`)."""
    file = place_of(path)
    mine = _tensors(model, optimizer)
    about, slots, check = _opened(file)
    if optimizer is not None:
        _fits(file, "seed", about.seed, random.current_seed())
        _fits(file, "optimizer", about.optimizer, type(optimizer).__name__)
    there = {name for name in slots if optimizer is not None or name.startswith("model.")} - {*STANDARDIZE}
    alike = {id(t): name for name, t in mine.items() if name in there}  # a shared parameter has several names
    missing = sorted(name for name, t in mine.items() if id(t) not in alike)
    unknown = sorted(there - mine.keys())
    if missing or unknown:
        what = f"it lacks {missing[0]!r}" if missing else f"it has {unknown[0]!r}, which this run does not"
        raise CheckpointError(f"{file} is of another model or optimizer: {what}")
    mine = {name: t for name, t in mine.items() if name in there}
    for name, t in mine.items():  # before memory is allocated for any of them
        here, slot = (t.dtype, state_shape(t)), slots[name]
        if (slot.dtype, slot.shape) != here:
            raise CheckpointError(f"{file} is of another model: {name} is {slot.dtype} {slot.shape} in the file, "
                                  f"{here[0]} {here[1]} in this run")
    values = {name: slots[name].read() for name in (*mine, *STANDARDIZE) if name in slots}
    check(part)
    scales = {name: values[name] for name in STANDARDIZE if name in values}
    if loader is not None:
        if about.loader is None:
            raise CheckpointError(f"{file} does not say its place in the data")
        for key in IDENTITY:
            _fits(file, f"data {key}", about.loader.get(key), getattr(loader, key))
        scaling = _standardize(loader)
        if scaling.keys() != scales.keys() or any(not np.array_equal(scaling[name], scales[name]) for name in scaling):
            ours, theirs = ("standardised" if own else "as they are" for own in (scaling, scales))
            raise CheckpointError(f"{file} is of another run: its data are {theirs}, the data of this run are {ours}"
                                  f"{' by another mean and deviation' if ours == theirs else ''}")
        try:
            loader.restore(about.loader["state"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{file} has an invalid place in the data: {error}") from error
    for name, t in mine.items():
        put(t, values[name])
    for p in model.parameters():
        p.used = True  # gradients from before the load are no longer valid
    return about


def weights(path: str | Path) -> dict[str, Any]:
    """The state dict of the model in a checkpoint; and by which mean and deviation its data were standardised, if they
    were (`weights.STANDARDIZE`). Raises CheckpointError."""
    _, slots, check = _opened(place_of(path))
    check((0, 1))
    return {name.removeprefix("model."): slot.read() for name, slot in slots.items()
            if name.startswith("model.") or name in STANDARDIZE}


def peek(path: str | Path) -> Checkpoint:
    """A checkpoint without its tensors: enough to make a model and a loader that fit. Raises CheckpointError."""
    return _opened(place_of(path))[0]


def exists(path: str | Path) -> bool:
    """Whether there is a checkpoint at `path`, a file or a directory."""
    return os.path.exists(place_of(path))


@contextmanager
def claim(path: str | Path) -> Iterator[None]:
    """Inside, no other run saves to `path`, a file or a directory (it is made). Raises CheckpointError if one does, and
    for one of the checkpoints that a run's directory keeps: it would be written over, or get others inside."""
    file, kept = file_of(path), Path(os.path.realpath(path))
    if kept.exists() and KEPT.fullmatch(kept.name):
        raise CheckpointError(f"{path} is kept by a run, which also removes it; to go on from it, copy it to new/"
                              f"{kept.name if kept.is_dir() else NAME} and give --checkpoint new")
    with ExitStack() as held:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(claimed(file.with_name(f".{file.name}.lock")))
            sweep(file.parent, (f".{file.name[:100]}.", ".step-", ".best."))
            for left in file.parent.glob(".step-*.part/"):
                shutil.rmtree(left, ignore_errors=True)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise CheckpointError(f"another run saves to {path}; wait for its end, or use another folder") from None
            kind = "a file" if file.parent.exists() else "a link to nowhere"
            why = f"it is {kind}, and a folder is needed" if isinstance(error, FileExistsError) else error.strerror
            raise CheckpointError(f"cannot save to {path}: {why}") from None
        yield


def check_shared(path: str | Path) -> None:
    """Raises CheckpointError if this rank does not see that rank 0 has claimed `path`, a directory."""
    if (file := file_of(path)) != Path(path) and not file.with_name(f".{file.name}.lock").exists():
        raise CheckpointError(f"cannot save to {path}: rank 0 has another folder there; give one that all ranks share")


def file_of(path: str | Path) -> Path:
    """The file of a checkpoint of one process that is given as a file or a directory."""
    path = Path(path)
    return path if path.suffix == ".safetensors" else path / NAME


def place_of(path: str | Path) -> Path:
    """The file, or the folder that ranks have written, of a checkpoint that is given as such, or as the directory of
    its run: the newest one there."""
    path, file = Path(path), file_of(path)
    if path == file or os.path.exists(path / INDEX):
        return path
    newest = max(steps_of(path), default=None, key=step_of)
    if newest is None and not os.path.exists(file):  # a folder without an index says so
        return max((found for found in path.glob("step-*/") if STEP.fullmatch(found.name)), default=file, key=step_of)
    return file if newest is None or (os.path.exists(file) and _opened(file)[0].step > step_of(newest)) else newest


def steps_of(folder: Path) -> list[Path]:
    """The checkpoints in a run's directory that ranks have written."""
    return [found for found in folder.glob("step-*") if STEP.fullmatch(found.name) and os.path.exists(found / INDEX)]


def step_of(saved: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(saved.stem.rpartition("-")[2])


def _tensors(model: Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name: the model's as in its state dict, a shared parameter under all its names."""
    tensors = {f"model.{name}": t for name, t in model.named_tensors()}
    if optimizer is not None:
        tensors |= {f"optimizer.{name}": t for name, t in optimizer.named_tensors()}
        tensors["random.dropouts"] = Tensor(random.dropout_counter())
    return tensors


def _standardize(loader: Loader | None) -> dict[str, Any]:
    """By which mean and deviation the data are standardised, by name; none if they are as stored."""
    scaling = None if loader is None else loader.scaling
    return {} if scaling is None else dict(zip(STANDARDIZE, (scaling.mean, scaling.std), strict=True))


def _fits(file: Path, what: str, there: Any, here: Any) -> None:
    if there != here:
        raise CheckpointError(f"{file} is of another run: {what} is {there!r} in the file, {here!r} in this run")


def _digest(header: Mapping[str, str], tensors: Iterable[tuple[str, Any]]) -> str:
    """The digest of a file's content: its texts, and name, type, shape and elements of each tensor."""
    found = hashlib.sha256(json.dumps(dict(sorted(header.items()))).encode())
    for name, value in tensors:
        found.update(f"{name} {value.dtype.str} {value.shape}".encode())
        found.update(np.ascontiguousarray(value).data)
    return found.hexdigest()


def _opened(file: Path) -> tuple[Checkpoint, dict[str, Slot], Callable[[tuple[int, int]], None]]:
    """The checkpoint without tensors, its tensors in the file or folder, and a function that compares this part of its
    digests. Raises CheckpointError, as that function does."""
    if not os.path.exists(file):
        raise CheckpointError(f"there is no checkpoint {file}")
    if os.path.exists(file / INDEX):
        slots, texts, digests = sharded.read(file)
        check = partial(sharded.check, file, digests)
    elif STEP.fullmatch(file.name) and file.is_dir():
        raise CheckpointError(f"{file} is damaged: it has no {INDEX}")
    else:
        slots, texts = header(file)
        check = partial(_check, file, slots, texts)
    if "minidl" not in texts:
        raise CheckpointError(f"{file} is not a checkpoint of minidl: its header lacks minidl's metadata")
    try:
        raw = json.loads(texts["minidl"])
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged or not a checkpoint: {str(error).splitlines()[0][:200]}") from error
    return _about(file, raw, texts), slots, check


def _check(file: Path, slots: Mapping[str, Slot], texts: Mapping[str, str], part: tuple[int, int]) -> None:
    """Compares the digest of a file, on the first of the ranks. Raises CheckpointError if it is another one."""
    values = ((name, slots[name].read()) for name in sorted(slots))
    if part[0] == 0 and _digest({k: v for k, v in texts.items() if k != "sha256"}, values) != texts.get("sha256"):
        raise CheckpointError(f"{file} is damaged: its digest is wrong")


def _about(file: Path, raw: Any, header: Mapping[str, str]) -> Checkpoint:
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        made = raw.get("format") if isinstance(raw, dict) else None
        if type(made) is int and 0 < made < FORMAT:
            raise CheckpointError(f"{file} was made by an older minidl, in format {made}; this one reads only format "
                                  f"{FORMAT}: train anew")
        raise CheckpointError(f"{file} is not a checkpoint of this format ({FORMAT})")
    step, seed, optimizer, loader, test = said = [*map(raw.get, ("step", "seed", "optimizer", "loader", "test"))]
    if (type(step) is not int or step < 0 or type(seed) is not int or not isinstance(optimizer, str | None)
        or not isinstance(loader, dict | None) or not isinstance(test, dict | None)
        or not all(isinstance(value, int | float) for value in (test or {}).values())):
        raise CheckpointError(f"{file} is damaged: step, seed, optimizer, place in the data and metrics are "
                              f"{str(said)[1:100]}")
    about = {name.removeprefix("about "): text for name, text in header.items() if name.startswith("about ")}
    return Checkpoint(step, seed, optimizer, loader, header.get("schedule"), header.get("scheduler"), test, about)
