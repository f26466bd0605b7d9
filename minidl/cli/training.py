"""`train` and `compare`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..pricing.cost import CostModel
from ..pricing.diagnosis import of_speedup
from ..schedule import Schedule, ScheduleError
from ..training import checkpoint
from ..training.trainer import Recorded, Trainer, interleaved
from ..views.page import Shown
from . import distributed, show
from .flags import UsageError, job
from .inputs import costs, named, scheduler_of
from .runs import (
    check_outputs,
    claimed,
    finished,
    intended,
    parameters,
    resumed,
    run_record,
    said,
    steps_of,
    summary,
    surroundings,
    trained,
)

#: the network of runs that name none: its tasks are long enough that two streams can gain
SMALL: dict[str, Any] = {"model": "mlp", "model_arg": [("hidden", 1024), ("layers", 4)]}
SMALL_LR = 0.05


def _with_network(arguments: Any) -> None:
    """Sets the small network where the flags name none."""
    if not arguments.model:
        vars(arguments).update(SMALL)
        if "--lr" not in arguments.given:
            arguments.lr = SMALL_LR


def train(arguments: Any) -> int:
    """Trains one job; without flags, compares two schedules."""
    _with_network(arguments)
    if not arguments.given - {"--json"}:
        arguments.command, arguments.schedulers, arguments.epochs = "compare", "in_order,multi_stream", 8
        return compare(arguments)
    if arguments.parallel != "none":
        return (distributed.train_in_one_process(arguments) if arguments.ranks is not None
                else distributed.train(lambda: arguments))
    scheduler_of(arguments)
    check_outputs(arguments)
    found = checkpoint.peek(arguments.checkpoint) if arguments.resume else None
    kept = found is not None and found.schedule is not None and "--scheduler" not in arguments.given
    task = job(arguments, found.scheduler if found is not None and kept else None)
    recorded = Recorded(task)
    show.notes(recorded.remarks)
    if arguments.dry_run:
        return _dry_run(arguments, recorded, costs(arguments, recorded))
    _ = recorded.test_data  # what does not fit shall not end the run at its first evaluation
    with claimed(arguments):
        cost = costs(arguments, recorded)
        saved = resumed(arguments, recorded) if arguments.resume else None
        trainer = _trainer(arguments, recorded, cost, saved.schedule if saved is not None and kept else None)
        if saved is not None:
            show.note(f"resumed from {arguments.checkpoint} after step {saved.step}")
        show.notes(trainer.plan.remarks)
        metrics = trained(arguments, trainer, f"training {task.model}", saved)
        trainer.settle()
        record = finished(arguments, trainer, metrics)
    try:
        if arguments.trace:
            assert trainer.run.timeline is not None
            trainer.run.timeline.save(arguments.trace)
        if arguments.html:
            show.write_page(arguments, record, [Shown.of(trainer.plan, trainer.run.timeline)])
    finally:  # the result is told even if a file cannot be written
        show.emit(arguments, record, lambda: summary(record))
    return 0


def _trainer(arguments: Any, recorded: Recorded, cost: CostModel, kept: str | None) -> Trainer:
    """The trainer of a run. `kept`: the checkpoint's schedule, as CSV. Raises UsageError for a schedule of another step
    than that of the flags."""
    schedule = None if kept is None else Schedule.from_csv(kept, f"the schedule in {arguments.checkpoint}")
    try:
        return Trainer(recorded, cost, trace=bool(arguments.trace or arguments.html), schedule=schedule)
    except ScheduleError as error:
        if schedule is None:
            raise
        raise UsageError(f"the schedule in {arguments.checkpoint} is not for the step of these flags "
                         f"({error.message}); give --scheduler to make a new one") from None


def _dry_run(arguments: Any, recorded: Recorded, cost: CostModel) -> int:
    made = recorded.plan(cost)
    show.notes(made.remarks)
    record = {"model": recorded.job.model, "parameters": parameters(recorded),
              "scheduler": recorded.job.scheduler, **intended(arguments, recorded), **made.as_json()}
    show.emit(arguments, {**record, "remarks": [*made.remarks]},
              lambda: made.schedule.grid() + "\n" + show.table(("what", "value"), list(record.items())))
    return 0


def compare(arguments: Any) -> int:
    """Runs the same training under several schedules, from one seed, with interleaved steps. Returns 1 if the bits
    differ although they must be equal."""
    _with_network(arguments)
    check_outputs(arguments)
    names = named(arguments)
    if not all(names):
        raise UsageError(f"--schedulers {arguments.schedulers}: a name between the commas is empty")
    chosen = {name: scheduler_of(arguments, name) for name in names}
    if len(names) < 2 or len(set(names)) < len(names):
        raise UsageError(f"--schedulers {arguments.schedulers}: give at least two different ones, separated by commas")
    one = job(arguments, names[0])
    trainers: list[Trainer] = []
    for name in names:
        options = chosen[name].options
        recorded = Recorded(replace(one, scheduler=name, streams=one.streams if "streams" in options else None,
                                    scheduler_args={k: v for k, v in one.scheduler_args.items() if k in options}))
        _ = recorded.test_data
        show.notes(() if trainers else recorded.remarks)
        # all arms have the same tasks, so they share the costs measured for the first
        trainers.append(Trainer(recorded, trainers[0].cost if trainers else costs(arguments, recorded),
                                trace=bool(arguments.html)))
        show.notes(trainers[-1].plan.remarks)
    steps = steps_of(arguments, trainers[0].recorded)
    with show.progress(f"training {one.model} under {len(names)} schedules", steps) as done:
        interleaved(trainers, steps, done)
    records = [run_record(t.job, t) for t in trainers]
    identical = len({r["params_sha256"] for r in records}) == 1
    keys = ("scheduler", "step_ms", "predicted_step_ms", "peak_bytes", "params_sha256", "loss_first",
            "loss_last", "accuracy", "test", "remarks")
    result = {"model": one.model, "data": records[0]["data"], "steps": steps,
              "arms": [{k: r[k] for k in keys} for r in records], "bit_identical": identical,
              "deterministic": one.deterministic}
    first, *others = trainers
    found = {t.job.scheduler: of_speedup(first.plan, t.plan, surroundings(first), surroundings(t)) for t in others}
    result["diagnosis"] = {name: d.as_json() for name, d in found.items()}
    try:
        if arguments.html:
            show.write_page(arguments, result, [Shown.of(t.plan, t.run.timeline) for t in trainers])
    finally:
        show.emit(arguments, result,
                  lambda: _comparison(records, steps, _verdict(identical, one.deterministic), trainers)
                  + "".join(f"\n{name}: {d}" for name, d in found.items()))
    return 0 if identical or not one.deterministic else 1


def _verdict(identical: bool, deterministic: bool) -> str:
    found = "the parameters are equal bit for bit" if identical else "the parameters differ"
    if not deterministic:
        return f"{found}; with --nondeterministic they need not be equal"
    return found if identical else "THE PARAMETERS DIFFER: this is a bug in minidl; please report it"


def _comparison(records: list[dict[str, Any]], steps: int, verdict: str, trainers: list[Trainer]) -> str:
    first = records[0]
    base, metric = first["step_ms"]["median"], trainers[0].recorded.objective.metric
    rows = [(r["scheduler"], r["step_ms"]["median"], r["step_ms"]["p10"], r["step_ms"]["p90"],
             base / r["step_ms"]["median"], r["predicted_step_ms"], r["peak_bytes"], r["loss_last"],
             said(metric, r["test"][metric]), r["params_sha256"][:12]) for r in records]
    head = ("scheduler", "step ms", "p10", "p90", "speed-up", "predicted ms", "peak bytes", "last loss", metric,
            "parameters")
    grids = "\n".join(f"{t.job.scheduler}\n{t.run.schedule.grid()}" for t in trainers if len(t.run.graph) <= 40)
    return (f"{first['model']} ({first['parameters']:,} parameters) on {first['data']}, {steps} "
            f"steps each, interleaved\n" + (f"\n{grids}\n\n" if grids else "")
            + show.table(head, rows) + f"\n\n{verdict}")
