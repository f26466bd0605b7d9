"""Communication between ranks: the part that all transports share. Knows no graph, no schedule and no MPI.

A sum over ranks is computed in the order of the ranks, element by element: each rank adds up its own share of the
elements, then sends the result to all; of a few bytes, each rank adds up all. So the bits depend neither on the
transport, nor on how tensors are cut, nor on which transfer ends first; and the volume of long sums equals a ring's.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...core.columns import offsets
from ...core.tasks import Kind
from .places import Host, OnDevice, Staged

SLOTS = 4  #: how many collectives can be in flight at the same time; a transport keeps them apart
WAIT_SECONDS = 60.0  #: how long ranks may wait for each other in a circle
SILENT_SECONDS = 8.0  #: how long a rank may give no sign of life
AT_WORK = 10  #: a rank waits this many times longer for one that is at work
NAP, PROMPT_NAP = 2e-4, 2e-5  #: the longest nap of a thread that waits, and of one whose core has nothing else to do
LOOKS = 8  #: between two naps of a lane that waits on a core of its own: messages are short; others share their core
SLACK = 29  #: the request of Linux's prctl that sets how late naps of a thread may end, 50 us by default
CHECK_SECONDS = 0.02  #: how often a waiting rank checks whether the others still run

Transfer = Callable[[], Iterator[None]]  #: starts a transfer; each `next` polls it; it is over when the iterator ends


class RankError(RuntimeError):
    """Another rank failed. `rank`: its number. The message has its error."""

    own = False  #: whether this rank noticed it by itself, so that no other message explains it

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(rank, message)
        self.rank = rank

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.args[1]}"


class Standstill(RankError):
    """This rank waits for something that will not come. `message`: all of it."""

    own = True

    def __str__(self) -> str:
        return str(self.args[1])


class SilentRank(Standstill):
    """A rank no longer answers: it was stopped, hangs, or its machine is gone."""


@dataclass(frozen=True)
class Wait:
    """A rank waits for the transfer `what` from or to the ranks `peers` (none: all others). `since`: when the wait
    began; `looked`: when it was last seen (both `time.monotonic`)."""

    peers: tuple[int, ...]
    what: str
    since: float
    looked: float

    def of(self, rank: int) -> str:
        several = "s" if len(self.peers) > 1 else ""
        whom = f"rank{several} {' and '.join(map(str, self.peers))}" if self.peers else "all others"
        return f"rank {rank} waits for {whom} ({self.what})"

    def lasts(self, seconds: float) -> bool:
        """Whether the wait has lasted longer than `seconds`, and was last seen within `seconds`. Otherwise it may be
        over: its rank may not have looked since."""
        now = time.monotonic()
        return now - self.since > seconds and now - self.looked < seconds


class Patience:
    """Waits without burning a core: it polls at first, then naps ever longer. From time to time it checks for failures,
    and whether the awaited transfer can still come. Call `reset` when something has arrived, and before the next
    wait. `lane`: this thread computes when it does not wait; where each rank has a core to itself, its naps stay
    short, with more `looks` between two, since its core has nothing else to do, and others wait for what it does.
    `nap(seconds)`: a nap that something to do ends early."""

    def __init__(self, communicator: Communicator, lane: bool = False,
                 nap: Callable[[float], Any] | None = None) -> None:
        self._communicator, self._nap = communicator, nap
        self._longest, self.looks = NAP, 1
        if lane and communicator.own_core:
            self._longest, self.looks = PROMPT_NAP, LOOKS
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(SLACK, 1, 0, 0, 0)
        self._told = False
        self.reset()

    def reset(self) -> None:
        self._turns, self._since = 0, time.monotonic()
        self._next_check = self._since + CHECK_SECONDS
        if self._told:
            self._communicator.publish(None)
            self._told = False

    def wait(self, peers: tuple[int, ...] = (), what: str = "") -> None:
        """Naps once while this rank waits for the transfer `what` from or to these ranks (none: all others). Raises
        RankError if another rank failed, or if `what` is given and the wait has become useless."""
        self._turns += 1
        (self._nap or time.sleep)(min(2e-6 * self._turns, self._longest))
        if time.monotonic() > self._next_check:
            self._communicator.check()
            self._communicator.publish(wait := Wait(peers, what or "to meet", self._since, time.monotonic()))
            self._told = True
            if what:
                self._communicator.await_longer(wait)
            self._next_check = time.monotonic() + CHECK_SECONDS


class Communicator:
    """One rank among `size`. Each transport implements `_exchange`, `_collect`, `_share`, `_split`, `check`, `fail` and
    `duplicate`; one of host memory `_all_to_all` as well.

    `deterministic=False` lets the transport sum in any order, so the last bits may differ.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], Communicator] = {}

    rank: int
    size: int
    local_rank = 0  #: this rank's number among the ranks of its machine
    deterministic = True
    wait_seconds = WAIT_SECONDS  #: a deadline, see `await_longer`
    own_core = False  #: whether the ranks of this machine are no more than its cores
    own_process = True  #: whether no other rank shares this process
    on_device = False  #: whether it can send the memory of a CUDA device, once the work issued before has run
    #: the device's stream of a transport whose calls go to one; it then needs no wait for work issued on that stream
    stream: Any = None

    # ---------------------------------------------------------------------------------------------- for each transport
    def _exchange(self, out: Any, into: Any, bounds: Sequence[int] | None, slot: int) -> Iterator[None]:
        """Sends `out[bounds[r]:bounds[r + 1]]` to each rank r, or without bounds all of `out`; row r of `into` receives
        what r sends to this rank."""
        raise NotImplementedError

    def _all_to_all(self, out: Any, sent: Sequence[int], into: Any, received: Sequence[int], slot: int
                    ) -> Iterator[None]:
        """Sends `out[sent[r]:sent[r + 1]]` to each rank r, and receives in `into[received[r]:received[r + 1]]` what r
        sends to this rank. Arrays are flat, and of one type."""
        raise NotImplementedError

    def _collect(self, array: Any, bounds: Sequence[int], slot: int) -> Iterator[None]:
        """Fills `array` with each rank's own share of it."""
        raise NotImplementedError

    def _share(self, value: Any) -> Generator[None, None, list[Any]]:
        """Yields until the values of all ranks have arrived; returns them."""
        raise NotImplementedError

    def _sum(self, array: Any, slot: int) -> Iterator[None]:
        """Sums in place, in an order that the transport chooses."""
        raise NotImplementedError

    def _send(self, array: Any, peer: int, number: int) -> Transfer:
        """A transfer that sends an array to another rank each time it is started. Messages with one number arrive in
        the order in which they were started. It ends when the array may be written again."""
        raise NotImplementedError

    def _receive(self, array: Any, peer: int, number: int) -> Transfer:
        """A transfer that fills an array with the message of that number from another rank."""
        raise NotImplementedError

    def _split(self, ranks: tuple[int, ...]) -> Communicator:
        """These of the ranks as a communicator; as `group`, but made anew."""
        raise NotImplementedError

    def publish(self, wait: Wait | None) -> None:
        """Tells the other ranks what this one waits for."""

    @property
    def published(self) -> Wait | None:
        """The wait that this rank has published last."""
        return None

    def _waits(self) -> Mapping[int, Wait]:
        """The waits of other ranks that have lasted half of `wait_seconds`, by rank."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises RankError if another rank has reported a failure or gives no sign of life."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> bool:
        """Tells the other ranks that this one failed, unless it failed because another one did. Returns whether this
        rank should print the error."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------ for callers
    def bind(self, kind: Kind, place: Host, slot: int | None, peer: int | None = None, message: int = 0) -> Transfer:
        """A transfer on the arrays of a place, which can be started any number of times.

        A: their mean over ranks. AS: the mean of this rank's share of the elements. AG: sends the shares to all ranks;
        AS and then AG on the same place give A, and the result between the two is only in the place; with a place
        of `Shares`, AS leaves the share in an array, and AG begins with it. SF, SO: sends them to `peer` as the message
        of that number; RF, RO: receives them from `peer`.
        """
        if peer is not None:
            return self._to_peer(kind, place, peer, message)
        assert slot is not None
        take, give = place.action("take"), place.action("give")
        exchange: list[Transfer] = [
            *take, partial(self._exchange, place.whole, place.received, place.bounds, slot), *place.action("add")]
        collect: list[Transfer] = []
        if place.bounds is not None:
            collect = [*place.action("lay"), partial(self._collect, place.whole, place.bounds, slot)]
        moves = {Kind.A: [*exchange, *collect, *give], Kind.AS: [*exchange, *place.action("keep")],
                 Kind.AG: [*collect, *give]}[kind]
        if kind == Kind.A and not self.deterministic:
            moves = [*take, partial(self._sum, place.whole, slot), *place.action("scale"), *give]
        return partial(in_turn, moves if self.size > 1 else [])

    def exchange_rows(self, rows: Any, counts: Sequence[Any], into: Any, slot: int, rest: bool = True) -> Transfer:
        """A transfer of rows (n, width), which are sorted by the rank to which they go, into rows (m, width), sorted by
        the rank from which they come; zeros follow, unless `rest` is False. `counts`: how many rows go and come, in two
        arrays of as many numbers for each rank, read when it starts; none: to each rank as many as from it."""
        def ends(numbers: Any, width: int) -> list[int]:
            return offsets(numbers.reshape(self.size, -1).sum(1) * width).tolist()

        def run() -> Iterator[None]:
            sent, received = (ends(n, rows.shape[-1]) for n in counts) if counts else (
                [rows.size // self.size * r for r in range(self.size + 1)],) * 2
            yield from self._all_to_all(rows.reshape(-1), sent, into.reshape(-1), received, slot)
            if rest:
                into.reshape(-1)[received[-1] :] = 0

        return run

    def _to_peer(self, kind: Kind, place: Host, peer: int, message: int) -> Transfer:
        sends = kind in (Kind.SF, Kind.SO)
        moves = [(self._send if sends else self._receive)(array, peer, message) for array in place.arrays]
        before, after = ("take", "sent") if sends else ("clear", "give")
        return partial(in_turn, [*place.action(before), partial(_at_once, moves), *place.action(after)])

    @property
    def host(self) -> Communicator:
        """The transport of host memory beside this one, or itself."""
        return self

    def duplicate(self, links: Collection[tuple[int, bool]]) -> Communicator:
        """A communicator of the same ranks, for one program: it never confuses its transfers with another program's,
        which may be in flight at the same time. `links`: the links of its messages, as pairs of a peer and whether this
        rank sends. All ranks call it together, and `free` it when no transfer is in flight."""
        raise NotImplementedError

    def free(self) -> None:
        """Frees what `duplicate` has made."""

    def link(self, peer: int, sends: bool) -> Communicator:
        """The communicator that moves the messages to or from a peer."""
        return self

    def group(self, ranks: tuple[int, ...]) -> Communicator:
        """A communicator of these ranks alone, numbered in their order: for sums, and `gather`. It still reports the
        failures of all ranks. All ranks call it together, each with the group that it is in."""
        if len(ranks) == self.size:
            return self
        if ranks not in self._groups:
            self._groups[ranks] = self._split(ranks)
        return self._groups[ranks]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order; also a barrier. Raises RankError if another rank fails."""
        values: list[Any] = self._awaited(self._share(value))
        return values

    def exchange(self, out: Any, into: Any, bounds: Sequence[int]) -> None:
        """Sends `out[bounds[r]:bounds[r + 1]]` to each rank r; row r of `into` receives what r sends to this rank. All
        ranks call it together. Raises RankError if another rank fails."""
        self._awaited(self._exchange(out, into, bounds, 0))

    def _awaited(self, transfer: Iterator[None]) -> Any:
        """The result of a transfer, once it is over."""
        patience = Patience(self)
        try:
            while True:
                next(transfer)
                patience.wait()
        except StopIteration as ended:
            return ended.value
        finally:
            patience.reset()

    def clocks_ahead(self, rounds: int = 20) -> list[float]:
        """By how many seconds the `perf_counter` of each rank is ahead of rank 0's, estimated from `rounds` barriers: 0
        if it may be the same clock. All ranks call it together."""
        low, high = [-math.inf] * self.size, [math.inf] * self.size
        for _ in range(rounds):
            before = time.perf_counter()
            self.gather(None)
            times = self.gather((before, time.perf_counter()))
            for r, (b, a) in enumerate(times):  # no rank leaves the barrier before all have entered it
                low[r], high[r] = max(low[r], b - times[0][1]), min(high[r], a - times[0][0])
        return [0.0 if lo <= 0 <= hi else (lo + hi) / 2 for lo, hi in zip(low, high, strict=True)]

    def await_longer(self, wait: Wait) -> None:
        """Raises Standstill if waiting longer is useless: after `wait_seconds`, if all ranks that it depends on wait
        too, in a circle; after AT_WORK times as long, if the rank it depends on is at work."""
        seconds = time.monotonic() - wait.since
        if seconds < self.wait_seconds:
            return
        waits, way = {**self._waits(), self.rank: wait}, [self.rank]
        while (at := way[-1]) in waits:
            peers = waits[at].peers or [r for r in range(self.size) if r != at]
            # another rank that is at work, if there is one
            peer = next((r for r in peers if r not in waits), self.rank if self.rank in peers else peers[0])
            if peer in way:
                raise Standstill(peer, f"the ranks wait for each other: {'; '.join(waits[r].of(r) for r in way)}")
            way.append(peer)
        if seconds > AT_WORK * self.wait_seconds:
            raise Standstill(at, f"{'; '.join(waits[r].of(r) for r in way[:-1])}, which is at work, for more than "
                                 f"{AT_WORK * self.wait_seconds:g} s (a larger MINIDL_MPI_WAIT_SECONDS waits longer)")

    def close(self) -> None:
        """Frees what the transport holds."""


def in_turn(moves: Sequence[Transfer]) -> Iterator[None]:
    """A transfer that makes these, each when the one before has ended."""
    for move in moves:
        yield from move()


def _at_once(moves: Sequence[Transfer]) -> Iterator[None]:
    """Starts all on both ranks in one order, so that each finds its other end."""
    under_way = [move() for move in moves]
    while under_way := [move for move in under_way if next(move, under_way) is not under_way]:
        yield


__all__ = ["SLOTS", "WAIT_SECONDS", "Communicator", "Host", "OnDevice", "Patience", "RankError", "SilentRank", "Staged",
           "Standstill", "Transfer", "Wait", "in_turn"]
