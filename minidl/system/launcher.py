"""Rank and size of a job from its launcher's environment variables (mpiexec, srun), before MPI starts; no MPI
needed."""

from __future__ import annotations

import os
from collections.abc import Sequence

RANK = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
# not SLURM_NTASKS: it is also set in a batch script, which srun did not start
SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def _number(names: Sequence[str]) -> int | None:
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), None)


def rank() -> int | None:
    """The number of this process among those that the launcher started; None without a launcher."""
    return _number(RANK)


def size() -> int:
    """How many processes the launcher started; 1 without a launcher."""
    return _number(SIZE) or 1
