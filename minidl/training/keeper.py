"""Which checkpoints of a run are kept, and when they are made: the newest, the last ones, the best one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from ..autograd.tape import use
from ..system.files import copy_atomic
from . import checkpoint
from .checkpoint import CheckpointError
from .trainer import Trainer

BEST = "best.safetensors"


class Keeper:
    """Saves to a file or into a folder: the newest checkpoint always under the same name; with `last`, also so many of
    the last ones, by their steps, and the best one by the objective's metric.

    `steps`, `seconds`: how often; without both, after each epoch. `about`: texts for the file, such as what `sample`
    needs. `schedules`: whether the schedule is saved, which only a run on one device resumes.
    """

    def __init__(self, path: str | Path, *, steps: int | None = None, seconds: float | None = None,
                 last: int | None = None, about: Mapping[str, str] | None = None, schedules: bool = True) -> None:
        self.file, self.steps, self.seconds, self.last = checkpoint.file_of(path), steps, seconds, last
        self.folder = self.file.parent
        self.about, self.schedules = dict(about or {}), schedules
        self._saved_at = monotonic()

    def due(self, trainer: Trainer, step: int, ended: bool) -> bool:
        """Whether a checkpoint is due after this step, at the end of an epoch or not. All ranks must ask together."""
        if self.steps is not None:
            return step % self.steps == 0
        if self.seconds is None:
            return ended
        late = monotonic() - self._saved_at >= self.seconds
        return late if trainer.communicator is None else bool(trainer.communicator.gather(late)[0])

    def save(self, trainer: Trainer, step: int, test: Mapping[str, float] | None = None) -> None:
        """Saves the state after this step. `test`: its metrics, if they are known. Raises CheckpointError."""
        recorded = trainer.recorded
        with use(recorded.tape):  # which knows how many dropouts there were
            file = checkpoint.save(self.file, recorded.model, recorded.optimizer, step=step, loader=recorded.train_data,
                                   schedule=trainer.run.schedule.to_csv() if self.schedules else None,
                                   scheduler=recorded.job.scheduler if self.schedules else None, test=test,
                                   about=self.about)
        self._saved_at = monotonic()
        if self.last is None:
            return
        _put(file, self.folder / f"step-{step:08d}.safetensors")
        for old in sorted(f for f in self.folder.iterdir()
                          if re.fullmatch(r"step-\d{8,}\.safetensors", f.name))[: -self.last]:
            old.unlink(missing_ok=True)
        if test is not None and recorded.objective.better(test, self._best()):
            _put(file, self.folder / BEST)

    def _best(self) -> dict[str, Any] | None:
        with suppress(CheckpointError):
            return checkpoint.peek(self.folder / BEST).test
        return None


def _put(file: Path, to: Path) -> None:
    """The same file under another name, as a link if that can be. Raises CheckpointError."""
    try:
        copy_atomic(file, to)
    except OSError as error:
        raise CheckpointError(f"cannot save {to}: {error.strerror or error}") from error
