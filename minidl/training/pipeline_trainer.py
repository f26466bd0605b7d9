"""A training run whose stages are on several ranks: the plan, the run, and the whole model at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import optim
from ..autograd.tensor import Parameter, Tensor
from ..core.graph import View
from ..core.machine import Machine
from ..core.schedule import RankGrid
from ..core.tasks import Kind, unpack
from ..optim.rates import Rate
from ..passes.messages import check_same_order
from ..passes.versions import updates
from ..pricing.cost import CostModel, Link
from ..runtime.comm import Communicator
from ..runtime.version_log import drift, staleness
from .recorded import Recorded
from .trainer import Trainer, shared


def delays(plan: Any, parameters: Sequence[Parameter]) -> list[int]:
    """For each parameter, by how many updates, at most, a forward's weights are older than those it changes."""
    own, late = unpack(plan.schedule.keys), dict[int, int]()
    if plan.versions is not None:
        ages = own.micro_batch // plan.versions.every - plan.versions.read
        for stage, age in zip(own.unit[own.kind == Kind.F].tolist(), ages[own.kind == Kind.F].tolist(), strict=True):
            late[stage] = max(late.get(stage, 0), age)
    stage_of = {id(plan.graph.storages[plan.graph.buffer_storage[b]].live): int(plan.graph.unit[t])
                for t in updates(plan.graph).tolist() for b in plan.graph.writes[t].tolist()}
    return [late.get(stage_of[id(p.storage)], 0) for p in parameters]


class PipelineTrainer(Trainer):
    """One rank of a run. `cost` and `link` are rank 0's on every rank, so that all make the same plan.

    Every rank has recorded the whole step and reads all of its replica's share of the batch (the whole batch if
    `recorded` has one rank); it holds and runs its own stages. Until `finish`, only a rank with the last stage has
    losses. Under a stale policy, which never drains, steps overlap; a run settles at the end of each epoch, so that its
    bits do not depend on whether it saves there. Whoever shares the model within an epoch settles it as well. `sums`:
    microseconds of an all-reduce between replicas, per all-reduce and per byte.
    """

    communicator: Communicator

    def __init__(self, recorded: Recorded, cost: CostModel, communicator: Communicator, link: Link, *,
                 sums: tuple[float, float] = (0.0, 0.0), chunks: int | None = None, cap: float | None = None,
                 trace: bool = False) -> None:
        self.recorded, self.job, self.communicator, self.trace = recorded, recorded.job, communicator, trace
        self.cost = replace(cost, link=link)
        self.grid = RankGrid(communicator.size // recorded.ranks, recorded.ranks)
        machine = Machine(self.grid.ranks, recorded.job.memory_limit, cap,
                          lambda sizes: sums[0] + sums[1] * sum(sizes.values()), self.grid.replicas)
        (plan,), of = shared(communicator, recorded, lambda: [recorded.plan(self.cost, machine, chunks=chunks)])
        self.delays = delays(plan, of.optimizer.parameters) if recorded.job.rates_by_delay else []
        self.program = program = recorded.program(plan, communicator.rank, of)
        peaks, orders = zip(*communicator.gather((program.peak_bytes, program.collectives)), strict=True)
        check_same_order(orders, self.grid)
        self.plan = plan.with_known(peak_bytes=peaks)
        self._start()
        self._held = {id(own) for spec in program.graph.storages for own in (spec.live, spec.share_of)
                      if own is not None}
        self._placed = {id(spec.live) for spec in recorded.graph.storages}
        self._mine = [i for i, spec in enumerate(recorded.graph.storages) if id(spec.live) in self._held]

    def step(self) -> None:
        super().step()
        if self.plan.stale and self.recorded.train_data.ended:
            self.settle()

    def learn_by(self, rate: Rate, step: int) -> None:
        super().learn_by(rate, step)
        for group, delay in zip(self.recorded.optimizer.param_groups, self.delays, strict=False):
            group.lr = optim.by_delay(rate, delay, self.job.rates_by_delay or 1)(step)

    def share(self, everywhere: bool = True) -> None:
        """Copies the parameters and states of all stages to every rank, from the first replica: the others may have
        other running statistics, from their own shares. All ranks must call it together."""
        super().share(everywhere=True)
        device = self.recorded.device
        first = self.grid.place(self.communicator.rank)[0] == 0
        mine = {i: np.array(device.read(self._array(i))) for i in self._mine} if first else {}
        for states in self.communicator.gather(mine):
            for i in states.keys() - {*self._mine}:
                self.recorded.graph.storages[i].live.overwritten()
                device.write(self._array(i), states[i])

    def _array(self, storage: int) -> Any:
        spec = self.recorded.graph.storages[storage]
        return self.recorded.device.array(spec.live.data, View.of(spec))

    def holds(self, t: Tensor) -> bool:
        return super().holds(t) and (id(t.storage) in self._held or id(t.storage) not in self._placed)

    def counts(self, t: Tensor) -> bool:
        return id(t.storage) in self._held

    def twin_of(self, rank: int) -> int:
        """The first rank that holds the same stages."""
        return self.grid.group(rank)[0]

    def staleness(self) -> dict[str, Any]:
        """Updates between reading weights and changing them: mean and most of all forwards, and of
        each stage the most. `drift`: the most between the weights of a forward and its backward's."""
        late = staleness(self.log)
        every = np.concatenate(list(late.values()))
        return {"mean": round(float(every.mean()), 4), "most": int(every.max()),
                "most_of_stages": [int(late[s].max()) for s in sorted(late)],
                "drift": max(int(found.max()) for found in drift(self.log).values())}
