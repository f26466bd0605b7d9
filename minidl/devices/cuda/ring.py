"""The batches and results of several steps that one launch runs, on a GPU, as `minidl.devices.ring.Ring` on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np

from ...core.graph import View
from ...core.tasks import strides_of
from ...kernels import Thunk
from ...kernels.ring import give, take

START = 256  #: bytes; every array begins at a multiple


class Ring:
    """Each launch's batches go to the device in one copy from one of two pinned buffers, in turns, and its outputs come
    back in one copy. The first bytes of the former count steps; of the latter, those that have run."""

    def __init__(self, device: Any, inputs: Sequence[Any], outputs: Sequence[Any], count: int) -> None:
        self.device, self.driver, self.count = device, device.driver, count
        self._ins, self._outs = _places(inputs, count), _places(outputs, count)
        self._up, self._down = (device.allocate(places[-1][1]) for places in (self._ins, self._outs))
        self._slots = [(self.driver.pinned(self._ins[-1][1]), self.driver.event()) for _ in range(2)]
        for _, sent in self._slots:
            self.driver.record(sent, device.main)()
        self._results: list[tuple[Any, Any]] = []  #: pinned memory and events that are free
        self.turn = 0
        self.head = self._array(self._up, self._ins[0])
        self.done = self._array(self._down, self._outs[0])
        self.takes, self.gives = ([(self._array(memory, place), array) for place, array in
                                   zip(places[1:-1], arrays, strict=True) if array.size] for memory, places, arrays in
                                  ((self._up, self._ins, inputs), (self._down, self._outs, outputs)))
        weakref.finalize(self, _wait_for, self.driver, self._slots).atexit = False

    def _array(self, memory: Any, place: Place) -> Any:
        start, _, shape, dtype = place
        return self.device.array(memory, View(0, shape, strides_of(shape), 0, dtype), start)

    def put(self, step: int, values: Sequence[Any]) -> None:
        """As on the CPU. The first batch of a launch waits until the launch before the last one has begun."""
        if step == 0:
            self.turn = 1 - self.turn
            self.driver.wait_for(self._slots[self.turn][1])
        for place, value in zip(self._ins[1:-1], values, strict=True):
            _rows(self._slots[self.turn][0], place)[step] = value

    def take(self) -> list[Thunk]:
        """The calls before a step."""
        return self.device.thunks(take(self.head, self.takes))

    def give(self, handle: int = 0) -> list[Thunk]:
        """The calls after a step; `handle`: of the condition of a loop."""
        return self.device.thunks(give(self.head, self.gives, self.done, handle))

    def send(self, steps: int) -> None:
        """Starts the copy of a launch's batches to the device."""
        pinned, sent = self._slots[self.turn]
        _rows(pinned, self._ins[0])[:] = 0, steps
        self.driver.copy(pinned, self._array(self._up, (0, 0, pinned.shape, "uint8")), self.device.main)()
        self.driver.record(sent, self.device.main)()

    def results(self, steps: int) -> Callable[[], list[tuple[Any, ...]]]:
        """As on the CPU; the copy is only started. The function waits for it."""
        free = self._results
        pinned, event = free.pop() if free else (self.driver.pinned(self._outs[-1][1]), self.driver.event())
        self.driver.copy(self._array(self._down, (0, 0, pinned.shape, "uint8")), pinned, self.device.main)()
        self.driver.record(event, self.device.main)()
        head, *places = self._outs[:-1]

        @cache
        def values() -> list[tuple[Any, ...]]:
            self.driver.wait_for(event)
            return [tuple(_rows(pinned, place)[i].copy() for place in places) for i in range(_rows(pinned, head)[0])]

        weakref.finalize(values, free.append, (pinned, event)).atexit = False
        return values


#: where an array lies: its first byte, the byte after it, its shape and type
Place = tuple[int, int, tuple[int, ...], str]


def _places(arrays: Sequence[Any], count: int) -> list[Place]:
    """Places for two numbers, for `count` rows of each array, and an empty one at the end."""
    found, end = [(0, 8, (2,), "int32")], START
    for array in arrays:
        shape, dtype = (count, *array.shape), str(array.dtype)
        begin, end = end, end + -(-prod(shape) * np.dtype(dtype).itemsize // START) * START
        found.append((begin, end, shape, dtype))
    return [*found, (end, end, (0,), "uint8")]


def _rows(pinned: Any, place: Place) -> Any:
    """An array in pinned memory."""
    begin, _, shape, dtype = place
    return pinned[begin : begin + prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)


def _wait_for(driver: Any, slots: Sequence[tuple[Any, Any]]) -> None:
    for _, sent in slots:
        driver.wait_for(sent)
