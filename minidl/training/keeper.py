"""Which checkpoints of a run are kept, and when they are made: the newest, the last ones, the best one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from ..autograd.tape import use
from ..system.files import copy_atomic
from . import checkpoint
from .tensors import doing
from .trainer import Trainer

BEST, GOOD = "best.safetensors", "best"  #: the best one, a file or a folder


class Keeper:
    """Saves to a file or into a folder: the newest checkpoint, from one process always under the same name, from ranks
    as a folder that is named by its step; with `last`, also so many of the last ones, and the best one by the
    objective's metric.

    `steps`, `seconds`: how often; without both, after each epoch. `about`: texts for the file, such as what `sample`
    needs. `schedules`: whether the schedule is saved, which only a run on one device resumes.
    """

    def __init__(self, path: str | Path, *, steps: int | None = None, seconds: float | None = None,
                 last: int | None = None, about: Mapping[str, str] | None = None, schedules: bool = True) -> None:
        self.file, self.steps, self.seconds, self.last = checkpoint.file_of(path), steps, seconds, last
        self.path, self.folder = Path(path), self.file.parent
        self.about, self.schedules = dict(about or {}), schedules
        self._saved_at = monotonic()

    def due(self, trainer: Trainer, step: int, ended: bool) -> bool:
        """Whether a checkpoint is due after this step, at the end of an epoch or not. All ranks must ask together."""
        if self.steps is not None:
            return step % self.steps == 0
        if self.seconds is None:
            return ended
        return bool(trainer.gather(monotonic() - self._saved_at >= self.seconds)[0])

    def gather(self, trainer: Trainer) -> None:
        """Makes the state of a run one that can be saved; on ranks, all of them together."""
        trainer.settle() if self._together(trainer) else trainer.share()

    def save(self, trainer: Trainer, step: int, test: Mapping[str, float] | None = None) -> None:
        """Saves the state after this step; all ranks call it together, after `gather`. `test`: on rank 0 its metrics,
        if they are known. Raises CheckpointError, or Disagreement on all ranks."""
        recorded, first = trainer.recorded, trainer.rank == 0
        with use(recorded.tape):  # which knows how many dropouts there were
            if self._together(trainer):
                saved = checkpoint.save_together(self.folder, trainer, recorded.model, recorded.optimizer, step=step,
                                                 loader=recorded.train_data, test=test, about=self.about)
            elif first:
                saved = checkpoint.save(
                    self.file, recorded.model, recorded.optimizer, step=step, loader=recorded.train_data,
                    schedule=trainer.run.schedule.to_csv() if self.schedules else None,
                    scheduler=recorded.job.scheduler if self.schedules else None, test=test, about=self.about)
        self._saved_at = monotonic()
        if first:
            best = test is not None and all(recorded.objective.better(test, old) for old in self._best())
            self._keep(saved, step, self.last is not None and best)

    def _together(self, trainer: Trainer) -> bool:
        """Whether several ranks write a folder; else one process, or rank 0, writes a file."""
        return trainer.ranks > 1 and self.path != self.file

    def _keep(self, saved: Path, step: int, best: bool) -> None:
        """Names what was saved, and removes what shall not stay."""
        one = saved == self.file
        if best:
            _put(saved, self.folder / (BEST if one else GOOD))
            (self.folder / (GOOD if one else BEST)).unlink(missing_ok=True)
        if one and self.last is not None:
            _put(saved, self.folder / f"step-{step:08d}.safetensors")
        if self.path == self.file and self.last is None:
            return  # the folder has other things
        if not one:
            self.file.unlink(missing_ok=True)
        kept = [f for f in self.folder.iterdir() if re.fullmatch(r"step-\d{8,}(\.safetensors)?", f.name)]
        kept.sort(key=lambda f: (checkpoint.step_of(f), f.name))
        stay = {*kept[-self.last :]} if self.last else {f for f in kept if f == saved or f.is_file()}
        good = self.folder / (self.folder / GOOD).resolve().name  # the folder may be given relative to another
        for old in {*kept} - stay - {good}:
            if old.is_file():
                old.unlink(missing_ok=True)
            else:
                shutil.rmtree(old, ignore_errors=True)

    def _best(self) -> list[dict[str, Any] | None]:
        """The metrics of the best checkpoint, a file or a folder; more than one if a run was killed between the two."""
        found = list[dict[str, Any] | None]()
        for name in (BEST, GOOD):
            with suppress(checkpoint.CheckpointError):
                found.append(checkpoint.peek(self.folder / name).test)
        return found


def _put(saved: Path, to: Path) -> None:
    """The same checkpoint under another name, as a link if that can be. Raises CheckpointError."""
    part = to.with_name(f".{to.name}.part")
    with doing(f"save {to}"):
        if saved.is_file():
            copy_atomic(saved, to)
        else:
            part.unlink(missing_ok=True)
            part.symlink_to(saved.name)
            part.replace(to)
