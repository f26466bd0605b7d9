"""A training run on data-parallel ranks: the plan, the trials that confirm it, and the run."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from ..core.machine import Machine
from ..measuring.links import among_ranks
from ..plans.memory import MemoryLimitError
from ..plans.plan import Plan
from ..pricing.cost import CostModel
from ..runtime.comm import Communicator
from .recorded import Recorded
from .trainer import Trainer, shared

TRIAL_STEPS = 6  #: steps for each k when measurement confirms k


def neighbours(k: int, largest: int) -> list[int]:
    """The values of k that are measured besides the simulator's: 0, half of it, and one and a half times as many."""
    return sorted({0, k // 2, min(largest, k + max(1, k // 2))} - {k})


class RankTrainer(Trainer):
    """One rank of a run. `cost` is rank 0's cost on every rank, so that all make the same plan.

    `link`: microseconds per all-reduce and per byte. `k`: the k of reverse_first_k; with None the simulator chooses it,
    and the first steps confirm it by measuring its neighbours: all k are bit-identical, so nothing is lost.
    """

    in_flight = 0  #: trials compare the times of single steps
    late = 1
    communicator: Communicator

    def __init__(self, recorded: Recorded, cost: CostModel, communicator: Communicator, link: tuple[float, float], *,
                 k: int | None = None, buckets: int | None = None, trace: bool = False) -> None:
        self.recorded, self.job, self.communicator, self.trace = recorded, recorded.job, communicator, trace
        self._base = among_ranks(cost, communicator)
        self._machine = Machine(communicator.size, recorded.job.memory_limit,
                                collective=lambda sizes: link[0] + link[1] * sum(sizes.values()))
        plans, self._of = shared(communicator, recorded, lambda: self._plans(k, buckets))
        self._start()
        self._trials = plans if len(plans) > 1 else []
        self._tried: list[tuple[float, int]] = []
        self._use(plans[0])

    def _use(self, plan: Plan) -> None:
        vars(self).pop("run", None)
        self.plan, self.cost = plan, plan.cost
        self.program = self.recorded.program(plan, self.communicator.rank, self._of)

    def _plans(self, k: int | None, buckets: int | None) -> list[Plan]:
        """The plan; and if the simulator chose k, plans for some values around it that fit."""
        found = [self.recorded.plan(self._base, self._machine, k=k, buckets=buckets)]
        notes = found[0].notes
        if k is None and self._machine.ranks > 1 and "largest_k" in notes:
            for other in neighbours(notes["k"], notes["largest_k"]):
                with suppress(MemoryLimitError):
                    found.append(self.recorded.plan(self._base, self._machine, k=other))
        return found

    def step(self) -> None:
        """One step on the next batch. Raises TrainingError, TaskError or RankError."""
        if self._trials and len(self.seconds) % TRIAL_STEPS == 0:
            self._next_trial()
        super().step()

    def _next_trial(self) -> None:
        if self.seconds:
            slowest = max(self.communicator.gather(float(np.median(self.seconds[-TRIAL_STEPS + 2 :]))))
            self._tried.append((slowest, self.plan.notes["k"]))
        if len(self._tried) == len(self._trials):
            chosen, self._trials = next(p for p in self._trials if p.notes["k"] == min(self._tried)[1]), []
            self.strange = [*range(len(self.seconds) + 1)]  # of other plans, or the first one of this
        else:
            chosen = self._trials[len(self._tried)]
        if chosen is not self.plan:
            self.run.close()
            self._use(chosen)
