"""The launcher that started this process (mpiexec, srun), as environment variables tell before MPI starts: its name,
this process's rank, how many there are. And whether its ranks can meet in an MPI library: one of another kind ends them
with its own words, or lets each believe that it is alone."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass

SRUN, TORCHRUN = "Slurm's srun", "torchrun"


@dataclass(frozen=True)
class Variables:
    """Where a launcher tells its processes how many there are, and which one each is, of all and of its machine. Only
    its processes have the variable `mark`."""

    mark: str
    size: str
    rank: str
    local_rank: str


#: launchers by name. If several marks are there, the first one counts unless Linux tells more. SLURM_PROCID and
#: SLURM_NTASKS are no marks, since a batch script has them, which srun did not start.
LAUNCHERS = {
    TORCHRUN: Variables("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK", "LOCAL_RANK"),  # no launcher of MPI's
    "Open MPI's mpiexec": Variables("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
                                    "OMPI_COMM_WORLD_LOCAL_RANK"),
    "Intel MPI's mpiexec": Variables("I_MPI_HYDRA_UUID", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    "MVAPICH's mpirun_rsh": Variables("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK",
                                      "MV2_COMM_WORLD_LOCAL_RANK"),
    "MPICH's mpiexec": Variables("MPI_LOCALNRANKS", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    SRUN: Variables("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    "an unknown launcher": Variables("PMI_RANK", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    "a launcher of PMIx": Variables("PMIX_RANK", "", "PMIX_RANK", ""),  # it tells the rest to the library alone
    f"a launcher like {TORCHRUN}": Variables("RANK", "WORLD_SIZE", "RANK", "LOCAL_RANK"),  # of PyTorchJob, DeepSpeed
}
#: libraries by their names in mpi4py -> whose launcher connects their ranks: MPICH and its descendants share one
STARTED_BY = {"Open MPI": ("Open MPI",), **dict.fromkeys(("MPICH", "Intel MPI", "MVAPICH", "Cray MPI"),
                                                         ("MPICH", "Intel MPI", "MVAPICH"))}
#: mpiexec by what it says of its version
VERSIONS = {r"HYDRA build details": "MPICH", r"Intel\(R\) MPI": "Intel MPI", r"Open(RTE| MPI)": "Open MPI"}


def name() -> str | None:
    """Whose launcher started this process; None without one. If several marks are there, one of its shells was started
    by another: the nearest process above that lacks a mark, as Linux shows, is of the launcher that has set it."""
    found, above = [each for each, variables in LAUNCHERS.items() if os.environ.get(variables.mark)], os.getppid()
    with suppress(OSError):
        while len(found) > 1:
            with open(f"/proc/{above}/environ", "rb") as environ, open(f"/proc/{above}/stat", "rb") as stat:
                has, above = b"\0" + environ.read(), int(stat.read().rpartition(b")")[2].split()[1])
            found = [each for each in found if f"\0{LAUNCHERS[each].mark}=".encode() not in has][:1] or found
    return next(iter(found), None)


def _number(which: str) -> int | None:
    found = name()
    text = os.environ.get(getattr(LAUNCHERS[found], which), "") if found else ""
    return int(text) if text.isdecimal() else None


def rank() -> int | None:
    """The number of this process among those that the launcher started; None without a launcher."""
    return _number("rank")


def local_rank() -> int:
    """Its number among those on this machine; 0 without a launcher."""
    return _number("local_rank") or 0


def size() -> int:
    """How many processes the launcher started; 1 without a launcher."""
    return _number("size") or 1


def tasks() -> int:
    """How many ranks `srun` would start in this job of Slurm; 1 outside of Slurm, and under a launcher."""
    text = os.environ.get("SLURM_NTASKS", "")
    return int(text) if name() is None and text.isdecimal() else 1


def connects(launcher: str | None, library: str) -> bool:
    """Whether the launcher's ranks can meet in this MPI library, as in `STARTED_BY`; True if nobody can know it yet."""
    maker, _, program = (launcher or "").partition("'s ")
    return launcher != TORCHRUN and (not program.startswith("mpi") or maker in STARTED_BY.get(library, maker))


def cure(library: str) -> str:
    """How to start ranks of this library instead."""
    if name() == SRUN:
        fits, given = "pmix" if library == "Open MPI" else "pmi2", os.environ.get("SLURM_MPI_TYPE", "none")
        return (f"srun --mpi=list shows the others than {given}, with which it was started" if fits == given else
                f"start them with srun --mpi={fits}, not {given}") + f", or with the mpiexec of {library}"
    beside = os.path.join(sys.prefix, "bin", "mpiexec")
    there = f" ({beside})" if os.path.exists(beside) and connects(of(beside), library) else ""
    return f"start them with the mpiexec of {library}{there}" + ("" if (name() or "").endswith(TORCHRUN) else (
        f", or install the launcher's MPI in this environment in place of {library}"))


def needs(launcher: str | None, cores: int) -> list[str]:
    """The flags without which this launcher starts no ranks here, each with the case."""
    if launcher != "Open MPI's mpiexec":
        return []
    allowed = all(os.environ.get(f"OMPI_ALLOW_RUN_AS_ROOT{more}") for more in ("", "_CONFIRM"))
    return (["--allow-run-as-root"] if os.geteuid() == 0 and not allowed else []) + [
        f"--oversubscribe for more than {cores} ranks"]


def of(mpiexec: str) -> str | None:
    """The name of the launcher that this program is, by what it says of its version; None if that is unknown."""
    import re
    import subprocess  # the start of a command does not need it

    with suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=20).stdout
        return next((f"{maker}'s mpiexec" for pattern, maker in VERSIONS.items() if re.search(pattern, said)), None)
    return None


def first() -> tuple[str, str | None] | None:
    """The `mpiexec` that a shell finds here, and its name; None if there is none."""
    return (path, of(path)) if (path := shutil.which("mpiexec")) else None
