"""The settings and the transport that all ranks must agree on before they train, and the device of each rank."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np

from .. import __version__
from ..autograd.tensor import Tensor
from ..runtime.comm import Communicator
from .agreement import agree
from .recorded import Recorded
from .trainer import sha256_of

#: transports for gradients of a CUDA device; MPI reads the CPU's directly
TRANSPORTS = ("staged", "cuda-aware", "nccl")


def identity(recorded: Recorded, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that must be equal on all ranks; the simplest first, since the first difference is reported.
    `flags`: the command's by name; settings that follow from them alone are not compared again."""
    job, data = recorded.job, recorded.train_data
    return {"the version of minidl": __version__, "the version of Python": platform.python_version(),
            "the version of NumPy": np.__version__, "the model": job.model,
            "the model's arguments": dict(job.model_args), "the seed": job.seed, "the batch size": job.batch_size,
            **flags, "the objective": recorded.objective.name,
            "the data set": data.name, "the number of samples": data.dataset.samples,
            "the number of classes": data.classes,
            "the tokenizer's hash": sha256(data.dataset.tokenizer.encode()).hexdigest()[:16],
            "the share of a batch": recorded.share, "the number of slices": job.slices,
            "the number of micro-batches of an update": job.update_every, "the learning rate": job.lr,
            "the kind of device": job.device.partition(":")[0],
            "the first labels' hash": sha256(np.ascontiguousarray(recorded.first_labels).data).hexdigest()[:16],
            "the hash of the network and its parameters": step_sha256(recorded)[:16]}


def step_sha256(recorded: Recorded) -> str:
    """The SHA-256 of a step before training: of its operations, and of all that they read besides inputs, by its values
    or the rule that makes them when asked for. It is equal for all parts of a batch."""
    graph, first = recorded.graph, recorded.rank * recorded.share
    launches = [launch.shifted(-first) for each in graph.launches for launch in each]
    told = [(x.kernel, *(c for c in x.constants if isinstance(c[1], int | float | str | tuple))) for x in launches]
    every = [spec.live for spec in graph.storages if spec.live is not None]
    rules = [repr(s.initial and s.initial[1]) for s in every]
    values = sha256_of(Tensor(s) for s in every if s.initial is None)
    return sha256(f"{told}{rules}{values}".encode() + graph.keys.tobytes()).hexdigest()


def device_of(name: str, communicator: Communicator) -> str:
    """The device of this rank. With `cuda`, the ranks of a machine use its GPUs in turn, and share them if there are
    fewer GPUs than ranks. Raises DeviceError without a GPU."""
    if name != "cuda":
        return name
    from ..devices.cuda.device import gpus

    return f"cuda:{communicator.local_rank % gpus()}"


def transport(name: str, communicator: Communicator, device: Any) -> Communicator:
    """The transport for a device's gradients, by its name in TRANSPORTS. Raises Disagreement if there is none."""
    if name == "staged":
        return communicator

    def make() -> tuple[Communicator, dict[str, Any]]:
        if name == "nccl":
            from ..runtime.comm.nccl import NCCL

            return NCCL(communicator, device), {}
        from ..runtime.comm.mpi import MPI

        assert isinstance(communicator, MPI)
        return communicator.for_devices(), {}

    return agree(communicator, make)
