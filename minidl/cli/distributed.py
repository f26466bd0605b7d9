"""Training on ranks, data-parallel or as a pipeline: under a launcher, or as threads of one process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from copy import copy
from shutil import which
from typing import Any

from ..core.schedule import RankGrid, ScheduleError
from ..core.timeline import Timeline
from ..measuring.links import among_ranks, hold_to_cores, measure_link, measure_messages
from ..measuring.measure import of_ranks
from ..pricing.collectives import Collective
from ..pricing.cost import CostModel, Link
from ..runtime.comm import Communicator
from ..runtime.comm.loopback import run_ranks
from ..system import launcher, process
from ..training import checkpoint
from ..training.agreement import Disagreement, agree, together
from ..training.gossip_trainer import GossipTrainer
from ..training.pipeline_trainer import PipelineTrainer
from ..training.rank_trainer import RankTrainer
from ..training.recorded import Recorded
from ..training.same import device_of, identity, transport
from ..training.sums import between_tasks
from ..training.trainer import Trainer, interleaved
from . import show
from .flags import FLAGS, UsageError, asynchronous, hinted, job
from .inputs import costs, log_of, scheduler_of
from .ranks import job as on_ranks
from .runs import SUMS, begun, claimed, complete, resumed, steps_of
from .values import path

MOST = 64  #: the most ranks that run as threads of one process
#: flags that may differ between ranks: a machine's files, devices and cores, what only rank 0 prints or writes, and
#: those that give the number of steps, which is compared itself
OWN = {"--root", "--config", "--device", "--workers", "--lanes", "--json", "--save-costs", "--steps", "--epochs"}
LINK = Link(50.0, 1e3)  #: assumed where costs are computed: --latency 50 --bandwidth 1GB; microseconds, bytes in one
RECORDING = threading.Lock()  #: ranks of one process record in turn: models and data may be code that knows no threads


def train(read: Callable[[], Any]) -> int:
    """This process's part of a run under a launcher. `read` returns its flags, or raises an error that ends all ranks.
    Rank 0 prints."""
    with on_ranks() as communicator:
        if communicator.size < launcher.tasks():
            show.note(f"minidl: this Slurm job has {launcher.tasks()} tasks, and one process trains; write srun before "
                      f"the command to start them all")
        return _part(read, communicator)


def train_in_one_process(arguments: Any) -> int:
    """A run whose ranks are threads of this process: without a launcher, or for a debugger."""
    recordings: list[Recorded] = []
    return max(run_ranks(_threads(arguments), lambda rank: _part(lambda: copy(arguments), rank, recordings)))


def _threads(arguments: Any) -> int:
    """How many ranks run as threads. Raises UsageError if they cannot."""
    ranks, trains = int(arguments.ranks * arguments.replicas), arguments.command == "train"
    if ranks > MOST:
        raise UsageError(f"at most {MOST} ranks run as threads of one process, not {ranks}"
                         + "; start more with mpiexec" * trains)
    if arguments.device != "cpu":
        raise UsageError("--ranks runs ranks as threads of this process, on the CPU"
                         + f"; for {arguments.device}, start them with mpiexec" * trains)
    return ranks


def side_by_side(arms: Sequence[Any]) -> list[tuple[Trainer, Timeline | None]]:
    """The flags of the arms of a comparison as runs whose steps are interleaved, on one device, or with ranks as
    threads of this process: rank 0's trainer of each after its last step, and with --html the timeline of this step on
    all ranks."""
    first, alone = arms[0], arms[0].parallel == "none"
    if not alone and (first.ranks is None or (first.parallel == "pipeline" and first.ranks < 2)):
        raise UsageError("a pipeline needs at least 2 ranks; give --ranks P" if first.ranks else
                         "the number of ranks is missing; give --ranks P")
    if not alone and launcher.size() > 1:
        raise UsageError("compare runs ranks as threads of one process; start it without a launcher, with --ranks P")
    grid = RankGrid(1) if alone else _grid(first, _threads(first))
    recordings = [Recorded(job(arm), 0, grid.replicas) for arm in arms]
    own = [recordings] if alone else [[r.copy(grid.place(rank)[0]) for r in recordings] for rank in range(grid.size)]
    for recorded in own[0]:
        _ = recorded.test_data  # what does not fit shall not end the run at its first evaluation
    show.note(*recordings[0].remarks)
    title = f"training {first.model}{'' if alone else f' on {grid.size} ranks'} under {len(arms)} schedules"

    def part(communicator: Communicator | None) -> list[tuple[Trainer, Timeline | None]]:
        rank, trainers = 0 if communicator is None else communicator.rank, list[Any]()
        known: dict[Any, Any] = {}  # arms with equal tasks share measured costs; all share what links cost
        for arm, recorded in zip(arms, own[rank], strict=True):
            tasks = tuple(getattr(recorded.job, name) for name in ("update_every", *SUMS))
            if tasks not in known:
                told = copy(arm)
                told.save_costs = arm.save_costs if rank == 0 and not known else None
                told.side_sms = next((other.side_sms for other in arms if other.side_sms), None)
                known[tasks] = _measured(told, recorded, communicator)
            cost, (_, links) = known[tasks][0], next(iter(known.values()))
            try:
                trainers.append(_trainer(arm, recorded, communicator, cost, links))
            except ScheduleError as error:
                raise UsageError(f"{arm.scheduler}: {error}") from None
            show.note(*trainers[-1].plan.remarks if rank == 0 else ())
        steps = steps_of(first, trainers[0].recorded)
        with show.progress(title, steps) if rank == 0 else nullcontext() as done:
            interleaved(trainers, steps, done)
        for trainer in trainers if communicator is not None else ():
            trainer.finish()
        return [(t, None if not first.html else t.run.timeline if alone else t.run.timeline_of_all()) for t in trainers]

    return part(None) if alone else run_ranks(grid.size, part)[0]


def _part(read: Callable[[], Any], communicator: Any, recordings: list[Recorded] | None = None) -> int:
    """One rank's part. Returns exit code 2 on all ranks if they cannot start. `recordings`: of all ranks here."""
    try:
        with ExitStack() as held:
            return _train(read, communicator, held, recordings)
    except Disagreement as error:
        if communicator.rank == 0:
            show.note(f"minidl: {error}")
        return 2


def _recorded(arguments: Any, replica: int, replicas: int, recordings: list[Recorded] | None) -> Recorded:
    """The step of a replica, which is recorded once in a process: each rank that trains gets a copy, since it trains
    weights of its own."""
    if recordings is None:
        return Recorded(job(arguments), replica, replicas)
    with RECORDING:
        if not recordings:
            recordings.append(Recorded(job(arguments), 0, replicas))
        return recordings[0] if arguments.dry_run and not arguments.resume else recordings[0].copy(replica)


def _train(read: Callable[[], Any], communicator: Any, held: ExitStack, recordings: list[Recorded] | None) -> int:
    first = communicator.rank == 0

    def prepare() -> tuple[Any, dict[str, Any]]:
        arguments = read()
        if not first:
            arguments.json, arguments.save_costs = True, None  # no table, no bar, no file
        grid = _checked(arguments, communicator)
        if first:
            show.check_outputs(arguments)
        arguments.device = device_of(arguments.device, communicator)
        begun(arguments)
        recorded = _recorded(arguments, grid.place(communicator.rank)[0], grid.replicas, recordings)
        if first:
            held.enter_context(claimed(arguments))
            _ = recorded.test_data  # what does not fit shall not end the run at its first evaluation
        saved = resumed(arguments, recorded, (communicator.rank, communicator.size)) if arguments.resume else None
        steps, done, log = steps_of(arguments, recorded), saved.step if saved else 0, log_of(arguments)
        if log is not None and hinted(arguments) and len(log) < steps - done:
            raise UsageError(f"{arguments.replay} has {len(log)} steps, and this run {steps - done}; give --steps "
                             f"{done + len(log)}")
        return (arguments, recorded, saved, log), {
            **identity(recorded, _flags(arguments)), "the number of steps": steps,
            "the checkpoint's step": saved and saved.step}

    arguments, recorded, saved, log = agree(communicator, prepare)
    if arguments.checkpoint:
        together(communicator, lambda: checkpoint.check_shared(arguments.checkpoint))
    show.note(*recorded.remarks if first else ())
    if communicator.own_process and arguments.device == "cpu":
        hold_to_cores(communicator)
    summing = transport(arguments.transport, communicator, recorded.device)
    trainer = _trainer(arguments, recorded, summing, *_measured(arguments, recorded, summing), log)
    code = complete(arguments, trainer, f"training {arguments.model} on {communicator.size} ranks", saved)
    if summing is not communicator:
        summing.close()
    return code


def _flags(arguments: Any) -> dict[str, Any]:
    """The flags that must be equal on all ranks, since they meet where these say: their values; of a file or a folder,
    whether there is one."""
    served = {name: flag for name, flag in FLAGS.items() if "train" in flag.serves}
    values = {name: getattr(arguments, name[2:].replace("-", "_")) for name in served.keys() - OWN}
    return {name: bool(values[name]) if served[name].options.get("type") is path else values[name]
            for name in sorted(values)}


def _grid(arguments: Any, size: int) -> RankGrid:
    """The grid of the ranks: each one a replica, or replicas of a pipeline. Raises UsageError if they cannot."""
    if arguments.parallel == "data":
        return RankGrid(1, size)
    ranks, rest = divmod(size, arguments.replicas)
    if rest:
        raise UsageError(f"{size} ranks do not divide into {arguments.replicas} replicas of a pipeline")
    if ranks < 2:
        raise too_few(arguments)
    return RankGrid(ranks, arguments.replicas)


def too_few(arguments: Any) -> UsageError:
    """The error of a pipeline on fewer than two ranks; it needs no MPI."""
    return UsageError("a pipeline needs at least 2 ranks; start "
                      + (f"{2 * arguments.replicas} or more for {arguments.replicas} replicas"
                         if arguments.replicas > 1 else "it with mpiexec -n P, or give --ranks P")
                      + ("" if which("mpiexec") else "; there is no mpiexec here: pip install 'minidl[mpich]'"))


def _checked(arguments: Any, communicator: Any) -> RankGrid:
    """The grid of the ranks, for flags that go with it. Raises UsageError."""
    if arguments.parallel == "none":
        raise UsageError(f"{communicator.size} ranks were started, and each would train the whole model by itself; "
                         f"give --parallel data or --parallel pipeline, or start one process")
    asked = None if arguments.ranks is None else arguments.ranks * arguments.replicas
    if asked is not None and communicator.own_process and asked != communicator.size:
        replicas = f" and --replicas {arguments.replicas}" if arguments.replicas > 1 else ""
        raise UsageError(f"--ranks {arguments.ranks}{replicas}, but the launcher has started {communicator.size}; "
                         f"leave --ranks out")
    scheduler_of(arguments)
    if asynchronous(arguments):
        for told, why in ((arguments.checkpoint, "keeps no checkpoint, since ranks have weights of their own"),
                          (arguments.trace or arguments.html, "records no timeline"),
                          (arguments.device != "cpu", "mixes layers on the CPU alone")):
            if told:
                raise UsageError(f"{arguments.scheduler} {why}")
    return _grid(arguments, communicator.size)


def _measured(arguments: Any, recorded: Any, communicator: Any) -> tuple[CostModel, dict[str, Any]]:
    """The costs of tasks, and what links cost as arguments of a trainer; equal on all ranks."""
    if communicator is None:
        return costs(arguments, recorded), {}
    # where ranks outnumber their machine's cores, as many measure as it has: the others would only be in their way
    measures = communicator.local_rank < (os.cpu_count() or 1)
    found = communicator.gather(costs(arguments, recorded) if measures else None)
    cost, grid = of_ranks([each for each in found if each is not None]), _grid(arguments, communicator.size)
    analytic, device = arguments.costs == "analytic", recorded.device
    if arguments.parallel == "data":
        return cost, {"link": Collective(grid.size, LINK).line if analytic else
                      _sums(arguments, recorded, among_ranks(cost, communicator), communicator)}
    link, sums = LINK, Collective(grid.replicas, LINK).line
    if not analytic:
        link = measure_messages(communicator.host, grid)
        if grid.replicas > 1:
            sums = measure_link(communicator, device, communicator.group(grid.group(communicator.rank)),
                                lane=not device.captures)
    return cost, {"link": link, "sums": sums}


def _sums(arguments: Any, recorded: Any, cost: CostModel, communicator: Any) -> tuple[float, float]:
    """Microseconds of a sum over data-parallel ranks, and of each of its bytes, with these costs of a rank's tasks."""
    link = measure_link(communicator, recorded.device, lane=cost.cores == 1)
    if (cost.cores != 1 or not communicator.own_core or arguments.costs != "measured" or asynchronous(arguments)
        or recorded.job.memory_limit is not None or recorded.job.shard or process.debug_level()):
        return link  # trial steps need this machine's costs and memory for whole states, and would print when debugged
    with show.progress("measuring sums", 1.0) as done:
        return between_tasks(recorded.graph, cost, link, communicator, recorded.device, done)


def _trainer(arguments: Any, recorded: Any, communicator: Any, cost: CostModel, links: Mapping[str, Any],
             log: Any = None) -> Any:
    """`links`: as by `_measured`. `log`: to replay."""
    traced = bool(arguments.trace or arguments.html)
    if communicator is None:
        return Trainer(recorded, cost, trace=traced)
    if arguments.parallel == "data":
        kind: Any = GossipTrainer if asynchronous(arguments) else RankTrainer
        trainer = kind(recorded, cost, communicator, k=arguments.k, buckets=arguments.buckets, trace=traced, **links)
    else:
        trainer = PipelineTrainer(recorded, cost, communicator, chunks=arguments.chunks, cap=arguments.activation_cap,
                                  trace=traced, **links)
    trainer.logs_order = bool(arguments.log_order)
    if isinstance(trainer, GossipTrainer) and log is not None:
        trainer.replays = log, arguments.replay
    elif log is not None:
        trainer.replay(log, arguments.replay)
    return trainer
