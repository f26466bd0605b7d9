"""Random trainings on 2 to 4 ranks: data-parallel ones, pipelines, shards, replicas, stale pipelines. As a program
under mpiexec it trains each given seed, and rank 0 prints a digest of the losses and tensors."""

from __future__ import annotations

import hashlib
import sys
from functools import partial
from typing import Any

import numpy as np
import stale_runs
import test_random_shards as random_shards
from rank_runs import Left, merged, prepared, train

from minidl.core.placement import PipelineError, Refused
from minidl.plans.memory import MemoryLimitError
from minidl.runtime.comm.loopback import run_ranks

KINDS = ("data", "pipeline", "replicas", "stale")


def draw(seed: int) -> dict[str, Any]:
    """The settings of a job; each kind in its turn."""
    kind, random = KINDS[seed % len(KINDS)], np.random.default_rng([seed, 3])
    if kind == "stale":
        name, optimizer = (str(random.choice(list(names))) for names in (stale_runs.POLICIES, stale_runs.OPTIMIZERS))
        return stale_runs.settings_of(name, int(random.integers(2, 5)), optimizer=optimizer,
                                      network=stale_runs.Drawn(seed))
    settings = {"loss": True, **(random_shards.draw_ranks if kind == "data" else random_shards.draw)(seed)}
    settings["network"] = partial(settings["network"], sides=settings.get("sides", ()))
    if kind == "pipeline":
        settings |= {"shard": 0, "replicas": 1, "ranks": int(random.integers(2, 5))}
        settings["micro_batches"] = 2 * settings["ranks"]
    return settings


def size(settings: dict[str, Any]) -> int:
    return int(settings["ranks"] * settings.get("replicas", 1))


def digest(left: Left) -> str:
    found = hashlib.sha256(repr(left.losses).encode())
    for name, bits in sorted(left.tensors.items()):
        found.update(name.encode() + bits)
    return found.hexdigest()


def in_one_process(count: int, first: int = 0) -> dict[int, dict[int, str]]:
    """Runs so many jobs of at most 4 ranks by loop-back, from the seed `first` on; returns for each number of ranks
    seed -> digest. It leaves out jobs that a policy cannot plan."""
    found: dict[int, dict[int, str]] = {}
    seed = first - 1
    while sum(map(len, found.values())) < count:
        settings = draw(seed := seed + 1)
        if size(settings) > 4:
            continue
        try:
            own = prepared(settings)
        except (PipelineError, Refused, MemoryLimitError):
            continue
        left = merged(settings, run_ranks(len(own), lambda comm, own=own: train(comm, *own[comm.rank])))
        found.setdefault(size(settings), {})[seed] = digest(left)
    return found


def main() -> None:
    """One rank under mpiexec."""
    from minidl.runtime.comm.mpi import MPI

    communicator = MPI()
    for seed in map(int, sys.argv[1:]):
        settings = draw(seed)
        found = communicator.gather(train(communicator, *prepared(settings, communicator.rank)[0]))
        if communicator.rank == 0:
            print("digest", seed, digest(merged(settings, found)), flush=True)
    communicator.gather(None)
    communicator.close()


if __name__ == "__main__":
    main()
