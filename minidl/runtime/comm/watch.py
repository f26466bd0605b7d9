"""The heartbeat of a rank: a thread that tells the other ranks that this process runs, hears the same from them, and
passes on failures both ways.

A rank that is stopped, or whose machine is gone, falls silent, and the ranks that wait for it notice. A rank that
computes for minutes is not silent, since this thread goes on. Only this thread uses the control communicator, and it
uses no other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from typing import Any, NoReturn

from . import RankError, SilentRank, Wait

ALIVE, FAILED, HEARD = 1, 2, 3  #: tags
PERIOD = 0.05  #: seconds between two polls
BEATS = 4  #: heartbeats within the time that a rank may be silent
#: seconds that a failing rank gives the other ranks, and its own main thread, to end their work
GRACE = 3.0


def abort(code: int) -> NoReturn:
    """Ends all ranks of the job at once, with exit code `code` if the launcher passes it on."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        os.kill(os.getpid(), signal.SIGKILL)  # before MPI has started, this makes a launcher end the other ranks
    elif not mpi.Is_finalized():
        time.sleep(PERIOD)  # time for the launcher to pass on what was printed, before it ends all ranks
        with contextlib.suppress(BaseException):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides MPI's own message: the reason is printed
            mpi.COMM_WORLD.Abort(code)
    os._exit(code)


class Watch:
    """The heartbeat thread. `limit`: seconds of silence after which a rank counts as gone. `long`: seconds after which
    this rank tells the others what it waits for.

    `failure`: the error, or the one that another rank has reported; waiting code looks at it. If no code does, for
    example during a library's long call, the thread ends the job itself.
    """

    def __init__(self, mpi: Any, control: Any, limit: float, long: float) -> None:
        self._mpi, self._control, self._limit, self._long = mpi, control, limit, long
        self.rank = control.Get_rank()
        self.others = [r for r in range(control.Get_size()) if r != self.rank]
        self.failure: RankError | None = None
        self.wait: Wait | None = None  #: the transfer that this rank waits for
        self.waits: dict[int, Wait] = {}  #: long waits that other ranks have reported
        self._failed: set[int] = set()
        self._settled: set[int] = set()  # ranks that have ended their work, or are gone
        self._outbox: deque[tuple[int, int, str | Wait | None]] = deque()
        self._sent: list[Any] = []
        self._noticed = False  # whether the main thread knows of the failure
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watch over ranks", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        before = beat = noticed = time.monotonic()
        heard = dict.fromkeys(self.others, before)
        while not self._closed.wait(PERIOD):
            now = time.monotonic()
            # this process was stopped itself, perhaps all were: start counting silence again
            if now - before > self._limit / 2:
                heard = dict.fromkeys(self.others, now)
            before = now
            heard.update(dict.fromkeys(self._receive(), now))
            if now >= beat:
                wait = self.wait
                self._tell(ALIVE, wait if wait is not None and wait.lasts(self._long) else None)
                beat = now + min(self._limit, 2 * self._long) / BEATS
            silent = [r for r in self.others if now - heard[r] > self._limit]
            self._settled.update(silent)
            if silent and self.failure is None:
                self.failure, noticed = SilentRank(
                    silent[0], f"rank {self.rank} waits for rank {silent[0]}, which has given no sign of life for "
                               f"{self._limit:g} s: it was stopped, is in code that holds Python's lock, or its "
                               f"machine is gone (a larger MINIDL_MPI_SILENT_SECONDS waits longer)"), now
                self._tell(FAILED, str(self.failure))
            self._send()
            if isinstance(self.failure, SilentRank) and not self._noticed and now - noticed > GRACE and self._first():
                os.write(2, f"minidl: {self.failure}\n".encode())
                abort(2)
        self._send()

    def _receive(self) -> set[int]:
        """Handles all messages that have arrived. Returns the ranks that sent them."""
        status, sources = self._mpi.Status(), set()
        while self._control.Iprobe(status=status):
            source, tag = status.Get_source(), status.Get_tag()
            message = self._control.recv(source=source, tag=tag)
            sources.add(source)
            if tag == FAILED:
                self._failed.add(source)
                self.failure = self.failure or RankError(source, message)
            if tag != ALIVE:
                self._settled.add(source)
            elif message is None:
                self.waits.pop(source, None)
            else:
                self.waits[source] = message
        return sources

    def _tell(self, tag: int, message: str | Wait | None) -> None:
        self._outbox.extend((r, tag, message) for r in self.others)

    def _send(self) -> None:
        while self._outbox:
            to, tag, message = self._outbox.popleft()
            self._sent.append(self._control.isend(message, dest=to, tag=tag))
        self._sent = [request for request in self._sent if not request.Test()]

    def fail(self, error: BaseException) -> bool:
        """Tells the other ranks, and waits until they have ended their work, or for GRACE. Returns whether this rank
        should print the error: it is the lowest of the ranks that failed by themselves."""
        self._noticed = True
        own = not isinstance(error, RankError) or error.own
        self._tell(FAILED if own else HEARD, f"{type(error).__name__}: {error}")
        end = time.monotonic() + GRACE
        while time.monotonic() < end and not self._settled.issuperset(self.others):
            time.sleep(PERIOD / 5)
        if own and self._first():
            return True
        time.sleep(GRACE)  # the rank that prints the error ends all ranks meanwhile
        return False

    def _first(self) -> bool:
        return all(self.rank < r for r in self._failed)

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()
