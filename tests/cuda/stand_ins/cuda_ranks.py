"""GPUs of several ranks that are not there, and NCCL between them: what a rank sends is left for others to wait for."""

from __future__ import annotations

import ctypes
import threading
from typing import Any
from weakref import WeakValueDictionary

import cuda_machine
import cuda_runtime
import numpy as np
from cuda_signatures import check

from minidl.devices.cuda.device import Cuda
from minidl.runtime.comm.loopback import LoopBack
from minidl.runtime.comm.nccl import NCCL


class Machine(cuda_machine.Machine):
    """One rank's GPU, which may wait for what another rank's does."""

    def check_stuck(self) -> None:
        assert any(isinstance(q.ops[0][1][0], Elsewhere)
                   for q in self.queues.values() if q.ops and q.ops[0][0] == "wait")


class Runtime(cuda_runtime.Runtime):
    machines: WeakValueDictionary[int, Machine] = WeakValueDictionary()  #: by a stream's pointer, of all GPUs

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Machine)

    def address(self) -> str:
        return f"GPU {id(self)}"

    def stream(self, priority: int = 0) -> Any:
        made = super().stream(priority)
        self.machines[made.ptr] = self.machine
        return made


class Elsewhere:
    """What another rank leaves, as an event to wait for."""

    def __init__(self, left: dict[Any, Any], key: Any) -> None:
        self.left, self.key = left, key

    @property
    def reached(self) -> int:
        return int(self.key in self.left)


class Nccl:
    """NCCL between the ranks of this process: each call goes to its stream, a group as one."""

    available = True
    NCCL_UINT8, NCCL_INT32, NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_SUM = 1, 2, 6, 7, 8, 0

    def __init__(self) -> None:
        self.left: dict[Any, Any] = {}
        self.group = threading.local()
        self.names: list[bytes] = []

    def get_unique_id(self) -> bytes:
        self.names.append(f"communicator {len(self.names)}".encode())
        return self.names[-1]

    def NcclCommunicator(self, size: int, name: bytes, rank: int) -> Any:
        check("NcclCommunicator", TOLD["NcclCommunicator"], (size, name, rank), {})
        assert name in self.names
        return NcclRanks(self, size, name, rank)

    def groupStart(self) -> None:
        self.group.sends, self.group.fetches = [], []

    def groupEnd(self) -> None:
        sends, fetches = self.group.sends, self.group.fetches
        ranks, stream = (sends or fetches)[0][2:]
        ranks.issue(stream, [(array, (ranks.name, ranks.calls, ranks.rank, peer)) for array, peer, *_ in sends],
                    [(array, [(ranks.name, ranks.calls, peer, ranks.rank)]) for array, peer, *_ in fetches])


#: the parameters of NcclCommunicator's methods, which can be looked up only where NCCL is
TOLD = {"NcclCommunicator": "NcclCommunicator(int ndev, bytes commId, int rank, NcclConfig config=None)",
        "send": "NcclCommunicator.send(self, intptr_t sendbuf, size_t count, int datatype, int peer, intptr_t stream)",
        "recv": "NcclCommunicator.recv(self, intptr_t recvbuf, size_t count, int datatype, int peer, intptr_t stream)",
        "allReduce": "NcclCommunicator.allReduce(self, intptr_t sendbuf, intptr_t recvbuf, size_t count, int "
                     "datatype, int op, intptr_t stream)"}


class NcclRanks:
    def __init__(self, nccl: Nccl, size: int, name: bytes, rank: int) -> None:
        self.nccl, self.size, self.name, self.rank, self.calls = nccl, size, name, rank, 0

    def send(self, at: int, count: int, kind: int, peer: int, stream: int) -> None:
        check("send", TOLD["send"], (at, count, kind, peer, stream), {})
        self.nccl.group.sends.append((_memory(at, count, kind), peer, self, stream))

    def recv(self, at: int, count: int, kind: int, peer: int, stream: int) -> None:
        check("recv", TOLD["recv"], (at, count, kind, peer, stream), {})
        self.nccl.group.fetches.append((_memory(at, count, kind), peer, self, stream))

    def allReduce(self, at: int, out: int, count: int, kind: int, op: int, stream: int) -> None:
        check("allReduce", TOLD["allReduce"], (at, out, count, kind, op, stream), {})
        assert at == out
        array = _memory(at, count, kind)
        peers = range(self.size)
        self.issue(stream, [(array, (self.name, self.calls, self.rank, r)) for r in peers],
                   [(array, [(self.name, self.calls, r, self.rank) for r in peers])])

    def issue(self, stream: int, posts: list[Any], fetches: list[Any]) -> None:
        """`posts`: arrays and the keys they are left under; `fetches`: arrays and the keys whose sum they get."""
        left, self.calls = self.nccl.left, self.calls + 1
        machine = Runtime.machines[stream]
        machine.not_in_capture("ranks sum")
        touched = [(array.ctypes.data, array.nbytes) for array, _ in (*posts, *fetches)]
        machine.issue(stream, lambda: left.update({key: array.copy() for array, key in posts}), touched)
        with machine.lock:
            machine.queues[stream].ops += [("wait", (Elsewhere(left, key), 1)) for _, keys in fetches for key in keys]

        def fetch() -> None:
            for array, keys in fetches:
                array[...] = sum(left.pop(key) for key in keys)

        machine.issue(stream, fetch, touched)

    def destroy(self) -> None:
        pass


def _memory(at: int, count: int, kind: int) -> Any:
    dtype = np.dtype({1: "uint8", 2: "int32", 6: "float16", 7: "float32", 8: "float64"}[kind])
    return np.ctypeslib.as_array((ctypes.c_ubyte * (count * dtype.itemsize)).from_address(at)).view(dtype)


def made(seed: int, name: str = "cuda:0") -> Cuda:
    runtime = Runtime(seed)
    return Cuda(runtime, lambda: cuda_runtime.make_products(runtime), lambda: cuda_runtime.make_dnn(runtime), name)


# ---------------------------------------------------------------------------------------------------------- transports
def staged(communicator: Any, device: Any) -> Any:
    return communicator


class Aware(LoopBack):
    """A transport that reads and writes the memory of GPUs at once, as an MPI for CUDA does."""

    on_device = True


def aware(communicator: Any, device: Any) -> Any:
    return Aware(communicator.rank, communicator._members, communicator._board)


def ring(communicator: Any, device: Any) -> Any:
    return NCCL(communicator, device)


def free_ring(communicator: Any, device: Any) -> Any:
    return NCCL(communicator, device, deterministic=False)
