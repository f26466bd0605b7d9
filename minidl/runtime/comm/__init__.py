"""Ranks that sum their gradients: what all transports share. Knows no graph, no schedule and no MPI.

A sum over ranks is taken in the order of the ranks, element by element: each rank adds up its own share of the
elements, then hands the result to all. So the bits depend neither on the transport, nor on how tensors are cut, nor on
which transfer ends first; and the volume is that of a ring.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...tasks import Kind
from .places import Host, OnDevice, Staged

SLOTS = 4  #: transfers that can be in flight at the same time; a transport keeps them apart
WAIT_SECONDS = 60.0  #: how long ranks may wait for each other in a circle
SILENT_SECONDS = 8.0  #: how long a rank may give no sign of life
AT_WORK = 10  #: so many times longer a rank waits for one that is at work

Transfer = Callable[[], Iterator[None]]  #: starts a transfer; each `next` looks whether it goes on, the end is its end


class RankError(RuntimeError):
    """Another rank failed; `rank` is its number. The message has its error."""

    own = False  #: whether this rank found it out by itself, and the message says the whole of it

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank} failed: {message}")
        self.rank = rank


class SilentRank(RankError):
    """A rank no longer answers: it was stopped, hangs, or its machine is gone."""

    own = True

    def __init__(self, rank: int, waiting: int, seconds: float) -> None:
        super().__init__(rank, "")
        self.args = (f"rank {waiting} waits for rank {rank}, which has given no sign of life for {seconds:g} s: it was "
                     f"stopped, or its machine is gone (MINIDL_MPI_SILENT_SECONDS gives it more time)",)


class Standstill(RankError):
    """What this rank waits for does not come."""

    own = True

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(rank, "")
        self.args = (message,)


@dataclass(frozen=True)
class Wait:
    """What a rank waits for: `what`, from or to rank `peer` (None: all others), since `since` and still when it looked
    at `looked` (both `time.monotonic`)."""

    peer: int | None
    what: str
    since: float
    looked: float

    def of(self, rank: int) -> str:
        return f"rank {rank} waits for {'all others' if self.peer is None else f'rank {self.peer}'} ({self.what})"

    def lasts(self, seconds: float) -> bool:
        """Whether it has lasted so long and has been looked at in that time. One that has not may be over: what came
        since has not been seen yet, as its rank had no turn."""
        now = time.monotonic()
        return now - self.since > seconds and now - self.looked < seconds


class Communicator:
    """One rank among `size`. Transports give `_exchange`, `_collect`, `_share`, `check` and `fail`.

    `deterministic=False` lets the transport sum as it likes, which may differ in the last bits.
    """

    rank: int
    size: int
    local_rank = 0  #: this rank's number among those of its machine
    deterministic = True
    wait_seconds = WAIT_SECONDS  #: a deadline, see `await_longer`
    own_process = True  #: whether no other rank shares this process
    on_device = False  #: whether it takes the memory of a CUDA device, when what was issued before has run
    #: of a transport whose calls go to a stream of the device: that stream; then it takes what was issued there
    stream: Any = None

    # --------------------------------------------------------------------------------------------- what transports give
    def _exchange(self, out: Any, into: Any, bounds: Sequence[int], slot: int) -> Iterator[None]:
        """Sends `out[bounds[r]:bounds[r + 1]]` to each rank r; row r of `into` is what r sends to this rank."""
        raise NotImplementedError

    def _collect(self, array: Any, bounds: Sequence[int], slot: int) -> Iterator[None]:
        """Fills `array` with each rank's own share of it."""
        raise NotImplementedError

    def _share(self, value: Any) -> Iterator[list[Any] | None]:
        """Yields None until the values of all ranks are there, then those."""
        raise NotImplementedError

    def _sum(self, array: Any, slot: int) -> Iterator[None]:
        """Sums in place as the transport likes."""
        raise NotImplementedError

    def _send(self, array: Any, peer: int, number: int) -> Transfer:
        """Sends an array to another rank, each time it is started; what has one number arrives in the order in which it
        was started. It ends when the array may be written again."""
        raise NotImplementedError

    def _receive(self, array: Any, peer: int, number: int) -> Transfer:
        """Fills an array with what another rank sends under that number."""
        raise NotImplementedError

    def publish(self, wait: Wait | None) -> None:
        """Lets the other ranks know what this one waits for."""

    def _waits(self) -> Mapping[int, Wait]:
        """What others wait for, where it `lasts` half of `wait_seconds`."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises RankError if another rank has said that it failed, or says nothing any more."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> bool:
        """Tells the others that this rank failed, unless it failed since another did. Whether this rank is
        the one to say why."""
        raise NotImplementedError

    # ----------------------------------------------------------------------------------------------------- what is used
    def bind(self, kind: Kind, place: Host, slot: int | None, peer: int | None = None, message: int = 0) -> Transfer:
        """What moves the arrays of a place, as often as it is started.

        A: their mean over ranks. AS: the mean of this rank's share of the elements; AG: hands the shares to all, so
        that AS and then AG on the same place are A; what lies between them is in the place alone. SF, SO: sends them to
        `peer` as the message of that number; RF, RO: receives them from there.
        """
        if peer is not None:
            return self._to_peer(kind, place, peer, message)
        assert slot is not None

        def run() -> Iterator[None]:
            if self.size == 1:
                return
            if kind != Kind.AG:
                yield from place.take()
            if kind == Kind.A and not self.deterministic:
                yield from self._sum(place.whole, slot)
                yield from place.scale()
            else:
                if kind != Kind.AG:
                    yield from self._exchange(place.whole, place.received, place.bounds, slot)
                    yield from place.add()
                if kind != Kind.AS:
                    yield from self._collect(place.whole, place.bounds, slot)
            if kind != Kind.AS:
                yield from place.give()

        return run

    def _to_peer(self, kind: Kind, place: Host, peer: int, message: int) -> Transfer:
        sends = kind in (Kind.SF, Kind.SO)
        moves = [(self._send if sends else self._receive)(array, peer, message) for array in place.arrays]

        def run() -> Iterator[None]:
            if sends:
                yield from place.take()
            under_way = [move() for move in moves]  # on both ranks in one order, so each finds its other end
            while under_way:
                under_way = [move for move in under_way if next(move, self) is not self]
                if under_way:
                    yield
            if not sends:
                yield from place.give()

        return run

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order; also a barrier. Raises RankError while it waits."""
        from .flight import Patience

        patience = Patience(self)
        try:
            for values in self._share(value):
                if values is not None:
                    return values
                patience.wait()
        finally:
            patience.reset()
        raise AssertionError("a transport's _share ends with the values")

    def clocks_ahead(self, rounds: int = 20) -> list[float]:
        """By how many seconds the `perf_counter` of each rank is ahead of rank 0's, as near as ranks can tell that
        meet: 0 where it may be the same clock. All ranks call it together."""
        low, high = [-math.inf] * self.size, [math.inf] * self.size
        for _ in range(rounds):
            before = time.perf_counter()
            self.gather(None)
            after = time.perf_counter()
            times = self.gather((before, after))
            for r, (b, a) in enumerate(times):  # nobody leaves before all have come
                low[r], high[r] = max(low[r], b - times[0][1]), min(high[r], a - times[0][0])
        return [0.0 if lo <= 0 <= hi else (lo + hi) / 2 for lo, hi in zip(low, high, strict=True)]

    def await_longer(self, wait: Wait) -> None:
        """Whether to go on waiting: raises Standstill where all that it depends on have waited for `wait_seconds`, so
        that none ever goes on, or where it has waited AT_WORK times as long for a rank that is at work."""
        seconds = time.monotonic() - wait.since
        if seconds < self.wait_seconds:
            return
        waits, way = {**self._waits(), self.rank: wait}, [self.rank]
        while (at := way[-1]) in waits:
            peer = waits[at].peer
            if peer is None:  # one of the others that is at work, if there is one
                peer = next((r for r in range(self.size) if r not in waits), self.rank)
            if peer in way:
                raise Standstill(peer, f"the ranks wait for each other: {'; '.join(waits[r].of(r) for r in way)}")
            way.append(peer)
        if seconds > AT_WORK * self.wait_seconds:
            raise Standstill(at, f"{'; '.join(waits[r].of(r) for r in way[:-1])}, which is at work, for more than "
                                 f"{AT_WORK * self.wait_seconds:g} s (MINIDL_MPI_WAIT_SECONDS gives it more time)")

    def close(self) -> None:
        """Ends what the transport holds."""


__all__ = ["SLOTS", "WAIT_SECONDS", "Communicator", "Host", "OnDevice", "RankError", "SilentRank", "Staged",
           "Standstill", "Transfer", "Wait"]
