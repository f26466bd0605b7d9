"""NCCL: ranks with one GPU each sum their gradients there, and send each other messages. Another transport, such as
MPI, starts and watches them.

Sums go through one stream in the order in which they are submitted, which all ranks share; messages through a stream
for each direction between two ranks. So for the host a transfer is over as soon as it is issued. This engine's own
kernels sum in rank order; with `deterministic=False` NCCL sums in an order of its own.
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

from ...kernels import cuda
from . import Communicator, Transfer

TYPES = {"uint8": "NCCL_UINT8", "int32": "NCCL_INT32", "float16": "NCCL_FLOAT16", "bfloat16": "NCCL_BFLOAT16",
         "float32": "NCCL_FLOAT32", "float64": "NCCL_FLOAT64"}


class NCCLError(RuntimeError):
    """NCCL cannot be used. Every rank raises it with the same message."""


def library() -> Any:
    """CuPy's binding; its `available` says whether NCCL itself is installed. Raises ImportError without CuPy."""
    from cupy.cuda import nccl

    return nccl


class NCCL(Communicator):
    """This process's rank of `control`, which sums on `device`. All ranks must make theirs at the same time. Raises
    NCCLError if a rank has no NCCL or two ranks share a GPU."""

    on_device = True

    def __init__(self, control: Communicator, device: Any, *, deterministic: bool = True) -> None:
        super().__init__()
        self._control, self._device = control, device
        self.rank, self.size, self.local_rank = control.rank, control.size, control.local_rank
        self.deterministic, self.own_process = deterministic, control.own_process
        self._share, self.check, self.fail = control._share, control.check, control.fail  # type: ignore[method-assign]
        self.publish, self._waits = control.publish, control._waits  # type: ignore[method-assign]
        self._links: dict[tuple[int, int], _Link] = {}  # by source and target
        self._nccl = nccl = library()
        seats = control.gather((socket.gethostname(), device.driver.address(), bool(nccl.available)))
        for rank, (host, gpu, available) in enumerate(seats):
            if not available:
                raise NCCLError(f"rank {rank} has no NCCL; install nvidia-nccl-cu13 (or -cu12) there, "
                                f"or use --transport staged")
            first = next(r for r, seat in enumerate(seats) if seat[:2] == (host, gpu))
            if first < rank:
                raise NCCLError(f"ranks {first} and {rank} share GPU {gpu} of {host}, which NCCL refuses; start one "
                                f"rank a GPU, or use --transport staged")
        name = self._name(0)
        device.driver.use()
        self._ranks = nccl.NcclCommunicator(self.size, name, self.rank)
        # a higher priority than the main stream: a transfer needs a few blocks on every rank at the same time, so one
        # that starts late holds up all ranks, and one that starts at once takes little from the chain
        self.stream = device.driver.stream(-1)

    def _split(self, ranks: tuple[int, ...]) -> NCCL:
        return NCCL(self._control.group(ranks), self._device, deterministic=self.deterministic)

    def _name(self, source: int) -> bytes:
        """The id by which ranks find each other, made by the rank `source`. Raises NCCLError on all if it cannot."""
        made: bytes | str | None = None
        if self.rank == source:
            try:
                made = bytes(self._nccl.get_unique_id())
            except Exception as error:  # CuPy raises types of its own
                made = str(error)
        name = self._control.gather(made)[source]
        if not isinstance(name, bytes):
            raise NCCLError(f"rank {source} cannot start NCCL: {name}")
        return name

    def _exchange(self, out: Any, into: Any, bounds: Sequence[int] | None, slot: int) -> Iterator[None]:
        self._swap([out[i:j] for i, j in pairwise(bounds)] if bounds else [out] * self.size, list(into))
        yield from ()

    def _collect(self, array: Any, bounds: Sequence[int], slot: int) -> Iterator[None]:
        shares = [array[i:j] for i, j in pairwise(bounds)]
        mine, shares[self.rank] = shares[self.rank], array[:0]
        self._swap([mine[:0] if r == self.rank else mine for r in range(self.size)], shares)
        yield from ()

    def _swap(self, sent: Sequence[Any], received: Sequence[Any]) -> None:
        """Sends `sent[r]` to each rank r, and receives its array in `received[r]`."""
        self._nccl.groupStart()
        for r, (out, into) in enumerate(zip(sent, received, strict=True)):
            if out.size:
                self._ranks.send(cuda.pointer(out), out.size, _type(self._nccl, out), r, self.stream.ptr)
            if into.size:
                self._ranks.recv(cuda.pointer(into), into.size, _type(self._nccl, into), r, self.stream.ptr)
        self._nccl.groupEnd()

    def _sum(self, array: Any, slot: int) -> Iterator[None]:
        at = cuda.pointer(array)
        self._ranks.allReduce(at, at, array.size, _type(self._nccl, array), self._nccl.NCCL_SUM, self.stream.ptr)
        yield from ()

    @property
    def host(self) -> Communicator:
        return self._control

    def duplicate(self, links: Collection[tuple[int, bool]]) -> NCCL:
        """As in Communicator, but sums of all programs go through the one stream, so programs that sum take turns."""
        made = copy.copy(self)
        made._links = {}
        every = self._control.gather(sorted(links))
        wanted = {(r, peer) if sends else (peer, r) for r, own in enumerate(every) for peer, sends in own}
        for source, target in sorted(wanted):  # in one order on all ranks, as they meet in each
            name = self._name(source)
            if self.rank in (source, target):
                made._links[source, target] = _Link(self._nccl, name, int(self.rank == target), self._device)
        return made

    def free(self) -> None:
        for link in self._links.values():
            link.close()

    def link(self, peer: int, sends: bool) -> Communicator:
        return self._links[(self.rank, peer) if sends else (peer, self.rank)]

    def close(self) -> None:
        self._ranks.destroy()


class _Link(Communicator):
    """Messages from rank 0 to rank 1 of two. Each direction has a communicator and a stream of its own, since NCCL's
    sends and receives wait for each other in the order of their stream."""

    on_device = True

    def __init__(self, nccl: Any, name: bytes, rank: int, device: Any) -> None:
        super().__init__()
        device.driver.use()
        self.rank, self.size, self._nccl = rank, 2, nccl
        self._ranks, self.stream = nccl.NcclCommunicator(2, name, rank), device.driver.stream(-1)

    def _send(self, array: Any, peer: int, number: int) -> Transfer:
        return self._moved(self._ranks.send, array, 1)

    def _receive(self, array: Any, peer: int, number: int) -> Transfer:
        return self._moved(self._ranks.recv, array, 0)

    def _moved(self, call: Callable[..., None], array: Any, peer: int) -> Transfer:
        def run() -> Iterator[None]:
            self._nccl.groupStart()
            call(cuda.pointer(array), array.size, _type(self._nccl, array), peer, self.stream.ptr)
            self._nccl.groupEnd()
            yield from ()

        return run

    def close(self) -> None:
        self._ranks.destroy()


def _type(nccl: Any, array: Any) -> int:
    return int(getattr(nccl, TYPES[str(array.dtype)]))
