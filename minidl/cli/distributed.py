"""Training on ranks, data-parallel or as a pipeline: under a launcher, or as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from typing import Any

from ..files import write_atomic
from ..pricing.collectives import Collective
from ..pricing.cost import Link
from ..rank_grid import RankGrid
from ..runtime.comm.loopback import run_ranks
from ..runtime.version_log import as_lines
from ..training.agreement import Disagreement, agree
from ..training.pipeline_trainer import PipelineTrainer, measure_messages
from ..training.rank_trainer import RankTrainer, device_of, identity, measure_link, transport
from ..training.trainer import Recorded
from ..views.page import Shown
from . import data_parallel_plans as data_parallel
from . import show
from .flags import FLAGS, UsageError, job, path
from .inputs import costs, scheduler_of
from .ranks import job as on_ranks
from .runs import check_outputs, claimed, finished, intended, resumed, steps_of, summary, trained

MOST = 64  #: the most ranks that run as threads of one process
#: flags that may differ between ranks: a machine's files, devices and cores, and what only rank 0 prints or writes
OWN = {"--root", "--config", "--device", "--workers", "--lanes", "--json", "--save-costs"}
LINK = Link(50.0, 1e3)  #: assumed where costs are computed: --latency 50 --bandwidth 1GB; microseconds, bytes in one
RECORDING = threading.Lock()  #: ranks of one process record in turn: models and data may be code that knows no threads


def train(read: Callable[[], Any]) -> int:
    """This process's part of a run under a launcher. `read` returns its flags, or raises an error, which then ends all
    ranks. Rank 0 prints."""
    with on_ranks() as communicator:
        return _part(read, communicator)


def train_in_one_process(arguments: Any) -> int:
    """A run whose ranks are threads of this process: without a launcher, or for a debugger."""
    ranks = arguments.ranks * arguments.replicas
    if ranks > MOST:
        raise UsageError(f"at most {MOST} ranks run as threads of one process, not {ranks}; start more with mpiexec")
    if arguments.device != "cpu":
        raise UsageError(f"--ranks runs ranks as threads of this process, on the CPU; for {arguments.device}, start "
                         f"them with mpiexec")
    return max(run_ranks(ranks, lambda communicator: _part(lambda: copy(arguments), communicator)))


def _part(read: Callable[[], Any], communicator: Any) -> int:
    """One rank's part. Returns exit code 2 on all ranks if they cannot start."""
    try:
        with ExitStack() as held:
            return _train(read, communicator, held)
    except Disagreement as error:
        if communicator.rank == 0:
            show.note(f"minidl: {error}")
        return 2


def _train(read: Callable[[], Any], communicator: Any, held: ExitStack) -> int:
    first = communicator.rank == 0

    def prepare() -> tuple[Any, dict[str, Any]]:
        arguments = read()
        if not first:
            arguments.json, arguments.save_costs = True, None  # no table, no bar, no file
        _check_flags(arguments, communicator)
        if first:
            check_outputs(arguments)
        arguments.device = device_of(arguments.device, communicator)
        grid = _grid(arguments, communicator)
        with RECORDING:
            recorded = Recorded(job(arguments), grid.place(communicator.rank)[0], grid.replicas)
        if first:
            held.enter_context(claimed(arguments))
            _ = recorded.test_data  # what does not fit shall not end the run at its first evaluation
        saved = resumed(arguments, recorded) if arguments.resume else None
        alike = {**identity(recorded), "the number of steps": steps_of(arguments, recorded), "k": arguments.k,
                 "the number of buckets": arguments.buckets, "the number of replicas": arguments.replicas,
                 "the source of costs": arguments.costs,
                 "the transport": arguments.transport, "the checkpoint's step": saved and saved.step,
                 **_flags(arguments)}
        return (arguments, recorded, saved), alike

    arguments, recorded, saved = agree(communicator, prepare)
    show.notes(recorded.remarks if first else ())
    summing = transport(arguments.transport, communicator, recorded.device)
    trainer = (_pipeline if arguments.parallel == "pipeline" else _data)(arguments, recorded, summing)
    if arguments.version_log and trainer.plan.versions is None:
        raise Disagreement(f"--version-log has no effect here: {trainer.plan.scheduler} trains on the newest weights")
    if arguments.dry_run:
        return _dry_run(arguments, trainer, first)
    if first and saved is not None:
        show.note(f"resumed from {arguments.checkpoint} after step {saved.step}")
    try:
        metrics = trained(arguments, trainer, f"training {arguments.model} on {communicator.size} ranks", saved)
    except Disagreement:  # on all ranks, between two steps
        trainer.share()
        trainer.run.close()
        raise
    trainer.finish()
    timeline = trainer.run.timeline_of_all() if arguments.trace or arguments.html else None
    if first:
        record = finished(arguments, trainer, metrics) | {"ranks": communicator.size}
        if "k" in trainer.plan.notes:
            record["k"] = trainer.plan.notes["k"]
        if arguments.parallel == "pipeline" and trainer.log:
            record["staleness"] = trainer.staleness()
        try:
            if arguments.version_log:
                write_atomic(arguments.version_log, "".join(f"{line}\n" for line in as_lines(trainer.log)))
            if timeline is not None and arguments.trace:
                timeline.save(arguments.trace)
            if arguments.html:
                show.write_page(arguments, record, [Shown.of(trainer.plan, timeline)])
        finally:  # the result is told even if a file cannot be written
            show.emit(arguments, record, lambda: summary(record))
    communicator.gather(None)  # no rank ends before rank 0 has printed everything
    if summing is not communicator:
        summing.close()
    return 0


def _flags(arguments: Any) -> dict[str, Any]:
    """The flags that must be equal on all ranks, since they meet where these say: their values; of a file or a folder,
    whether there is one."""
    served = {name: flag for flags in FLAGS.values() for name, flag in flags.items() if "train" in flag.serves}
    values = {name: getattr(arguments, name[2:].replace("-", "_")) for name in served.keys() - OWN}
    return {name: bool(values[name]) if served[name].options.get("type") is path else values[name]
            for name in sorted(values)}


def _grid(arguments: Any, communicator: Any) -> RankGrid:
    """How the ranks stand: each one a replica, or replicas of a pipeline. Raises UsageError where they cannot."""
    if arguments.parallel == "data":
        return RankGrid(1, communicator.size)
    ranks, rest = divmod(communicator.size, arguments.replicas)
    if rest:
        raise UsageError(f"{communicator.size} ranks do not divide into {arguments.replicas} replicas of a pipeline")
    if ranks < 2:
        least = 2 * arguments.replicas
        raise UsageError("a pipeline needs at least 2 ranks; start "
                         + (f"{least} or more for {arguments.replicas} replicas" if arguments.replicas > 1 else
                            "it with mpiexec -n P, or give --ranks P"))
    return RankGrid(ranks, arguments.replicas)


def _check_flags(arguments: Any, communicator: Any) -> None:
    if arguments.parallel == "none":
        raise UsageError(f"{communicator.size} ranks were started, and each would train the whole model by itself; "
                         f"give --parallel data or --parallel pipeline, or start one process")
    asked = None if arguments.ranks is None else arguments.ranks * arguments.replicas
    if asked is not None and communicator.own_process and asked != communicator.size:
        replicas = f" and --replicas {arguments.replicas}" if arguments.replicas > 1 else ""
        raise UsageError(f"--ranks {arguments.ranks}{replicas}, but the launcher has started {communicator.size}; "
                         f"leave --ranks out")
    if arguments.parallel == "pipeline":
        _check_pipeline(arguments, communicator)
    else:
        scheduler_of(arguments)


def _check_pipeline(arguments: Any, communicator: Any) -> None:
    scheduler_of(arguments)
    _grid(arguments, communicator)


def _data(arguments: Any, recorded: Any, communicator: Any) -> Any:
    cost = communicator.gather(costs(arguments, recorded))[0]
    link = (Collective(communicator.size, LINK).line if arguments.costs == "analytic"
            else measure_link(communicator, recorded.device))
    return RankTrainer(recorded, cost, communicator, link, k=arguments.k, buckets=arguments.buckets,
                       trace=bool(arguments.trace or arguments.html))


def _pipeline(arguments: Any, recorded: Any, communicator: Any) -> Any:
    cost = communicator.gather(costs(arguments, recorded))[0]
    grid = _grid(arguments, communicator)
    link, sums = LINK, Collective(grid.replicas, LINK).line
    if arguments.costs != "analytic":
        link = measure_messages(communicator.host, grid)
        if grid.replicas > 1:
            sums = measure_link(communicator, recorded.device, communicator.group(grid.group(communicator.rank)))
    return PipelineTrainer(recorded, cost, communicator, link, sums=sums, chunks=arguments.chunks,
                           cap=arguments.activation_cap, trace=bool(arguments.trace or arguments.html))


def _dry_run(arguments: Any, trainer: Any, first: bool) -> int:
    plan = trainer.plan
    if first:
        record = {"model": arguments.model, "ranks": trainer.communicator.size,
                  "scheduler": arguments.scheduler, **intended(arguments, trainer.recorded), **plan.as_json()}
        if arguments.parallel == "data":
            found = data_parallel.figures(plan)
            record |= {"lower_bound_ms": found["lower_bound"] / 1000} if "lower_bound" in found else {}
            record |= {name: found[name] for name in ("hidden", "k") if name in found}
        show.emit(arguments, record,
                  lambda: plan.schedule.grid() + "\n" + show.table(("what", "value"), list(record.items())))
    trainer.run.close()
    return 0
