"""Gradients have the same bits under every MPI and in one process, also where the libraries' own sums have not: minidl
sends numbers, and adds them itself, in the order of the ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from cancelling_sums import RANKS, check, rows
from helpers import IMPORTABLE, PATIENCE, ROOT

from minidl.runtime.comm.loopback import run_ranks

LIBRARIES = {"MPICH": "libmpi.so.12", "Open MPI": "libmpi.so.40"}  #: their names since MPICH 3.1 and Open MPI 2
ROOTS = {f"{name}_ALLOW_RUN_AS_ROOT{more}": "1" for name in ("OMPI", "PRTE") for more in ("", "_CONFIRM")}


def start(launcher: str, library: str, ranks: int, *argv: str) -> subprocess.CompletedProcess[str]:
    many = ["--oversubscribe"] if library == LIBRARIES["Open MPI"] else []
    beside = Path(launcher).resolve().parent.parent / "lib" / library
    return subprocess.run([launcher, *many, "-n", str(ranks), sys.executable, *argv], cwd=ROOT, capture_output=True,
                          text=True, timeout=PATIENCE, env={
                              **os.environ, **ROOTS, "PYTHONPATH": IMPORTABLE,
                              "MPI4PY_LIBMPI": str(beside) if beside.exists() else library})


@cache
def launcher(name: str) -> str | None:
    """The first `mpiexec` of this MPI on the path or beside Python; also one that Debian has renamed."""
    folders = [Path(sys.executable).parent, *map(Path, os.get_exec_path())]
    for folder in folders:
        for tool in ("mpiexec", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi", "prterun"):
            found = shutil.which(tool, path=str(folder))
            if found and f"library {name}" in start(found, LIBRARIES[name], 1, "-c", "from mpi4py import MPI; print("
                                                    "'library', MPI.Get_library_version())").stdout:
                return found
    return None


@cache
def in_one_process() -> str:
    (digest,) = set(run_ranks(RANKS, check))
    return digest


def test_loop_back_adds_in_the_order_of_ranks() -> None:
    given = rows(6, "float32")[:, [0, 1, 4, 5]]
    assert sorted(set((given[0] + given[1] + given[2]).tolist())) == [0, 1]  # the order shows
    assert in_one_process()


@pytest.mark.mpi
@pytest.mark.may_skip
@pytest.mark.parametrize("name", LIBRARIES)
def test_each_mpi_gives_the_bits_of_loop_back(name: str) -> None:
    found = launcher(name)
    if found is None:
        pytest.skip(f"no mpiexec of {name} on the path")
    done = start(found, LIBRARIES[name], RANKS, str(ROOT / "tests" / "helpers" / "cancelling_sums.py"))
    assert done.returncode == 0, done.stderr
    assert in_one_process() in done.stdout.split()


@pytest.mark.mpi
@pytest.mark.may_skip
@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_network_in_shards_has_the_same_bits_under_each_mpi(name: str) -> None:
    found = launcher(name)
    if found is None:
        pytest.skip(f"no mpiexec of {name} on the path")
    train = ["-m", "minidl", "train", "--model", "mlp", "--model-arg", "hidden=32", "--costs", "analytic",
             "--steps", "3", "--optimizer", "adam", "--json"]
    alone = subprocess.run([sys.executable, *train, "--micro-batches", "2"], cwd=ROOT, capture_output=True, text=True,
                           timeout=PATIENCE)
    done = start(found, LIBRARIES[name], 2, *train, "--parallel", "data", "--scheduler", "barrier", "--shard", "2")
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[0]  # Open MPI may add codes of a terminal
    assert json.loads(line)["params_sha256"] == json.loads(alone.stdout)["params_sha256"]
