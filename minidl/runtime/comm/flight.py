"""Transfers in flight: lanes of transfers in an order that all ranks share, a limit on bytes in flight, and polling."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...devices.lanes import Event, LaneError
from . import SLOTS, Communicator, Patience, RankError, Transfer

CREDIT = 4 * 2**20  #: the most bytes in flight; a single transfer may exceed it


class Abandoned(RuntimeError):
    """The transfers must stop, since their rank gave up."""


class TransferError(LaneError):
    """Transfer `task` failed with `error`."""


@dataclass(frozen=True)
class Entry:
    """One transfer of a lane. It starts when all of `awaits` have returned True (each is called until it does, then not
    again), after the calls `begin`; the calls `done` follow when it and all transfers before it on its lane have ended.
    Only one transfer per `slot` is in flight at a time; messages have no slot, since they have numbers, and do not
    count toward the credit. `name` and `peers` (none: all others) are for messages about a transfer that does not end.
    `later`: it may still be in flight when its step ends. `in_turn`: a poll is of use only when all transfers before it
    on its lane have ended."""

    task: int
    transfer: Transfer
    slot: int | None
    nbytes: int
    awaits: Sequence[Callable[[], bool]] = ()
    begin: Sequence[Callable[[], Any]] = ()
    done: Sequence[Callable[[], Any]] = ()
    name: str = "a transfer"
    peers: tuple[int, ...] = ()
    later: bool = False
    in_turn: bool = False


class Flight:
    """Runs transfers. The transfers of a lane start in its order, which all ranks share.

    `credit` limits the bytes in flight, so that an urgent transfer is not held up by many that were submitted before.
    `lane`: the lanes that compute poll it, as in `Patience`, one at a time.
    """

    def __init__(self, communicator: Communicator, credit: int = CREDIT, lane: bool = False) -> None:
        self.communicator, self.credit = communicator, credit
        self._abandoned, self._turn = False, threading.Lock()
        self._flight: dict[int, tuple[Iterator[None], Entry]] = {}  # by task
        self._submitted: list[Entry] = []
        self._patience = Patience(communicator, lane)
        self.lanes: Any = None  #: those that compute beside it
        self.begin(())
        self._woken = Event()
        self.wake = self._woken.open  #: call it when something that an entry awaits has arrived

    def begin(self, lanes: Sequence[Sequence[Entry]]) -> None:
        """Sets the lanes that `look` and `run` work on."""
        self._lanes = [list(lane) for lane in lanes]
        self._heads, self._taken, self._told = ([0] * len(lanes) for _ in range(3))
        self._patience.reset()

    def look(self) -> bool:
        """Starts every transfer that can start and polls those in flight, unless another lane does so now. Returns
        whether anything has changed."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            return self._look()
        except RuntimeError as error:
            if self._abandoned and type(error) is RuntimeError:  # an event that was let through in the meantime
                raise Abandoned("this rank gave up") from error
            raise
        finally:
            self._turn.release()

    def _look(self) -> bool:
        moved = self._advance()
        for i, lane in enumerate(self._lanes):
            while self._told[i] < self._heads[i]:
                entry = lane[self._told[i]]
                if entry.task in self._flight and not (entry.in_turn and self._poll(entry.task)):
                    break
                for call in entry.done:
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
        return moved

    def over(self, step: bool = False) -> bool:
        """Whether all entries of all lanes have ended; with `step`, all but those that may outlive their step."""
        return all(step and entry.later for told, lane in zip(self._told, self._lanes, strict=True)
                   for entry in lane[told:])

    def run(self, step: bool = False) -> None:
        """Runs all entries of all lanes; with `step`, all but those that may outlive their step. Raises TransferError,
        RankError or Abandoned."""
        while not self.over(step):
            if self._flight:
                if not self.look():
                    self._wait()
            elif not self.look() and not self._flight:
                self._woken.wait()

    def until(self, arrived: Callable[[], bool], peers: tuple[int, ...], name: str) -> None:
        """Polls the lanes until the transfer `name` from or to these ranks has arrived, or another lane has failed."""
        if arrived():
            return
        self._patience.reset()
        while not (arrived() or (self.lanes and self.lanes.given_up)):
            if not any(self.look() for _ in range(self._patience.looks)):
                self._patience.wait(peers, name)
        self._patience.reset()

    def submit(self, entry: Entry) -> None:
        """Starts a transfer that is on no lane, as soon as its slot and the credit allow. Its awaited tasks must have
        run."""
        self._patience.reset()
        while not self._room(entry):
            if not self._advance():
                self._wait()
        self._submitted.append(entry)
        self._start(entry)

    def drain(self) -> None:
        """Waits for all submitted transfers."""
        self._patience.reset()
        while any(entry.task in self._flight for entry in self._submitted):
            if not self._advance():
                self._wait()
        for entry in self._submitted:
            for call in entry.done:
                call()
        self._submitted.clear()

    def abandon(self) -> None:
        """Makes every call in progress raise Abandoned."""
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
        self._poll(entry.task)

    def _wait(self) -> None:
        """Waits a moment for the oldest transfer in flight."""
        _, entry = next(iter(self._flight.values()))
        self._patience.wait(entry.peers, entry.name)

    def _advance(self) -> bool:
        """Polls every transfer once, but for those in turn. Returns whether one has ended."""
        if self._abandoned:
            raise Abandoned("this rank gave up")
        ended = [self._poll(task) for task, (_, entry) in list(self._flight.items()) if not entry.in_turn]
        return any(ended)

    def _poll(self, task: int) -> bool:
        """Polls a transfer in flight once. Returns whether it has ended."""
        try:
            next(self._flight[task][0])
        except StopIteration:
            del self._flight[task]
            self._patience.reset()
            return True
        except RankError:
            raise
        except Exception as error:
            raise TransferError(error, task) from error
        return False
