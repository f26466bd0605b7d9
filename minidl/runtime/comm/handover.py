"""How data pass from computing lanes to communicating lanes and back: directly on the CPU, by events on CUDA.

The host's events (`minidl.runtime.streams`) say that a call has returned. On the CPU the call is then done; on CUDA its
work has only been issued, and another stream can wait for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ...devices.device import CPU
from ...kernels import Thunk
from . import Communicator
from .places import Host, OnDevice, Staged


class Direct:
    """For the CPU: a call that has returned is done."""

    def use(self) -> None:
        """A thread calls this before it works for the device."""

    def ready(self, task: int, stream: Any) -> list[Thunk]:
        """The calls that a lane makes after a task (by its key) for which communication waits. `stream`: the lane's, on
        CUDA."""
        return []

    def moved(self, message: int, link: Communicator, sends: bool) -> list[Thunk]:
        """The calls after a message (by its key) that other communication may wait for."""
        return []

    def place(self, communicator: Communicator, arrays: Sequence[Any], after: Iterable[int], sums: bool = True) -> Host:
        """The memory in which these arrays are summed over the ranks of a communicator, or from or to which they
        travel, once the tasks `after` are ready."""
        return Host(communicator, arrays, sums)


class ByEvents(Direct):
    """For a CUDA device. Gradients go through pinned host memory, unless the transport can read the device."""

    def __init__(self, device: Any) -> None:
        self.device, self.driver = device, device.driver
        self._ready: dict[int, Any] = defaultdict(self.driver.event)
        self._streams = (self.driver.stream(), self.driver.stream())

    def use(self) -> None:
        self.driver.use()

    def ready(self, task: int, stream: Any) -> list[Thunk]:
        return [self.driver.record(self._ready[task], stream)]

    def moved(self, message: int, link: Communicator, sends: bool) -> list[Thunk]:
        return self.ready(message, link.stream or self._streams[0 if sends else 1])

    def place(self, communicator: Communicator, arrays: Sequence[Any], after: Iterable[int], sums: bool = True) -> Host:
        events = [self._ready[task] for task in after]
        if communicator.on_device:
            return OnDevice(communicator, arrays, self.device, communicator.stream or self._streams[0], events, sums)
        return Staged(communicator, arrays, self.device, self._streams, events, sums)


def handover(device: Any) -> Direct:
    return Direct() if isinstance(device, CPU) else ByEvents(device)
