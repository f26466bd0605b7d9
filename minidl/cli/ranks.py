"""Ranks under a launcher: this process's part of a job, and `info --each-rank`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.columns import grouped
from ..system import interrupts, launcher
from . import show
from .machine import versions

if TYPE_CHECKING:
    from ..runtime.comm.mpi import MPI

MUST_AGREE = ("minidl", "python", "numpy", "mpi4py")


@contextmanager
def job() -> Iterator[MPI]:
    """This process's rank. If one of several ranks ends early, also by an interrupt, all end, and one of them prints
    one line; with a single rank the error is raised."""
    from ..runtime.comm.mpi import MPI, LauncherError

    try:
        communicator = MPI()
    except LauncherError:
        if launcher.local_rank():  # the first one of each machine says it for all, before a launcher ends them
            raise SystemExit(0) from None
        raise
    try:
        yield communicator
        communicator.close()
    except BaseException as error:
        if communicator.size == 1:
            raise
        _end(error, communicator)


def _end(error: BaseException, communicator: MPI) -> NoReturn:
    from ..runtime.comm import RankError
    from ..runtime.comm.watch import abort

    code, why, rank = 2, show.reason(error).partition("\n")[0], communicator.rank
    if isinstance(error, KeyboardInterrupt) or interrupts.received:
        number = interrupts.take()
        code, why = 128 + number, interrupts.line(number)
        rank = rank if interrupts.came_to is None else interrupts.came_to
    if communicator.fail(error):
        show.note(f"minidl: {why}" if isinstance(error, RankError) and error.own else f"minidl: rank {rank}: {why}")
    abort(code)


def _gpus() -> int:
    """How many GPUs this process sees; 0 also if a package for them is missing."""
    from ..devices import DeviceError
    from ..devices.cuda.device import gpus

    with suppress(DeviceError):
        return gpus()
    return 0


def _binding(ranks: list[dict[str, Any]]) -> str:
    """How the ranks of each machine are bound to its cores, in words."""
    if all(len(rank["bound_to"]) == rank["machine_cores"] for rank in ranks):
        return "not bound: each rank may use all cores of its machine"
    places = [(rank["host"], core) for rank in ranks for core in rank["bound_to"]]
    return f"each rank is bound to cores {'of its own' if len({*places}) == len(places) else 'that others share'}"


def info(arguments: Any, communicator: Any) -> int:
    """Prints one record from rank 0. Returns 1 if versions differ, or if there are more ranks than cores for them."""
    cores, gpus, here = sorted(os.sched_getaffinity(0)), _gpus(), communicator.local_rank
    ranks = communicator.gather({"host": socket.gethostname(), "bound_to": cores, "cores": len(cores),
                                 "machine_cores": os.cpu_count(), "gpus": gpus, "mpi": communicator.library,
                                 "versions": versions(), "local_rank": here,
                                 "device": f"cuda:{here % gpus}" if gpus else "cpu"})
    problems = [f"rank {r} has {what} {rank['versions'].get(what)}, rank 0 {ranks[0]['versions'].get(what)}"
                for r, rank in enumerate(ranks)
                for what in MUST_AGREE if rank["versions"].get(what) != ranks[0]["versions"].get(what)]
    problems += [f"rank {r} uses {rank['mpi']}, rank 0 {ranks[0]['mpi']}" for r, rank in enumerate(ranks)
                 if rank["mpi"] != ranks[0]["mpi"]]
    for host, own in grouped((rank["host"], rank) for rank in ranks).items():
        available = {core for rank in own for core in rank["bound_to"]}
        if len(own) > len(available):
            problems.append(f"{len(own)} ranks share {len(available)} cores on {host}")
    if communicator.rank == 0:
        rows = [(r, rank["host"], rank["local_rank"], " ".join(map(str, rank["bound_to"])), rank["device"], rank["mpi"],
                 rank["versions"]["minidl"]) for r, rank in enumerate(ranks)]
        table = show.table(("rank", "host", "on host", "cores", "device", "MPI", "minidl"), rows)
        starts, binding = launcher.name() or "no launcher", _binding(ranks)
        show.emit(arguments, {"ranks": ranks, "launcher": starts, "binding": binding, "problems": problems},
                  "\n".join([table, f"started by {starts}; {binding}", *(problems or ["everything fits"])]))
    communicator.gather(None)
    return 1 if problems else 0
