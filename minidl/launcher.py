"""What a launcher (mpiexec, srun) tells the processes that it starts, before MPI does. Knows no MPI."""

from __future__ import annotations

import os
from collections.abc import Sequence

RANK = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
# not SLURM_NTASKS: a batch script that srun did not start has it too
SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def _number(names: Sequence[str]) -> int | None:
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), None)


def rank() -> int | None:
    """This process's number among those that were started together; None without a launcher."""
    return _number(RANK)


def size() -> int:
    """How many processes were started together; 1 where nothing says so."""
    return _number(SIZE) or 1
