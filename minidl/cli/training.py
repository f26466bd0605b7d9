"""`train` and `compare`."""

from __future__ import annotations

from copy import copy
from dataclasses import asdict
from typing import Any

from .. import schedulers
from ..core.schedule import Schedule, ScheduleError
from ..plans.memory import MemoryLimitError
from ..pricing.cost import CostModel
from ..runtime.replica import Replayed
from ..system import interrupts, launcher
from ..training.recorded import Recorded
from ..training.trainer import Trainer, sha256_of
from ..views.diagnosis import Diagnosis, of_speedup
from ..views.page import Shown
from . import distributed, restarts, runs, show
from .flags import UsageError, job
from .inputs import costs, log_of, named, scheduler_of

USUAL = "mlp_large"  #: the network of runs that name none


def train(arguments: Any) -> int:
    """Trains one job; without flags, compares two schedules."""
    arguments.model = arguments.model or USUAL
    if not arguments.given - {"--json"}:
        arguments.command, arguments.schedulers, arguments.epochs = "compare", "in_order,multi_stream", 8
        return compare(arguments)
    if arguments.max_restarts:
        return restarts.supervise(arguments)
    if arguments.patience:
        interrupts.answer()  # here in the main thread, if ranks are threads
    if arguments.parallel != "none":
        if arguments.parallel == "pipeline" and arguments.ranks is None and launcher.rank() is None:
            raise distributed.too_few(arguments)  # before MPI, which may not be here
        return (distributed.train_in_one_process(arguments) if arguments.ranks is not None
                else distributed.train(lambda: arguments))
    scheduler_of(arguments)
    found = runs.begun(arguments)
    kept = None if found is None or "--scheduler" in arguments.given else found.schedule
    task = job(arguments, None if found is None or kept is None else found.scheduler, kept)
    recorded = Recorded(task)
    show.note(*recorded.remarks)
    _ = recorded.test_data  # what does not fit shall not end the run at its first evaluation
    with runs.claimed(arguments):
        cost = costs(arguments, recorded)
        saved = runs.resumed(arguments, recorded) if arguments.resume else None
        return runs.complete(arguments, _trainer(arguments, recorded, cost, kept), f"training {task.model}", saved)


def _trainer(arguments: Any, recorded: Recorded, cost: CostModel, kept: str | None) -> Trainer:
    """The trainer of a run. `kept`: the checkpoint's schedule, as CSV. Raises UsageError if it is of another step."""
    schedule = None if kept is None else Schedule.from_csv(kept, f"the schedule in {arguments.checkpoint}")
    log = log_of(arguments)
    try:
        return Trainer(recorded, cost, trace=bool(arguments.trace or arguments.html), schedule=schedule,
                       replays=None if log is None else lambda graph: Replayed(graph, log, arguments.replay),
                       at_once=arguments.steps_per_launch or 1)
    except (ScheduleError, MemoryLimitError) as error:
        if schedule is None:
            raise
        raise UsageError(f"the schedule in {arguments.checkpoint} is not for the step of these flags "
                         f"({str(error).splitlines()[0]}); give --scheduler to make a new one") from None


def compare(arguments: Any) -> int:
    """Runs the same training under several schedules, from one seed, with interleaved steps. Returns 1 if the bits
    differ although they must be equal."""
    arguments.model = arguments.model or USUAL
    names = named(arguments)
    if not all(names):
        raise UsageError(f"--schedulers {arguments.schedulers}: a name between the commas is empty")
    arms = [_arm(arguments, name) for name in names]
    if len(names) < 2 or len(set(names)) < len(names):
        raise UsageError(f"--schedulers {arguments.schedulers}: give at least two different ones, separated by commas")
    found = distributed.side_by_side(arms)
    trainers = [trainer for trainer, _ in found]
    first, *others = trainers
    records, tests = list[dict[str, Any]](), dict[str, dict[str, float]]()
    for trainer in trainers:
        # models with equal bits are judged once
        state = sha256_of(t for _, t in trainer.recorded.model.named_tensors())
        records.append(runs.run_record(trainer, tests.get(state)))
        tests[state] = records[-1]["test"]
    identical, verdict = _verdict(trainers, [r["params_sha256"] for r in records])
    keys = ("scheduler", "step_ms", "predicted_step_ms", "peak_bytes", "params_sha256", "loss_first",
            "loss_last", "accuracy", "test", "remarks", "diagnosis")
    result: dict[str, Any] = {
        "model": first.job.model, "data": records[0]["data"], "steps": records[0]["steps"],
        "arms": [{k: r[k] for k in keys} for r in records], "bit_identical": identical,
        "deterministic": first.job.deterministic}
    if first.communicator is not None:
        result["ranks"] = first.ranks
        for arm, trainer in zip(result["arms"], trainers, strict=True):
            arm["stale"] = trainer.plan.stale
    diagnoses = {t.job.scheduler: of_speedup(first.plan, t.plan, *map(runs.surroundings, (first, t))) for t in others}
    result["diagnosis"] = {name: asdict(d) for name, d in diagnoses.items()}
    try:
        if arguments.html:
            show.write_page(arguments, result, [Shown.of(t.plan, timeline) for t, timeline in found])
    finally:
        show.emit(arguments, result, lambda: _comparison(records, verdict, trainers)
                  + "".join(f"\n{r['scheduler']}: {Diagnosis(**r['diagnosis'])}" for r in records)
                  + "".join(f"\n{name} over {names[0]}: {d}" for name, d in diagnoses.items()))
    return 1 if identical is False and first.job.deterministic else 0


def _arm(arguments: Any, name: str) -> Any:
    """The flags of a run under one of the schedulers, without the options that it does not take."""
    arm, options = copy(arguments), scheduler_of(arguments, name).options
    arm.scheduler, arm.scheduler_arg = name, [(k, v) for k, v in arguments.scheduler_arg if k in options]
    own = {"update_every", "slices"} if ":" in name else set()  # of its order, so that the step is recorded so
    for option in {"streams", "side_sms", "k", "buckets", "update_every", "slices"} - options.keys() - own:
        setattr(arm, option, None)
    return arm


def _verdict(trainers: list[Trainer], digests: list[str]) -> tuple[bool | None, str]:
    """Whether the parameters are equal bit for bit where they must be (None: nowhere), and in words. They need not be
    under schedules that train on older weights, nor under those that sum gradients in different orders."""
    groups: dict[tuple[int, ...], dict[str, str]] = {}  # by the order of sums: scheduler -> digest
    without: dict[str, list[str]] = {}  # why they need not be equal -> schedulers
    for trainer, digest in zip(trainers, digests, strict=True):
        job = trainer.job
        if trainer.plan.stale:
            without.setdefault("older", []).append(job.scheduler)
        elif not schedulers.find(job.scheduler, job.parallel).exact:
            without.setdefault("predicted", []).append(job.scheduler)
        else:
            groups.setdefault(tuple(getattr(job, name) for name in runs.SUMS), {})[job.scheduler] = digest
    first, *others = groups.values() or [{}]
    compared = [group for group in groups.values() if len(group) > 1]
    whose = f" of {' and of '.join(', '.join(group) for group in compared)}" if without or others else ""
    identical = all(len({*group.values()}) == 1 for group in compared) if compared else None
    if identical is None:
        found = "nothing to compare: no two of these schedules promise equal parameters"
    elif not trainers[0].job.deterministic:
        found = (f"the parameters{whose} {'are equal bit for bit' if identical else 'differ'}; with --nondeterministic "
                 f"they need not be equal")
    else:
        found = (f"the parameters{whose} are equal bit for bit" if identical
                 else f"THE PARAMETERS{whose} DIFFER: this is a bug in minidl; please report it")
    apart = [f"summed in another order than {next(iter(first))}'s, so compared apart: {', '.join(group)}"
             for group in others]
    apart += [f"trained on {what} weights, so not compared: {', '.join(names)}" for what, names in without.items()]
    return identical, "\n".join([found, *apart])


def _comparison(records: list[dict[str, Any]], verdict: str, trainers: list[Trainer]) -> str:
    first, communicator = records[0], trainers[0].communicator
    base, metric = first["step_ms"]["median"], trainers[0].recorded.objective.metric
    rows = [(r["scheduler"], r["step_ms"]["median"], r["step_ms"]["p10"], r["step_ms"]["p90"],
             base / r["step_ms"]["median"], r["predicted_step_ms"], r["peak_bytes"], r["loss_last"],
             runs.said(metric, r["test"][metric]), r["params_sha256"][:12]) for r in records]
    head = ("scheduler", "step ms", "p10", "p90", "speed-up", "predicted ms", "peak bytes", "last loss", metric,
            "parameters")
    shown = {t.job.scheduler: t.run if communicator is None else t.plan for t in trainers}
    grids = "\n".join(f"{name}\n{of.schedule.grid(show.width())}" for name, of in shown.items() if len(of.graph) <= 40)
    where = "" if communicator is None else f" on {communicator.size} rank{'s' * (communicator.size > 1)}"
    return (f"{first['model']} ({first['parameters']:,} parameters) on {first['data']}, {first['steps']} "
            f"steps each{where}, interleaved\n" + (f"\n{grids}\n\n" if grids else "")
            + show.table(head, rows) + f"\n\n{verdict}")
