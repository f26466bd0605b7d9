"""The memory in which ranks sum gradients, called a place. On the CPU it is the gradients' own memory if possible; on
CUDA, copies and events lead there and back.

A place is made once for each transfer and used in every step. Its actions are iterators, as transfers are: each `next`
polls the device, so a lane that waits for one transfer can move the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ...core.columns import offsets
from ...kernels import Thunk

AT_ONCE = 2**17  #: a sum of few bytes takes one exchange, not two: each has a start and polls of its own


class Host:
    """The arrays of one transfer in host memory: contiguous, of one type. `communicator` gives this rank and the number
    of ranks. Scratch memory is allocated now.

    Where ranks sum the arrays, these are copied end to end. `whole`: all elements, of which rank r adds up
    `bounds[r]:bounds[r + 1]`; None: every rank adds up all, since the rows have at most AT_ONCE bytes. Row r of
    `received`: rank r's elements of this rank's share. Without `sums` the arrays only travel, each from its own
    memory: `arrays`.
    """

    def __init__(self, communicator: Any, arrays: Sequence[Any], sums: bool = True) -> None:
        flat = [a.reshape(-1) for a in arrays]
        ends = offsets([a.size for a in flat]).tolist()
        count, ranks = ends[-1], communicator.size
        dtype = flat[0].dtype
        self.bounds: list[int] | None = None
        if ranks * count * dtype.itemsize > AT_ONCE:
            self.bounds = [count * r // ranks for r in range(ranks + 1)]
        self.mine = slice(*self.bounds[communicator.rank :][:2] if self.bounds else (0, count))
        self.arrays = flat
        self.whole = flat[0] if len(flat) == 1 or not sums else self._empty((count,), dtype)
        self.windows = ([(a, self.whole[i:j]) for a, (i, j) in zip(flat, pairwise(ends), strict=True)]
                        if len(flat) > 1 and sums else [])
        self.received = self._empty((ranks if sums else 0, self.mine.stop - self.mine.start), dtype)
        self.total, self.factor = self.whole[self.mine], 1 / ranks

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.empty(shape, dtype)

    def arrived(self, stream: Any) -> list[Thunk]:
        """The calls that a lane makes before it reads the results of `give`. `stream`: the lane's, on CUDA."""
        return []

    def landed(self) -> list[Thunk]:
        """The calls after the transfer, in the order of its lane; then `arrived` waits for it and for all transfers
        before it, which may have ended later."""
        return []

    def take(self) -> Iterator[None]:
        """Copies the gradients to `whole`."""
        for array, window in self.windows:
            np.copyto(window, array)
        yield from ()

    def clear(self) -> Iterator[None]:
        """Waits until what is received may overwrite `arrays`."""
        yield from ()

    def add(self) -> Iterator[None]:
        """Writes the mean of the rows of `received`, added in rank order, to `total`, this rank's share of `whole`."""
        total = self.total
        np.add(self.received[0], self.received[1], out=total)
        for row in self.received[2:]:
            np.add(total, row, out=total)
        np.multiply(total, total.dtype.type(self.factor), out=total)
        yield from ()

    def scale(self) -> Iterator[None]:
        """Divides the sums by the number of ranks, after the transport has added them."""
        np.multiply(self.whole, self.whole.dtype.type(self.factor), out=self.whole)
        yield from ()

    def keep(self) -> Iterator[None]:
        """Leaves this rank's share of the sums where it belongs."""
        yield from ()

    def lay(self) -> Iterator[None]:
        """Lays this rank's share in `whole`."""
        yield from ()

    def sent(self) -> Iterator[None]:
        """The end of a send: on a stream, the event after which `arrays` may be overwritten."""
        yield from ()

    def give(self) -> Iterator[None]:
        """Copies `whole` back to the gradients."""
        for array, window in self.windows:
            np.copyto(array, window)
        yield from ()


class Share(Host):
    """One array, of which each rank has a share in an array of its own, as long on all ranks, so that the last ones may
    end with zeros. `received`: memory for what the other ranks send, as long as all shares, if ranks sum."""

    def __init__(self, communicator: Any, array: Any, share: Any, received: Any = None) -> None:
        ranks, count = communicator.size, share.size
        self.bounds = [min(r * count, array.size) for r in range(ranks + 1)]
        self.mine = slice(*self.bounds[communicator.rank : communicator.rank + 2])
        own = self.mine.stop - self.mine.start
        self.whole, self.windows, self.factor = array, [], 1 / ranks
        self.total, self.end = share[:own], share[own:]
        self.received = [] if received is None else received[: ranks * own].reshape(ranks, own)

    def keep(self) -> Iterator[None]:
        self.end[...] = 0
        yield from ()

    def lay(self) -> Iterator[None]:
        np.copyto(self.whole[self.mine], self.total)
        yield from ()

    def copy(self) -> None:
        """Takes this rank's share of an array that is equal on all ranks."""
        np.copyto(self.total, self.whole[self.mine])
        self.end[...] = 0


class Staged(Host):
    """Gradients of a CUDA device, summed in pinned host memory.

    `streams` (down, up) of `device`: copies to the host and back go through separate streams, so that neither holds up
    the other or the computation. `after`: events for which the copy to the host waits; their work has been issued when
    a transfer is started.
    """

    def __init__(self, communicator: Any, arrays: Sequence[Any], device: Any, streams: tuple[Any, Any],
                 after: Sequence[Any], sums: bool = True) -> None:
        driver, ends = device.driver, offsets([a.size for a in arrays]).tolist()
        dtype = arrays[0].dtype
        pinned = driver.pinned(max(ends[-1] * dtype.itemsize, 1))[: ends[-1] * dtype.itemsize].view(dtype)
        super().__init__(communicator, [pinned], sums)
        pairs = [(a, pinned[i:j]) for a, (i, j) in zip(arrays, pairwise(ends), strict=True)]
        self._stage(driver, streams, pinned, after, pairs, () if sums else after, [(host, a) for a, host in pairs])

    def _stage(self, driver: Any, streams: tuple[Any, Any], pinned: Any, after: Sequence[Any],
               out: Sequence[tuple[Any, Any]], then: Sequence[Any], back: Sequence[tuple[Any, Any]]) -> None:
        """Prepares the copies `out` to pinned memory after some events, and `back` after the events `then`."""
        self._driver, self._down_done, self._up_done = driver, driver.event(), driver.event()
        # keeps pinned memory until it has been copied, also where a step has failed
        weakref.finalize(self, _wait_for, driver, (self._down_done, self._up_done), pinned).atexit = False
        self._down, self._up = (
            [*(driver.wait(stream, event) for event in events),
             *(driver.copy(source, to, stream) for source, to in pairs if to.size), driver.record(done, stream)]
            for stream, events, pairs, done in ((streams[0], after, out, self._down_done),
                                                (streams[1], then, back, self._up_done)))

    def arrived(self, stream: Any) -> list[Thunk]:
        return [self._driver.wait(stream, self._up_done)]

    def landed(self) -> list[Thunk]:
        return self._up[-1:]

    def take(self) -> Iterator[None]:
        for call in self._down:
            call()
        while not self._driver.happened(self._down_done):
            yield

    def clear(self) -> Iterator[None]:
        while not self._driver.happened(self._up_done):
            yield

    def give(self) -> Iterator[None]:
        for call in self._up:
            call()
        yield from ()


class StagedShare(Staged, Share):
    """A share of an array of a CUDA device, which ranks sum or bring together in pinned host memory."""

    def __init__(self, communicator: Any, array: Any, share: Any, received: Any, device: Any,
                 streams: tuple[Any, Any], after: Sequence[Any]) -> None:
        sums, size = received is not None, share.size
        pinned = device.pinned((size + array.size,), str(array.dtype))
        part, whole = pinned[:size], pinned[size:]
        received = np.empty(communicator.size * size, array.dtype) if sums else None
        Share.__init__(self, communicator, whole, part, received)
        out, back = (array, whole), (part, share)
        if not sums:
            out, back = (share[: self.total.size], whole[self.mine]), (whole, array)
        self._stage(device.driver, streams, pinned, after, [out], (), [back])

    def keep(self) -> Iterator[None]:
        yield from Share.keep(self)
        yield from self.give()

    def lay(self) -> Iterator[None]:
        return self.take()


def _wait_for(driver: Any, events: Sequence[Any], memory: Any) -> None:
    for event in events:
        driver.wait_for(event)


class OnDevice(Host):
    """Gradients of a CUDA device, for a transport that reads them there: one whose calls go to a stream, or one that
    needs the computation to have ended. `stream`: for sums and copies. `after`: as in `Staged`. `what`: of `Host`."""

    def __init__(self, communicator: Any, device: Any, stream: Any, after: Sequence[Any], *what: Any) -> None:
        self._driver, self._stream = device.driver, stream
        self._in_order = communicator.stream is not None
        self._memory: list[Any] = []
        super().__init__(communicator, *what)
        driver = device.driver
        self._done, self._given = driver.event(), driver.event()
        copies = [(a, w) for a, w in self.windows if a.size]
        self._take = [*(driver.wait(stream, event) for event in after), *(driver.copy(a, w, stream) for a, w in copies)]
        self._add: list[Thunk] = []
        self._scale: list[Thunk] = []
        if len(self.received):
            total = self.total
            rows = [(self.received[0] if r == 1 else total, self.received[r]) for r in range(1, communicator.size)]
            self._add += [call for pair in rows for call in device.calls("add", pair, [total], stream)]
            self._add += device.calls("scale", [total], [total], stream, factor=self.factor)
            self._scale += device.calls("scale", [self.whole], [self.whole], stream, factor=self.factor)
        self._give = [*(driver.copy(w, a, stream) for a, w in copies), driver.record(self._given, stream)]
        self._record = driver.record(self._done, stream)

    def arrived(self, stream: Any) -> list[Thunk]:
        return [self._driver.wait(stream, self._given)]

    def landed(self) -> list[Thunk]:
        return [] if self._in_order else self._give[-1:]

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        count = int(np.prod(shape))
        self._memory.append(self._driver.allocate(max(count * dtype.itemsize, 1), self._stream))
        flat = self._driver.array(self._memory[-1], (count,), str(dtype), (dtype.itemsize,), 0)
        return flat.reshape(shape)

    def _run(self, calls: Sequence[Thunk]) -> Iterator[None]:
        """Issues calls; for a transport without streams, also waits until they have run."""
        for call in calls:
            call()
        if not self._in_order:
            self._record()
            while not self._driver.happened(self._done):
                yield

    def take(self) -> Iterator[None]:
        return self._run(self._take)

    def clear(self) -> Iterator[None]:
        return self._run(self._take)

    def sent(self) -> Iterator[None]:
        return self.give()

    def add(self) -> Iterator[None]:
        return self._run(self._add)

    def scale(self) -> Iterator[None]:
        return self._run(self._scale)

    def give(self) -> Iterator[None]:
        for call in self._give:
            call()
        yield from ()


class ShareOnDevice(OnDevice, Share):
    """A share of an array of a CUDA device, for a transport that reads them there. `what`: of `Share`."""

    def __init__(self, communicator: Any, device: Any, stream: Any, after: Sequence[Any], *what: Any) -> None:
        super().__init__(communicator, device, stream, after, *what)
        driver, mine = device.driver, self.whole[self.mine]
        self._keep = [*([driver.zeros(self.end, stream)] if self.end.size else []), *self._give]
        self._lay = [*self._take, *([driver.copy(self.total, mine, stream)] if mine.size else [])]

    def keep(self) -> Iterator[None]:
        return self._run(self._keep)

    def lay(self) -> Iterator[None]:
        return self._run(self._lay)
