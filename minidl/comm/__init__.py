"""Ranks that sum their gradients: what all transports share. Knows no graph, no schedule and no MPI.

A sum over ranks is taken in the order of the ranks, element by element: each rank adds up its own share of the
elements, then hands the result to all. So the bits depend neither on the transport, nor on how tensors are cut, nor on
which transfer ends first; and the volume is that of a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..graph import Kind

SLOTS = 4  #: transfers that can be in flight at the same time; a transport keeps them apart

Transfer = Callable[[], Iterator[None]]  #: starts a transfer; each `next` looks whether it goes on, the end is its end


class RankError(RuntimeError):
    """Another rank failed; `rank` is its number. The message has its error."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank} failed: {message}")
        self.rank = rank


class Communicator:
    """One rank among `size`. Transports give `_exchange`, `_collect`, `_share`, `check` and `fail`.

    `deterministic=False` lets the transport sum as it likes, which may differ in the last bits.
    """

    rank: int
    size: int
    deterministic = True
    own_process = True  #: whether no other rank shares this process

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

    def check(self) -> None:
        """Raises RankError if another rank has said that it failed."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Tells the others that this rank failed. Does nothing for a failure that came from another rank."""
        raise NotImplementedError

    # ----------------------------------------------------------------------------------------------------- what is used
    def prepare(self, kind: Kind, arrays: Sequence[Any], slot: int) -> Transfer:
        """The mean over ranks of `arrays`, in place, each contiguous and of the same type; scratch is allocated now.

        A: all of it. AS: of this rank's share of the elements; AG: hands the shares to all, so that AS and AG are A.
        """
        count = sum(a.size for a in arrays)
        bounds = [count * r // self.size for r in range(self.size + 1)]
        mine = slice(bounds[self.rank], bounds[self.rank + 1])
        single = len(arrays) == 1
        whole = arrays[0].reshape(-1) if single else np.empty(count, arrays[0].dtype)
        ends = np.cumsum([0, *(a.size for a in arrays)]).tolist()
        windows = [] if single else [(a.reshape(-1), whole[i:j]) for a, i, j in zip(arrays, ends[:-1], ends[1:], strict=True)]
        received = np.empty((self.size, mine.stop - mine.start), whole.dtype)
        scale = whole.dtype.type(1 / self.size)

        def add() -> None:
            total = whole[mine]
            np.add(received[0], received[1], out=total)
            for row in received[2:]:
                np.add(total, row, out=total)
            np.multiply(total, scale, out=total)

        def run() -> Iterator[None]:
            if self.size == 1:
                return
            for array, window in windows:
                np.copyto(window, array)
            if kind == Kind.A and not self.deterministic:
                yield from self._sum(whole, slot)
                np.multiply(whole, scale, out=whole)
            else:
                if kind != Kind.AG:
                    yield from self._exchange(whole, received, bounds, slot)
                    add()
                if kind != Kind.AS:
                    yield from self._collect(whole, bounds, slot)
            for array, window in windows:
                np.copyto(array, window)

        return run

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order; also a barrier. Raises RankError while it waits."""
        from .lane import Patience

        patience = Patience(self)
        for values in self._share(value):
            if values is not None:
                return values
            patience.wait()
        raise AssertionError("a transport's _share ends with the values")

    def close(self) -> None:
        """Ends what the transport holds."""


__all__ = ["SLOTS", "Communicator", "RankError", "Transfer"]
