"""A training run's flags, files and result, for one process and for ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import numpy as np

from .. import optim
from ..autograd.tape import use
from ..data import DataError
from ..devices import device as devices
from ..measuring.lanes import lane_cores, measure_hand_over
from ..measuring.work import of_device, work_of
from ..optim.rates import Rate
from ..runtime import standstill
from ..runtime.version_log import as_lines
from ..system import interrupts
from ..system.files import FileError, write_atomic
from ..training import checkpoint, loop, status
from ..training.agreement import Disagreement
from ..training.keeper import Keeper
from ..training.metrics import Metrics
from ..training.realised import as_lines as as_order_lines
from ..training.recorded import Recorded
from ..training.trainer import Trainer
from ..views.diagnosis import Diagnosis, Surroundings, lanes, of_run
from ..views.page import Shown
from . import data_parallel_plans as data_parallel
from . import show
from .flags import UsageError
from .machine import versions

#: flags with which a run began, and which one that goes on must be given again: they change its bits
REPEATED = ("momentum", "weight_decay", "clip", "dither", "newton", "backward", "sweeps", "block", "feed",
            "lr_schedule", "warmup", "rates_by_delay")
#: flags of the schedule, which a checkpoint keeps until --scheduler makes another one
OF_THE_SCHEDULE = ("recompute", "offload", "split", "scheduler_arg", "streams", "pairs", "group_weights", "side_sms")
#: settings that say in which order a step adds up its gradients
SUMS = {"groups": "sums over parts of the micro-batches", "slices": "slices of each sequence"}
HERE = ("root", "device", "workers", "scaling_from")  #: settings of one machine, which a checkpoint does not have
LOG_EVERY = 10  #: steps between two records in files, by default
WAITING, LEAST = 0.2, 1.0  #: the share of a step, and the milliseconds, above which its wait for data gets a note


def steps_of(arguments: Any, recorded: Recorded) -> int:
    return int(arguments.steps) if arguments.steps else recorded.train_data.steps(arguments.epochs or 1)


@contextmanager
def claimed(arguments: Any) -> Iterator[None]:
    """Reserves the checkpoint's folder for this run. Raises UsageError if it has a checkpoint of another run, and
    CheckpointError if another process saves to it."""
    with checkpoint.claim(arguments.checkpoint) if arguments.checkpoint else nullcontext():
        if arguments.checkpoint and not arguments.resume and checkpoint.exists(arguments.checkpoint):
            raise UsageError(f"{arguments.checkpoint} already has a checkpoint; continue from it with "
                             f"--resume, or use another folder")
        yield


def begun(arguments: Any) -> checkpoint.Checkpoint | None:
    """The checkpoint of a run that goes on, whose weights replace --init's; None for a run that begins. Raises
    CheckpointError, and UsageError for flags of the weights or the schedule with other values than at its begin."""
    arguments.began = {name: json.loads(json.dumps(getattr(arguments, name), default=str))
                       for name in ("init", *OF_THE_SCHEDULE)}
    if not arguments.resume:
        return None
    found = checkpoint.peek(arguments.checkpoint)
    before = _job_of(found, arguments.checkpoint).get("began", {})
    for name in ("init", *(OF_THE_SCHEDULE if "--scheduler" not in arguments.given else ())):
        flag, there, here = f"--{name.replace('_', '-')}", before.get(name), arguments.began[name]
        if flag in arguments.given and here != there:
            raise UsageError(f"{arguments.checkpoint} was made {_with(flag, there)}, and goes on so; "
                             f"{_with(flag, here)} it needs a new "
                             f"{'run' if name == 'init' else 'schedule: give --scheduler too'}")
        arguments.began[name] = there
    arguments.init = None
    return found


def _with(flag: str, value: Any) -> str:
    """The value of a flag in words."""
    text = " ".join("=".join(map(str, pair)) for pair in value) if isinstance(value, list) else value
    return f"without {flag}" if text in (None, "") else f"with {flag} {text}"


def resumed(arguments: Any, recorded: Recorded, part: tuple[int, int] = (0, 1)) -> checkpoint.Checkpoint:
    """Restores the state of the checkpoint; a given learning rate overrides the saved one. `part`: of so many ranks,
    this is one. With --resume auto it may have all steps. Raises CheckpointError, before anything changes, for a
    checkpoint that does not fit."""
    steps = steps_of(arguments, recorded)
    saved = checkpoint.peek(arguments.checkpoint)
    if saved.step > steps or (saved.step == steps and arguments.resume != "auto"):
        raise UsageError(f"{arguments.checkpoint} already has {saved.step} steps, and --steps {steps} counts from the "
                         f"start of the run; give more steps")
    if saved.about.get("tokenizer", "") != recorded.train_data.dataset.tokenizer:
        raise UsageError(f"{arguments.checkpoint} was made with another tokenizer, whose tokens mean other text; give "
                         f"the --tokenizer and the training text that it was made with")
    before = _job_of(saved, arguments.checkpoint)
    kept = saved.schedule is not None and "--scheduler" not in arguments.given
    for name in REPEATED if kept else (*REPEATED, "split"):
        flag = f"--{name.replace('_', '-')}"
        if flag not in arguments.given and before.get(name) not in (None, getattr(arguments, name)):
            raise UsageError(f"{arguments.checkpoint} was made with {flag} {before[name]}; give it again, or another "
                             f"value")
    here = asdict(recorded.job)
    for name, what in SUMS.items():
        there = before.get(name, 1)
        if before and there != here[name] and not arguments.reorder_sums:
            raise UsageError(f"{arguments.checkpoint} was made by a schedule that sums gradients in another order "
                             f"than {recorded.job.scheduler}: {there} {what}, not {here[name]}; resume under a "
                             f"schedule with the same order, or add --reorder-sums to continue with other bits")
    with use(recorded.tape):
        found = checkpoint.load(arguments.checkpoint, recorded.model, recorded.optimizer, loader=recorded.train_data,
                                part=part)
    if "--lr" in arguments.given:
        recorded.optimizer.lr = arguments.lr
    elif "lr" in before:
        recorded.job = replace(recorded.job, lr=float(before["lr"]))
    return found


def _job_of(found: checkpoint.Checkpoint, path: str) -> dict[str, Any]:
    """The settings of the run that made a checkpoint; none if it does not say them. Raises CheckpointError."""
    try:
        job = json.loads(found.about.get("job", "{}"))
        float(job.get("lr", 0))
        return dict(job)
    except (ValueError, TypeError, AttributeError) as error:
        raise checkpoint.CheckpointError(f"{path} is damaged: the settings of its run are {error}") from None


def rate_of(arguments: Any, recorded: Recorded) -> Rate | None:
    """The learning rate of each step by --lr-schedule and --warmup; None if it stays."""
    if arguments.lr_schedule == "constant" and not (arguments.warmup or arguments.rates_by_delay):
        return None
    steps, lr = steps_of(arguments, recorded), recorded.job.lr
    if arguments.warmup >= steps:
        raise UsageError(f"--warmup {arguments.warmup} is not shorter than the run, which has {steps} steps")
    rate: Rate = (optim.cosine(lr, steps - arguments.warmup) if arguments.lr_schedule == "cosine" else lambda step: lr)
    return optim.warmup(rate, arguments.warmup, 1 / (arguments.warmup + 1)) if arguments.warmup else rate


def trained(arguments: Any, trainer: Trainer, steps: int, keeper: Keeper | None, title: str,
            saved: checkpoint.Checkpoint | None) -> Metrics:
    """Runs all steps, and saves, logs and evaluates along the way. Returns the open files of the log. Raises
    KeyboardInterrupt after an interrupt, with a checkpoint if there is a folder for it."""
    first, done_before = trainer.rank == 0, saved.step if saved is not None else 0
    metrics = (Metrics(arguments.log, arguments.tensorboard, appends=saved is not None) if first else Metrics())
    every = arguments.log_every or (LOG_EVERY if arguments.log or arguments.tensorboard else 0)

    def log(record: dict[str, Any]) -> None:
        metrics.write(record)
        if arguments.log_every or "loss" not in record:
            show.note(line_of(record, steps))

    try:
        with show.progress(title, steps, done_before) as done, _told(arguments, trainer, steps, done_before) as tell:
            def progress(step: int, record: Mapping[str, Any]) -> None:
                tell(step, record)
                done(step, f"loss {record['loss']:.4g}, {record['samples_per_s']:,.0f} samples/s" if record else "")

            course = loop.Course(steps, rate_of(arguments, trainer.recorded), every, log, progress, keeper,
                                 lambda: interrupts.received)
            with interrupts.holding() if arguments.checkpoint else nullcontext():
                loop.run(trainer, course, done_before)
    except BaseException as error:
        metrics.close()
        if not isinstance(error, loop.Stopped):
            raise
        if first:
            show.note(f"saved {arguments.checkpoint} before the end; continue with --resume")
        if error.__cause__ is None and error.told_by is not None:
            interrupts.share(*error.told_by)
        raise error.__cause__ or KeyboardInterrupt from None
    return metrics


def finished(arguments: Any, trainer: Trainer, steps: int, keeper: Keeper | None, metrics: Metrics) -> dict[str, Any]:
    """The record of a run that has ended, on rank 0; with the last line of the log and the last checkpoint, which is
    saved even if test data or the log fail."""
    try:
        record = run_record(trainer)
        metrics.write(loop.judged(trainer, steps, record["test"]))
        metrics.close()
    except (DataError, FileError):
        if keeper is not None:
            keeper.save(trainer, steps)
            show.note(f"saved {arguments.checkpoint} after the last step")
        raise
    if keeper is not None:
        keeper.save(trainer, steps, record["test"])
    step, wait = record["step_ms"]["median"], record["data_ms"]
    if wait > max(LEAST, WAITING * (step + wait)):
        faster = trainer.recorded.train_data.dataset.faster
        show.note(f"the data are the bottleneck: of {step + wait:.3f} ms a step, {wait:.3f} ms wait for them"
                  + (f"; {faster}" if faster else ""))
    return record


@contextmanager
def _told(arguments: Any, trainer: Trainer, steps: int, done: int
          ) -> Iterator[Callable[[int, Mapping[str, Any]], None]]:
    """A function that takes each step for --status, on rank 0."""
    if not arguments.status or trainer.rank > 0:
        yield lambda step, record: None
        return
    with closing(status.Status(
            status.Target.of(arguments.status), steps, done, trainer.job.batch_size, trainer.plan.predicted_step_ms,
            lambda: trainer.losses[-1] if trainer.losses else None, show.note)) as sender:
        yield sender.tell


def watching(arguments: Any, trainer: Trainer) -> AbstractContextManager[Any]:
    """The watch that --patience asks for, over what runs inside. Raises FileError."""
    if not arguments.patience:
        return nullcontext()
    seconds, folder = arguments.patience
    interrupts.answer()
    trainer.watched = True
    return standstill.Watcher(folder, seconds, lambda: vars(trainer).get("run"), trainer.communicator,
                              arguments.line, show.note, lambda: len(trainer.seconds))


def complete(arguments: Any, trainer: Any, title: str, saved: checkpoint.Checkpoint | None) -> int:
    """Prints what the plan remarks, trains, writes the files, then prints the result, even if a file cannot be written;
    on rank 0 if there are ranks. With --dry-run, prints the plan. Raises Disagreement, the same on all ranks."""
    plan, first, alone = trainer.plan, trainer.rank == 0, trainer.communicator is None
    steps, keeper = steps_of(arguments, trainer.recorded), keeper_of(arguments, trainer.recorded)
    show.note(*plan.remarks if first else ())
    if arguments.log_versions and not plan.stale:
        raise Disagreement(f"--log-versions has no effect here: {plan.scheduler} trains on the newest weights")
    if arguments.dry_run:
        return _dry_run(arguments, trainer) if first else 0
    if saved is not None and saved.step == steps:
        return _ended_before(arguments, trainer, steps)
    if first and saved is not None:
        show.note(f"resumed from {arguments.checkpoint} after step {saved.step}")
    with watching(arguments, trainer):
        try:
            metrics = trained(arguments, trainer, steps, keeper, title, saved)
        except Disagreement:  # on all ranks, between two steps
            trainer.share()
            trainer.run.close()
            raise
        trainer.settle() if alone else trainer.finish()
    timeline: Any = None
    if arguments.trace or arguments.html:
        timeline = trainer.run.timeline if alone else trainer.run.timeline_of_all()
    orders = trainer.gather(trainer.orders) if arguments.log_order else []
    if first:
        if timeline is not None:
            timeline = replace(timeline, work=work_of(plan.graph, of_device(trainer.recorded.device)))
        record = finished(arguments, trainer, steps, keeper, metrics)
        record |= {"k": plan.notes["k"]} if "k" in plan.notes else {}
        if arguments.parallel == "pipeline" and trainer.log:
            record["staleness"] = trainer.staleness()
        try:
            if arguments.log_versions:
                log = sorted(trainer.run.log.entries, key=lambda e: (e.step, e.key)) if alone else trainer.log
                write_atomic(arguments.log_versions, "".join(f"{line}\n" for line in as_lines(log)))
            if arguments.log_order:
                lines = as_order_lines([*zip(*orders, strict=True)])
                write_atomic(arguments.log_order, "".join(f"{line}\n" for line in lines))
            if arguments.trace:
                show.write_trace(timeline, arguments.trace, arguments.trace_factor, ran=True)
            if arguments.html:
                show.write_page(arguments, record, [Shown.of(plan, timeline)], curves=_curves(trainer, metrics, steps))
        finally:
            show.emit(arguments, record, lambda: summary(record))
    elif keeper is not None:
        keeper.save(trainer, steps)
    trainer.gather(None)  # no rank ends before rank 0 has printed everything
    return 0


def _ended_before(arguments: Any, trainer: Trainer, steps: int) -> int:
    """Prints the result of a run whose checkpoint has all steps, on rank 0 if there are ranks."""
    if trainer.rank == 0:
        show.note(f"{arguments.checkpoint} already has all {steps} steps: none is left to run, and the files of an "
                  f"earlier attempt stay as they are")
        with _told(arguments, trainer, steps, steps):
            record = _result(trainer) | {"steps": 0}
        show.emit(arguments, record, lambda: summary(record))
    trainer.gather(None)  # no rank ends before rank 0 has printed everything
    return 0


def _dry_run(arguments: Any, trainer: Any) -> int:
    """Prints the plan and the settings of a run."""
    recorded, plan, job = trainer.recorded, trainer.plan, trainer.job
    record = {"model": job.model, "parameters": parameters(recorded), "ranks": trainer.ranks,
              "scheduler": job.scheduler, "data": recorded.train_data.name,
              "steps": steps_of(arguments, recorded), "batch_size": job.batch_size,
              "optimizer": job.optimizer, "lr": job.lr, "lr_schedule": arguments.lr_schedule,
              "warmup": arguments.warmup, "weight_decay": job.weight_decay, "seed": job.seed, "init": job.init,
              "lanes": job.lanes or devices.default_lanes() if job.device == "cpu" else None, **plan.as_json()}
    if arguments.parallel == "data":
        found = data_parallel.figures(plan)
        record |= {"lower_bound_ms": found["lower_bound"] / 1000} if "lower_bound" in found else {}
        record |= {name: found[name] for name in ("hidden", "k") if name in found}
    return show.emit(arguments, record | {"remarks": [*plan.remarks]}, lambda: show.order(plan.schedule, record))


def _curves(trainer: Trainer, metrics: Metrics, steps: int) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """The curves of a run that ended with this step: the loss of each step, and each metric on test data."""
    found = {"loss": {"training": list(enumerate(trainer.losses, steps - len(trainer.losses) + 1))}}
    for record in metrics.tests:
        for name in (key.removeprefix("test_") for key in record if key.startswith("test_")):
            found.setdefault(name, {}).setdefault("test", []).append((record["step"], record[f"test_{name}"]))
    return found


def keeper_of(arguments: Any, recorded: Recorded) -> Keeper | None:
    if not arguments.checkpoint:
        return None
    every = arguments.checkpoint_every or {}
    job = {key: value for key, value in asdict(recorded.job).items()
           if isinstance(value, str | int | float | dict | None) and key not in HERE}
    about = {"job": json.dumps(job | {"model_args": recorded.model_args, "lr_schedule": arguments.lr_schedule,
                                      "warmup": arguments.warmup, "objective": recorded.objective.name,
                                      "began": arguments.began}),
             "tokenizer": recorded.train_data.dataset.tokenizer}
    return Keeper(arguments.checkpoint, last=arguments.keep, **every, schedules=arguments.parallel == "none",
                  about={name: text for name, text in about.items() if text})


def line_of(record: Mapping[str, Any], steps: int) -> str:
    """A record as a line: `step 33 of 110 (1.5 epochs): loss 0.4141, ...`."""
    parts = [f"{name.replace('_', ' ')} {said(name.removeprefix('test_'), value)}" for name, value in record.items()
             if name not in ("step", "epoch", "samples_per_s", "eta_s", "data_ms", "experts")]
    if "eta_s" in record:
        parts += [f"{record['samples_per_s']:,.0f} samples/s", f"{timedelta(seconds=round(record['eta_s']))} left"]
    epochs = f" ({record['epoch']:.1f} epochs)" if record["epoch"] else ""  # data without end have none
    return "\n".join([f"step {record['step']} of {steps}{epochs}: {', '.join(parts)}",
                      *map(_loads, record.get("experts", ()))])


def _loads(layer: Mapping[str, Any]) -> str:
    """`  transformer.h.0.mlp: tokens 34 30 31 33, dropped 0 0 2 0`."""
    each = (f"{what} {' '.join(map(str, layer[what]))}" for what in ("tokens", "dropped") if any(layer[what]))
    return f"  {layer['layer']}: {', '.join(each)}"


def parameters(recorded: Recorded) -> int:
    return sum(p.size for p in recorded.model.parameters())


def _result(trainer: Trainer, test: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The part of a run's result that does not depend on its steps."""
    if test is None:
        with show.progress("evaluating", 1.0) as done:
            test = trainer.evaluate(done)
    task, recorded = trainer.job, trainer.recorded
    return {"model": task.model, "parameters": parameters(recorded), "data": recorded.train_data.name,
            "device": recorded.device.name, "scheduler": task.scheduler, "accuracy": test.get("accuracy"),
            "objective": recorded.objective.name, "test": dict(test), "params_sha256": trainer.params_sha256(),
            "remarks": [*trainer.plan.remarks], "versions": versions(), "ranks": trainer.ranks}


def run_record(trainer: Trainer, test: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The result of a run, with the keys of `train --json`. `test`: its metrics on test data, if they are known."""
    return {**_result(trainer, test), "steps": len(trainer.losses),
            "loss_first": trainer.losses[0], "loss_last": trainer.losses[-1],
            "step_ms": trainer.step_ms(), "data_ms": round(float(np.median(trainer.waits)) * 1000, 4),
            "predicted_step_ms": round(trainer.plan.predicted_step_ms, 4),
            "peak_bytes": max(trainer.plan.peak_bytes or (0,)),
            "activation_peak_bytes": max(p.memory.activation_bytes for p in trainer.program.parts),
            "dither": trainer.recorded.zeros() if trainer.job.dither else None,
            "diagnosis": asdict(of_run(trainer.plan, surroundings(trainer)))}


def surroundings(trainer: Trainer) -> Surroundings:
    """The surroundings of a run."""
    step, communicator, plan = trainer.step_ms(), trainer.communicator, trainer.plan
    streams = trainer.job.device == "cpu" and communicator is None and lanes(plan) > 1
    threads = 1 if communicator is None or communicator.own_process else communicator.size
    return Surroundings(trainer.others, len(os.sched_getaffinity(0)), step["median"], step["p10"], step["p90"], threads,
                        measure_hand_over(trainer.recorded.device, lane_cores())[0] if streams else 0.0)


def said(metric: str, value: float) -> str:
    """The value of a metric as text."""
    return f"{value:.1%}" if metric == "accuracy" else f"{value:.4g}"


def summary(record: dict[str, Any]) -> str:
    judged = ", ".join(f"test {name.replace('_', ' ')} {said(name, value)}" for name, value in record["test"].items())
    head = (f"{record['model']} ({record['parameters']:,} parameters) on {record['data']}, {record['scheduler']} on "
            f"{record['device']}: {record['steps']} steps\n")
    last = f"  parameters sha256 {record['params_sha256'][:16]}"
    if not record["steps"]:
        return f"{head}  {judged}\n{last}"
    step = record["step_ms"]
    return (f"{head}  loss {record['loss_first']:.4f} -> {record['loss_last']:.4f}, {judged}\n"
            f"  step {step['median']:.3f} ms (p10 {step['p10']:.3f}, p90 {step['p90']:.3f}), predicted "
            f"{record['predicted_step_ms']:.3f} ms\n"
            + (f"  dither {d['s']:g}: {d['zeros_before']:.1%} -> {d['zeros']:.1%} of the gradients of pre-activations "
               f"are 0, which saves {d['skipped_before']:.1%} -> {d['skipped']:.1%} of the multiply-adds\n"
               if (d := record["dither"]) else "") +
            f"  peak memory {record['peak_bytes']:,} bytes\n"
            f"{last}\n{Diagnosis(**record['diagnosis'])}")
