"""Ranks in one process, each in its own thread: for tests and for debuggers."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any

import numpy as np

from . import Communicator, RankError, Transfer, Wait


class _Board:
    """Values that ranks leave for each other, by round."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rounds: dict[Any, dict[int, Any]] = {}
        self.seen: Counter[Any] = Counter()
        self.failed: tuple[int, str] | None = None
        # an array that its receiver takes; by communicator, sender, receiver, number, and how many were sent before
        self.sent: dict[Any, list[Any]] = {}
        self.waits: dict[int, Wait] = {}

    def take(self, key: Any, ranks: Sequence[int]) -> list[Any] | None:
        """The values of these ranks, or None until all have arrived; the last rank to take them clears the round."""
        with self.lock:
            values = self.rounds.get(key, {})
            if len(values) < len(ranks):
                return None
            self.seen[key] += 1
            if self.seen[key] == len(ranks):
                del self.rounds[key], self.seen[key]
            return [values[r] for r in ranks]


class LoopBack(Communicator):
    """One of several ranks in this process; `run_ranks` makes them. `members`: their numbers in the process, of which
    this one's is at `rank`. `name` tells a communicator of these ranks from another one."""

    own_process = False

    def __init__(self, rank: int, members: tuple[int, ...], board: _Board, name: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.rank = self.local_rank = rank
        self.size, self._members, self._board = len(members), members, board
        self._me, self._name, self._duplicates = members[rank], name, 0
        self._round: Counter[Any] = Counter()
        self._sent, self._received = Counter[Any](), Counter[Any]()  # messages started, by rank and number

    @classmethod
    def ranks(cls, size: int) -> list[LoopBack]:
        board, members = _Board(), tuple(range(size))
        return [cls(rank, members, board) for rank in members]

    def _split(self, ranks: tuple[int, ...]) -> LoopBack:
        return type(self)(ranks.index(self.rank), tuple(self._members[r] for r in ranks), self._board, self._name)

    def duplicate(self, links: Collection[tuple[int, bool]]) -> LoopBack:
        self._duplicates += 1
        return type(self)(self.rank, self._members, self._board, (*self._name, self._duplicates))

    def _everyone(self, channel: Any, value: Any) -> Generator[None, None, list[Any]]:
        """Waits for all ranks; returns their values."""
        key = (self._name, channel, self._members, self._round[channel])
        self._round[channel] += 1
        with self._board.lock:
            self._board.rounds.setdefault(key, {})[self._me] = value
        while (values := self._board.take(key, self._members)) is None:
            yield
        return values

    def _exchange(self, out: Any, into: Any, bounds: Sequence[int] | None, slot: int) -> Iterator[None]:
        sent, mine = (yield from self._everyone(slot, out)), slice(*bounds[self.rank :][:2] if bounds else (None,))
        for row, array in zip(into, sent, strict=True):
            np.copyto(row, array[mine])
        yield from self._everyone(slot, None)  # all ranks have read the memory, so it may be written

    def _all_to_all(self, out: Any, sent: Sequence[int], into: Any, received: Sequence[int], slot: int
                    ) -> Iterator[None]:
        every = yield from self._everyone(slot, (out, sent))
        for r, (other, ends) in enumerate(every):
            np.copyto(into[received[r] : received[r + 1]], other[ends[self.rank] : ends[self.rank + 1]])
        yield from self._everyone(slot, None)

    def _collect(self, array: Any, bounds: Sequence[int], slot: int) -> Iterator[None]:
        sent = yield from self._everyone(slot, array)
        for r, other in enumerate(sent):
            np.copyto(array[bounds[r] : bounds[r + 1]], other[bounds[r] : bounds[r + 1]])
        yield from self._everyone(slot, None)

    def _sum(self, array: Any, slot: int) -> Iterator[None]:
        sent = yield from self._everyone(slot, array.copy())
        array[...] = sum(sent[1:], sent[0])

    def _send(self, array: Any, peer: int, number: int) -> Transfer:
        def run() -> Iterator[None]:
            message, before = [array], self._sent[peer, number]
            self._sent[peer, number] += 1
            self._board.sent[self._name, self._me, self._members[peer], number, before] = message
            while message:  # a rendezvous, as with large messages over MPI
                yield

        return run

    def _receive(self, array: Any, peer: int, number: int) -> Transfer:
        def run() -> Iterator[None]:
            before = self._received[peer, number]  # receives get messages in the order in which they were started
            self._received[peer, number] += 1
            key = self._name, self._members[peer], self._me, number, before
            while (message := self._board.sent.pop(key, None)) is None:
                yield
            np.copyto(array, message[0])
            message.clear()

        return run

    def _share(self, value: Any) -> Generator[None, None, list[Any]]:
        return self._everyone("share", value)

    def publish(self, wait: Wait | None) -> None:
        if wait is None:
            self._board.waits.pop(self._me, None)
        else:
            self._board.waits[self._me] = wait

    @property
    def published(self) -> Wait | None:
        return self._board.waits.get(self._me)

    def _waits(self) -> dict[int, Wait]:
        return {rank: wait for rank, wait in self._board.waits.copy().items() if wait.lasts(self.wait_seconds / 2)}

    def check(self) -> None:
        failed = self._board.failed
        if failed is not None and failed[0] != self._me:
            raise RankError(*failed)

    def fail(self, error: BaseException) -> bool:
        with self._board.lock:
            if first := self._board.failed is None and (not isinstance(error, RankError) or error.own):
                self._board.failed = self._me, f"{type(error).__name__}: {error}"
            return first


CLONE_FS = 0x200  #: for unshare(2): the working folder, which threads share otherwise


def run_ranks(size: int, work: Callable[[Communicator], Any]) -> list[Any]:
    """Runs `work(communicator)` on each of `size` ranks, every rank in its own thread; returns their results.

    Every rank has a working folder of its own, as a process has. Raises the error of the rank that failed first.
    """
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def run(communicator: LoopBack) -> None:
        try:
            if sys.platform == "linux":  # elsewhere, and if the system refuses, ranks share one folder
                ctypes.CDLL(None).unshare(CLONE_FS)
            results[communicator.rank] = work(communicator)
        except BaseException as error:
            communicator.fail(error)
            errors.append((communicator.rank, error))

    threads = [threading.Thread(target=run, args=(c,), name=f"rank {c.rank}") for c in LoopBack.ranks(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for _, error in errors if not isinstance(error, RankError) or error.own), errors[0][1])
    return results
