"""How data pass from computing lanes to communicating lanes and back: directly on the CPU, by events on CUDA.

The host's events (`minidl.devices.lanes`) say that a call has returned. On the CPU the call is then done; on CUDA its
work has only been issued, and another stream can wait for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ...devices.device import CPU
from ...kernels import Thunk
from . import Communicator
from .places import Host, OnDevice, Share, ShareOnDevice, Staged, StagedShare


class Direct:
    """For the CPU: a call that has returned is done."""

    def use(self) -> None:
        """A thread calls this before it works for the device."""

    def begin(self) -> None:
        """A step calls this when all work of earlier ones has been issued."""

    def ready(self, task: int, stream: Any) -> list[Thunk]:
        """The lane's calls after a task (by its key) for which communication waits. `stream`: of the lane, on CUDA."""
        return []

    def moved(self, message: int, link: Communicator, sends: bool) -> list[Thunk]:
        """The calls after a message (by its key) that other communication may wait for."""
        return []

    def place(self, communicator: Communicator, arrays: Sequence[Any], after: Iterable[int], sums: bool = True) -> Host:
        """The memory in which these arrays are summed over the ranks of a communicator, or from or to which they
        travel, once the tasks `after` are ready."""
        return Host(communicator, arrays, sums)

    def share(self, communicator: Communicator, array: Any, share: Any, after: Iterable[int],
              received: Any = None) -> Share:
        """The same of one array, of which each rank has a share; `received`: as in `Share`."""
        return Share(communicator, array, share, received)

    def copied(self, communicator: Communicator, array: Any, share: Any, after: Iterable[int]) -> list[Thunk]:
        """The calls that copy this rank's share of an array that is equal on all ranks."""
        return Share(communicator, array, share).copied()

    def ended(self, place: Host) -> list[Thunk]:
        """The calls at the end of a step after which results of a place can be read."""
        return []


class ByEvents(Direct):
    """For a CUDA device. Gradients go through pinned host memory, unless the transport can read the device."""

    def __init__(self, device: Any) -> None:
        self.device, self.driver = device, device.driver
        self._ready: dict[int, Any] = defaultdict(self.driver.event)
        self._streams = (self.driver.stream(), self.driver.stream())
        self._begun = self.driver.event()
        self.begin = self.driver.record(self._begun, device.main)  # type: ignore[method-assign]

    def use(self) -> None:
        self.driver.use()

    def ready(self, task: int, stream: Any) -> list[Thunk]:
        return [self.driver.record(self._ready[task], stream)]

    def moved(self, message: int, link: Communicator, sends: bool) -> list[Thunk]:
        return self.ready(message, link.stream or self._streams[0 if sends else 1])

    def place(self, communicator: Communicator, arrays: Sequence[Any], after: Iterable[int], sums: bool = True) -> Host:
        return self._made((Staged, OnDevice), communicator, [self._ready[task] for task in after], arrays, sums)

    def share(self, communicator: Communicator, array: Any, share: Any, after: Iterable[int],
              received: Any = None) -> Share:
        return self._made((StagedShare, ShareOnDevice), communicator, self._awaited(after), array, share, received)

    def _made(self, kinds: tuple[Any, Any], communicator: Communicator, events: list[Any], *what: Any) -> Any:
        """A place of the first kind through host memory, or of the second on the device."""
        stream = self._stream(communicator) if communicator.on_device else self._streams
        return kinds[communicator.on_device](communicator, self.device, stream, events, *what)

    def copied(self, communicator: Communicator, array: Any, share: Any, after: Iterable[int]) -> list[Thunk]:
        stream = self._stream(communicator)
        place = ShareOnDevice(communicator, self.device, stream, (), array, share)
        return [*(self.driver.wait(stream, event) for event in self._awaited(after)), *place.copied()]

    def ended(self, place: Host) -> list[Thunk]:
        return place.arrived(self.device.main)

    def _awaited(self, after: Iterable[int]) -> list[Any]:
        """The events for which a transfer of shares waits: the step before may have written them."""
        return [self._begun, *(self._ready[task] for task in after)]

    def _stream(self, communicator: Communicator) -> Any:
        """The stream on which what a communicator has summed comes back."""
        return communicator.stream or self._streams[0 if communicator.on_device else 1]


def handover(device: Any) -> Direct:
    return Direct() if isinstance(device, CPU) else ByEvents(device)
