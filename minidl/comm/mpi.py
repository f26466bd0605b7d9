"""Ranks as MPI processes, through mpi4py, which is imported here alone.

Transfers are non-blocking collectives that their lane polls: without polling MPI moves nothing, and blocking calls
burn a core while they wait. Each slot has a communicator of its own, so that transfers in different slots cannot be
confused however they end. A rank that fails tells the others over a control communicator, then ends the job.

MPI itself starts when all ranks have called it, and waits without an end for one that never does. It holds Python's lock
meanwhile, so that no thread of this process could give up: a small process beside it does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from . import SLOTS, Communicator, RankError

FAILED, HEARD = 1, 2  #: tags of the control communicator
GRACE_SECONDS = 3.0  #: how long a failing rank waits for the others to have heard
START_SECONDS = 120.0  #: how long ranks wait for each other at the start; MINIDL_MPI_START_SECONDS changes it
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")  #: where launchers tell a process its rank
#: ends the process that started it, with a line, unless that closes the pipe in time; arguments: seconds, line
WATCH = """
import os, select, signal, sys
parent = os.getppid()
if not select.select([0], [], [], float(sys.argv[1]))[0] and os.getppid() == parent:
    print(sys.argv[2], file=sys.stderr, flush=True)
    os.kill(parent, signal.SIGKILL)
"""


class MPIError(RuntimeError):
    """MPI that is missing or does not fit."""


@contextlib.contextmanager
def _starts_in_time() -> Iterator[None]:
    """Ends this process, with one line, where what is inside waits too long for other ranks."""
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), None)
    if rank is None:  # no launcher, no other ranks
        yield
        return
    seconds = os.environ.get("MINIDL_MPI_START_SECONDS") or START_SECONDS
    line = (f"minidl: MPI has not started within {float(seconds):g} s: other ranks run another command or version, or have ended; start all "
            f"with one mpiexec and the same command (MINIDL_MPI_START_SECONDS gives them more time)")
    patience = float(seconds) + (rank != "0")  # so that one speaks for all
    with subprocess.Popen([sys.executable, "-ISc", WATCH, str(patience), line], stdin=subprocess.PIPE):
        yield


class MPI(Communicator):
    """The rank that this process has under mpiexec; one rank without.

    `on_device`: MPI is given the memory of CUDA devices; only one that was built for it takes that. Raises MPIError where
    MPI cannot be used so.
    """

    def __init__(self, *, deterministic: bool = True, on_device: bool = False) -> None:
        with _starts_in_time():
            try:
                from mpi4py import MPI as mpi
            except (ImportError, RuntimeError) as error:
                raise MPIError(f"MPI cannot be used: {error}; install minidl[mpich], or mpi4py beside your cluster's MPI") from error
            if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
                raise MPIError("this MPI was started without MPI_THREAD_MULTIPLE, which the communication lane needs")
            self._mpi, self.deterministic, self.on_device = mpi, deterministic, on_device
            self._control = mpi.COMM_WORLD.Dup()
            self._slots = [mpi.COMM_WORLD.Dup() for _ in range(SLOTS)]
            self._sharing = mpi.COMM_WORLD.Dup()
            machine = self._control.Split_type(mpi.COMM_TYPE_SHARED)
        self.rank, self.size, self.local_rank = self._control.Get_rank(), self._control.Get_size(), machine.Get_rank()
        machine.Free()
        self.library: str = mpi.Get_library_version().splitlines()[0].strip()  #: its own name and version
        kinds = mpi.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds")  # MPI 4.1; older ones do not tell
        if on_device and kinds is not None and "cuda" not in kinds:
            raise MPIError(f"this MPI ({self.library}) takes no memory of CUDA devices, only {kinds}; use --transport staged")

    def _done(self, request: Any) -> Iterator[None]:
        while not request.Test():
            yield

    def _exchange(self, out: Any, into: Any, bounds: Sequence[int], slot: int) -> Iterator[None]:
        counts = np.diff(bounds).tolist()
        own = [into.shape[1]] * self.size
        starts = [i * into.shape[1] for i in range(self.size)]
        return self._done(self._slots[slot].Ialltoallv([out, (counts, list(bounds[:-1]))], [into, (own, starts)]))

    def _collect(self, array: Any, bounds: Sequence[int], slot: int) -> Iterator[None]:
        request = self._slots[slot].Iallgatherv(self._mpi.IN_PLACE, [array, (np.diff(bounds).tolist(), list(bounds[:-1]))])
        return self._done(request)

    def _sum(self, array: Any, slot: int) -> Iterator[None]:
        return self._done(self._slots[slot].Iallreduce(self._mpi.IN_PLACE, array))

    def _share(self, value: Any) -> Iterator[list[Any] | None]:
        import pickle

        mine = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.empty(self.size, np.int64)
        for _ in self._done(self._sharing.Iallgather(np.array([mine.size], np.int64), sizes)):
            yield None
        starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        whole = np.empty(starts[-1], np.uint8)
        for _ in self._done(self._sharing.Iallgatherv(mine, [whole, (sizes.tolist(), starts[:-1])])):
            yield None
        yield [pickle.loads(whole[i:j].tobytes()) for i, j in zip(starts[:-1], starts[1:], strict=True)]

    # -------------------------------------------------------------------------------------------------------- failures
    def check(self) -> None:
        status = self._mpi.Status()
        if self._control.Iprobe(source=self._mpi.ANY_SOURCE, tag=FAILED, status=status):
            message = self._control.recv(source=status.Get_source(), tag=FAILED)
            raise RankError(status.Get_source(), message)

    def fail(self, error: BaseException) -> None:
        """Tells the others, gives them a moment to say so, and ends the job with exit code 2; returns only with one rank.

        Call it when this rank has said what is wrong. For a failure that came from elsewhere it only waits for the end.
        """
        if self.size == 1:
            return
        if isinstance(error, RankError):
            self._control.isend(None, dest=error.rank, tag=HEARD)
            self._pause(GRACE_SECONDS, lambda: False)
        else:
            others = [r for r in range(self.size) if r != self.rank]
            for r in others:
                self._control.isend(f"{type(error).__name__}: {error}", dest=r, tag=FAILED)
            heard: set[int] = set()

            def all_heard() -> bool:
                for r in others:
                    if r not in heard and self._control.Iprobe(source=r, tag=HEARD):
                        heard.add(r)
                return len(heard) == len(others)

            self._pause(GRACE_SECONDS, all_heard)
        with contextlib.suppress(BaseException):
            self._mpi.COMM_WORLD.Abort(2)
        os._exit(2)

    def _pause(self, seconds: float, over: Any) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not over():
            self._control.Iprobe(source=self._mpi.ANY_SOURCE, tag=self._mpi.ANY_TAG)  # progress
            time.sleep(0.005)
