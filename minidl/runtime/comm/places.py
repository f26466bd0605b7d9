"""The memory in which ranks sum gradients, called a place. On the CPU it is the gradients' own memory if possible; on
CUDA, copies and events lead there and back.

A place is made once for each transfer and used in every step. It has a few named actions, all prepared: calls, and for
some a function that says whether they have run, so that a lane that waits for one transfer can move the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
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

    `actions`, of which a place may lack some: `take` copies the arrays to `whole`, `give` back. `add` writes the mean
    of the rows of `received`, added in rank order, to `total`, this rank's share of `whole`; `scale` divides all of
    `whole` by the number of ranks. `keep` leaves this rank's share of the sums where it belongs, `lay` brings it to
    `whole`. `clear` waits until what is received may overwrite `arrays`, `sent` ends a send.
    """

    _driver: Any = None
    _given: Any = None  #: the event after which results can be read

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
        self.received = self._empty((ranks if sums else 0, self.mine.stop - self.mine.start), dtype)
        self.total = self.whole[self.mine]
        windows = [self.whole[i:j] for i, j in pairwise(ends)] if len(flat) > 1 and sums else []
        pairs = [*zip(flat, windows, strict=False)]
        self._act(take=[call for a, window in pairs for call in self._copy(a, window)],
                  give=[call for a, window in pairs for call in self._copy(window, a)],
                  add=self._mean(ranks), scale=self._scaled(self.whole, ranks) if sums else [])

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.empty(shape, dtype)

    def _copy(self, source: Any, out: Any) -> list[Thunk]:
        return [partial(np.copyto, out, source)] if source.size else []

    def _zeros(self, array: Any) -> list[Thunk]:
        return [partial(array.fill, 0)] if array.size else []

    def _added(self, one: Any, other: Any, out: Any) -> list[Thunk]:
        return [partial(np.add, one, other, out=out)]

    def _scaled(self, array: Any, ranks: int) -> list[Thunk]:
        return [partial(np.multiply, array, array.dtype.type(1 / ranks), out=array)]

    def _mean(self, ranks: int) -> list[Thunk]:
        """The calls of `add`."""
        if len(self.received) < 2:
            return []
        sums = [self.received[0], *[self.total] * (ranks - 2)]
        return [*(call for before, row in zip(sums, self.received[1:], strict=True)
                  for call in self._added(before, row, self.total)), *self._scaled(self.total, ranks)]

    def _act(self, **actions: list[Thunk]) -> None:
        self.actions: dict[str, tuple[list[Thunk], Callable[[], bool] | None]] = {
            name: (calls, None) for name, calls in actions.items()}

    def action(self, name: str) -> list[Callable[[], Iterator[None]]]:
        """An action as a part of a transfer, which each `next` polls; none if there is nothing to do."""
        calls, over = self.actions.get(name, ((), None))
        return [partial(self._run, calls, over)] if calls or over else []

    def _run(self, calls: Sequence[Thunk], over: Callable[[], bool] | None) -> Iterator[None]:
        for call in calls:
            call()
        while over is not None and not over():
            yield

    def arrived(self, stream: Any) -> list[Thunk]:
        """The calls that a lane makes before it reads the results of `give`. `stream`: the lane's, on CUDA."""
        return [self._driver.wait(stream, self._given)] if self._given else []

    def landed(self) -> list[Thunk]:
        """The calls after the transfer, in the order of its lane; then `arrived` waits for it and for all transfers
        before it, which may have ended later."""
        return self.actions["give"][0][-1:] if self._given else []


class Share(Host):
    """One array, of which each rank has a share in an array of its own, as long on all ranks, so that the last ones may
    end with zeros. `received`: memory for what the other ranks send, as long as all shares, if ranks sum."""

    def __init__(self, communicator: Any, array: Any, share: Any, received: Any = None) -> None:
        ranks, count = communicator.size, share.size
        self.bounds = [min(r * count, array.size) for r in range(ranks + 1)]
        self.mine = slice(*self.bounds[communicator.rank : communicator.rank + 2])
        own = self.mine.stop - self.mine.start
        self.whole, self.total, self.end = array, share[:own], share[own:]
        self.received = [] if received is None else received[: ranks * own].reshape(ranks, own)
        self._act(take=[], give=[], add=self._mean(ranks), keep=self._zeros(self.end),
                  lay=self._copy(self.total, self.whole[self.mine]))

    def copied(self) -> list[Thunk]:
        """The calls that take this rank's share of an array that is equal on all ranks."""
        return [*self._copy(self.whole[self.mine], self.total), *self._zeros(self.end)]


class Staged(Host):
    """Gradients of a CUDA device, summed in pinned host memory.

    `streams` (down, up) of `device`: copies to the host and back go through separate streams, so that neither holds up
    the other or the computation. `after`: events for which the copy to the host waits; their work has been issued when
    a transfer is started.
    """

    def __init__(self, communicator: Any, device: Any, streams: tuple[Any, Any], after: Sequence[Any],
                 arrays: Sequence[Any], sums: bool = True) -> None:
        driver, ends = device.driver, offsets([a.size for a in arrays]).tolist()
        dtype = arrays[0].dtype
        pinned = driver.pinned(max(ends[-1] * dtype.itemsize, 1))[: ends[-1] * dtype.itemsize].view(dtype)
        super().__init__(communicator, [pinned], sums)
        pairs = [(a, pinned[i:j]) for a, (i, j) in zip(arrays, pairwise(ends), strict=True)]
        self._stage(driver, streams, pinned, after, pairs, () if sums else after, [(host, a) for a, host in pairs])

    def _stage(self, driver: Any, streams: tuple[Any, Any], pinned: Any, after: Sequence[Any],
               out: Sequence[tuple[Any, Any]], then: Sequence[Any], back: Sequence[tuple[Any, Any]]) -> None:
        """Prepares the copies `out` to pinned memory after some events, and `back` after the events `then`."""
        self._driver, down_done, self._given = driver, driver.event(), driver.event()
        driver.keep(self, (down_done, self._given), pinned)  # also where a step has failed
        down, up = (
            [*(driver.wait(stream, event) for event in events),
             *(driver.copy(source, to, stream) for source, to in pairs if to.size), driver.record(done, stream)]
            for stream, events, pairs, done in ((streams[0], after, out, down_done),
                                                (streams[1], then, back, self._given)))
        self.actions |= {"take": (down, partial(driver.happened, down_done)), "give": (up, None),
                         "clear": ([], partial(driver.happened, self._given))}


class StagedShare(Staged, Share):
    """A share of an array of a CUDA device, which ranks sum or bring together in pinned host memory."""

    def __init__(self, communicator: Any, device: Any, streams: tuple[Any, Any], after: Sequence[Any], array: Any,
                 share: Any, received: Any) -> None:
        sums, size = received is not None, share.size
        pinned = device.pinned((size + array.size,), str(array.dtype))
        part, whole = pinned[:size], pinned[size:]
        received = np.empty(communicator.size * size, array.dtype) if sums else None
        Share.__init__(self, communicator, whole, part, received)
        out, back = (array, whole), (part, share)
        if not sums:
            out, back = (share[: self.total.size], whole[self.mine]), (whole, array)
        self._stage(device.driver, streams, pinned, after, [out], (), [back])
        self.actions |= {"keep": ([*self.actions["keep"][0], *self.actions["give"][0]], None),
                         "lay": self.actions["take"]}


class OnDevice(Host):
    """Gradients of a CUDA device, for a transport that reads them there: one whose calls go to a stream, or one that
    needs the computation to have ended. `stream`: for sums and copies. `after`: as in `Staged`. `what`: of `Host`."""

    def __init__(self, communicator: Any, device: Any, stream: Any, after: Sequence[Any], *what: Any) -> None:
        self._device, self._driver, self._stream, self._memory = device, device.driver, stream, list[Any]()
        driver = device.driver
        super().__init__(communicator, *what)
        self._in_order = communicator.stream is not None
        done, self._given = driver.event(), driver.event()
        waits = [driver.wait(stream, event) for event in after]
        own = {name: calls for name, (calls, _) in self.actions.items()}
        give = [*own["give"], driver.record(self._given, stream)]
        found = {**own, "take": [*waits, *own["take"]], "clear": waits}
        if "keep" in own:
            found |= {"keep": [*own["keep"], *give], "lay": [*waits, *own["lay"]]}
        # for a transport without streams, an action is over when its calls have run
        over = None if self._in_order else partial(driver.happened, done)
        last = [] if self._in_order else [driver.record(done, stream)]
        self.actions = {name: ([*calls, *last], over) for name, calls in found.items()}
        self.actions |= {"give": (give, None), "sent": (give, None)}

    def landed(self) -> list[Thunk]:
        return [] if self._in_order else super().landed()

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        count = int(np.prod(shape))
        self._memory.append(self._driver.allocate(max(count * dtype.itemsize, 1), self._stream))
        return self._driver.array(self._memory[-1], (count,), str(dtype), (dtype.itemsize,), 0).reshape(shape)

    def _copy(self, source: Any, out: Any) -> list[Thunk]:
        return [self._driver.copy(source, out, self._stream)] if source.size else []

    def _zeros(self, array: Any) -> list[Thunk]:
        return [self._driver.zeros(array, self._stream)] if array.size else []

    def _added(self, one: Any, other: Any, out: Any) -> list[Thunk]:
        return list(self._device.calls("add", (one, other), [out], self._stream))

    def _scaled(self, array: Any, ranks: int) -> list[Thunk]:
        return list(self._device.calls("scale", [array], [array], self._stream, factor=1 / ranks))


class ShareOnDevice(OnDevice, Share):
    """A share of an array of a CUDA device, for a transport that reads them there. `what`: of `Share`."""
