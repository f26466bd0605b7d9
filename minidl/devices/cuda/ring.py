"""The batches and results of several steps that one launch runs, on a GPU, as `minidl.devices.ring.Ring` on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from ...core.graph import View
from ...core.tasks import strided, strides_of
from ...kernels import Thunk
from ...kernels.ring import give, take

START = 256  #: bytes; every array begins at a multiple


class Ring:
    """Each launch's batches go to the device in one copy from one of two pinned buffers, in turns, and its outputs come
    back in one copy. The first bytes of the former count steps; of the latter, those that have run."""

    def __init__(self, device: Any, inputs: Sequence[Any], outputs: Sequence[Any], count: int) -> None:
        self.device, self.driver, self.count = device, device.driver, count
        up, self._up, self._ins = _places(device, inputs, count)
        down, self._down, self._outs = _places(device, outputs, count)
        self._kept = up, down
        self._slots = [(self.driver.pinned(self._up.nbytes), self.driver.event()) for _ in range(2)]
        for _, sent in self._slots:
            self.driver.record(sent, device.main)()
        self._results: list[tuple[Any, Any]] = []  #: pinned memory and events that are free
        self.turn = 0
        self.head, *ins = (device.array(up, view) for view in self._ins)
        self.done, *outs = (device.array(down, view) for view in self._outs)
        self.takes, self.gives = ([(row, array) for row, array in zip(rows, arrays, strict=True) if array.size]
                                  for rows, arrays in ((ins, inputs), (outs, outputs)))
        self.driver.keep(self, [sent for _, sent in self._slots], self._slots)

    def put(self, step: int, values: Sequence[Any]) -> None:
        """As on the CPU. The first batch of a launch waits until the launch before the last one has begun."""
        if step == 0:
            self.turn = 1 - self.turn
            self.driver.wait_for(self._slots[self.turn][1])
        for view, value in zip(self._ins[1:], values, strict=True):
            strided(self._slots[self.turn][0], view)[step] = value

    def take(self) -> list[Thunk]:
        """The calls before a step."""
        return self.device.thunks(take(self.head, self.takes))

    def give(self, handle: int = 0) -> list[Thunk]:
        """The calls after a step; `handle`: of the condition of a loop."""
        return self.device.thunks(give(self.head, self.gives, self.done, handle))

    def send(self, steps: int) -> None:
        """Starts the copy of a launch's batches to the device."""
        pinned, sent = self._slots[self.turn]
        strided(pinned, self._ins[0])[:] = 0, steps
        self.driver.copy(pinned, self._up, self.device.main)()
        self.driver.record(sent, self.device.main)()

    def results(self, steps: int) -> Callable[[], list[tuple[Any, ...]]]:
        """As on the CPU; the copy is only started. The function waits for it."""
        found, views = self.device.fetch(self._down, self._down.nbytes, self._results), self._outs

        def values() -> list[tuple[Any, ...]]:
            (ran, _), *outs = (strided(found(), view) for view in views)
            return [tuple(own[i].copy() for own in outs) for i in range(ran)]

        return values


def _places(device: Any, arrays: Sequence[Any], count: int) -> tuple[Any, Any, list[View]]:
    """Memory for two numbers and `count` rows of each array, its bytes as one array, and the place of each in it."""
    found, end = [View(0, (2,), (1,), 0, "int32")], START
    for array in arrays:
        shape = (count, *array.shape)
        found.append(View(0, shape, strides_of(shape), end // array.itemsize, str(array.dtype)))
        end += -(-prod(shape) * array.itemsize // START) * START
    memory = device.allocate(end)
    return memory, device.array(memory, View(0, (end,), (1,), 0, "uint8")), found
