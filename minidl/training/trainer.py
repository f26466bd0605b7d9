"""A training run that names and numbers describe: model, data, optimizer, graph, schedule, executor. Prints nothing."""

from __future__ import annotations

import functools
import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from .. import data, fusion, models, nn, ops, optim, schedulers
from ..autograd import random
from ..autograd.op import autocast
from ..autograd.tape import Tape, micro_batch, no_grad, settle, unsettled, use
from ..autograd.tensor import Parameter, Tensor, array, record
from ..core.graph import TaskGraph
from ..core.machine import Machine
from ..core.schedule import Schedule
from ..data.feed import fed
from ..devices import device as devices
from ..measuring.far import measure_far
from ..measuring.lanes import cores
from ..measuring.measure import measure
from ..measuring.pairs import measure_pairs
from ..nn.module import state_array
from ..ops.dither import dither
from ..optim.rates import Rate
from ..passes.sweeps import swept
from ..plans.plan import Plan
from ..plans.program import Program
from ..pricing.corun import CoRun
from ..pricing.cost import CostModel, counts_up_to
from ..runtime.comm import Communicator
from ..runtime.executors import SequentialExecutor, runtime
from ..runtime.race import Race
from ..schedulers.batches import Batches
from ..system.loading import place_of, users_code
from ..system.process import paused
from . import objectives, weights
from .agreement import Disagreement, together
from .bystanders import Bystanders

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW, "nadamw": optim.NAdamW, "rmsprop": optim.RMSprop}
MOMENTUM = {"sgd": 0.9, "rmsprop": 0.0}  #: the optimizers that have a momentum, with its default
#: float type of a run -> in mixed precision, the 16-bit type of products (parameters stay float32)
DTYPES = {"float32": None, "float64": None, "bf16": "bfloat16", "fp16": "float16"}


T = TypeVar("T")
TURN = 5  #: how many steps of a trainer follow each other if several take turns


class TrainingError(RuntimeError):
    """A run cannot continue. The message names the step."""


@dataclass(frozen=True)
class Job:
    """The settings of a run: model, data, device and how to train. Sizes are in samples and bytes."""

    model: str = "mlp"
    model_args: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None  #: None: the embedded digits; for a network that takes tokens, the embedded text
    root: str | None = None
    tokenizer: str = "bytes"  #: of text, see data/tokens.py
    standardize: bool = False  #: data of one's own, see `data.load`
    scaling_from: str | None = None  #: the checkpoint that goes on, whose mean and deviation are used if it has them
    workers: int | None = None  #: processes that decode pictures; None: one for each core but one
    feed: str = "batches"  #: how data come, see `minidl.data.feed`
    device: str = "cpu"
    tf32: bool = False
    deterministic: bool = True
    dtype: str = "float32"
    batch_size: int = 64
    micro_batches: int = 1
    update_every: int | None = None  #: an update after this many micro-batches; None: after all of a step
    slices: int = 1  #: of each micro-batch along its sequences: they go through the network one after the other
    groups: int = 1  #: groups of micro-batches, whose gradients are summed separately and then added
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float | None = None  #: of the optimizers that have one; None: the default
    weight_decay: float | None = None  #: None: the optimizer's default
    clip: float | None = None  #: the largest global norm of all gradients
    rates_by_delay: int | None = None  #: steps over which a stale pipeline's rates grow to `lr`, see `optim.by_delay`
    seed: int = 0
    scheduler: str = "in_order"
    parallel: str = "none"
    scheduler_args: Mapping[str, Any] = field(default_factory=dict)
    streams: int | None = None
    memory_limit: int | None = None
    dither: float = 0.0  #: the step of rounded gradients in standard deviations, see `minidl.ops.dither`
    newton: int | None = None  #: Newton iterations of the forward pass, see `minidl.passes.newton`
    backward: str = "exact"  #: a backward pass of `minidl.passes.sweeps`,
    sweeps: int | None = None  #: with so many sweeps (None: until it is exact),
    block: int | None = None  #: over blocks of so many layers or time steps
    recompute: str = "none"  #: which activations are computed again, see `minidl.schedulers.kept`
    split: int | str = 1  #: the number of parts of each task, or auto, see `minidl.schedulers.wide`
    shard: int | str = 0  #: what ranks share out: 1, the optimizer's states, see `minidl.passes.shard`
    offload: str = "none"  #: the memory that leaves, see `minidl.schedulers.away`
    offload_to: str | None = None  #: the file for it; None: a temporary one
    fusion: tuple[str, ...] | None = None
    init: str | None = None  #: a file of weights to start from, see `minidl.training.weights`
    lanes: str = ""  #: on the CPU, native or python; empty: the default

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.micro_batches < 1:
            raise ValueError(f"batch size {self.batch_size} and micro-batches {self.micro_batches} must be at least 1")
        if self.slices < 1:
            raise ValueError(f"{self.scheduler}: {self.slices} slices; a micro-batch has at least 1")
        if self.batch_size % self.micro_batches:
            raise ValueError(f"a batch of {self.batch_size} does not divide into {self.micro_batches} micro-batches")
        if self.update_every is not None and (self.update_every < 1 or self.micro_batches % self.update_every):
            raise ValueError(f"{self.micro_batches} micro-batches do not divide into updates after "
                             f"every {self.update_every}")
        if self.micro_batches % self.groups:
            raise ValueError(f"{self.scheduler} adds up the gradients of {self.groups} groups of micro-batches; "
                             f"{self.micro_batches} do not divide into them")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"the norm to clip at is {self.clip:g}; it must be above 0")
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown type {self.dtype!r}; known: {', '.join(DTYPES)}")
        if self.low and not self.device.startswith("cuda"):
            raise ValueError(f"{self.dtype} needs a CUDA device; {self.device} computes in float32 and float64")
        if self.tf32 and not self.device.startswith("cuda"):
            raise ValueError(f"tf32 is only for CUDA devices, not for {self.device}")
        if not self.deterministic and not self.device.startswith("cuda"):
            raise ValueError(f"nondeterministic is only for CUDA devices; {self.device} always repeats its bits")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {self.optimizer!r}; known: {', '.join(OPTIMIZERS)}")

    @property
    def low(self) -> str | None:
        """The 16-bit type of products, in mixed precision."""
        return DTYPES[self.dtype]

    @property
    def autocast(self) -> AbstractContextManager[None]:
        """The context in which the model is called."""
        return autocast(self.low) if self.low else nullcontext()


class Recorded:
    """A job's model and optimizer, and its step as a graph. Nothing has run.

    With ranks, it is the step of one rank on its equal share of each batch. Raises DataError or ValueError if the
    batch cannot be divided.
    """

    def __init__(self, job: Job, rank: int = 0, ranks: int = 1) -> None:
        self.job, self.rank, self.ranks = job, rank, ranks
        self.device = devices.get(job.device)
        if self.device.captures:  # the process has one such device: an earlier job may have set other values
            self.device.tf32, self.device.deterministic = job.tf32, job.deterministic
        else:
            self.device.set_lanes(job.lanes)
            self.device.set_far_file(job.offload_to)
        self.tape = Tape(self.device)
        self.tape.random = random.State()  # other runs in this process, and other ranks, have their own
        with use(self.tape):
            self.model, train = self._fitted()
            self._check_slices()
            self.remarks = () if job.init is None else weights.load(job.init, self.model).said(job.init)
            self.optimizer = self._optimizer()
            self.optimizer.max_norm = job.clip
            self.optimizer.scaler = optim.GradScaler() if job.low == "float16" else None
        self.train_data = fed(train.shard(rank, ranks), job.feed)
        self.share = job.batch_size // ranks  #: samples of a step on this rank
        if self.share % job.micro_batches:
            raise ValueError(f"a rank's {self.share} samples of a batch of {job.batch_size} do not divide into "
                             f"{job.micro_batches} micro-batches")
        with use(self.tape), job.autocast, dither(job.dither):
            graph = record(self._step, *self._split(*self._example()), name=job.model)
        graph, self.approximate = swept(graph, job.backward, job.newton, sweeps=job.sweeps, block=job.block)
        self.graph = self._fused(graph, ranks)

    def copy(self, rank: int) -> Recorded:
        """The same recording with a network, an optimizer and batches of its own: for another rank of this process,
        with part `rank` of each batch."""
        memo: dict[int, Any] = {id(self.device): self.device}
        found = copy(self)
        found.rank = rank
        vars(found).pop("test_data", None)
        found.tape = Tape(self.device)
        found.model, found.optimizer, found.tape.random = deepcopy((self.model, self.optimizer, self.tape.random), memo)
        found.graph = self.graph.with_live({id(spec.live): deepcopy(spec.live, memo) for spec in self.graph.storages
                                            if spec.live is not None}, (rank - self.rank) * self.share)
        found.train_data = self.train_data.shard(rank, self.ranks)
        return found

    def program(self, plan: Plan, rank: int, of: Recorded) -> Program:
        """Rank `rank`'s program of a plan that was made of another copy of this recording, on this one's data."""
        with paused:
            program = plan.program(rank)
        if of is self:
            return program
        live = {id(a.live): b.live for a, b in zip(of.graph.storages, self.graph.storages, strict=True)
                if a.live is not None}
        return program.with_live(live, (self.rank - of.rank) * self.share)

    def _fused(self, graph: TaskGraph, ranks: int) -> TaskGraph:
        """The graph after the fusion rules of the job, or the device's default rules. Updates are not merged where
        gradients go to other ranks or belong to a pipeline's stages."""
        rules = self.job.fusion if self.job.fusion is not None else tuple(fusion.RULES) if self.device.captures else ()
        together = ranks == 1 and self.job.parallel != "pipeline"
        rules = tuple(r for r in rules if r not in ("casts", "updates") or together)
        return fusion.fused(graph, self.device, rules) if rules else graph

    @property
    def dtype(self) -> str:
        """The type of parameters and inputs."""
        return "float32" if self.job.low else self.job.dtype

    def _optimizer(self) -> optim.Optimizer:
        job, given = self.job, dict[str, float]()
        momentum = MOMENTUM.get(job.optimizer) if job.momentum is None else job.momentum
        if momentum is not None:
            given["momentum"] = momentum
        if job.weight_decay is not None:
            given["weight_decay"] = job.weight_decay
        every = self.model.parameters()
        return OPTIMIZERS[job.optimizer]([{"params": [p]} for p in every] if job.rates_by_delay else every, job.lr,
                                         **given)

    def _create(self, args: Mapping[str, Any]) -> nn.Module:
        random.seed(self.job.seed)
        return models.create(self.job.model, **args)

    def _fitted(self) -> tuple[nn.Module, data.Loader]:
        """The network and its training data. Sizes of the network that the job leaves open grow to fit the data:
        classes, or the vocabulary; and the number of features. Raises DataError if they do not fit."""
        args = dict(self.job.model_args)
        open_sizes = models.arguments(self.job.model).keys() - args.keys()
        self.model = self._create(args)
        self.objective = objectives.find(self.model.objective)
        try:
            train = self._load("train", self.model.classes)
        except data.LabelError:
            classes = "vocabulary" if self.objective.tokens else "classes"
            if classes not in open_sizes:
                raise
            train = self._load("train", None)
            args[classes] = train.classes
        found = train.dataset
        if len(found.shape) == 1 and not found.vocabulary and "features" in open_sizes:
            args["features"] = found.shape[0]
        known = self.model.vocabulary or found.vocabulary
        if not self.objective.tokens and found.vocabulary > known:
            if "vocabulary" not in open_sizes:
                raise data.DataError(f"{found.name}: has a vocabulary of {found.vocabulary} tokens, and "
                                     f"{self.job.model} one of {known}")
            args["vocabulary"] = found.vocabulary
        if self.objective.name == "regression" and "classes" in open_sizes:
            args["classes"] = train.classes
        self.model_args = args
        if args != self.job.model_args:
            self.model = self._create(args)
        if self.objective.name == "regression" and self.model.classes != train.classes:
            raise data.DataError(f"{found.name} has {train.classes} number{'s' * (train.classes > 1)} to predict for "
                                 f"each sample, and {self.job.model} gives {self.model.classes}; if y are classes, "
                                 f"make them whole numbers")
        if found.shape != self.model.input_shape:
            flat = (f"; set input_shape = {found.shape} and flatten in forward: x = x.flatten(1)"
                    if self.model.input_shape == (math.prod(found.shape),) else "")
            raise data.DataError(f"{found.name} has samples of {found.shape}, and {self.job.model} takes "
                                 f"{self.model.input_shape}{flat}")
        return self.model.astype(self.dtype), train

    def _check_slices(self) -> None:
        """Raises ValueError if the network cannot read its sequences in the job's slices."""
        q, model, length = self.job.slices, self.job.model, self.model.input_shape[0]
        if q == 1:
            if self.model.time_steps > 1 and self.job.parallel == "pipeline":
                raise ValueError(f"{model} goes through time; a pipeline's orders do not know time steps yet, so train "
                                 f"it on one device or with --parallel data")
            return
        if not self.model.sliceable:
            raise ValueError(f"{model} cannot read its input in slices: it has no sequence, or a token depends on "
                             f"later ones; use gpt or rnn, which can, or another scheduler than {self.job.scheduler}")
        if length % q:
            raise ValueError(f"the {length} tokens of {model} do not divide into {q} slices")

    @functools.cached_property
    def _standardize(self) -> bool | data.Scaling:
        """Whether to standardise data of one's own; by the mean and deviation that the weights go with, if they have
        them."""
        source = self.job.scaling_from or self.job.init
        carried = weights.scaling(source) if source else None
        return self.job.standardize if carried is None else carried

    @functools.cached_property
    def test_data(self) -> data.Loader:
        return self._load("test", self.model.classes)

    def _load(self, split: str, classes: int | None) -> data.Loader:
        """The batches of the data that the job names, in the sizes of its network, for its objective."""
        job, shape = self.job, self.model.input_shape
        sizes: dict[str, Any] = ({"sequence_length": shape[0]} if self.model.input_dtype == "int64" else
                                 {"image_size": shape[0], "channels": shape[2]} if len(shape) == 3 else {})
        name = job.data or ("pydoc" if self.model.input_dtype == "int64" else "digits")
        found = data.load(name, batch_size=job.batch_size, root=job.root, split=split, seed=job.seed,
                          classes=classes, dtype=self.dtype, tokenizer=job.tokenizer,
                          workers=job.workers, standardize=self._standardize, **sizes)
        self.objective = objectives.chosen(self.model.objective, found.dataset)
        return found.of(self.objective.of(found.dataset, job.model, self.model.others))

    def _example(self) -> tuple[Any, Any]:
        x, y = next(self.train_data)
        self.train_data.restore({"position": 0})
        return x, y

    @property
    def weighs(self) -> bool:
        """Whether each part of a batch is weighted by the number of its predictions, since micro-batches, slices and
        ranks make unequal numbers."""
        return self.train_data.dataset.uneven and self.ranks * self.every * self.job.slices > 1

    @property
    def every(self) -> int:
        """The number of micro-batches of an update."""
        return self.job.update_every or self.job.micro_batches

    def predictions(self, y: Any) -> Any:
        """How many predictions this rank makes for each update of a step, (updates,)."""
        return np.array([np.sum(part != data.IGNORED) for part in np.split(y, self.job.micro_batches // self.every)])

    def _split(self, x: Any, y: Any, predictions: Any = None) -> list[Any]:
        """The inputs of a step: x and y of each micro-batch in turn, or of each of its slices; and if they weigh, the
        share in the predictions of the update, times the number of ranks, since gradients are means over ranks.
        `predictions`: of all ranks for each update; by default as if all made as many as this one."""
        n, q = self.job.micro_batches, self.job.slices
        columns = [np.split(a, n) if q == 1 else [s for part in np.split(a, n) for s in np.split(part, q, axis=1)]
                   for a in (x, y)]
        if self.weighs:
            whole = self.predictions(y) * self.ranks if predictions is None else predictions
            own = np.array([np.sum(part != data.IGNORED) for part in columns[1]])
            shares = (own * self.ranks / np.repeat(whole, self.every * q)).astype(self.dtype)
            columns.append([np.asarray(share) for share in shares])
        return [part for row in zip(*columns, strict=True) for part in row]

    def _step(self, *parts: Any) -> Any:
        model, slices, n, scaler = self.model, self.job.slices, self.job.micro_batches, self.optimizer.scaler
        q = slices * model.time_steps  # forwards of a micro-batch, one after the other
        every, groups, rows = self.every, self.job.groups, len(parts) // (n * slices)
        totals: list[Any] = [None] * groups
        loss: Any = None
        for j in range(n * q):
            i, first_slice = j // q, j % q == 0
            group, sample = i * groups // n, self.rank * self.share + i * self.share // n
            if first_slice:
                past = self._past()
                ways = model.with_backward(i) if model.at_once else ()
            with micro_batch(j, sample, group, follows=not first_slice):
                x, y, *weight = parts[rows * (j // model.time_steps) :][:rows]
                with users_code():
                    output = model(x, *past)
                self._check(output, y.shape[0])
                own = model.loss(self.objective.loss(output, y), output)
                if every * q > 1 or weight:
                    own = own * (weight[0] if weight else 1 / (every * q))
                if model.at_once:
                    if j % q in ways:
                        own.backward(scaler.scale if scaler else None)
                    own = own.detach()
                loss = own if first_slice else loss + own
                if (j + 1) % q:
                    continue
                if not model.at_once:
                    loss.backward(scaler.scale if scaler else None)
                part = loss.detach() if every == n else loss.detach() * (every / n)
                totals[group] = part if totals[group] is None else ops.add(totals[group], part)
                if i + 1 == n:
                    total = functools.reduce(ops.add, totals)
                if every < n and (i + 1) % every == 0:
                    self.optimizer.step()
        if every == n:
            self.optimizer.step()
        return total

    def _past(self) -> tuple[Any, ...]:
        """The network's second input: its state between slices or time steps, if it has them."""
        return ((nn.Past(self.model.input_shape[0]),) if self.job.slices > 1 else
                (self.model.past(),) if self.model.time_steps > 1 else ())

    def zeros(self) -> dict[str, Any]:
        """The zeros that `dither` makes of the gradients of the first batch, see `Dither.as_json`, in a copy of the
        network, so that nothing changes."""
        place = self.train_data.state()
        x, y, *_ = self._split(*self._example())
        self.train_data.restore(place)
        tape = Tape(self.device)
        tape.random = random.State(self.job.seed)
        with use(tape), dither(self.job.dither) as found:
            output = deepcopy(self.model).train()(array(x), *self._past())
            self.model.loss(self.objective.loss(output, array(y)), output).backward()
        return found.as_json()

    def _check(self, output: Any, samples: int) -> None:
        """Raises ValueError if a network of classes or numbers does not give as many as it says."""
        if not isinstance(output, Tensor):
            found = "nothing" if output is None else f"a {type(output).__name__}"
            own = type(self.model).__name__
            raise ValueError(f"{place_of(self.model.forward)}: forward of {own} returned {found}, not a tensor")
        wanted = (samples, self.model.classes)
        if self.objective.name in ("classification", "regression") and output.shape != wanted:
            raise ValueError(f"{self.job.model} gives {output.shape} for a batch of {samples}; expected {wanted}, "
                             f"since its classes are {wanted[1]}")

    def plan(self, cost: CostModel, machine: Machine | None = None, *, schedule: Schedule | None = None,
             **options: Any) -> Plan:
        """The plan that the job's scheduler makes of the step, with the job's arguments and the `options` that are not
        None; or the plan of `schedule`, if given.

        `machine`: by default one rank with the job's memory limit. Raises ValueError for a scheduler or an argument
        that does not exist, and as `minidl.plan` does.
        """
        job = self.job
        machine = machine or Machine(memory_limit=job.memory_limit)
        if schedule is not None:
            with paused:
                return replace(schedulers.plan(self.graph, schedule, cost, machine), scheduler=job.scheduler,
                               remarks=self.approximate)
        chosen = schedulers.find(job.scheduler, job.parallel)
        told = {name: value for name, value in {"streams": job.streams, **options}.items() if value is not None}
        with paused:
            made = schedulers.plan(self.graph, chosen, cost, machine, recompute=job.recompute, split=job.split,
                                   shard=job.shard, offload=job.offload, **{**job.scheduler_args, **told})
        return made.with_known(remarks=(*made.remarks, *self.approximate))

    def with_pairs(self, cost: CostModel, measured: bool, progress: Callable[[float], None] | None = None) -> CostModel:
        """The costs with contention added: how much pairs of tasks slow each other down, measured now or from flops and
        bytes."""
        groups, pairs = schedulers.profile_groups(self.graph, cost)
        if not measured:
            return replace(cost, corun=CoRun.estimated(self.graph, groups, pairs))
        return replace(cost,
                       corun=measure_pairs(self.graph, cost, groups, pairs, device=self.device, progress=progress))

    def with_far(self, cost: CostModel) -> CostModel:
        """The costs with the measured bandwidth to far memory."""
        return replace(cost, far=measure_far(self.device))

    def measure(self, progress: Callable[[float], None] | None = None) -> CostModel:
        auto = self.job.split == "auto"
        parts = counts_up_to(self.job.streams or max(2, cores())) if auto else int(self.job.split)
        return measure(self.graph, device=self.device, parts=parts, progress=progress)


def shared(communicator: Communicator, make: Callable[[], T]) -> T:
    """The result of `make`; ranks that share a process get the first rank's result."""
    if communicator.own_process:
        return make()
    found: T = communicator.gather(make() if communicator.rank == 0 else None)[0]
    return found


class Trainer:
    """Runs a job step by step. `seconds`, `waits` (for data, in seconds) and `losses` grow by one entry per step. If
    the device runs behind the host, losses arrive some steps later, and `collect` waits for the rest.

    `schedule`: replaces the one that the job's scheduler would make. `replays`: makes what runs the steps in place of
    the program, from the recorded step, as `minidl.runtime.replica.Replayed` does.
    """

    in_flight = 8  #: if the device runs behind the host, the losses of this many steps may be outstanding
    late = 0  #: how many steps late updates run
    communicator: Communicator | None = None  #: to the other ranks
    _replays: Callable[[TaskGraph], Any] | None = None

    def __init__(self, recorded: Recorded, cost: CostModel, *, trace: bool = False,
                 schedule: Schedule | None = None, replays: Callable[[TaskGraph], Any] | None = None) -> None:
        self.recorded, self.job, self.cost, self.trace = recorded, recorded.job, cost, trace
        self._replays = replays
        self.plan = recorded.plan(cost, schedule=schedule)
        if trace and "race" in self.plan.notes:
            raise ValueError(f"{self.job.scheduler} in real time records no timeline; leave --trace and --html out")
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
                       logged=self.plan.stale)

    def _start(self) -> None:
        self.bystanders = Bystanders()
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.waits: list[float] = []
        self.strange: list[int] = [0]  #: steps that follow something else, which filled caches and kept ranks apart
        self.ended = 0.0  #: when the last step ended
        self._judges: dict[int, SequentialExecutor] = {}
        self._awaited: deque[tuple[Callable[[], Any], Callable[[], bool | None]]] = deque()
        settle()
        self.recorded.device.not_finite()  # forget what earlier runs have reported

    def step(self) -> None:
        """Runs one step on the next batch. Raises TrainingError as `collect` does, on CUDA for an earlier step; before
        anything has changed, DataError for data that cannot be read, or on ranks Disagreement on all of them."""
        run, device = self.run, self.recorded.device
        asked = perf_counter()
        parts = self._inputs()
        begin = perf_counter()
        loss = run(*parts)
        if loss is not None:  # in a pipeline, only the last rank has it
            self._awaited.append((loss.fetch(), device.fetch_not_finite()))
        self.collect(self.in_flight if device.captures else 0)
        self.ended = perf_counter()
        self.seconds.append(self.ended - begin)
        self.waits.append(begin - asked)

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
        """Waits until the losses of only `rest` steps are outstanding. Raises TrainingError for a loss that is not
        finite, and on CUDA if an update of that step used a gradient that is not finite."""
        while len(self._awaited) > rest:
            value, not_finite = self._awaited.popleft()
            loss, bad = float(value()), not_finite()
            self.losses.append(loss)
            step = len(self.losses)
            if bad and (self.late or np.isfinite(loss)):
                raise self._failed("a gradient is not finite", step - self.late)
            if not np.isfinite(loss):
                raise self._failed(f"the loss is {loss}", step)

    def settle(self) -> None:
        """Waits for all losses and runs the late updates. Raises TrainingError as `collect` does, also for these
        updates."""
        self.collect()
        for owing in unsettled & {self.run}:
            owing.settle()
        if self.recorded.device.not_finite():
            raise self._failed("a gradient is not finite", len(self.losses))

    def share(self) -> None:
        """Settles the run; on ranks, all of them together. Rank 0 then has the whole model."""
        self.settle()

    def latest(self) -> float:
        """The loss of the last step, the mean over ranks that have it; all must ask together. Raises TrainingError as
        `collect` does."""
        self.collect()
        mine = self.losses[-1] if self.losses else None
        every = [mine] if self.communicator is None else self.communicator.gather(mine)
        return float(np.mean([loss for loss in every if loss is not None]))

    def _failed(self, what: str, step: int) -> TrainingError:
        return TrainingError(f"{what} at step {step} of {self.job.model} with lr {self.recorded.optimizer.lr:g}; try a "
                             f"smaller lr (MINIDL_DEBUG=1 names the layer)")

    def evaluate(self) -> dict[str, float]:
        """The metrics of the network's objective over the test data, by name; `loss` is one of them. Raises
        TrainingError for one that is not finite."""
        recorded, model, runs = self.recorded, self.recorded.model.eval(), self._judges
        sums: Any = 0.0
        test = recorded.test_data
        test.restore({"position": 0})
        try:
            for x, y in test:
                if len(x) not in runs:
                    with use(recorded.tape), no_grad(), self.job.autocast, users_code():
                        runs[len(x)] = SequentialExecutor(record(model, x, name="eval"), recorded.device)
                sums = sums + recorded.objective.score(runs[len(x)](x).numpy(), y)
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
        """The cores of this machine that other processes have used until this is first asked for; of ranks, all ask
        together."""
        return self.bystanders.cores(self.communicator)

    def params_sha256(self) -> str:
        return params_sha256(self.recorded.model)


def params_sha256(model: nn.Module) -> str:
    """The SHA-256 of every parameter once, in state-dict order, little-endian."""
    return sha256_of(p for _, p in model.named_parameters())


def sha256_of(parameters: Iterable[Parameter]) -> str:
    """The SHA-256 of these parameters in their order, little-endian."""
    digest = hashlib.sha256()
    for p in parameters:
        array = np.ascontiguousarray(state_array(p))
        digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
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
