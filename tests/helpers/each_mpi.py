"""Every MPI of this machine: its launcher, and ranks of this Python that use its library, even if another MPI is
installed beside Python. MINIDL_MPIS lists more folders that have an `mpiexec`, such as the `bin` of an environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from helpers import IMPORTABLE, PATIENCE, ROOT

#: the beginning of a library's version text -> its file name, since MPICH 3.1 and Open MPI 2
LIBRARIES = {"MPICH": "libmpi.so.12", "Intel(R) MPI": "libmpi.so.12", "Open MPI v4": "libmpi.so.40",
             "Open MPI v5": "libmpi.so.40"}
ROOTS = {f"{name}_ALLOW_RUN_AS_ROOT{more}": "1" for name in ("OMPI", "PRTE") for more in ("", "_CONFIRM")}
SAYS = "from mpi4py import MPI; print('library', MPI.Get_library_version())"


def variables(launcher: str, name: str) -> dict[str, str]:
    """The environment of Python's ranks of this MPI."""
    beside = Path(launcher).resolve().parent.parent / "lib" / LIBRARIES[name]
    return {**os.environ, **ROOTS, "PYTHONPATH": IMPORTABLE, "MINIDL_MPI_SILENT_SECONDS": "60",  # on a busy machine
            "MPI4PY_LIBMPI": str(beside) if beside.exists() else LIBRARIES[name]}


def start(launcher: str, name: str, ranks: int, *argv: str) -> subprocess.CompletedProcess[str]:
    """Runs Python on so many ranks of this MPI."""
    many = ["--oversubscribe"] if name.startswith("Open") else []
    return subprocess.run([launcher, *many, "-n", str(ranks), sys.executable, *argv], cwd=ROOT, capture_output=True,
                          text=True, timeout=PATIENCE, env=variables(launcher, name))


@cache
def launcher(name: str) -> str | None:
    """The first `mpiexec` of this MPI on the path or beside Python; also one that Debian has renamed."""
    folders = [*filter(None, os.environ.get("MINIDL_MPIS", "").split(os.pathsep)), str(Path(sys.executable).parent),
               *os.get_exec_path()]
    for folder in dict.fromkeys(folders):
        for tool in ("mpiexec", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi", "prterun"):
            found = shutil.which(tool, path=folder)
            if found and f"library {name}" in start(found, name, 1, "-c", SAYS).stdout:
                return found
    return None


def needed(name: str) -> str:
    """The launcher of this MPI; without one, the test is skipped."""
    if (found := launcher(name)) is None:
        pytest.skip(f"no mpiexec of {name} on the path")
    return found


def under_each_mpi(test):  # type: ignore[no-untyped-def]
    """Marks a test that gets the `name` of each MPI in its turn."""
    for mark in (pytest.mark.parametrize("name", LIBRARIES), pytest.mark.may_skip, pytest.mark.mpi):
        test = mark(test)
    return test
