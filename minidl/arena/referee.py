"""The referee: reads the text of an order, proves it, prices it, and ranks what holds. It runs nobody's code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import schedulers
from ..core.columns import grouped
from ..core.machine import PlanError
from ..core.placement import PipelineError
from ..core.schedule import ScheduleError
from ..core.tasks import GraphError
from ..plans.memory import MemoryLimitError
from ..plans.plan import PipelinePlan
from ..pricing.cost import CostError
from ..schedulers.pipeline import Price, price, read_schedule
from .problems import Task

BAD = (ScheduleError, PipelineError, PlanError, GraphError, CostError, MemoryLimitError, OverflowError, MemoryError)


@dataclass(frozen=True)
class Entry:
    """An entry's result on one problem: its proved plan with price and bytes, or `why` it has none. `own`: not a
    published policy's."""

    name: str
    own: bool
    plan: PipelinePlan | None = None
    price: Price | None = None
    bytes: int = 0
    why: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[float, ...]:
        """Its place: by period, then peak, then bytes, then makespan."""
        assert self.price is not None
        return tuple(float(f"{value:.12g}") for value in (self.price.period, max(self.price.peak_activations),
                                                          self.bytes, self.price.makespan))


def judge(task: Task, text: str, name: str, seconds: float = 0.0) -> Entry:
    """The entry whose order is this text, proved and priced; whatever the text is, nothing is raised."""
    try:
        given = schedulers.Scheduler(name, "pipeline", read_schedule(text, name))
        return _entered(task, schedulers.plan(task.pipeline, given, None, task.machine), name, True, seconds)
    except BAD as error:
        message = error.message if isinstance(error, ScheduleError) else str(error)
        return Entry(name, True, why=" ".join(message.split())[:300] or type(error).__name__, seconds=seconds)


def _entered(task: Task, plan: Any, name: str, own: bool, seconds: float = 0.0) -> Entry:
    """The entry with this proved plan. Raises PipelineError for one on older weights."""
    assert isinstance(plan, PipelinePlan)
    if plan.stale:
        raise PipelineError("it trains on older weights, so its period is of a mini-batch and not of a step")
    place, micro_batch = plan.placement, np.arange(plan.micro_batches)
    crosses = (np.diff(place.table, axis=1) != 0).sum(axis=1)
    links = 2 * int(crosses[place.direction(micro_batch, plan.micro_batches)].sum())  # activations, then gradients
    return Entry(name, own, plan, price(plan), links * task.message_bytes, seconds=seconds)


def published(task: Task, names: Sequence[str] | None = None) -> Iterator[Entry]:
    """Our own policies on a problem: the synchronous ones that need no time limit, or only `names`."""
    for name in names if names is not None else schedulers.names("pipeline"):
        found = schedulers.find(name, "pipeline")
        if names is None and (found.staged.stale or found.staged.sliced or "time_limit" in found.options):
            continue
        try:
            yield _entered(task, schedulers.plan(task.pipeline, found, None, task.machine), name, False)
        except BAD as error:
            yield Entry(name, False, why=str(error).splitlines()[0].removeprefix(f"{name}: "))


def ranked(entries: Sequence[Entry]) -> list[tuple[int, Entry]]:
    """The entries that hold with their places, the best first; equal ones share a place."""
    valid = sorted((e for e in entries if e.plan is not None), key=lambda e: (e.key, e.own, e.name))
    return [(1 + sum(other.key < e.key for other in valid), e) for e in valid]


def board(results: Sequence[tuple[Task, Sequence[Entry]]]) -> list[dict[str, Any]]:
    """Entries over all problems, the best first: `score` is the mean of bound / period, 0 for a problem without a
    valid order."""
    own = {e.name: e.own for _, entries in results for e in entries}
    scores = grouped((e.name, 0.0 if e.price is None else task.bound / e.price.period)
                     for task, entries in results for e in entries)
    rows = [{"entry": name, "own": own[name], "solved": sum(s > 0 for s in each), "score": sum(each) / len(results)}
            for name, each in scores.items()]
    return sorted(rows, key=lambda row: (-float(f"{row['score']:.12g}"), row["entry"]))
