"""The loop of a training run: learning rates, and what is told, judged and saved along the way. Prints nothing.

On ranks every rank runs it with the same settings, and all come to each exchange between them at the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any, NoReturn

from ..data import DataError
from ..files import FileError
from ..optim.rates import Rate
from .agreement import Disagreement
from .keeper import Keeper
from .trainer import Trainer

LOOKS = 0.5  #: seconds between two looks of ranks at whether one of them was told to stop


class Stopped(Exception):
    """The run ends early, and has saved a checkpoint. Its cause is the error that ends it; None where it was told
    to."""


@dataclass(frozen=True)
class Course:
    """What a run does. `steps`: the last one, counted from the start of the run. `rate`: the learning rate of each
    step, from 0 on; None leaves it as it is. `log(record)` gets a record every `log_every` steps and after each
    evaluation, which each epoch ends with; `progress(step, record)` every step, with the last record. `stopping()`:
    whether the run shall save a checkpoint and end."""

    steps: int
    rate: Rate | None = None
    log_every: int = 0
    log: Callable[[dict[str, Any]], None] = lambda record: None
    progress: Callable[[int, Mapping[str, Any]], None] = lambda step, record: None
    keeper: Keeper | None = None
    stopping: Callable[[], bool] = lambda: False


def run(trainer: Trainer, course: Course, done_before: int = 0) -> None:
    """Trains from step `done_before` + 1 on. Raises Stopped, TrainingError, CheckpointError. Data that cannot be read
    and a log that cannot be written end the run as `stopping` does, and are the cause of Stopped; without a keeper, or
    before the first step, they are raised: DataError, FileError, and on ranks Disagreement."""
    data, keeper = trainer.recorded.train_data, course.keeper
    speed, looks, record = _Speed(trainer, course.steps, done_before), _Looks(trainer, course), dict[str, Any]()
    first = trainer.communicator is None or trainer.communicator.rank == 0
    trouble = _Trouble(keeper is not None)
    for step in range(done_before + 1, course.steps + 1):
        if course.rate is not None:
            trainer.recorded.optimizer.lr = course.rate(step - 1)
        try:
            trainer.step()
        except (DataError, Disagreement) as error:  # all ranks have it
            if keeper is None or step == done_before + 1:
                raise
            _stop(trainer, keeper, step - 1, None, error)
        if ended := data.ended:  # whether it is judged and saved or not, so that neither changes a stale run
            trainer.settle()
        told = bool(course.log_every) and step % course.log_every == 0
        if told or ended:
            loss = trainer.latest()
            if first:
                record = speed.record(step, loss)
        if told and first:
            with trouble.held():
                course.log(record)
        test = None
        if ended and step < course.steps:
            trainer.share()
            if first:
                with trouble.held():
                    test = trainer.evaluate()
                    course.log(judged(trainer, step, test))
            speed.pause()
        stop, why = looks.told(step, trouble.first, now=ended or step == course.steps)
        if keeper is not None:
            if stop:
                _stop(trainer, keeper, step, test, why)
            if step < course.steps and keeper.due(trainer, step, ended):
                trainer.share()
                if first:
                    keeper.save(trainer, step, test)
                speed.pause()
        course.progress(step, record)


def _stop(trainer: Trainer, keeper: Keeper, step: int, test: Mapping[str, float] | None,
          why: Exception | None) -> NoReturn:
    """Saves the state after this step, on all ranks together, and raises Stopped."""
    trainer.share()
    if trainer.communicator is None or trainer.communicator.rank == 0:
        keeper.save(trainer, step, test)
    if trainer.communicator is not None:
        trainer.communicator.gather(None)  # none ends before the checkpoint is whole
    raise Stopped from why


class _Trouble:
    """The `first` error of this rank that ends the run when ranks look at each other next, where a checkpoint can be
    saved; others are raised at once."""

    def __init__(self, holds: bool) -> None:
        self.first: Exception | None = None
        self._holds = holds

    @contextmanager
    def held(self) -> Iterator[None]:
        try:
            yield
        except (DataError, FileError) as error:
            if not self._holds:
                raise
            self.first = self.first or error


def judged(trainer: Trainer, step: int, test: Mapping[str, float]) -> dict[str, Any]:
    """The record of an evaluation."""
    data = trainer.recorded.train_data
    return {"step": step, "epoch": round(data.epochs_done, 4),
            **{f"test_{name}": value for name, value in test.items()}}


class _Speed:
    """Samples per second since the last record, without the time of evaluations and checkpoints."""

    def __init__(self, trainer: Trainer, steps: int, done_before: int) -> None:
        self.trainer, self.steps, self.step = trainer, steps, done_before
        self.since = self.back = perf_counter()
        self.away = 0.0

    def pause(self) -> None:
        """What has passed since the last step or pause does not count."""
        now = perf_counter()
        self.away += now - max(self.trainer.ended, self.since, self.back)
        self.back = now

    def record(self, step: int, loss: float) -> dict[str, Any]:
        now, trainer = perf_counter(), self.trainer
        seconds, steps = max(now - self.since - self.away, 1e-9), step - self.step
        waited = sum(trainer.waits[-steps:])
        self.step, self.since, self.away = step, now, 0.0
        return {"step": step, "epoch": round(trainer.recorded.train_data.epochs_done, 4), "loss": loss,
                "lr": float(f"{trainer.recorded.optimizer.lr:.7g}"),  # a float32
                "samples_per_s": round(steps * trainer.job.batch_size / seconds, 2),
                "eta_s": round(seconds / steps * (self.steps - step), 1),
                "data_ms": round(waited / steps * 1000, 4)}


class _Looks:
    """Whether the run shall stop, and why. Ranks ask each other, at steps that all of them know, twice a second."""

    def __init__(self, trainer: Trainer, course: Course) -> None:
        self.communicator, self.course = trainer.communicator, course
        self.next, self.last, self.at = 1, 0, monotonic()

    def told(self, step: int, trouble: Exception | None, now: bool) -> tuple[bool, Exception | None]:
        """`trouble`: why this rank cannot go on. `now`: whether all ranks ask at this step."""
        if self.course.keeper is None or self.communicator is None:
            return self.course.keeper is not None and (trouble is not None or self.course.stopping()), trouble
        if step < self.next and not now:
            return False, None
        moment = monotonic()
        seen = self.communicator.gather((self.course.stopping(), trouble and str(trouble),
                                         (moment - self.at) / max(1, step - self.last)))
        slowest = max(seconds for _, _, seconds in seen)
        self.next, self.last, self.at = step + max(1, int(LOOKS / max(slowest, 1e-6))), step, moment
        why = next((line for _, line, _ in seen if line), None)
        return why is not None or any(stop for stop, _, _ in seen), Disagreement(why) if why else None
