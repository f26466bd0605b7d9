"""How gradients pass from the compute lane to the communication lane and back: at once on the CPU, by events on CUDA.

The host's own events (`minidl.streams`) say that a call has been made. On the CPU that is all there is to know; on CUDA
it says that what it issued can now be waited for, by another stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

from ..device import CPU
from ..kernels import Thunk
from . import Communicator
from .places import Host, OnDevice, Staged


class Direct:
    """The CPU's: a call that has returned is done."""

    captures = False

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def use(self) -> None:
        """What a thread calls before it works for the device."""

    def ready(self, task: int) -> list[Thunk]:
        """What the compute lane calls after a task that communication waits for."""
        return []

    def place(self, arrays: Sequence[Any], after: Iterable[int]) -> Host:
        """Where these gradients are summed, when the tasks `after` are ready."""
        return Host(self.communicator, arrays)

    def stamps(self, task: int, captured: bool) -> tuple[list[Thunk], list[Thunk]] | None:
        """What tells when a compute task starts and ends, where the host's clock at its calls does not."""
        return None

    def read_stamps(self) -> dict[int, tuple[float, float]]:
        """When tasks with stamps started and ended last, in seconds of the host's clock."""
        return {}


class Streams(Direct):
    """A CUDA device's. The transport takes gradients in pinned host memory, unless it is one for the device."""

    def __init__(self, communicator: Communicator, device: Any) -> None:
        super().__init__(communicator)
        self.device, self.driver = device, device.driver
        self.captures = device.captures
        self._ready: dict[int, Any] = defaultdict(self.driver.event)
        self._stamps: dict[int, tuple[Any, Any]] = defaultdict(lambda: (self.driver.event(True), self.driver.event(True)))
        self._streams = (self.driver.stream(), self.driver.stream())

    def use(self) -> None:
        self.driver.use()

    def ready(self, task: int) -> list[Thunk]:
        return [self.driver.record(self._ready[task], self.device.main)]

    def place(self, arrays: Sequence[Any], after: Iterable[int]) -> Host:
        events = [self._ready[task] for task in after]
        if self.communicator.on_device:
            return OnDevice(self.communicator, arrays, self.device, self.communicator.stream or self._streams[0], events)
        return Staged(self.communicator, arrays, self.device, self._streams, events)

    def stamps(self, task: int, captured: bool) -> tuple[list[Thunk], list[Thunk]] | None:
        record = self.driver.record_in_graph if captured else self.driver.record
        begin, end = ([record(event, self.device.main)] for event in self._stamps[task])
        return begin, end

    def read_stamps(self) -> dict[int, tuple[float, float]]:
        now = self.driver.event(True)
        self.driver.record(now, self.device.main)()
        self.driver.synchronize(self.device.main)
        host = perf_counter()
        return {task: (host - self.driver.elapsed(begin, now) / 1e6, host - self.driver.elapsed(end, now) / 1e6)
                for task, (begin, end) in self._stamps.items()}


def handover(device: Any, communicator: Communicator) -> Direct:
    return Direct(communicator) if isinstance(device, CPU) else Streams(communicator, device)
