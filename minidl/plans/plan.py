"""Plans: a graph, a schedule of it, and what is known of them before anything runs.

A plan is data. `minidl.plan` makes plans and proves each one, so a plan that exists can run and is within its limits. A
plan knows no device, and only the name of its policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from ..core.columns import Ints
from ..core.graph import TaskGraph
from ..core.placement import Placement, Versions
from ..core.schedule import Schedule, ScheduleError
from ..core.tasks import COLLECTIVE, SENDS, unpack
from ..core.timeline import Timeline
from ..passes.choices import NOTHING, Choices
from ..passes.hint import Hint, sums_apart
from ..passes.send_receive import add_communication, count_waits, talks
from ..pricing.cost import CostModel
from ..pricing.simulation import CHAINED, Carried, Clock, Lanes, around, simulate, times
from .program import Division, Program, check_limit, divide
from .ranks import Iteration, alone, iteration


@dataclass(frozen=True)
class Plan:
    """One iteration on one device or on ranks, as it repeats. `cost`: of its tasks.

    `ranks`: the number of processes, all replicas included. The schedule is one replica's (`minidl.rank_grid`): for as
    many ranks, for one if all are alike (data-parallel), or between. `limit`: the most bytes per rank.
    `notes`: the policy's options and findings. `remarks`: facts that a person should know, a line each. `within`: the
    policy's plan within a smaller limit, if it keeps what it has found.
    `choices`: what was chosen besides the order. `chosen_sums`: ranks that are all alike take the order of their sums
    as a hint; what is predicted is the order's time.
    """

    scheduler: str
    graph: TaskGraph
    schedule: Schedule
    cost: CostModel
    ranks: int = 1
    limit: int | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    within: Callable[[int], Plan] | None = None
    choices: Choices = NOTHING
    chosen_sums: bool = False

    def __repr__(self) -> str:
        """`<Plan zb_h1: 96 tasks on 4 ranks, a step of 27 predicted, chunks 2>`."""
        ranks = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        unit = self.cost.unit
        time = f"{self.predicted_step_ms:.4g} ms" if unit == "us" else f"{self.step:g} {unit}".rstrip()
        return f"<Plan {self.scheduler}: {len(self.graph)} tasks{ranks}, a step of {time} predicted" + (
            f", {self.choices}>" if str(self.choices) else ">")

    def _repr_svg_(self) -> str:
        """The predicted timeline as a picture, for notebooks."""
        return self.timeline._repr_svg_()

    @property
    def synthetic(self) -> bool:
        """Whether it is on given times: it has nothing to run, and no programs."""
        return False

    @property
    def stale(self) -> bool:
        """Whether tasks read older weights or values than in one process."""
        return bool(self.notes.get("stale"))

    @cached_property
    def division(self) -> Division:
        """The plan's tasks by rank, with messages. Raises ScheduleError if the schedule is wrong."""
        return divide(*self.with_messages, self.ranks, self.chosen_sums)

    def program(self, rank: int = 0) -> Program:
        """One rank's program, which is lowered once; data-parallel ranks share one. Raises ScheduleError."""
        found = self._programs.get(rank)
        if found is None:
            keys, hint = self.schedule.keys, self._hinted(rank)
            found = (replace(self.program(), rank=rank) if rank and self.division.grid.ranks == 1
                     else replace(self.division.program(rank), polls=self.cost.cores == 1,
                                  hint=hint, sums=keys[np.isin(unpack(keys).kind, COLLECTIVE)]
                                  if self.chosen_sums else None))
            self._programs[rank] = found
        return found

    def realised(self, orders: Sequence[Sequence[int]]) -> Schedule:
        """A step of a run under a hint, as a schedule: the tasks of each rank, or its sums, by key in the order in
        which they ran. Raises ScheduleError for an order that no such run has."""
        own, sums = self.schedule, np.array(orders[0], np.int64)
        if any([*order] != [*orders[0]] for order in orders):
            raise ScheduleError("ranks start sums in different orders")
        lanes = [sums if np.isin(unpack(keys).kind, COLLECTIVE).all() else keys
                 for keys in map(own.order, range(len(own.lanes)))]
        return Schedule.of_keys(own.lanes, lanes, notes=own.notes).validate(self.program().graph)

    def _hinted(self, rank: int) -> Ints | None:
        """The keys of a rank's tasks in the order of a hint; None if its lanes keep their order."""
        return None

    @cached_property
    def _programs(self) -> dict[int, Program]:
        return {}

    @property
    def programs(self) -> tuple[Program, ...]:
        """The program of each rank."""
        return tuple(map(self.program, range(self.ranks)))

    @property
    def distinct_programs(self) -> tuple[Program, ...]:
        """The programs of one replica; the others run the same ones."""
        return tuple(map(self.program, range(self.division.grid.ranks)))

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Bytes of each rank of a replica; none on given times. Lowers all ranks."""
        return () if self.synthetic else tuple(program.peak_bytes for program in self.distinct_programs)

    def divided(self) -> Self:
        """The plan after the proof that ranks can run it and are within its limit. Raises ScheduleError if they
        cannot, and MemoryLimitError for one above the limit; only a limit needs the memory of all ranks."""
        if self.limit is not None:
            for program in self.distinct_programs:
                check_limit(program, self.limit)
        if self.schedule.ranks > 1:
            assert self.division
            return self
        found, program = copy(self), self.program()  # the copy keeps what has been derived
        vars(found)["schedule"] = (program.schedule if not self.chosen_sums
                                   else replace(self, chosen_sums=False).program().schedule)
        return found

    def with_known(self, **known: Any) -> Self:
        """The plan with some of its fields or properties, which are known from elsewhere; nothing that has been derived
        is derived again."""
        found = copy(self)
        vars(found).update(known)
        return found

    @cached_property
    def with_messages(self) -> tuple[TaskGraph, Schedule]:
        """Graph and schedule with sends and receives as tasks. Raises GraphError as `add_communication` does."""
        if self.chosen_sums:
            return self.graph, sums_apart(self.schedule)
        if self.schedule.ranks == 1 or talks(self.schedule):
            return self.graph, self.schedule
        return add_communication(self.graph, self.schedule)

    @cached_property
    def waits(self) -> int:
        """The number of event waits within ranks: of one lane for another, of a send for its result, of the first
        reader for its receive."""
        if self.synthetic:
            return (len(self.schedule.waits(self.graph)) if talks(self.schedule)
                    else count_waits(self.graph, self.schedule))
        return sum(len(program.body[0].waits) for program in self.distinct_programs)

    @cached_property
    def priced(self) -> Iteration:
        """An iteration of the programs, which the simulator times. On given times its tasks, and its messages if their
        bandwidth counts, since they queue."""
        if self.chosen_sums:
            return replace(self, chosen_sums=False).priced
        if self.synthetic:
            graph, schedule = (self.graph, self.schedule) if self.cost.link.bandwidth is None else self.with_messages
            return Iteration(graph, schedule, Carried())
        return iteration(self.division) if self.division.grid.ranks > 1 else alone(self.program())

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted timeline."""
        return simulate(self.priced.graph, self.priced.schedule, self.cost)

    @cached_property
    def period(self) -> float:
        """Time per iteration if iterations follow each other without a barrier between ranks, in the costs' unit."""
        return self._period(chained=self.schedule.ranks > 1)

    def _period(self, chained: bool) -> float:
        graph, schedule, carried = self.priced
        lanes = Lanes.of(graph, schedule)
        clock = Clock.of(graph, self.cost, lanes, carried)
        return float(np.diff(clock.ends(lanes, CHAINED))[-1]) if chained else clock.period(lanes)

    @cached_property
    def step(self) -> float:
        """Time of a step, in the costs' unit. Ranks that communicate begin the next step without a barrier; one device
        ends the step first."""
        if self.graph.late.any() or np.isin(unpack(self.schedule.keys).kind, COLLECTIVE).any():
            return self.period + self.cost.step
        around_it = 0.0
        if self.ranks == 1:  # the time that the lanes of one device add to a step
            graph, schedule, _ = self.priced
            around_it = around(Lanes.of(graph, schedule), times(graph, schedule, self.cost).end, self.cost)
        return self.timeline.makespan + around_it + self.cost.step

    @property
    def predicted_step_ms(self) -> float:
        """The time of a step in milliseconds, for costs in microseconds."""
        return self.step / 1000

    def as_json(self) -> dict[str, Any]:
        """The keys that all plans have. Times in other units than microseconds give no milliseconds."""
        return {"tasks": len(self.graph), "edges": self.graph.edges, "waits": self.waits,
                "predicted_step_ms": round(self.predicted_step_ms, 4) if self.cost.unit == "us" else None,
                "peak_bytes": max(self.peak_bytes, default=None),
                "activation_peak_bytes": None if self.synthetic else max(
                    part.memory.activation_bytes for program in self.distinct_programs for part in program.parts)}


@dataclass(frozen=True, repr=False)
class PipelinePlan(Plan):
    """A plan whose ranks hold stages of a network, or of a pipeline on given times.

    `placement`: the rank of each stage. `cap`: the most live activations per rank, in full stages; `kept`: the fraction
    of one that is still held between O and W; `peaks`: the most that each rank holds. `slices`: the number of sequence
    slices per micro-batch, which are numbered as micro-batches. `versions` and `steady`: the weights that a stale plan
    reads, and its time per mini-batch. `hint`: ranks take the order as a hint; what is predicted is the order's time.
    """

    placement: Placement = field(kw_only=True)
    micro_batches: int = 1
    cap: float | None = None
    kept: float = 1.0
    slices: int = 1
    peaks: tuple[float, ...] = ()
    versions: Versions | None = None
    steady: float | None = None
    hint: Hint | None = None

    @cached_property
    def fixed(self) -> PipelinePlan:
        """The plan whose ranks keep the order."""
        return self if self.hint is None else replace(self, hint=None)

    @cached_property
    def applied(self) -> tuple[TaskGraph, Schedule]:
        """Graph and schedule without messages, a hint as what remains of the order."""
        return (self.graph, self.schedule) if self.hint is None else self.hint.applied(self.graph, self.schedule)

    @cached_property
    def with_messages(self) -> tuple[TaskGraph, Schedule]:
        return super().with_messages if self.hint is None else add_communication(*self.applied, apart=True)

    @cached_property
    def priced(self) -> Iteration:
        return super().priced if self.hint is None else self.fixed.priced

    def _hinted(self, rank: int) -> Ints | None:
        if self.hint is None:
            return None
        _, place = self.division.grid.place(rank)
        return np.concatenate([self.schedule.order(i) for i, lane in enumerate(self.schedule.lanes)
                               if lane.rank == place])

    def realised(self, orders: Sequence[Sequence[int]]) -> Schedule:
        own, every = self.schedule, enumerate(self.schedule.lanes)
        talks = [np.isin(unpack(own.order(i)).kind, COLLECTIVE).all() for i in range(len(own.lanes))]
        lanes = [own.order(i) if talks[i] else np.array(orders[lane.rank], np.int64) for i, lane in every]
        return Schedule.of_keys(own.lanes, lanes, notes=own.notes).validate(self.applied[0])

    @property
    def synthetic(self) -> bool:
        return not self.graph.launches

    @property
    def stale(self) -> bool:
        return self.versions is not None

    @cached_property
    def sent_bytes(self) -> dict[str, int]:
        """The bytes that each rank sends to another in a step, as `0>1`; none on given times."""
        if self.synthetic:
            return {}
        graph, schedule = self.with_messages
        found, rank = Counter[str](), schedule.rank_of_tasks(graph)
        for t in np.flatnonzero(np.isin(graph.kind, SENDS)).tolist():
            found[f"{rank[t]}>{unpack(graph.keys[t]).destination}"] += int(graph.bytes[t])
        return dict(sorted(found.items()))

    @cached_property
    def period(self) -> float:
        """Time per step without a barrier between steps; of a stale plan on given times, per mini-batch."""
        return self._period(chained=True) if self.steady is None else self.steady

    @cached_property
    def step(self) -> float:
        """Time of a step: a rank begins the next one while others still work. On given times, the step is by itself."""
        return (self.timeline.makespan if self.synthetic else self.period) + self.cost.step
