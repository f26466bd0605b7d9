"""The launcher by its variables, and what happens if it starts ranks of another MPI: one line, exit 2."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import astuple
from itertools import permutations
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers import python

from minidl import __main__ as program
from minidl.cli import distributed, info, main
from minidl.runtime.comm import mpi
from minidl.system import launcher

VARIABLES = {variable for each in launcher.LAUNCHERS.values() for variable in astuple(each)} | {
    "SLURM_MPI_TYPE", "SLURM_NTASKS", "PMIX_RANK"}
LOCAL = {each.local_rank for each in launcher.LAUNCHERS.values()}
#: what each launcher sets for rank 1 of 2
STARTED = {
    "MPICH's mpiexec": {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    "Intel MPI's mpiexec": {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
                            "I_MPI_HYDRA_UUID": "8a4f"},
    "Open MPI's mpiexec": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1",
                           "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
    "MVAPICH's mpirun_rsh": {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1"},
    "Slurm's srun": {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2"},
    "an unknown launcher": {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"},
    "torchrun": {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
    "a launcher like torchrun": {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
    None: {},
}


@pytest.fixture
def started(monkeypatch):
    """Sets the variables that a launcher sets, and the MPI library that mpi4py finds, which sees `size` ranks."""
    def start(by: str | None, library: str = "MPICH", size: int = 2, local: int = 1) -> list[str]:
        for variable in VARIABLES:
            monkeypatch.delenv(variable, raising=False)
        for variable, value in STARTED[by].items():
            monkeypatch.setenv(variable, str(local) if variable in LOCAL else value)
        did: list[str] = []
        fake: Any = SimpleNamespace(
            get_vendor=lambda: (library, (5, 0)), Is_initialized=lambda: False, THREAD_MULTIPLE=3,
            Is_finalized=lambda: False, Init_thread=did.append, Query_thread=lambda: 0,
            COMM_WORLD=SimpleNamespace(Get_size=lambda: size), Get_library_version=lambda: "Other MPI 7\0\nmore")
        package: Any = ModuleType("mpi4py")
        package.rc, package.MPI = SimpleNamespace(), fake
        monkeypatch.setitem(sys.modules, "mpi4py", package)
        monkeypatch.setattr(mpi, "_timer", lambda *_: None)
        return did

    return start


@pytest.mark.parametrize("by", STARTED)
def test_a_launcher_is_known_by_its_variables(by, started):
    started(by)
    assert launcher.name() == by
    assert (launcher.rank(), launcher.local_rank(), launcher.size()) == ((1, 1, 2) if by else (None, 0, 1))


@pytest.mark.parametrize("by", STARTED)
@pytest.mark.parametrize("library", ["MPICH", "Open MPI", "Intel MPI", "MVAPICH", "Unheard MPI"])
def test_mpi_starts_only_where_launcher_and_library_fit(by, library, started):
    did = started(by, library)
    unknown = library == "Unheard MPI" or by in (None, "Slurm's srun", "an unknown launcher",
                                                 "a launcher like torchrun")
    fits = by != "torchrun" and (unknown or (by == "Open MPI's mpiexec") == (library == "Open MPI"))
    found = "Other MPI 7" if library == "Unheard MPI" else f"{library} 5.0"  # what it says of itself
    says = f"{by} has started this process, and mpi4py uses the library of {found}.*; start them with the mpiexec"
    with pytest.raises(mpi.MPIError, match="THREAD_MULTIPLE" if fits else says) as caught:
        mpi.MPI()
    assert did == ([3] if fits else [])
    assert "\n" not in str(caught.value)


#: variables of a shell that srun has started for one task, with which it still calls another launcher
SHELL = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "PMI_RANK": "0",
         "PMI_SIZE": "1", "PMIX_RANK": "0"}


@pytest.mark.parametrize("more", [[], ["--parallel", "data"], ["--parallel", "pipeline"]])
def test_processes_that_share_no_mpi_do_not_train_each_by_itself(more, started, capsys):
    """PyTorchJob and DeepSpeed tell each process its rank and the number of processes, but nothing of MPI."""
    started("a launcher like torchrun", size=1, local=0)
    assert main(["train", "--model", "mlp", *more]) == 2
    assert re.fullmatch(r"minidl: a launcher like torchrun has started 2 processes, and in the library of MPICH 5.0 "
                        r"each is alone; start them with the mpiexec of MPICH( \(.*\))?\n", capsys.readouterr().err)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_command_that_shares_no_work_says_so_once(rank, started, monkeypatch, capsys):
    started("MPICH's mpiexec")
    monkeypatch.setenv("PMI_RANK", rank)
    assert main(["schedulers", "gpipe"]) == 0
    said = "MPICH's mpiexec has started 2 processes, and each does all of schedulers\n"
    assert capsys.readouterr().err == (said if rank == "0" else "")


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "2"}])
def test_one_process_is_alone_whatever_its_shell_has_for_torch(variables, started, monkeypatch):
    started(None)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert launcher.size() == 1


@pytest.mark.parametrize("by", ["MPICH's mpiexec", "Open MPI's mpiexec", "Intel MPI's mpiexec", "Slurm's srun"])
@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE"])
def test_what_scripts_set_for_torch_counts_last(by, variable, started, monkeypatch):
    started(by)
    monkeypatch.setenv(variable, "5")
    assert (launcher.name(), launcher.rank(), launcher.size()) == (by, 1, 2)


@pytest.mark.parametrize("by", ["MPICH's mpiexec", "Open MPI's mpiexec", "Intel MPI's mpiexec"])
def test_a_launcher_counts_before_the_one_that_started_its_shell(by, started, monkeypatch):
    started(by)
    for variable in SHELL.keys() - STARTED[by].keys():
        monkeypatch.setenv(variable, SHELL[variable])
    assert (launcher.name(), launcher.rank(), launcher.local_rank(), launcher.size()) == (by, 1, 1, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
@pytest.mark.parametrize(("first", "last"), list(permutations(
    ["MPICH's mpiexec", "Open MPI's mpiexec", "Slurm's srun", "torchrun"], 2)))
def test_the_launcher_that_was_called_last_counts(first, last):
    """The environment of each process has what the process above has, as of `torchrun` from which mpiexec is called."""
    code = "from minidl.system.launcher import name; print(name())"
    inside = f"{shlex.join([sys.executable, '-c', code])}; exit"  # a shell of its own between launcher and process
    more = [f"{name}={value}" for name, value in STARTED[last].items()]
    outside = shlex.join(["env", *more, "sh", "-c", inside])
    without = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(["sh", "-c", f"{outside}; exit"], capture_output=True, text=True,
                          env=without | STARTED[first])
    assert done.stdout == f"{last}\n", done.stderr


def test_torchrun_connects_no_ranks_also_if_srun_started_it(started, monkeypatch, capsys):
    """Each of its processes would train alone, on the whole batch."""
    started("torchrun", local=0)
    for variable, value in STARTED["Slurm's srun"].items():
        monkeypatch.setenv(variable, value)
    assert (launcher.name(), launcher.local_rank(), launcher.size()) == ("torchrun", 0, 2)
    for more in ([], ["--parallel", "data"], ["--parallel", "data", "--ranks", "2"]):
        assert main(["train", "--model", "mlp", *more]) == 2
        error = capsys.readouterr().err
        assert error.startswith("minidl: torchrun has started this process, and mpi4py uses the library of MPICH 5.0, ")
        assert "start them with the mpiexec of MPICH" in error
        assert "install" not in error


def test_a_batch_script_is_no_rank(started, monkeypatch):
    """Slurm gives it the variables of a rank, but no step."""
    started(None)
    for variable, value in {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}.items():
        monkeypatch.setenv(variable, value)
    assert (launcher.name(), launcher.rank(), launcher.size(), launcher.tasks()) == (None, None, 1, 4)
    assert "in a Slurm job of 4 tasks, use srun" in str(info._mpi()[1])


def test_one_process_of_a_job_of_many_says_so_and_trains(started, monkeypatch, capsys):
    started(None)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    alone = SimpleNamespace(size=1, close=lambda: None)
    monkeypatch.setattr(mpi, "MPI", lambda: alone)
    monkeypatch.setattr(distributed, "_part", lambda read, communicator: 7)
    assert distributed.train(lambda: None) == 7
    assert capsys.readouterr().err == ("minidl: this Slurm job has 4 tasks, and one process trains; write srun before "
                                       "the command to start them all\n")
    started("Slurm's srun")
    assert (launcher.tasks(), launcher.size()) == (1, 2)


@pytest.mark.parametrize(("library", "given", "cure"), [
    ("MPICH", None, "start them with srun --mpi=pmi2, not none, or with the mpiexec of MPICH"),
    ("Open MPI", "pmi2", "start them with srun --mpi=pmix, not pmi2, or with the mpiexec of Open MPI"),
    ("Open MPI", "pmix", "srun --mpi=list shows the others than pmix, with which it was started"),
])
def test_ranks_of_which_each_is_alone_are_an_error(library, given, cure, started, monkeypatch):
    started("Slurm's srun", library, size=1)
    if given:
        monkeypatch.setenv("SLURM_MPI_TYPE", given)
    with pytest.raises(mpi.LauncherError, match=f"Slurm's srun has started 2 processes, and in the library of "
                                                f"{library} 5.0 each is alone; {cure}"):
        mpi.MPI()


@pytest.mark.parametrize(("by", "user", "needs"), [
    ("Open MPI's mpiexec", 0, ["--allow-run-as-root", "--oversubscribe for more than 2 ranks"]),
    ("Open MPI's mpiexec", 1000, ["--oversubscribe for more than 2 ranks"]), ("MPICH's mpiexec", 0, []), (None, 0, [])])
def test_flags_without_which_a_launcher_starts_nothing(by, user, needs, started, monkeypatch):
    started(None)
    monkeypatch.setattr(launcher.os, "geteuid", lambda: user)
    assert launcher.needs(by, 2) == needs
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    assert launcher.needs(by, 2) == [flag for flag in needs if "root" not in flag]


@pytest.mark.parametrize(("load", "told"), [("os._exit(16)", 1), ("1 / 0", 0)])
def test_a_library_that_ends_its_process_while_it_starts_under_srun_is_told(load, told):
    """The helper process outlives its rank, so it prints this line. It prints none if Python raises an error."""
    code = f"import os; from minidl.runtime.comm import mpi; mpi.load = lambda: {load}; mpi.MPI()"
    variables = {**STARTED["Slurm's srun"], "SLURM_LOCALID": "0", "SLURM_MPI_TYPE": "pmix"}
    without = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=without | variables)
    assert done.stderr.count("minidl: the MPI library has ended this process while it started under srun --mpi=pmix;"
                             ) == told


def test_the_first_rank_of_a_machine_speaks_for_all(started, capsys):
    started("Open MPI's mpiexec", local=0)
    assert main(["info", "--each-rank"]) == 2
    assert capsys.readouterr().err.count("minidl: Open MPI's mpiexec") == 1
    started("Open MPI's mpiexec")
    with pytest.raises(SystemExit) as ended:
        main(["info", "--each-rank"])
    assert (ended.value.code, capsys.readouterr().err) == (0, "")


def test_a_library_whose_version_ends_in_a_zero_is_named_without_it(started):
    started(None, "Unheard MPI")
    assert mpi.load()[1:] == ("Unheard MPI", "Other MPI 7")


def _foreign() -> tuple[str, str] | None:
    """A launcher on this machine of another MPI than the library that mpi4py finds, and that library."""
    code = "from minidl.runtime.comm.mpi import load; print(load()[1])"
    library = python("-c", code).stdout.strip()
    paths = [path for name in ("mpiexec", "mpiexec.openmpi", "mpiexec.mpich", "mpiexec.hydra")
             if (path := shutil.which(name))]
    return next(((path, library) for path in paths if not launcher.connects(launcher.of(path), library)), None)


def test_a_real_launcher_of_another_mpi_ends_in_one_line():
    found = _foreign()
    if found is None:
        pytest.skip("needs a second MPI, such as Debian's openmpi-bin")
    path, library = found
    variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    more = ["--oversubscribe"] if "Open MPI" in str(launcher.of(path)) else []
    done = subprocess.run([path, *more, "-n", "2", sys.executable, "-m", program.__package__, "info", "--each-rank"],
                          capture_output=True, text=True, env=os.environ | variables)
    said = [line for line in done.stderr.splitlines() if line.startswith("minidl:")]
    assert (done.returncode, len(said), done.stdout.count("everything fits")) == (2, 1, 0), done.stderr
    assert f"has started this process, and mpi4py uses the library of {library}" in said[0]
    assert "Abort(" not in done.stderr
