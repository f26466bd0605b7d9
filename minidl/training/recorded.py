"""A job's network, optimizer and data, and its step as a graph, which plans are made of."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import numpy as np

from .. import data, fusion, models, nn, ops, optim, schedulers
from ..autograd import random
from ..autograd.recording import record
from ..autograd.tape import Tape, micro_batch, use
from ..autograd.tensor import Parameter, Tensor, array
from ..core.graph import TaskGraph
from ..core.machine import Machine
from ..core.schedule import Schedule
from ..data.feed import fed
from ..devices import device as devices
from ..measuring.lanes import cores
from ..measuring.measure import measure
from ..measuring.pairs import measure_pairs
from ..measuring.sms import needs
from ..ops.dither import dither
from ..passes.sweeps import swept
from ..plans.plan import Plan
from ..plans.program import Program
from ..pricing.corun import CoRun
from ..pricing.cost import CostModel, counts_up_to
from ..system.loading import place_of, users_code
from ..system.process import paused
from . import objectives, weights
from .job import MOMENTUM, OPTIMIZERS, Job

FIRST = 64  #: how many labels ranks compare


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
            self.device.dependent_launch = job.dependent_launch
        else:
            self.device.set_lanes(job.lanes)
            self.device.set_far_file(job.offload_to)
        self.tape = Tape(self.device)
        self.tape.random = random.State()  # other runs in this process, and other ranks, have their own
        self._notes = list[str]()  #: of the data, which are printed if nothing is wrong
        with use(self.tape):
            self.model, train = self._fitted()
            self._check_slices()
            self.remarks = () if job.init is None else weights.load(job.init, self.model).said(job.init)
            self.optimizer = self._optimizer()
            self.optimizer.max_norm = job.clip
            self.optimizer.scaler = optim.GradScaler() if job.low == "float16" else None
        first = data.Loader(train.dataset, min(FIRST, job.batch_size), seed=job.seed)
        self.first_labels = first.read(0)[1] if job.parallel != "none" else None  #: the same on all ranks
        self.train_data = fed(train.shard(rank, ranks), job.feed)
        self.share = job.batch_size // ranks  #: samples of a step on this rank
        if self.share % job.micro_batches:
            raise ValueError(f"a rank's {self.share} samples of a batch of {job.batch_size} do not divide into "
                             f"{job.micro_batches} micro-batches")
        with use(self.tape), job.autocast, dither(job.dither):
            graph = record(self._step, *self._split(*self._example()), name=job.model)
        graph, self.approximate = swept(graph, job.backward, job.newton, sweeps=job.sweeps, block=job.block)
        self.graph = self._fused(graph, ranks)
        self._say()

    def _say(self) -> None:
        for line in self._notes:
            data.say(line)
        self._notes.clear()

    def copy(self, rank: int) -> Recorded:
        """The same recording for another rank of this process, with its own network, optimizer and part of batches."""
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
        gradients go to other ranks or belong to a pipeline's stages, which also write over nothing of each other."""
        rules = self.job.fusion if self.job.fusion is not None else tuple(fusion.RULES) if self.device.captures else ()
        staged = self.job.parallel == "pipeline"
        apart = ("casts", "weight_updates", "updates") * (staged or ranks > 1) + ("in_place",) * staged
        rules = tuple(rule for rule in rules if rule not in apart)
        return fusion.fused(graph, self.device, rules) if rules else graph

    @property
    def dtype(self) -> str:
        """The type of parameters and inputs."""
        return "float32" if self.job.low else self.job.dtype

    def _optimizer(self) -> optim.Optimizer:
        job, given, every = self.job, dict(self.job.optimizer_args), self.model.parameters()
        momentum = MOMENTUM.get(job.optimizer) if job.momentum is None else job.momentum
        if momentum is not None:
            given["momentum"] = momentum
        if job.weight_decay is not None:
            given["weight_decay"] = job.weight_decay
        if job.optimizer == "muon":
            every, others = nn.hidden_matrices(self.model)
            given = {"adjust_lr_fn": "match_rms_adamw", **given, "others": self._groups(others)}
            self.remarks += (_division(every, others),)
        return OPTIMIZERS[job.optimizer](self._groups(every), job.lr, **given)

    def _groups(self, parameters: list[Parameter]) -> list[Any]:
        """These parameters; each as a group of its own if its learning rate depends on its delay."""
        return [{"params": [p]} for p in parameters] if self.job.rates_by_delay else [*parameters]

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
        """Whether to standardise data of one's own; by the mean and deviation of the weights, if they have them."""
        source = self.job.scaling_from or self.job.init
        carried = weights.scaling(source) if source else None
        return self.job.standardize if carried is None else carried

    @functools.cached_property
    def test_data(self) -> data.Loader:
        found = self._load("test", self.model.classes)
        self._say()
        return found

    def _load(self, split: str, classes: int | None) -> data.Loader:
        """The batches of the data that the job names, in the sizes of its network, for its objective."""
        job, shape = self.job, self.model.input_shape
        sizes: dict[str, Any] = ({"sequence_length": shape[0]} if self.model.input_dtype == "int64" else
                                 {"image_size": shape[0], "channels": shape[2]} if len(shape) == 3 else {})
        name = job.data or ("pydoc" if self.model.input_dtype == "int64" else "digits")
        found = data.load(name, batch_size=job.batch_size, root=job.root, split=split, seed=job.seed,
                          classes=classes, dtype=self.dtype, tokenizer=job.tokenizer,
                          workers=job.workers, standardize=self._standardize, note=self._notes.append, **sizes)
        self.objective = objectives.chosen(self.model.objective, found.dataset)
        return data.Loader(self.objective.of(found.dataset, job.model, self.model.others), job.batch_size,
                           seed=job.seed, training=found.training)

    def _example(self) -> tuple[Any, Any]:
        x, y = next(self.train_data)
        self.train_data.restore({"position": 0})
        return x, y

    @property
    def weighs(self) -> bool:
        """Whether parts of a batch weigh as many predictions as they make, since they may make unequal numbers."""
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
            shares = (own * self.ranks / np.repeat(np.maximum(whole, 1), self.every * q)).astype(self.dtype)
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
        if job.offload == "auto" and not chosen.own and "lag" in chosen.options:
            told = {"lag": "auto", **told}
        if job.group_weights != 1:
            told["group_weights"] = job.group_weights
        with paused:
            made = schedulers.plan(self.graph, chosen, cost, machine, recompute=job.recompute, split=job.split,
                                   shard=job.shard, offload=job.offload, order=job.order,
                                   experts_over=job.experts_over,
                                   **{**job.scheduler_args, **told})
        return made.with_known(remarks=(*made.remarks, *self.approximate))

    def with_pairs(self, cost: CostModel, measured: bool, progress: Callable[[float], None] | None = None) -> CostModel:
        """The costs with contention: how much pairs of tasks slow each other, measured now or from flops and bytes."""
        groups, pairs = schedulers.profile_groups(self.graph, cost)
        if measured:
            corun = measure_pairs(self.graph, cost, groups, pairs, device=self.device, progress=progress)
        else:
            corun = (CoRun(groups, {}, "estimated", needs(self.graph, cost, groups, self.device))
                     if self.device.captures else CoRun.estimated(self.graph, groups, pairs))
        return replace(cost, corun=corun)

    def measure(self, progress: Callable[[float], None] | None = None) -> CostModel:
        auto = self.job.split == "auto"
        parts = counts_up_to(self.job.streams or max(2, cores())) if auto else int(self.job.split)
        return measure(self.graph, device=self.device, parts=parts, progress=progress)


def _division(matrices: list[Parameter], others: list[Parameter]) -> str:
    """A line that says which parameters Muon trains."""
    count = [sum(math.prod(p.shape) for p in some) for some in (matrices, others)]
    return (f"Muon trains {len(matrices)} matrices of hidden layers with {count[0]:,} elements; AdamW trains "
            f"{len(others)} embeddings, heads, vectors, convolutions and experts with {count[1]:,}")
