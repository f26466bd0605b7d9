"""The loop of a training run: learning rates, and what is logged, evaluated and saved. Prints nothing.

On ranks every rank runs it with the same settings, and all come to each exchange between them at the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any, NoReturn

from ..data import DataError
from ..optim.rates import Rate
from ..system.files import FileError
from .agreement import Disagreement
from .keeper import Keeper
from .trainer import Trainer

LOOKS = 0.5  #: seconds between two exchanges in which ranks ask whether one of them must stop


class Stopped(Exception):
    """The run ends early, and has saved a checkpoint. Its cause is the error that ends it, or None if a signal does.
    `told_by`: that signal, and the rank that received it."""

    def __init__(self, told_by: tuple[int, int] | None = None) -> None:
        super().__init__(told_by)
        self.told_by = told_by


@dataclass(frozen=True)
class Course:
    """The course of a run. `steps`: the last step, counted from the start of the run. `rate`: the learning rate of each
    step, from 0 on; None leaves it as it is. `log(record)` gets a record every `log_every` steps and after each
    evaluation, which each epoch ends with; `progress(step, record)` every step, with the last record. `stopping()`: the
    signal after which the run shall save a checkpoint and end, or None."""

    steps: int
    rate: Rate | None = None
    log_every: int = 0
    log: Callable[[dict[str, Any]], None] = lambda record: None
    progress: Callable[[int, Mapping[str, Any]], None] = lambda step, record: None
    keeper: Keeper | None = None
    stopping: Callable[[], int | None] = lambda: None


def run(trainer: Trainer, course: Course, done_before: int = 0) -> None:
    """Trains from step `done_before` + 1 on. Raises Stopped, TrainingError, CheckpointError. Data that cannot be read
    and a log that cannot be written end the run as `stopping` does, and are the cause of Stopped; without a keeper, or
    before the first step, they are raised: DataError, FileError, and on ranks Disagreement."""
    data, keeper = trainer.recorded.train_data, course.keeper
    speed, looks, record = _Speed(trainer, course.steps, done_before), _Looks(trainer, course), dict[str, Any]()
    launch = step = done_before  # the last step that has run, and the last one in records
    while step < course.steps:
        if step == launch:
            if course.rate is not None:
                trainer.learn_by(course.rate, step)
            try:
                most = _at_once(trainer, course, step)
                if most > 1:
                    launch += trainer.several(most)
                else:
                    trainer.step()
                    launch += 1
            except (DataError, Disagreement) as error:  # all ranks have it
                if keeper is None or step == done_before:
                    raise
                _stop(trainer, keeper, step, None, None, error)
        step += 1
        if step < launch:  # parameters are later ones already: only its loss can be told
            if course.log_every and step % course.log_every == 0:
                record = speed.record(step, trainer.latest(launch - step), launch - step)
                with looks.held():
                    course.log(record)
            course.progress(step, record)
            continue
        if ended := data.ended:  # whether it is judged and saved or not, so that neither changes a stale run
            trainer.settle()
        told = bool(course.log_every) and step % course.log_every == 0
        if told or ended:
            loss, loads = trainer.latest(), trainer.loads() if told else []
            if trainer.rank == 0:
                record = speed.record(step, loss) | ({"experts": loads} if loads else {})
        if told and trainer.rank == 0:
            with looks.held():
                course.log(record)
        test = None
        if ended and step < course.steps:
            trainer.share()
            if trainer.rank == 0:
                with looks.held():
                    test = trainer.evaluate()
                    course.log(judged(trainer, step, test))
            trainer.gather(None)  # in a step, others would wait for rank 0 no longer than for a task
            speed.pause()
        stop, told_by, why = looks.told(step, now=ended or step == course.steps)
        if keeper is not None:
            if stop:
                _stop(trainer, keeper, step, test, told_by, why)
            if step < course.steps and keeper.due(trainer, step, ended):
                keeper.gather(trainer)
                keeper.save(trainer, step, test)
                speed.pause()
        course.progress(step, record)


def _at_once(trainer: Trainer, course: Course, done: int) -> int:
    """How many steps the next launch may have: it ends for a checkpoint or a new learning rate (and with an epoch)."""
    most = min(trainer.at_once, course.steps - done)
    if course.keeper is not None and course.keeper.steps is not None:
        most = min(most, course.keeper.steps - done % course.keeper.steps)
    rate = course.rate
    return most if rate is None else next((i for i in range(1, most) if rate(done + i) != rate(done)), most)


def _stop(trainer: Trainer, keeper: Keeper, step: int, test: Mapping[str, float] | None,
          told_by: tuple[int, int] | None, why: Exception | None) -> NoReturn:
    """Saves the state after this step, on all ranks together, and raises Stopped."""
    keeper.gather(trainer)
    keeper.save(trainer, step, test)
    trainer.gather(None)  # none ends before the checkpoint is whole
    raise Stopped(told_by) from why


def judged(trainer: Trainer, step: int, test: Mapping[str, float]) -> dict[str, Any]:
    """The record of an evaluation."""
    data = trainer.recorded.train_data
    return {"step": step, "epoch": round(data.position / data.samples, 4),
            **{f"test_{name}": value for name, value in test.items()}}


class _Speed:
    """Samples per second since the last record, without the time of evaluations and checkpoints."""

    def __init__(self, trainer: Trainer, steps: int, done_before: int) -> None:
        self.trainer, self.steps, self.step = trainer, steps, done_before
        self.since = self.back = perf_counter()
        self.away = 0.0
        trainer.loads()  # of steps before this run

    def pause(self) -> None:
        """Leaves out the time since the last step or pause, and the time of the next step."""
        self.trainer.strange.append(len(self.trainer.seconds))
        now = perf_counter()
        self.away += now - max(self.trainer.ended, self.since, self.back)
        self.back = now

    def record(self, step: int, loss: float, back: int = 0) -> dict[str, Any]:
        """`back`: by how many steps of its launch others follow the step."""
        trainer, data = self.trainer, self.trainer.recorded.train_data
        now = perf_counter() if not back else trainer.ended - back * (trainer.seconds[-1] + trainer.waits[-1])
        seconds, steps = max(now - self.since - self.away, 1e-9), step - self.step
        waited = sum(trainer.waits[len(trainer.waits) - back - steps : len(trainer.waits) - back])
        self.step, self.since, self.away = step, now, 0.0
        return {"step": step, "epoch": round((data.position - back * data.batch_size) / data.samples, 4), "loss": loss,
                "lr": float(f"{trainer.recorded.optimizer.lr:.7g}"),  # a float32
                "samples_per_s": round(steps * trainer.job.batch_size / seconds, 2),
                "eta_s": round(seconds / steps * (self.steps - step), 1),
                "data_ms": round(waited / steps * 1000, 4)}


class _Looks:
    """Whether the run shall stop, after which signal to which rank, and why. Ranks ask each other, at steps that all of
    them know, twice a second. `trouble`: the first error of this rank: if a checkpoint can be saved, it ends the run
    when ranks next ask each other; else it is raised at once."""

    def __init__(self, trainer: Trainer, course: Course) -> None:
        self.communicator, self.course = trainer.communicator, course
        self.trouble: Exception | None = None
        self.next, self.last, self.at = 1, 0, monotonic()

    @contextmanager
    def held(self) -> Iterator[None]:
        try:
            yield
        except (DataError, FileError) as error:
            if self.course.keeper is None:
                raise
            self.trouble = self.trouble or error

    def told(self, step: int, now: bool) -> tuple[bool, tuple[int, int] | None, Exception | None]:
        """`now`: whether all ranks ask at this step."""
        if self.course.keeper is None or self.communicator is None:
            signal = self.course.stopping()
            return (self.course.keeper is not None and (self.trouble or signal) is not None,
                    None if signal is None else (signal, 0), self.trouble)
        if step < self.next and not now:
            return False, None, None
        moment = monotonic()
        seen = self.communicator.gather((self.course.stopping(), self.trouble and str(self.trouble),
                                         (moment - self.at) / max(1, step - self.last)))
        slowest = max(seconds for _, _, seconds in seen)
        self.next, self.last, self.at = step + max(1, int(LOOKS / max(slowest, 1e-6))), step, moment
        why = next((line for _, line, _ in seen if line), None)
        told_by = next(((signal, rank) for rank, (signal, _, _) in enumerate(seen) if signal is not None), None)
        return (why or told_by) is not None, told_by, Disagreement(why) if why else None
