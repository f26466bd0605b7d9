"""Plans: a graph, a schedule of it, and what is known of them before anything runs.

A plan is data. `minidl.plan` makes plans and proves each one, so a plan that exists can run and is within its limits. A
plan knows no device, and only the name of its policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from .graph import Ints, TaskGraph
from .passes.send_receive import add_communication, count_waits, talks
from .pricing.carried import Carried
from .pricing.cost import CostModel
from .pricing.ranks import Iteration, iteration
from .pricing.simulation import Clock, Lanes, around, simulate, times
from .program import Program, check_limit, lower
from .schedule import Schedule
from .tasks import COLLECTIVE, unpack
from .views.timeline import Timeline

if TYPE_CHECKING:
    from .schedulers.pipeline.placement import Placement

HISTORIES = ("exact", "average", "none")  #: the weights on which a stale backward runs
CHAINED = 6  #: how many iterations of a pipeline are chained; the period is the time of the last one


@dataclass(frozen=True)
class Machine:
    """The resources of a plan. `ranks`: processes that train together; the cost model has the link between them.
    `replicas`: the number of pipelines with `ranks` ranks each that train together, each on its share of every batch.

    `memory_limit`: the most bytes per rank. `activation_cap`: the most live activations per rank of a pipeline, in
    units of a full stage. `collective`: from {unit: bytes that travel} to the time of their sum over the ranks, in the
    costs' unit; None where the costs already include it.
    """

    ranks: int = 1
    memory_limit: int | None = None
    activation_cap: float | None = None
    collective: Callable[[Mapping[int, int]], float] | None = None
    replicas: int = 1

    @property
    def size(self) -> int:
        """The ranks of all replicas."""
        return self.ranks * self.replicas


@dataclass(frozen=True)
class Versions:
    """The weight versions of a stale schedule: entry i reads version `read[i]`; an update reads the version that it
    changes.

    Version 0 is the newest one when a step begins and all updates of the steps before are done; stage s has version k +
    1 as soon as its weight gradient of micro-batch `(k + 1) * every - 1` is done. In a run that never drains, version
    -1 is of one update before; when the run begins, it equals version 0. `history`: the weights on which a backward
    runs. "exact": the version that its forward read, which is kept. "average": that version, rebuilt from a moving
    average of the weights. "none": the newest version, so that none is kept.
    """

    read: Ints
    every: int = 1
    history: str = "exact"

    def __post_init__(self) -> None:
        if self.history not in HISTORIES:
            raise ValueError(f"unknown history {self.history!r}; known: {', '.join(HISTORIES)}")


@dataclass(frozen=True)
class Plan:
    """One iteration on one device or on ranks, as it repeats. `cost` is that of its tasks.

    `ranks`: as many processes run it, those of all replicas. The schedule is one replica's (`minidl.rank_grid`): that
    of as many ranks, or of one where all are alike (data-parallel), or what lies between.
    `notes`: the policy's options and what else it has to say. `remarks`: what a person should know, a line each. The
    proof counts `peak_bytes`, where the graph is a recorded one: of each rank of a replica.

    Of a pipeline: `placement` says which rank has which stage; `cap`: live full-stage activations that a rank may hold,
    of which the share `kept` stays from an output gradient to its weight gradient; `peaks` is how many it holds;
    `slices`: in so many each micro-batch is cut along its sequence, numbered as micro-batches of the plan;
    `versions` and `steady`: what a stale one reads, and its time per mini-batch. `limit`: bytes that a rank may hold.
    """

    scheduler: str
    graph: TaskGraph
    schedule: Schedule
    cost: CostModel
    ranks: int = 1
    limit: int | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    peak_bytes: tuple[int, ...] | None = None
    placement: Placement = None  # type: ignore[assignment]  # of a pipeline only
    micro_batches: int = 1
    cap: float | None = None
    kept: float = 1.0
    slices: int = 1
    peaks: tuple[float, ...] = ()
    versions: Versions | None = None
    steady: float | None = None

    def __repr__(self) -> str:
        """`<Plan zb_h1: 96 tasks on 4 ranks, a step of 27>`."""
        ranks = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        time = f"{self.predicted_step_ms:.4g} ms" if self.cost.unit else f"{self.step:g}"
        return f"<Plan {self.scheduler}: {len(self.graph)} tasks{ranks}, a step of {time} predicted>"

    def _repr_svg_(self) -> str:
        """The predicted timeline as a picture, for notebooks."""
        return self.timeline._repr_svg_()

    @property
    def synthetic(self) -> bool:
        """Whether the plan is for a pipeline on given times, which has nothing to run and no programs."""
        return self.placement is not None and not self.graph.launches

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """The program of each rank. Raises ScheduleError where the schedule is wrong."""
        mine = self.distinct_programs
        if len(mine) == 1:
            return tuple(replace(mine[0], rank=rank) for rank in range(self.ranks))
        return (*mine, *(lower(*self.with_messages, ranks=self.ranks, rank=rank)
                         for rank in range(len(mine), self.ranks)))

    @cached_property
    def distinct_programs(self) -> tuple[Program, ...]:
        """The programs of one replica; the others run the same ones."""
        return tuple(lower(*self.with_messages, ranks=self.ranks, rank=rank)
                     for rank in range(max(1, self.schedule.ranks)))

    def lowered(self) -> Plan:
        """The plan with its programs and their memory needs. Raises ScheduleError where one is wrong, and
        MemoryLimitError where one is above the limit."""
        programs = self.distinct_programs
        for program in programs:
            check_limit(program, self.limit)
        found = replace(self, peak_bytes=tuple(program.peak_bytes for program in programs),
                        schedule=programs[0].schedule if len(programs) == 1 else self.schedule)
        vars(found)["distinct_programs"] = programs  # so that they are made once
        return found

    @cached_property
    def with_messages(self) -> tuple[TaskGraph, Schedule]:
        """Graph and schedule with sends and receives as tasks. Raises GraphError as `add_communication` does."""
        if self.schedule.ranks == 1 or talks(self.schedule):
            return self.graph, self.schedule
        return add_communication(self.graph, self.schedule)

    @cached_property
    def waits(self) -> int:
        """The number of event waits within ranks: of one lane for another, of a send for its result, of the first
        reader for its receive."""
        if not self.synthetic:
            return sum(len(program.body[0].waits) for program in self.distinct_programs)
        if talks(self.schedule):
            return len(self.schedule.waits(self.graph))
        return count_waits(self.graph, self.schedule)

    @cached_property
    def priced(self) -> Iteration:
        """What the simulator times: an iteration of the programs; for a synthetic pipeline its tasks, and its messages
        if their bandwidth counts, since they queue."""
        if not self.synthetic:
            return iteration(self.distinct_programs)
        graph, schedule = (self.graph, self.schedule) if self.cost.link.bandwidth is None else self.with_messages
        return Iteration(graph, schedule, Carried())

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted timeline."""
        return simulate(self.priced.graph, self.priced.schedule, self.cost)

    @cached_property
    def period(self) -> float:
        """Time per iteration if iterations follow each other without a barrier between ranks, in the costs' unit."""
        if self.steady is not None:
            return self.steady
        graph, schedule, carried = self.priced
        lanes = Lanes.of(graph, schedule)
        clock = Clock.of(graph, self.cost, lanes, carried)
        if self.placement is not None or self.schedule.ranks > 1:
            return float(np.diff(clock.ends(lanes, CHAINED))[-1])
        return clock.period(lanes)

    @cached_property
    def step(self) -> float:
        """Time of a step, in the costs' unit. Replicas begin the next step while they communicate, and so do the ranks
        of a pipeline that validates a step in the next one; other plans end the step first."""
        replicas = self.placement is None and bool(np.isin(unpack(self.schedule.keys).kind, COLLECTIVE).any())
        if replicas or self.graph.late.any():
            return self.period + self.cost.step
        return self.timeline.makespan + self._around + self.cost.step

    @property
    def _around(self) -> float:
        """What the lanes of one device add to a step."""
        if self.ranks > 1 or self.synthetic:
            return 0.0
        graph, schedule, _ = self.priced
        return around(Lanes.of(graph, schedule), times(graph, schedule, self.cost).end, self.cost)

    @property
    def predicted_step_ms(self) -> float:
        """The time of a step in milliseconds, for costs in microseconds."""
        return self.step / 1000

    def as_json(self) -> dict[str, Any]:
        """The keys that all plans have. Given times have no unit, so they give no milliseconds."""
        return {"tasks": len(self.graph), "edges": self.graph.edges, "waits": self.waits,
                "predicted_step_ms": round(self.predicted_step_ms, 4) if self.cost.unit else None,
                "peak_bytes": max(self.peak_bytes) if self.peak_bytes else None}
