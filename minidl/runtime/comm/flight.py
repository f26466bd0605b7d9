"""Transfers in flight: lanes of transfers in an order that all ranks share, a limit on bytes in flight, and polling."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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


class Election:
    """Which sum is next: ranks tell each other which are ready, and the first one of the order that is ready on all of
    them is. `place`: of each task in the order; `exchange(own, every)` brings every rank's flags to all. `order`: the
    tasks in an order that ranks keep instead, from the next step on; `realised`: in which they have started."""

    def __init__(self, place: Mapping[int, int], ranks: int, exchange: Callable[[Any, Any], Iterator[None]]) -> None:
        self.place, self.exchange, self.order, self.realised = place, exchange, list[int](), list[int]()
        self._own, self._every = (np.zeros(shape, np.uint8) for shape in (len(place), (ranks, len(place))))
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._ready, self._next, self.realised = set[int](), -1, []
        self._kept = self.order  # the step before may still run when the next one's is set
        self._ballot: Iterator[None] | None = None

    @property
    def votes(self) -> bool:
        """Whether a sum is ready that has not started: then the other ranks may wait for this one's flags."""
        return bool(self._ready)

    def chosen(self, task: int) -> bool:
        """Whether this task, which is ready, is next."""
        if self._kept:
            return self._kept[len(self.realised)] == task
        self._ready.add(self.place[task])
        if self._next < 0:
            self._vote()
        return self._next == self.place[task]

    def started(self, task: int) -> None:
        """The task that was next has started."""
        self.realised.append(task)
        self._ready.discard(self._next)
        self._next = -1

    def _vote(self) -> None:
        if self._ballot is None:
            self._own[:] = 0
            self._own[[*self._ready]] = 1
            self._ballot = self.exchange(self._own, self._every)
        if next(self._ballot, self) is self:  # it has ended
            self._ballot, common = None, np.flatnonzero(self._every.all(axis=0))
            self._next = int(common[0]) if len(common) else -1


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
        self._woken = Event()
        self._patience = Patience(communicator, lane, None if lane else lambda seconds: self._woken.wait(True, seconds))
        self.election: Election | None = None  #: of transfers with a slot, if their lanes do not say which is next
        self.lanes: Any = None  #: those that compute beside it
        self.begin(())
        self.wake = self._woken.open  #: call it when something that an entry awaits has arrived

    def begin(self, lanes: Sequence[Sequence[Entry]]) -> None:
        """Sets the lanes that `look` and `run` work on."""
        self._lanes = [list(lane) for lane in lanes]
        self._heads, self._taken, self._told = ([0] * len(lanes) for _ in range(3))
        self._begun = self._lanes, self._heads  # set at once, for `standing`
        if self.election is not None:
            self.election.begin()
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
                if self._taken[i] < len(entry.awaits) or not (self._elected(entry) and self._room(entry)):
                    break
                self._start(entry)
                self._heads[i], self._taken[i] = self._heads[i] + 1, 0
                moved = True
        return moved

    def _elected(self, entry: Entry) -> bool:
        return self.election is None or entry.slot is None or self.election.chosen(entry.task)

    def over(self, step: bool = False) -> bool:
        """Whether all entries of all lanes have ended; with `step`, all but those that may outlive their step."""
        return all(step and entry.later for told, lane in zip(self._told, self._lanes, strict=True)
                   for entry in lane[told:])

    def run(self, step: bool = False) -> None:
        """Runs all entries of all lanes; with `step`, all but those that may outlive their step. Raises TransferError,
        RankError or Abandoned."""
        while not self.over(step):
            if self._flight or self._votes:
                if not self.look():
                    self._wait()
            elif not self.look() and not (self._flight or self._votes):
                self._woken.wait()

    @property
    def _votes(self) -> bool:
        return self.election is not None and self.election.votes

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
        """Starts a transfer that is on no lane once its slot and the credit allow. Its awaited tasks must have run."""
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

    def standing(self) -> tuple[list[Entry], list[Entry]]:
        """The entries that have begun, and those that are under way. Any thread may ask."""
        begun = [e for lane, head in zip(*self._begun, strict=True) for e in lane[:head]]
        flying = [e for _, e in self._flight.copy().values()]  # after the heads: one that is not here has ended
        return begun + flying, flying

    @property
    def counts(self) -> tuple[int, ...]:
        """How many transfers of each lane have begun and ended: any progress changes it."""
        return *self._heads, *self._told, len(self._flight)

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
        if self.election is not None and entry.slot is not None:
            self.election.started(entry.task)
        self._patience.reset()
        self._poll(entry.task)

    def _wait(self) -> None:
        """Waits a moment for the oldest transfer in flight."""
        if not self._flight:
            self._patience.wait((), "which sum is next")
            return
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
