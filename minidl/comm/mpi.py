"""Ranks as MPI processes, through mpi4py, which is imported here alone.

Transfers are non-blocking collectives that their lane polls: without polling MPI moves nothing, and blocking calls
burn a core while they wait. Each slot has a communicator of its own, so that transfers in different slots cannot be
confused however they end. A rank that fails tells the others over a control communicator, then ends the job.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from . import SLOTS, Communicator, RankError

FAILED, HEARD = 1, 2  #: tags of the control communicator
GRACE_SECONDS = 3.0  #: how long a failing rank waits for the others to have heard


class MPIError(RuntimeError):
    """MPI that is missing or does not fit."""


class MPI(Communicator):
    """The rank that this process has under mpiexec; one rank without. Raises MPIError where MPI cannot be used."""

    def __init__(self, *, deterministic: bool = True) -> None:
        try:
            from mpi4py import MPI as mpi
        except (ImportError, RuntimeError) as error:
            raise MPIError(f"MPI cannot be used: {error}; install minidl[mpich], or mpi4py beside your cluster's MPI") from error
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            raise MPIError("this MPI was started without MPI_THREAD_MULTIPLE, which the communication lane needs")
        self._mpi, self.deterministic = mpi, deterministic
        self._control = mpi.COMM_WORLD.Dup()
        self._slots = [mpi.COMM_WORLD.Dup() for _ in range(SLOTS)]
        self._sharing = mpi.COMM_WORLD.Dup()
        self.rank, self.size = self._control.Get_rank(), self._control.Get_size()
        self.library: str = mpi.Get_library_version().splitlines()[0].strip()  #: its own name and version

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
