"""Data parallelism: schedules priced on given layer times or on a network's costs and a link, and training on MPI ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from ..collectives import Collective
from ..cost import CostModel, Link
from ..graph import TaskGraph
from ..passes import unroll
from ..program import lower
from ..schedule import Schedule
from ..schedulers import data_parallel
from ..schedulers.layer_times import layers, with_communication
from ..simulation import simulate as price
from . import show
from .flags import UsageError, job, nearest

SHOWN = 4  #: iterations in a row that are drawn


def check_scheduler(name: str) -> None:
    if name not in data_parallel.POLICIES:
        raise UsageError(f"unknown data-parallel scheduler {name!r}; {nearest(name, list(data_parallel.POLICIES))}")


def simulate(arguments: Any) -> int:
    """Period, lower bound and how much of the communication is hidden."""
    check_scheduler(arguments.scheduler)
    if arguments.k is not None and arguments.scheduler != "reverse_first_k":
        raise UsageError(f"--k is for reverse_first_k; scheduler {arguments.scheduler} takes none")
    graph, cost = _of_network(arguments) if arguments.model else _of_times(arguments)
    limit = arguments.memory_limit
    plan = data_parallel.plan(arguments.scheduler, graph, cost, arguments.k,
                              None if limit is None else lambda schedule: lower(graph, schedule).peak_bytes <= limit)
    if limit is not None:
        lower(plan.graph, plan.schedule, memory_limit=limit)
    if arguments.svg or arguments.trace:
        _draw(arguments, plan.graph, plan.schedule, cost)
    record = {"scheduler": arguments.scheduler, "period": plan.period, "lower_bound": plan.bound, "compute": plan.compute,
              "communication": plan.communication, "hidden": plan.hidden}
    if arguments.scheduler == "reverse_first_k":
        record["k"] = plan.k
    show.emit(arguments, record, lambda: _text(plan, record, cost.unit))
    return 0


def _of_times(arguments: Any) -> tuple[TaskGraph, CostModel]:
    times = {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in ("forward", "output_grad", "weight_grad", "comm")}
    missing = [flag for flag, value in times.items() if value is None]
    if missing:
        raise UsageError(f"give the layers' times with {', '.join(missing)}, or a network with --model")
    lists = {flag: np.atleast_1d(np.asarray(value, np.float64)).tolist() for flag, value in times.items()}
    if len({len(v) for v in lists.values()}) > 1:
        raise UsageError(f"one time for each layer is needed: {', '.join(f'{flag} has {len(v)}' for flag, v in lists.items())}")
    if any(not np.isfinite(t) or t < 0 for t in lists["--comm"]):
        raise UsageError("--comm: a time must be a finite number >= 0")
    *compute, comm = lists.values()
    graph, cost = layers(*compute, parts=arguments.parts)
    buckets = min(2, len(comm)) if arguments.buckets is None else arguments.buckets
    graph = data_parallel.prepare(arguments.scheduler, graph, buckets=buckets, part_bytes=1)
    return graph, with_communication(graph, cost, lambda sizes: sum(comm[u] * n / arguments.parts for u, n in sizes.items()))


def _of_network(arguments: Any) -> tuple[TaskGraph, CostModel]:
    from ..training import Recorded
    from .training import costs

    if not arguments.ranks:
        raise UsageError("over how many ranks? give --ranks P")
    recorded = Recorded(job(arguments, "in_order"))
    link = Link(arguments.latency, None if arguments.bandwidth is None else arguments.bandwidth / 1e6)  # microseconds
    collective = Collective(arguments.ranks, link, arguments.collective, arguments.servers)
    graph = data_parallel.prepare(arguments.scheduler, recorded.graph, buckets=arguments.buckets)
    cost = costs(arguments, recorded)
    return graph, with_communication(graph, cost, lambda sizes: collective.time(sum(sizes.values())))


def _text(plan: data_parallel.Plan, record: dict[str, Any], unit: str) -> str:
    grid = lower(plan.graph, plan.schedule).schedule.grid() + "\n\n" if len(plan.graph) <= 200 else ""
    meaning = {"period": "per step, in the steady state", "lower_bound": "no order is faster", "hidden": "share of the communication",
               "k": "layers whose weight gradients wait"}
    rows = [(name, value, meaning.get(name, "")) for name, value in record.items() if name != "scheduler"]
    return grid + show.table((f"{record['scheduler']}{f' ({unit})' if unit else ''}", "", "meaning"), rows)


def _draw(arguments: Any, graph: TaskGraph, schedule: Schedule, cost: CostModel) -> None:
    from ..draw import timeline_svg
    from ..files import write_atomic

    timeline = price(unroll(graph, SHOWN), schedule.repeated(SHOWN), cost)
    if arguments.svg:
        write_atomic(arguments.svg, timeline_svg(timeline))
    if arguments.trace:
        timeline.save(arguments.trace)


# --------------------------------------------------------------------------------------------------------------- training
def train(read: Callable[[], Any]) -> int:
    """This process's part of a run under a launcher; `read` gives its flags, or raises what is wrong with them, which all ranks
    then say together. Rank 0 speaks."""
    from ..data_parallel import Disagreement
    from .ranks import job as on_ranks

    with on_ranks() as communicator:
        try:
            with ExitStack() as held:
                return _train(read, communicator, held)
        except Disagreement as error:
            if communicator.rank == 0:
                show.note(f"minidl: {error}")
            return 2


def _train(read: Callable[[], Any], communicator: Any, held: ExitStack) -> int:
    from .. import checkpoint
    from ..data_parallel import RankTrainer, agree, device_of, identity, measure_link, transport
    from ..training import Recorded
    from . import training

    first = communicator.rank == 0

    def prepare() -> tuple[Any, dict[str, Any]]:
        arguments = read()
        if not first:
            arguments.json, arguments.save_costs = True, None  # no table, no bar, no file
        _check_flags(arguments, communicator)
        if first:
            training.check_outputs(arguments)
        arguments.device = device_of(arguments.device, communicator)
        recorded = Recorded(job(arguments), communicator.rank, communicator.size)
        if first:
            held.enter_context(training.claimed(arguments))
        saved = training.resumed(arguments, recorded) if arguments.resume else None
        alike = {**identity(recorded), "the number of steps": training.steps_of(arguments, recorded), "k": arguments.k,
                 "the number of buckets": arguments.buckets, "the source of costs": arguments.costs, "the transport": arguments.transport,
                 "the checkpoint's step": saved and saved.step, "--dry-run": arguments.dry_run}
        return (arguments, recorded, saved), alike

    arguments, recorded, saved = agree(communicator, prepare)
    summing = transport(arguments.transport, communicator, recorded.device)
    cost = communicator.gather(training.costs(arguments, recorded))[0]
    link = (50.0, 1e-3) if arguments.costs == "analytic" else measure_link(summing, recorded.device)
    if arguments.dry_run:
        return _dry_run(arguments, RankTrainer(recorded, cost, summing, link, k=arguments.k, buckets=arguments.buckets), first)
    trainer = RankTrainer(recorded, cost, summing, link, k=arguments.k, buckets=arguments.buckets, trace=bool(arguments.trace))
    if first and saved is not None:
        show.note(f"resumed from {arguments.checkpoint} after step {saved.step}")
    done_before, steps = saved.step if saved else 0, training.steps_of(arguments, recorded)
    with show.progress(f"training {arguments.model} on {communicator.size} ranks", steps) as done:
        for step in range(done_before + 1, steps + 1):
            trainer.step()
            if first and arguments.checkpoint and (step == steps or step % recorded.train_data.steps_per_epoch == 0):
                checkpoint.save(arguments.checkpoint, recorded.model, recorded.optimizer, step=step, loader=recorded.train_data)
            done(step)
    trainer.finish()
    if first:
        record = training.run_record(trainer.job, trainer) | {"ranks": communicator.size}
        if trainer.plan.k or arguments.scheduler == "reverse_first_k":
            record["k"] = trainer.plan.k
        if arguments.trace and trainer.run.timeline is not None:
            trainer.run.timeline.save(arguments.trace)
        show.emit(arguments, record, lambda: training._summary(record))
    communicator.gather(None)  # nobody leaves before rank 0 has said everything
    if summing is not communicator:
        summing.close()
    return 0


def _check_flags(arguments: Any, communicator: Any) -> None:
    from . import training

    if arguments.parallel == "none":
        raise UsageError(f"{communicator.size} ranks were started, of which each would train the whole by itself; give --parallel data, or start one "
                         f"process")
    if arguments.parallel != "data":
        raise UsageError(training.NO_PIPELINE)
    check_scheduler(arguments.scheduler)
    if arguments.k is not None and arguments.scheduler != "reverse_first_k":
        raise UsageError(f"--k is for reverse_first_k; scheduler {arguments.scheduler} takes none")
    if arguments.transport != "staged" and not arguments.device.startswith("cuda"):
        raise UsageError(f"--transport {arguments.transport} is for gradients on a GPU; give --device cuda too")
    training.check_run(arguments)


def _dry_run(arguments: Any, trainer: Any, first: bool) -> int:
    plan = trainer.plan
    if first:
        record = {"model": arguments.model, "ranks": trainer.communicator.size, "scheduler": arguments.scheduler, "tasks": len(plan.graph),
                  "edges": plan.graph.edges, "waits": trainer.prediction.waits, "predicted_step_ms": trainer.prediction.predicted_step_ms,
                  "lower_bound_ms": plan.bound / 1000, "hidden": plan.hidden, "k": plan.k, "peak_bytes": trainer.prediction.peak_bytes}
        show.emit(arguments, record, lambda: trainer.run.schedule.grid() + "\n" + show.table(("what", "value"), list(record.items())))
    trainer.run.close()
    return 0
