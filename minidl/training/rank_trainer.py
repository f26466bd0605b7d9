"""A training run on several ranks that is described by names and numbers: the settings that ranks must agree on, the
cost of the link, and the run."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from socket import gethostname
from threading import Thread
from time import perf_counter
from typing import Any

import numpy as np

from .. import nn
from ..core.graph import View
from ..core.machine import Machine
from ..core.tasks import Kind
from ..devices import device as devices
from ..measuring.lanes import siblings
from ..measuring.measure import transfer_time
from ..plans.memory import MemoryLimitError
from ..plans.plan import Plan
from ..pricing.cost import CostModel
from ..runtime.comm import SLOTS, Communicator
from ..runtime.comm.flight import Entry, Flight
from ..runtime.comm.handover import handover
from .agreement import agree
from .recorded import Recorded
from .trainer import Trainer, TrainingError, sha256_of, shared

TRIAL_STEPS = 6  #: steps for each k when measurement confirms k
#: transports for gradients of a CUDA device; MPI reads the CPU's directly
TRANSPORTS = ("staged", "cuda-aware", "nccl")


def identity(recorded: Recorded) -> dict[str, Any]:
    """The settings that must be equal on all ranks; the simplest first, since the first difference is reported."""
    import platform

    from .. import __version__

    job, data = recorded.job, recorded.train_data
    return {"the version of minidl": __version__, "the version of Python": platform.python_version(),
            "the version of NumPy": np.__version__, "the model": job.model,
            "the model's arguments": dict(job.model_args), "the objective": recorded.objective.name,
            "the type": job.dtype, "the seed": job.seed,
            "the data set": data.name, "the number of samples": data.dataset.samples,
            "the number of classes": data.classes,
            "the tokenizer's hash": sha256(data.dataset.tokenizer.encode()).hexdigest()[:16],
            "the batch size": job.batch_size, "the share of a batch": recorded.share,
            "the number of micro-batches": job.micro_batches,
            "the number of slices": job.slices,
            "the number of micro-batches of an update": job.update_every,
            "the optimizer": job.optimizer, "the learning rate": job.lr,
            "the momentum": job.momentum, "the weight decay": job.weight_decay, "the norm to clip at": job.clip,
            "the dither": job.dither, "the backward pass": [job.backward, job.sweeps, job.block],
            "the scheduler": job.scheduler,
            "the scheduler's arguments": dict(job.scheduler_args),
            "the memory limit": job.memory_limit, "the kind of device": job.device.partition(":")[0], "TF32": job.tf32,
            "determinism": job.deterministic, "the fusion": job.fusion, "the recomputing": job.recompute,
            "the sharding": job.shard, "the parts of tasks": job.split, "the offloading": job.offload,
            "the parameters' hash": initial_sha256(recorded.model)}


def initial_sha256(model: nn.Module) -> str:
    """The SHA-256 of every parameter before training: of its values, or of the rule for those that nobody has asked
    for."""
    every = [p for _, p in model.named_parameters()]
    rules = [repr(p.storage.initial and p.storage.initial[1]) for p in every]
    return sha256((sha256_of(p for p in every if p.storage.initial is None) + "".join(rules)).encode()).hexdigest()


def device_of(name: str, communicator: Communicator) -> str:
    """The device of this rank. With `cuda`, the ranks of a machine use its GPUs in turn, and share them if there are
    fewer GPUs than ranks. Raises DeviceError without a GPU."""
    if name != "cuda":
        return name
    from ..devices.cuda.device import gpus

    return f"cuda:{communicator.local_rank % gpus()}"


def transport(name: str, communicator: Communicator, device: Any) -> Communicator:
    """The transport for gradients of a device, by its name in TRANSPORTS. Raises Disagreement if it is not
    available."""
    if name == "staged":
        return communicator

    def make() -> tuple[Communicator, dict[str, Any]]:
        if name == "nccl":
            from ..runtime.comm.nccl import NCCL

            return NCCL(communicator, device), {}
        from ..runtime.comm.mpi import MPI

        assert isinstance(communicator, MPI)
        return communicator.for_devices(), {}

    made: Communicator = agree(communicator, make)
    return made


def measure_link(communicator: Communicator, device: Any = None, group: Communicator | None = None,
                 sizes: tuple[int, int, int] = (4, 2**18, 2**22), repeats: int = 15) -> tuple[float, float]:
    """Microseconds of an all-reduce of gradients on a device (default: the CPU): (per all-reduce, per byte). All ranks
    return rank 0's figures. `group`: the ranks that sum with this one (default: all); others sum at the same time.

    A row of the smallest size gives the first figure, as small sums of a step come in rows; the difference of the other
    two sizes gives the second, so that bursts of a link do not count.
    """
    device, group = device or devices.cpu(), group or communicator
    hand, flight, took = handover(device), Flight(communicator), []
    for size, row in zip(sizes, (4 * SLOTS, 1, 1), strict=True):
        nbytes, transfers = 4 * max(size // 4, group.size), []
        memory = [device.allocate(nbytes) for _ in range(min(row, SLOTS))]  # held while it is used
        for slot, own in enumerate(memory):
            array = device.array(own, View(0, (nbytes // 4,), (1,), 0, "float32"))
            device.write(array, np.zeros(nbytes // 4, np.float32))
            transfers.append(group.bind(Kind.A, hand.place(group, [array], ()), slot))
        entries = [Entry(i, transfers[i % SLOTS], i % SLOTS, nbytes) for i in range(row)]
        times = []
        for _ in range(repeats):
            communicator.gather(None)
            begin = perf_counter()
            for entry in entries:
                flight.submit(entry)
            flight.drain()
            device.synchronize()
            times.append((perf_counter() - begin) * 1e6 / row)
        took.append(transfer_time(times))
    slope = max(0.0, (took[2] - took[1]) / (sizes[2] - sizes[1]))
    each, rate = communicator.gather((took[0], slope))[0]
    return float(each), float(rate)


def hold_to_cores(communicator: Communicator) -> None:
    """Holds this process to its part of its machine's cores, if the ranks there may all use the same ones, at least one
    each: where they are free to move, the threads that sum push other ranks off their cores. A launcher's own binding
    stays. All ranks call it together, before they start threads."""
    place = gethostname(), sorted(os.sched_getaffinity(0), key=lambda core: (min(siblings(core)), core))
    places = communicator.gather(place)
    here = [rank for rank, (host, _) in enumerate(places) if host == place[0]]
    if all(places[rank] == place for rank in here) and 1 < len(here) <= len(place[1]):
        with suppress(OSError):  # the system may refuse
            os.sched_setaffinity(0, np.array_split(place[1], len(here))[here.index(communicator.rank)].tolist())


def cores_of_each(communicator: Communicator) -> int:
    """How many cores each rank has to itself, at least 1: the least of any machine's cores over its ranks. A rank with
    one core computes and moves gradients on it, see `share_of_core`. All ranks call it together."""
    places = communicator.gather((gethostname(), sorted(os.sched_getaffinity(0))))
    hosts = [host for host, _ in places]
    return max(1, min(len({core for there, cores in places if there == host for core in cores}) // hosts.count(host)
                      for host in hosts))


def share_of_core(communicator: Communicator, repeats: int = 7, size: int = 2**21, width: int = 448) -> float:
    """The share of its core that a rank needs to sum gradients, from 0 to 1: a transfer naps between its parts, and the
    core computes meanwhile. It follows from the time of both at once, a sum of `size` bytes and a product of `width`,
    over the time of one after the other. All ranks measure at the same time; all return rank 0's."""
    hand, flight = handover(devices.cpu()), Flight(communicator)
    factor, product = np.ones((2, width, width), np.float32)
    transfer = communicator.bind(Kind.A, hand.place(communicator, [np.zeros(size // 4, np.float32)], ()), 0)

    def compute() -> None:
        np.matmul(factor, factor, out=product)

    def communicate() -> None:
        flight.submit(Entry(0, transfer, 0, size))
        flight.drain()

    times = []
    for _ in range(repeats):
        for together, call in ((None, compute), (None, communicate), (compute, communicate)):
            thread = Thread(target=together) if together else None
            communicator.gather(None)
            begin = perf_counter()
            if thread:
                thread.start()
            call()
            if thread:
                thread.join()
            times.append(perf_counter() - begin)
    computed, summed, both = np.reshape(times, (-1, 3)).min(axis=0)  # other work on the machine only adds time
    return float(np.clip(communicator.gather(2 * both / (computed + summed) - 1)[0], 0.0, 1.0))


def among_ranks(cost: CostModel, communicator: Communicator) -> CostModel:
    """The costs of one process's lanes, for ranks that share out the cores of their machines and sum gradients. All
    ranks call it together."""
    if cost.cores is None or communicator.size == 1:
        return cost
    cores = cores_of_each(communicator)
    return replace(cost, cores=cores, summing=share_of_core(communicator.host) if cores == 1 else 1.0)


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
        plans, self._of = shared(communicator, lambda: (self._plans(k, buckets), recorded))
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
            slowest = self.communicator.gather(float(np.median(self.seconds[-TRIAL_STEPS + 2 :])))
            self._tried.append((max(slowest), self.plan.notes["k"]))
        if len(self._tried) == len(self._trials):
            best = min(self._tried)[1]
            chosen, self._trials = next(p for p in self._trials if p.notes["k"] == best), []
            self.strange = [*range(len(self.seconds) + 1)]  # of other plans, or the first one of this
        else:
            chosen = self._trials[len(self._tried)]
        if chosen is not self.plan:
            self.run.close()
            self._use(chosen)

    def share(self, everywhere: bool = False) -> None:
        """Runs the late updates of all ranks, which must call it together: each one sums gradients with the others.
        Rank 0 then has the states and parameters that ranks share out as a whole; `everywhere`: all ranks have the
        parameters."""
        self.collect()
        self.run.settle()
        self.settle()
        self.run.whole(everywhere)

    def finish(self) -> None:
        """Runs the last updates, and averages the losses over ranks. Raises TrainingError as `collect` does, and where
        parameters differ between ranks."""
        self.share(everywhere=True)
        self.run.close()
        self.settle()
        _ = self.others
        shares = self.communicator.gather((self.losses, self.params_sha256()))
        self.losses = np.mean([losses for losses, _ in shares], axis=0).tolist()
        different = [r for r, (_, sha) in enumerate(shares) if sha != shares[0][1]]
        if different:
            raise TrainingError(f"rank {different[0]} has other parameters than rank 0 after {len(self.losses)} steps")
