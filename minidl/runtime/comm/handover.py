"""How data pass from the lanes that compute to those that communicate and back: at once on the CPU, by events on CUDA.

The host's own events (`minidl.runtime.streams`) say that a call has been made. On the CPU that is all there is to know;
on CUDA it says that what it issued can now be waited for, by another stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ...kernels import Thunk
from ..device import CPU
from . import Communicator
from .places import Host, OnDevice, Staged


class Direct:
    """The CPU's: a call that has returned is done."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def use(self) -> None:
        """What a thread calls before it works for the device."""

    def ready(self, task: int, stream: Any) -> list[Thunk]:
        """What a lane calls after a task (by its key) that communication waits for; `stream`: the lane's, on CUDA."""
        return []

    def place(self, arrays: Sequence[Any], after: Iterable[int], sums: bool = True) -> Host:
        """Where these arrays are summed, or from and to where they travel, when the tasks `after` are ready."""
        return Host(self.communicator, arrays, sums)


class Streams(Direct):
    """A CUDA device's. The transport takes gradients in pinned host memory, unless it is one for the device."""

    def __init__(self, communicator: Communicator, device: Any) -> None:
        super().__init__(communicator)
        self.device, self.driver = device, device.driver
        self._ready: dict[int, Any] = defaultdict(self.driver.event)
        self._streams = (self.driver.stream(), self.driver.stream())

    def use(self) -> None:
        self.driver.use()

    def ready(self, task: int, stream: Any) -> list[Thunk]:
        return [self.driver.record(self._ready[task], stream)]

    def place(self, arrays: Sequence[Any], after: Iterable[int], sums: bool = True) -> Host:
        events = [self._ready[task] for task in after]
        if self.communicator.on_device:
            return OnDevice(self.communicator, arrays, self.device,
                            self.communicator.stream or self._streams[0], events, sums)
        return Staged(self.communicator, arrays, self.device, self._streams, events, sums)


def handover(device: Any, communicator: Communicator) -> Direct:
    return Direct(communicator) if isinstance(device, CPU) else Streams(communicator, device)
