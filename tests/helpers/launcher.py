"""The launcher of MPI ranks: `MPIEXEC`. It is None if there is no launcher, if mpi4py finds no MPI library, or if the
library is not the launcher's, so that each rank would be alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def _found() -> str | None:
    launcher = shutil.which("mpiexec") or shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    if launcher is None:
        return None
    tried = subprocess.run([launcher, "-n", "2", sys.executable, "-c",
                            "from mpi4py import MPI; raise SystemExit(MPI.COMM_WORLD.size != 2)"], capture_output=True)
    return launcher if tried.returncode == 0 else None


MPIEXEC = _found()
#: mpiexec prints it to its standard output if a rank's process ends before the launcher hears that the rank has aborted
#: the job
BANNER = re.compile(r"\n=+\n(?:=.*\n)+")


def printed(done: subprocess.CompletedProcess[str]) -> str:
    """What the ranks themselves have printed."""
    return BANNER.sub("", done.stdout)


def under_mpi(test: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a test that starts ranks as processes of MPI."""
    return pytest.mark.mpi(pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec; install minidl[mpich]")(test))
