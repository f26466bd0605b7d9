"""A training run's flags, files and result, for one process and for ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..files import check_writable
from ..pricing.diagnosis import Diagnosis, Surroundings, of_run
from ..training import checkpoint
from ..training.trainer import Job, Recorded, Trainer
from ..views.trace import check_path as check_trace
from .flags import UsageError
from .machine import versions


def steps_of(arguments: Any, recorded: Recorded) -> int:
    if arguments.steps:
        return int(arguments.steps)
    return (arguments.epochs or 1) * recorded.train_data.steps_per_epoch


def check_run(arguments: Any) -> None:
    """Raises UsageError for flags of a run that contradict each other."""
    if arguments.resume and not arguments.checkpoint:
        raise UsageError("--resume needs --checkpoint DIR, the checkpoint to resume from")
    if arguments.resume and arguments.init:
        raise UsageError("--init has no effect with --resume, which has all weights; leave one out")
    if (arguments.resume and "--scheduler" not in arguments.given
        and (idle := arguments.given & {"--streams", "--scheduler-arg", "--pairs"})):
        raise UsageError(f"{min(idle)} has no effect with --resume alone, which keeps the schedule of the "
                         f"checkpoint; give --scheduler too")
    if arguments.dry_run and (arguments.trace or arguments.checkpoint):
        raise UsageError("--dry-run runs nothing, so --trace and --checkpoint have no effect; leave them out")


def check_outputs(arguments: Any) -> None:
    """Checks before the work that every output file can be written. Raises FileError or ValueError."""
    for flag in ("save", "svg", "html", "trace", "save_costs", "version_log"):
        if path := getattr(arguments, flag):
            if flag == "trace":
                check_trace(path)
            check_writable(path)


@contextmanager
def claimed(arguments: Any) -> Iterator[None]:
    """Reserves the checkpoint's folder for this run. Raises UsageError if it has a checkpoint of another run, and
    CheckpointError if another process saves to it."""
    if not arguments.checkpoint:
        yield
        return
    with checkpoint.claim(arguments.checkpoint):
        if not arguments.resume and checkpoint.exists(arguments.checkpoint):
            raise UsageError(f"{arguments.checkpoint} already has a checkpoint; continue from it with "
                             f"--resume, or use another folder")
        yield


def resumed(arguments: Any, recorded: Recorded) -> checkpoint.Checkpoint:
    """Restores the state of the checkpoint; a given learning rate overrides the saved one. Raises CheckpointError,
    before anything changes, for a checkpoint that does not fit."""
    steps = steps_of(arguments, recorded)
    if (done := checkpoint.peek(arguments.checkpoint).step) >= steps:
        raise UsageError(f"{arguments.checkpoint} already has {done} steps, and --steps {steps} counts from the start "
                         f"of the run; give more steps")
    found = checkpoint.load(arguments.checkpoint, recorded.model, recorded.optimizer, loader=recorded.train_data)
    if "--lr" in arguments.given:
        recorded.optimizer.lr = arguments.lr
    return found


def parameters(recorded: Recorded) -> int:
    return sum(p.size for p in recorded.model.parameters())


def run_record(task: Job, trainer: Trainer) -> dict[str, Any]:
    """The result of a run, with the keys of `train --json`."""
    found = trainer.evaluate()
    return {"model": task.model, "parameters": parameters(trainer.recorded), "data": trainer.recorded.train_data.name,
            "device": trainer.recorded.device.name, "ranks": 1, "scheduler": task.scheduler,
            "steps": len(trainer.losses),
            "loss_first": trainer.losses[0], "loss_last": trainer.losses[-1], "accuracy": found.get("accuracy"),
            "objective": trainer.recorded.objective.name, "test": found,
            "step_ms": trainer.step_ms(), "predicted_step_ms": round(trainer.plan.predicted_step_ms, 4),
            "peak_bytes": max(trainer.plan.peak_bytes or (0,)), "params_sha256": trainer.params_sha256(),
            "diagnosis": of_run(trainer.plan, surroundings(trainer)).as_json(),
            "versions": versions()}


def surroundings(trainer: Trainer) -> Surroundings:
    """What was around a run."""
    step, communicator = trainer.step_ms(), getattr(trainer, "communicator", None)
    threads = 1 if communicator is None or communicator.own_process else communicator.size
    return Surroundings(trainer.load, len(os.sched_getaffinity(0)), step["median"], step["p10"], step["p90"], threads)


def said(metric: str, value: float) -> str:
    """The value of a metric as text."""
    return f"{value:.1%}" if metric == "accuracy" else f"{value:.4g}"


def summary(record: dict[str, Any]) -> str:
    judged = "".join(f", test {name.replace('_', ' ')} {said(name, value)}" for name, value in record["test"].items())
    step = record["step_ms"]
    return (f"{record['model']} ({record['parameters']:,} parameters) on {record['data']}, {record['scheduler']} on "
            f"{record['device']}: {record['steps']} steps\n"
            f"  loss {record['loss_first']:.4f} -> {record['loss_last']:.4f}{judged}\n"
            f"  step {step['median']:.3f} ms (p10 {step['p10']:.3f}, p90 {step['p90']:.3f}), predicted "
            f"{record['predicted_step_ms']:.3f} ms\n"
            f"  peak memory {record['peak_bytes']:,} bytes\n"
            f"  parameters sha256 {record['params_sha256'][:16]}\n{diagnosed(record['diagnosis'])}")


def diagnosed(record: dict[str, Any]) -> str:
    """A diagnosis as text."""
    return str(Diagnosis(record["headline"], record["fits"], tuple(record["reasons"]), tuple(record["advice"])))
