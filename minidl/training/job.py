"""The settings of a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from .. import optim
from ..autograd.op import autocast

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": optim.SGD, "adam": optim.Adam, "adamw": optim.AdamW, "nadamw": optim.NAdamW, "rmsprop": optim.RMSprop,
    "muon": optim.Muon}
MOMENTUM = {"sgd": 0.9, "rmsprop": 0.0, "muon": 0.95}  #: the optimizers that have a momentum, with its default
#: the arguments of optimizers that a job has by another name
OWN = {"parameters", "others", "lr", "momentum", "weight_decay", "max_norm", "scaler"}
#: float type of a run -> in mixed precision, the 16-bit type of products (parameters stay float32)
DTYPES = {"float32": None, "float64": None, "bf16": "bfloat16", "fp16": "float16"}


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
    dependent_launch: bool = False  #: see `minidl.devices.cuda.device.Cuda`
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
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)  #: its other arguments
    clip: float | None = None  #: the largest global norm of all gradients
    rates_by_delay: int | None = None  #: steps over which a stale pipeline's rates grow to `lr`, see `optim.by_delay`
    seed: int = 0
    scheduler: str = "in_order"
    parallel: str = "none"
    order: str = "fixed"  #: of a pipeline: fixed, or hint, see `minidl.passes.hint`
    scheduler_args: Mapping[str, Any] = field(default_factory=dict)
    streams: int | None = None
    memory_limit: int | None = None
    dither: float = 0.0  #: the step of rounded gradients in standard deviations, see `minidl.ops.dither`
    newton: int | None = None  #: Newton iterations of the forward pass, see `minidl.passes.newton`
    backward: str = "exact"  #: a backward pass of `minidl.passes.sweeps`,
    sweeps: int | None = None  #: with so many sweeps (None: until it is exact),
    block: int | None = None  #: over blocks of so many layers or time steps
    recompute: str = "none"  #: which activations are computed again, see `minidl.schedulers.search.kept`
    split: int | str = 1  #: the number of parts of each task, or auto, see `minidl.schedulers.search.wide`
    group_weights: int | str = 1  #: how many weight gradients wait for each other at most, or auto, see `passes.group`
    experts_over: str = "none"  #: none, or data: each data-parallel rank has a share, see `minidl.passes.experts`
    shard: int | str = 0  #: what ranks share out: 1, the optimizer's states, see `minidl.passes.shard`
    offload: str = "none"  #: the memory that leaves, see `minidl.schedulers.search.away`
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
        if not self.device.startswith("cuda"):
            if self.low:
                raise ValueError(f"{self.dtype} needs a CUDA device; {self.device} computes in float32 and float64")
            if self.tf32:
                raise ValueError(f"tf32 is only for CUDA devices, not for {self.device}")
            if self.dependent_launch:
                raise ValueError(f"dependent launch is only for CUDA devices, not for {self.device}")
            if not self.deterministic:
                raise ValueError(f"nondeterministic is only for CUDA devices; {self.device} always repeats its bits")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {self.optimizer!r}; known: {', '.join(OPTIMIZERS)}")
        known = [*signature(OPTIMIZERS[self.optimizer]).parameters.keys() - OWN]
        for name in self.optimizer_args.keys() - {*known}:
            raise ValueError(f"{self.optimizer} takes no argument {name!r}; it takes {', '.join(sorted(known))}")

    @property
    def low(self) -> str | None:
        """The 16-bit type of products, in mixed precision."""
        return DTYPES[self.dtype]

    @property
    def autocast(self) -> AbstractContextManager[None]:
        """The context in which the model is called."""
        return autocast(self.low) if self.low else nullcontext()
