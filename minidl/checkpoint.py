"""Checkpoints: everything that a run needs to go on with the bits that it would have had uninterrupted.

One safetensors file: parameters and states of the model, the optimizer's states with learning rate and Adam's powers,
and the counter of dropouts as tensors; place in the data, seed and schedule as JSON beside them. A file is only
data: nothing in it is ever executed. Nothing is changed by a load unless all of the file fits.

A checkpoint stands between two steps: gradients that wait for an update are not kept. What recorded steps hold stays
theirs, since everything is restored in place.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from . import random
from .files import write_atomic
from .nn import Module
from .nn.module import put, shown
from .optim import Optimizer
from .tensor import Tensor

NAME = "checkpoint.safetensors"  #: in a directory
FORMAT = 1
IDENTITY = ("name", "seed", "batch_size", "training")  #: of a loader; its order of samples follows from them


class CheckpointError(ValueError):
    """A file that cannot be saved, read, or used here; one line says why."""


class Loader(Protocol):
    """What a checkpoint needs of a data loader."""

    def state(self) -> dict[str, int]: ...

    def restore(self, state: Mapping[str, int]) -> None: ...


@dataclass(frozen=True)
class Checkpoint:
    """What a file says beside its tensors: steps done, the seed, the place in the data, the schedule as CSV."""

    step: int
    seed: int
    loader: dict[str, Any] | None
    schedule: str | None


def save(path: str | Path, model: Module, optimizer: Optimizer | None = None, *, step: int = 0,
         loader: Loader | None = None, schedule: str | None = None) -> Path:
    """Writes a checkpoint to the file `path` (*.safetensors) or into the directory `path`; returns the file.

    The file appears whole or not at all; on an error an earlier one stays. Raises CheckpointError.
    """
    from safetensors.numpy import save as serialize

    waiting = [name for name, p in model.named_parameters() if p.grad is not None and not p.used]
    if waiting:
        raise CheckpointError(f"cannot save between backward and update: {waiting[0]} has a gradient that is not spent")
    file = _file(path)
    about: dict[str, Any] = {"format": FORMAT, "step": step, "seed": random.current_seed()}
    about["optimizer"] = None if optimizer is None else type(optimizer).__name__
    about["loader"] = None if loader is None else {"state": loader.state(), **_identity(loader)}
    arrays = {name: np.asarray(shown(t), order="C") for name, t in _tensors(model, optimizer).items()}
    content = serialize(arrays, {"minidl": json.dumps(about, default=int),
                                 **({} if schedule is None else {"schedule": schedule})})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, content)
    except OSError as error:
        why = error.strerror or error
        raise CheckpointError(f"cannot save {file}: {why}; what was there before is unchanged") from error
    return file


def load(path: str | Path, model: Module, optimizer: Optimizer | None = None, *,
         loader: Loader | None = None) -> Checkpoint:
    """Puts a checkpoint's contents into model, optimizer, loader and the dropout counter, in place. Without an optimizer
    it is the model alone that is taken, from a run of any seed.

    Raises CheckpointError, with nothing changed, for a file that is missing, damaged, foreign, of another model,
    optimizer or order of data, or made with another seed than this run's (`minidl.seed`).
    """
    file = _file(path)
    about, raw, values = _read(file)
    mine = _tensors(model, optimizer)
    if optimizer is None:
        values = {name: value for name, value in values.items() if name.startswith("model.")}
    else:
        _fits(file, "seed", about.seed, random.current_seed())
        _fits(file, "optimizer", raw["optimizer"], type(optimizer).__name__)
    missing, unknown = sorted(mine.keys() - values.keys()), sorted(values.keys() - mine.keys())
    if missing or unknown:
        what = f"it lacks {missing[0]!r}" if missing else f"it has {unknown[0]!r}, which this run does not"
        raise CheckpointError(f"{file} is of another model or optimizer: {what}")
    for name, t in mine.items():
        a = shown(t)
        if values[name].shape != a.shape or values[name].dtype != a.dtype:
            there = f"{values[name].dtype} {values[name].shape}"
            raise CheckpointError(f"{file} is of another model: {name} is {there} there, "
                                  f"{a.dtype} {a.shape} here")
    if loader is not None:
        if about.loader is None:
            raise CheckpointError(f"{file} does not say where in the data it stands")
        for key, value in _identity(loader).items():
            _fits(file, f"data {key}", about.loader.get(key), value)
        try:
            loader.restore(about.loader["state"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{file} names no place in the data: {error}") from error
    for name, t in mine.items():
        put(t, values[name])
    for p in model.parameters():
        p.used = True  # a gradient of before belongs to no parameter that is here now
    return about


def peek(path: str | Path) -> Checkpoint:
    """What a checkpoint says of itself, to make a model and a loader that fit. Raises CheckpointError."""
    return _read(_file(path))[0]


def exists(path: str | Path) -> bool:
    """Whether there is a checkpoint at `path`, a file or a directory."""
    return _file(path).exists()


def _file(path: str | Path) -> Path:
    path = Path(path)
    return path if path.suffix == ".safetensors" else path / NAME


def _tensors(model: Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """All that is kept, by name: the model's as in its state dict, a shared parameter once for each name."""
    tensors = {f"model.{name}": t for name, t in model.named_tensors()}
    if optimizer is not None:
        tensors |= {f"optimizer.{name}": t for name, t in optimizer.named_tensors()}
        tensors["random.dropouts"] = Tensor(random.dropout_counter())
    return tensors


def _identity(loader: Loader) -> dict[str, Any]:
    return {key: getattr(loader, key) for key in IDENTITY if hasattr(loader, key)}


def _fits(file: Path, what: str, there: Any, here: Any) -> None:
    if there != here:
        raise CheckpointError(f"{file} is of another run: {what} {there!r} there, {here!r} here")


def _read(file: Path) -> tuple[Checkpoint, dict[str, Any], dict[str, Any]]:
    """Header and arrays of a file, checked as far as that goes without a model."""
    from safetensors import SafetensorError, safe_open

    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise CheckpointError(f"{file} is no checkpoint: it is not a regular file")
        with safe_open(file, framework="np") as content:
            header = content.metadata() or {}
            if "minidl" not in header:
                raise CheckpointError(f"{file} is no checkpoint of minidl: it says nothing of where it comes from")
            raw = json.loads(header["minidl"])
            values = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {file}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} is damaged or no checkpoint: {str(error).splitlines()[0][:200]}") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise CheckpointError(f"{file} is no checkpoint of this format ({FORMAT})")
    step, seed, loader = raw.get("step"), raw.get("seed"), raw.get("loader")
    if type(step) is not int or type(seed) is not int or step < 0 or "optimizer" not in raw:
        raise CheckpointError(f"{file} is damaged: step {step!r}, seed {seed!r}")
    if loader is not None and not isinstance(loader, dict):
        raise CheckpointError(f"{file} is damaged: the place in the data is {loader!r}")
    return Checkpoint(step, seed, loader, header.get("schedule")), raw, values


__all__ = ["Checkpoint", "CheckpointError", "Loader", "load", "peek", "save"]
