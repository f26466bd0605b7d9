"""The launcher that started this process (mpiexec, srun), as environment variables tell before MPI starts: its name,
this process's rank, how many there are. And whether its ranks can meet in an MPI library: one of another kind ends them
with its own words, or lets each believe that it is alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

RANK = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
# not SLURM_NTASKS: it is also set in a batch script, which srun did not start
SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
#: launcher -> a variable that only its processes have; the first counts, since srun may have started the others
NAMES = {"Open MPI's mpiexec": "OMPI_COMM_WORLD_SIZE", "Intel MPI's mpiexec": "I_MPI_HYDRA_UUID",
         "MPICH's mpiexec": "MPI_LOCALNRANKS", "Slurm's srun": "SLURM_STEP_NUM_TASKS"}
#: libraries by their names in mpi4py -> whose mpiexec connects their ranks: MPICH and its descendants share one
STARTED_BY = {"Open MPI": ("Open MPI",), **dict.fromkeys(("MPICH", "Intel MPI", "MVAPICH", "Cray MPI"),
                                                         ("MPICH", "Intel MPI"))}
#: mpiexec by what it says of its version
VERSIONS = {r"HYDRA build details": "MPICH", r"Intel\(R\) MPI": "Intel MPI", r"Open(RTE| MPI)": "Open MPI"}


def _number(names: Sequence[str]) -> int | None:
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), None)


def rank() -> int | None:
    """The number of this process among those that the launcher started; None without a launcher."""
    return _number(RANK)


def local_rank() -> int:
    """Its number among those on this machine; 0 without a launcher."""
    return _number(LOCAL_RANK) or 0


def size() -> int:
    """How many processes the launcher started; 1 without a launcher."""
    return _number(SIZE) or 1


def name() -> str | None:
    """Whose launcher started this process; None without one, or if it is unknown."""
    return next((found for found, variable in NAMES.items() if os.environ.get(variable)), None)


def connects(launcher: str | None, library: str) -> bool:
    """Whether ranks that the launcher starts can meet in this MPI library, `library` as in `STARTED_BY`; True where
    nobody can know it beforehand."""
    maker = (launcher or "").partition("'s mpiexec")
    return not maker[1] or maker[0] in STARTED_BY.get(library, maker)


def cure(library: str) -> str:
    """How to start ranks of this library instead."""
    beside = os.path.join(sys.prefix, "bin", "mpiexec")
    there = f" ({beside})" if os.path.exists(beside) and connects(of(beside), library) else ""
    return (f"start them with the mpiexec of {library}{there}, or install the launcher's MPI in this environment in "
            f"place of {library}")


def of(mpiexec: str) -> str | None:
    """The name of the launcher that this program is, by what it says of its version; None if that is unknown."""
    import re
    import subprocess  # the start of a command does not need it

    try:
        said = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next((f"{maker}'s mpiexec" for pattern, maker in VERSIONS.items() if re.search(pattern, said)), None)


def first() -> tuple[str, str | None] | None:
    """The `mpiexec` that a shell finds here, and its name; None if there is none."""
    import shutil

    path = shutil.which("mpiexec")
    return None if path is None else (path, of(path))
