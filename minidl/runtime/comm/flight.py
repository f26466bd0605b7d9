"""Transfers under way: lanes of them in agreed orders, a bound on what is in flight, progress while somebody waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..streams import Event
from . import SLOTS, Communicator, RankError, Transfer, Wait

CREDIT = 4 * 2**20  #: bytes in flight; one transfer may exceed it
BURST = 8  #: looks between two naps; MPI moves some 16 KiB at each
CHECK_SECONDS = 0.02  #: how often a rank that waits looks whether the others still run


class Abandoned(RuntimeError):
    """The transfers were told to stop."""


class TransferError(RuntimeError):
    """Transfer `task` failed with `error`."""

    def __init__(self, error: BaseException, task: int) -> None:
        super().__init__(str(error))
        self.error, self.task = error, task


class Patience:
    """Waiting without burning a core: busy at first, then ever longer naps; looks for failures now and then, and
    whether what is awaited can still come. `reset` when something has come, and before the next wait."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._told = False
        self.reset()

    def reset(self) -> None:
        self._turns, self._since = 0, time.monotonic()
        self._next_check = self._since + CHECK_SECONDS
        if self._told:
            self._communicator.publish(None)
            self._told = False

    def wait(self, peer: int | None = None, what: str = "") -> None:
        """A nap, waiting for `what` from or to a peer. Raises RankError; where nothing is named, never for
        want of an answer."""
        self._turns += 1
        time.sleep(min(2e-6 * self._turns, 2e-4))
        if time.monotonic() > self._next_check:
            self._communicator.check()
            self._communicator.publish(wait := Wait(peer, what or "to meet", self._since, time.monotonic()))
            self._told = True
            if what:
                self._communicator.await_longer(wait)
            self._next_check = time.monotonic() + CHECK_SECONDS


@dataclass(frozen=True)
class Entry:
    """One transfer of a lane: it starts when all of `awaits` say that what they stand for has arrived (each is asked
    until it does, then not again), after `begin`; `done` is called when it and those before it on its lane have ended.
    No two with one `slot` are in flight; those without may all be, since messages have numbers, and count for no
    credit. `name` and `peer` (None: all others) are for whom it may concern that it does not end."""

    task: int
    transfer: Transfer
    slot: int | None
    nbytes: int
    awaits: Sequence[Callable[[], bool]] = ()
    begin: Sequence[Callable[[], Any]] = ()
    done: Sequence[Callable[[], Any]] = ()
    name: str = "a transfer"
    peer: int | None = None


class Flight:
    """Runs transfers. Those of a lane start in its order, and every rank has the same orders.

    `credit` bounds the bytes in flight, so that what is needed first is not held up by what was submitted before.
    """

    def __init__(self, communicator: Communicator, credit: int = CREDIT) -> None:
        self.communicator, self.credit = communicator, credit
        self._abandoned = False
        self._flight: dict[int, tuple[Iterator[None], Entry]] = {}  # by task
        self._submitted: list[Entry] = []
        self._patience = Patience(communicator)
        self.begin(())
        self._woken = Event()
        self.wake = self._woken.open  #: what is called when something that an entry awaits has arrived

    def begin(self, lanes: Sequence[Sequence[Entry]]) -> None:
        """These lanes are what `look` and `run` move from now on."""
        self._lanes = lanes
        self._heads, self._taken, self._told = ([0] * len(lanes) for _ in range(3))
        self._patience.reset()

    def look(self) -> bool:
        """Starts what can start and looks at what is under way; whether anything has moved."""
        self._go_on()
        moved = False
        for i, lane in enumerate(self._lanes):
            while self._told[i] < self._heads[i] and lane[self._told[i]].task not in self._flight:
                for call in lane[self._told[i]].done:
                    call()
                self._told[i] += 1
                moved = True
            while self._heads[i] < len(lane):
                entry = lane[self._heads[i]]
                while self._taken[i] < len(entry.awaits) and entry.awaits[self._taken[i]]():
                    self._taken[i] += 1
                if self._taken[i] < len(entry.awaits) or not self._room(entry):
                    break
                self._start(entry)
                self._heads[i], self._taken[i] = self._heads[i] + 1, 0
                moved = True
        return (bool(self._flight) and self._advance()) or moved

    @property
    def over(self) -> bool:
        """Whether all entries of all lanes have ended."""
        return all(told == len(lane) for told, lane in zip(self._told, self._lanes, strict=True))

    def run(self) -> None:
        """All entries of all lanes, to their end. Raises TransferError, RankError or Abandoned."""
        while not self.over:
            if self._flight:
                if not any(self.look() for _ in range(BURST)):
                    self._wait()
            elif not self.look() and not self._flight:
                self._woken.wait()

    def until(self, arrived: Callable[[], bool], peer: int | None, name: str) -> None:
        """Moves the lanes until the transfer `name` from or to a peer has arrived."""
        if arrived():
            return
        self._patience.reset()
        while not arrived():
            if not any(self.look() for _ in range(BURST)):
                self._patience.wait(peer, name)
        self._patience.reset()

    def submit(self, entry: Entry) -> None:
        """Starts a transfer of no lane as soon as its slot and the credit allow; what it awaits has arrived."""
        self._patience.reset()
        while not self._room(entry):
            self._progress()
        self._submitted.append(entry)
        self._start(entry)

    def drain(self) -> None:
        """Waits for all transfers that were submitted."""
        self._patience.reset()
        while self._flight:
            self._progress()
        for entry in self._submitted:
            for call in entry.done:
                call()
        self._submitted.clear()

    def abandon(self) -> None:
        """Whoever is in here leaves with Abandoned."""
        self._abandoned = True
        self.wake()

    def _room(self, entry: Entry) -> bool:
        if entry.slot is None:
            return True
        flight = [e for _, e in self._flight.values() if e.slot is not None]
        return not flight or (entry.slot not in [e.slot for e in flight] and len(flight) < SLOTS
                              and sum(e.nbytes for e in flight) + entry.nbytes <= self.credit)

    def _start(self, entry: Entry) -> None:
        for call in entry.begin:
            call()
        self._flight[entry.task] = (entry.transfer(), entry)
        self._patience.reset()
        self._advance()

    def _go_on(self) -> None:
        if self._abandoned:
            raise Abandoned("this rank gave up")

    def _progress(self) -> None:
        self._go_on()
        if not any(self._advance() for _ in range(BURST)):
            self._wait()

    def _wait(self) -> None:
        """For the oldest transfer under way."""
        _, entry = next(iter(self._flight.values()))
        self._patience.wait(entry.peer, entry.name)

    def _advance(self) -> bool:
        """Looks at every transfer once; whether one has ended."""
        ended = False
        for transfer, entry in list(self._flight.values()):
            try:
                next(transfer)
            except StopIteration:
                del self._flight[entry.task]
                self._patience.reset()
                ended = True
            except RankError:
                raise
            except Exception as error:
                raise TransferError(error, entry.task) from error
        return ended
