"""A lane of communication: transfers in one agreed order, a bound on what is in flight, progress while it waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from . import SLOTS, Communicator, Transfer

CREDIT = 4 * 2**20  #: bytes in flight; one transfer may exceed it
BURST = 8  #: looks between two naps; MPI moves some 16 KiB at each
CHECK_SECONDS = 0.02  #: how often a rank that waits looks whether the others still run


class Abandoned(RuntimeError):
    """The lane was told to stop."""


class Patience:
    """Waiting without burning a core: busy at first, then ever longer naps; looks for failures now and then."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.reset()

    def reset(self) -> None:
        self._turns, self._next_check = 0, time.monotonic() + CHECK_SECONDS

    def wait(self) -> None:
        self._turns += 1
        time.sleep(min(2e-6 * self._turns, 2e-4))
        if time.monotonic() > self._next_check:
            self._communicator.check()
            self._next_check = time.monotonic() + CHECK_SECONDS


class Lane:
    """Runs transfers in the order in which they are submitted; every rank submits the same in the same order.

    `credit` bounds the bytes in flight, so that what is needed first is not held up by what was submitted before.
    """

    def __init__(self, communicator: Communicator, credit: int = CREDIT) -> None:
        self.communicator, self.credit = communicator, credit
        self.abandoned = False
        self._flight: dict[int, tuple[Iterator[None], int, Callable[[], Any]]] = {}
        self._patience = Patience(communicator)

    def submit(self, transfer: Transfer, slot: int, nbytes: int, done: Callable[[], Any]) -> None:
        """Starts a transfer as soon as its slot and the credit allow; `done` is called when it has ended."""
        while self._flight and (slot in self._flight or self._bytes() + nbytes > self.credit or len(self._flight) == SLOTS):
            self._progress()
        self._flight[slot] = (transfer(), nbytes, done)
        self._patience.reset()
        self._advance()

    def until(self, arrived: Callable[[], bool]) -> None:
        """Waits for something else while transfers go on."""
        self._patience.reset()
        while not arrived():
            self._progress()

    def drain(self) -> None:
        """Waits for all transfers."""
        while self._flight:
            self._progress()

    def _bytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self._flight.values())

    def _progress(self) -> None:
        if self.abandoned:
            raise Abandoned("this rank gave up")
        if not any(self._advance() for _ in range(BURST if self._flight else 1)):
            self._patience.wait()

    def _advance(self) -> bool:
        """Looks at every transfer once; whether one has ended."""
        ended = False
        for slot, (transfer, _, done) in list(self._flight.items()):
            try:
                next(transfer)
            except StopIteration:
                del self._flight[slot]
                self._patience.reset()
                ended = True
                done()
        return ended
