"""A training run whose stages are on several ranks: the plan, what messages cost, the run, and the
whole model again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from ..graph import View
from ..plans import Machine
from ..pricing.cost import CostModel, Link
from ..runtime.comm import Communicator
from ..runtime.comm.flight import Patience
from ..runtime.device import strides_of
from ..runtime.executors import DistributedExecutor
from ..runtime.version_log import VersionRead, drift, staleness
from .trainer import Recorded, Trainer

SIZES = (8, 2**18)  #: bytes of the messages that a link is measured with
REPEATS = 20


def measure_messages(communicator: Communicator) -> Link:
    """A link as ranks 0 and 1 see it, in microseconds and bytes per microsecond; the same on every rank. Messages are
    moved by the ranks' own cores, between tasks."""
    took = []
    for size in SIZES:
        out, into = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        communicator.gather(None)
        if communicator.rank < 2:
            there, back = (communicator._send(out, 1 - communicator.rank, 0),
                           communicator._receive(into, 1 - communicator.rank, 0))
            times = [_turn(communicator, there, back) for _ in range(REPEATS)]
            took.append(float(np.median(times)) / 2)
    first = communicator.gather(took)[0]
    latency, more = first[0], max(first[1] - first[0], 1e-3)
    return Link(latency, (SIZES[1] - SIZES[0]) / more, core=True)


def _turn(communicator: Communicator, there: Callable[[], Iterator[None]], back: Callable[[], Iterator[None]]) -> float:
    """Microseconds of a message to the other rank and one back."""
    begin = perf_counter()
    moves = (there, back) if communicator.rank == 0 else (back, there)
    patience = Patience(communicator)
    for move in moves:
        for _ in move():
            patience.wait(1 - communicator.rank, "the link's measurement")
    return (perf_counter() - begin) * 1e6


class PipelineTrainer(Trainer):
    """One rank of a run. `cost` and `link` are those of rank 0 on every rank, so that all make the same plan.

    Every rank has recorded the whole step and reads the whole batch; it holds and runs its own stages. Only the rank
    with the last stage sees losses until `finish`. A stale policy is stale within a step, after which nothing is under
    way.
    """

    def __init__(self, recorded: Recorded, cost: CostModel, communicator: Communicator, link: Link, *,
                 chunks: int | None = None, cap: float | None = None, trace: bool = False) -> None:
        self.recorded, self.job, self.communicator = recorded, recorded.job, communicator
        self.cost = replace(cost, link=link)
        machine = Machine(communicator.size, recorded.job.memory_limit, cap)
        plan = recorded.plan(self.cost, machine, chunks=chunks)
        self.run: DistributedExecutor = DistributedExecutor(  # type: ignore[assignment]
            *plan.with_messages, communicator, device=recorded.device, trace=trace,
            memory_limit=recorded.job.memory_limit, logged=plan.versions is not None)
        self.log: list[VersionRead] = []  #: of all ranks after `finish`, where the policy is stale
        self.plan = replace(plan, peak_bytes=tuple(communicator.gather(self.run.peak_bytes)))
        self._start()
        held = {id(spec.live) for spec in self.run.program.graph.storages if spec.live is not None}
        self._mine = [i for i, spec in enumerate(recorded.graph.storages) if spec.live is not None
                      and id(spec.live) in held]

    def share(self) -> None:
        """Brings the parameters and states of all stages to every rank. All ranks call it together."""
        self.settle()
        device = self.recorded.device
        for states in self.communicator.gather({i: np.array(device.read(self._array(i))) for i in self._mine}):
            for i in states.keys() - {*self._mine}:
                device.write(self._array(i), states[i])

    def _array(self, storage: int) -> Any:
        spec = self.recorded.graph.storages[storage]
        return self.recorded.device.array(spec.live.data, View(0, spec.shape, strides_of(spec.shape), 0, spec.dtype))

    def finish(self) -> None:
        """Ends the run; every rank then has the losses and the whole model."""
        self.collect()
        self.share()
        self.run.close()
        self.losses = next(losses for losses in self.communicator.gather(self.losses) if losses)
        if self.run.log is not None:
            self.log = [entry for entries in self.communicator.gather(self.run.log.entries) for entry in entries]

    def staleness(self) -> dict[str, Any]:
        """Updates between reading weights and changing them: mean and most of all forwards, and of
        each stage the most. `drift`: the most between the weights of a forward and those of its backward."""
        late = staleness(self.log)
        every = np.concatenate(list(late.values()))
        return {"mean": round(float(every.mean()), 4), "most": int(every.max()),
                "most_of_stages": [int(late[s].max()) for s in sorted(late)],
                "drift": max(int(found.max()) for found in drift(self.log).values())}
