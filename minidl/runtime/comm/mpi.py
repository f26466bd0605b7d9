"""Ranks as MPI processes, through mpi4py, which only this module imports.

Transfers are non-blocking collectives that their lane polls: without polling MPI moves nothing, and blocking calls burn
a core while they wait. Each slot has its own communicator, so that transfers in different slots cannot be mixed up in
whatever order they end. A thread watches the other ranks on a control communicator (`minidl.runtime.comm.watch`).

MPI starts and ends only when all ranks have called it, and waits for ever for a rank that does not. It holds Python's
lock during that time, so no thread of this process could stop it: a small helper process does.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Collection, Generator, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ...core.columns import offsets
from ...system import launcher
from . import SILENT_SECONDS, SLOTS, WAIT_SECONDS, Communicator, Transfer, Wait
from .watch import Watch

BURST = 8  #: tests of a sum at each poll: MPI moves some 16 KiB at each
ROWS_BURST = 32  #: of an exchange of rows, which is awaited: they take less time than a nap
START_SECONDS = 120.0  #: how long ranks wait for each other at the start; MINIDL_MPI_START_SECONDS changes it
#: kills its parent process and prints a line, unless the parent writes into the pipe in time; if it ends before that,
#: prints another line; arguments: seconds, lines
TIMER = """
import os, select, signal, sys
parent, late, ended = os.getppid(), *sys.argv[2:]
if select.select([0], [], [], float(sys.argv[1]))[0]:
    if ended and not os.read(0, 1):
        print(ended, file=sys.stderr, flush=True)
elif os.getppid() == parent:
    print(late, file=sys.stderr, flush=True)
    os.kill(parent, signal.SIGKILL)
"""


class MPIError(RuntimeError):
    """MPI is missing or cannot be used."""


class LauncherError(MPIError):
    """The launcher and the MPI library are of different kinds."""


def load() -> tuple[Any, str, str]:
    """mpi4py's MPI, which has not started yet unless somebody else has started it; the name of its library; and that
    with the version. Raises MPIError if there is none."""
    try:
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI as mpi
    except (ImportError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise MPIError(f"MPI cannot be used: {why}; install minidl[mpich], or mpi4py for your cluster's MPI") from error
    name, version = mpi.get_vendor()
    if name not in launcher.STARTED_BY:  # what the library says of itself may end in a zero
        return mpi, name, mpi.Get_library_version().partition("\0")[0].partition("\n")[0].strip()
    return mpi, name, f"{name} {'.'.join(map(str, version))}"


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 1e6:
        raise MPIError(f"{variable}={text} must be a number of seconds above 0, at most a million")
    return seconds


def _timer(seconds: float, line: str, ended: str = "") -> subprocess.Popen[bytes] | None:
    """A helper process that ends this process after some seconds, with one line, unless its context is left before.
    If this process ends meanwhile, it prints `ended`. None without a launcher."""
    rank = launcher.rank()
    if rank is None:  # no launcher, no other ranks
        return None
    patience = seconds * (1 if rank == 0 else 1.5)  # so that only one rank prints the line, on a busy machine too
    return subprocess.Popen([sys.executable, "-ISc", TIMER, str(patience), f"minidl: {line}", ended],
                            stdin=subprocess.PIPE, process_group=0)


def _ended() -> str:
    """A line for the case that the library ends this process while it starts under srun, whose --mpi it may not know;
    of one process of a machine."""
    if launcher.name() != launcher.SRUN or launcher.local_rank():
        return ""
    given = os.environ.get("SLURM_MPI_TYPE", "none")
    return (f"minidl: the MPI library has ended this process while it started under srun --mpi={given}; MPICH's wheel "
            f"and Intel MPI start with srun --mpi=pmi2, Open MPI with --mpi=pmix; srun --mpi=list shows what there is")


class MPI(Communicator):
    """This process's rank under mpiexec; a single rank without mpiexec. Raises MPIError if MPI cannot be used."""

    def __init__(self, *, deterministic: bool = True) -> None:
        super().__init__()
        start, self.wait_seconds, self.silent_seconds = (
            _seconds(f"MINIDL_MPI_{name}_SECONDS", default) for name, default in (
                ("START", START_SECONDS), ("WAIT", WAIT_SECONDS), ("SILENT", SILENT_SECONDS)))
        timer = _timer(start, f"MPI has not started within {start:g} s: other ranks run another command or version, or "
                              f"have ended; start all with one mpiexec and the same command "
                              f"(a larger MINIDL_MPI_START_SECONDS waits longer)", _ended())
        with contextlib.ExitStack() as waited:
            if timer is not None:
                waited.callback(timer.communicate, b".")
            mpi, name, self.library = load()
            if not launcher.connects(launcher.name(), name):
                raise LauncherError(f"{launcher.name()} has started this process, and mpi4py uses the library of "
                                    f"{self.library}, whose ranks it cannot connect; {launcher.cure(name)}")
            if mpi.Is_finalized():
                raise MPIError("MPI has ended in this process and cannot start again; start a process for each run")
            self._starts = not mpi.Is_initialized()
            if self._starts:
                mpi.Init_thread(mpi.THREAD_MULTIPLE)
            if mpi.COMM_WORLD.Get_size() == 1 < launcher.size():
                raise LauncherError(f"{launcher.name() or 'the launcher'} has started {launcher.size()} processes, and "
                                    f"in the library of {self.library} each is alone; {launcher.cure(name)}")
            if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
                raise MPIError("this MPI lacks MPI_THREAD_MULTIPLE, which the communication lane needs; use another")
            self._mpi, self.deterministic = mpi, deterministic
            self._duplicates: list[MPI] = []  # those not freed: MPI may still write where their messages arrive
            self._tags = int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) or 32767)  # the least that MPI guarantees
            control = mpi.COMM_WORLD.Dup()
            self._among(mpi.COMM_WORLD)
            machine = control.Split_type(mpi.COMM_TYPE_SHARED)
        self.local_rank, self.own_core = machine.Get_rank(), machine.Get_size() <= (os.cpu_count() or 1)
        machine.Free()
        self._watch = Watch(mpi, control, self.silent_seconds, self.wait_seconds / 2) if self.size > 1 else None
        if self._watch is not None:
            atexit.register(self._watch.close)  # before mpi4py ends MPI

    def _among(self, ranks: Any) -> None:
        """Makes this the communicator of these ranks (MPI's). Each purpose has its own communicator."""
        self.rank, self.size, self._groups = ranks.Get_rank(), ranks.Get_size(), {}
        self._requests: list[Any] = []
        self._slots = [ranks.Dup() for _ in range(SLOTS)]
        self._sharing, self._pairs = ranks.Dup(), ranks.Dup()

    def _split(self, ranks: tuple[int, ...]) -> MPI:
        made = copy.copy(self)
        made._among(self._sharing.Split(ranks[0], ranks.index(self.rank)))
        return made

    def duplicate(self, links: Collection[tuple[int, bool]]) -> MPI:
        self.gather(None)  # which notices a rank that has failed; what follows waits for ever
        made = copy.copy(self)
        made._among(self._sharing)
        self._duplicates.append(made)  # a list that all copies share
        return made

    def free(self) -> None:
        if self._mpi.Is_finalized():
            return
        if self in self._duplicates:
            self._duplicates.remove(self)
        for group in self._groups.values():
            group.free()
        for made in (*self._requests, *self._slots, self._sharing, self._pairs):
            made.Free()

    def for_devices(self) -> MPI:
        """The same rank for memory of CUDA devices. Raises MPIError for an MPI that was not built for it."""
        kinds = self._mpi.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds")  # MPI 4.1; older ones do not tell
        if kinds is not None and "cuda" not in kinds:
            raise MPIError(f"this MPI ({self.library}) cannot read the memory of CUDA devices, only "
                           f"{kinds}; use --transport staged")
        made = copy.copy(self)
        made._groups, made.on_device = {}, True
        return made

    def _done(self, request: Any, tests: int = BURST) -> Iterator[None]:
        while not any(request.Test() for _ in range(tests)):
            yield

    def _exchange(self, out: Any, into: Any, bounds: Sequence[int] | None, slot: int) -> Iterator[None]:
        if bounds is None:
            return self._done(self._slots[slot].Iallgather(out, into), 1)
        sent, own = (np.diff(bounds).tolist(), list(bounds[:-1])), into.shape[1]
        received = [own] * self.size, [i * own for i in range(self.size)]
        return self._done(self._slots[slot].Ialltoallv([out, sent], [into, received]))

    def _all_to_all(self, out: Any, sent: Sequence[int], into: Any, received: Sequence[int], slot: int
                    ) -> Iterator[None]:
        """By messages: MPICH needs far fewer polls for them than for its Ialltoallv."""
        pairs, me = self._slots[slot], self.rank
        given, taken = ([array[i:j].view(np.uint8) for i, j in pairwise(ends)]
                        for array, ends in ((out, sent), (into, received)))
        requests = [start(array, r) for start, arrays in ((pairs.Irecv, taken), (pairs.Isend, given))
                    for r, array in enumerate(arrays) if r != me and array.size]
        np.copyto(taken[me], given[me])
        for request in requests:
            yield from self._done(request, ROWS_BURST)

    def _collect(self, array: Any, bounds: Sequence[int], slot: int) -> Iterator[None]:
        return self._done(self._slots[slot].Iallgatherv(
            self._mpi.IN_PLACE, [array, (np.diff(bounds).tolist(), list(bounds[:-1]))]))

    def _sum(self, array: Any, slot: int) -> Iterator[None]:
        return self._done(self._slots[slot].Iallreduce(self._mpi.IN_PLACE, array))

    def _send(self, array: Any, peer: int, number: int) -> Transfer:
        return self._repeated(self._pairs.Send_init(array, dest=peer, tag=number % self._tags))

    def _receive(self, array: Any, peer: int, number: int) -> Transfer:
        return self._repeated(self._pairs.Recv_init(array, source=peer, tag=number % self._tags))

    def _repeated(self, request: Any) -> Transfer:
        """A transfer whose request is set up once, which saves some microseconds each time."""
        self._requests.append(request)

        def run() -> Iterator[None]:
            request.Start()
            return self._done(request, 1)  # lanes poll between their tasks, so a poll must be short

        return run

    def _share(self, value: Any) -> Generator[None, None, list[Any]]:
        mine = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.empty(self.size, np.int64)
        yield from self._done(self._sharing.Iallgather(np.array([mine.size], np.int64), sizes))
        starts = offsets(sizes).tolist()
        whole = np.empty(starts[-1], np.uint8)
        yield from self._done(self._sharing.Iallgatherv(mine, [whole, (sizes.tolist(), starts[:-1])]))
        return [pickle.loads(whole[i:j].tobytes()) for i, j in pairwise(starts)]

    # -------------------------------------------------------------------------------------------------------- failures
    def publish(self, wait: Wait | None) -> None:
        if self._watch is not None:
            self._watch.wait = wait

    @property
    def published(self) -> Wait | None:
        return None if self._watch is None else self._watch.wait

    def _waits(self) -> dict[int, Wait]:
        return {} if self._watch is None else self._watch.waits.copy()

    def check(self) -> None:
        if self._watch is not None and self._watch.failure is not None:
            raise self._watch.failure

    def fail(self, error: BaseException) -> bool:
        """As in Communicator. Returns when the others have ended, or after some seconds; call `abort` then."""
        return self._watch is None or self._mpi.Is_finalized() or self._watch.fail(error)

    def close(self) -> None:
        """Ends the watch; and MPI, which waits until all ranks do, unless somebody else has started it."""
        if self._watch is not None and not self._mpi.Is_finalized():
            self._watch.close()
            if not self._starts:
                return
            timer = _timer(self.silent_seconds,
                           f"this job has not ended within {self.silent_seconds:g} s after its last step: a rank was "
                           f"stopped, or its machine is gone (a larger MINIDL_MPI_SILENT_SECONDS waits longer)")
            # the timer stays open until the process has ended: the interpreter's own end can hang, too
            if timer is not None and timer.stdin is not None:
                os.dup(timer.stdin.fileno())
            self._mpi.Finalize()
