"""Runs a job step by step: its plan, its losses and times, and the metrics on test data. Prints nothing."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from time import perf_counter
from typing import Any

import numpy as np

from .. import data, nn
from ..autograd.recording import record
from ..autograd.tape import no_grad, settle, unsettled, use
from ..autograd.tensor import Parameter, Tensor
from ..core.graph import TaskGraph
from ..core.schedule import Schedule, ScheduleError
from ..nn.module import state_array
from ..optim.rates import Rate
from ..plans.plan import Plan
from ..pricing.cost import CostModel
from ..runtime.comm import Communicator
from ..runtime.executors import SequentialExecutor, runtime
from ..runtime.race import Race
from ..runtime.version_log import VersionRead
from ..schedulers.batches import Batches
from ..system.loading import users_code
from .agreement import Disagreement, together
from .bystanders import Bystanders
from .realised import Orders
from .recorded import Recorded
from .tensors import raw

TURN = 5  #: how many steps of a trainer follow each other if several take turns


class TrainingError(RuntimeError):
    """A run cannot continue. The message names the step."""


def shared(communicator: Communicator, recorded: Recorded, make: Callable[[], list[Plan]]
           ) -> tuple[list[Plan], Recorded]:
    """The plans that `make` gives, and the recording that they are of; ranks that share a process get the first rank's.
    Raises Disagreement on all ranks if one has made others, as a policy may that depends on a hash or a clock."""
    if not communicator.own_process:
        return communicator.gather((make(), recorded) if communicator.rank == 0 else None)[0]
    plans = make()
    orders = communicator.gather(sha256("".join(plan.schedule.to_csv() for plan in plans).encode()).digest())
    if other := next((rank for rank, order in enumerate(orders) if order != orders[0]), None):
        raise Disagreement(f"{recorded.job.scheduler} orders tasks on rank {other} otherwise than on rank 0; give all "
                           f"ranks one plan: minidl plan --save PLAN.csv, and --scheduler PLAN.csv")
    return plans, recorded


class Trainer:
    """Runs a job step by step. `seconds`, `waits` (for data, in seconds) and `losses` grow by one entry per step. If
    the device runs behind the host, losses arrive some steps later, and `collect` waits for the rest.

    `schedule`: replaces the one that the job's scheduler would make. `replays`: makes what runs the steps in place of
    the program, from the recorded step, as `minidl.runtime.replica.Replayed` does. `at_once`: the most steps that one
    launch runs, see `several`.
    """

    in_flight = 8  #: if the device runs behind the host, the losses of this many steps may be outstanding
    late = 0  #: how many steps late updates run
    communicator: Communicator | None = None  #: to the other ranks
    at_once = 1
    logs_order = False  #: whether `orders` grows
    _orders: Orders | None = None  #: to replay
    watched = False  #: whether somebody may ask where the run is, see `Runtime`
    _replays: Callable[[TaskGraph], Any] | None = None

    def __init__(self, recorded: Recorded, cost: CostModel, *, trace: bool = False,
                 schedule: Schedule | None = None, replays: Callable[[TaskGraph], Any] | None = None,
                 at_once: int = 1) -> None:
        self.at_once = at_once
        self.recorded, self.job, self.cost, self.trace = recorded, recorded.job, cost, trace
        self._replays = replays
        self.plan = recorded.plan(cost, schedule=schedule)
        if trace and "race" in self.plan.notes:
            raise ValueError(f"{self.job.scheduler} in real time records no timeline; leave --trace and --html out")
        if at_once > 1 and (replays is not None or "race" in self.plan.notes):
            raise ValueError(f"{self.job.scheduler}: a replayed run, and one whose tasks race, has single steps; leave "
                             f"--steps-per-launch out")
        self.program = self.plan.program()
        self._start()

    @functools.cached_property
    def run(self) -> Any:
        """Runs the program. It is made when somebody first asks for it, which draws the weights that it trains."""
        if self._replays is not None:
            return self._replays(self.recorded.graph)
        if (race := self.plan.notes.get("race")) is not None:
            graph, device = self.plan.graph, self.recorded.device
            batches = Batches.of(graph, self.plan.scheduler)
            return Race(graph, batches.forward, batches.backward, batches.rest, **race, device=device)
        return runtime(self.program, device=self.recorded.device, transport=self.communicator, trace=self.trace,
                       logged=self.plan.stale, watched=self.watched, at_once=self.at_once)

    @property
    def rank(self) -> int:
        """The number of this rank; 0 without others."""
        return 0 if self.communicator is None else self.communicator.rank

    @property
    def ranks(self) -> int:
        return 1 if self.communicator is None else self.communicator.size

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, which ask together."""
        return [value] if self.communicator is None else self.communicator.gather(value)

    def _start(self) -> None:
        self.bystanders = Bystanders()
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.waits: list[float] = []
        self.strange: list[int] = [0]  #: steps that follow something else, which filled caches and kept ranks apart
        self.ended = 0.0  #: when the last step ended
        self._loads: dict[str, Any] = {}  # what the states of layers with experts were when somebody last asked
        self.log: list[VersionRead] = []  #: of all ranks of a replica after `finish`, if the policy is stale
        self._ran: list[Callable[[], list[int]]] = []
        self._judges: dict[int, SequentialExecutor] = {}
        #: losses of a step, or of the steps of a launch; whether the last one used a gradient that is not finite
        self._awaited: deque[tuple[Callable[[], Sequence[Any]], Callable[[], bool | None]]] = deque()
        self._unread: data.DataError | None = None
        settle()
        self.recorded.device.not_finite()  # forget what earlier runs have reported

    def step(self) -> None:
        """Runs one step on the next batch. Raises TrainingError as `collect` does, on CUDA for an earlier step; before
        anything has changed, DataError for data that cannot be read, or on ranks Disagreement on all of them."""
        run, device = self.run, self.recorded.device
        asked = perf_counter()
        parts = self._inputs()
        if self._orders is not None:
            assert self.communicator is not None
            run.follow(self._orders[len(self.seconds)][self.communicator.rank])
        begin = perf_counter()
        loss = run(*parts)
        if loss is not None:  # in a pipeline, only the last rank has it
            fetch, fetched = getattr(run, "fetch_not_finite", device.fetch_not_finite), loss.fetch()
            self._awaited.append((lambda: [fetched()], fetch()))
        self.collect(self.in_flight if device.captures else 0)
        self.ended = perf_counter()
        self.seconds.append(self.ended - begin)
        if self.logs_order:
            self._ran.append(run.realised)
        self.waits.append(begin - asked)

    def several(self, most: int) -> int:
        """Runs at most so many steps on the next batches in one launch, up to the end of an epoch, and returns how
        many. Raises as `step`; an error of data that comes after a batch is raised by the next call."""
        run, device, batches = self.run, self.recorded.device, list[Sequence[Any]]()
        asked = perf_counter()
        if self._unread is not None:
            raise self._unread
        try:
            while len(batches) < most and not (batches and self.recorded.train_data.ended):
                batches.append(self._inputs())
        except data.DataError as error:
            if not batches:
                raise
            self._unread = error
        begin, count = perf_counter(), len(batches)
        losses = run.steps([tuple(batch) for batch in batches])
        self._awaited.append((lambda: [loss for (loss,) in losses()], device.fetch_not_finite()))
        self.collect(1 if device.captures else 0)
        self.ended = perf_counter()
        self.seconds += [(self.ended - begin) / count] * count
        self.waits += [(begin - asked) / count] * count
        return count

    def replay(self, orders: Orders, name: str) -> None:
        """The next steps run in these orders, of the log of this name. Raises ValueError for another run's log."""
        assert self.communicator is not None
        size, ranks = self.communicator.size, max(self.plan.schedule.ranks, 1)
        for step, each in enumerate(orders, 1):
            if len(each) != size:
                raise ValueError(f"{name} has {len(each)} ranks in step {step}; this run has {size}")
            try:
                for first in range(0, size, size if ranks == 1 else ranks):
                    self.plan.realised(each[first : first + (size if ranks == 1 else ranks)])
            except ScheduleError as error:
                raise ValueError(f"{name} is the log of another run: in step {step}, {error.message}") from None
        self._orders = orders

    @property
    def orders(self) -> list[list[int]]:
        """After `finish`: of each step under a hint this rank's tasks, or sums, by key in the order of their run."""
        return [ran() for ran in self._ran]

    def learn_by(self, rate: Rate, step: int) -> None:
        """Sets the learning rate of this step, from 0 on."""
        self.recorded.optimizer.lr = rate(step)

    def _inputs(self) -> list[Any]:
        """The inputs of the next step. Where data are read while training, ranks go on only after all have theirs."""
        recorded, batches = self.recorded, self.recorded.train_data
        if self.communicator is None or not (batches.dataset.slow or recorded.weighs):
            return recorded._split(*next(batches))
        place, own = batches.state(), list[Any]()

        def read() -> Any:
            own.extend(next(batches))
            return recorded.predictions(own[1]) if recorded.weighs else None

        try:
            found = together(self.communicator, read, data.DataError)
        except Disagreement:
            batches.restore(place)
            raise
        # all ranks of a pipeline read the same rows
        whole = sum(found) // (self.communicator.size // recorded.ranks) if recorded.weighs else None
        return recorded._split(own[0], own[1], whole)

    def collect(self, rest: int = 0) -> None:
        """Waits until the losses of only `rest` steps, or launches, are outstanding. Raises TrainingError for a loss
        that is not finite, and on CUDA if an update of that step used a gradient that is not finite."""
        while len(self._awaited) > rest:
            values, not_finite = self._awaited.popleft()
            losses, bad = [*map(float, values())], not_finite()
            for left, loss in zip(reversed(range(len(losses))), losses, strict=True):
                self.losses.append(loss)
                step = len(self.losses)
                if bad and not left and (self.late or np.isfinite(loss)):
                    raise self._failed("a gradient is not finite", step - self.late)
                if not np.isfinite(loss):
                    raise self._failed(f"the loss is {loss}", step)

    def settle(self) -> None:
        """Waits for all losses and runs the late updates; on ranks, all of them together, since an update sums the
        gradients of all. Raises TrainingError as `collect`, also for these."""
        self.collect()
        if self.communicator is not None or self.run in unsettled:
            self.run.settle()
        if self.recorded.device.not_finite():
            raise self._failed("a gradient is not finite", len(self.losses))

    def share(self, everywhere: bool = False) -> None:
        """Settles the run; on ranks, all of them together. Rank 0 then has the states and parameters that ranks share
        out as a whole; `everywhere`: all ranks have the parameters."""
        self.settle()
        if self.communicator is not None:
            self.run.whole(everywhere)

    def finish(self) -> None:
        """Ends the run of all ranks. Every rank then has the losses, which are means over the ranks that have them, the
        versions that forwards have read, and the whole model. Raises TrainingError as `collect` does, and where ranks
        hold the same layers with different parameters."""
        assert self.communicator is not None
        self.share(everywhere=True)  # which settles before ranks talk of anything else: one may still await a message
        self.run.close()
        _ = self.others
        log = self.run.log or ()
        shares = self.communicator.gather((self.losses, sha256_of(self.held()), getattr(log, "entries", log)))
        for rank, (_, digest, _) in enumerate(shares):
            if digest != shares[first := self.twin_of(rank)][1]:
                raise TrainingError(f"rank {rank} has other parameters than rank {first}, which holds the same layers, "
                                    f"after {len(self.seconds)} steps")
        self.losses = np.mean([losses for losses, _, _ in shares if losses], axis=0).tolist()
        self.log = [e for rank, (_, _, entries) in enumerate(shares) if self.twin_of(rank) == rank for e in entries]

    def held(self) -> Sequence[Tensor]:
        """The parameters that this rank trains."""
        return [p for p in self.recorded.model.parameters() if self.counts(p)]

    def holds(self, t: Tensor) -> bool:
        """Whether this rank has a tensor of the network or the optimizer as it is to be saved, or a share of it. States
        of the network, such as running statistics, may differ between ranks: the first one's count."""
        return self.twin_of(self.rank) == self.rank or id(t.storage) not in self._states

    @functools.cached_property
    def _states(self) -> set[int]:
        return {id(t.storage) for _, t in self.recorded.model.named_tensors() if not isinstance(t, Parameter)}

    def twin_of(self, rank: int) -> int:
        """The first rank that trains what this one does."""
        return 0

    def latest(self, back: int = 0) -> float:
        """The loss of the last step, or of an earlier one, the mean over ranks that have it; all must ask together.
        Raises TrainingError as `collect` does."""
        self.collect()
        every = self.gather(self.losses[-1 - back] if self.losses else None)
        return float(np.mean([loss for loss in every if loss is not None]))

    def loads(self) -> list[dict[str, Any]]:
        """For each layer with experts how many tokens have chosen each of them since this was last asked, and how many
        of these it has dropped; the sum over ranks, which must all ask together."""
        layers = [(name, m) for name, m in self.recorded.model.named_modules() if isinstance(m, nn.MoE)]
        if not layers:
            return []
        device, before = self.recorded.device, self._loads
        self._loads = {name: np.array(device.read(device.array(m.load.storage.data, m.load.view_of(0))))
                       for name, m in layers}
        mine = [(now - before.get(name, 0)) * self.counts(m.load) for (name, m), now in
                zip(layers, self._loads.values(), strict=True)]
        return [{"layer": name, "tokens": tokens.tolist(), "dropped": dropped.tolist()}
                for (name, _), (tokens, dropped) in zip(layers, np.sum(self.gather(mine), axis=0), strict=True)]

    def counts(self, t: Tensor) -> bool:
        """Whether this rank's steps change a state of the network."""
        return True

    def _failed(self, what: str, step: int) -> TrainingError:
        return TrainingError(f"{what} at step {step} of {self.job.model} with lr {self.recorded.optimizer.lr:g}; try a "
                             f"smaller lr (MINIDL_DEBUG=1 names the layer)")

    def evaluate(self, progress: Callable[[float], None] = lambda done: None) -> dict[str, float]:
        """The metrics of the network's objective over the test data, by name; `loss` is one of them. Calls
        `progress(share done)` after each batch. Raises TrainingError for a metric that is not finite."""
        recorded, model, runs = self.recorded, self.recorded.model.eval(), self._judges
        sums: Any = 0.0
        test = recorded.test_data
        test.restore({"position": 0})
        try:
            for done, (x, y) in enumerate(test, 1):
                if len(x) not in runs:
                    with use(recorded.tape), no_grad(), self.job.autocast, users_code():
                        runs[len(x)] = SequentialExecutor(record(model, x, name="eval"), recorded.device)
                sums = sums + recorded.objective.score(runs[len(x)](x).numpy(), y)
                progress(done / test.steps())
            found = recorded.objective.judge(sums, test.dataset)
            found |= recorded.objective.more(lambda x: runs[len(x)](x).numpy(), test)
        finally:
            model.train()
        for name, value in found.items():
            if not np.isfinite(value):
                raise self._failed(f"the {name} on test data is {value}", len(self.seconds))
        return found

    def step_ms(self) -> dict[str, float]:
        """The median, 10th and 90th percentile of the steps that follow another one, in milliseconds."""
        times = np.delete(self.seconds, [n for n in self.strange if n < len(self.seconds)]) * 1000
        if not times.size:
            times = np.array(self.seconds) * 1000
        return {name: round(float(np.percentile(times, q)), 4)
                for name, q in (("median", 50), ("p10", 10), ("p90", 90))}

    @functools.cached_property
    def others(self) -> float:
        """The cores that other processes have used until this is first asked for; of ranks, all ask together."""
        return self.bystanders.cores(self.communicator)

    def params_sha256(self) -> str:
        return params_sha256(self.recorded.model)


def params_sha256(model: nn.Module) -> str:
    """The SHA-256 of every parameter once, in state-dict order, little-endian."""
    return sha256_of(p for _, p in model.named_parameters())


def sha256_of(tensors: Iterable[Tensor]) -> str:
    """The SHA-256 of these parameters and states in their order, little-endian."""
    digest = sha256()
    for t in tensors:
        digest.update(raw(state_array(t)))
    return digest.hexdigest()


def interleaved(trainers: Sequence[Trainer], steps: int, progress: Callable[[int], None] | None = None) -> None:
    """Runs the steps of all trainers in turns of TURN, so that a busy machine disturbs all of them equally, and caches
    hold what a trainer has touched, as they do in a run of its own. The first step of a turn is not timed."""
    for first in range(0, steps, TURN):
        turn = range(first, min(first + TURN, steps))
        for trainer in trainers:
            trainer.strange.append(first)
            for _ in turn:
                trainer.step()
        if progress:
            progress(turn.stop)
    for trainer in trainers:
        trainer.settle()
